"""The input: a prompt a line (txt) or a JSON object a line (jsonl), read as a stream.

A row that can't be used becomes a failed `Completion` in its place and costs no other row anything.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from localbatch.data.errors import ConfigError, InputError
from localbatch.data.request import Completion, Message, Request, RowId, failed_completion
from localbatch.data.sampling_params import PARAMETER_NAMES, SamplingParams
from localbatch.formats import openai_batch
from localbatch.formats.lines import Line, ObjectParser, check_value, one_line, read_lines

BadRow: TypeAlias = Completion
"""The record of a row that can't be used; its `failed` is true."""

_KEYS = ("id", "prompt", "messages", "tools", "chat_template_kwargs", *PARAMETER_NAMES)
_HEAD = 64  # characters kept of an unknown key


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


@dataclass(frozen=True)
class InputOptions:
    """How rows become requests."""

    chat: bool = True
    """A prompt becomes a user message; without, it is raw text, and rows of messages are bad."""
    system: str | None = None
    """A message in front of each row that has no system message; not without `chat`."""
    template_args: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template, for rows that do not have them in `chat_template_kwargs`."""


_NO_OPTIONS = InputOptions()


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
    source: InputSource, defaults: SamplingParams, options: InputOptions = _NO_OPTIONS
) -> Iterator[Request | BadRow]:
    """Read one item for each line that isn't blank, with `index` counting from 0.

    A txt row's id is its line number. A jsonl row has `prompt` or `messages`, maybe an `id` (string
    or whole number, no two the same as text; left out: the line number), `tools` and
    `chat_template_kwargs` for the chat template, and any fields of `SamplingParams`, which go
    before `defaults`; `null` means left out. If the first object is a line of an OpenAI batch, all
    rows are (`openai_batch`). A bad row has its own id if that could be read,
    otherwise its line number. A UTF-8 byte order mark is skipped.

    Memory holds one line and the ids. Raises `InputError`, with the line, only when reading itself
    fails, and then nothing more can be read.
    """
    reader = _RowReader(source.format, defaults, options)
    for index, line in enumerate(read_lines(source.stream, source.name)):
        yield reader.read(line, index)


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
    options: InputOptions
    is_batch: bool | None = None
    """Whether rows are lines of an OpenAI batch; the first object tells."""
    parser: ObjectParser = field(default_factory=ObjectParser)
    ids: _SeenIds = field(default_factory=_SeenIds)

    def read(self, line: Line, index: int) -> Request | BadRow:
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
            if self.is_batch is None:
                self.is_batch = openai_batch.is_batch_line(row)
            own_id = openai_batch.custom_id(row) if self.is_batch else _own_id(row)
            row_id = line.number if own_id is None else own_id
            self.ids.add(own_id, line.number)
            if problem is not None:
                raise problem
            if self.is_batch:
                return self._batch_request(row, row_id, index, line.number)
            return self._request(row, row_id, index, line.number)
        except InputError as error:
            code = error.code or self._code(error)
            return failed_completion(
                row_id, index, one_line(str(error)), line.number,
                field=error.field and one_line(error.field), code=code,
            )  # fmt: skip

    def _code(self, error: InputError) -> str | None:
        if error.field is None:
            return "invalid_json_line"
        return "invalid_value" if self.is_batch else None

    def _batch_request(self, row: dict[str, Any], row_id: RowId, index: int, line: int) -> Request:
        native = openai_batch.native_row(row)
        try:
            return self._request(native.row, row_id, index, line, is_raw=native.is_raw)
        except InputError as error:
            raise native.renamed(error) from None

    def _request(
        self, row: dict[str, Any], row_id: RowId, index: int, line: int, *, is_raw: bool = False
    ) -> Request:
        for key, value in row.items():
            _check_member(key, value)
        changes = {k: v for k, v in row.items() if k in PARAMETER_NAMES and v is not None}
        params = self.defaults.updated(changes) if changes else self.defaults
        prompt, messages = row.get("prompt"), row.get("messages")
        request = Request(
            row_id, index, prompt, messages, params, line,
            _tools(row.get("tools")),
            {**self.options.template_args, **_template_args(row.get("chat_template_kwargs"))},
        )  # fmt: skip
        if is_raw:
            return request
        if self.options.chat:
            return replace(request, prompt=None, messages=self._conversation(request))
        if messages is not None:
            raise InputError("need the model's chat template; leave out --raw", field="messages")
        return request

    def _conversation(self, request: Request) -> list[Message]:
        messages = list(request.messages or [{"role": "user", "content": request.prompt}])
        system = self.options.system
        if system is None or any(message["role"] == "system" for message in messages):
            return messages
        return [{"role": "system", "content": system}, *messages]


def _tools(value: object) -> list[dict[str, Any]] | None:
    if value is None or (isinstance(value, list) and all(isinstance(t, dict) for t in value)):
        return value or None
    raise InputError("must be a list of objects", field="tools")


def _template_args(value: object) -> dict[str, Any]:
    if value is None or isinstance(value, dict):
        return value or {}
    raise InputError("must be an object", field="chat_template_kwargs")


def _own_id(row: dict[str, Any]) -> RowId | None:
    row_id = row.get("id")
    if isinstance(row_id, bool) or not isinstance(row_id, (str, int, type(None))):
        kind = type(row_id).__name__
        raise InputError(f"must be a string or a whole number, not {kind}", field="id")
    check_value(row_id, "id")
    return row_id


def _check_member(key: str, value: object) -> None:
    if key not in _KEYS:
        key = key[:_HEAD]
        close = get_close_matches(key, _KEYS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise InputError(f"unknown key{hint}", field=key)
    check_value(value, key)
