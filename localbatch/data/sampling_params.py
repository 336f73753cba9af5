"""How a row's tokens are chosen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any

from localbatch.data.errors import ConfigError, InputError

MAX_SEED = 2**64 - 1
MAX_BIAS = 1e9
MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True)
class SamplingParams:
    """How a row's tokens are chosen, and when it ends.

    The steps and their order are llama.cpp's: penalties and `logit_bias`, then `top_k`, `top_p`,
    `min_p`, then temperature, then one draw. `temperature=0` (the default) takes the most likely
    token, and makes every other knob but the penalties and the bias idle.

    Raises `ConfigError` on construction, naming the field, when a value is out of range.
    """

    max_tokens: int = 512
    """Most tokens to generate, at least 1."""
    temperature: float = 0.0
    """0 is greedy; higher is more random."""
    top_k: int = 40
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 0.95
    """Keep the smallest set of tokens with this much probability; 1 keeps all."""
    min_p: float = 0.05
    """Drop tokens less likely than this share of the most likely one; 0 keeps all."""
    seed: int = 0
    """Start of the row's own random stream, which depends on this and the row's id alone."""
    stop: tuple[str, ...] = ()
    """Generation ends before the first of these strings; it is not part of the text."""
    repeat_penalty: float = 1.0
    """Divides (or multiplies, if negative) the logits of tokens seen lately; 1 is off."""
    presence_penalty: float = 0.0
    """Subtracted once from the logits of tokens seen lately."""
    frequency_penalty: float = 0.0
    """Subtracted from the logits of tokens seen lately, for each time seen."""
    penalty_last_n: int = 64
    """How many of the latest tokens, prompt included, count as lately; -1 is all of them."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these token ids; -inf bans a token."""
    ignore_eos: bool = False
    """Go on to `max_tokens` whatever the model says."""
    n: int = 1
    """Answers of a row; each has its own random stream."""
    logprobs: bool = False
    """Report the logarithm of each token's probability, before temperature and penalties."""
    top_logprobs: int = 0
    """With `logprobs`: report as many of the likeliest tokens beside each, at most 20."""
    max_reasoning_tokens: int | None = None
    """Most tokens of a reasoning model before its answer; then its reasoning is closed for it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "logit_bias", _token_biases(self.logit_bias))
        _integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _number("temperature", self.temperature, 0.0, 100.0)
        _integer("top_k", self.top_k, 0, 2**31 - 1)
        _number("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _integer("seed", self.seed, 0, MAX_SEED)
        _number("repeat_penalty", self.repeat_penalty, 0.0, 100.0, low_open=True)
        _number("presence_penalty", self.presence_penalty, -100.0, 100.0)
        _number("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        _integer("penalty_last_n", self.penalty_last_n, -1, 2**31 - 1)
        _integer("n", self.n, 1, MAX_CHOICES)
        _integer("top_logprobs", self.top_logprobs, 0, MAX_TOP_LOGPROBS)
        if self.max_reasoning_tokens is not None:
            _integer("max_reasoning_tokens", self.max_reasoning_tokens, 0, 2**31 - 1)
        for name in ("ignore_eos", "logprobs"):
            if not isinstance(value := getattr(self, name), bool):
                raise ConfigError(f"{name}: must be true or false, not {value!r}")
        if self.top_logprobs and not self.logprobs:
            raise ConfigError("top_logprobs: goes with 'logprobs': true")

    @property
    def is_greedy(self) -> bool:
        """Whether the token is the plain argmax of the logits."""
        return self.temperature == 0.0 and not self.changes_logits

    @property
    def changes_logits(self) -> bool:
        """Whether penalties or biases change the logits before a token is chosen."""
        return bool(self.logit_bias) or self.penalizes

    @property
    def penalizes(self) -> bool:
        """Whether tokens seen lately are penalized."""
        on = self.repeat_penalty != 1.0 or self.presence_penalty or self.frequency_penalty
        return bool(on) and self.penalty_last_n != 0

    def updated(self, changes: Mapping[str, Any]) -> SamplingParams:
        """Return a copy with `changes` applied, as a row of input gives them.

        Raises `InputError` naming the field for an unknown name or an unusable value.
        """
        for name in changes:
            if name not in PARAMETER_NAMES:
                close = get_close_matches(name, PARAMETER_NAMES, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise InputError(f"unknown parameter{hint}", field=name)
        try:
            return replace(self, **changes)
        except ConfigError as error:
            name, _, message = str(error).partition(": ")
            raise InputError(message, field=name) from None


PARAMETER_NAMES = tuple(f.name for f in fields(SamplingParams))


def _integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name}: must be a whole number, not {value!r}")
    if not low <= value <= high:
        raise ConfigError(f"{name}: must be from {low} to {high}, not {value}")


def _number(name: str, value: object, low: float, high: float, *, low_open: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{name}: must be a number, not {value!r}")
    if not low <= value <= high or (low_open and value == low):  # also refuses NaN
        above = f"above {low:g} and at most" if low_open else f"from {low:g} to"
        raise ConfigError(f"{name}: must be {above} {high:g}, not {value}")


def _stop_strings(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, (list, tuple)) or not all(isinstance(s, str) and s for s in value):
        raise ConfigError(f"stop: must be a non-empty string or a list of them, not {value!r}")
    return tuple(value)


def _token_biases(value: object) -> dict[int, float]:
    """Accept JSON's string keys beside integers."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"logit_bias: must map token ids to numbers, not {value!r}")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not _is_token_id(key):
            raise ConfigError(f"logit_bias: {key!r} is not a token id")
        where = f"logit_bias: the bias of token {key}"
        if isinstance(bias, bool) or not isinstance(bias, (int, float)):
            raise ConfigError(f"{where} must be a number, not {bias!r}")
        # Logits of +inf have no distribution; this also refuses NaN.
        if bias != -math.inf and not -MAX_BIAS <= bias <= MAX_BIAS:
            raise ConfigError(f"{where} must be -inf or from -1e9 to 1e9, not {bias}")
        biases[int(key)] = float(bias)
    return biases


def _is_token_id(key: object) -> bool:
    if isinstance(key, str):
        return len(key) <= 10 and key.isascii() and key.isdigit()
    return isinstance(key, int) and not isinstance(key, bool) and key >= 0
