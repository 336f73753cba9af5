"""The lanes of an engine: how many there are, and how large their contexts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from localbatch.data.config import MAX_SLOTS, EngineConfig
from localbatch.engine.backend import Backend, ContextConfig, Numerics
from localbatch.engine.calibration import DEEP, MOST_DEEP_ROWS, MOST_ROWS, SHALLOW, Rates, rates_of
from localbatch.engine.lane import Lane
from localbatch.engine.planner import Choice, Layout, Planner, RowShape
from localbatch.engine.rows import Counters
from localbatch.engine.sizing import (
    BLOCK,
    PREFIX_SLOTS,
    context_bytes,
    fit_context,
    kv_budget,
    pass_bytes,
    wanted_slots,
)
from localbatch.scheduler.sequence import Sequence as TokenSequence


class LaneGroup:
    """Lanes on one loaded model, all with contexts of the same shape."""

    def __init__(self, backend: Backend, config: EngineConfig) -> None:
        self.lanes = [Lane(backend)]
        self.counters: list[Counters] = [self.lanes[0].counters]
        """Of all lanes, past ones included."""
        self.context: ContextConfig | None = None
        """Of the largest lane."""
        self.numerics: Numerics | None = None
        self.choice: Choice | None = None
        self.free_bytes = 0
        """Left where the model is, after the contexts were made."""
        self._asked = (0, 0)  # slots and prefix slots; memory may not have allowed them
        self._backend, self._config = backend, config

    def fit(self, waiting: Sequence[TokenSequence], longest: int) -> None:
        """Make the contexts anew if the waiting rows want larger ones; all lanes must be empty.

        `longest` is the most tokens that a row may have.
        """
        config, on_gpu = self._config, self._backend.on_gpu
        cells = max(min(wanted_cells(sequence), longest) for sequence in waiting)
        prefixes = {prefix for sequence in waiting for prefix in sequence.prefixes}
        prefix_slots = min(PREFIX_SLOTS, len(prefixes))
        slots = wanted_slots(config, len(waiting), on_gpu=on_gpu)
        memory = self._backend.free_bytes()
        if (now := self.context) is not None:
            present = self.num_slots
            asked_slots, asked_prefix_slots = self._asked
            enough = cells <= now.row_cells and slots <= max(present, asked_slots)
            if enough and prefix_slots <= asked_prefix_slots:
                return
            cells, slots = max(cells, now.row_cells), max(slots, present)
            # What the present contexts take is free when the next ones are made.
            memory += self.kv_bytes
            memory += sum(lane.backend.buffer_bytes for lane in self.lanes) if on_gpu else 0
        self._asked = (slots, prefix_slots)
        planner = Planner(config, partial(self._rates, cells))
        shapes = [RowShape(s.num_prompt, s.request.params.max_tokens, s.prefixes) for s in waiting]
        self.choice = planner.choose(
            shapes, slots, on_gpu=on_gpu, row_cells=cells,
            cell_bytes=self._backend.card.kv_bytes_per_cell,
        )  # fmt: skip
        layout = self.choice.layout
        lanes = min(layout.lanes, self._affordable(cells, memory))
        slots = min(slots, layout.slots * layout.lanes)
        if lanes < layout.lanes:
            slots = min(slots, lanes * (MAX_SLOTS - prefix_slots))
        context = fit_context(
            config, self._backend.card, slots, cells, on_gpu, memory, lanes, prefix_slots
        )
        context = replace(context, flash_attention=self.choice.layout.flash_attention)
        self._open(context, lanes)
        if self.numerics is Numerics.VARIES and self._must_be_exact(context):
            for sequence in waiting:  # where a prompt is cut would show in the last bits
                sequence.prefixes = ()
            chunk = config.ubatch or BLOCK
            self._open(replace(context, num_prefix_slots=0, chunk=chunk), lanes)

    @property
    def num_slots(self) -> int:
        """Rows of all lanes."""
        return sum(lane.num_slots for lane in self.lanes) if self.context else 0

    @property
    def kv_bytes(self) -> int:
        """Bytes of all KV caches."""
        if (context := self.context) is None:
            return 0
        contexts = [replace(context, num_slots=lane.num_slots) for lane in self.lanes]
        return sum(context_bytes(self._backend.card, each) for each in contexts)

    def _affordable(self, cells: int, memory: int) -> int:
        """Return the most lanes that memory allows, with a row each."""
        card, on_gpu = self._backend.card, self._backend.on_gpu
        one = context_bytes(card, fit_context(self._config, card, 1, cells, on_gpu, memory))
        if on_gpu:  # a lane's buffers are as large for few rows, and rows are worth more
            return max(1, min(kv_budget(memory) // one, memory // (4 * pass_bytes(card))))
        return max(1, kv_budget(memory) // max(1, one))

    def _must_be_exact(self, context: ContextConfig) -> bool:
        settings_vary = context.pool_cells is not None or context.flash_attention
        return not (settings_vary or self._backend.on_gpu or self._config.any_numerics)

    def _open(self, context: ContextConfig, num_lanes: int) -> None:
        """Make as many lanes, each with such a context, or some with a row less if so many are set.

        In the unified layout there is one lane.
        """
        self._resize(num_lanes)
        total = min(context.num_slots * num_lanes, self._config.parallel or sys.maxsize)
        each, more = divmod(total, num_lanes)
        found = [
            lane.open(replace(context, num_slots=each + (place < more)))
            for place, lane in enumerate(self.lanes)
        ]
        self.numerics, self.context = found[0], context
        self.free_bytes = self._backend.free_bytes()

    def _resize(self, num_lanes: int) -> None:
        while len(self.lanes) > num_lanes:
            self.lanes.pop().close()
        while len(self.lanes) < num_lanes:
            self.lanes.append(Lane(self._backend.sibling()))
            self.counters.append(self.lanes[-1].counters)

    def _rates(self, cells: int, layout: Layout, budget_s: float) -> Rates | None:
        """Return how fast a layout is for rows of so many cells; contexts must be made anew."""
        self._resize(layout.lanes)
        for lane in self.lanes:
            lane.rest()
        cells, most = (SHALLOW, MOST_ROWS) if cells <= SHALLOW else (DEEP, MOST_DEEP_ROWS)
        context = fit_context(
            self._config, self._backend.card, min(layout.slots, most) * layout.lanes, cells,
            self._backend.on_gpu, lanes=layout.lanes,
        )  # fmt: skip
        context = replace(context, flash_attention=layout.flash_attention)
        self.context = None
        backends = [lane.backend for lane in self.lanes]
        return rates_of(self._config.model, backends, context, budget_s)


def wanted_cells(sequence: TokenSequence) -> int:
    """Return the tokens of a row that runs to its `max_tokens`."""
    return sequence.num_prompt + sequence.request.params.max_tokens
