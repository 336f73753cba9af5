"""Slots (llama.cpp sequence ids) and the KV cells behind them."""

from __future__ import annotations

import heapq


class SlotPool:
    """Hands out slots, lowest first, and counts the cells in use.

    With `pool_cells=None` every slot has cells of its own and only slots are counted; otherwise
    all slots draw on `pool_cells`.
    """

    def __init__(self, num_slots: int, pool_cells: int | None) -> None:
        self.num_slots = num_slots
        self.pool_cells = pool_cells
        self._free = list(range(num_slots))  # a heap; range is one already
        self._cells: dict[int, int] = {}  # slot in use -> its cells
        self._used = 0

    @property
    def num_free(self) -> int:
        """Slots not in use."""
        return len(self._free)

    @property
    def in_use(self) -> set[int]:
        """Slots in use (a copy)."""
        return set(self._cells)

    @property
    def free_cells(self) -> int | None:
        """Cells not in use; `None` where slots have cells of their own."""
        return None if self.pool_cells is None else self.pool_cells - self._used

    def cells_of(self, slot: int | None) -> int:
        """Cells of a slot; 0 for `None`."""
        return 0 if slot is None else self._cells[slot]

    def take(self) -> int | None:
        """Return the lowest free slot, now in use with no cells, or `None`."""
        if not self._free:
            return None
        slot = heapq.heappop(self._free)
        self._cells[slot] = 0
        return slot

    def grow(self, slot: int, cells: int) -> None:
        """Count `cells` more for a slot in use."""
        self._cells[slot] += cells
        self._used += cells

    def give_back(self, slot: int) -> None:
        """Free a slot and its cells."""
        self._used -= self._cells.pop(slot)
        heapq.heappush(self._free, slot)

    def lowest_free_below(self, slot: int) -> int | None:
        """Return the lowest free slot if it is below `slot`."""
        return self._free[0] if self._free and self._free[0] < slot else None

    def move_to_lowest(self, slot: int) -> int:
        """Put what `slot` holds into the lowest free slot; return that one."""
        target = heapq.heappop(self._free)
        self._cells[target] = self._cells.pop(slot)
        heapq.heappush(self._free, slot)
        return target

    def check_integrity(self) -> None:
        """Raise `AssertionError` if a slot or a cell was lost, or is counted twice."""
        assert sorted([*self._free, *self._cells]) == list(range(self.num_slots)), "slots"
        assert self._used == sum(self._cells.values()), "cells"
        assert self.pool_cells is None or self._used <= self.pool_cells, "too many cells"
