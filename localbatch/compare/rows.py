"""Made-up rows of a given size."""

from __future__ import annotations

from localbatch.compare.task import MadeUpRows
from localbatch.data.request import Request
from localbatch.data.sampling_params import SamplingParams
from localbatch.engine.backend import Backend

_MOST_TRIES = 8


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
    words = length
    text = str(number)
    for _ in range(_MOST_TRIES):
        text = f"{number}" + " word" * words
        missing = length - len(backend.tokenize(text, add_special=True, parse_special=False))
        if missing == 0:
            break
        words = max(0, words + missing)
    return text
