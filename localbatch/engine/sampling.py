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
from localbatch.scheduler.plan import PlanRow
from localbatch.scheduler.sequence import Likelihood
from localbatch.scheduler.sequence import Sequence as TokenSequence

_NEAR = 12.0
"""First guess at how far below the best logit the top-k tokens lie."""


def sample(rows: Sequence[PlanRow], logits: Logits) -> list[int]:
    """Return the next token of each row; notes the likelihoods of rows that ask for them."""
    tokens: list[int]
    if all(row.sequence.request.params.is_greedy for row in rows):
        tokens = logits.argmax(axis=1).tolist()
    else:
        tokens = [sample_row(row.sequence, logits[i]) for i, row in enumerate(rows)]
    for i, row in enumerate(rows):
        sequence = row.sequence
        if sequence.forced:
            tokens[i] = sequence.forced[0]
        if sequence.request.params.logprobs:
            top = sequence.request.params.top_logprobs
            sequence.likelihoods.append(likelihood(logits[i], tokens[i], top))
    return tokens


def likelihood(logits: npt.NDArray[np.float32], token: int, top: int) -> Likelihood:
    """Return natural logs of the softmax of one row's logits, shape (vocabulary,).

    Of `token`, and of the `top` likeliest tokens; equal ones are put in the order of their ids.
    """
    shares = logits.astype(np.float64)
    best = float(shares.max())
    np.subtract(shares, best, out=shares)
    log_sum = best + log(float(np.exp(shares, out=shares).sum()))
    tokens = _top_k(logits, top) if top else np.zeros(0, np.int64)
    tokens = tokens[np.lexsort((tokens, -logits[tokens]))]
    likeliest = [(int(t), float(logits[t]) - log_sum) for t in tokens]
    return Likelihood(token, float(logits[token]) - log_sum, tuple(likeliest))


def sample_row(sequence: TokenSequence, logits: npt.NDArray[np.float32]) -> int:
    """Return the next token of one sequence from its logits, shape (vocabulary,)."""
    request = sequence.request
    params = request.params
    if params.changes_logits:
        logits = adjusted(logits, sequence.tokens, params)
    if params.temperature == 0.0 or (params.logit_bias and logits.max() == -np.inf):
        return int(logits.argmax())  # with every token banned there is nothing to draw from
    tokens, chances = distribution(logits, params)
    number = uniform(params.seed, request.id, sequence.num_generated, sequence.choice)
    drawn = number * chances.sum()
    place = int(np.searchsorted(chances.cumsum(), drawn, side="right"))
    return int(tokens[min(place, len(tokens) - 1)])


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
    tokens = _top_k(logits, params.top_k)
    values = logits[tokens].astype(np.float64)
    order = np.lexsort((tokens, -values))
    tokens, values = tokens[order], values[order]
    values -= values[0]
    keep = len(tokens)
    if params.top_p < 1.0:
        shares = np.exp(values)
        shares /= shares.sum()
        keep = int(np.searchsorted(shares.cumsum(), params.top_p, side="left")) + 1
    if params.min_p > 0.0:
        keep = min(keep, int(np.searchsorted(-values, -log(params.min_p), side="right")))
    tokens, values = tokens[:keep], values[:keep]
    return tokens, np.exp(values / params.temperature)


def _top_k(logits: npt.NDArray[np.float32], k: int) -> npt.NDArray[np.int64]:
    """Return the ids of the k largest logits (more if equal ones tie; all that are finite if k=0).

    Nearly always the k best lie close to the best one, and one comparison finds them faster than a
    partition of the whole vocabulary.
    """
    best = logits.max()
    if k <= 0 or k >= len(logits):
        return np.flatnonzero(logits > -np.inf)
    near = np.flatnonzero(logits >= best - np.float32(_NEAR))
    if len(near) < k:
        near = np.flatnonzero(logits > -np.inf)
    if len(near) > k:
        values = logits[near]
        cut = np.partition(values, len(values) - k)[len(values) - k]
        near = near[values >= cut]
        if len(near) > k:  # ties at the cut: the lowest ids stay
            above = near[logits[near] > cut]
            near = np.sort(np.concatenate([above, near[logits[near] == cut][: k - len(above)]]))
    return near
