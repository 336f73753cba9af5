"""Chooses lanes, threads and batch for a job on this machine, from measurements.

A rule gives a first guess. Where a job is long enough to pay it back, each way to split the cores
into lanes is measured for a second or two (`calibration.py`; kept in the user's cache folder), and
the one with the least expected time is taken. On the CPU all candidates give the same answers, so
the choice is about time only.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from localbatch.data.config import CELL_STEP, MAX_SLOTS, EngineConfig, FlashAttention, KVLayout
from localbatch.engine.calibration import Rates
from localbatch.engine.machine import usable_threads
from localbatch.engine.sizing import PREFIX_SLOTS
from localbatch.scheduler.prefixes import Prefix

GUESS_LANES = 2
"""Lanes on a CPU before anything was measured."""

GPU_LANES, GPU_LANE_SLOTS = 4, 64
"""Lanes on a GPU, and the rows of a lane that are worth another: while one lane's tokens are
sampled, others compute, and their kernels fill each other's gaps."""

SHORT_JOB_TOKENS = 4000
"""Jobs with fewer tokens, prompts and answers together, are run by the rule."""

MOST_SECONDS = 10.0
"""Most seconds to measure for."""


LEAST_SLOTS = 4
"""Slots of a lane that are worth a plan."""

ENOUGH = 0.01
"""Share of the time that more slots must save: fewer take less memory, and are full for longer."""

SURELY = 0.1
"""Share of the time that fewer lanes than the rule's must save: a lane's threads wait for each
other, so whatever else the machine does, which the best of some measurements does not show, slows
a lane of many threads more."""

MOST_SIMULATED = 512
"""Rows of a job that are simulated; of more, some."""


@dataclass(frozen=True)
class RowShape:
    """What a row asks of the machine."""

    prompt_tokens: int
    max_tokens: int
    prefixes: tuple[Prefix, ...] = ()
    """What it shares with other rows; computed once in each lane."""


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

    Lanes split the threads evenly; unless lanes are set, none is left over.
    """
    threads = config.threads or usable_threads()
    least = -(-slots // (MAX_SLOTS - PREFIX_SLOTS))
    if config.kv_layout is KVLayout.UNIFIED:
        counts = [1]
    elif config.lanes is not None:
        counts = [max(min(config.lanes, slots), least)]
    elif on_gpu:
        counts = [max(least, min(GPU_LANES, slots // GPU_LANE_SLOTS))]
    else:
        most = max(least, min(threads, slots))
        powers = [2**k for k in range(10) if 2**k <= most]
        even = [n for n in [*powers, most] if n >= least and threads % n == 0] or [least]
        guess = GUESS_LANES if GUESS_LANES in even else even[0]
        counts = [guess, *(n for n in even if n != guess)]
    unique = list(dict.fromkeys(counts))
    flash = config.flash_attention
    fused = [flash is FlashAttention.ON or (flash is FlashAttention.AUTO and on_gpu)]
    if flash is FlashAttention.AUTO and config.any_numerics and short_rows and not on_gpu:
        fused.append(True)
    return [Layout(n, max(1, threads // n), -(-slots // n), on) for on in fused for n in unique]


def expected_seconds(
    rows: Sequence[RowShape], layout: Layout, rates: Rates, slot_bytes: int = 0
) -> float:
    """Return the time of a job by measured rates: each lane's own, the longest lane counts.

    Prompts are computed one after another; between them all running rows of a lane take a token in
    one step, which costs what a step of so many rows was measured to take. `slot_bytes` is the size
    of a slot; making them takes time, too.
    """
    every = max(1, -(-len(rows) // MOST_SIMULATED))
    scale = len(rows) / max(1, len(rows[::every]))
    shares = [rows[::every][lane :: layout.lanes] for lane in range(layout.lanes)]
    opening = rates.open_byte_s * slot_bytes * layout.slots * layout.lanes
    return opening + scale * max(_lane_seconds(share, layout.slots, rates) for share in shares)


def _lane_seconds(rows: Sequence[RowShape], slots: int, rates: Rates) -> float:
    lane = _SimulatedLane(rates)
    for row in rows:
        if lane.num_running == slots:
            lane.run_until_one_ends()
        lane.start(row)
    while lane.num_running:
        lane.run_until_one_ends()
    return lane.seconds


class _SimulatedLane:
    """Steps through the rows of a lane from one end of a row to the next."""

    def __init__(self, rates: Rates) -> None:
        self.seconds = 0.0
        self._rates = rates
        self._step = 0
        self._ends: list[int] = []  # a heap: the step at which each running row ends
        self._depths: list[tuple[int, int]] = []  # a heap: (step - cells, end), the longest first
        self._computed: set[Prefix] = set()

    @property
    def num_running(self) -> int:
        return len(self._ends)

    def start(self, row: RowShape) -> None:
        """Compute a prompt; its own pass gives the first token."""
        shared = [prefix.length for prefix in row.prefixes if prefix in self._computed]
        self._computed.update(row.prefixes)
        self.seconds += self._rates.prompt_s(max(shared, default=0), row.prompt_tokens)
        if row.max_tokens > 1:
            end = self._step + row.max_tokens - 1
            heapq.heappush(self._ends, end)
            heapq.heappush(self._depths, (self._step - row.prompt_tokens, end))

    def run_until_one_ends(self) -> None:
        """Let the steps pass until the next row ends."""
        num_rows, end = len(self._ends), heapq.heappop(self._ends)
        if end == self._step:
            return
        while self._depths[0][1] <= self._step:
            heapq.heappop(self._depths)
        cells = (self._step + end) // 2 - self._depths[0][0]
        self.seconds += (end - self._step) * self._rates.step_s(num_rows, cells)
        self._step = end


class Planner:
    """Chooses a layout for rows on a loaded model.

    `measure` gives the rates of a layout, or `None` if it can't be measured; it takes about as many
    seconds as it is given at most.
    """

    def __init__(
        self, config: EngineConfig, measure: Callable[[Layout, float], Rates | None]
    ) -> None:
        self._config, self._measure = config, measure

    def choose(
        self,
        rows: Sequence[RowShape],
        slots: int,
        *,
        on_gpu: bool,
        row_cells: int = CELL_STEP + 1,
        cell_bytes: int = 0,
    ) -> Choice:
        """Return the layout with the least expected time, measuring where that may pay.

        `row_cells` is the length of the longest row, `cell_bytes` the KV cache of a token.
        """
        short = row_cells <= CELL_STEP
        layouts = candidates(self._config, slots, on_gpu=on_gpu, short_rows=short)
        guess = layouts[0]
        streams = self._config.kv_layout is KVLayout.STREAMS
        may_have_fewer = streams and not on_gpu and self._config.parallel is None
        if len(layouts) == 1 and not may_have_fewer:
            return Choice(guess, "the only split of the cores that the settings allow")
        tokens = sum(row.prompt_tokens + row.max_tokens for row in rows)
        if tokens < SHORT_JOB_TOKENS:
            return Choice(guess, f"by rule: {tokens:,} tokens are too few to measure for")
        measured = list(self._measured(layouts))
        if any(rates.deep_steps is None for _, rates in measured):  # or they can't be compared
            measured = [(layout, rates.without_depth()) for layout, rates in measured]
        # Slots are cleared, and where there are prefixes, filled by copies.
        slot_bytes = row_cells * cell_bytes * (2 if any(row.prefixes for row in rows) else 1)
        best: list[tuple[Layout, float]] = []
        for layout, rates in measured:
            timed = [
                (option, expected_seconds(rows, option, rates, slot_bytes))
                for option in self._with_fewer_slots(layout)
            ]
            least = min(map(_seconds, timed))
            best.append([pair for pair in timed if pair[1] <= (1 + ENOUGH) * least][-1])
        if not best:
            return Choice(guess, "by rule: nothing could be measured in time")
        best.sort(key=lambda pair: pair[1] * (1 if pair[0].lanes >= guess.lanes else 1 + SURELY))
        return Choice(best[0][0], "measured on this machine", best[0][1], tuple(best[1:]))

    def _measured(self, layouts: Sequence[Layout]) -> Iterator[tuple[Layout, Rates]]:
        """Yield the layouts with their rates until the time is over or one can't be measured."""
        started = time.perf_counter()
        for layouts_left, layout in zip(range(len(layouts), 0, -1), layouts, strict=True):
            left = MOST_SECONDS - (time.perf_counter() - started)
            rates = self._measure(layout, left / layouts_left)
            if rates is None:
                break
            yield layout, rates

    def _with_fewer_slots(self, layout: Layout) -> list[Layout]:
        """Return the layout, and unless the number of rows is set, those with fewer in a lane."""
        slots = [layout.slots]
        while self._config.parallel is None and slots[-1] >= 2 * LEAST_SLOTS:
            slots.append(slots[-1] // 2)
        return [replace(layout, slots=number) for number in slots]


def _seconds(pair: tuple[Layout, float]) -> float:
    return pair[1]
