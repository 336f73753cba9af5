"""How throughput grows with the batch: rows of one size, more and more of them at one time."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import log2
from typing import Any

from localbatch.compare.bench import too_many
from localbatch.compare.comparison import PADDED
from localbatch.compare.figures import Agreement, Figures, agreement, figures, per_second
from localbatch.compare.machine import machine
from localbatch.compare.modes import Continuous, Sequential, Static
from localbatch.compare.process import run_task
from localbatch.compare.report import agreement_dict
from localbatch.compare.rounds import Run, Series, Tell, run_rounds
from localbatch.compare.task import (
    MOST_ROUNDS,
    MOST_TOKENS,
    MadeUpRows,
    Outcome,
    Task,
    check_range,
)
from localbatch.data.config import MAX_SLOTS, EngineConfig, KVLayout
from localbatch.data.errors import ConfigError, EngineError, LocalbatchError
from localbatch.engine.backend import Numerics

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
MOST_ROWS = 1024
MOST_WAVES = 1000
SCHEMES = (Static.name, Continuous.name)

FLAT = 0.1
"""A doubling of the batch that gives less than this share more is not worth it."""


def bad_size(found: str) -> str:
    """Say that something is no batch size."""
    return f"sizes: must be whole numbers from 1 to {MOST_ROWS:,}, as 1,2,4; found {found}"


@dataclass(frozen=True)
class SweepConfig:
    """What is to be measured. Raises `ConfigError`, naming the setting, when a value won't do."""

    engine: EngineConfig
    sizes: tuple[int, ...] = SIZES
    prompt_tokens: int = 64
    max_tokens: int = 32
    rounds: int = 3
    waves: int = 1
    """Rows of a measurement, in batches."""
    schemes: tuple[str, ...] = SCHEMES
    layouts: tuple[KVLayout, ...] = tuple(KVLayout)
    check: bool = True
    """Also run the rows one at a time, once and outside of all figures, and compare answers."""
    name: str = ""
    """What the report calls the model."""
    max_ctx: int | None = None
    """Context of the model in tokens, if it is known: rows must fit it, or that of `engine`."""

    def __post_init__(self) -> None:
        wrong = [f"{size:,}" for size in self.sizes if not 1 <= size <= MOST_ROWS]
        if wrong or not self.sizes:
            raise ConfigError(bad_size(wrong[0] if wrong else "nothing"))
        if unknown := [name for name in self.schemes if name not in SCHEMES]:
            raise ConfigError(f"schemes: {unknown[0]!r} is not one of {', '.join(SCHEMES)}")
        check_range("prompt_tokens", self.prompt_tokens, 1, MOST_TOKENS)
        check_range("max_tokens", self.max_tokens, 1, MOST_TOKENS)
        check_range("rounds", self.rounds, 1, MOST_ROUNDS)
        check_range("waves", self.waves, 1, MOST_WAVES)
        longest, whose = (
            self.engine.ctx or self.max_ctx,
            "--ctx" if self.engine.ctx else "the model's",
        )
        needed = self.prompt_tokens + self.max_tokens
        if longest and needed > longest:
            raise ConfigError(
                f"prompt_tokens: {self.prompt_tokens:,} and --max-tokens {self.max_tokens:,} are "
                f"{needed:,} tokens a row, more than the context of {longest:,} ({whose})"
            )


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


@dataclass(frozen=True)
class Sweep:
    """All curves."""

    model: str
    machine: Mapping[str, Any]
    prompt_tokens: int
    max_tokens: int
    rounds: int
    curves: tuple[Curve, ...]
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        told = asdict(replace(self, machine=dict(self.machine)))
        for curve, own in zip(self.curves, told["curves"], strict=True):
            for point, each in zip(curve.points, own["points"], strict=True):
                each["agreement"] = point.agreement and agreement_dict(point.agreement)
        return told


def sweep(config: SweepConfig, *, run: Run = run_task, tell: Tell = lambda line: None) -> Sweep:
    """Measure every batch size of every curve, each in a process of its own, in every round.

    Raises `EngineError` if nothing could be measured.
    """
    series = run_rounds(tasks_of(config), config.rounds, run, tell)
    if not series.runs:
        failed = series.failed or impossible(config)
        raise EngineError(f"nothing could be measured: {next(iter(failed.values()))}")
    failed = {**series.failed, **impossible(config)}
    answers, notes = reference_of(config, series, run, tell) if config.check else (None, [])
    curves = []
    for scheme in config.schemes:
        for layout in config.layouts:
            names = {size: _name(scheme, layout, size) for size in sorted(set(config.sizes))}
            runs = {size: series.runs[n] for size, n in names.items() if n in series.runs}
            reasons = {size: failed[n] for size, n in names.items() if n in failed}
            curves.append(curve_of(scheme, layout.value, runs, reasons, answers))
    return Sweep(
        config.name or config.engine.model, machine(), config.prompt_tokens, config.max_tokens,
        config.rounds, tuple(curves), (*notes, *_notes_on(series)),
    )  # fmt: skip


def reference_of(
    config: SweepConfig, series: Series, run: Run, tell: Tell
) -> tuple[Mapping[int, Sequence[int]] | None, list[str]]:
    """Return the answers of the most rows that were measured, run one at a time, and remarks."""
    most = max(len(runs[0].tokens) for runs in series.runs.values())
    rows = MadeUpRows(most, config.prompt_tokens, config.max_tokens)
    engine = replace(config.engine, kv_layout=KVLayout.STREAMS)
    tell(f"{most} rows one at a time, to compare answers with")
    try:
        return run(Task(Sequential.name, engine, rows, batch=1)).tokens, []
    except LocalbatchError as error:
        return None, [f"answers were not checked: {error}"]


def _notes_on(series: Series) -> list[str]:
    """Return what a reader of the agreement must know."""
    found = {run.numerics for runs in series.runs.values() for run in runs}
    return [PADDED] if Numerics.SAME_IN_ANY_BATCH in found else []


def impossible(config: SweepConfig) -> dict[str, str]:
    """Return the points that no machine can measure, and why."""
    return {
        _name(scheme, layout, size): too_many(size)
        for scheme in config.schemes
        for layout in config.layouts
        for size in sorted(set(config.sizes))
        if size > MAX_SLOTS and (scheme == Static.name or layout is KVLayout.UNIFIED)
    }


def tasks_of(config: SweepConfig) -> dict[str, Task]:
    """Return a task for each point of each curve that can be measured."""
    left_out = impossible(config)
    return {
        _name(scheme, layout, size): Task(
            scheme,
            replace(config.engine, kv_layout=layout),
            MadeUpRows(size * config.waves, config.prompt_tokens, config.max_tokens),
            batch=size,
        )
        for scheme in config.schemes
        for layout in config.layouts
        for size in sorted(set(config.sizes))
        if _name(scheme, layout, size) not in left_out
    }


def _name(scheme: str, layout: KVLayout, size: int) -> str:
    return f"{scheme}, {layout.value}, {size}"


def curve_of(
    scheme: str,
    layout: str,
    runs: Mapping[int, Sequence[Outcome]],
    failed: Mapping[int, str],
    answers: Mapping[int, Sequence[int]] | None = None,
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


def _least_agreement(answers: Mapping[int, Sequence[int]], rounds: Sequence[Outcome]) -> Agreement:
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
