"""The input file: a prompt a line (txt) or a JSON object a line (jsonl), read as a stream.

A row that can't be used becomes a failed `Completion` in its place and costs nobody else anything.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from localbatch.data.errors import ConfigError, InputError
from localbatch.data.request import Completion, Message, Request, RowId, failed_completion
from localbatch.data.sampling_params import PARAMETER_NAMES, SamplingParams

STANDARD_INPUT = "-"

MAX_LINE_BYTES = 16 * 2**20
"""Longest line, without its line end."""

MAX_DEPTH = 64
"""Most levels of arrays and objects in a row, itself included.

Python's JSON reader allows about a thousand, and whatever walks the row later may allow less.
"""

MAX_DIGITS = 300
"""Longest whole number in a row: `float` takes it, and no limit of Python's is met.

See `sys.set_int_max_str_digits`, which can't be put below 640.
"""

MAX_ERROR_CHARS = 500
"""Where the error text of a row is cut; it may quote what the row holds."""

BadRow: TypeAlias = Completion
"""The record of a row that could not be read; its `failed` is true."""

_KEYS = ("id", "prompt", "messages", *PARAMETER_NAMES)
_HEAD_BYTES = 64  # of a line that can't be used, kept to tell the format
_HEAD_CHARS = 64  # of an unknown key
_SKIP_BYTES = 2**20


class InputFormat(str, Enum):
    """How a line of input is read."""

    TXT = "txt"
    """Each line is a prompt."""
    JSONL = "jsonl"
    """Each line is a JSON object (https://jsonlines.org)."""


_FORMATS = {
    ".txt": InputFormat.TXT,
    ".jsonl": InputFormat.JSONL,
    ".ndjson": InputFormat.JSONL,
}


@dataclass(frozen=True)
class InputSource:
    """An open input."""

    stream: BinaryIO
    format: InputFormat | None
    """`None`: JSONL if the first line that isn't blank starts with `{`, otherwise txt."""
    name: str
    """What messages call it."""


@contextmanager
def open_input(path: str) -> Iterator[InputSource]:
    """Open an input file, or standard input for `-`, and close it at the end.

    The suffix tells the format: `.txt`, or `.jsonl` and `.ndjson`. Reads nothing yet. Raises
    `ConfigError` for any other suffix and for a file that can't be opened.
    """
    if path == STANDARD_INPUT:
        if sys.stdin is None:
            raise ConfigError("standard input: is closed; name an input file")
        yield InputSource(sys.stdin.buffer, None, "standard input")
        return
    input_format = _FORMATS.get(Path(path).suffix.lower())
    if input_format is None:
        known = ", ".join(_FORMATS)
        raise ConfigError(f"{path}: must end in one of {known}, or be '-' for standard input")
    try:
        stream = open(path, "rb")  # noqa: SIM115 - closed below; only opening is in the try
    except OSError as error:
        raise ConfigError(f"{path}: can't be opened ({error.strerror}); check the path") from None
    with stream:
        yield InputSource(stream, input_format, path)


def count_rows(source: InputSource) -> int | None:
    """Return how many rows `read_requests` will give; `None` where that can't be known ahead.

    Reads the input to its end and goes back, so it is for files: a pipe gives `None`. Raises
    `InputError` when reading fails.
    """
    if not source.stream.seekable():
        return None
    start = source.stream.tell()
    count = sum(1 for _ in _lines(source))
    source.stream.seek(start)
    return count


def read_requests(
    source: InputSource,
    defaults: SamplingParams,
    *,
    chat: bool = True,
    system: str | None = None,
) -> Iterator[Request | BadRow]:
    """Read one item for each line that isn't blank, with `index` counting from 0.

    With `chat`, a prompt becomes a user message, and `system` goes in front of every row that has
    no system message. Without it, a prompt is raw text, a row of messages is a bad row, and
    `system` has no place: the caller refuses it.

    A txt row's id is its line number. A jsonl row is an object with `prompt` or `messages`, maybe
    an `id` (string or whole number, unique in the file as text; left out: the line number) and any
    field of `SamplingParams`, which goes before `defaults`; `null` is the same as left out. A bad
    row has its own id if that could be read, otherwise its line number. A UTF-8 byte order mark at
    the start is skipped.

    Memory holds one line and the ids given so far. Raises `InputError` with the line only when
    reading itself fails, after which nothing more can be read.
    """
    reader = _RowReader(defaults, chat, system)
    input_format = source.format
    for index, line in enumerate(_lines(source)):
        if input_format is None:
            is_object = line.text.lstrip().startswith("{")
            input_format = InputFormat.JSONL if is_object else InputFormat.TXT
        if line.error is not None:
            yield _bad_row(line.number, index, line.error, line.number)
        elif input_format is InputFormat.TXT:
            yield reader.from_text(line, index)
        else:
            yield reader.from_json(line, index)


@dataclass(frozen=True)
class _Line:
    """A line that isn't blank, without its line end."""

    number: int
    """From 1."""
    text: str
    """Only the start of it, if there is an error."""
    error: InputError | None = None


class _RowReader:
    """Turns lines into requests; remembers the ids."""

    def __init__(self, defaults: SamplingParams, chat: bool, system: str | None) -> None:
        self._defaults = defaults
        self._chat = chat
        self._system = system
        self._parser = _ObjectParser()
        self._ids = _SeenIds()

    def from_text(self, line: _Line, index: int) -> Request | BadRow:
        """Take the line as a prompt."""
        try:
            return self._request({"prompt": line.text}, line.number, index, line.number)
        except InputError as error:
            return _bad_row(line.number, index, error, line.number)

    def from_json(self, line: _Line, index: int) -> Request | BadRow:
        """Take the line as a JSON object."""
        row_id: RowId = line.number
        try:
            row, problem = self._parser.parse(line.text)
            own_id = _own_id(row)
            if own_id is not None:
                row_id = own_id
            self._ids.add(own_id, line.number)
            if problem is not None:
                raise problem
            return self._request(row, row_id, index, line.number)
        except InputError as error:
            return _bad_row(row_id, index, error, line.number)

    def _request(self, row: dict[str, Any], row_id: RowId, index: int, line: int) -> Request:
        for key, value in row.items():
            _check_key(key)
            _check_value(value, key)
        changes = {k: v for k, v in row.items() if k in PARAMETER_NAMES and v is not None}
        params = self._defaults.updated(changes) if changes else self._defaults
        prompt, messages = row.get("prompt"), row.get("messages")
        request = Request(row_id, index, prompt, messages, params, line)
        if self._chat:
            return replace(request, prompt=None, messages=self._conversation(request))
        if messages is not None:
            raise InputError("need the model's chat template; leave out --raw", field="messages")
        return request

    def _conversation(self, request: Request) -> list[Message]:
        messages = list(request.messages or [{"role": "user", "content": request.prompt}])
        if self._system is None or any(message["role"] == "system" for message in messages):
            return messages
        return [{"role": "system", "content": self._system}, *messages]


class _ObjectParser:
    """Parses JSON objects, strictly; what is wrong with a part of one does not hide the rest."""

    def __init__(self) -> None:
        self._problems: list[InputError] = []
        self._decoder = json.JSONDecoder(
            object_pairs_hook=self._object,
            parse_constant=self._constant,
            parse_int=self._integer,
        )

    def parse(self, text: str) -> tuple[dict[str, Any], InputError | None]:
        """Return the object, and the first thing that JSON or localbatch does not allow in it.

        What was not allowed is missing from the object. Raises `InputError` if it can't be parsed.
        """
        self._problems.clear()
        try:
            value = self._decoder.decode(text)
        except json.JSONDecodeError as error:
            raise InputError(f"is not JSON: {error.msg} at column {error.colno}") from None
        except RecursionError:
            raise _too_deep(None) from None
        if not isinstance(value, dict):
            raise InputError("is not a JSON object with 'prompt' or 'messages'")
        return value, self._problems[0] if self._problems else None

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) < len(pairs):
            counts = Counter(key for key, _ in pairs)
            for key in [key for key, count in counts.items() if count > 1]:
                self._problems.append(InputError("is given more than once", field=key))
                del members[key]
        return members

    def _constant(self, name: str) -> None:
        self._problems.append(InputError(f"is not JSON: {name} is not a number there"))

    def _integer(self, digits: str) -> int | None:
        if len(digits) <= MAX_DIGITS:
            return int(digits)
        message = f"holds a number of {len(digits)} digits; at most {MAX_DIGITS} can be read"
        self._problems.append(InputError(message))
        return None


class _SeenIds:
    """The ids of the rows so far, and their lines."""

    def __init__(self) -> None:
        self._lines: dict[str, int] = {}
        self._is_unnamed = bytearray()  # by line: a row without an id costs one byte, not a string

    def add(self, own_id: RowId | None, line: int) -> None:
        """Note a row's id, or that it has none; raises `InputError` if the id is taken."""
        text = str(line if own_id is None else own_id)
        first = self._lines.get(text)
        if own_id is None:
            self._is_unnamed.extend(bytes(line - len(self._is_unnamed)) + b"\1")
        elif first is None:
            first = self._unnamed_line(text)
            self._lines.setdefault(text, line)
        if first is not None:
            hint = " (without one, it is the line number)" if own_id is None else ""
            raise InputError(f"{text!r} is the id of line {first} already{hint}", field="id")

    def _unnamed_line(self, text: str) -> int | None:
        if not (text.isascii() and text.isdecimal()) or text.startswith("0"):
            return None
        line = int(text)
        return line if line < len(self._is_unnamed) and self._is_unnamed[line] else None


def _lines(source: InputSource) -> Iterator[_Line]:
    """Give the lines that aren't blank."""
    number = 0
    try:
        while data := source.stream.readline(MAX_LINE_BYTES + 1):
            number += 1
            is_long = len(data) > MAX_LINE_BYTES and not data.endswith(b"\n")
            if is_long:
                data = data[:_HEAD_BYTES]
                _skip_line(source.stream)
            line = _line(number, data, is_long=is_long)
            if line.error is not None or line.text.strip():
                yield line
    except OSError as error:
        message = f"{source.name}: reading failed after line {number} ({error.strerror})"
        raise InputError(message, line=number + 1) from None


def _skip_line(stream: BinaryIO) -> None:
    while (data := stream.readline(_SKIP_BYTES)) and not data.endswith(b"\n"):
        pass


def _line(number: int, data: bytes, *, is_long: bool) -> _Line:
    error = None
    if is_long:
        error = InputError(f"is longer than {MAX_LINE_BYTES // 2**20} MiB")
    try:
        text = data.decode("utf-8", "replace" if is_long else "strict")
    except UnicodeDecodeError as bad:
        text = data[:_HEAD_BYTES].decode(errors="replace")
        error = InputError(f"is not UTF-8: byte 0x{data[bad.start]:02x} at offset {bad.start}")
    if number == 1:
        text = text.removeprefix("\ufeff")
    return _Line(number, text.removesuffix("\n").removesuffix("\r"), error)


def _own_id(row: dict[str, Any]) -> RowId | None:
    row_id = row.get("id")
    if row_id is None:
        return None
    if isinstance(row_id, bool) or not isinstance(row_id, (str, int)):
        kind = type(row_id).__name__
        raise InputError(f"must be a string or a whole number, not {kind}", field="id")
    _check_value(row_id, "id")
    return row_id


def _check_key(key: str) -> None:
    if key not in _KEYS:
        key = key[:_HEAD_CHARS]
        close = get_close_matches(key, _KEYS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise InputError(f"unknown key{hint}", field=key)


def _check_value(value: object, field: str, depth: int = 2) -> None:
    """Refuse what JSON can say but what is no text, or is too deep to walk safely."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InputError("holds half a surrogate pair, not text", field=field) from None
    elif isinstance(value, (dict, list)):
        if depth > MAX_DEPTH:
            raise _too_deep(field)
        for part in value:
            _check_value(part, field, depth + 1)
        if isinstance(value, dict):
            _check_value(list(value.values()), field, depth)


def _too_deep(field: str | None) -> InputError:
    return InputError(f"is nested deeper than {MAX_DEPTH} levels", field=field)


def _bad_row(row_id: RowId, index: int, error: InputError, line: int) -> BadRow:
    text = str(error)
    if len(text) > MAX_ERROR_CHARS:
        text = text[:MAX_ERROR_CHARS] + "…"
    # What it quotes may hold line ends, terminal control codes or half a surrogate pair.
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return failed_completion(row_id, index, text, line)
