"""What becomes of rows before they are computed: their prompts, their tokens, what they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from localbatch.data.errors import InputError
from localbatch.data.request import Request
from localbatch.engine.engine import Engine
from localbatch.engine.sizing import block_of, chunk_of
from localbatch.scheduler.prefixes import Prefix, find_prefixes


@dataclass(frozen=True)
class Preview:
    """One row, rendered and tokenized."""

    index: int
    """The row's `Request.index`."""
    num_tokens: int = 0
    """Of the prompt as it would be computed."""
    cut_tokens: int = 0
    """Taken out of a prompt that was too long."""
    shared_tokens: int = 0
    """That an earlier one of the rows begins with, too, and that are not computed again."""
    is_short_of_room: bool = False
    """Whether the context is full before `max_tokens` are reached."""
    error: str | None = None
    text: str | None = None
    """The rendered prompt, if asked for."""
    pieces: tuple[tuple[int, str], ...] = ()
    """Each token's id and text, if asked for; control tokens have their name."""


def preview(engine: Engine, requests: Sequence[Request], *, whole: bool) -> list[Preview]:
    """Return what would become of rows; with `whole`, their text and tokens, too."""
    previews, prompts = [], []
    longest = engine.longest_row()
    for request in requests:
        tokens: list[int] = []
        found = Preview(request.index)
        try:
            tokens, num_cut = engine.encode(request)
            is_short = len(tokens) + request.params.max_tokens > longest + 1
            found = replace(
                found, num_tokens=len(tokens), cut_tokens=num_cut, is_short_of_room=is_short
            )
            if whole:
                pieces = _pieces(engine, tokens)
                whole_text = engine.encoder.render(request)
                text = "".join(piece for _, piece in pieces) if num_cut else whole_text
                found = replace(found, text=text, pieces=pieces)
        except InputError as error:
            found = replace(found, error=str(error))
        previews.append(found)
        prompts.append(tokens)
    if engine.config.share_prefixes:
        shared = _shared(engine, prompts)
        previews = [replace(p, shared_tokens=n) for p, n in zip(previews, shared, strict=True)]
    return previews


def _pieces(engine: Engine, tokens: list[int]) -> tuple[tuple[int, str], ...]:
    names = engine.backend.card.special_texts
    return tuple(
        (t, names.get(t) or engine.backend.token_bytes(t).decode(errors="backslashreplace"))
        for t in tokens
    )


def _shared(engine: Engine, prompts: list[list[int]]) -> list[int]:
    """Return how many tokens of each prompt an earlier one has computed."""
    chunk = chunk_of(engine.config, on_gpu=engine.backend.on_gpu)
    seen: set[Prefix] = set()
    shared = []
    for path in find_prefixes(prompts, chunk, block_of(chunk)):
        shared.append(max((prefix.length for prefix in path if prefix in seen), default=0))
        seen.update(path)
    return shared
