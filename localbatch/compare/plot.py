"""Pictures of reports; needs matplotlib."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from localbatch.compare.curves import Curve
from localbatch.compare.report import Comparison, ModeReport
from localbatch.compare.sweep import Sweep
from localbatch.compare.trace import spans
from localbatch.data.errors import ConfigError, OutputError

_FORMATS = (".png", ".svg")
_COLORS = ("#2a78d6", "#d9652b", "#14966a", "#8a57d1")
_PREFILL, _DECODE, _IDLE = "#d9652b", ("#2a78d6", "#7db1ea"), "#eef0f3"
_BREAKS = 400
"""Breaks shorter than one part in so many of the time can't be seen."""


def check(path: str) -> None:
    """Raise `ConfigError` if no such picture can be written."""
    if Path(path).suffix.lower() not in _FORMATS:
        raise ConfigError(f"{path}: must end in {' or '.join(_FORMATS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'localbatch[compare]'")


def write(report: Comparison | Sweep, path: str) -> None:
    """Draw throughput, by mode or by batch size; raises `OutputError` if it can't be written."""
    figure, axes = _figure(8, 4.5)
    if isinstance(report, Sweep):
        draw_sweep(axes, report)
    else:
        draw_modes(axes, report.modes)
    axes.set_title(report.model)
    try:
        figure.savefig(path)
    except OSError as error:
        raise OutputError(f"{path}: can't be written: {error.strerror}") from None


def _figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    return figure, figure.subplots()


def draw_modes(axes: Any, modes: Sequence[ModeReport]) -> None:
    """Draw the throughput of modes as bars, the range of the rounds as thin lines."""
    found = [mode.of("output_tokens_per_s") for mode in modes]
    values = [(0, 0, 0) if one is None else one for one in found]
    below = [median - low for median, low, _ in values]
    above = [high - median for median, _, high in values]
    ranges = [below, above] if any(below + above) else None
    names = [mode.mode for mode in modes]
    axes.barh(names, [v[0] for v in values], xerr=ranges, color=_COLORS[0], capsize=3)
    axes.invert_yaxis()
    axes.set_xlabel("output tokens per second")
    _open(axes)


def draw_sweep(axes: Any, report: Sweep) -> None:
    """Draw throughput by batch size; the large dots are the knees."""
    for number, curve in enumerate(report.curves):
        rates = {point.batch: point.output_tokens_per_s for point in curve.points}
        color = _COLORS[number % len(_COLORS)]
        axes.plot(list(rates), list(rates.values()), "o-", color=color, label=label_of(curve))
        if curve.knee is not None:
            axes.plot([curve.knee], [rates[curve.knee]], "o", color=color, markersize=11)
    sizes = sorted({point.batch for curve in report.curves for point in curve.points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("rows in the batch")
    axes.set_ylabel("output tokens per second")
    axes.legend(frameon=False)
    _open(axes)


def draw_tradeoff(axes: Any, report: Sweep) -> None:
    """Draw throughput against the time from one token of a row to its next, by batch size."""
    for number, curve in enumerate(report.curves):
        places = [(p.itl_p50_s * 1000, p.output_tokens_per_s) for p in curve.points]
        color = _COLORS[number % len(_COLORS)]
        axes.plot(*zip(*places, strict=True), "o-", color=color, label=label_of(curve))
        for point, place in zip(curve.points, places, strict=True):
            axes.annotate(
                str(point.batch), place, (5, 6 - 18 * (number % 2)), textcoords="offset points",
                color=color, fontsize=9,
            )  # fmt: skip
    axes.margins(0.1)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("milliseconds from one token of a row to its next (median)")
    axes.set_ylabel("output tokens per second, all rows")
    axes.legend(frameon=False, loc="lower right")
    _open(axes)


def draw_timeline(axes: Any, mode: ModeReport, most_s: float | None = None) -> None:
    """Draw which row was computed in which place when, up to `most_s` seconds.

    Prompts have a colour of their own, rows one after another two shades, idle places are grey.
    """
    outcome = mode.sample
    found = spans(outcome.steps, outcome.wall_s / _BREAKS)
    slots = [1] * outcome.lanes
    for span in found:
        slots[span.lane] = max(slots[span.lane], span.slot + 1)
    first = [sum(slots[:lane]) for lane in range(len(slots))]
    axes.barh(range(sum(slots)), outcome.wall_s, height=0.9, color=_IDLE)
    for span in found:
        color = _PREFILL if span.is_prefill else _DECODE[span.row % 2]
        axes.barh(
            first[span.lane] + span.slot, span.end_s - span.start_s, left=span.start_s,
            height=0.9, color=color,
        )  # fmt: skip
    axes.set_xlim(0, most_s or outcome.wall_s)
    axes.set_ylim(sum(slots) - 0.5, -0.5)
    axes.set_yticks([])
    axes.set_ylabel("places")
    axes.set_title(f"{mode.mode}: {mode.median('occupancy'):.0%} occupied", loc="left", fontsize=10)
    _open(axes)


def label_of(curve: Curve) -> str:
    """Return what a curve is called."""
    return f"{curve.scheme}, {curve.layout}"


def _open(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
