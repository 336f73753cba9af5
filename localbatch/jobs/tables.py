"""The output of a job as a table; the columns of a table are read from the input again."""

from __future__ import annotations

import fnmatch
import json
import os
from collections.abc import Iterator
from typing import Any

from localbatch.data.errors import ConfigError, OutputError
from localbatch.formats.folder import is_folder
from localbatch.formats.inputs import open_input
from localbatch.formats.outputs import is_file_target
from localbatch.formats.records import OutputStyle
from localbatch.formats.sources import can_be_read_again, suffix_format
from localbatch.formats.tables_out import (
    Answer,
    answer_names,
    table_columns,
    table_format,
    text_of,
    write_records,
    write_table,
)
from localbatch.jobs.journal import Journal
from localbatch.jobs.manifest import input_sha256

ANSWER_COLUMN = "answer"
_OTHER_TABLES = (".xlsx", ".xls", ".ods", ".numbers")


def check_table(output: str, style: OutputStyle | None, answer_column: str | None) -> None:
    """Raise `ConfigError` if an output can't be what its name tells."""
    suffix = os.path.splitext(output)[1].lower()
    if suffix in _OTHER_TABLES:
        raise ConfigError(f"{output}: {suffix} can't be written; name it .csv, which opens there")
    if table_format(output) is None:
        if answer_column is not None:
            raise ConfigError(f"--answer-column: {output} is no table; name it .csv or .parquet")
        return
    if style not in (None, OutputStyle.NATIVE):
        raise ConfigError(f"--style {style.value} goes with lines of JSON; {output} is a table")
    if not is_file_target(output):
        raise ConfigError(f"{output}: is no file; a table is written when the job ends")


def check_columns(output: str, source: str, answer_column: str | None) -> None:
    """Raise `ConfigError` if an output that is a table can't have the columns of its input."""
    if table_format(output) is None or not _is_table(source):
        return
    if not can_be_read_again(source) and os.path.exists(source):
        raise ConfigError(f"{source}: is read once only, so that {output} can't have its columns")
    with open_input(source) as opened:
        answer_names(table_columns(opened), answer_column or ANSWER_COLUMN, source)


def refuse_output_in_input(output: str, source: str) -> None:
    """Raise `ConfigError` if an output would be among the files of a folder that is the input."""
    if output == "-" or source == "-" or not is_folder(source):
        return
    place, folder = os.path.realpath(output), os.path.realpath(source)
    if place.startswith(folder + os.sep) or fnmatch.fnmatch(os.path.normpath(output), source):
        raise ConfigError(f"{output}: would be a row of {source}; choose another place for it")


def table_facts(source: str, answer_column: str | None) -> dict[str, Any]:
    """Return what a manifest holds for tables to be made of a job."""
    return {"input": os.path.abspath(source), "answer_column": answer_column or ANSWER_COLUMN}


def write_job_table(journal: Journal, target: str, answer_column: str | None) -> int:
    """Write the finished rows of a job as a table; returns their number.

    If the input was a table, its columns are in it. Raises `LocalbatchError` if the input is not
    what it was.
    """
    manifest, counts = journal.manifest, journal.counts()
    facts = manifest.get("table", {})
    source = str(facts.get("input", ""))
    if not _is_table(str(manifest.get("about", {}).get("input", ""))):
        return write_records(target, journal.records())
    known = manifest.get("about", {}).get("input_sha256")
    if known is None or known != input_sha256(source):
        raise OutputError(
            f"{source}: is gone or was changed since the job began, so its columns can't be had; "
            f"`localbatch export {_job_of(journal)} -o x.jsonl` writes the answers without them"
        )
    with open_input(source) as opened:
        return write_table(
            target, _answers(journal), opened,
            answer_column=answer_column or str(facts.get("answer_column", ANSWER_COLUMN)),
            has_errors=counts.failed + counts.unreadable > 0,
        )  # fmt: skip


def _answers(journal: Journal) -> Iterator[Answer]:
    for finished in journal.rows():
        row = json.loads(finished.record)
        error = row.get("error")
        yield Answer(
            finished.number, text_of(row) or "", None if error is None else str(error["message"])
        )


def _is_table(source: str) -> bool:
    found = None if source == "-" or is_folder(source) else suffix_format(source)
    return found is not None and found.is_table


def _job_of(journal: Journal) -> str:
    return str(journal.path).removesuffix(".journal")
