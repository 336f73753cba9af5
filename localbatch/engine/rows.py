"""What lanes keep of their rows, and what they report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from localbatch.data.request import Completion
from localbatch.engine.text import TextStream
from localbatch.scheduler.sequence import Sequence as TokenSequence

_ANSWER_WEIGHT = 2
"""Prompt tokens that take as long as a token of an answer in a full batch, or about so."""


class TextPiece(NamedTuple):
    """New text of a row that is still running: of its first answer, without its reasoning."""

    row: int
    """The row's `Request.index`."""
    text: str


class Part(NamedTuple):
    """One answer of a row that has several."""

    choice: int
    num_parts: int
    completion: Completion


Event: TypeAlias = Completion | Part | TextPiece


@dataclass
class Counters:
    """What a lane did since it was made; seconds of wall time."""

    steps: int = 0
    prompt_tokens: int = 0
    computed_prompt_tokens: int = 0
    completion_tokens: int = 0
    ended_in_reasoning: int = 0
    decode_s: float = 0.0
    run_s: float = 0.0


@dataclass
class Row:
    """What the engine keeps of a row's answer beside its sequence."""

    sequence: TokenSequence
    text: TextStream
    arrived: float
    num_parts: int = 1
    """Answers of its request that are computed, each as a row."""
    admitted: float = 0.0
    first_token: float = 0.0
    failed_alone: bool = False
    """In a step without any other row."""
    cut_tokens: int = 0
    """Taken out of its prompt."""


def weight_of(sequence: TokenSequence) -> int:
    """Return what a row costs, in prompt tokens, if it runs to its `max_tokens`."""
    return sequence.num_prompt + _ANSWER_WEIGHT * sequence.request.params.max_tokens
