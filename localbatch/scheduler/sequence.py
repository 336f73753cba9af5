"""A request's tokens while it is worked on."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from localbatch.data.request import FinishReason, Request

if TYPE_CHECKING:
    from localbatch.scheduler.prefixes import Prefix


class Likelihood(NamedTuple):
    """Natural logarithms of the probabilities of a generated token and of the likeliest ones."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """(token, logprob), likeliest first."""


class SequenceStatus(Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """The mutable token state of one answer of a request.

    `tokens` holds the prompt and what has been generated; the KV cache holds the first
    `num_computed` of them. A step moves `num_computed` towards `len(tokens)`; when it gets there,
    the logits of the last token give the next one.
    """

    __slots__ = ("choice", "finish_reason", "forced", "is_greedy", "likelihoods", "most_tokens",
                 "num_computed", "num_prompt", "prefixes", "request", "slot", "status", "tokens",
                 "wants_likelihoods")  # fmt: skip

    def __init__(self, request: Request, prompt_tokens: list[int], choice: int = 0) -> None:
        if not prompt_tokens:
            raise ValueError("a sequence starts with at least one token")
        self.request = request
        self.is_greedy = request.params.is_greedy
        self.wants_likelihoods = request.params.logprobs
        self.choice = choice  # which of the request's answers, from 0
        self.tokens = list(prompt_tokens)
        self.num_prompt = len(prompt_tokens)
        self.most_tokens = self.num_prompt + request.params.max_tokens
        self.num_computed = 0
        self.forced: SequenceOf[int] = ()  # tokens that come next, whatever the logits say
        self.likelihoods: list[Likelihood] = []  # of each generated token, where asked for
        self.prefixes: tuple[Prefix, ...] = ()  # shared with other sequences, shortest first
        self.slot: int | None = None
        self.status = SequenceStatus.WAITING
        self.finish_reason: FinishReason | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""
        return len(self.tokens)

    @property
    def num_generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def generated(self) -> list[int]:
        """The tokens generated so far (a copy)."""
        return self.tokens[self.num_prompt :]

    def begin_anew(self) -> None:
        """Forget the answer and what was computed."""
        self.num_computed = 0
        self.forced = ()
        self.likelihoods.clear()
        del self.tokens[self.num_prompt :]

    @property
    def lags(self) -> bool:
        """Whether more than the newest token is still to be computed (prefill, or recompute)."""
        return self.num_computed < len(self.tokens) - 1 or self.num_computed == 0

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request.id!r}, {self.status.value}, slot={self.slot}, "
            f"{self.num_computed}/{self.num_tokens} computed)"
        )
