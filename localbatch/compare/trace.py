"""What a backend computed, and when."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from localbatch.engine.backend import Backend, ContextConfig, Logits, Numerics, Sample
from localbatch.scheduler.plan import PlanRow, StepPlan

Clock: TypeAlias = Callable[[], float]
"""Returns seconds since any fixed time."""


@dataclass(frozen=True)
class Step:
    """One call of `Backend.forward`; seconds since the run's start."""

    lane: int
    start_s: float
    end_s: float
    rows: tuple[int, ...]
    """`Request.index` of each row that was computed."""
    slots: tuple[int, ...]
    """Where each was computed."""
    num_decoded: int
    """The last so many of `rows` took one new token each; of the others a piece of the prompt was
    computed."""
    prompt_tokens: int
    row_times: tuple[tuple[float, float], ...] = ()
    """When each of `rows` was computed, by start and end; left out: all of the time."""

    @property
    def num_prefilled(self) -> int:
        """Rows of which a piece of the prompt was computed."""
        return len(self.rows) - self.num_decoded


@dataclass
class Trace:
    """All steps of a run and the times of its tokens; several threads may add to it."""

    clock: Clock = time.perf_counter
    steps: list[Step] = field(default_factory=list)
    token_times: dict[int, list[float]] = field(default_factory=dict)
    """By `Request.index`: seconds since the start at which each token was known, the one that ended
    the answer included."""
    zero_s: float = 0.0
    """The clock's reading when the run started."""
    num_lanes: int = 0

    def start(self, zero_s: float | None = None) -> None:
        """Forget what was noted so far and count from now, or from an earlier reading."""
        self.steps.clear()
        self.token_times.clear()
        self.zero_s = self.clock() if zero_s is None else zero_s

    def now(self) -> float:
        """Return the seconds since the start."""
        return self.clock() - self.zero_s

    def note_tokens(self, rows: Sequence[PlanRow]) -> None:
        """Note that each of these rows got a token; what a row that began anew had is forgotten."""
        now = self.now()
        for row in rows:
            times = self.token_times.setdefault(row.sequence.request.index, [])
            del times[row.end - row.sequence.num_prompt :]
            times.append(now)


class TracedBackend:
    """A backend that notes what it computes, in a trace that its siblings share."""

    def __init__(self, backend: Backend, trace: Trace) -> None:
        self.backend, self.trace = backend, trace
        self.card = backend.card
        self.on_gpu, self.build = backend.on_gpu, backend.build
        self.placement = backend.placement
        self.open_s, self.num_calls = backend.open_s, backend.num_calls
        self.context: ContextConfig | None = None
        self._lane = trace.num_lanes
        trace.num_lanes += 1

    @property
    def decode_s(self) -> float:
        """Seconds spent computing."""
        return self.backend.decode_s

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the context beside the KV cache."""
        return self.backend.buffer_bytes

    def open(self, config: ContextConfig) -> Numerics:
        """Make the context."""
        self.context = config
        numerics = self.backend.open(config)
        self.open_s = self.backend.open_s
        return numerics

    def free_bytes(self) -> int:
        """Return the bytes that KV caches and buffers can still take."""
        return self.backend.free_bytes()

    def set_threads(self, threads: int) -> None:
        """Compute with another number of threads."""
        self.backend.set_threads(threads)

    def sibling(self) -> Backend:
        """Return another one on the same model and the same trace."""
        return TracedBackend(self.backend.sibling(), self.trace)

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Return token ids."""
        return self.backend.tokenize(text, add_special=add_special, parse_special=parse_special)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token adds to the text."""
        return self.backend.token_bytes(token)

    def forward(self, plan: StepPlan, sample: Sample) -> list[int | None]:
        """Compute a plan and note when, for whom, and when each token was known."""
        marks: list[tuple[PlanRow, float]] = []

        def noting(rows: Sequence[PlanRow], logits: Logits) -> list[int]:
            marks.append((rows[-1], self.trace.now()))
            tokens = sample(rows, logits)
            self.trace.note_tokens(rows)
            return tokens

        start = self.trace.now()
        tokens = self.backend.forward(plan, noting)
        self.num_calls = self.backend.num_calls
        if plan.rows:
            self.trace.steps.append(step_of(plan, self._lane, start, self.trace.now(), marks))
        return tokens

    def clear(self) -> None:
        """Empty the whole KV cache."""
        self.backend.clear()

    def close(self) -> None:
        """Free context and model."""
        self.backend.close()


def step_of(
    plan: StepPlan,
    lane: int,
    start_s: float,
    end_s: float,
    marks: Sequence[tuple[PlanRow, float]] = (),
) -> Step:
    """Return the record of a computed plan.

    `marks` are the last row of each of its computations that gave logits, and when it was done.
    """
    timed = list(zip(plan.rows, _row_times(plan, start_s, end_s, marks), strict=True))
    prefilled = [(row, times) for row, times in timed if row.is_prefill]
    decoded = [(row, times) for row, times in timed if not row.is_prefill]
    rows = [row for row, _ in [*prefilled, *decoded]]
    return Step(
        lane, start_s, end_s,
        tuple(row.sequence.request.index for row in rows), tuple(row.slot for row in rows),
        len(decoded), sum(row.end - row.start for row, _ in prefilled),
        tuple(times for _, times in [*prefilled, *decoded]),
    )  # fmt: skip


def _row_times(
    plan: StepPlan, start_s: float, end_s: float, marks: Sequence[tuple[PlanRow, float]]
) -> Iterator[tuple[float, float]]:
    """Yield start and end of each row: rows are computed in order, some of them together.

    The last one's computation counts to the end of the step.
    """
    last, done = start_s, 0
    for number, (marked, now) in enumerate(marks):
        place = next(i for i, row in enumerate(plan.rows) if i >= done and row is marked)
        is_end = number == len(marks) - 1 and place == len(plan.rows) - 1
        now = end_s if is_end else now
        yield from [(last, now)] * (place + 1 - done)
        last, done = now, place + 1
    yield from [(last, end_s)] * (len(plan.rows) - done)


@dataclass(frozen=True)
class Span:
    """A time during which a row was computed without a break; seconds since the start."""

    row: int
    lane: int
    slot: int
    start_s: float
    end_s: float
    is_prefill: bool


def spans(steps: Sequence[Step], gap_s: float) -> list[Span]:
    """Return when each row was computed; breaks of up to `gap_s` seconds are passed over."""
    open_spans: dict[tuple[int, int, int], Span] = {}
    found: list[Span] = []
    for step in sorted(steps, key=lambda step: step.start_s):
        for span in _pieces(step):
            key = (span.lane, span.slot, span.row)
            last = open_spans.get(key)
            goes_on = last is not None and last.is_prefill == span.is_prefill
            if last is not None and goes_on and span.start_s - last.end_s <= gap_s:
                span = Span(span.row, span.lane, span.slot, last.start_s, span.end_s,
                            span.is_prefill)  # fmt: skip
            elif last is not None:
                found.append(last)
            open_spans[key] = span
    return sorted([*found, *open_spans.values()], key=lambda span: (span.start_s, span.row))


def _pieces(step: Step) -> Iterator[Span]:
    times = step.row_times or ((step.start_s, step.end_s),) * len(step.rows)
    rows = zip(step.rows, step.slots, times, strict=True)
    for place, (row, slot, (start_s, end_s)) in enumerate(rows):
        yield Span(row, step.lane, slot, start_s, end_s, place < step.num_prefilled)
