"""The first plot of a report as a picture; needs matplotlib."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from localbatch.compare.report import Comparison
from localbatch.compare.sweep import Sweep
from localbatch.data.errors import ConfigError, OutputError

_FORMATS = (".png", ".svg")
_COLORS = ("#2a78d6", "#d9652b", "#14966a", "#8a57d1")


def check(path: str) -> None:
    """Raise `ConfigError` if no such picture can be written."""
    if Path(path).suffix.lower() not in _FORMATS:
        raise ConfigError(f"{path}: must end in {' or '.join(_FORMATS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'localbatch[compare]'")


def write(report: Comparison | Sweep, path: str) -> None:
    """Draw throughput, by mode or by batch size; raises `OutputError` if it can't be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    if isinstance(report, Sweep):
        _draw_sweep(axes, report)
    else:
        _draw_modes(axes, report)
    axes.set_title(report.model)
    axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path)
    except OSError as error:
        raise OutputError(f"{path}: can't be written: {error.strerror}") from None


def _draw_modes(axes: Any, report: Comparison) -> None:
    names = [mode.mode for mode in report.modes]
    found = [mode.of("output_tokens_per_s") for mode in report.modes]
    values = [(0, 0, 0) if one is None else one for one in found]
    below = [median - low for median, low, _ in values]
    above = [high - median for median, _, high in values]
    axes.barh(names, [v[0] for v in values], xerr=[below, above], color=_COLORS[0], capsize=3)
    axes.invert_yaxis()
    axes.set_xlabel("output tokens per second")


def _draw_sweep(axes: Any, report: Sweep) -> None:
    sizes = sorted({point.batch for curve in report.curves for point in curve.points})
    for number, curve in enumerate(report.curves):
        rates = {point.batch: point.output_tokens_per_s for point in curve.points}
        color = _COLORS[number % len(_COLORS)]
        label = f"{curve.scheme}, {curve.layout}"
        axes.plot(list(rates), list(rates.values()), "o-", color=color, label=label)
        if curve.knee is not None:
            axes.plot([curve.knee], [rates[curve.knee]], "o", color=color, markersize=11)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("rows in the batch")
    axes.set_ylabel("output tokens per second")
    axes.legend()
