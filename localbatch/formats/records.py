"""The record of a row: what the journal keeps, and every form of output is made from."""

from __future__ import annotations

import json
from enum import Enum
from typing import Any

from localbatch.data.request import Choice, Completion, TokenLogprob

_LEAST_LOGPROB = -9999.0
"""OpenAI's for a token without probability; JSON has no infinity."""


class OutputStyle(str, Enum):
    """The form of the output."""

    NATIVE = "native"
    """A record a row, as `record` makes it."""
    OPENAI = "openai"
    """OpenAI's batch output: a file of answers, one of errors, and a batch object."""
    VLLM = "vllm"
    """That of `vllm run-batch`: answers and errors in one file."""


def record(completion: Completion) -> dict[str, Any]:
    """Return the JSON form of a row, its times in seconds; what a row has not, is left out."""
    timings, usage = completion.timings, completion.usage
    row: dict[str, Any] = {
        "id": completion.id,
        "text": None if completion.failed else completion.text,
        "finish_reason": completion.finish_reason.value,
    }
    if completion.failed:
        row["error"] = _error(completion)
    else:
        row |= _extras(completion.choices[0])
    if completion.more:
        row["choices"] = [
            {"text": choice.text, "finish_reason": choice.finish_reason.value, **_extras(choice)}
            for choice in completion.choices
        ]
    row["usage"] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
    }
    for name in ("reasoning_tokens", "cut_tokens"):
        if count := getattr(usage, name):
            row["usage"][name] = count
    row["timings"] = {
        "queue_s": round(timings.queue_s, 6),
        "prefill_s": round(timings.prefill_s, 6),
        "decode_s": round(timings.decode_s, 6),
    }
    return row


def _error(completion: Completion) -> dict[str, Any]:
    members = {
        "message": completion.error, "line": completion.line,
        "field": completion.error_field, "code": completion.error_code,
    }  # fmt: skip
    return {k: v for k, v in members.items() if v is not None or k == "message"}


def _extras(choice: Choice) -> dict[str, Any]:
    extras: dict[str, Any] = {}
    if choice.reasoning is not None:
        extras["reasoning"] = choice.reasoning
    if choice.logprobs is not None:
        extras["logprobs"] = [
            {**_token(token), "top": [_token(other) for other in token.top]}
            for token in choice.logprobs
        ]
    return extras


def _token(token: TokenLogprob) -> dict[str, Any]:
    return {
        "token": token.data.decode(errors="replace"),
        "bytes": list(token.data),
        "logprob": max(token.logprob, _LEAST_LOGPROB),
    }


def json_line(row: dict[str, Any]) -> str:
    """Return a line of JSON, without its end, that is UTF-8 whatever its texts hold."""
    line = json.dumps(row, ensure_ascii=False)
    # Python's escape for half a surrogate pair is JSON's, too.
    return line.encode(errors="backslashreplace").decode()
