"""Writes the output of a job from its journal, in the form that is asked for."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from localbatch.data.errors import ConfigError
from localbatch.formats.openai_batch import CHAT, COMPLETIONS, BatchFile, BatchFileError
from localbatch.formats.openai_output import (
    BatchCounts,
    BatchFiles,
    BatchJob,
    batch_object,
    failed_batch_object,
    is_failed,
    openai_line,
    vllm_line,
)
from localbatch.formats.outputs import check_target, is_file_target, write_lines
from localbatch.formats.records import OutputStyle, json_line
from localbatch.formats.tables_out import table_format
from localbatch.jobs.journal import Journal
from localbatch.jobs.tables import write_job_table


class ResultFiles(NamedTuple):
    """Where the files of OpenAI's form are."""

    answers: str
    errors: str
    batch: str


def result_files(output: str) -> ResultFiles:
    """Return the files that belong to an output: `a.jsonl` has `a.errors.jsonl` beside it."""
    stem = re.sub(r"(?<=[^/\\])\.(jsonl|ndjson|json)$", "", output, flags=re.IGNORECASE)
    return ResultFiles(output, f"{stem}.errors.jsonl", f"{stem}.batch.json")


def check_results(output: str, source: str) -> None:
    """Raise `LocalbatchError` if a file of OpenAI's form can't be written, or is the input."""
    for path in result_files(output)[1:]:
        with contextlib.suppress(OSError):
            if source != "-" and os.path.samefile(source, path):
                raise ConfigError(f"{path}: is the input; name another file for the answers")
        check_target(path)


def job_style(style: OutputStyle | None, *, is_batch: bool) -> OutputStyle:
    """Return the form of an output: if none is asked for, that of the input."""
    return style or (OutputStyle.OPENAI if is_batch else OutputStyle.NATIVE)


def batch_job(
    model: str, batch: Mapping[str, Any], *, chat: bool, created: float, same: object = None
) -> BatchJob:
    """Return what the lines of an output have in common.

    `model` is the path of the model's file, `batch` what `batch_facts` returns, `chat` whether
    prompts are put into the chat template, `same` what tells the job from others of its time.
    """
    text = json.dumps([created, same], sort_keys=True, default=str)
    return BatchJob(
        id=hashlib.blake2b(text.encode(), digest_size=16).hexdigest(),
        created=int(created),
        endpoint=batch.get("endpoint") or (CHAT if chat else COMPLETIONS),
        model=batch.get("model") or Path(model).name,
    )


def batch_facts(batch: BatchFile | None) -> dict[str, Any]:
    """Return what a manifest holds of a batch; nothing if the input is none."""
    return {} if batch is None else {"endpoint": batch.endpoint, "model": batch.model}


def note_end(journal: Journal) -> None:
    """Note when the last row of a job ended; a later run that changes nothing keeps the time."""
    manifest, counts = journal.manifest, journal.counts()
    is_new = manifest.get("completed", {}).get("counts") != list(counts)
    if is_new and counts.total >= manifest.get("rows", counts.total + 1):
        journal.update_manifest({"completed": {"at": time.time(), "counts": list(counts)}})


def write_results(
    journal: Journal, target: str, style: OutputStyle | None, answer_column: str | None = None
) -> int:
    """Write the output of a job; returns the number of its rows.

    The target's suffix may ask for a table; `answer_column` is the one that its answers are in.

    In OpenAI's form a file has two beside it: the rows that failed, if any, and the batch object.
    Elsewhere all rows go into one stream. Each file is replaced whole.
    """
    if table_format(target) is not None:
        return write_job_table(journal, target, answer_column)
    manifest = journal.manifest
    style = job_style(style, is_batch=bool(manifest.get("batch")))
    if style is OutputStyle.NATIVE:
        return write_lines(target, journal.records())
    job = _job_of(manifest)
    if style is OutputStyle.VLLM:
        return write_lines(target, _lines(journal, partial(vllm_line, job=job)))
    if not is_file_target(target):
        return write_lines(target, _lines(journal, partial(openai_line, job=job)))
    return _write_batch(journal, result_files(target), job)


def write_refusal(output: str, source: str, model: str, error: BatchFileError) -> None:
    """Write the batch object of a file that was refused; `source` is its path."""
    check_results(output, source)
    facts = {"endpoint": error.url, "model": error.model}
    job = batch_job(model, facts, chat=True, created=time.time(), same=source)
    batch = failed_batch_object(job, os.path.basename(source), error.errors, int(time.time()))
    _write_object(result_files(output).batch, batch)


def _job_of(manifest: Mapping[str, Any]) -> BatchJob:
    about, same = manifest.get("about", {}), manifest.get("same", {})
    return batch_job(
        str(about.get("model", "")), manifest.get("batch") or {},
        chat=not same.get("--raw"), created=about.get("created", 0.0), same=same,
    )  # fmt: skip


def _lines(
    journal: Journal,
    form: Callable[[dict[str, Any]], dict[str, Any]],
    *,
    failed: bool | None = None,
) -> Iterator[str]:
    """Yield the rows in another form; with `failed`, those that failed, or those that did not."""
    for text in journal.records():
        row = json.loads(text)
        if failed is None or failed is is_failed(row):
            yield json_line(form(row))


def _write_batch(journal: Journal, files: ResultFiles, job: BatchJob) -> int:
    """Write the three files, the batch object at the end."""
    counts, manifest = BatchCounts(), journal.manifest
    source = str(manifest.get("about", {}).get("input", ""))
    check_results(files.answers, source)

    def counted(row: dict[str, Any]) -> dict[str, Any]:
        counts.add(row)
        return openai_line(row, job)

    write_lines(files.answers, _lines(journal, counted, failed=False))
    failures = _lines(journal, counted, failed=True)
    if (first := next(failures, None)) is not None:
        write_lines(files.errors, itertools.chain([first], failures))
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(files.errors)
    total = max(manifest.get("rows", 0), counts.completed + counts.failed)
    end = manifest.get("completed", {})
    is_complete = end.get("counts") == list(journal.counts())
    names = BatchFiles(*map(os.path.basename, (source, files.answers, files.errors)))
    batch = batch_object(job, names, counts, total, int(end["at"]) if is_complete else None)
    _write_object(files.batch, batch)
    return counts.completed + counts.failed


def _write_object(path: str, batch: dict[str, Any]) -> None:
    write_lines(path, [json.dumps(batch, indent=2)])
