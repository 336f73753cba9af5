"""The engine: requests in, events out, one step at a time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from localbatch.data.config import EngineConfig, SchedulerConfig
from localbatch.data.errors import DecodeError, InputError
from localbatch.data.request import (
    Completion,
    FinishReason,
    Request,
    Timings,
    Usage,
    failed_completion,
)
from localbatch.engine.backend import Backend, Numerics
from localbatch.engine.machine import available_memory
from localbatch.engine.prompt import PromptEncoder
from localbatch.engine.sampling import sample
from localbatch.engine.sizing import fit_context, kv_bytes, wanted_slots
from localbatch.engine.text import TextStream
from localbatch.scheduler.plan import PlanRow, StepPlan
from localbatch.scheduler.scheduler import Scheduler
from localbatch.scheduler.sequence import Sequence as TokenSequence
from localbatch.scheduler.sequence import SequenceStatus


class TextPiece(NamedTuple):
    """New text of a row that is still running."""

    row: int
    """The row's `Request.index`."""
    text: str


@dataclass
class EngineStats:
    """Counts since the engine started; seconds of wall time."""

    steps: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    decode_s: float = 0.0
    """In the backend."""
    run_s: float = 0.0
    """In steps, the backend included."""
    slots: int = 0
    row_cells: int = 0
    numerics: Numerics | None = None


@dataclass
class _Row:
    """What the engine keeps of a row beside its sequence."""

    sequence: TokenSequence
    text: TextStream
    arrived: float
    admitted: float = 0.0
    first_token: float = 0.0


@dataclass
class Engine:
    """Runs requests through one backend by continuous batching.

    The context is made when the first requests are known, and made anew, between rows, when later
    ones are longer than it allows.
    """

    backend: Backend
    config: EngineConfig
    streams_text: bool = False
    stats: EngineStats = field(default_factory=EngineStats)

    def __post_init__(self) -> None:
        self._encoder = PromptEncoder(self.backend)
        self._pending: list[_Row] = []  # not in the scheduler yet
        self._rows: dict[int, _Row] = {}  # by id() of the sequence
        self._scheduler: Scheduler | None = None

    @property
    def has_work(self) -> bool:
        """Whether any row is unfinished."""
        return bool(self._pending or self._rows)

    def submit(self, requests: Sequence[Request]) -> list[Completion]:
        """Take in requests; returns the records of those that can't be computed."""
        failed = []
        for request in requests:
            try:
                self._pending.append(self._row(request))
            except InputError as error:
                failed.append(
                    failed_completion(request.id, request.index, str(error), request.line)
                )
        return failed

    def _row(self, request: Request) -> _Row:
        tokens = self._encoder.encode(request)
        limit = self._longest_row()
        if len(tokens) > limit:
            raise InputError(
                f"has {len(tokens)} tokens, more than the context of {limit} (see --ctx)",
                field="prompt",
            )
        unknown = [t for t in request.params.logit_bias if t >= self.backend.card.num_vocab]
        if unknown:
            raise InputError(f"token {unknown[0]} is not in the vocabulary", field="logit_bias")
        text = TextStream(self.backend.token_bytes, request.params.stop)
        return _Row(TokenSequence(request, tokens), text, time.perf_counter())

    def abort(self) -> list[Completion]:
        """End all rows where they stand."""
        rows = [*self._rows.values(), *self._pending]
        for row in rows:
            if self._scheduler is not None and id(row.sequence) in self._rows:
                self._scheduler.finish(row.sequence, FinishReason.ABORTED)
            row.sequence.finish_reason = FinishReason.ABORTED
        self._rows, self._pending = {}, []
        return [self._completion(row) for row in rows]

    def step(self) -> list[Completion | TextPiece]:
        """Compute one step; returns what came of it."""
        started = time.perf_counter()
        events = self._step()
        self.stats.steps += 1
        self.stats.run_s += time.perf_counter() - started
        self.stats.decode_s = self.backend.decode_s
        return events

    def _step(self) -> list[Completion | TextPiece]:
        scheduler = self._ready_scheduler()
        plan = scheduler.schedule()
        now = time.perf_counter()
        for row in plan.rows:
            if row.start == 0:
                admitted = self._rows[id(row.sequence)]
                admitted.admitted = admitted.admitted or now
        try:
            tokens = self.backend.forward(plan, sample)
        except DecodeError as error:
            return self._fail_rows(scheduler, plan, error)
        finished = scheduler.update(plan, tokens)
        return self._take_tokens(scheduler, plan.rows, tokens, finished)

    def _take_tokens(
        self,
        scheduler: Scheduler,
        rows: Sequence[PlanRow],
        tokens: Sequence[int | None],
        finished: list[TokenSequence],
    ) -> list[Completion | TextPiece]:
        """Add new tokens to the texts, end rows whose stop string came, and report."""
        now = time.perf_counter()
        ended_by_token = {id(s) for s in finished if s.finish_reason is FinishReason.STOP}
        events: list[Completion | TextPiece] = []
        for plan_row, token in zip(rows, tokens, strict=True):
            if token is None:
                continue
            sequence = plan_row.sequence
            row = self._rows[id(sequence)]
            row.first_token = row.first_token or now
            if id(sequence) in ended_by_token:
                continue
            row.text.push(token)
            if row.text.stopped:
                if sequence.status is not SequenceStatus.FINISHED:
                    finished.append(sequence)
                scheduler.finish(sequence, FinishReason.STOP)
            elif self.streams_text and (piece := row.text.take()):
                events.append(TextPiece(sequence.request.index, piece))
        for sequence in finished:
            events += self._finish(self._rows.pop(id(sequence)))
        return events

    def _finish(self, row: _Row) -> list[Completion | TextPiece]:
        completion = self._completion(row)
        piece = row.text.take() if self.streams_text else ""
        return [*([TextPiece(completion.index, piece)] if piece else []), completion]

    def _completion(self, row: _Row, error: str | None = None) -> Completion:
        now = time.perf_counter()
        sequence, request = row.sequence, row.sequence.request
        assert sequence.finish_reason is not None
        admitted = row.admitted or now
        first = row.first_token or now
        usage = Usage(sequence.num_prompt, sequence.num_generated)
        self.stats.prompt_tokens += usage.prompt_tokens
        self.stats.completion_tokens += usage.completion_tokens
        return Completion(
            id=request.id, index=request.index, text=row.text.finish(),
            finish_reason=sequence.finish_reason, usage=usage,
            timings=Timings(admitted - row.arrived, first - admitted, now - first),
            token_ids=tuple(sequence.generated), error=error, line=request.line,
        )  # fmt: skip

    def _fail_rows(
        self, scheduler: Scheduler, plan: StepPlan, error: DecodeError
    ) -> list[Completion | TextPiece]:
        """End the rows of a step that could not be computed; the others go on."""
        failed: list[Completion | TextPiece] = []
        for plan_row in plan.rows:
            scheduler.finish(plan_row.sequence, FinishReason.ERROR)
            row = self._rows.pop(id(plan_row.sequence))
            failed.append(self._completion(row, error=str(error)))
        return failed

    def _ready_scheduler(self) -> Scheduler:
        """Hand pending rows to the scheduler, making a context that holds them if need be.

        A row that is too long for the present context waits, with all after it, until the rows
        before it are done.
        """
        if self._pending and not self._rows:
            self._fit_context()
        scheduler = self._scheduler
        assert scheduler is not None, "there is work, so there is a scheduler"
        taken = 0
        for row in self._pending:
            if self._wanted_cells(row) > scheduler.config.row_cells:
                break
            self._rows[id(row.sequence)] = row
            scheduler.add(row.sequence)
            taken += 1
        del self._pending[:taken]
        return scheduler

    def _fit_context(self) -> None:
        """Make the context anew if the pending rows want a larger one."""
        cells = max(self._wanted_cells(row) for row in self._pending)
        slots = wanted_slots(self.config, len(self._pending), on_gpu=self.backend.on_gpu)
        card, memory = self.backend.card, available_memory()
        if self._scheduler is not None:
            now = self._scheduler.config
            if cells <= now.row_cells and slots <= now.num_slots:
                return
            cells, slots = max(cells, now.row_cells), max(slots, now.num_slots)
            # What the present context takes is free when the next one is made.
            used = now.pool_cells or now.num_slots * now.row_cells
            memory += kv_bytes(card, 1, used)
        context = fit_context(self.config, card, slots, cells, self.backend.on_gpu, memory)
        self.stats.numerics = self.backend.open(context)
        self.stats.slots, self.stats.row_cells = context.num_slots, context.row_cells
        self._scheduler = Scheduler(
            SchedulerConfig(
                num_slots=context.num_slots, row_cells=context.row_cells,
                pool_cells=context.pool_cells, chunk=context.chunk,
            ),
            card.end_tokens,
        )  # fmt: skip

    def _wanted_cells(self, row: _Row) -> int:
        sequence = row.sequence
        wanted = sequence.num_prompt + sequence.request.params.max_tokens
        return min(wanted, self._longest_row())

    def _longest_row(self) -> int:
        longest = self.config.ctx or self.backend.card.max_ctx
        return min(longest, self.config.kv_cells or longest)
