"""The order in which rows are begun."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from localbatch.engine.rows import Row
from localbatch.scheduler.prefixes import Prefix


def best_order(rows: Iterable[Row], wanted_cells: Callable[[Row], int]) -> list[Row]:
    """Return rows with a common beginning side by side, and of what remains the longest first.

    Long rows that start early don't run on alone at the end, and rows of like length that run
    together waste least: llama.cpp's attention takes as long for every row as for the longest. Rows
    that share a prefix stay together so that it is needed for a short time only.
    """
    rows = list(rows)
    longest: dict[Prefix, int] = {}  # of the rows with this first prefix
    number: dict[Prefix, int] = {}
    for row in rows:
        for prefix in row.sequence.prefixes:
            number.setdefault(prefix, len(number))
            longest[prefix] = max(longest.get(prefix, 0), wanted_cells(row))

    def rank(row: Row) -> tuple[int, list[int], int, int]:
        path, own = row.sequence.prefixes, wanted_cells(row)
        first = longest[path[0]] if path else own
        return (-first, [number[prefix] for prefix in path], -own, row.sequence.request.index)

    return sorted(rows, key=rank)
