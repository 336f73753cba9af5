"""Measures how fast a model is on this machine with its cores split in one way."""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

from localbatch.data.request import Request
from localbatch.engine.backend import Backend, ContextConfig
from localbatch.engine.cache import FactCache, fact_key
from localbatch.engine.sampling import sample
from localbatch.scheduler.plan import Copy, PlanRow, StepPlan
from localbatch.scheduler.sequence import Sequence as TokenSequence

PROMPT_TOKENS, CELLS = 64, 256
ROWS = (1, 8, 32)
"""Decode batches that are measured; steps of other sizes are interpolated."""

_ROUNDS = 2
_REQUEST = Request("calibration", 0, prompt="-")


@dataclass(frozen=True)
class Rates:
    """What was measured while all lanes computed at the same time."""

    prefill_tok_s: float
    """Prompt tokens per second, of one lane."""
    steps: tuple[tuple[int, float], ...]
    """(rows, seconds) of a decode step of one lane, rows ascending."""

    def step_s(self, num_rows: int) -> float:
        """Return the seconds of a decode step: straight lines between what was measured.

        Beyond the largest batch each row costs what a row there costs.
        """
        if num_rows <= self.steps[0][0]:
            return self.steps[0][1]
        for (low, before), (high, after) in itertools.pairwise(self.steps):
            if num_rows <= high:
                return before + (after - before) * (num_rows - low) / (high - low)
        most, seconds = self.steps[-1]
        return seconds * num_rows / most

    def to_json(self) -> str:
        """Return the rates as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Rates:
        """Read what `to_json` wrote; raises `ValueError` or `KeyError` for anything else."""
        found = json.loads(text)
        steps = tuple((int(rows), float(seconds)) for rows, seconds in found["steps"])
        if not steps or min(seconds for _, seconds in steps) <= 0 or found["prefill_tok_s"] <= 0:
            raise ValueError("rates must be positive")
        return cls(float(found["prefill_tok_s"]), steps)


def rates_of(model: str, backends: Sequence[Backend], context: ContextConfig) -> Rates | None:
    """Return what `measure` finds, or found before for this file, machine and llama.cpp build.

    `None` for what is no file.
    """
    try:
        key = fact_key("rates 1", model, len(backends), context, backends[0].build)
    except OSError:
        return None
    cache = FactCache()
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return Rates.from_json(cache.get(key) or "")
    rates = measure(backends, context)
    cache.put(key, rates.to_json())
    return rates


def measure(backends: Sequence[Backend], context: ContextConfig) -> Rates:
    """Measure prompts and decode steps in as many lanes as there are backends, side by side.

    Opens `context` in each backend; the caller opens them anew. Of several rounds the fastest
    counts: whatever else the machine does only ever slows one down.
    """
    probes = [_Probe(backend, context) for backend in backends]
    sizes = sorted({min(rows, context.num_slots) for rows in ROWS})
    prompt_s, steps = float("inf"), dict.fromkeys(sizes, float("inf"))
    with ThreadPoolExecutor(len(probes)) as threads:
        for _ in range(_ROUNDS):
            prompt_s = min(prompt_s, max(threads.map(_Probe.prompts_s, probes)))
            for rows in reversed(sizes):  # padding uses up the slots above a batch
                taken = threads.map(_Probe.step_s, probes, itertools.repeat(rows))
                steps[rows] = min(steps[rows], max(taken))
    return Rates(PROMPT_TOKENS / prompt_s, tuple(steps.items()))


class _Probe:
    """One lane with made-up rows; slots that are not measured as prompts share those that are."""

    def __init__(self, backend: Backend, context: ContextConfig) -> None:
        self._backend = backend
        self._num_slots = context.num_slots
        self._lengths: list[int] = []
        backend.open(context)

    def prompts_s(self) -> float:
        """Return the seconds of a prompt; all slots hold one afterwards."""
        slots = list(range(self._num_slots))
        measured = [self._row(slot, 0, PROMPT_TOKENS) for slot in slots[:2]]
        started = time.perf_counter()
        self._backend.forward(StepPlan(measured, [], slots), sample)
        taken = (time.perf_counter() - started) / len(measured)
        copies = [Copy(0, slot, PROMPT_TOKENS) for slot in slots[2:]]
        self._backend.forward(StepPlan([], [], [], copies), sample)
        self._lengths = [PROMPT_TOKENS] * self._num_slots
        return taken

    def step_s(self, num_rows: int) -> float:
        """Return the seconds of a decode step."""
        rows = [self._row(s, self._lengths[s], self._lengths[s] + 1) for s in range(num_rows)]
        for slot in range(num_rows):
            self._lengths[slot] += 1
        started = time.perf_counter()
        self._backend.forward(StepPlan(rows, [], []), sample)
        return time.perf_counter() - started

    def _row(self, slot: int, start: int, end: int) -> PlanRow:
        tokens = [i % self._backend.card.num_vocab for i in range(end)]
        is_prefill = end - start > 1
        sequence = TokenSequence(_REQUEST, tokens)
        return PlanRow(sequence, slot, start, end, wants_logits=True, is_prefill=is_prefill)
