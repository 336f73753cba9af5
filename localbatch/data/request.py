"""What goes in, a `Request` a row, and what comes out, a `Completion` a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

from localbatch.data.errors import InputError
from localbatch.data.sampling_params import SamplingParams

RowId: TypeAlias = str | int
Message: TypeAlias = Mapping[str, Any]


class Later(Enum):
    """Stands among rows for those that hang on the answers of others."""

    LATER = "later"
    """No row is ready before another completion was taken."""


class FinishReason(str, Enum):
    """Why a row ended."""

    STOP = "stop"
    """The model ended its answer, or a stop string came."""
    LENGTH = "length"
    """`max_tokens` was reached, or the context was full."""
    ERROR = "error"
    """The row could not be computed; `Completion.error` says why."""
    ABORTED = "aborted"
    """The row was called off."""


@dataclass(frozen=True)
class Request:
    """One row of work; immutable.

    Exactly one of `prompt` (raw text, taken as it is) and `messages` (rendered by the model's own
    chat template) is given. A message's content may be a list of text parts, as OpenAI has them;
    they are joined by line ends. `id` must be unique in a job: the row's random stream hangs on it.
    Raises `InputError` naming the field when that does not hold or a prompt is empty.
    """

    id: RowId
    index: int
    """Place in the input, from 0; completions are put in this order."""
    prompt: str | None = None
    messages: Sequence[Message] | None = None
    params: SamplingParams = field(default_factory=SamplingParams)
    line: int | None = None
    """Line of the input file, from 1, where there is one."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """Given to the chat template as `tools`."""
    template_args: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the chat template."""

    def __post_init__(self) -> None:
        if self.prompt is None and self.messages is None:
            raise InputError("needs 'prompt' or 'messages'", field="prompt")
        if self.prompt is not None and self.messages is not None:
            raise InputError("give 'prompt' or 'messages', not both", field="prompt")
        if self.prompt is not None:
            _check_text("prompt", self.prompt)
            if not self.prompt.strip():
                raise InputError("is empty", field="prompt")
        else:
            object.__setattr__(self, "messages", _checked_messages(self.messages))


@dataclass(frozen=True)
class Usage:
    """Tokens of one row, all its answers together."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    """Of `completion_tokens`."""
    cut_tokens: int = 0
    """Taken out of a prompt that was too long."""


@dataclass(frozen=True)
class Timings:
    """Seconds a row spent in each stage; they add up to its time from arrival to end."""

    queue_s: float = 0.0
    """Arrival in the engine to its place in the batch."""
    prefill_s: float = 0.0
    """Its place in the batch to its first token."""
    decode_s: float = 0.0
    """First token to last."""


class TokenLogprob(NamedTuple):
    """A token and the natural logarithm of its probability."""

    token_id: int
    data: bytes
    """The token's own bytes; they may be part of a character."""
    logprob: float
    top: tuple[TokenLogprob, ...] = ()
    """The likeliest tokens at this place, likeliest first."""


@dataclass(frozen=True)
class Choice:
    """One answer of a row."""

    text: str
    finish_reason: FinishReason
    token_ids: tuple[int, ...] = ()
    reasoning: str | None = None
    """What a reasoning model wrote before its answer; `None` if it wrote none."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    """Of each of `token_ids`, if asked for."""


@dataclass(frozen=True)
class Completion:
    """One row's answer, or its error. With `n` above 1 the further answers are in `more`."""

    id: RowId
    index: int
    text: str
    finish_reason: FinishReason
    usage: Usage = field(default_factory=Usage)
    timings: Timings = field(default_factory=Timings)
    token_ids: tuple[int, ...] = ()
    """The generated tokens, without the one that ended the answer."""
    error: str | None = None
    """One line saying what was wrong, if `finish_reason` is `error`."""
    line: int | None = None
    error_field: str | None = None
    """The field of the row that was wrong, if one was."""
    error_code: str | None = None
    """OpenAI's code for the error, if there is one, as `context_length_exceeded`."""
    reasoning: str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    more: tuple[Choice, ...] = ()

    @property
    def choices(self) -> tuple[Choice, ...]:
        """All answers of the row."""
        first = Choice(self.text, self.finish_reason, self.token_ids, self.reasoning, self.logprobs)
        return (first, *self.more)

    @property
    def failed(self) -> bool:
        """Whether the row has an error instead of an answer."""
        return self.finish_reason is FinishReason.ERROR


def failed_completion(
    request_id: RowId,
    index: int,
    error: str,
    line: int | None,
    *,
    field: str | None = None,
    code: str | None = None,
) -> Completion:
    """Return the record of a row that could not be computed."""
    return Completion(
        request_id, index, "", FinishReason.ERROR,
        error=error, line=line, error_field=field, error_code=code,
    )  # fmt: skip


def _check_text(field_name: str, text: object) -> None:
    if not isinstance(text, str):
        raise InputError(f"must be a string, not {type(text).__name__}", field=field_name)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError("holds half a surrogate pair, not text", field=field_name) from None


def _checked_messages(messages: object) -> list[Message]:
    if not isinstance(messages, (list, tuple)):
        raise InputError("must be a list of messages", field="messages")
    if not messages:
        raise InputError("is empty", field="messages")
    checked = [_checked_message(m, f"messages[{i}]") for i, m in enumerate(messages)]
    if not any(str(message["content"] or "").strip() for message in checked):
        raise InputError("all contents are empty", field="messages")
    return checked


def _checked_message(message: object, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise InputError("must be an object with 'role' and 'content'", field=where)
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise InputError("must be a non-empty string", field=f"{where}.role")
    _check_text(f"{where}.role", role)
    where = f"{where}.content"
    if content is None and message.get("tool_calls"):
        return message
    if isinstance(content, (list, tuple)):
        content = "\n".join(_text_part(part, f"{where}[{i}]") for i, part in enumerate(content))
        message = {**message, "content": content}
    _check_text(where, content)
    return message


def _text_part(part: object, where: str) -> str:
    """Return the text of a part of a content; there are others, with images and sound."""
    if not isinstance(part, Mapping) or part.get("type") != "text":
        raise InputError("must be an object of type 'text'; no other is supported", field=where)
    text = part.get("text")
    _check_text(f"{where}.text", text)
    return str(text)
