"""The input: lines, JSON objects, rows of tables or files, read as a stream.

A row that can't be used becomes a failed `Completion` in its place and costs no other row anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any, TypeAlias

from localbatch.data.errors import ConfigError, InputError
from localbatch.data.request import Completion, Message, Request, RowId, failed_completion
from localbatch.data.sampling_params import PARAMETER_NAMES, SamplingParams
from localbatch.formats import openai_batch
from localbatch.formats.columns import RowForm
from localbatch.formats.ids import SeenIds
from localbatch.formats.lines import Line, ObjectParser, check_value, one_line, read_lines
from localbatch.formats.parquet import ParquetReader
from localbatch.formats.rows import (
    FOLDER_COLUMNS,
    LINE_COLUMNS,
    Row,
    csv_rows,
    folder_rows,
    open_csv,
    parquet_rows,
)
from localbatch.formats.sources import InputFormat, InputSource, open_input
from localbatch.formats.template import PromptTemplate

__all__ = ["BadRow", "InputFormat", "InputOptions", "InputSource", "open_input", "read_requests"]

BadRow: TypeAlias = Completion
"""The record of a row that can't be used; its `failed` is true."""

_KEYS = ("id", "prompt", "messages", "tools", "chat_template_kwargs", *PARAMETER_NAMES)
_ALIASES = {"max_completion_tokens": "max_tokens"}
_HEAD = 64  # characters kept of an unknown key


@dataclass(frozen=True)
class InputOptions:
    """How rows become requests."""

    chat: bool = True
    """A prompt becomes a user message; without, it is raw text, and rows of messages are bad."""
    system: str | None = None
    """A message in front of each row that has no system message; not without `chat`."""
    template_args: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template, for rows that do not have them in `chat_template_kwargs`."""
    prompt_column: str | None = None
    """Of a table, or of JSON objects of any form; left out: `prompt`, `text` or the only one."""
    id_column: str | None = None
    """Left out: `id`, if it is there, else the number of the row; so it is for an empty name."""
    template: str | None = None
    """A Jinja template that makes the prompt of a row's values."""

    @property
    def is_free_form(self) -> bool:
        """Whether rows may have any keys: none is a parameter then."""
        return self.template is not None or self.prompt_column is not None


_NO_OPTIONS = InputOptions()


def read_requests(
    source: InputSource, defaults: SamplingParams, options: InputOptions = _NO_OPTIONS
) -> Iterator[Request | BadRow]:
    """Read one item for each row, with `index` counting from 0.

    A txt row is a line that isn't blank, its id the line number. A jsonl row has `prompt` or
    `messages`, maybe an `id` (string or whole number, no two the same as text; left out: the line
    number), `tools` and `chat_template_kwargs` for the chat template, and any fields of
    `SamplingParams`, which go before `defaults`; `null` means left out. If the first object is a
    line of an OpenAI batch, all rows are (`openai_batch`). Rows of tables, files of folders, and
    with `is_free_form` all others, are made requests by the columns and the template of `options`.
    A bad row has its own id if that could be read, otherwise its number. A UTF-8 byte order mark
    is skipped.

    Memory holds one row (of Parquet a batch) and the ids. Raises `ConfigError` at once if the
    options don't fit the input; later `InputError`, with the line, only when reading itself fails,
    and then nothing more can be read.
    """
    reader = _RowReader(source, defaults, options)
    if source.format is not None:
        reader.start(source.format)
    return reader.read_all()


@dataclass
class _RowReader:
    """Turns rows into requests; remembers the format and the ids."""

    source: InputSource
    defaults: SamplingParams
    options: InputOptions
    is_batch: bool | None = None
    """Whether rows are lines of an OpenAI batch; the first object tells."""
    parser: ObjectParser = field(default_factory=ObjectParser)
    ids: SeenIds = field(default_factory=SeenIds)

    format: InputFormat | None = None
    form: RowForm | None = None
    """`None` for lines as they are."""
    rows: Iterator[Row] | None = None
    """`None`: there are lines."""

    def start(self, input_format: InputFormat) -> None:
        """Open the rows; raises `ConfigError` if the options don't fit them."""
        self.format, source = input_format, self.source
        if input_format is InputFormat.FOLDER and source.folder is not None:
            self.form = self._form(FOLDER_COLUMNS, id_column="path", prompt_column="text")
            self.rows = folder_rows(source.folder)
        elif input_format in (InputFormat.CSV, InputFormat.TSV):
            table = open_csv(source)
            self.form, self.rows = self._form(table.header.cells), csv_rows(table)
        elif input_format is InputFormat.PARQUET:
            parquet = ParquetReader(source.stream, source.name)
            self.form = self._form(parquet.columns)
            self.rows = parquet_rows(parquet, self.form)
        elif input_format is InputFormat.TXT and self.options.template is not None:
            self.form = self._form(LINE_COLUMNS, id_column="")
        elif input_format is InputFormat.JSONL and self.options.is_free_form:
            self.form = self._form(None)
        if self.rows is not None:
            self.ids.unit, self.ids.hint = "row", "; --id-column '' numbers the rows"
        self._check_columns()

    def read_all(self) -> Iterator[Request | BadRow]:
        if self.rows is not None:
            for index, row in enumerate(self.rows):
                yield self.read_row(row, index)
            return
        for index, line in enumerate(read_lines(self.source.stream, self.source.name)):
            if self.format is None:
                is_object = line.text.lstrip().startswith("{")
                self.start(InputFormat.JSONL if is_object else InputFormat.TXT)
            if self.form is None:
                yield self.read(line, index)
            else:
                yield self.read_row(self._free_row(line), index)

    def read_row(self, row: Row, index: int) -> Request | BadRow:
        """Turn values into a request."""
        assert self.form is not None
        row_id: RowId = row.number if row.path is None else row.path
        try:
            if row.error is not None:
                raise row.error
            if row.path is None:
                own_id = self.form.own_id(row.values)
                row_id = row.number if own_id is None else own_id
                self.ids.add(own_id, row.number)
            prompt = self.form.prompt(row.values)
            return self._request({"prompt": prompt}, row_id, index, row.line)
        except InputError as error:
            where = "" if row.path is None else f"{row.path}: "
            if error.field == "prompt":
                error = InputError(error.message, field=self.form.prompt_field)
            return failed_completion(
                row_id, index, one_line(f"{where}{error}"), row.line,
                field=error.field and one_line(error.field), code=error.code,
            )  # fmt: skip

    def _free_row(self, line: Line) -> Row:
        """Return a line's values: the line itself, or the members of its object."""
        try:
            if line.error is not None:
                raise line.error
            if self.format is InputFormat.TXT:
                return Row(line.number, line.number, {"line": line.text})
            values, problem = self.parser.parse(line.text)
            for key, value in values.items():
                check_value(key, "key")
                check_value(value, key)
            return Row(line.number, line.number, values, problem)
        except InputError as error:
            return Row(line.number, line.number, {}, error)

    def _form(
        self,
        columns: Sequence[str] | None,
        *,
        id_column: str | None = None,
        prompt_column: str | None = None,
    ) -> RowForm:
        options = self.options
        template = None if options.template is None else PromptTemplate(options.template)
        if template is not None and options.prompt_column is not None:
            raise ConfigError("--template and --prompt-column: give one of them")
        return RowForm(
            self.source.name, columns,
            prompt_column=prompt_column or options.prompt_column,
            id_column=options.id_column if id_column is None else id_column, template=template,
        )  # fmt: skip

    def _check_columns(self) -> None:
        """Raise `ConfigError` if a column is named where rows have none."""
        options, name = self.options, self.source.name
        if self.format in (InputFormat.TXT, InputFormat.FOLDER):
            for option, value in [
                ("--prompt-column", options.prompt_column), ("--id-column", options.id_column),
            ]:  # fmt: skip
                if value:
                    raise ConfigError(f"{option}: {name} has no columns; leave it out")
        if self.form is None and options.id_column:
            raise ConfigError(
                f"--id-column: goes with --prompt-column or --template; without, a row of {name} "
                "has its id under 'id'"
            )

    def read(self, line: Line, index: int) -> Request | BadRow:
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
        self,
        row: dict[str, Any],
        row_id: RowId,
        index: int,
        line: int | None,
        *,
        is_raw: bool = False,
    ) -> Request:
        row = _without_aliases(row)
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


def _without_aliases(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with OpenAI's other names replaced, and without `stream` if that is off."""
    if row.get("stream", False) in (False, None) and "stream" in row:
        row = {key: value for key, value in row.items() if key != "stream"}
    elif "stream" in row:
        raise InputError("must be false: answers are written when they are whole", field="stream")
    for alias, name in _ALIASES.items():
        if alias in row:
            if row.get(name) not in (None, row[alias]):
                raise InputError(f"contradicts {name!r}", field=alias)
            row = {name if key == alias else key: value for key, value in row.items()}
    return row


def _check_member(key: str, value: object) -> None:
    if key not in _KEYS:
        key = key[:_HEAD]
        close = get_close_matches(key, _KEYS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise InputError(f"unknown key{hint}", field=key)
    check_value(value, key)
