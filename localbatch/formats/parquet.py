"""Parquet files, read batch by batch; the only module that imports pyarrow."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, BinaryIO

from localbatch.data.errors import ConfigError, InputError

BATCH_ROWS = 1024

CELL_FAULTS = (ArithmeticError, LookupError, TypeError, ValueError, OSError, ImportError)
"""What pyarrow raises for a value that Python has no type for, as a year of 20,000."""


def pyarrow() -> Any:
    """Return the library, with `parquet`; raises `ConfigError` if it is not installed."""
    try:
        import pyarrow as library
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(
            "Parquet files need a further library: pip install 'localbatch[parquet]'"
        ) from None
    return library


class ParquetReader:
    """An open file; memory holds a batch of rows of a row group.

    Raises `ConfigError` if it is no Parquet file, `InputError` when reading fails later.
    """

    def __init__(self, stream: BinaryIO, name: str) -> None:
        self._name, self._library = name, pyarrow()
        try:
            self._file = self._library.parquet.ParquetFile(stream)
        except (self._library.ArrowException, OSError) as error:
            raise ConfigError(
                f"{name}: is no Parquet file, or is damaged ({_reason(error)})"
            ) from None
        self.schema = self._file.schema_arrow
        self.columns: list[str] = list(self.schema.names)

    def batches(self, columns: Sequence[str] | None = None) -> Iterator[Any]:
        """Yield record batches with some of the columns; all if none are named."""
        number = 0
        try:
            for batch in self._file.iter_batches(BATCH_ROWS, columns=columns):
                yield batch
                number += batch.num_rows
        except (self._library.ArrowException, OSError) as error:
            message = f"{self._name}: can't be read after row {number} ({_reason(error)})"
            raise InputError(message, line=number + 1) from None

    def rows(self, columns: Sequence[str]) -> Iterator[tuple[dict[str, Any], InputError | None]]:
        """Yield each row's values of some columns, and what is wrong with one of them."""
        if not columns:
            columns = self.columns[:1]  # a batch without columns has no number of rows
        for batch in self.batches(columns):
            places = [(name, batch.schema.names.index(name)) for name in columns]
            for row in range(batch.num_rows):
                yield _values(batch, places, row)


def write_parquet(schema: Any, batches: Iterable[Any]) -> Iterator[bytes]:
    """Yield the bytes of a Parquet file of these record batches."""
    sink = _Sink()
    writer = pyarrow().parquet.ParquetWriter(sink, schema)
    try:
        for batch in batches:
            writer.write_batch(batch)
            yield sink.take()
    finally:
        writer.close()
    yield sink.take()


def _values(
    batch: Any, places: list[tuple[str, int]], row: int
) -> tuple[dict[str, Any], InputError | None]:
    values: dict[str, Any] = {}
    error = None
    for name, place in places:
        try:
            values[name] = batch.column(place)[row].as_py()
        except CELL_FAULTS as fault:
            error = error or InputError(f"can't be read ({_reason(fault)})", field=name)
    return values, error


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


class _Sink(io.RawIOBase):
    """Keeps what is written until it is taken."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._length = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        part = bytes(data)
        self._parts.append(part)
        self._length += len(part)
        return len(part)

    def tell(self) -> int:
        return self._length

    def take(self) -> bytes:
        taken, self._parts = b"".join(self._parts), []
        return taken
