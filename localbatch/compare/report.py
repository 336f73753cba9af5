"""The result of a comparison, and what is shown of it in a terminal and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from localbatch.compare.figures import Agreement, Difference, Figures
from localbatch.compare.task import Outcome


class Spread(NamedTuple):
    """Median and range of the rounds."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Return median and range."""
    return Spread(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class ModeReport:
    """What one mode took."""

    mode: str
    about: str
    rounds: tuple[Figures, ...]
    sample: Outcome
    """The round with the median time, with all its times."""
    speedup: Spread
    """Over the reference, round by round; the median is that of the median times."""
    efficiency: float
    """The speed-up for each row that is alive at one time."""
    agreement: Agreement
    """With the reference, in the round where it is least."""

    def of(self, name: str) -> Spread | None:
        """Return median and range of one of the figures; `None` if it was not measured."""
        values = [getattr(figures, name) for figures in self.rounds]
        return None if None in values else spread(values)

    def median(self, name: str) -> float:
        """Return the median of a figure; NaN if it was not measured."""
        found = self.of(name)
        return float("nan") if found is None else found.median

    def as_dict(self) -> dict[str, Any]:
        """Return medians by name, and ranges as `NAME_range`."""
        told: dict[str, Any] = {"mode": self.mode, "about": self.about}
        for field in fields(Figures):
            found = self.of(field.name)
            told[field.name] = found and found.median
            if found is not None and (found.low, found.high) != (found.median, found.median):
                told[f"{field.name}_range"] = [found.low, found.high]
        told |= {
            "processes": self.sample.processes, "lanes": self.sample.lanes,
            "threads": self.sample.threads, "rows_alive": self.sample.width,
            "batch_rows": self.sample.batch_rows, "layout": self.sample.layout,
            "placement": self.sample.placement,
            "speedup": self.speedup.median, "speedup_range": list(self.speedup[1:]),
            "efficiency": self.efficiency, "agreement": agreement_dict(self.agreement),
        }  # fmt: skip
        return told


def agreement_dict(found: Agreement) -> dict[str, Any]:
    """Return an agreement as plain data; rows are places in the input, from 0."""
    return {
        "identical": found.identical,
        "rows": found.rows,
        "share": found.share,
        "differences": [
            {"row": d.row, "position": d.position, "token": d.token, "other": d.other,
             "margin": d.margin}
            for d in found.differences
        ],
    }  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """All modes on the same rows."""

    model: str
    machine: Mapping[str, Any]
    rows: int
    rounds: int
    modes: tuple[ModeReport, ...]
    failed: Mapping[str, str]
    """Modes that could not be run, and why."""
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return everything but single tokens' times as plain data."""
        return {
            "model": self.model,
            "machine": dict(self.machine),
            "rows": self.rows,
            "rounds": self.rounds,
            "modes": [mode.as_dict() for mode in self.modes],
            "failed": dict(self.failed),
            "notes": list(self.notes),
        }


class Column(NamedTuple):
    """One figure in a table."""

    title: str
    show: Callable[[ModeReport], str]


def _seconds(name: str) -> Callable[[ModeReport], str]:
    return lambda mode: f"{mode.median(name):.2f}"


def _pair(low: str, high: str, scale: float = 1.0, digits: int = 2) -> Callable[[ModeReport], str]:
    return lambda mode: (
        f"{mode.median(low) * scale:.{digits}f} / {mode.median(high) * scale:.{digits}f}"
    )


def _range(mode: ModeReport) -> str:
    low, high = (mode.of("wall_s") or Spread(0, 0, 0))[1:]
    return f"{low:.2f}-{high:.2f}"


def _gpu(mode: ModeReport) -> str:
    use, memory = mode.of("gpu_use"), mode.of("gpu_peak_mib")
    return "-" if use is None or memory is None else f"{use.median:.0%}, {memory.median:,.0f} MiB"


_SPEED: tuple[Column, ...] = (
    Column("wall s", _seconds("wall_s")),
    Column("range", _range),
    Column("rows/s", _seconds("requests_per_s")),
    Column("prompt tok/s", lambda mode: f"{mode.median('prompt_tokens_per_s'):.0f}"),
    Column("output tok/s", lambda mode: f"{mode.median('output_tokens_per_s'):.0f}"),
    Column("speed-up", lambda mode: f"{mode.speedup.median:.2f}x"),
    Column("efficiency", lambda mode: f"{mode.efficiency:.0%}"),
    Column("same answers", lambda mode: f"{mode.agreement.identical} of {mode.agreement.rows}"),
)
_TIMES: tuple[Column, ...] = (
    Column("TTFT s p50 / p95", _pair("ttft_p50_s", "ttft_p95_s")),
    Column("ITL ms p50 / p95", _pair("itl_p50_s", "itl_p95_s", 1000, 1)),
    Column("latency s p50 / p95", _pair("latency_p50_s", "latency_p95_s")),
    Column("load s", _seconds("load_s")),
    Column("set-up s", _seconds("setup_s")),
)
_ROOM: tuple[Column, ...] = (
    Column("processes x lanes", lambda m: f"{m.sample.processes} x {_each(m)}"),
    Column("rows alive", lambda mode: f"{mode.sample.width}"),
    Column("occupancy", lambda mode: f"{mode.median('occupancy'):.0%}"),
    Column("idle places", lambda mode: f"{mode.median('idle_rows'):,.0f}"),
    Column("padding tok", lambda mode: f"{mode.median('padding_tokens'):,.0f}"),
    Column("peak MiB", lambda mode: f"{mode.median('peak_mib'):,.0f}"),
    Column("CPU cores", lambda mode: f"{mode.median('cpu_cores'):.2f}"),
    Column("GPU", _gpu),
)


def groups(modes: Sequence[ModeReport]) -> dict[str, tuple[Column, ...]]:
    """Return the tables' columns by the tables' names; that of a GPU only if there was one."""
    has_gpu = any(mode.of("gpu_use") is not None for mode in modes)
    return {"speed": _SPEED, "times": _TIMES, "room": _ROOM if has_gpu else _ROOM[:-1]}


def _each(mode: ModeReport) -> int:
    return mode.sample.lanes // mode.sample.processes


def text_of(report: Comparison) -> str:
    """Return the whole report for a terminal."""
    prompt = max((mode.median("prompt_tokens") for mode in report.modes), default=0)
    output = max((mode.median("output_tokens") for mode in report.modes), default=0)
    lines = [
        f"{report.model} on {report.machine.get('cpu', 'this machine')}, "
        f"{report.machine.get('cores', '?')} cores: {report.rows:,} rows, {prompt:,.0f} prompt + "
        f"{output:,.0f} output tokens, {rounds_text(report.rounds)}",
    ]
    for columns in groups(report.modes).values():
        lines += ["", *mode_table(report.modes, columns)]
    if report.failed:
        lines += ["", *(f"{name}: not run: {reason}" for name, reason in report.failed.items())]
    for more in (difference_lines(report), [f"note: {note}" for note in report.notes]):
        lines += ["", *more] if more else []
    return "\n".join(lines)


def rounds_text(rounds: int) -> str:
    """Return how often everything was measured, in words."""
    return f"medians of {rounds} rounds" if rounds > 1 else "one round"


def mode_table(modes: Sequence[ModeReport], columns: Sequence[Column]) -> list[str]:
    """Return the lines of a table with a line for each mode."""
    head = ["mode", *(column.title for column in columns)]
    return table(head, [[mode.mode, *(c.show(mode) for c in columns)] for mode in modes])


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table, the first column to the left and all others to the right."""
    widths = [max(map(len, cells)) for cells in zip(head, *rows, strict=True)]
    lines = []
    for cells in (head, *rows):
        first, *others = zip(cells, widths, strict=True)
        parts = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
        lines.append("  ".join(parts).rstrip())
    return lines


_MOST_DIFFERENCES = 5


def difference_text(found: Difference) -> str:
    """Return where a row differs, and how close it was there."""
    margin = "" if found.margin is None else f", margin {found.margin:.4f}"
    return f"row {found.row + 1} differs from token {found.position + 1} on{margin}"


def difference_lines(report: Comparison) -> list[str]:
    """Return where answers differ from the reference's, for the first few rows of each mode."""
    lines = []
    for mode in report.modes:
        found = mode.agreement.differences
        for difference in found[:_MOST_DIFFERENCES]:
            lines.append(f"{mode.mode}: {difference_text(difference)}")
        if len(found) > _MOST_DIFFERENCES:
            lines.append(f"{mode.mode}: {len(found) - _MOST_DIFFERENCES} more rows differ")
    return lines
