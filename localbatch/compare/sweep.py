"""How throughput grows with the batch: rows of one size, more and more of them at one time."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import log2
from typing import Any

from localbatch.compare.figures import figures, per_second
from localbatch.compare.machine import machine
from localbatch.compare.modes import Continuous, Static
from localbatch.compare.process import run_task
from localbatch.compare.report import rounds_text, table
from localbatch.compare.rounds import Run, Tell, run_rounds
from localbatch.compare.task import MadeUpRows, Outcome, Task
from localbatch.data.config import EngineConfig, KVLayout
from localbatch.data.errors import ConfigError, EngineError

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
MOST_ROWS = 1024
SCHEMES = (Static.name, Continuous.name)

_FLAT = 0.1
"""A doubling of the batch that gives less than this share more is not worth it."""


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
    name: str = ""
    """What the report calls the model."""

    def __post_init__(self) -> None:
        if not self.sizes or not all(1 <= size <= MOST_ROWS for size in self.sizes):
            raise ConfigError(f"sizes: must be whole numbers from 1 to {MOST_ROWS}")
        if unknown := [name for name in self.schemes if name not in SCHEMES]:
            raise ConfigError(f"schemes: {unknown[0]!r} is not one of {', '.join(SCHEMES)}")
        for name in ("prompt_tokens", "max_tokens", "rounds", "waves"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: must be at least 1, not {getattr(self, name)}")


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

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return asdict(replace(self, machine=dict(self.machine)))


def sweep(config: SweepConfig, *, run: Run = run_task, tell: Tell = lambda line: None) -> Sweep:
    """Measure every batch size of every curve, each in a process of its own, in every round.

    Raises `EngineError` if nothing could be measured.
    """
    tasks = tasks_of(config)
    series = run_rounds(tasks, config.rounds, run, tell)
    if not series.runs:
        raise EngineError(f"nothing could be measured: {next(iter(series.failed.values()))}")
    curves = []
    for scheme in config.schemes:
        for layout in config.layouts:
            names = {size: _name(scheme, layout, size) for size in sorted(set(config.sizes))}
            runs = {size: series.runs[n] for size, n in names.items() if n in series.runs}
            failed = {size: series.failed[n] for size, n in names.items() if n in series.failed}
            curves.append(curve_of(scheme, layout.value, runs, failed))
    return Sweep(
        config.name or config.engine.model, machine(), config.prompt_tokens, config.max_tokens,
        config.rounds, tuple(curves),
    )  # fmt: skip


def tasks_of(config: SweepConfig) -> dict[str, Task]:
    """Return a task for each point of each curve."""
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
    }


def _name(scheme: str, layout: KVLayout, size: int) -> str:
    return f"{scheme}, {layout.value}, {size}"


def curve_of(
    scheme: str, layout: str, runs: Mapping[int, Sequence[Outcome]], failed: Mapping[int, str]
) -> Curve:
    """Put the measurements of a curve together, by batch size."""
    found = {size: [figures(outcome) for outcome in rounds] for size, rounds in runs.items()}
    walls = {size: [f.wall_s for f in rounds] for size, rounds in found.items()}
    wall = {size: statistics.median(values) for size, values in walls.items()}
    rate = {size: per_second(rounds[0].output_tokens, wall[size]) for size, rounds in found.items()}
    peak = {size: statistics.median([f.peak_mib for f in rounds]) for size, rounds in found.items()}
    points = []
    for size, rounds in found.items():
        total = rounds[0].prompt_tokens + rounds[0].output_tokens
        over_1 = _ratio(rate[size], rate.get(1))
        points.append(
            Point(
                batch=size, wall_s=wall[size], wall_range_s=(min(walls[size]), max(walls[size])),
                total_tokens=total, tokens_per_s=per_second(total, wall[size]),
                output_tokens_per_s=rate[size], peak_mib=peak[size],
                memory_change_mib=peak[size] - peak[min(peak)],
                speedup_over_1=over_1, speedup_over_2=_ratio(rate[size], rate.get(2)),
                efficiency=None if over_1 is None else over_1 / size,
            )
        )  # fmt: skip
    return Curve(scheme, layout, tuple(points), dict(failed), knee(rate))


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
            rates[larger] < rates[size] * (1 + _FLAT) ** log2(larger / size)
            for larger in sizes
            if larger > size
        ):
            return size
    return None


def sweep_text(report: Sweep) -> str:
    """Return the whole report for a terminal."""
    lines = [
        f"{report.model} on {report.machine.get('cpu', 'this machine')}, "
        f"{report.machine.get('cores', '?')} cores: {report.prompt_tokens} prompt + "
        f"{report.max_tokens} output tokens a row, {rounds_text(report.rounds)}"
    ]
    for curve in report.curves:
        lines += ["", f"{curve.scheme}, {curve.layout}", *_curve_table(curve)]
        lines += [f"batch {size}: not run: {reason}" for size, reason in curve.failed.items()]
        lines.append(knee_line(curve))
    return "\n".join(lines)


def knee_line(curve: Curve) -> str:
    """Return where the gain flattens, in words."""
    if not curve.points:
        return "nothing could be measured"
    if curve.knee is None:
        largest = curve.points[-1].batch
        return f"the gain has not flattened at {largest} rows; larger batches may be faster still"
    return f"the knee is at {curve.knee} rows: beyond, a doubling gives less than {_FLAT:.0%} more"


_HEAD = (
    "batch", "wall s", "tokens", "tok/s", "output tok/s", "memory change MiB", "over 1", "over 2",
    "efficiency",
)  # fmt: skip


def _curve_table(curve: Curve) -> list[str]:
    return table(point_head(), [point_cells(point) for point in curve.points])


def point_head() -> Sequence[str]:
    """Return the titles of a curve's table."""
    return _HEAD


def point_cells(point: Point) -> list[str]:
    """Return a batch size's line of the table."""

    def times(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}x"

    return [
        str(point.batch),
        f"{point.wall_s:.2f}",
        f"{point.total_tokens:,}",
        f"{point.tokens_per_s:.0f}",
        f"{point.output_tokens_per_s:.0f}",
        f"{point.memory_change_mib:+,.0f}",
        times(point.speedup_over_1),
        times(point.speedup_over_2),
        "-" if point.efficiency is None else f"{point.efficiency:.0%}",
    ]
