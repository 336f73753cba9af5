"""How throughput grows with the batch: rows of one size, more and more of them at one time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from localbatch.compare.bench import too_many
from localbatch.compare.comparison import PADDED
from localbatch.compare.curves import Curve, Point, curve_of
from localbatch.compare.forks import Answers, Margins, forks_of, with_margins
from localbatch.compare.machine import machine
from localbatch.compare.margins import MarginTask
from localbatch.compare.modes import Continuous, Sequential, Static
from localbatch.compare.process import run_margins, run_task
from localbatch.compare.report import agreement_dict
from localbatch.compare.rounds import Run, Series, Tell, run_rounds
from localbatch.compare.task import (
    MOST_ROUNDS,
    MOST_TOKENS,
    MadeUpRows,
    Task,
    check_range,
)
from localbatch.data.config import MAX_SLOTS, EngineConfig, KVLayout
from localbatch.data.errors import ConfigError, EngineError, LocalbatchError
from localbatch.engine.backend import Numerics

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
MOST_ROWS = 1024
MOST_WAVES = 1000
MOST_MARGINS = 5
"""Rows of a batch size whose first difference is looked at closely."""
SCHEMES = (Static.name, Continuous.name)


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


def sweep(
    config: SweepConfig,
    *,
    run: Run = run_task,
    look: Margins = run_margins,
    tell: Tell = lambda line: None,
) -> Sweep:
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
    if answers is not None:
        curves = looked_at(curves, answers, config, look)
    return Sweep(
        config.name or config.engine.model, machine(), config.prompt_tokens, config.max_tokens,
        config.rounds, tuple(curves), (*notes, *_notes_on(series)),
    )  # fmt: skip


def reference_of(
    config: SweepConfig, series: Series, run: Run, tell: Tell
) -> tuple[Answers | None, list[str]]:
    """Return the answers of the most rows that were measured, run one at a time, and remarks."""
    most = max(len(runs[0].tokens) for runs in series.runs.values())
    rows = MadeUpRows(most, config.prompt_tokens, config.max_tokens)
    tell(f"{most} rows one at a time, to compare answers with")
    try:
        return run(Task(Sequential.name, _one_at_a_time(config), rows, batch=1)).tokens, []
    except LocalbatchError as error:
        return None, [f"answers were not checked: {error}"]


def looked_at(
    curves: Sequence[Curve], answers: Answers, config: SweepConfig, look: Margins
) -> list[Curve]:
    """Look at how close the first tokens were that differ, for some rows of each batch size."""
    points = [point for curve in curves for point in curve.points]
    agreements = [point.agreement for point in points if point.agreement is not None]
    found = [forks_of(each, answers, MOST_MARGINS) for each in agreements]
    forks = tuple({fork: None for each in found for fork in each})  # sizes often fork alike
    if not forks:
        return list(curves)
    rows = MadeUpRows(len(answers), config.prompt_tokens, config.max_tokens)
    try:
        values = look(MarginTask(_one_at_a_time(config), rows, forks))
    except LocalbatchError:  # the sweep is worth having without
        return list(curves)
    known = dict(zip(forks, values, strict=True))

    def put_in(point: Point) -> Point:
        own = point.agreement
        return replace(point, agreement=own and with_margins(own, answers, known))

    return [replace(curve, points=tuple(map(put_in, curve.points))) for curve in curves]


def _one_at_a_time(config: SweepConfig) -> EngineConfig:
    return replace(config.engine, kv_layout=KVLayout.STREAMS)


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
