"""A job: rows of a file through a model into a file."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from localbatch.data.errors import ConfigError, LocalbatchError
from localbatch.data.request import Choice, Completion, FinishReason, Later, Request
from localbatch.data.sampling_params import SamplingParams
from localbatch.engine.backend import Numerics
from localbatch.engine.llm import LLM
from localbatch.formats.inputs import InputOptions, read_requests
from localbatch.formats.openai_output import openai_line, vllm_line
from localbatch.formats.outputs import OrderedWriter, OutputClosedError
from localbatch.formats.records import OutputStyle
from localbatch.jobs.preflight import MOST_BYTES, look_through
from localbatch.jobs.progress import Progress
from localbatch.jobs.results import batch_facts, batch_job, job_style
from localbatch.jobs.source import JobSource, open_source


@dataclass(frozen=True)
class JobConfig:
    """What to run."""

    model: str
    source: str
    """Input path, or `-`."""
    output: str
    """Output path, or `-`."""
    params: SamplingParams = field(default_factory=SamplingParams)
    """For rows that do not say otherwise."""
    inputs: InputOptions = field(default_factory=InputOptions)
    style: OutputStyle | None = None
    """Left out: that of the input."""
    answer_column: str | None = None
    """Of a table; left out: `answer`."""
    quiet: bool = False
    fresh: bool = False
    """Forget what an earlier run of this output finished."""
    retry_failed: bool = False
    """Take rows again that failed in an earlier run."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of `LLM`."""


@dataclass
class JobResult:
    """How a job ended."""

    rows: int = 0
    """Finished by this run."""
    failed: int = 0
    resumed: int = 0
    """Finished by earlier runs."""
    resumed_failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    ended_in_reasoning: int = 0
    """Answers that their length cut off before the reasoning had ended."""
    wall_s: float = 0.0
    """From the first row's submission to the last one's end; loading the model is not in it."""
    interrupted: bool = False
    numerics: Numerics | None = None
    """What a row's logits depended on; `None` if none was computed."""
    error: LocalbatchError | None = None
    """What ended the job early, if something did; finished rows are in the output all the same."""

    def count(self, completion: Completion) -> None:
        """Add a finished row."""
        self.rows += 1
        self.failed += completion.failed
        self.prompt_tokens += completion.usage.prompt_tokens
        self.completion_tokens += completion.usage.completion_tokens
        self.ended_in_reasoning += sum(map(_is_cut_in_reasoning, completion.choices))

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Take the time of a block, and note what ends it early."""
        started = time.perf_counter()
        try:
            yield
        except KeyboardInterrupt:
            self.interrupted = True
        except LocalbatchError as error:
            if not self.rows and not isinstance(error, OutputClosedError):
                raise
            self.error = error
        finally:
            self.wall_s = time.perf_counter() - started


def _is_cut_in_reasoning(choice: Choice) -> bool:
    cut = choice.finish_reason is FinishReason.LENGTH
    return cut and choice.reasoning is not None and not choice.text


def stream_job(config: JobConfig, opened: JobSource) -> JobResult:
    """Write each record at its turn, to standard output, a pipe or a device."""
    result, source = JobResult(), opened.input
    with contextlib.ExitStack() as stack:
        writer = stack.enter_context(OrderedWriter(config.output, _form(config, opened)))
        llm = stack.enter_context(LLM(config.model, **config.engine))
        progress = stack.enter_context(Progress(quiet=config.quiet))
        check_model(config, llm, progress)
        announce(config, llm, progress)
        rows = read_requests(source, config.params, config.inputs)
        with result.timed():
            for completion in completions(llm, counted(rows, progress.set_total)):
                writer.write(completion)
                count(completion, result, progress, source.name)
        result.numerics = llm.stats.numerics
        writer.close(complete=not result.interrupted and result.error is None)
    return result


def _form(
    config: JobConfig, opened: JobSource
) -> Callable[[dict[str, Any]], dict[str, Any]] | None:
    """Return what makes a line of the output of a record, if it is another."""
    style = job_style(config.style, is_batch=opened.batch is not None)
    if style is OutputStyle.NATIVE:
        return None
    job = batch_job(
        config.model, batch_facts(opened.batch), chat=config.inputs.chat, created=time.time()
    )
    return partial(openai_line if style is OutputStyle.OPENAI else vllm_line, job=job)


def announce(
    config: JobConfig,
    llm: LLM,
    progress: Progress,
    is_finished: Callable[[int], bool] = lambda index: False,
) -> None:
    """Say what the rows that are to be computed come to; of large inputs `--dry-run` does.

    They are read twice, so it is not for pipes.
    """
    path = Path(config.source)
    if config.quiet or not path.is_file() or path.stat().st_size > MOST_BYTES:
        return
    with open_source(config.source, has_batches=False) as source:
        rows = read_requests(source.input, config.params, config.inputs)
        found = look_through(llm, (row for row in rows if not is_finished(row.index)))
    llm.prepare(found.first)
    plan, summary = llm.stats.plan, found.summary()
    if plan is not None and plan.expected_s is not None:
        summary += f"; about {plan.expected_s * found.windows:,.0f} s"
    progress.note(summary)


def completions(llm: LLM, rows: Iterable[Request | Completion | Later]) -> Iterator[Completion]:
    """Yield each row as it ends."""
    with contextlib.closing(llm.run(rows)) as events:
        for event in events:
            assert isinstance(event, Completion)
            yield event


def check_model(config: JobConfig, llm: LLM, progress: Progress) -> None:
    """Raise `ConfigError` if settings don't fit the model; say so if they may not be meant."""
    llm.check_template_args(config.inputs.template_args)
    ctx, trained = llm.config.ctx, llm.card.max_ctx
    if ctx is not None and ctx > trained:
        progress.note(f"note: --ctx {ctx:,} is more than the {trained:,} tokens of the model")


def count(completion: Completion, result: JobResult, progress: Progress, source: str) -> None:
    """Add a finished row to the figures, and say so if it failed."""
    result.count(completion)
    progress.update(completion)
    if completion.failed:
        where = f"{source}:{completion.line}" if completion.line is not None else source
        progress.note(f"{where}: {completion.error}")


def counted(
    rows: Iterable[Request | Completion], at_end: Callable[[int], object]
) -> Iterator[Request | Completion]:
    """Pass rows on, and tell their number as soon as the last one is read."""
    number = 0
    for row in rows:
        number += 1
        yield row
    at_end(number)


def refuse_overwriting_input(config: JobConfig) -> None:
    """Raise `ConfigError` if input and output are one file."""
    with contextlib.suppress(OSError):
        if "-" not in (config.source, config.output) and os.path.samefile(
            config.source, config.output
        ):
            raise ConfigError(f"{config.output}: is the input; name another file for the answers")
