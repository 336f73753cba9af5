"""Chooses lanes, threads and batch for a job on this machine, from measurements.

A rule gives a first guess. Where a job is long enough to pay it back, each way to split the cores
into lanes is measured for a second or two (`calibration.py`; kept in the user's cache folder), and
the one with the least expected time is taken. On the CPU all candidates give the same answers, so
the choice is about time only.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from localbatch.data.config import CELL_STEP, MAX_SLOTS, EngineConfig, FlashAttention, KVLayout
from localbatch.engine.calibration import Rates
from localbatch.engine.machine import usable_threads
from localbatch.engine.sizing import PREFIX_SLOTS

GUESS_LANES = 2
"""Lanes on a CPU before anything was measured."""

SHORT_JOB_TOKENS = 4000
"""Jobs with fewer tokens, prompts and answers together, are run by the rule."""

MOST_SECONDS = 10.0
"""Most seconds to measure for."""


@dataclass(frozen=True)
class RowShape:
    """What a row asks of the machine."""

    prompt_tokens: int
    """Those it computes itself: without what it shares with rows before it."""
    max_tokens: int


@dataclass(frozen=True)
class Layout:
    """How the cores are split, and how many rows each lane takes."""

    lanes: int
    threads: int
    """Of each lane."""
    slots: int
    """Of each lane."""
    flash_attention: bool = False


@dataclass(frozen=True)
class Choice:
    """A layout, and what it rests on."""

    layout: Layout
    reason: str
    expected_s: float | None = None
    """Seconds, if every row runs to its `max_tokens`; `None` if nothing was measured."""
    others: tuple[tuple[Layout, float], ...] = ()
    """Other layouts that were measured, and their expected seconds."""


def candidates(
    config: EngineConfig, slots: int, *, on_gpu: bool, short_rows: bool = False
) -> list[Layout]:
    """Return the layouts of `slots` rows that the settings allow, the rule's guess first.

    On a CPU flash attention changes the last bits, so it must be asked for or allowed; and
    llama.cpp is many times slower with it where prompts go on from a long beginning, so it is only
    weighed for `short_rows`.

    Lanes split the threads evenly. With a GPU there is one unless more are asked for or needed.
    """
    threads = config.threads or usable_threads()
    least = -(-slots // (MAX_SLOTS - PREFIX_SLOTS))
    if config.kv_layout is KVLayout.UNIFIED:
        counts = [1]
    elif config.lanes is not None:
        counts = [max(min(config.lanes, slots), least)]
    elif on_gpu:
        counts = [least]
    else:
        most = max(least, min(threads, slots))
        powers = [2**k for k in range(10) if 2**k <= most]
        guess = max(least, min(GUESS_LANES, most))
        counts = [guess, *(n for n in [*powers, most] if n != guess and n >= least)]
    unique = list(dict.fromkeys(counts))
    flash = config.flash_attention
    fused = [flash is FlashAttention.ON or (flash is FlashAttention.AUTO and on_gpu)]
    if flash is FlashAttention.AUTO and config.any_numerics and short_rows and not on_gpu:
        fused.append(True)
    return [Layout(n, max(1, threads // n), -(-slots // n), on) for on in fused for n in unique]


def expected_seconds(rows: Sequence[RowShape], layout: Layout, rates: Rates) -> float:
    """Return the time of a job by measured rates: each lane's own, the longest lane counts.

    Prompts are computed one after another; between them all running rows of a lane take a token in
    one step, which costs what a step of so many rows was measured to take.
    """
    shares = [rows[lane :: layout.lanes] for lane in range(layout.lanes)]
    return max(_lane_seconds(share, layout.slots, rates) for share in shares)


def _lane_seconds(rows: Sequence[RowShape], slots: int, rates: Rates) -> float:
    seconds = sum(row.prompt_tokens for row in rows) / rates.prefill_tok_s
    running: list[int] = []  # the step at which each running row ends; a heap
    step = 0
    for row in rows:
        if len(running) == slots:
            seconds, step = _run_until(running, step, seconds, rates)
        if row.max_tokens > 1:  # a prompt's own pass gives the first token
            heapq.heappush(running, step + row.max_tokens - 1)
    while running:
        seconds, step = _run_until(running, step, seconds, rates)
    return seconds


def _run_until(running: list[int], step: int, seconds: float, rates: Rates) -> tuple[float, int]:
    """Let the steps pass until the next row ends."""
    num_rows, end = len(running), heapq.heappop(running)
    return seconds + (end - step) * rates.step_s(num_rows), end


class Planner:
    """Chooses a layout for rows on a loaded model.

    `measure` gives the rates of a layout, or `None` if it can't be measured.
    """

    def __init__(self, config: EngineConfig, measure: Callable[[Layout], Rates | None]) -> None:
        self._config, self._measure = config, measure

    def choose(
        self, rows: Sequence[RowShape], slots: int, *, on_gpu: bool, row_cells: int = CELL_STEP + 1
    ) -> Choice:
        """Return the layout with the least expected time, measuring where that may pay.

        `row_cells` is the length of the longest row.
        """
        short = row_cells <= CELL_STEP
        layouts = candidates(self._config, slots, on_gpu=on_gpu, short_rows=short)
        guess = layouts[0]
        if len(layouts) == 1:
            return Choice(guess, "the only split of the cores that the settings allow")
        tokens = sum(row.prompt_tokens + row.max_tokens for row in rows)
        if tokens < SHORT_JOB_TOKENS:
            return Choice(guess, f"by rule: {tokens:,} tokens are too few to measure for")
        expected: list[tuple[Layout, float]] = []
        started = time.perf_counter()
        for layout in layouts:
            rates = self._measure(layout)
            if rates is not None:
                expected.append((layout, expected_seconds(rows, layout, rates)))
            spent = time.perf_counter() - started
            if expected and spent + spent / len(expected) > MOST_SECONDS:
                break
        if not expected:
            return Choice(guess, "by rule: nothing could be measured")
        expected.sort(key=lambda pair: pair[1])
        best, seconds = expected[0]
        return Choice(best, "measured on this machine", seconds, tuple(expected[1:]))
