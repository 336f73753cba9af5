"""The output as a table: the columns of the input as they were and the answers, or records."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from localbatch.data.errors import ConfigError
from localbatch.formats.archives import packer, split_name
from localbatch.formats.delimited import TAB, CsvReader, CsvRecord, quoted
from localbatch.formats.outputs import write_bytes
from localbatch.formats.parquet import (
    BATCH_ROWS,
    CELL_FAULTS,
    ParquetReader,
    pyarrow,
    write_parquet,
)
from localbatch.formats.rows import open_csv
from localbatch.formats.sources import InputFormat, InputSource, suffix_format

_ERROR = "error"
_RECORD_COLUMNS = (
    ("id", "string"), ("text", "string"), ("finish_reason", "string"), ("prompt_tokens", "int64"),
    ("completion_tokens", "int64"), ("error", "string"),
)  # fmt: skip


class Answer(NamedTuple):
    """What is put beside a row: the answer, empty if there is none, and the error if there is."""

    row: int
    """Its place in the input, from 0."""
    text: str
    error: str | None = None


def table_format(target: str) -> InputFormat | None:
    """Return the kind of table that an output's name tells, `None` for lines of JSON.

    Raises `ConfigError` if it can't be written here.
    """
    found = suffix_format(target)
    _, compression = split_name(target)
    if compression is not None:
        packer(compression)
    if found is None or not found.is_table:
        return None
    if found is InputFormat.PARQUET:
        if compression is not None:
            name = target[: -len(Path(target).suffix)]
            raise ConfigError(f"{target}: Parquet files are packed inside; name it {name}")
        pyarrow()
    return found


def answer_names(columns: Sequence[str], answer_column: str, source: str) -> tuple[str, str]:
    """Return the names of the columns for answers and errors; `columns` are those of the input.

    Raises `ConfigError` if the input has them.
    """
    error_column = _ERROR if _ERROR not in columns else f"{answer_column}_{_ERROR}"
    for name in (answer_column, error_column):
        if name in columns:
            raise ConfigError(
                f"{source}: has a column {name!r} already; name another with --answer-column"
            )
    if answer_column == error_column:
        raise ConfigError(f"--answer-column: {_ERROR!r} is for errors; choose another name")
    return answer_column, error_column


def table_columns(source: InputSource) -> list[str]:
    """Return the columns of a table; nothing else can be read of `source` then."""
    if source.format is InputFormat.PARQUET:
        return ParquetReader(source.stream, source.name).columns
    return open_csv(source).header.cells


def write_records(target: str, records: Iterable[str]) -> int:
    """Write rows without the input: id, text and so on; returns their number."""
    names = [name for name, _ in _RECORD_COLUMNS]
    rows = _Counted(_record_cells(json.loads(text)) for text in records)
    if table_format(target) is InputFormat.PARQUET:
        library = pyarrow()
        types = [getattr(library, kind)() for _, kind in _RECORD_COLUMNS]
        schema = library.schema(list(zip(names, types, strict=True)))
        write_bytes(target, write_parquet(schema, _batches(rows, schema)))
    else:
        texts = (["" if cell is None else str(cell) for cell in row] for row in rows)
        write_bytes(target, _csv_parts(target, names, texts, "\n"))
    return rows.number


def write_table(
    target: str,
    answers: Iterable[Answer],
    source: InputSource,
    *,
    answer_column: str,
    has_errors: bool,
) -> int:
    """Write the rows of a table that have an answer or an error; returns their number.

    Their columns are as they were, and one or, with errors, two more come behind. In a CSV file
    made of a CSV file all bytes of the input stay.
    """
    counted = _Counted(answers)
    added = _Added(counted, answer_column, has_errors=has_errors)
    if source.format is InputFormat.PARQUET:
        parts = _from_parquet(target, ParquetReader(source.stream, source.name), added, source.name)
    else:
        parts = _from_csv(target, open_csv(source), added, source.name)
    write_bytes(target, parts)
    return counted.number


class _Counted(Iterable[Any]):
    """Counts what is taken."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._items, self.number = items, 0

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            self.number += 1
            yield item


class _Added:
    """The cells to add to each row."""

    def __init__(self, answers: Iterable[Answer], answer_column: str, *, has_errors: bool) -> None:
        self._answers, self._column, self._has_errors = iter(answers), answer_column, has_errors
        self._next = next(self._answers, None)

    def names(self, columns: Sequence[str], source: str) -> list[str]:
        """Return the names of the columns that are added."""
        return list(answer_names(columns, self._column, source))[: 1 + self._has_errors]

    def take(self, index: int) -> list[str | None] | None:
        """Return the cells for the row, `None` if it is not finished."""
        answer = self._next
        if answer is None or answer.row != index:
            return None
        self._next = next(self._answers, None)
        error = None if answer.error is None else _whole(answer.error)
        return [_whole(answer.text), error][: 1 + self._has_errors]


def _from_csv(target: str, reader: CsvReader, added: _Added, source: str) -> Iterator[bytes]:
    columns = reader.header.cells
    names = added.names(columns, source)
    target_format = table_format(target)
    has_tabs = reader.delimiter == TAB
    if has_tabs if target_format is InputFormat.TSV else target_format is InputFormat.CSV:
        return _same_csv(reader, added, names)
    rows = _csv_cells(reader, added)
    if target_format is InputFormat.PARQUET:
        library = pyarrow()
        schema = library.schema([(name, library.string()) for name in [*columns, *names]])
        return write_parquet(schema, _batches(map(_utf8_cells, rows), schema))
    head = reader.before if "\ufeff" in reader.before else ""
    texts = ([cell or "" for cell in row] for row in rows)
    return _csv_parts(target, [*columns, *names], texts, reader.header.end or "\n", head)


def _same_csv(reader: CsvReader, added: _Added, names: list[str]) -> Iterator[bytes]:
    """Yield the rows of the input with cells added, and its blank lines."""
    yield _bytes(reader.before + _extended(reader.header, list(names), reader))
    index = 0
    for record in reader:
        if not record.cells:
            yield _bytes(record.raw + record.end)
            continue
        cells = added.take(index)
        index += 1
        if cells is not None:
            yield _bytes(_extended(record, cells, reader))


def _extended(record: CsvRecord, cells: Sequence[str | None], reader: CsvReader) -> str:
    mark, always = reader.delimiter, record.is_quoted
    raw = record.raw
    if record.is_open:
        raw = raw + '"'  # otherwise what is added would be part of the cell
    raw += mark * (len(reader.header.cells) - len(record.cells))
    texts = [quoted(cell or "", mark, always=always) for cell in cells]
    return mark.join([raw, *texts]) + (record.end or ("\n" if record.is_open else ""))


def _csv_cells(reader: CsvReader, added: _Added) -> Iterator[list[str | None]]:
    """Yield the rows as cells, as many as there are columns."""
    width, index = len(reader.header.cells), 0
    for record in reader:
        if not record.cells:
            continue
        cells = added.take(index)
        index += 1
        if cells is not None:
            own = record.cells + [""] * (width - len(record.cells))
            yield [*own[: width - 1], reader.delimiter.join(own[width - 1 :]), *cells]


def _from_parquet(
    target: str, reader: ParquetReader, added: _Added, source: str
) -> Iterator[bytes]:
    names = added.names(reader.columns, source)
    if table_format(target) is not InputFormat.PARQUET:
        rows = (
            [*(_text_of(column[row]) for column in batch.columns), *(cell or "" for cell in cells)]
            for batch, chosen in _finished(reader, added)
            for row, cells in enumerate(chosen)
        )
        return _csv_parts(target, [*reader.columns, *names], rows, "\n")
    library = pyarrow()
    schema = reader.schema
    for name in names:
        schema = schema.append(library.field(name, library.string()))
    return write_parquet(schema, _wider(_finished(reader, added), schema))


def _finished(reader: ParquetReader, added: _Added) -> Iterator[tuple[Any, list[list[str | None]]]]:
    """Yield batches of finished rows, each with the cells to add."""
    index = 0
    for batch in reader.batches():
        taken = [added.take(index + row) for row in range(batch.num_rows)]
        index += batch.num_rows
        rows = [row for row, cells in enumerate(taken) if cells is not None]
        if rows:
            kept = batch if len(rows) == batch.num_rows else batch.take(pyarrow().array(rows))
            yield kept, [cells for cells in taken if cells is not None]


def _wider(batches: Iterable[tuple[Any, list[list[str | None]]]], schema: Any) -> Iterator[Any]:
    library = pyarrow()
    for batch, cells in batches:
        more = [library.array(column, library.string()) for column in zip(*cells, strict=True)]
        yield library.RecordBatch.from_arrays([*batch.columns, *more], schema=schema)


def _batches(rows: Iterable[Sequence[Any]], schema: Any) -> Iterator[Any]:
    """Yield record batches of rows of cells."""
    library, window = pyarrow(), []
    for row in rows:
        window.append(row)
        if len(window) == BATCH_ROWS:
            yield _batch(library, window, schema)
            window = []
    if window:
        yield _batch(library, window, schema)


def _batch(library: Any, rows: list[Sequence[Any]], schema: Any) -> Any:
    arrays = [
        library.array(column, kind)
        for column, kind in zip(zip(*rows, strict=True), schema.types, strict=True)
    ]
    return library.RecordBatch.from_arrays(arrays, schema=schema)


def _csv_parts(
    target: str, names: list[str], rows: Iterable[list[str]], line_end: str, head: str = ""
) -> Iterator[bytes]:
    mark = TAB if suffix_format(target) is InputFormat.TSV else ","
    yield _bytes(head)
    for row in itertools.chain([names], rows):
        is_blank = row == [""]  # without quotes it would be no row at all
        cells = [quoted(cell, mark, always=is_blank) for cell in row]
        yield _bytes(mark.join(cells) + line_end)


def text_of(row: dict[str, Any]) -> str | None:
    """Return the answer in a record, of several a JSON list of all, `None` if there is none."""
    if "choices" in row:
        return json.dumps([choice["text"] for choice in row["choices"]], ensure_ascii=False)
    text: str | None = row["text"]
    return text


def _record_cells(row: dict[str, Any]) -> list[Any]:
    usage, error = row["usage"], row.get("error")
    text = text_of(row)
    return [
        _whole(str(row["id"])), None if text is None else _whole(text), row["finish_reason"],
        usage["prompt_tokens"], usage["completion_tokens"],
        None if error is None else _whole(str(error["message"])),
    ]  # fmt: skip


def _text_of(scalar: Any) -> str:
    """Return a value of a Parquet file as a cell."""
    try:
        value = scalar.as_py()
    except CELL_FAULTS:  # nanoseconds, for which Python has no type
        return _whole(str(scalar.cast(pyarrow().string()).as_py()))
    if value is None:
        return ""
    if isinstance(value, (dict, list, bool)):
        value = json.dumps(value, ensure_ascii=False, default=str)
    return _whole(str(value))


def _utf8_cells(cells: list[str | None]) -> list[str | None]:
    """Replace bytes that are not UTF-8, for files that hold nothing else."""
    return [c and c.encode(errors="surrogateescape").decode(errors="replace") for c in cells]


def _whole(text: str) -> str:
    """Escape half surrogate pairs, which are no text."""
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogateescape")
