"""From what was noted of a run to figures."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from localbatch.compare.task import Outcome
from localbatch.compare.trace import Step

_MIB = 1 << 20


@dataclass(frozen=True)
class Figures:
    """One run in numbers. All rows arrive at its start, so waiting for a place counts."""

    wall_s: float
    load_s: float
    setup_s: float
    rows: int
    """Rows that were answered."""
    failed: int
    prompt_tokens: int
    computed_prompt_tokens: int
    """Less than `prompt_tokens` by what rows shared."""
    output_tokens: int
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    ttft_p50_s: float
    """From the start to a row's first token."""
    ttft_p95_s: float
    itl_p50_s: float
    """From one token of a row to its next."""
    itl_p95_s: float
    latency_p50_s: float
    """From the start to a row's last token."""
    latency_p95_s: float
    peak_mib: float
    """All processes together."""
    cpu_cores: float
    """Cores that were busy, on average."""
    gpu_use: float | None
    gpu_peak_mib: float | None
    calls: int
    """Computations that gave running rows their next token."""
    rows_per_call: float
    occupancy: float
    """Share of the batch's places that had a row, on average over `calls`."""
    idle_rows: int
    """Places without a row, over all `calls`."""
    padding_tokens: int
    """What a rectangular batch would compute besides."""


def figures(outcome: Outcome) -> Figures:
    """Return the figures of a run."""
    times = list(outcome.token_times.values())
    wall = outcome.wall_s
    prompt, output = sum(outcome.prompt_tokens.values()), sum(map(len, outcome.tokens.values()))
    ttft = percentiles([row[0] for row in times])
    itl = percentiles(gaps(times))
    latency = percentiles([row[-1] for row in times])
    calls = decode_calls(outcome.steps)
    taken, places = sum(calls), len(calls) * outcome.batch_rows
    gpu_bytes = outcome.gpu_peak_bytes
    return Figures(
        wall_s=wall, load_s=outcome.load_s, setup_s=outcome.setup_s,
        rows=len(outcome.tokens), failed=len(outcome.errors),
        prompt_tokens=prompt,
        computed_prompt_tokens=sum(step.prompt_tokens for step in outcome.steps),
        output_tokens=output,
        requests_per_s=per_second(len(outcome.tokens), wall),
        prompt_tokens_per_s=per_second(prompt, wall),
        output_tokens_per_s=per_second(output, wall),
        ttft_p50_s=ttft[0], ttft_p95_s=ttft[1], itl_p50_s=itl[0], itl_p95_s=itl[1],
        latency_p50_s=latency[0], latency_p95_s=latency[1],
        peak_mib=outcome.peak_bytes / _MIB, cpu_cores=per_second(outcome.cpu_s, wall),
        gpu_use=outcome.gpu_use, gpu_peak_mib=None if gpu_bytes is None else gpu_bytes / _MIB,
        calls=len(calls), rows_per_call=per_second(taken, len(calls)),
        occupancy=taken / places if places else 1.0, idle_rows=places - taken,
        padding_tokens=outcome.padding_tokens,
    )  # fmt: skip


def percentiles(values: Sequence[float]) -> tuple[float, float]:
    """Return the 50th and the 95th percentile, between two values in proportion; 0 of nothing."""
    if not values:
        return 0.0, 0.0
    median, high = np.percentile(values, [50, 95])
    return float(median), float(high)


def gaps(times: Iterable[Sequence[float]]) -> list[float]:
    """Return the seconds between the tokens of each row."""
    return [later - earlier for row in times for earlier, later in itertools.pairwise(row)]


def decode_calls(steps: Iterable[Step]) -> list[int]:
    """Return how many rows were in each computation that gave running rows their next token.

    In one pool of cells other rows' prompts may be computed beside them; their places aren't idle.
    """
    return [len(step.rows) for step in steps if step.num_decoded]


def per_second(amount: float, seconds: float) -> float:
    """Return a rate; 0 in no time."""
    return amount / seconds if seconds > 0 else 0.0


@dataclass(frozen=True)
class Difference:
    """A row whose tokens are not the reference's."""

    row: int
    """`Request.index`."""
    position: int
    """The first token that differs, from 0."""
    token: int | None
    """The reference's there; `None`: its answer had ended."""
    other: int | None
    margin: float | None = None
    """How much higher the reference's token was, in logits, by the reference's own computation."""


@dataclass(frozen=True)
class Agreement:
    """How many rows have the reference's tokens."""

    identical: int
    rows: int
    """Rows that the reference answered."""
    differences: tuple[Difference, ...] = ()

    @property
    def share(self) -> float:
        """From 0 to 1."""
        return self.identical / self.rows if self.rows else 1.0


def agreement(
    reference: Mapping[int, Sequence[int]], other: Mapping[int, Sequence[int]]
) -> Agreement:
    """Compare answers token by token; a row that is missing differs at its beginning."""
    found = []
    for row, tokens in sorted(reference.items()):
        theirs = other.get(row)
        if theirs is None or list(theirs) != list(tokens):
            found.append(_first_difference(row, tokens, theirs or ()))
    return Agreement(len(reference) - len(found), len(reference), tuple(found))


def _first_difference(row: int, tokens: Sequence[int], theirs: Sequence[int]) -> Difference:
    for place, (token, other) in enumerate(itertools.zip_longest(tokens, theirs)):
        if token != other:
            return Difference(row, place, token, other)
    return Difference(row, 0, None, None)
