"""From the measurements of growing batches to a curve, and where it flattens."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log2

from localbatch.compare.figures import Agreement, Figures, agreement, figures, per_second
from localbatch.compare.forks import Answers
from localbatch.compare.task import Outcome

FLAT = 0.1
"""A doubling of the batch that gives less than this share more is not worth it."""


@dataclass(frozen=True)
class Point:
    """One batch size; medians of the rounds."""

    batch: int
    wall_s: float
    wall_range_s: tuple[float, float]
    total_tokens: int
    """Prompts and answers."""
    tokens_per_s: float
    """Prompts and answers."""
    output_tokens_per_s: float
    peak_mib: float
    memory_change_mib: float
    """Against the curve's smallest batch."""
    speedup_over_1: float | None
    """Of `output_tokens_per_s`; `None` if a batch of one row was not measured."""
    speedup_over_2: float | None
    efficiency: float | None
    """`speedup_over_1` for each row of the batch."""
    ttft_p50_s: float = 0.0
    """From the start to a row's first token; all rows arrive at once."""
    itl_p50_s: float = 0.0
    """From one token of a row to its next."""
    latency_p50_s: float = 0.0
    """From the start to a row's last token."""
    agreement: Agreement | None = None
    """With the same rows one at a time, in the round with the least; `None`: not checked."""
    gpu_use: float | None = None
    gpu_peak_mib: float | None = None


@dataclass(frozen=True)
class Curve:
    """One scheme in one KV layout."""

    scheme: str
    layout: str
    points: tuple[Point, ...]
    failed: Mapping[int, str]
    """Why a batch size could not be measured."""
    knee: int | None
    """The batch size after which the gain flattens; `None`: it still grows at the largest."""


def curve_of(
    scheme: str,
    layout: str,
    runs: Mapping[int, Sequence[Outcome]],
    failed: Mapping[int, str],
    answers: Answers | None = None,
) -> Curve:
    """Put the measurements of a curve together, by batch size.

    `answers` are those of the rows one at a time, if they are to be compared.
    """
    found = {size: [figures(outcome) for outcome in rounds] for size, rounds in runs.items()}
    wall = {size: _median(rounds, "wall_s") for size, rounds in found.items()}
    rate = {size: per_second(rounds[0].output_tokens, wall[size]) for size, rounds in found.items()}
    peak = {size: _median(rounds, "peak_mib") for size, rounds in found.items()}
    points = []
    for size, rounds in found.items():
        walls = [each.wall_s for each in rounds]
        total = rounds[0].prompt_tokens + rounds[0].output_tokens
        over_1 = _ratio(rate[size], rate.get(1))
        points.append(
            Point(
                batch=size, wall_s=wall[size], wall_range_s=(min(walls), max(walls)),
                total_tokens=total, tokens_per_s=per_second(total, wall[size]),
                output_tokens_per_s=rate[size], peak_mib=peak[size],
                memory_change_mib=peak[size] - peak[min(peak)],
                speedup_over_1=over_1, speedup_over_2=_ratio(rate[size], rate.get(2)),
                efficiency=None if over_1 is None else over_1 / size,
                ttft_p50_s=_median(rounds, "ttft_p50_s"), itl_p50_s=_median(rounds, "itl_p50_s"),
                latency_p50_s=_median(rounds, "latency_p50_s"),
                agreement=None if answers is None else _least_agreement(answers, runs[size]),
                gpu_use=_median_or_none(rounds, "gpu_use"),
                gpu_peak_mib=_median_or_none(rounds, "gpu_peak_mib"),
            )
        )  # fmt: skip
    return Curve(scheme, layout, tuple(points), dict(failed), knee(rate))


def _median(rounds: Sequence[Figures], name: str) -> float:
    values: list[float] = [getattr(each, name) for each in rounds]
    return statistics.median(values)


def _median_or_none(rounds: Sequence[Figures], name: str) -> float | None:
    values = [getattr(each, name) for each in rounds]
    return None if None in values else statistics.median(values)


def _least_agreement(answers: Answers, rounds: Sequence[Outcome]) -> Agreement:
    """Compare only the rows that a batch size has, in the round with the fewest that agree."""
    found = []
    for outcome in rounds:
        rows = {*outcome.tokens, *outcome.errors}
        same = {row: tokens for row, tokens in answers.items() if row in rows}
        found.append(agreement(same, outcome.tokens))
    return min(found, key=lambda one: one.identical)


def _ratio(rate: float, base: float | None) -> float | None:
    return rate / base if base else None


def knee(rates: Mapping[int, float]) -> int | None:
    """Return the least batch size over which none of the larger ones gains enough.

    Enough is a tenth for each doubling: four times the rows must be 1.21 times as fast. `None` if
    the largest gains enough over all others.
    """
    sizes = sorted(rates)
    for size in sizes[:-1]:
        if all(
            rates[larger] < rates[size] * (1 + FLAT) ** log2(larger / size)
            for larger in sizes
            if larger > size
        ):
            return size
    return None
