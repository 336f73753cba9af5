"""What is shown of a sweep in a terminal, and of its curves on a page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from localbatch.compare.curves import FLAT, Curve, Point
from localbatch.compare.figures import Difference
from localbatch.compare.report import difference_text, rounds_text, table
from localbatch.compare.sweep import Sweep


class PointColumn(NamedTuple):
    """One figure of a batch size."""

    title: str
    show: Callable[[Point], str]


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _same(point: Point) -> str:
    found = point.agreement
    return "-" if found is None else f"{found.identical} of {found.rows}"


def _gpu(point: Point) -> str:
    use, memory = point.gpu_use, point.gpu_peak_mib
    return "-" if use is None or memory is None else f"{use:.0%}, {memory:,.0f} MiB"


_COLUMNS = (
    PointColumn("batch", lambda point: str(point.batch)),
    PointColumn("wall s", lambda point: f"{point.wall_s:.2f}"),
    PointColumn("tokens", lambda point: f"{point.total_tokens:,}"),
    PointColumn("tok/s", lambda point: f"{point.tokens_per_s:.0f}"),
    PointColumn("output tok/s", lambda point: f"{point.output_tokens_per_s:.0f}"),
    PointColumn("memory change MiB", lambda point: f"{point.memory_change_mib:+,.0f}"),
    PointColumn("over 1", lambda point: _times(point.speedup_over_1)),
    PointColumn("over 2", lambda point: _times(point.speedup_over_2)),
    PointColumn("efficiency", lambda p: "-" if p.efficiency is None else f"{p.efficiency:.0%}"),
    PointColumn("ITL ms", lambda point: f"{point.itl_p50_s * 1000:.1f}"),
)
_SAME = PointColumn("same answers", _same)
_GPU = PointColumn("GPU", _gpu)


def columns_of(report: Sweep) -> Sequence[PointColumn]:
    """Return the columns of a report's tables; those that nothing was measured for are left out."""
    points = [point for curve in report.curves for point in curve.points]
    columns = list(_COLUMNS)
    if any(point.agreement is not None for point in points):
        columns.append(_SAME)
    if any(point.gpu_use is not None for point in points):
        columns.append(_GPU)
    return columns


def sweep_text(report: Sweep) -> str:
    """Return the whole report for a terminal."""
    lines = [
        f"{report.model} on {report.machine.get('cpu', 'this machine')}, "
        f"{report.machine.get('cores', '?')} cores: {report.prompt_tokens} prompt + "
        f"{report.max_tokens} output tokens a row, {rounds_text(report.rounds)}"
    ]
    columns = columns_of(report)
    head = [column.title for column in columns]
    for curve in report.curves:
        rows = [[column.show(point) for column in columns] for point in curve.points]
        lines += ["", f"{curve.scheme}, {curve.layout}", *table(head, rows)]
        lines += [f"batch {size}: not run: {reason}" for size, reason in curve.failed.items()]
        lines += [knee_line(curve), *differing_lines(curve)]
    if report.notes:
        lines += ["", *(f"note: {note}" for note in report.notes)]
    return "\n".join(lines)


def differing_lines(curve: Curve) -> list[str]:
    """Return for each batch size with other answers its first row that differs."""
    lines = []
    for point in curve.points:
        found = point.agreement.differences if point.agreement is not None else ()
        if found:
            others = len(found) - 1
            more = (
                f"; {others} more row{'s differ' if others > 1 else ' differs'}" if others else ""
            )
            lines.append(f"batch {point.batch}: {difference_text(found[0])}{more}{_most(found)}")
    return lines


def _most(found: Sequence[Difference]) -> str:
    """Return the largest margin of several, either way."""
    margins = [abs(each.margin) for each in found if each.margin is not None]
    if len(margins) < 2:
        return ""
    return f", largest margin of the first {len(margins)}: {max(margins):.4f}"


def knee_line(curve: Curve) -> str:
    """Return where the gain flattens, in words."""
    if not curve.points:
        return "nothing could be measured"
    if len(curve.points) == 1:
        return f"only {curve.points[0].batch} rows at one time were measured: that shows no knee"
    if curve.knee is None:
        largest = curve.points[-1].batch
        return f"the gain has not flattened at {largest} rows; larger batches may be faster still"
    return f"the knee is at {curve.knee} rows: beyond, a doubling gives less than {FLAT:.0%} more"
