"""Made-up rows of a given size."""

from __future__ import annotations

from collections.abc import Sequence

from localbatch.compare.task import MadeUpRows
from localbatch.data.request import Request
from localbatch.data.sampling_params import SamplingParams
from localbatch.engine.backend import Backend

_PIECES = (" word", " a", "!")


def requests_of(rows: Sequence[Request] | MadeUpRows, backend: Backend) -> list[Request]:
    """Return rows as they are, or make them up."""
    return made_up(backend, rows) if isinstance(rows, MadeUpRows) else list(rows)


def made_up(backend: Backend, wanted: MadeUpRows) -> list[Request]:
    """Return rows of raw text that begin differently and run to `max_tokens`.

    Their prompts have `prompt_tokens` tokens where the tokenizer allows it, or nearly so many.
    """
    params = SamplingParams(max_tokens=wanted.max_tokens, ignore_eos=True)
    return [
        Request(i, i, prompt=_text(backend, i, wanted.prompt_tokens), params=params)
        for i in range(wanted.count)
    ]


def _text(backend: Backend, number: int, length: int) -> str:
    """Return words that begin with a number, and smaller pieces for what is missing at the end."""

    def fits(text: str) -> bool:
        return len(backend.tokenize(text, add_special=True, parse_special=False)) <= length

    text = str(number)
    for piece in _PIECES:
        low, high = 0, length  # the most pieces that fit: in low..high
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(text + piece * middle) else (low, middle - 1)
        text += piece * low
    return text
