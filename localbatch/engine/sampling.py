"""Chooses tokens from logits.

Steps and order follow llama.cpp's default chain (common/sampling.cpp): penalties and biases, top-k,
top-p, min-p, temperature, draw. An answer's random numbers are a function of the row's seed and id,
of which of the row's answers it is, and of the number of tokens generated, so they are the same in
any batch, any order and after any restart.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from math import log

import numpy as np
import numpy.typing as npt

from localbatch.data.request import RowId
from localbatch.data.sampling_params import SamplingParams
from localbatch.engine.backend import Logits
from localbatch.engine.sampling_top import MOST, Ranked, rank, rank_row
from localbatch.scheduler.plan import PlanRow
from localbatch.scheduler.sequence import Likelihood
from localbatch.scheduler.sequence import Sequence as TokenSequence


def sample(rows: Sequence[PlanRow], logits: Logits) -> list[int]:
    """Return the next token of each row; notes the likelihoods of rows that ask for them."""
    sequences = [row.sequence for row in rows]
    tokens = _chosen(sequences, logits)
    for i, sequence in enumerate(sequences):
        if sequence.forced:
            tokens[i] = sequence.forced[0]
        if sequence.wants_likelihoods:
            top = sequence.request.params.top_logprobs
            sequence.likelihoods.append(likelihood(logits[i], tokens[i], top))
    return tokens


def _chosen(sequences: Sequence[TokenSequence], logits: Logits) -> list[int]:
    """Return the token that each row's settings choose.

    Which rows are beside a row must not show in its token: each is what `sample_row` returns.
    """
    if all(sequence.is_greedy for sequence in sequences):
        tokens: list[int] = logits.argmax(axis=1).tolist()
        return tokens
    tokens = [0] * len(sequences)
    together = []
    for i, sequence in enumerate(sequences):
        params = sequence.request.params
        if params.temperature > 0.0 and 0 < params.top_k <= MOST and not params.changes_logits:
            together.append(i)
        else:
            tokens[i] = sample_row(sequence, logits[i])
    if together:
        drawing = [sequences[i] for i in together]
        chosen = logits if len(together) == len(sequences) else logits[together]
        ranked = rank(chosen, np.array([s.request.params.top_k for s in drawing]))
        for i, token in zip(together, _drawn(drawing, chosen, ranked), strict=True):
            tokens[i] = token
    return tokens


def likelihood(logits: npt.NDArray[np.float32], token: int, top: int) -> Likelihood:
    """Return natural logs of the softmax of one row's logits, shape (vocabulary,).

    Of `token`, and of the `top` likeliest tokens; equal ones are put in the order of their ids.
    """
    shares = logits.astype(np.float64)
    best = float(shares.max())
    np.subtract(shares, best, out=shares)
    log_sum = best + log(float(np.exp(shares, out=shares).sum()))
    likeliest = []
    if top:
        ranked = rank(logits[None], np.array([top]))
        tokens = ranked.tokens[0, : ranked.counts[0]]
        likeliest = [(int(t), float(logits[t]) - log_sum) for t in tokens]
    return Likelihood(token, float(logits[token]) - log_sum, tuple(likeliest))


def sample_row(sequence: TokenSequence, logits: npt.NDArray[np.float32]) -> int:
    """Return the next token of one sequence from its logits, shape (vocabulary,)."""
    params = sequence.request.params
    if params.changes_logits:
        logits = adjusted(logits, sequence.tokens, params)
    if params.temperature == 0.0:
        return int(logits.argmax())
    return _drawn([sequence], logits[None], _ranked(logits, params.top_k))[0]


def _ranked(logits: npt.NDArray[np.float32], top_k: int) -> Ranked:
    if 0 < top_k <= MOST:
        return rank(logits[None], np.array([top_k]))
    return rank_row(logits[None], top_k)


def _drawn(sequences: Sequence[TokenSequence], logits: Logits, ranked: Ranked) -> list[int]:
    """Return a token for each row, drawn from its largest logits."""
    settings = [sequence.request.params for sequence in sequences]
    numbers = [
        uniform(s.request.params.seed, s.request.id, s.num_generated, s.choice) for s in sequences
    ]
    keep, weights = _weights(ranked, settings)
    sums = weights.cumsum(axis=1)
    drawn = np.array(numbers) * sums[:, -1]
    places = np.minimum((sums <= drawn[:, None]).sum(axis=1), keep - 1)
    tokens: list[int] = ranked.tokens[np.arange(len(sequences)), places].tolist()
    for i in np.flatnonzero(ranked.counts == 0):
        tokens[i] = int(logits[i].argmax())  # with every token banned there is nothing to draw from
    return tokens


def uniform(seed: int, row_id: RowId, step: int, choice: int = 0) -> float:
    """Return the random number in [0, 1) of the `step`-th token of a row's answer `choice`.

    The first answer of a row has the stream that it has as the only one.
    """
    text = f"{seed}\x00{row_id}\x00{step}" + (f"\x00{choice}" if choice else "")
    key = text.encode("utf-8", "surrogatepass")
    return (int.from_bytes(blake2b(key, digest_size=8).digest(), "little") >> 11) * 2.0**-53


def adjusted(
    logits: npt.NDArray[np.float32], tokens: Sequence[int], params: SamplingParams
) -> npt.NDArray[np.float32]:
    """Return a copy of the logits with biases and penalties applied.

    Penalties are those of llama.cpp's `llama_sampler_init_penalties`: over the last
    `penalty_last_n` tokens, prompt included, a positive logit is divided by `repeat_penalty` and a
    negative one multiplied by it; then `frequency_penalty` is taken off for each time the token was
    seen, and `presence_penalty` once.
    """
    logits = logits.copy()
    size = len(logits)
    for token, bias in params.logit_bias.items():
        if 0 <= token < size:
            logits[token] += np.float32(bias)
    if params.penalizes:
        window = tokens if params.penalty_last_n < 0 else tokens[-params.penalty_last_n :]
        seen, counts = np.unique(np.asarray(window, np.int64), return_counts=True)
        values = logits[seen]
        penalty = np.float32(params.repeat_penalty)
        values = np.where(values <= 0, values * penalty, values / penalty)
        values -= counts.astype(np.float32) * np.float32(params.frequency_penalty)
        logits[seen] = values - np.float32(params.presence_penalty)
    return logits


def distribution(
    logits: npt.NDArray[np.float32], params: SamplingParams
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Return the tokens that may follow, likeliest first, and their weights (not normalized).

    Equal logits are put in the order of their token ids.
    """
    ranked = _ranked(logits, params.top_k)
    keep, weights = _weights(ranked, [params])
    return ranked.tokens[0, : keep[0]], weights[0, : keep[0]]


def _weights(
    ranked: Ranked, settings: Sequence[SamplingParams]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Return how many of each row's largest logits are kept, and their weights; others have 0.

    Sums are cumulative ones, which add up one by one: what a row is padded with changes no bit.
    """
    values, keep = ranked.values, ranked.counts
    top_p = np.array([params.top_p for params in settings])
    if (top_p < 1.0).any():
        shares = np.exp(values)
        shares /= np.maximum(shares.cumsum(axis=1)[:, -1:], 1.0)  # 1 is the least, but of no token
        reached = (shares.cumsum(axis=1) < top_p[:, None]).sum(axis=1) + 1
        keep = np.where(top_p < 1.0, np.minimum(keep, reached), keep)
    lows = np.array([log(params.min_p) if params.min_p > 0.0 else -np.inf for params in settings])
    keep = np.minimum(keep, (values >= lows[:, None]).sum(axis=1))
    weights = np.exp(values / np.array([params.temperature for params in settings])[:, None])
    weights[np.arange(values.shape[1]) >= keep[:, None]] = 0.0
    return keep, weights
