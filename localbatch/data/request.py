"""What goes in, a `Request` a row, and what comes out, a `Completion` a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias

from localbatch.data.errors import InputError
from localbatch.data.sampling_params import SamplingParams

RowId: TypeAlias = str | int
Message: TypeAlias = Mapping[str, Any]


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
    chat template) is given. `id` must be unique in a job: the row's random stream hangs on it.
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
            _check_messages(self.messages)


@dataclass(frozen=True)
class Usage:
    """Tokens of one row."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True)
class Timings:
    """Seconds a row spent in each stage; they add up to its time from arrival to end."""

    queue_s: float = 0.0
    """Arrival in the engine to its place in the batch."""
    prefill_s: float = 0.0
    """Its place in the batch to its first token."""
    decode_s: float = 0.0
    """First token to last."""


@dataclass(frozen=True)
class Completion:
    """One row's answer, or its error."""

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

    @property
    def failed(self) -> bool:
        """Whether the row has an error instead of an answer."""
        return self.finish_reason is FinishReason.ERROR


def failed_completion(request_id: RowId, index: int, error: str, line: int | None) -> Completion:
    """Return the record of a row that could not be computed."""
    return Completion(request_id, index, "", FinishReason.ERROR, error=error, line=line)


def _check_text(field_name: str, text: object) -> None:
    if not isinstance(text, str):
        raise InputError(f"must be a string, not {type(text).__name__}", field=field_name)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError("holds half a surrogate pair, not text", field=field_name) from None


def _check_messages(messages: object) -> None:
    if not isinstance(messages, (list, tuple)):
        raise InputError("must be a list of messages", field="messages")
    if not messages:
        raise InputError("is empty", field="messages")
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if not isinstance(message, Mapping):
            raise InputError("must be an object with 'role' and 'content'", field=where)
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise InputError("must be a non-empty string", field=f"{where}.role")
        _check_text(f"{where}.role", role)
        _check_text(f"{where}.content", message.get("content"))
    if not any(str(message["content"]).strip() for message in messages):
        raise InputError("all contents are empty", field="messages")
