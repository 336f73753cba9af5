"""Makes prompts fit that are too long for their context, if that is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from localbatch.data.config import Overlength
from localbatch.data.errors import InputError
from localbatch.data.request import Request

_TRIES = 8
_MARGIN = 4
"""Tokens that text may grow by when it is tokenized again in its new place."""

Encode = Callable[[Request], list[int]]
Tokenize = Callable[[str], list[int]]
Detokenize = Callable[[list[int]], str]


def room_for_prompt(ctx: int, max_tokens: int) -> int:
    """Return the tokens of a context that a cut prompt may have; at most half is for the answer."""
    return ctx - min(max_tokens, ctx // 2)


def cut(tokens: list[int], surplus: int, where: Overlength) -> list[int]:
    """Return tokens without `surplus` of them, from the left, the middle or the right."""
    keep = max(0, len(tokens) - surplus)
    if where is Overlength.TRUNCATE_LEFT:
        return tokens[len(tokens) - keep :]
    if where is Overlength.TRUNCATE_RIGHT:
        return tokens[:keep]
    head = -(-keep // 2)
    return tokens[:head] + tokens[len(tokens) - (keep - head) :]


def shortened(
    request: Request,
    room: int,
    where: Overlength,
    *,
    encode: Encode,
    tokenize: Tokenize,
    detokenize: Detokenize,
) -> list[int]:
    """Return the tokens of a prompt, of which its text is cut until they are at most `room`.

    Of a conversation the longest message is cut, so that the template around it stays whole. Raises
    `InputError` if it can't be made to fit.
    """
    margin = 0
    for _ in range(_TRIES):
        tokens = encode(request)
        surplus = len(tokens) - room
        if surplus <= 0:
            return tokens
        request = _without(request, surplus + margin, where, tokenize, detokenize)
        margin += _MARGIN
    raise InputError(f"can't be cut to {room} tokens; raise --ctx", field=field_of(request))


def _without(
    request: Request, surplus: int, where: Overlength, tokenize: Tokenize, detokenize: Detokenize
) -> Request:
    """Return the request with about so many tokens less of its longest text."""
    if request.prompt is not None:
        kept = cut(tokenize(request.prompt), surplus, where)
        return replace(request, prompt=_text(kept, detokenize, request))
    messages = list(request.messages or ())
    texts = [tokenize(str(message.get("content") or "")) for message in messages]
    longest = max(range(len(texts)), key=lambda i: len(texts[i]))
    kept = cut(texts[longest], surplus, where)
    messages[longest] = {**messages[longest], "content": _text(kept, detokenize, request)}
    return replace(request, messages=messages)


def field_of(request: Request) -> str:
    """Return the field that a row's text is in."""
    return "prompt" if request.messages is None else "messages"


def _text(tokens: list[int], detokenize: Detokenize, request: Request) -> str:
    text = detokenize(tokens)
    if not text.strip():
        raise InputError(
            "is too long even without its longest text; raise --ctx", field=field_of(request)
        )
    return text
