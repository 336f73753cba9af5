"""The input: a prompt a line (txt) or a JSON object a line (jsonl), read as a stream.

A row that can't be used becomes a failed `Completion` in its place and costs no other row anything.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from localbatch.data.errors import ConfigError, InputError
from localbatch.data.request import Completion, Message, Request, RowId, failed_completion
from localbatch.data.sampling_params import PARAMETER_NAMES, SamplingParams

MAX_LINE_BYTES = 16 * 2**20
"""Longest line, without its line end."""
MAX_DEPTH = 64
"""Most levels of arrays and objects in a row: well below what Python can recurse into later."""
MAX_DIGITS = 300
"""Longest whole number in a row; neither `float` nor Python's limit on digits can refuse it."""
MAX_ERROR_CHARS = 500
"""Longest error of a row; it may quote what the row holds."""

BadRow: TypeAlias = Completion
"""The record of a row that can't be used; its `failed` is true."""

_KEYS = ("id", "prompt", "messages", *PARAMETER_NAMES)
_HEAD = 64  # bytes kept of a line that is too long, characters kept of an unknown key


class InputFormat(str, Enum):
    """How a line is read."""

    TXT = "txt"
    """It is a prompt."""
    JSONL = "jsonl"
    """It is a JSON object (https://jsonlines.org)."""


_FORMATS = {".txt": InputFormat.TXT, ".jsonl": InputFormat.JSONL, ".ndjson": InputFormat.JSONL}


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
    """Open an input file, its format told by the suffix, or standard input for `-`.

    Reads nothing yet. Raises `ConfigError` for a suffix other than `.txt`, `.jsonl` and `.ndjson`,
    and for a file that can't be opened.
    """
    if path == "-":
        if sys.stdin is None:
            raise ConfigError("standard input: is closed; name an input file")
        yield InputSource(sys.stdin.buffer, None, "standard input")
        return
    input_format = _FORMATS.get(Path(path).suffix.lower())
    if input_format is None:
        known = ", ".join(_FORMATS)
        raise ConfigError(f"{path}: must end in one of {known}, or be '-' for standard input")
    try:
        stream = open(path, "rb")  # noqa: SIM115 - errors of the caller's block are not for here
    except OSError as error:
        raise ConfigError(f"{path}: can't be opened ({error.strerror}); check the path") from None
    with stream:
        yield InputSource(stream, input_format, path)


def read_requests(
    source: InputSource, defaults: SamplingParams, *, chat: bool = True, system: str | None = None
) -> Iterator[Request | BadRow]:
    """Read one item for each line that isn't blank, with `index` counting from 0.

    With `chat`, a prompt becomes a user message, and `system` goes in front of each row that has
    no system message. Without, a prompt is raw text, a row of messages is a bad row, and the
    caller refuses `system`.

    A txt row's id is its line number. A jsonl row has `prompt` or `messages`, maybe an `id` (string
    or whole number, no two the same as text; left out: the line number) and any fields of
    `SamplingParams`, which go before `defaults`; `null` means left out. A bad row has its own id if
    that could be read, otherwise its line number. A UTF-8 byte order mark is skipped.

    Memory holds one line and the ids. Raises `InputError`, with the line, only when reading itself
    fails, and then nothing more can be read.
    """
    reader = _RowReader(source.format, defaults, chat, system)
    for index, line in enumerate(_lines(source)):
        yield reader.read(line, index)


@dataclass(frozen=True)
class _Line:
    """A line that isn't blank, without its end, or the start of an unusable one."""

    number: int  # from 1
    text: str
    error: InputError | None = None


def _lines(source: InputSource) -> Iterator[_Line]:
    number = 0
    try:
        while data := source.stream.readline(MAX_LINE_BYTES + 1):
            number += 1
            is_cut = len(data) > MAX_LINE_BYTES and not data.endswith(b"\n")
            line = _decoded(number, data[:_HEAD] if is_cut else data, is_cut=is_cut)
            while is_cut:
                data = source.stream.readline(2**16)
                is_cut = data != b"" and not data.endswith(b"\n")
            if line.error is not None or line.text.strip():
                yield line
    except OSError as error:
        message = f"{source.name}: can't be read after line {number} ({error.strerror})"
        raise InputError(message, line=number + 1) from None


def _decoded(number: int, data: bytes, *, is_cut: bool) -> _Line:
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
    return _Line(number, text.removesuffix("\n").removesuffix("\r"), error)


class _ObjectParser:
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


class _SeenIds:
    """The ids of the rows so far, as text, and their lines."""

    def __init__(self) -> None:
        self._lines: dict[str, int] = {}
        self._unnamed = bytearray()  # 1 at the lines of rows without an id: a byte, not a string

    def add(self, own_id: RowId | None, line: int) -> None:
        """Note a row's id, or that it has none; raises `InputError` if the id is taken."""
        text = str(line if own_id is None else own_id)
        first = self._lines.get(text)
        if own_id is None:
            self._unnamed.extend(bytes(line - len(self._unnamed)) + b"\1")
        elif first is None:
            number = int(text) if len(text) < 16 and text.isdecimal() else 0
            if str(number) == text and self._unnamed[number : number + 1] == b"\1":
                first = number
            self._lines[text] = first or line
        if first is not None:
            hint = "; a row without an id has its line number" if own_id is None else ""
            raise InputError(f"{text!r} is the id of line {first} already{hint}", field="id")


@dataclass
class _RowReader:
    """Turns lines into requests; remembers the format and the ids."""

    format: InputFormat | None
    defaults: SamplingParams
    chat: bool
    system: str | None
    parser: _ObjectParser = field(default_factory=_ObjectParser)
    ids: _SeenIds = field(default_factory=_SeenIds)

    def read(self, line: _Line, index: int) -> Request | BadRow:
        if self.format is None:
            is_object = line.text.lstrip().startswith("{")
            self.format = InputFormat.JSONL if is_object else InputFormat.TXT
        row_id: RowId = line.number
        try:
            if line.error is not None:
                raise line.error
            if self.format is InputFormat.TXT:
                return self._request({"prompt": line.text}, row_id, index, line.number)
            row, problem = self.parser.parse(line.text)
            own_id = _own_id(row)
            row_id = line.number if own_id is None else own_id
            self.ids.add(own_id, line.number)
            if problem is not None:
                raise problem
            return self._request(row, row_id, index, line.number)
        except InputError as error:
            return failed_completion(row_id, index, _one_line(str(error)), line.number)

    def _request(self, row: dict[str, Any], row_id: RowId, index: int, line: int) -> Request:
        for key, value in row.items():
            _check_member(key, value)
        changes = {k: v for k, v in row.items() if k in PARAMETER_NAMES and v is not None}
        params = self.defaults.updated(changes) if changes else self.defaults
        prompt, messages = row.get("prompt"), row.get("messages")
        request = Request(row_id, index, prompt, messages, params, line)
        if self.chat:
            return replace(request, prompt=None, messages=self._conversation(request))
        if messages is not None:
            raise InputError("need the model's chat template; leave out --raw", field="messages")
        return request

    def _conversation(self, request: Request) -> list[Message]:
        messages = list(request.messages or [{"role": "user", "content": request.prompt}])
        if self.system is None or any(message["role"] == "system" for message in messages):
            return messages
        return [{"role": "system", "content": self.system}, *messages]


def _own_id(row: dict[str, Any]) -> RowId | None:
    row_id = row.get("id")
    if isinstance(row_id, bool) or not isinstance(row_id, (str, int, type(None))):
        kind = type(row_id).__name__
        raise InputError(f"must be a string or a whole number, not {kind}", field="id")
    _check_value(row_id, "id")
    return row_id


def _check_member(key: str, value: object) -> None:
    if key not in _KEYS:
        key = key[:_HEAD]
        close = get_close_matches(key, _KEYS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise InputError(f"unknown key{hint}", field=key)
    _check_value(value, key)


def _check_value(value: object, field: str, depth: int = 2) -> None:
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
            _check_value(member, field, depth + 1)


def _one_line(text: str) -> str:
    """Cut an error, and escape the control characters and half surrogate pairs it may quote."""
    text = text if len(text) <= MAX_ERROR_CHARS else text[:MAX_ERROR_CHARS] + "…"
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
