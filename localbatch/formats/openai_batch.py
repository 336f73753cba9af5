"""OpenAI batch files: which lines they may have, and what a body asks for.

As at OpenAI, all lines are checked before any is computed, and one bad line refuses the file. What
is wrong in a body costs only its row. https://platform.openai.com/docs/guides/batch
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, BinaryIO, NamedTuple

from localbatch.data.errors import ConfigError, InputError
from localbatch.formats.lines import Line, ObjectParser, check_value, one_line, read_lines

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

_MOST_SHOWN = 100  # bad lines in a message; a batch object has them all
_MAX_INT64 = 2**63 - 1

_SAMPLING = {
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "n", "stop", "seed", "logit_bias",
    "presence_penalty", "frequency_penalty", "repeat_penalty", "repetition_penalty", "ignore_eos",
    "max_reasoning_tokens",
}  # fmt: skip
_ALIASES = {"max_completion_tokens": "max_tokens", "repetition_penalty": "repeat_penalty"}
_IGNORED = {
    "model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "parallel_tool_calls",
}  # fmt: skip
"""These change no answer that is computed here."""
_FIELDS = {
    CHAT: {
        *_SAMPLING, *_IGNORED, "messages", "max_completion_tokens", "logprobs", "top_logprobs",
        "tools", "tool_choice", "chat_template_kwargs", "response_format", "stream",
        "stream_options",
    },
    COMPLETIONS: {
        *_SAMPLING, *_IGNORED, "prompt", "logprobs", "stream", "stream_options", "echo", "best_of",
        "suffix",
    },
}  # fmt: skip
_UNSUPPORTED = {
    "audio", "function_call", "functions", "modalities", "moderation", "prediction",
    "prompt_cache_options", "prompt_cache_retention", "reasoning_effort", "verbosity",
    "web_search_options",
}  # fmt: skip
"""OpenAI's, and not known here; null leaves them out."""
_LINE_FIELDS = ("custom_id", "method", "url", "body")


class LineError(NamedTuple):
    """What is wrong with a line of a batch file, as OpenAI's batch object has it."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchFileError(ConfigError):
    """A batch file has lines that no row can be made of; nothing of it is run."""

    def __init__(
        self, name: str, errors: list[LineError], url: str | None = None, model: str | None = None
    ) -> None:
        self.errors, self.url, self.model = errors, url, model
        count = "1 error" if len(errors) == 1 else f"{len(errors):,} errors"
        shown = [
            f"{name}{f':{error.line}' if error.line else ''}: {error.message} ({error.code})"
            for error in errors[:_MOST_SHOWN]
        ]
        if len(errors) > _MOST_SHOWN:
            shown.append(f"(and {len(errors) - _MOST_SHOWN:,} more)")
        intro = f"{name}: is no valid OpenAI batch file: {count}; nothing was run"
        super().__init__("\n".join([intro, *shown]))


@dataclass(frozen=True)
class BatchFile:
    """What all lines of a batch file have in common."""

    endpoint: str
    model: str | None
    """`body.model`, if a line has it."""
    rows: int


def is_batch_line(row: Mapping[str, Any]) -> bool:
    """Whether the first object of a file makes it an OpenAI batch; no native row has these keys."""
    return "custom_id" in row and "body" in row


def check_batch(
    stream: BinaryIO, name: str, *, may_be_text: bool = False, is_batch: bool = False
) -> BatchFile | None:
    """Read all lines of a batch file; returns `None` at its first object if it is none.

    With `may_be_text` a first line that does not start with `{` ends the search; with `is_batch` a
    file without lines is an error. Memory holds the custom ids. Raises `BatchFileError` with every
    line that is wrong.
    """
    check: _Check | None = None
    unreadable: list[LineError] = []
    parser, is_first = ObjectParser(), True
    for line in read_lines(stream, name):
        if is_first and may_be_text and not line.text.lstrip().startswith("{"):
            return None
        is_first = False
        row = _parsed(line, parser, unreadable)
        if check is None and row is not None:
            if not is_batch_line(row):
                return None
            check = _Check(unreadable)
        if check is not None:
            check.rows += 1
            if row is not None:
                check.add(row, line.number)
    if check is None:
        if is_batch and is_first:
            raise BatchFileError(name, [LineError("empty_file", "the file has no requests")])
        return None
    if check.errors:
        raise BatchFileError(name, check.errors, check.url, check.model)
    assert check.url is not None
    return BatchFile(check.url, check.model, check.rows)


def _parsed(line: Line, parser: ObjectParser, errors: list[LineError]) -> dict[str, Any] | None:
    try:
        if line.error is not None:
            raise line.error
        row, problem = parser.parse(line.text)
        if problem is not None and problem.field is None:
            raise problem
    except InputError as error:
        message = one_line(str(error)).removesuffix(" with 'prompt' or 'messages'")
        errors.append(LineError("invalid_json_line", message, None, line.number))
        return None
    return row


@dataclass
class _Check:
    """Compares the lines of a batch with each other."""

    errors: list[LineError]
    rows: int = 0
    url: str | None = None
    model: str | None = None
    _ids: dict[str, int] = field(default_factory=dict)

    def add(self, row: dict[str, Any], line: int) -> None:
        def wrong(code: str, message: str, param: str) -> None:
            self.errors.append(LineError(code, one_line(f"{param}: {message}"), param, line))

        try:
            first = self._ids.setdefault(custom_id(row), line)
            if first != line:
                message = f"{row['custom_id']!r} is that of line {first} already"
                wrong("duplicate_custom_id", message, "custom_id")
        except InputError as error:
            wrong("invalid_request", error.message, "custom_id")
        if row.get("method") != "POST":
            wrong("invalid_request", f"must be 'POST', not {row.get('method')!r}", "method")
        url = row.get("url")
        if not isinstance(url, str) or url not in _FIELDS:
            known = " or ".join(map(repr, _FIELDS))
            wrong("invalid_request", f"must be {known}, not {url!r}", "url")
        elif url != (self.url or url):
            wrong("url_mismatch", f"is {url!r}, earlier lines have {self.url!r}", "url")
        else:
            self.url = url
        body = row.get("body")
        if not isinstance(body, dict):
            wrong("invalid_request", "must be an object", "body")
            return
        model = body.get("model")
        if not isinstance(model, str):
            return
        if model != (self.model or model):
            wrong(
                "model_mismatch", f"is {model!r}, earlier lines have {self.model!r}", "body.model"
            )
        else:
            self.model = model


def custom_id(row: Mapping[str, Any]) -> str:
    """Return a line's id; raises `InputError` if it has none."""
    value = row.get("custom_id")
    if not isinstance(value, str) or not value:
        raise InputError("must be a non-empty string", field="custom_id", code="invalid_request")
    check_value(value, "custom_id")
    return value


class NativeRow(NamedTuple):
    """A line of a batch as a row of localbatch's own format."""

    row: dict[str, Any]
    is_raw: bool
    """The prompt is text as it is, whatever the run's options say."""
    names: Mapping[str, str]
    """The fields that are called something else in the body."""

    def renamed(self, error: InputError) -> InputError:
        """Return an error of the row with the name that the body has for the field."""
        name = error.field and self.names.get(error.field, error.field)
        return InputError(error.message, field=name, code=error.code)


def native_row(line: Mapping[str, Any]) -> NativeRow:
    """Return what a line asks for; raises `InputError`, naming the field, for what is not known."""
    for key in line:
        if key not in _LINE_FIELDS:
            raise _unknown(key, _LINE_FIELDS)
    url, body = line.get("url"), line.get("body")
    if not isinstance(url, str) or url not in _FIELDS or not isinstance(body, dict):
        raise InputError("has no known 'url' or no 'body'", field="body", code="invalid_request")
    for key, value in body.items():
        if key not in _FIELDS[url] and (value is not None or key not in _UNSUPPORTED):
            raise _unknown(key, _FIELDS[url])
        check_value(value, key)
    given = {key: value for key, value in body.items() if value is not None}
    _refuse_values(given)
    row = {key: given[key] for key in _SAMPLING & given.keys()}
    names = _resolve_aliases(row, given)
    _adapt_sampling(row)
    if url == CHAT:
        row |= _chat_row(given)
    else:
        row |= _completions_row(given)
    return NativeRow(row, url == COMPLETIONS, names)


def _unknown(key: str, known: object) -> InputError:
    key = key[:64]
    if key in _UNSUPPORTED or any(key in fields for fields in _FIELDS.values()):
        return InputError("is not supported here", field=key, code="unsupported_parameter")
    assert isinstance(known, (set, tuple))
    close = get_close_matches(key, sorted(known), n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return InputError(f"unknown parameter{hint}", field=key, code="unknown_parameter")


def _refuse_values(given: Mapping[str, Any]) -> None:
    """Refuse what would ask for another kind of answer."""

    def only(key: str, is_fine: bool, words: str) -> None:
        if key in given and not is_fine:
            raise InputError(f"must be {words}", field=key, code="unsupported_parameter")

    model, tool_choice = given.get("model"), given.get("tool_choice")
    if "model" in given and not isinstance(model, str):
        raise InputError("must be a string", field="model")
    only("stream", given.get("stream") is False, "false: a batch is not streamed")
    only("stream_options", False, "left out: a batch is not streamed")
    only("echo", given.get("echo") is False, "false")
    only("suffix", False, "left out")
    only("response_format", given.get("response_format") == {"type": "text"}, '{"type": "text"}')
    only("tool_choice", tool_choice in ("auto", "none"), "'auto' or 'none'")
    best_of = given.get("best_of")
    is_all = not isinstance(best_of, bool) and best_of == given.get("n", 1)
    only("best_of", is_all, "the same as 'n', or left out")


def _resolve_aliases(row: dict[str, Any], given: Mapping[str, Any]) -> dict[str, str]:
    """Put values under their own names; returns the names that were used instead."""
    names = {}
    for alias, name in _ALIASES.items():
        if alias not in given:
            continue
        if name in given and given[name] != given[alias]:
            message = f"is another value than {name!r}; give one of them"
            raise InputError(message, field=alias)
        row.pop(alias, None)
        row[name] = given[alias]
        names[name] = alias
    return names


def _adapt_sampling(row: dict[str, Any]) -> None:
    """Turn values that OpenAI and vLLM have, and `SamplingParams` has not, into those it has."""
    seed = row.get("seed")
    if isinstance(seed, int) and not isinstance(seed, bool) and -_MAX_INT64 - 1 <= seed < 0:
        row["seed"] = seed + 2**64
    if row.get("top_k") == -1:
        row["top_k"] = 0


def _chat_row(given: Mapping[str, Any]) -> dict[str, Any]:
    if "messages" not in given:
        raise InputError("is missing", field="messages", code="missing_required_parameter")
    messages = given["messages"]
    if isinstance(messages, list):
        messages = [_with_system_role(message) for message in messages]
    row = {"messages": messages}
    for key in ("logprobs", "top_logprobs", "chat_template_kwargs"):
        if key in given:
            row[key] = given[key]
    if "tools" in given and given.get("tool_choice") != "none":
        row["tools"] = given["tools"]
    return row


def _with_system_role(message: object) -> object:
    if isinstance(message, dict) and message.get("role") == "developer":
        return {**message, "role": "system"}
    return message


def _completions_row(given: Mapping[str, Any]) -> dict[str, Any]:
    if "prompt" not in given:
        raise InputError("is missing", field="prompt", code="missing_required_parameter")
    prompt = given["prompt"]
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str):
        message = "must be a string or a list of one string; token ids are not supported"
        raise InputError(message, field="prompt")
    row: dict[str, Any] = {"prompt": prompt}
    if "logprobs" in given:
        count = given["logprobs"]
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= 5:
            message = f"must be a whole number from 0 to 5, not {count!r}"
            raise InputError(message, field="logprobs")
        row |= {"logprobs": True, "top_logprobs": count}
    return row
