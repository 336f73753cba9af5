"""CSV and TSV, read so that a row can be written again with the very same bytes.

Cells are those of Python's `csv` with the dialect `excel`, for any of the delimiters.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO, cast

from localbatch.data.errors import ConfigError, InputError
from localbatch.formats.lines import MAX_LINE_BYTES

TAB = "\t"
_DELIMITERS = ",;\t|"
_MOST_HEADER_LINES = 100
_QUOTED = re.compile(r'"(?:[^"]|"")*(?:"|$)')


@dataclass
class CsvRecord:
    """A row of cells; a blank line has none. Bytes that are not UTF-8 are lone surrogates."""

    line: int
    """Of its beginning, from 1."""
    cells: list[str] = field(default_factory=list)
    raw: str = ""
    """As it is in the file, without `end`."""
    end: str = ""
    """Its line end; the last row may have none."""
    quoted: int = 0
    """Cells in quotes."""
    is_open: bool = False
    """The file ends within quotes."""
    has_stray: bool = False
    """Something stands behind the closing quote of a cell."""

    @property
    def is_quoted(self) -> bool:
        """Whether all cells are in quotes."""
        return bool(self.cells) and self.quoted == len(self.cells)


class CsvReader:
    """Reads the header at once and the rows as they are asked for; memory holds one.

    Raises `ConfigError` if there is no header, and `InputError` when reading fails, or if a row is
    longer than 16 MiB, which is what a quote too many makes of the rest of a file.
    """

    def __init__(self, stream: BinaryIO, name: str, *, has_tabs: bool = False) -> None:
        self._name = name
        self._text = io.TextIOWrapper(
            cast(BinaryIO, _Lent(stream)), encoding="utf-8", errors="surrogateescape", newline=""
        )
        self._line = 0
        self._ahead: list[tuple[int, str]] = []
        self.before = ""
        """What stands before the header: a byte order mark, blank lines."""
        first = self._next_line()
        while first and not first.strip("\ufeff\r\n"):
            self.before += first
            first = self._next_line()
        self.before += "\ufeff" if first.startswith("\ufeff") else ""
        first = first.removeprefix("\ufeff")
        if not first:
            raise ConfigError(f"{name}: is empty; its first line must name the columns")
        if first.startswith(("\udcff\udcfe", "\udcfe\udcff")):
            raise ConfigError(f"{name}: is UTF-16; save it as UTF-8")
        self.delimiter = TAB if has_tabs else _delimiter(first + self._look_ahead(first))
        self.header = self._record(first)
        """Names of the columns."""
        self._check_header()

    def __iter__(self) -> Iterator[CsvRecord]:
        """Yield the rows after the header, blank lines too."""
        while line := self._next_line():
            yield self._record(line)

    def _check_header(self) -> None:
        if self.header.is_open:
            raise ConfigError(f"{self._name}: its header has a quote that is never closed")
        if (bad := bad_byte(self.header.raw)) is not None:
            raise ConfigError(
                f"{self._name}: its header is not UTF-8: byte 0x{bad:02x}; save it as UTF-8"
            )

    def _look_ahead(self, first: str) -> str:
        """Return the rest of the header if it goes on within quotes, as far as that is likely."""
        start, quotes = self._line, first.count('"')
        while quotes % 2 and len(self._ahead) < _MOST_HEADER_LINES and (line := self._next_line()):
            self._ahead.append((self._line, line))
            quotes += line.count('"')
        self._line = start
        return "".join(line for _, line in self._ahead)

    def _record(self, line: str) -> CsvRecord:
        record, parser = CsvRecord(self._line), _CellParser(self.delimiter)
        lines = [line]
        length = len(line)
        while not parser.feed(line):
            line = self._next_line()
            length += len(line)
            if length > MAX_LINE_BYTES:
                raise self._too_long(record.line)
            if not line:
                record.is_open = True
                parser.close()
                break
            lines.append(line)
        record.raw = "".join(lines)
        if not record.is_open:
            body = _without_end(record.raw)
            record.raw, record.end = body, record.raw[len(body) :]
        record.cells = parser.cells if record.raw else []
        record.quoted, record.has_stray = parser.quoted, parser.has_stray
        return record

    def _next_line(self) -> str:
        if self._ahead and self._ahead[0][0] > self._line:
            self._line, line = self._ahead.pop(0)
            return line
        try:
            line = self._text.readline(MAX_LINE_BYTES + 1)
        except OSError as error:
            message = f"{self._name}: can't be read after line {self._line} ({error.strerror})"
            raise InputError(message, line=self._line + 1) from None
        if len(line) > MAX_LINE_BYTES:
            raise self._too_long(self._line + 1)
        self._line += bool(line)
        return line

    def _too_long(self, line: int) -> InputError:
        return InputError(
            f"{self._name}: the row of line {line} is longer than {MAX_LINE_BYTES // 2**20} MiB; "
            "is a quote never closed?",
            line=line,
        )


class _Lent(io.BufferedIOBase):
    """A stream that stays open when its reader goes."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def read1(self, size: int = -1, /) -> bytes:
        return self._stream.read(size)


class _CellParser:
    """Takes a row apart, line by line."""

    def __init__(self, delimiter: str) -> None:
        self.cells: list[str] = []
        self.quoted = 0
        self.has_stray = False
        self._delimiter = delimiter
        self._parts: list[str] | None = None  # of the cell in quotes that is being read

    def feed(self, line: str) -> bool:
        """Take in a line with its end; returns whether the row ends with it."""
        position, body = 0, _without_end(line)
        while position >= 0:
            if self._parts is None:
                if not body.startswith('"', position):
                    position = self._take_plain(body, position)
                    continue
                self._parts = []
                self.quoted += 1
                position += 1
            end = line.find('"', position)
            if end < 0:
                self._parts.append(line[position:])
                return False
            self._parts.append(line[position:end])
            if line.startswith('"', end + 1):
                self._parts.append('"')
                position = end + 2
            else:
                position = self._close_quotes(body, end + 1)
        return True

    def close(self) -> None:
        """End the row within quotes."""
        self.cells.append("".join(self._parts or []))

    def _take_plain(self, body: str, position: int) -> int:
        """Take the cell that begins here; returns where the next one does, -1 if none does."""
        end = body.find(self._delimiter, position)
        self.cells.append(body[position:] if end < 0 else body[position:end])
        return end if end < 0 else end + 1

    def _close_quotes(self, body: str, position: int) -> int:
        """End a cell in quotes, with what wrongly follows them up to the delimiter."""
        parts, self._parts = self._parts or [], None
        following = self._take_plain(body, position)
        self.has_stray = self.has_stray or self.cells[-1] != ""
        self.cells[-1] = "".join(parts) + self.cells[-1]
        return following


def quoted(text: str, delimiter: str, *, always: bool = False) -> str:
    """Return a cell, in quotes if it needs them."""
    if always or any(mark in text for mark in ('"', "\r", "\n", delimiter)):
        return '"' + text.replace('"', '""') + '"'
    return text


def bad_byte(text: str) -> int | None:
    """Return the first byte that was not UTF-8, if there is one."""
    if text.isascii():
        return None
    return next((ord(char) - 0xDC00 for char in text if 0xDC80 <= ord(char) <= 0xDCFF), None)


def _delimiter(header: str) -> str:
    """Return the delimiter that a header has most of, outside of quotes."""
    plain = _QUOTED.sub("", header)
    return max(_DELIMITERS, key=plain.count)


def _without_end(line: str) -> str:
    return line.removesuffix("\n").removesuffix("\r")
