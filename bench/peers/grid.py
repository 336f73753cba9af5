"""The settings of llama-server that are tried to find its best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

from peers.job import round_up

Settings = dict[str, Any]
Trial = tuple[Settings, float | None]
"""Settings and the seconds they took; None if they failed."""

SLOTS = (4, 16, 32, 64)
GPU_SLOTS = (64, 128, 256)
FIRST_SLOTS = 32


def search(size: str, rows: int, run: Callable[[Settings], float | None]) -> list[Trial]:
    """Try settings; returns all trials.

    `full` tries every number of slots with both layouts, flash attention off and on. `small` tries
    the latter four at 32 slots, and the other numbers of slots with the best of them. More slots
    than rows are the same as a slot for each row. `gpu` tries many slots, with flash attention.
    """
    if size == "gpu":
        many = [c for c in combinations(GPU_SLOTS) if c["flash"]]
        return [(settings, run(settings)) for settings in many]
    slots = sorted({min(number, rows) for number in SLOTS})
    if size == "full":
        return [(settings, run(settings)) for settings in combinations(slots)]
    first = min(FIRST_SLOTS, rows)
    trials = [(settings, run(settings)) for settings in combinations([first])]
    found = best(trials)
    if found is not None:
        others = [found | {"slots": number} for number in slots if number != first]
        trials += [(settings, run(settings)) for settings in others]
    return trials


def combinations(slots: Sequence[int]) -> list[Settings]:
    """Return both layouts, flash attention off and on, for each number of slots."""
    return [
        {"slots": number, "unified": unified, "flash": flash}
        for number, unified, flash in product(slots, (False, True), (False, True))
    ]


def best(trials: Sequence[Trial]) -> Settings | None:
    """Return the fastest settings, None if all failed."""
    timed = [(seconds, place) for place, (_, seconds) in enumerate(trials) if seconds is not None]
    return trials[min(timed)[1]][0] if timed else None


def label(settings: Settings) -> str:
    """Return the settings as options of llama-server."""
    if not settings:
        return "defaults"
    layout = "--kv-unified" if settings["unified"] else "--no-kv-unified"
    flash = "on" if settings["flash"] else "off"
    return f"-np {settings['slots']} {layout} -fa {flash}"


def context_size(settings: Settings, cells: Sequence[int]) -> int:
    """Return the cells for all slots together, such that any rows fit.

    Separate slots have the size of the longest row each; a pool, that of the longest rows that may
    be in it at one time. llama-server ends a row that fills its slot, so each has one cell more.
    """
    slots: int = settings["slots"]
    longest = [number + 1 for number in sorted(cells, reverse=True)[:slots]]
    if settings["unified"]:
        return round_up(sum(longest))
    return slots * round_up(longest[0])
