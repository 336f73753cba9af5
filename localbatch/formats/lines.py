"""Lines of UTF-8, and JSON objects in them, read so that a bad one costs only itself."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from localbatch.data.errors import InputError

MAX_LINE_BYTES = 16 * 2**20
"""Longest line, without its line end."""
MAX_DEPTH = 64
"""Most levels of arrays and objects in a row: well below what Python can recurse into later."""
MAX_DIGITS = 300
"""Longest whole number in a row; neither `float` nor Python's limit on digits can refuse it."""
MAX_ERROR_CHARS = 500
"""Longest error of a row; it may quote what the row holds."""

_HEAD = 64  # bytes kept of a line that is too long


@dataclass(frozen=True)
class Line:
    """A line that isn't blank, without its end, or the start of an unusable one."""

    number: int  # from 1
    text: str
    error: InputError | None = None


def read_lines(stream: BinaryIO, name: str) -> Iterator[Line]:
    """Yield the lines that are not blank; memory holds one.

    Raises `InputError`, with the line, when reading fails; then nothing more can be read.
    """
    number = 0
    try:
        while data := stream.readline(MAX_LINE_BYTES + 1):
            number += 1
            is_cut = len(data) > MAX_LINE_BYTES and not data.endswith(b"\n")
            line = _decoded(number, data[:_HEAD] if is_cut else data, is_cut=is_cut)
            while is_cut:
                data = stream.readline(2**16)
                is_cut = data != b"" and not data.endswith(b"\n")
            if line.error is not None or line.text.strip():
                yield line
    except OSError as error:
        message = f"{name}: can't be read after line {number} ({error.strerror})"
        raise InputError(message, line=number + 1) from None


def _decoded(number: int, data: bytes, *, is_cut: bool) -> Line:
    error = None
    try:
        text = data.decode()
    except UnicodeDecodeError as bad:
        text = data.decode(errors="replace")
        error = InputError(f"is not UTF-8: byte 0x{data[bad.start]:02x} at offset {bad.start}")
    if is_cut:
        error = InputError(f"is longer than {MAX_LINE_BYTES // 2**20} MiB")
    if number == 1:
        text = text.removeprefix("\ufeff")
    return Line(number, text.removesuffix("\n").removesuffix("\r"), error)


class ObjectParser:
    """Parses JSON objects, strictly, but so that one bad member does not hide the row's id."""

    def __init__(self) -> None:
        self._problems: list[InputError] = []
        self._decoder = json.JSONDecoder(
            object_pairs_hook=self._object, parse_constant=self._constant, parse_int=self._integer
        )

    def parse(self, text: str) -> tuple[dict[str, Any], InputError | None]:
        """Return the object without what is not allowed in it, and the first such thing."""
        self._problems.clear()
        try:
            row = self._decoder.decode(text)
        except json.JSONDecodeError as error:
            raise InputError(f"is not JSON: {error.msg} at column {error.colno}") from None
        except RecursionError:
            raise InputError(f"is nested deeper than {MAX_DEPTH} levels") from None
        if not isinstance(row, dict):
            raise InputError("is not a JSON object with 'prompt' or 'messages'")
        return row, self._problems[0] if self._problems else None

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) < len(pairs):
            counts = Counter(key for key, _ in pairs)
            for key in [key for key, count in counts.items() if count > 1]:
                self._problems.append(InputError("is given more than once", field=key))
                del members[key]
        return members

    def _constant(self, name: str) -> None:
        self._problems.append(InputError(f"is not JSON: {name} is no number there"))

    def _integer(self, digits: str) -> int | None:
        if len(digits) > MAX_DIGITS:
            self._problems.append(InputError(f"holds a number of more than {MAX_DIGITS} digits"))
            return None
        return int(digits)


def check_value(value: object, field: str, depth: int = 2) -> None:
    """Refuse what JSON can say but what is no text, or is too deep to walk."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InputError("holds half a surrogate pair, not text", field=field) from None
    elif isinstance(value, (dict, list)):
        if depth > MAX_DEPTH:
            raise InputError(f"is nested deeper than {MAX_DEPTH} levels", field=field)
        members = [*value, *value.values()] if isinstance(value, dict) else value
        for member in members:
            check_value(member, field, depth + 1)


def one_line(text: str) -> str:
    """Cut an error, and escape the control characters and half surrogate pairs it may quote."""
    text = text if len(text) <= MAX_ERROR_CHARS else text[:MAX_ERROR_CHARS] + "…"
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
