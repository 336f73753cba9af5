"""Measures how fast a model is on this machine with its cores split in one way."""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from statistics import fmean, median
from typing import TypeAlias

from localbatch.data.request import Request
from localbatch.engine.backend import Backend, ContextConfig
from localbatch.engine.cache import FactCache, fact_key
from localbatch.engine.machine import OtherWork
from localbatch.engine.sampling import sample
from localbatch.scheduler.plan import Copy, PlanRow, StepPlan
from localbatch.scheduler.sequence import Sequence as TokenSequence

PIECE = 64
"""Prompt tokens of a measurement."""

SHALLOW, DEEP = 256, 512
"""KV cells that llama.cpp attends to, the cells of the longest row rounded up; what an attention to
more takes lies on the line through these."""

ROWS = (1, 4, 16, 32)
"""Decode batches that are measured; steps of other sizes are interpolated."""

MOST_ROWS, MOST_DEEP_ROWS = 32, 16
"""Slots of a context to measure in, and of one with `DEEP` cells: making them takes time, too."""

DISTURBED, KEEP_DISTURBED_S = 0.1, 3600.0
"""Share of the cores that other processes took during a measurement that is not kept for good, and
how long it is kept."""

_FIRST = 32
_FIRST_SHARE = 0.15
_REQUEST = Request("calibration", 0, prompt="-")

Steps: TypeAlias = tuple[tuple[int, float], ...]
"""(rows, seconds) of a decode step of one lane, rows ascending."""


@dataclass(frozen=True)
class Rates:
    """What was measured while all lanes computed at the same time."""

    prompt_token_s: float
    """Seconds of a prompt token, of one lane, up to `SHALLOW` cells."""
    steps: Steps
    """Up to `SHALLOW` cells."""
    deep_prompt_token_s: float | None = None
    """At `DEEP` cells; `None` if it was not measured, then depth costs nothing."""
    deep_steps: Steps | None = None
    open_byte_s: float = 0.0
    """Seconds for a byte of KV cache, once: llama.cpp clears it."""

    def without_depth(self) -> Rates:
        """Return what was measured up to `SHALLOW` cells."""
        return replace(self, deep_prompt_token_s=None, deep_steps=None)

    def prompt_s(self, start: int, end: int) -> float:
        """Return the seconds of the tokens `[start, end)` of a prompt."""
        first = self.prompt_token_s
        more = max(0.0, (self.deep_prompt_token_s or first) - first)
        seconds = 0.0
        for block in range(start // SHALLOW, -(-end // SHALLOW)):
            tokens = min(end, (block + 1) * SHALLOW) - max(start, block * SHALLOW)
            seconds += tokens * (first + block * more)
        return seconds

    def step_s(self, num_rows: int, cells: int = 1) -> float:
        """Return the seconds of a decode step whose longest row has so many cells."""
        first = _interpolated(self.steps, num_rows)
        return first + num_rows * self.row_depth_s * ((cells - 1) // SHALLOW)

    @cached_property
    def row_depth_s(self) -> float:
        """Seconds of a decode step for each row and each further `SHALLOW` cells.

        A row's attention takes as long beside others as alone, so all sizes tell the same, and the
        median of them is not misled by a disturbed measurement, which depth would multiply.
        """
        if self.deep_steps is None:
            return 0.0
        pairs = zip(self.steps, self.deep_steps, strict=True)
        return max(0.0, median((deep - first) / rows for (rows, first), (_, deep) in pairs))

    def to_json(self) -> str:
        """Return the rates as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Rates:
        """Read what `to_json` wrote; raises `ValueError`, `KeyError` or `TypeError` if it isn't."""
        found = json.loads(text)
        deep_token, deep_steps = found["deep_prompt_token_s"], found["deep_steps"]
        return cls(
            _positive(found["prompt_token_s"]),
            _steps(found["steps"]),
            None if deep_token is None else _positive(deep_token),
            None if deep_steps is None else _steps(deep_steps),
            float(found["open_byte_s"]),
        )


def _positive(value: float) -> float:
    if not float(value) > 0:
        raise ValueError("rates must be positive")
    return float(value)


def _steps(found: Sequence[tuple[int, float]]) -> Steps:
    if not found:
        raise ValueError("no step was measured")
    return tuple((int(rows), _positive(seconds)) for rows, seconds in found)


def _interpolated(steps: Steps, num_rows: int) -> float:
    """Return the seconds of a step: straight lines between what was measured.

    Beyond the largest batch each row costs what a row there costs.
    """
    if num_rows <= steps[0][0]:
        return steps[0][1]
    for (low, before), (high, after) in itertools.pairwise(steps):
        if num_rows <= high:
            return before + (after - before) * (num_rows - low) / (high - low)
    most, seconds = steps[-1]
    return seconds * num_rows / most


def rates_of(
    model: str, backends: Sequence[Backend], context: ContextConfig, budget_s: float
) -> Rates | None:
    """Return what `measure` finds, or found before for this file, machine and llama.cpp build.

    What was found while other processes took the cores is found anew after an hour.

    `None` for what is no file, or too slow.
    """
    try:
        key = fact_key("rates 6", model, len(backends), context, backends[0].build)
    except OSError:
        return None
    cache = FactCache()
    disturbed = f"{key} disturbed"
    with contextlib.suppress(ValueError, KeyError, TypeError):
        if time.time() < float(cache.get(disturbed) or "inf") + KEEP_DISTURBED_S:
            return Rates.from_json(cache.get(key) or "")
    with OtherWork() as others:
        rates = measure(backends, context, budget_s)
    if rates is not None:
        cache.put(key, rates.to_json())
        cache.put(disturbed, str(time.time()) if others.share > DISTURBED else "inf")
    return rates


def measure(backends: Sequence[Backend], context: ContextConfig, budget_s: float) -> Rates | None:
    """Measure prompts and decode steps in as many lanes as there are backends, side by side.

    Opens `context` in each backend; the caller opens them anew. Depth is measured if the context
    has the cells and the time allows it. `None`, soon, if the least would take more than `budget_s`
    seconds. Of several rounds the fastest counts, since whatever else the machine does only ever
    slows one down; of several lanes the mean, since each takes as many rows as it gets done.
    """
    started = time.perf_counter()
    num_bytes = context.num_cells * backends[0].card.kv_bytes_per_cell * len(backends)
    sizes = sorted({min(rows, context.num_slots) for rows in ROWS}, reverse=True)
    with ThreadPoolExecutor(len(backends)) as threads:
        probes = [threads.submit(_Probe, backend, context).result() for backend in backends]
        open_byte_s = sum(backend.open_s for backend in backends) / max(1, num_bytes)

        def mean(action: Callable[[_Probe, int], float], size: int) -> float:
            return fmean(threads.map(action, probes, itertools.repeat(size)))

        def steps_s() -> Steps:
            mean(_Probe.spread, 0)  # padding uses up the slots above a batch
            return tuple((rows, mean(_Probe.step_s, rows)) for rows in sizes)[::-1]

        def left_s() -> float:
            return budget_s - (time.perf_counter() - started)

        if mean(_Probe.prompt_s, _FIRST) > _FIRST_SHARE * budget_s:
            return None
        prompt_s = min(mean(_Probe.prompt_s, PIECE) for _ in range(2))
        began = time.perf_counter()
        steps = steps_s()
        pass_s = time.perf_counter() - began
        if left_s() > pass_s:
            steps = tuple(map(min, steps, steps_s()))
        rates = Rates(prompt_s / PIECE, steps, open_byte_s=open_byte_s)
        rest = SHALLOW - probes[0].length
        deep_s = 1.5 * (rates.prompt_s(0, rest + 2 * _FIRST) + pass_s)
        if context.row_cells <= SHALLOW or left_s() < deep_s:
            return rates
        mean(_Probe.prompt_s, rest)
        prompt_s = min(mean(_Probe.prompt_s, _FIRST) for _ in range(2))
        deep_steps = steps_s()
        if left_s() > 1.5 * pass_s:
            deep_steps = tuple(map(min, deep_steps, steps_s()))
        return replace(rates, deep_prompt_token_s=prompt_s / _FIRST, deep_steps=deep_steps)


class _Probe:
    """One lane with made-up rows; all slots share the prompt of the first."""

    def __init__(self, backend: Backend, context: ContextConfig) -> None:
        self.backend = backend
        self._num_slots = context.num_slots
        self._lengths = [0] * context.num_slots
        backend.open(context)

    @property
    def length(self) -> int:
        """Tokens in the first slot."""
        return self._lengths[0]

    def prompt_s(self, num_tokens: int) -> float:
        """Return the seconds of so many more tokens of the first slot's prompt."""
        end = self._lengths[0] + num_tokens
        row = self._row(0, self._lengths[0], end)
        started = time.perf_counter()
        self.backend.forward(StepPlan([row], [], []), sample)
        self._lengths[0] = end
        return time.perf_counter() - started

    def spread(self, _: int = 0) -> float:
        """Let all slots hold what the first one does."""
        started, length = time.perf_counter(), self._lengths[0]
        copies = [Copy(0, slot, length) for slot in range(1, self._num_slots)]
        self.backend.forward(StepPlan([], [], [], copies), sample)
        self._lengths = [length] * self._num_slots
        return time.perf_counter() - started

    def step_s(self, num_rows: int) -> float:
        """Return the seconds of a decode step."""
        rows = [self._row(s, self._lengths[s], self._lengths[s] + 1) for s in range(num_rows)]
        for slot in range(num_rows):
            self._lengths[slot] += 1
        started = time.perf_counter()
        self.backend.forward(StepPlan(rows, [], []), sample)
        return time.perf_counter() - started

    def _row(self, slot: int, start: int, end: int) -> PlanRow:
        tokens = [i % self.backend.card.num_vocab for i in range(end)]
        is_prefill = end - start > 1
        sequence = TokenSequence(_REQUEST, tokens)
        return PlanRow(sequence, slot, start, end, wants_logits=True, is_prefill=is_prefill)
