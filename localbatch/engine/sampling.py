"""Chooses tokens from logits.

Steps and order follow llama.cpp's default chain (common/sampling.cpp): penalties and biases, top-k,
top-p, min-p, temperature, draw. A row's random numbers are a function of its seed, its id and the
number of tokens generated, so they are the same in any batch, any order and after any restart.
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
from localbatch.scheduler.sequence import Sequence as TokenSequence

_NEAR = 12.0
"""First guess at how far below the best logit the top-k tokens lie."""


def sample(rows: Sequence[PlanRow], logits: Logits) -> list[int]:
    """Return the next token of each row."""
    if all(row.sequence.request.params.is_greedy for row in rows):
        return logits.argmax(axis=1).tolist()  # type: ignore[no-any-return]
    return [sample_row(row.sequence, logits[i]) for i, row in enumerate(rows)]


def sample_row(sequence: TokenSequence, logits: npt.NDArray[np.float32]) -> int:
    """Return the next token of one sequence from its logits, shape (vocabulary,)."""
    request = sequence.request
    params = request.params
    if params.changes_logits:
        logits = adjusted(logits, sequence.tokens, params)
    if params.temperature == 0.0 or (params.logit_bias and logits.max() == -np.inf):
        return int(logits.argmax())  # with every token banned there is nothing to draw from
    tokens, chances = distribution(logits, params)
    drawn = uniform(params.seed, request.id, sequence.num_generated) * chances.sum()
    place = int(np.searchsorted(chances.cumsum(), drawn, side="right"))
    return int(tokens[min(place, len(tokens) - 1)])


def uniform(seed: int, row_id: RowId, step: int) -> float:
    """Return the random number in [0, 1) of a row's `step`-th token."""
    key = f"{seed}\x00{row_id}\x00{step}".encode("utf-8", "surrogatepass")
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
