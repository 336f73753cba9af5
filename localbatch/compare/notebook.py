"""Tables that a notebook shows as such."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from localbatch.compare.html import html_table
from localbatch.compare.report import Comparison, groups, table
from localbatch.compare.sweep import Sweep
from localbatch.compare.sweep_report import columns_of, knee_line


@dataclass(frozen=True)
class Table:
    """A table: HTML in a notebook, aligned text elsewhere."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def _repr_html_(self) -> str:
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        return html_table(self.head, self.rows) + notes

    def __str__(self) -> str:
        return "\n".join([*table(self.head, self.rows), *self.notes])


def modes_table(report: Comparison, columns: str = "speed") -> Table:
    """Return a line for each mode; `columns` is `speed`, `times` or `room`.

    Modes that could not be run are named below, with the reason.
    """
    group = groups(report.modes)[columns]
    rows = [[mode.mode, *(column.show(mode) for column in group)] for mode in report.modes]
    failed = [f"{name}: not run: {reason}" for name, reason in report.failed.items()]
    return Table(["mode", *(column.title for column in group)], rows, failed)


def sweep_table(report: Sweep) -> Table:
    """Return a line for each batch size of each curve, and the knees in words."""
    columns = columns_of(report)
    rows = [
        [f"{curve.scheme}, {curve.layout}", *(column.show(point) for column in columns)]
        for curve in report.curves
        for point in curve.points
    ]
    knees = [f"{curve.scheme}, {curve.layout}: {knee_line(curve)}" for curve in report.curves]
    failed = [
        f"{curve.scheme}, {curve.layout}, {size} rows: not run: {reason}"
        for curve in report.curves
        for size, reason in curve.failed.items()
    ]
    return Table(["curve", *(column.title for column in columns)], rows, [*knees, *failed])
