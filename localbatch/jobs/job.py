"""A job: rows of a file through a model into a file."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from localbatch.data.errors import ConfigError, LocalbatchError
from localbatch.data.request import Completion, Request
from localbatch.data.sampling_params import SamplingParams
from localbatch.engine.backend import Numerics
from localbatch.engine.llm import LLM
from localbatch.jobs.inputs import open_input, read_requests
from localbatch.jobs.outputs import OrderedWriter, OutputClosedError
from localbatch.jobs.progress import Progress


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
    chat: bool = True
    system: str | None = None
    quiet: bool = False
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of `LLM`."""


@dataclass
class JobResult:
    """How a job ended."""

    rows: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
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


def run_job(config: JobConfig) -> JobResult:
    """Run a job; returns how it ended.

    The output is opened before the model is loaded, so that a mistake shows at once. Ctrl-C, a dead
    worker and a full disk end the job early, with every finished row in the output. Raises
    `LocalbatchError` if it can't start.
    """
    result = JobResult()
    _refuse_overwriting_input(config)
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(open_input(config.source))
        writer = stack.enter_context(OrderedWriter(config.output))
        llm = stack.enter_context(LLM(config.model, **config.engine))
        progress = stack.enter_context(Progress(quiet=config.quiet))
        rows = read_requests(source, config.params, chat=config.chat, system=config.system)
        started = time.perf_counter()
        try:
            for completion in llm.run(_counted(rows, progress)):
                assert isinstance(completion, Completion)
                writer.write(completion)
                result.count(completion)
                progress.update(completion)
                if completion.failed:
                    progress.note(_failure_line(source.name, completion))
        except KeyboardInterrupt:
            result.interrupted = True
        except LocalbatchError as error:
            if not result.rows and not isinstance(error, OutputClosedError):
                raise
            result.error = error
        result.wall_s = time.perf_counter() - started
        result.numerics = llm.stats.numerics
        writer.close(complete=not result.interrupted and result.error is None)
    return result


def _refuse_overwriting_input(config: JobConfig) -> None:
    with contextlib.suppress(OSError):
        if "-" not in (config.source, config.output) and os.path.samefile(
            config.source, config.output
        ):
            raise ConfigError(f"{config.output}: is the input; name another file for the answers")


def _counted(
    rows: Iterable[Request | Completion], progress: Progress
) -> Iterator[Request | Completion]:
    """Tell the progress bar the number of rows as soon as the last one is read."""
    count = 0
    for row in rows:
        count += 1
        yield row
    progress.set_total(count)


def _failure_line(source: str, completion: Completion) -> str:
    where = f"{source}:{completion.line}" if completion.line is not None else source
    return f"{where}: {completion.error}"
