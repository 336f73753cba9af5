"""A lane: one llama.cpp context, its scheduler, and the rows in it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future

from localbatch.data.config import SchedulerConfig
from localbatch.data.errors import DecodeError
from localbatch.data.request import Completion, FinishReason, Timings, TokenLogprob, Usage
from localbatch.engine.backend import Backend, ContextConfig, Numerics
from localbatch.engine.rows import Counters, Event, Part, Row, TextPiece, weight_of
from localbatch.engine.sampling import sample
from localbatch.engine.sizing import block_of
from localbatch.engine.threads import ComputeThread
from localbatch.scheduler.plan import PlanRow, StepPlan
from localbatch.scheduler.prefixes import Prefix
from localbatch.scheduler.scheduler import Scheduler
from localbatch.scheduler.sequence import Sequence as TokenSequence
from localbatch.scheduler.sequence import SequenceStatus


class Lane:
    """Runs rows through one context by continuous batching, in a thread of its own.

    While it advances, nobody else may use it.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.counters = Counters()
        self.streams_text = False
        self.load = 0
        """The weight of the rows that are not finished."""
        self.last_prefix: Prefix | None = None
        """The longest prefix of the row that was added last."""
        self._rows: dict[int, Row] = {}  # by id() of the sequence
        self._scheduler: Scheduler | None = None
        self._thread = ComputeThread()
        self._threads = 0
        self._admit_together = 1

    def open(self, context: ContextConfig) -> Numerics:
        """Make the context anew; the lane must be empty."""
        assert not self._rows, "rows are lost with their context"
        self.rest()
        numerics = self._thread.begin(self.backend.open, context).result()
        self._threads = context.threads
        self._admit_together = context.admit_together
        self._scheduler = Scheduler(
            SchedulerConfig(
                num_slots=context.num_slots, row_cells=context.row_cells,
                pool_cells=context.pool_cells, chunk=context.chunk, block=block_of(context.chunk),
                max_step_tokens=max(2048, context.chunk),
                num_prefix_slots=context.num_prefix_slots,
                closes_gaps_first=context.full_passes,
            ),
            self.backend.card.end_tokens,
        )  # fmt: skip
        return numerics

    @property
    def has_work(self) -> bool:
        """Whether any row is unfinished."""
        return bool(self._rows)

    @property
    def num_rows(self) -> int:
        """Unfinished rows."""
        return len(self._rows)

    def use_threads(self, threads: int) -> None:
        """Compute with so many threads from now on."""
        if threads != self._threads:
            if threads < self._threads:
                self.rest()
            self.backend.set_threads(threads)
            self._threads = threads

    def rest(self) -> None:
        """End the lane's thread, with its helpers, until it is needed again."""
        self._thread.end()

    def close(self) -> None:
        """Free the context."""
        self.rest()
        self.backend.close()

    @property
    def num_slots(self) -> int:
        """Rows that it can have at one time."""
        return self._opened.config.num_slots

    @property
    def num_free(self) -> int:
        """Rows that could start right away."""
        return self.num_slots - len(self._rows)

    @property
    def wants_rows(self) -> bool:
        """Whether it has begun all rows it was given, and enough others could start right away."""
        enough = self.num_free >= self._admit_together or (self.num_free and not self._rows)
        return bool(enough and not self._opened.waiting)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of rows that have not been begun."""
        return sum(sequence.num_prompt for sequence in self._opened.waiting)

    def add(self, row: Row) -> None:
        """Take a row in."""
        self._rows[id(row.sequence)] = row
        self.load += weight_of(row.sequence)
        self._opened.add(row.sequence)
        self.last_prefix = row.sequence.prefixes[-1] if row.sequence.prefixes else None

    def abort(self) -> list[Event]:
        """End all rows where they stand."""
        rows, self._rows, self.load = self._rows, {}, 0
        for row in rows.values():
            self._opened.finish(row.sequence, FinishReason.ABORTED)
        return [self.ended(row) for row in rows.values()]

    def begin(self, longest_s: float, *, more_rows: bool) -> Future[list[Event]]:
        """Advance in the lane's thread."""
        return self._thread.begin(self.advance, longest_s, more_rows=more_rows)

    def advance(self, longest_s: float = 0.0, *, more_rows: bool = False) -> list[Event]:
        """Compute a step, or more until there is something to report or the time is over.

        With `more_rows`, the lane does not decode in a batch that others could still fill.
        """
        started = time.perf_counter()
        events: list[Event] = []
        while self._rows:
            events = self._step()
            self.counters.steps += 1
            hungry = more_rows and self.wants_rows
            if events or hungry or time.perf_counter() - started >= longest_s:
                break
        self.counters.run_s += time.perf_counter() - started
        self.counters.decode_s = self.backend.decode_s
        return events

    @property
    def _opened(self) -> Scheduler:
        assert self._scheduler is not None, "open() comes first"
        return self._scheduler

    def _step(self) -> list[Event]:
        scheduler = self._opened
        plan = scheduler.schedule()
        self._note_start(plan)
        try:
            tokens = self.backend.forward(plan, sample)
        except DecodeError as error:
            return self._isolate(plan, error)
        finished = scheduler.update(plan, tokens)
        return self._take_tokens(plan.rows, tokens, finished)

    def _note_start(self, plan: StepPlan) -> None:
        now = time.perf_counter()
        for plan_row in plan.rows:
            sequence = plan_row.sequence
            if plan_row.start < sequence.num_prompt:
                row = self._rows[id(sequence)]
                row.admitted = row.admitted or now
                computed = min(plan_row.end, sequence.num_prompt) - plan_row.start
                self.counters.computed_prompt_tokens += computed

    def _take_tokens(
        self,
        rows: Sequence[PlanRow],
        tokens: Sequence[int | None],
        finished: list[TokenSequence],
    ) -> list[Event]:
        """Add new tokens to the texts, end rows whose stop string came, and report."""
        now = time.perf_counter()
        events: list[Event] = []
        for plan_row, token in zip(rows, tokens, strict=True):
            if token is None:
                continue
            sequence = plan_row.sequence
            row = self._rows[id(sequence)]
            if not row.first_token:
                row.first_token = now
            if sequence.finish_reason is FinishReason.STOP:  # by this token, which is no text
                continue
            text = row.text
            text.push(token)
            sequence.forced = sequence.forced[1:] or text.forced()
            if text.stopped:
                if sequence.status is not SequenceStatus.FINISHED:
                    finished.append(sequence)
                self._opened.finish(sequence, FinishReason.STOP)
            elif self.streams_text:
                events += self._new_text(row)
        if finished:
            self._recover()
        for sequence in finished:
            events += self._finish(self._take_out(sequence))
        return events

    def _take_out(self, sequence: TokenSequence) -> Row:
        self.load -= weight_of(sequence)
        return self._rows.pop(id(sequence))

    def _finish(self, row: Row) -> list[Event]:
        ended = self.ended(row)
        return [*self._new_text(row), ended]

    def _new_text(self, row: Row) -> list[Event]:
        if not self.streams_text or row.sequence.choice:
            return []
        piece = row.text.take()
        return [TextPiece(row.sequence.request.index, piece)] if piece else []

    def ended(self, row: Row, error: str | None = None) -> Completion | Part:
        """Return the record of an ended row."""
        completion = self._completion(row, error)
        if row.num_parts == 1:
            return completion
        return Part(row.sequence.choice, row.num_parts, completion)

    def _completion(self, row: Row, error: str | None) -> Completion:
        now = time.perf_counter()
        sequence, request = row.sequence, row.sequence.request
        assert sequence.finish_reason is not None
        admitted = row.admitted or now
        first = row.first_token or now
        text = row.text.finish()
        usage = Usage(
            sequence.num_prompt, sequence.num_generated, row.text.reasoning_tokens, row.cut_tokens
        )
        answered = sequence.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        self.counters.ended_in_reasoning += answered and row.text.ended_in_reasoning
        self.counters.prompt_tokens += usage.prompt_tokens
        self.counters.completion_tokens += usage.completion_tokens
        return Completion(
            id=request.id, index=request.index, text=text,
            finish_reason=sequence.finish_reason, usage=usage,
            timings=Timings(admitted - row.arrived, first - admitted, now - first),
            token_ids=tuple(sequence.generated), error=error, line=request.line,
            reasoning=row.text.reasoning, logprobs=self._logprobs(sequence),
        )  # fmt: skip

    def _logprobs(self, sequence: TokenSequence) -> tuple[TokenLogprob, ...] | None:
        """Return those of the generated tokens; the one that ended the answer has one, too."""
        if not sequence.request.params.logprobs:
            return None
        found = []
        for token, logprob, top in sequence.likelihoods[: sequence.num_generated]:
            likeliest = tuple(TokenLogprob(t, self._written(t), value) for t, value in top)
            found.append(TokenLogprob(token, self._written(token), logprob, likeliest))
        return tuple(found)

    def _written(self, token: int) -> bytes:
        """Return a token's bytes; a control token's are its name."""
        name = self.backend.card.special_texts.get(token, "")
        return self.backend.token_bytes(token) or name.encode()

    def _isolate(self, plan: StepPlan, error: DecodeError) -> list[Event]:
        """Run the rows of a step that could not be computed again, half as many at a time.

        A row that fails twice alone ends with the error. So do rows of which some text was shown.
        """
        sequences = [row.sequence for row in plan.rows]
        rows = [self._rows[id(sequence)] for sequence in sequences]
        if self.streams_text or (len(rows) == 1 and rows[0].failed_alone):
            return self._fail_rows(plan, error)
        rows[0].failed_alone = len(rows) == 1
        self._opened.restart(sequences)
        self._opened.limit = max(1, len(sequences) // 2)
        for row in rows:
            row.text.clear()
            row.sequence.forced = row.text.forced()
        return []

    def _recover(self) -> None:
        """Let more rows run at one time again."""
        self._opened.limit = min(2 * self._opened.limit, self._opened.config.num_slots)

    def _fail_rows(self, plan: StepPlan, error: DecodeError) -> list[Event]:
        """End the rows of a step that could not be computed; the others go on."""
        self._recover()
        failed: list[Event] = []
        for plan_row in plan.rows:
            self._opened.finish(plan_row.sequence, FinishReason.ERROR)
            row = self._take_out(plan_row.sequence)
            failed.append(self.ended(row, error=str(error)))
        return failed
