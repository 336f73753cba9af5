"""The files of a job: a summary for each document, and the index of all."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from localbatch.data.errors import OutputError
from localbatch.formats.outputs import write_lines
from localbatch.formats.records import json_line
from localbatch.jobs.journal_files import INDEX
from localbatch.summaries.work import DocumentResult

COLUMNS = (
    "name", "path", "title", "kind", "words", "tokens", "chunks", "levels", "summary", "output",
    "prompt_tokens", "completion_tokens", "seconds", "warnings", "error",
)  # fmt: skip


def summary_path(name: str) -> str:
    """Return where a document's summary is, below the output folder."""
    return f"{name}.md"


def write_summary(folder: Path, result: DocumentResult, *, with_sources: bool) -> None:
    """Write a document's summary; raises `OutputError` if that can't be done."""
    path = folder / summary_path(result.name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{path}: can't be written ({error.strerror})") from None
    write_lines(str(path), map(_encodable, _lines(result, with_sources)))


def write_index(folder: Path, results: Iterable[DocumentResult]) -> None:
    """Write `index.csv` and `index.jsonl`, a row for each document; raises `OutputError`."""
    rows = [_row(result) for result in results]
    write_lines(str(folder / f"{INDEX}.jsonl"), (json_line(row) for row in rows))
    flat = ({**row, "warnings": "; ".join(row["warnings"])} for row in rows)
    write_lines(str(folder / f"{INDEX}.csv"), _csv_lines(flat))


def remove_summary(folder: Path, name: str, digest: str) -> bool:
    """Remove a summary that was written by an earlier run, and folders that are empty then.

    One that is not what was written is left alone. Returns whether the summary was removed.
    """
    path = folder / summary_path(name)
    if digest_of(path) != digest:
        return False
    try:
        path.unlink()
    except OSError as error:
        raise OutputError(f"{path}: can't be removed ({error.strerror})") from None
    with contextlib.suppress(OSError):
        for parent in path.relative_to(folder).parents[:-1]:
            (folder / parent).rmdir()
    return True


def digest_of(path: Path) -> str | None:
    """Return what tells a summary from others, `None` if there is none."""
    try:
        return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
    except OSError:
        return None


def check_folder(path: str) -> None:
    """Raise `OutputError` if the output folder can't be made or written; makes nothing."""
    place = Path(path).absolute()
    while not os.path.lexists(place):
        place = place.parent
    reason = None
    if not place.is_dir():
        reason = f"{place} is no folder"
    elif not os.access(place, os.W_OK | os.X_OK):
        reason = f"no permission to write in {place}"
    if reason is not None:
        raise OutputError(f"{path}: can't be the output folder ({reason}); name another")


def make_folder(path: str) -> Path:
    """Make the output folder; raises `OutputError` if that can't be done."""
    check_folder(path)
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"{path}: can't be made ({error.strerror}); name another folder"
        ) from None
    return Path(path)


def _lines(result: DocumentResult, with_sources: bool) -> Iterator[str]:
    yield from (f"# {result.title}", "", result.summary)
    if result.warnings:
        yield from ("", f"> Check this summary: it {'; '.join(result.warnings)}.")
    if with_sources:
        yield from ("", f"## Sources: {' '.join(result.path.split())}", "")
        for source in result.sources:
            summary = " ".join(source.summary.split())
            span = f"from line {source.line:,}, characters {source.start:,} to {source.end:,}"
            yield f"- {span}: {summary}"


def _row(result: DocumentResult) -> dict[str, Any]:
    failed = result.error is not None
    values = {
        **{name: getattr(result, name) for name in COLUMNS if name != "output"},
        "output": None if failed else summary_path(result.name),
        "summary": None if failed else result.summary,
        "seconds": round(result.seconds, 3),
    }
    return {name: values[name] for name in COLUMNS}


def _csv_lines(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    yield ",".join(COLUMNS)
    for row in rows:
        line = io.StringIO()
        # Only what ends a line is sure to be put into quotes.
        csv.DictWriter(line, COLUMNS, lineterminator="\r\n").writerow(row)
        yield _encodable(line.getvalue().removesuffix("\r\n"))


def _encodable(line: str) -> str:
    """Return a line with the bytes of file names that are no UTF-8 written as in `index.jsonl`."""
    return line.encode("utf-8", "backslashreplace").decode()
