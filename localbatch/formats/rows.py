"""The rows of tables and folders, each as values under names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from localbatch.data.errors import InputError
from localbatch.data.request import RowId
from localbatch.formats.columns import RowForm
from localbatch.formats.delimited import CsvReader, CsvRecord, bad_byte
from localbatch.formats.folder import Folder, read_files
from localbatch.formats.parquet import ParquetReader
from localbatch.formats.sources import InputFormat, InputSource

FOLDER_COLUMNS = ("text", "path", "name")
"""What a template has of a file: its text, its path from the folder, its name."""
LINE_COLUMNS = ("line",)
"""What a template has of a line of text."""


@dataclass(frozen=True)
class Row:
    """A row of an input."""

    number: int
    """From 1, of the row or of the line; the id of a row that has none of its own."""
    line: int | None
    values: Mapping[str, Any] = field(default_factory=dict)
    error: InputError | None = None
    """Why it can't be used."""
    path: RowId | None = None
    """In a folder."""


def folder_rows(folder: Folder) -> Iterator[Row]:
    """Yield a row for each file."""
    for number, file in enumerate(read_files(folder), 1):
        name = file.path.rpartition("/")[2]
        values = {"text": file.text, "path": file.path, "name": name}
        yield Row(number, None, values, file.error, file.path)


def open_csv(source: InputSource) -> CsvReader:
    """Return the reader of a CSV or TSV file; raises `ConfigError` if it has no header."""
    return CsvReader(source.stream, source.name, has_tabs=source.format is InputFormat.TSV)


def csv_rows(reader: CsvReader) -> Iterator[Row]:
    """Yield a row for each that is not blank."""
    columns, number = reader.header.cells, 0
    for record in reader:
        if not record.cells:
            continue
        number += 1
        values = dict(zip(columns, record.cells, strict=False))
        yield Row(number, record.line, values, _csv_error(record, columns))


def parquet_rows(reader: ParquetReader, form: RowForm) -> Iterator[Row]:
    """Yield each row, with the values that `form` needs; its line is its number."""
    for number, (values, error) in enumerate(reader.rows(form.needed), 1):
        yield Row(number, number, values, error)


def _csv_error(record: CsvRecord, columns: list[str]) -> InputError | None:
    if record.is_open:
        return InputError("has a quote that is never closed; all that follows it is this row")
    if record.has_stray:
        last = record.line + record.raw.count("\n")
        lines = f"; lines {record.line} to {last} are this row" if last > record.line else ""
        return InputError(
            f"has text behind the closing quote of a cell; a quote in a cell must be doubled{lines}"
        )
    have, want = len(record.cells), len(columns)
    if have != want:
        cells = "cell" if have == 1 else "cells"
        return InputError(
            f"has {have} {cells}, the header has {want}; is a delimiter in a cell without quotes?"
        )
    for name, cell in zip(columns, record.cells, strict=True):
        if (bad := bad_byte(cell)) is not None:
            return InputError(f"is not UTF-8: byte 0x{bad:02x}", field=name)
    return None
