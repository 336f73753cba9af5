"""Runs a job; with a file as the output it goes on where an earlier run stopped."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterable

from localbatch.data.errors import ConfigError
from localbatch.data.request import Completion, Request
from localbatch.engine.llm import LLM
from localbatch.formats.inputs import open_input, read_requests
from localbatch.formats.openai_batch import BatchFileError
from localbatch.formats.outputs import check_target, is_file_target
from localbatch.formats.records import OutputStyle
from localbatch.formats.sources import can_be_read_again
from localbatch.formats.tables_out import table_format
from localbatch.jobs.job import (
    JobConfig,
    JobResult,
    announce,
    check_model,
    completions,
    count,
    counted,
    refuse_overwriting_input,
    stream_job,
)
from localbatch.jobs.journal import Journal, RowKind
from localbatch.jobs.journal_files import (
    JobLock,
    find_journal,
    journal_path,
    refuse_journal_name,
    remove_journal,
)
from localbatch.jobs.manifest import make_manifest
from localbatch.jobs.progress import Progress
from localbatch.jobs.results import (
    batch_facts,
    check_results,
    job_style,
    note_end,
    write_refusal,
    write_results,
)
from localbatch.jobs.resume import Resume
from localbatch.jobs.source import JobSource, open_source
from localbatch.jobs.tables import check_columns, check_table, refuse_output_in_input, table_facts
from localbatch.models.catalog import resolve_model


def run_job(config: JobConfig) -> JobResult:
    """Run a job; returns how it ended.

    With a file as the output, finished rows are kept in a journal beside it, those that it has from
    an earlier run are not computed again, and the output is made from it at the end. Otherwise each
    record is written at its turn.

    Output and journal are opened before the model is loaded, so that a mistake shows at once.
    Ctrl-C, a dead worker and a full disk end the job early, with every finished row in the output.
    Raises `LocalbatchError` if it can't start.
    """
    refuse_overwriting_input(config)
    refuse_output_in_input(config.output, config.source)
    check_table(config.output, config.style, config.answer_column)
    check_columns(config.output, config.source, config.answer_column)
    is_file = is_file_target(config.output)
    if is_file:
        refuse_journal_name(config.output)
        check_target(config.output)
    elif config.fresh or config.retry_failed:
        raise ConfigError("--fresh and --retry-failed go with a file as the output (-o)")
    asks_batch = config.style is OutputStyle.OPENAI
    try:
        with open_source(
            config.source, is_batch=asks_batch, has_batches=not config.inputs.is_free_form
        ) as source:
            return _keep_job(config, source) if is_file else stream_job(config, source)
    except BatchFileError as error:
        has_answers = is_file and journal_path(config.output).exists()
        if is_file and not has_answers and (asks_batch or config.style is None):
            write_refusal(config.output, config.source, config.model, error)
        raise


def export_job(
    job: str, target: str, style: OutputStyle | None = None, answer_column: str | None = None
) -> int:
    """Write the output of a job anew from its journal; returns the number of rows."""
    refuse_journal_name(target)
    with Journal(find_journal(job), read_only=True) as journal:
        source = str(journal.manifest.get("about", {}).get("input", ""))
        with contextlib.suppress(OSError):
            if target != "-" and os.path.samefile(source, target):
                raise ConfigError(f"{target}: is the input of this job; name another file")
        check_table(target, style, answer_column)
        return write_results(journal, target, style, answer_column)


def _keep_job(config: JobConfig, source: JobSource) -> JobResult:
    """Run a job whose finished rows are kept in a journal."""
    style = job_style(config.style, is_batch=source.batch is not None)
    if style is OutputStyle.OPENAI and table_format(config.output) is None:
        check_results(config.output, config.source)
    path = journal_path(config.output)
    with JobLock(path):
        if config.fresh:
            remove_journal(path)
        num_rows = -1
        try:
            with Journal(path) as journal:
                try:
                    result = _run(config, source, journal)
                finally:
                    num_rows = journal.counts().total
                if num_rows or not (result.interrupted or result.error):
                    note_end(journal)
                    write_results(journal, config.output, config.style, config.answer_column)
        finally:
            if num_rows == 0:
                remove_journal(path)
    return result


def _run(config: JobConfig, opened: JobSource, journal: Journal) -> JobResult:
    result, source = JobResult(), opened.input
    with contextlib.ExitStack() as stack:
        resume = _resume(config, journal)
        table = table_facts(config.source, config.answer_column)
        journal.update_manifest({"batch": batch_facts(opened.batch), "table": table})
        if opened.batch is not None:
            journal.update_manifest({"rows": opened.batch.rows})
        progress = stack.enter_context(Progress(quiet=config.quiet))
        rows = read_requests(source, config.params, config.inputs)

        def note_total(number: int) -> None:
            journal.update_manifest({"rows": number})
            progress.set_total(number - resume.num_finished)

        unfinished = resume.unfinished(counted(rows, note_total))
        with result.timed():
            try:
                _compute(config, unfinished, journal, resume, result, progress, source.name)
            finally:
                journal.flush()
                _count_durable(journal, result, progress, source.name)
        result.resumed = resume.num_finished
        failed = journal.counts().failed + journal.counts().unreadable
        result.resumed_failed = max(0, failed - result.failed)
    return result


def _compute(
    config: JobConfig,
    unfinished: Iterable[Request | Completion],
    journal: Journal,
    resume: Resume,
    result: JobResult,
    progress: Progress,
    source: str,
) -> None:
    """Compute what is left; without anything left the model is not even loaded."""
    rest = iter(unfinished)
    first = next(rest, None)
    if first is None:
        return
    with LLM(config.model, **config.engine) as llm:
        check_model(config, llm, progress)
        announce(config, llm, progress, lambda index: journal.find(index) is not None)
        try:
            for completion in completions(llm, itertools.chain([first], rest)):
                journal.add(resume.entry(completion))
                _count_durable(journal, result, progress, source)
        finally:
            result.numerics = llm.stats.numerics


def _count_durable(journal: Journal, result: JobResult, progress: Progress, source: str) -> None:
    """Count the rows that can't be lost any more."""
    for completion in journal.take_durable():
        count(completion, result, progress, source)


def _resume(config: JobConfig, journal: Journal) -> Resume:
    """Compare the job with its journal; drop the rows that are to be taken again."""
    model = config.model
    if config.engine.get("backend", "llama") == "llama":
        model = str(resolve_model(model))
    manifest = make_manifest(
        model, config.source, config.params, inputs=config.inputs, engine=config.engine
    )
    resume = Resume(journal, manifest, config.output)
    journal.forget([RowKind.UNREADABLE, *([RowKind.FAILED] if config.retry_failed else [])])
    if journal.counts().total and not resume.has_same_input and can_be_read_again(config.source):
        with open_input(config.source) as source:
            rows = read_requests(source, config.params, config.inputs)
            resume.check(rows)
    resume.accept()
    return resume
