"""The engine: requests in, events out, through one lane or several side by side."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass

from localbatch.data.config import EngineConfig, KVLayout, Order
from localbatch.data.errors import InputError
from localbatch.data.request import Completion, FinishReason, Request, failed_completion
from localbatch.engine.answers import Answers
from localbatch.engine.backend import Backend, ContextConfig, Numerics
from localbatch.engine.lane import Lane
from localbatch.engine.lanes import LaneGroup, wanted_cells
from localbatch.engine.order import best_order
from localbatch.engine.planner import Choice
from localbatch.engine.prompt import PromptEncoder
from localbatch.engine.reasoning import ReasoningTexts
from localbatch.engine.rows import Event, Row, TextPiece, weight_of
from localbatch.engine.sizing import block_of, chunk_of
from localbatch.scheduler.prefixes import find_prefixes
from localbatch.scheduler.sequence import Sequence as TokenSequence

__all__ = ["Engine", "EngineStats", "TextPiece"]

_GROUP = 4
_AHEAD_TOKENS = 1024
"""Prompt tokens that a lane has waiting."""
_WORTH_THREADS_BYTES = 50_000_000
"""Weights times rows of a step that more threads make faster, by measurements: with 1 and 4 rows of
a model of 100 MB, two threads take 0.6 times as long as one."""
_LONGEST_S = 0.05
"""How long one of several lanes computes before it is given new rows and asked for what is done."""


@dataclass
class EngineStats:
    """Counts since the engine started; seconds of wall time."""

    steps: int = 0
    prompt_tokens: int = 0
    computed_prompt_tokens: int = 0
    """Less than `prompt_tokens`, those of each answer, by what was in common."""
    completion_tokens: int = 0
    ended_in_reasoning: int = 0
    """Answers that ended before their reasoning did."""
    decode_s: float = 0.0
    """In the backend, the mean of the lanes."""
    run_s: float = 0.0
    """In steps, the backend included, the mean of the lanes."""
    lanes: int = 0
    slots: int = 0
    """Rows that can be in the batch at one time, all lanes together."""
    row_cells: int = 0
    threads: int = 0
    """Of each lane."""
    numerics: Numerics | None = None
    plan: Choice | None = None
    context: ContextConfig | None = None
    """Of the largest lane; others may have a row less."""
    kv_bytes: int = 0
    """Of all lanes."""
    buffer_bytes: int = 0
    """Compute and output buffers of all lanes."""
    free_bytes: int = 0
    """Of memory, left where the model is, after the contexts were made."""


class Engine:
    """Runs requests through a backend's contexts by continuous batching.

    The contexts are made when the first requests are known, and made anew, between rows, when later
    ones are longer than they allow. Each lane computes in a thread of its own; all else happens in
    the caller's.
    """

    def __init__(self, backend: Backend, config: EngineConfig) -> None:
        self.backend, self.config = backend, config
        self.streams_text = False
        self.encoder = PromptEncoder(backend, config.chat_template)
        self._queue: deque[Row] = deque()
        self._answers = Answers()
        self._texts = ReasoningTexts(backend, config.chat_template)
        self._group = LaneGroup(backend, config)
        self._advancing: dict[Future[list[Event]], Lane] = {}

    @property
    def lanes(self) -> list[Lane]:
        """The contexts and what runs in them."""
        return self._group.lanes

    @property
    def has_work(self) -> bool:
        """Whether any row is unfinished."""
        return bool(self._queue or self._advancing) or any(lane.has_work for lane in self.lanes)

    @property
    def stats(self) -> EngineStats:
        """Counts as of now."""
        group = self._group
        counters, context, lanes = group.counters, group.context, len(group.lanes)
        return EngineStats(
            steps=sum(c.steps for c in counters),
            prompt_tokens=sum(c.prompt_tokens for c in counters),
            computed_prompt_tokens=sum(c.computed_prompt_tokens for c in counters),
            completion_tokens=sum(c.completion_tokens for c in counters),
            ended_in_reasoning=sum(c.ended_in_reasoning for c in counters),
            decode_s=sum(c.decode_s for c in counters) / lanes,
            run_s=sum(c.run_s for c in counters) / lanes,
            lanes=lanes if context else 0,
            slots=group.num_slots,
            row_cells=context.row_cells if context else 0,
            threads=context.threads if context else 0,
            numerics=group.numerics,
            plan=group.choice,
            context=context,
            kv_bytes=group.kv_bytes,
            buffer_bytes=sum(lane.backend.buffer_bytes for lane in group.lanes),
            free_bytes=group.free_bytes,
        )

    @property
    def num_calls(self) -> int:
        """Computations that have come back; another thread may read it."""
        return sum(lane.backend.num_calls for lane in self.lanes)

    def submit(self, requests: Sequence[Request]) -> list[Completion]:
        """Take in requests; returns the records of those that can't be computed."""
        failed = []
        for request in requests:
            try:
                self._take(request)
            except InputError as error:
                bad = failed_completion(
                    request.id, request.index, str(error), request.line,
                    field=error.field, code=error.code,
                )  # fmt: skip
                failed.append(bad)
        self._arrange()
        return failed

    def encode(self, request: Request) -> tuple[list[int], int]:
        """Return a row's prompt in tokens, and how many were cut out to make it fit.

        Raises `InputError` if the row can't be computed.
        """
        unknown = [t for t in request.params.logit_bias if t >= self.backend.card.num_vocab]
        if unknown:
            raise InputError(f"token {unknown[0]} is not in the vocabulary", field="logit_bias")
        return self.encoder.encode_fitting(request, self.longest_row(), self.config.overlength)

    def _take(self, request: Request) -> None:
        """Queue a row for each answer of a request that must be computed."""
        tokens, num_cut = self.encode(request)
        count = self._answers.expect(request, tokens, once=self.config.share_prefixes)
        for choice in range(count):
            sequence = TokenSequence(request, tokens, choice)
            text = self._texts.make(request, tokens)
            sequence.forced = text.forced()
            row = Row(sequence, text, time.perf_counter(), count, cut_tokens=num_cut)
            self._queue.append(row)

    def abort(self) -> list[Completion]:
        """End all rows where they stand; waits for the steps that are being computed."""
        events = self._collect(wait_for_all=True)
        events += [event for lane in self.lanes for event in lane.abort()]
        for row in self._queue:
            row.sequence.finish_reason = FinishReason.ABORTED
            events.append(self.lanes[0].ended(row))
        self._queue.clear()
        return [event for event in self._of_rows(events) if isinstance(event, Completion)]

    def forget(self) -> None:
        """Drop the rows that wait, as if they had never come; no other may be there."""
        self._queue.clear()
        self._answers = Answers()

    def prepare(self) -> None:
        """Make the contexts for the rows that wait, as the next step would."""
        at_rest = not self._advancing and not any(lane.has_work for lane in self.lanes)
        if self._queue and at_rest:
            self._group.fit([row.sequence for row in self._queue], self.longest_row())

    def step(self) -> list[Completion | TextPiece]:
        """Compute until there is something new; returns it, or nothing after a short time."""
        self.prepare()
        busy = set(self._advancing.values())
        idle = [lane for lane in self.lanes if lane not in busy]
        self._assign(idle)
        self._share_threads(idle)
        longest_s = _LONGEST_S if len(self.lanes) > 1 else 0.0
        for lane in idle:
            if lane.has_work:
                more = bool(self._queue)
                self._advancing[lane.begin(longest_s, more_rows=more)] = lane
        return self._of_rows(self._collect())

    def close(self) -> None:
        """Free the contexts that the engine made."""
        self._collect(wait_for_all=True)
        self.lanes[0].rest()
        for lane in self.lanes[1:]:
            lane.close()

    def _of_rows(self, events: list[Event]) -> list[Completion | TextPiece]:
        return self._answers.collect(events, streams_text=self.streams_text)

    def _collect(self, *, wait_for_all: bool = False) -> list[Event]:
        """Return what lanes report that are through; waits for one of them, or for all."""
        events: list[Event] = []
        while self._advancing:
            done, _ = wait(self._advancing, return_when=FIRST_COMPLETED)
            for future in done:
                del self._advancing[future]
                events += future.result()
            if not wait_for_all:
                break
        return events

    def _assign(self, idle: list[Lane]) -> None:
        """Give waiting rows to lanes with room, each to the one with the least to do.

        With several lanes each takes only what it is about to begin, so that the one that gets on
        faster takes more. A row that is too long for the contexts waits, with all after it, until
        the rows before it are done.
        """
        assert self._group.context is not None, "there is work, so there are contexts"
        for lane in idle:
            lane.streams_text = self.streams_text
        enough = min(self._group.context.admit_together, len(self._queue))
        takers = [lane for lane in idle if lane.num_free >= enough]
        takers += [lane for lane in idle if lane not in takers and not lane.has_work]
        ahead = max(_AHEAD_TOKENS, 2 * (self._group.context.pass_tokens or 0))
        while self._queue and self._wanted_cells(self._queue[0]) <= self._group.context.row_cells:
            room = [
                lane
                for lane in takers
                if lane.num_free > 0 and (len(self.lanes) == 1 or lane.waiting_tokens < ahead)
            ]
            if not room:
                break
            row = self._queue.popleft()
            _best_lane(room, row).add(row)

    def _share_threads(self, idle: list[Lane]) -> None:
        """Let lanes that are not computing use the threads of those that have nothing to do."""
        assert self._group.context is not None
        threads = self._group.context.threads
        working = sum(lane.has_work for lane in self.lanes)
        for lane in idle:
            if not lane.has_work:
                lane.rest()
            if lane.has_work:
                step_bytes = lane.num_rows * self.backend.card.file_bytes
                alone = not self._queue and step_bytes >= _WORTH_THREADS_BYTES
                lane.use_threads(threads * len(self.lanes) // working if alone else threads)

    def _arrange(self) -> None:
        """Find what waiting rows have in common, and put them into a good order."""
        if self.config.share_prefixes and self.config.kv_layout is KVLayout.STREAMS:
            rows = [row.sequence for row in self._queue]
            chunk = chunk_of(self.config, on_gpu=self.backend.on_gpu)
            paths = find_prefixes([s.tokens for s in rows], chunk, block_of(chunk))
            for sequence, path in zip(rows, paths, strict=True):
                sequence.prefixes = path
        if self.config.order is Order.AUTO:
            self._queue = deque(best_order(self._queue, self._wanted_cells))

    def _wanted_cells(self, row: Row) -> int:
        return min(wanted_cells(row.sequence), self.longest_row())

    def longest_row(self) -> int:
        """Return the most tokens that a row may have, prompt and answer together."""
        longest = self.config.ctx or self.backend.card.max_ctx
        return min(longest, self.config.kv_cells or longest)


def _best_lane(room: list[Lane], row: Row) -> Lane:
    """Return the lane with the least to do, or one with little more that shares the row's prefix.

    Each lane computes a prefix for itself, so small groups should not be torn apart.
    """
    best = min(room, key=lambda lane: lane.load)
    prefix = row.sequence.prefixes[-1] if row.sequence.prefixes else None
    for lane in room:
        near = lane.load - best.load <= _GROUP * weight_of(row.sequence)
        if prefix is not None and lane.last_prefix is prefix and near:
            return lane
    return best
