"""The scheduler: who computes what in the next step."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from collections.abc import Sequence as SequenceOf
from operator import attrgetter

from localbatch.data.config import SchedulerConfig
from localbatch.data.request import FinishReason
from localbatch.scheduler.plan import Copy, Move, PlanRow, StepPlan
from localbatch.scheduler.prefixes import Prefix, PrefixSlots, chunk_end
from localbatch.scheduler.sequence import Sequence, SequenceStatus
from localbatch.scheduler.slots import SlotPool


class Scheduler:
    """Continuous batching over a fixed number of slots.

    Sequences that begin alike wait until the first of them has computed the common part, and start
    from a copy of it.

    There are no phases: each running sequence's `num_computed` chases its `num_tokens`, and one
    rule serves fresh prompts, long prompts in chunks, and sequences that lost their cells.
    Use: `plan = schedule()`, compute it, `done = update(plan, tokens)`.
    """

    def __init__(self, config: SchedulerConfig, end_tokens: Collection[int] = ()) -> None:
        self.config = config
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in the order of admission
        self.num_preempted = 0
        self.limit = config.num_slots
        """Sequences that may run at one time; lowered while a failure is being tracked down."""
        self._end_tokens = frozenset(end_tokens)
        self._slots = SlotPool(config.num_slots, config.pool_cells)
        self._prefixes = PrefixSlots(config.num_slots, config.num_prefix_slots)
        self._left: dict[int, Prefix] = {}  # by free slot: what an ended sequence left there
        self._releases: list[int] = []
        self._copies: list[Copy] = []
        self._mixes = config.pool_cells is not None

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; raises `ValueError` if its prompt can never fit."""
        if sequence.num_tokens > self.config.row_cells:
            raise ValueError(
                f"{sequence.num_tokens} tokens do not fit {self.config.row_cells} cells"
            )
        self.waiting.append(sequence)

    def schedule(self) -> StepPlan:
        """Plan the next step.

        Sequences that lag catch up first, then waiting ones are admitted, chunk by chunk under one
        token budget. When nobody lags, all take their next token together: decode is cheapest in a
        full batch. Where sequences share one pool of cells, those that don't lag decode in the
        same step as the chunks (llama.cpp computes them in one pass over the weights); in streams
        that would only break the batch of decoding rows apart. Chunks end at fixed positions, so
        that how a row is cut never depends on its neighbours.
        """
        preempted = self._make_room()
        moves: list[Move] = []
        if self.config.closes_gaps_first and self.waiting and self._slots.num_free:
            self._forget_left()
            moves = self._close_gaps()
        for sequence, slot, length in self._prefixes.save():  # moves come before copies
            self._copies.append(Copy(_slot_of(sequence), slot, length))
        rows = self._catch_up(admit=not preempted)
        if not rows or self._mixes:
            self._forget_left()
            moves += [] if self._mixes else self._close_gaps()
            rows += self._decode_rows()
        releases, self._releases = self._releases, []
        copies, self._copies = self._copies, []
        return StepPlan(rows, moves, releases, copies)

    def update(self, plan: StepPlan, tokens: SequenceOf[int | None]) -> list[Sequence]:
        """Take in a computed step.

        `tokens` has an entry for each row of the plan: the token chosen from the row's logits, or
        `None` where none were wanted. Returns the sequences that ended; their slots are free.
        """
        finished = []
        for row, token in zip(plan.rows, tokens, strict=True):
            sequence = row.sequence
            if sequence.status is not SequenceStatus.RUNNING:
                continue
            sequence.num_computed = row.end
            if token is None:
                continue
            reason = self._accept(sequence, token)
            if reason is not None:
                self.finish(sequence, reason)
                finished.append(sequence)
        return finished

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence wherever it stands; a second call only changes the reason."""
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
            self._release(sequence)
        elif sequence.status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason

    def preempt(self) -> Sequence | None:
        """Take the cells of the sequence admitted last; it waits at the head and is recomputed.

        The oldest sequence is never preempted, so the work always gets on. Returns the victim.
        """
        if len(self.running) < 2:
            return None
        victim = self.running.pop()
        self._release(victim)
        victim.status = SequenceStatus.WAITING
        victim.num_computed = 0
        self.waiting.appendleft(victim)
        self.num_preempted += 1
        return victim

    def restart(self, sequences: SequenceOf[Sequence]) -> None:
        """Put running sequences back at the head of the queue; their answers begin anew.

        For after a failure, when nobody knows what their cells hold.
        """
        for sequence in reversed(sequences):
            self.running.remove(sequence)
            for prefix in sequence.prefixes:
                prefix.num_users += 1
            self._release(sequence, is_sound=False)
            sequence.status = SequenceStatus.WAITING
            sequence.begin_anew()
            self.waiting.appendleft(sequence)

    def check_integrity(self) -> None:
        """Raise `AssertionError` if slots, cells or states contradict each other."""
        self._slots.check_integrity()
        self._prefixes.check_integrity(self.running)
        assert self._left.keys().isdisjoint(self._slots.in_use), "slots left by ended sequences"
        assert {s.slot for s in self.running} == self._slots.in_use, "slots in use"
        assert all(s.status is SequenceStatus.RUNNING for s in self.running), "running"
        assert all(s.status is SequenceStatus.WAITING and s.slot is None for s in self.waiting)
        assert all(0 <= s.num_computed < s.num_tokens for s in self.running), "computed"

    def _accept(self, sequence: Sequence, token: int) -> FinishReason | None:
        if token in self._end_tokens and not sequence.request.params.ignore_eos:
            return FinishReason.STOP
        sequence.tokens.append(token)
        num_tokens = len(sequence.tokens)
        if num_tokens >= sequence.most_tokens or num_tokens > self.config.row_cells:
            return FinishReason.LENGTH
        return None

    def _make_room(self) -> bool:
        """Preempt until every running sequence can go on; whether one was preempted."""
        preempted = False
        while self._shortage(self.running) > 0:
            if self.preempt() is None:
                raise AssertionError("one sequence alone must fit")
            preempted = True
        return preempted

    def _shortage(self, sequences: Iterable[Sequence]) -> int:
        """Cells missing for `sequences` to be computed up to their newest token."""
        free = self._slots.free_cells
        if free is None:
            return 0
        return sum(s.num_tokens - self._slots.cells_of(s.slot) for s in sequences) - free

    def _admit(self) -> bool:
        """Start the first waiting sequence if a slot and cells are free."""
        sequence = self.waiting[0]
        if len(self.running) >= self.limit:
            return False
        if self._shortage([*self.running, sequence]) > 0 or self._prefixes.must_wait(sequence):
            return False
        slot = self._slots.take()
        if slot is None:
            return False
        self.waiting.popleft()
        sequence.slot = slot
        sequence.status = SequenceStatus.RUNNING
        self.running.append(sequence)
        left = self._left.pop(slot, None)
        source, length = self._prefixes.start(sequence, slot, left)
        if left is not None and source != slot:
            self._releases.append(slot)
        if length:
            self._copies.append(Copy(source, slot, length))
            self._slots.grow(slot, length)
            sequence.num_computed = length
        return True

    def _forget_left(self) -> None:
        """Free slots that nobody went on in; a decode batch may be filled up with them."""
        self._releases += self._left
        self._left.clear()

    def _catch_up(self, *, admit: bool) -> list[PlanRow]:
        """Plan a chunk for each sequence that lags, new ones included, within the token budget."""
        budget = self.config.max_step_tokens
        rows: list[PlanRow] = []
        for sequence in self.running:
            if sequence.lags and (length := self._chunk_length(sequence)) <= budget:
                rows.append(self._chunk_row(sequence, length))
                budget -= length
        while admit and self.waiting:
            if self._chunk_length(self.waiting[0]) > budget or not self._admit():
                break
            length = self._chunk_length(self.running[-1])
            rows.append(self._chunk_row(self.running[-1], length))
            budget -= length
        return rows

    def _chunk_length(self, sequence: Sequence) -> int:
        start, config = sequence.num_computed, self.config
        ends = [chunk_end(start, sequence.num_tokens, config.chunk, config.block)]
        ends += [end for end in self._prefixes.ends_within(sequence) if end > start]
        return min(ends) - start

    def _decode_rows(self) -> list[PlanRow]:
        """Plan the next token of each sequence that does not lag.

        By slot: llama.cpp computes streams together only while their ids ascend by one.
        """
        rows = []
        for sequence in sorted(self.running, key=attrgetter("slot")):
            if not sequence.lags:
                slot, start = sequence.slot, sequence.num_computed
                assert slot is not None
                self._slots.grow(slot, 1)
                rows.append(
                    PlanRow(sequence, slot, start, start + 1, wants_logits=True, is_prefill=False)
                )
        return rows

    def _chunk_row(self, sequence: Sequence, length: int) -> PlanRow:
        assert sequence.slot is not None
        self._slots.grow(sequence.slot, length)
        start, end = sequence.num_computed, sequence.num_computed + length
        wants_logits = end == sequence.num_tokens
        return PlanRow(sequence, sequence.slot, start, end, wants_logits, is_prefill=True)

    def _close_gaps(self) -> list[Move]:
        """Move sequences from the highest slots into the free ones below.

        llama.cpp computes streams together only if their ids are consecutive, so a gap would
        split the batch in two.
        """
        moves: list[Move] = []
        for sequence in sorted(self.running, key=_slot_of, reverse=True):
            source = _slot_of(sequence)
            if self._slots.lowest_free_below(source) is None:
                break
            sequence.slot = self._slots.move_to_lowest(source)
            moves.append(Move(source, sequence.slot))
        return moves

    def _release(self, sequence: Sequence, *, is_sound: bool = True) -> None:
        assert sequence.slot is not None
        self._prefixes.drop(sequence)
        self._slots.give_back(sequence.slot)
        prefix = sequence.prefixes[-1] if sequence.prefixes else None
        has_prefix = prefix is not None and sequence.num_computed >= prefix.length
        if prefix and has_prefix and prefix.num_users > 0 and is_sound:
            self._left[sequence.slot] = prefix
        else:
            self._releases.append(sequence.slot)
        sequence.slot = None


def _slot_of(sequence: Sequence) -> int:
    assert sequence.slot is not None, "a running sequence has a slot"
    return sequence.slot
