"""Small charts as SVG; colours come from the page's style sheet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log2, log10

import numpy as np

from localbatch.compare.trace import Span

WIDTH = 760
_LEFT, _RIGHT, _BAR, _LINE_HEIGHT = 170, 70, 26, 340
_MOST_TIMELINE, _LEAST_SLOT, _MOST_SLOT = 240, 3, 14


@dataclass(frozen=True)
class Bar:
    """A value with its range, and what is written beside it."""

    label: str
    value: float
    low: float
    high: float
    note: str


def bars(values: Sequence[Bar]) -> str:
    """Return horizontal bars from 0, with a line over the range of each."""
    most = max((bar.high for bar in values), default=0) or 1
    plot = WIDTH - _LEFT - _RIGHT - 60
    parts = []
    for number, bar in enumerate(values):
        top, length = number * _BAR, plot * bar.value / most
        middle = top + _BAR / 2 - 3
        low, high = (_LEFT + plot * edge / most for edge in (bar.low, bar.high))
        parts += [
            _text(_LEFT - 8, middle + 4, bar.label, "end"),
            _rect(_LEFT, top + 2, length, _BAR - 10, "series-0", f"{bar.label}: {bar.note}"),
            f'<path class="axis" d="M{low:.1f} {middle:.1f}H{high:.1f}"/>',
            _text(max(high, _LEFT + length) + 8, middle + 4, bar.note, "start"),
        ]
    return _svg(len(values) * _BAR, parts, "bars")


def ranges(values: Sequence[tuple[str, Sequence[float]]], unit: str, scale: float = 1.0) -> str:
    """Return for each list of values its middle half as a bar, its middle 90 % as a line.

    The axis is logarithmic.
    """
    kept = [(label, np.asarray(v, float) * scale) for label, v in values if len(v) and max(v) > 0]
    if not kept:
        return ""
    found = [(label, np.percentile(v, [5, 25, 50, 75, 95])) for label, v in kept]
    least = max(min(q[0] for _, q in found), max(q[4] for _, q in found) * 1e-4)
    first, last = floor(log10(least)), ceil(log10(max(q[4] for _, q in found)))
    last, plot = max(last, first + 1), WIDTH - _LEFT - _RIGHT

    def place(value: float) -> float:
        return _LEFT + plot * (log10(max(value, 10.0**first)) - first) / (last - first)

    bottom, parts = len(found) * _BAR, []
    for exponent in range(first, last + 1):
        x = place(10.0**exponent)
        parts.append(f'<path class="grid" d="M{x:.1f} 0V{bottom}"/>')
        parts.append(_text(x, bottom + 16, f"{10.0**exponent:g} {unit}", "middle"))
    for number, (label, (p5, p25, p50, p75, p95)) in enumerate(found):
        top = number * _BAR
        middle = top + _BAR / 2 - 3
        told = f"{label}: half of them from {p25:.3g} to {p75:.3g} {unit}, median {p50:.3g}"
        width = max(2.0, place(p75) - place(p25))
        parts += [
            _text(_LEFT - 8, middle + 4, label, "end"),
            f'<path class="axis" d="M{place(p5):.1f} {middle:.1f}H{place(p95):.1f}"/>',
            _rect(place(p25), top + 2, width, _BAR - 10, "series-0", told),
            f'<path class="mark" d="M{place(p50):.1f} {top}v{_BAR - 6}"/>',
        ]
    return _svg(bottom + 22, parts, "ranges")


@dataclass(frozen=True)
class Line:
    """Points of one series, by batch size; one of them may be marked."""

    label: str
    points: Sequence[tuple[int, float]]
    marked: int | None = None


def lines(values: Sequence[Line], unit: str) -> str:
    """Return curves over a doubling axis, from 0 upwards; what each colour means is told beside it.

    Texts leave room for twice their size, which a narrow page gives them; labels of class `extra`
    are in each other's way then.
    """
    points = [point for line in values for point in line.points]
    if not points:
        return ""
    highest = max(y for _, y in points) or 1
    step = _round_step(highest)
    most = step * ceil(highest / step - 1e-9)
    last = max(1.0, log2(max(x for x, _ in points)))
    left, height = 104, _LINE_HEIGHT
    plot = WIDTH - left - 40

    def place(x: int, y: float) -> tuple[float, float]:
        return left + plot * log2(x) / last, 26 + (height - 26) * (1 - y / most)

    parts = []
    for number in range(round(most / step) + 1):
        level = place(1, step * number)[1]
        parts.append(f'<path class="grid" d="M{left} {level:.1f}h{plot}"/>')
        parts.append(_text(left - 10, level + 5, _number(step * number), "end"))
    places = {x: place(x, 0)[0] for x in sorted({x for x, _ in points})}
    narrow = _apart(places, 13)
    for batch in _apart(places, 7):
        kind = "" if batch in narrow else "extra"
        parts.append(_text(places[batch], height + 28, str(batch), "middle", kind))
    parts.append(_text(left + plot / 2, height + 60, f"rows in the batch; {unit}", "middle"))
    for number, line in enumerate(values):
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in (place(*point) for point in line.points))
        parts.append(f'<path class="line stroke-{number % 4}" d="M{path}"/>' if path else "")
        for batch, value in line.points:
            size = 8 if batch == line.marked else 4
            told = f"{line.label}, {batch} rows: {value:.4g} {unit}"
            parts.append(_dot(*place(batch, value), size, f"series-{number % 4}", told))
    return _svg(height + 70, parts, "lines")


def _round_step(most: float) -> float:
    """Return a round number that three to six of make up to `most`."""
    power = 10.0 ** floor(log10(most / 4))
    return next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor * 6 >= most)


def _apart(places: Mapping[int, float], letter: float) -> list[int]:
    """Return the numbers that can be written at their places, letters being so wide.

    The largest comes first, then doublings, then what fits between.
    """
    kept: list[int] = []
    by_worth = sorted(places, key=lambda x: (x != max(places), x & (x - 1) != 0, x))
    for number in by_worth:
        if all(
            abs(places[number] - places[other])
            >= letter * ((len(str(number)) + len(str(other))) / 2 + 0.6)
            for other in kept
        ):
            kept.append(number)
    return kept


def timeline(spans: Sequence[Span], wall_s: float, places: Sequence[int]) -> str:
    """Return what was computed in each place when; `places` has the number for each lane.

    Rows take turns with two shades, prompts have a colour of their own; idle places stay empty.
    """
    offsets = [sum(places[:lane]) for lane in range(len(places))]
    total = max(1, sum(places))
    height = max(_LEAST_SLOT, min(_MOST_SLOT, _MOST_TIMELINE // total))
    plot, bottom = WIDTH - _RIGHT - 20, total * height
    parts = [_rect(20, 0, plot, bottom, "idle", "idle")]
    for span in spans:
        x, width = 20 + plot * span.start_s / wall_s, plot * (span.end_s - span.start_s) / wall_s
        kind = "prefill" if span.is_prefill else f"decode-{span.row % 2}"
        what = "prompt" if span.is_prefill else "answer"
        told = f"row {span.row + 1}, {what}: {span.start_s:.2f} to {span.end_s:.2f} s"
        y = (offsets[span.lane] + span.slot) * height
        parts.append(_rect(x, y, max(width, 0.4), height - 0.6, kind, told))
    for offset in offsets[1:]:
        parts.append(f'<path class="axis" d="M20 {offset * height - 0.3:.1f}h{plot}"/>')
    parts += [
        _text(20, bottom + 16, "0 s", "start"),
        _text(20 + plot, bottom + 16, f"{wall_s:.2f} s", "end"),
    ]
    return _svg(bottom + 22, parts, "timeline")


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _svg(height: float, parts: Sequence[str], kind: str) -> str:
    return (
        f'<svg class="{kind}" role="img" viewBox="0 0 {WIDTH} {height:.0f}" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _rect(x: float, y: float, width: float, height: float, kind: str, told: str) -> str:
    return (
        f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}">'
        f"<title>{escape(told)}</title></rect>"
    )


def _dot(x: float, y: float, size: float, kind: str, told: str) -> str:
    return (
        f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{size}">'
        f"<title>{escape(told)}</title></circle>"
    )
