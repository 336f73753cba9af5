"""The scheduler under arbitrary arrivals, lengths, ends, aborts, preemptions and failures.

A state machine drives a `Scheduler` and keeps its own account of the KV cache and of every row. The
account is written from llama.cpp's rules and from what a row asks for, not from the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import Phase, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from localbatch.data.config import SchedulerConfig
from localbatch.data.request import FinishReason
from localbatch.scheduler.plan import Move, PlanRow, StepPlan
from localbatch.scheduler.scheduler import Scheduler
from localbatch.scheduler.sequence import Sequence, SequenceStatus
from tests.factories import END, create_requests

WAITING, RUNNING, FINISHED = (
    SequenceStatus.WAITING,
    SequenceStatus.RUNNING,
    SequenceStatus.FINISHED,
)


class KVCache:
    """What llama.cpp's cache holds, and what it refuses: slot -> tokens at positions 0, 1, ..."""

    def __init__(self, num_slots: int, row_cells: int, pool_cells: int | None) -> None:
        self.slots: list[list[int]] = [[] for _ in range(num_slots)]
        self.row_cells = row_cells
        self.pool_cells = num_slots * row_cells if pool_cells is None else pool_cells

    def release(self, slot: int) -> None:
        self._check_slot(slot)
        self.slots[slot] = []

    def move(self, source: int, target: int) -> None:
        self._check_slot(source)
        self._check_slot(target)
        assert self.slots[source], f"move from the empty slot {source}"
        assert not self.slots[target], f"move onto slot {target}, which is occupied"
        self.slots[target], self.slots[source] = self.slots[source], []

    def compute(self, slot: int, start: int, tokens: list[int]) -> None:
        self._check_slot(slot)
        held = self.slots[slot]
        assert tokens, "a row without tokens"
        assert start == len(held), f"slot {slot} goes on at {len(held)}, not at {start}"
        held += tokens
        assert len(held) <= self.row_cells, f"slot {slot} is too small"
        assert sum(map(len, self.slots)) <= self.pool_cells, "the cache is too small"

    def _check_slot(self, slot: int) -> None:
        assert 0 <= slot < len(self.slots), f"slot {slot} does not exist"


@dataclass
class Row:
    """The test's own account of a row: what it asks for and how it must end."""

    number: int
    prompt: list[int]
    max_tokens: int
    end_at: int | None
    """How many tokens the model says before it says `END`."""
    ignore_eos: bool
    sequence: Sequence
    status: SequenceStatus = WAITING
    num_computed: int = 0
    """Tokens in the cache; back to 0 only by a preemption."""
    reason: FinishReason | None = None
    """Set when the row was ended from outside."""

    def model_says(self, k: int) -> int:
        """Return the k-th token after the prompt; never the same token twice, but for `END`."""
        return END if k == self.end_at else -1000 * (self.number + 1) - k

    def answer(self, row_cells: int) -> list[int]:
        """Return the whole answer.

        The cells hold all tokens but the newest, so one more than `row_cells` can be known.
        """
        length = min(self.max_tokens, row_cells + 1 - len(self.prompt))
        if self.end_at is not None and not self.ignore_eos:
            length = min(length, self.end_at)
        return [self.model_says(k) for k in range(length)]

    def end(self, row_cells: int) -> FinishReason:
        """Return why the row ends if nobody ends it."""
        limit = min(self.max_tokens, row_cells + 1 - len(self.prompt))
        stops = self.end_at is not None and self.end_at < limit and not self.ignore_eos
        return FinishReason.STOP if stops else FinishReason.LENGTH


@dataclass
class Work:
    """What Hypothesis chooses of a row."""

    shape: str
    anywhere: int
    max_tokens: int
    end_at: int | None
    ignore_eos: bool

    def prompt_length(self, config: SchedulerConfig) -> int:
        """Return the length at or near a place where something changes."""
        length = {
            "one": 1,
            "below a chunk": config.chunk - 1,
            "a chunk": config.chunk,
            "above a chunk": config.chunk + 1,
            "full": config.row_cells,
            "anywhere": self.anywhere,
        }[self.shape]
        return min(max(length, 1), config.row_cells)


WORK = st.builds(
    Work,
    shape=st.sampled_from(
        ["anywhere", "one", "below a chunk", "a chunk", "above a chunk", "full"],
    ),
    anywhere=st.integers(1, 24),
    max_tokens=st.integers(1, 12),
    end_at=st.none() | st.integers(0, 12),
    ignore_eos=st.sampled_from([False, False, True]),
)


@st.composite
def configs(draw: st.DrawFn) -> SchedulerConfig:
    """Both layouts; a pool may hold one row and nothing beside it."""
    chunk = draw(st.integers(1, 5))
    row_cells = draw(st.integers(1, 24))
    pool_cells = draw(
        st.none() | st.just(row_cells) | st.integers(row_cells, 3 * row_cells),
    )
    return SchedulerConfig(
        num_slots=draw(st.sampled_from([4, 3, 2, 6, 1])),
        row_cells=row_cells,
        pool_cells=pool_cells,
        chunk=chunk,
        max_step_tokens=draw(st.integers(chunk, 4 * chunk)),
        closes_gaps_first=pool_cells is None and draw(st.booleans()),
    )


@dataclass
class Interruption:
    """Something that happens between planning a step and taking in its tokens."""

    kind: str
    which: int = field(default=0)


INTERRUPTIONS = st.lists(
    st.builds(Interruption, st.sampled_from(["abort", "preempt"]), st.integers(0, 30)), max_size=2
)


class SchedulerMachine(RuleBasedStateMachine):
    """Drives a scheduler and checks each of its plans against the test's own account."""

    @initialize(config=configs(), work=st.lists(WORK, min_size=1, max_size=10))
    def start(self, config: SchedulerConfig, work: list[Work]) -> None:
        self.config = config
        self.streams = config.pool_cells is None
        self.scheduler = Scheduler(config, end_tokens={END})
        self.cache = KVCache(config.num_slots, config.row_cells, config.pool_cells)
        self.rows: list[Row] = []  # in the order of arrival
        self.by_sequence: dict[int, Row] = {}
        self.num_preempted = 0
        self.rows_arrive(work)

    # What can happen.

    @rule(work=st.lists(WORK, min_size=1, max_size=4))
    def rows_arrive(self, work: list[Work]) -> None:
        for item in work:
            number = len(self.rows)
            length = item.prompt_length(self.config)
            prompt = [1000 * (number + 1) + p for p in range(length)]
            (request,) = create_requests(
                1, first=number, max_tokens=item.max_tokens, ignore_eos=item.ignore_eos
            )
            sequence = Sequence(request, prompt)
            row = Row(number, prompt, item.max_tokens, item.end_at, item.ignore_eos, sequence)
            self.scheduler.add(sequence)
            self.rows.append(row)
            self.by_sequence[id(sequence)] = row

    @rule(extra=st.integers(1, 5))
    def row_that_is_too_long_arrives(self, extra: int) -> None:
        (request,) = create_requests(1)
        with pytest.raises(ValueError, match="do not fit"):
            self.scheduler.add(Sequence(request, [1] * (self.config.row_cells + extra)))

    @rule(interruptions=INTERRUPTIONS)
    def step_runs(self, interruptions: list[Interruption]) -> None:
        plan = self.plan_step()
        for row in plan.rows:
            self.cache.compute(row.slot, row.start, row.tokens)
        self.check_cache(plan)
        for interruption in interruptions:
            self.interrupt(interruption)
        self.take_tokens(plan)

    @rule(count=st.integers(1, 12))
    def steps_run(self, count: int) -> None:
        for _ in range(count):
            self.step_runs([])
            self.check_conservation()
            self.check_answers()

    @rule(num_computed=st.integers(0, 3))
    def step_fails(self, num_computed: int) -> None:
        """Let a backend fail after some of the rows; all rows of the step are ended."""
        plan = self.plan_step()
        for row in plan.rows[:num_computed]:
            self.cache.compute(row.slot, row.start, row.tokens)
        for plan_row in plan.rows:
            self.end(self.row_of(plan_row), FinishReason.ERROR)
        event("a step fails")

    @rule(which=st.integers(0, 30))
    def row_is_aborted(self, which: int) -> None:
        self.interrupt(Interruption("abort", which))

    @rule()
    def youngest_is_preempted(self) -> None:
        self.interrupt(Interruption("preempt"))

    @rule()
    def all_work_is_done(self) -> None:
        """Let no more rows arrive: the work ends within `self.step_bound()` steps."""
        bound = self.step_bound()
        steps = 0
        while self.scheduler.has_work:
            assert steps < bound, f"not done after {bound} steps"
            self.step_runs([])
            self.check_conservation()
            self.check_answers()
            steps += 1

    def teardown(self) -> None:
        if hasattr(self, "scheduler"):
            self.all_work_is_done()

    # What must hold after each of these.

    @invariant()
    def check_conservation(self) -> None:
        """Check that no row is lost or doubled, and the queue is in the order of arrival.

        A preempted row is older than all that wait and younger than all that run, so running and
        waiting rows, in this order, are always the unfinished rows in order of arrival.
        """
        self.scheduler.check_integrity()
        unfinished = [row.sequence for row in self.rows if row.status is not FINISHED]
        assert unfinished == [*self.scheduler.running, *self.scheduler.waiting]
        assert bool(unfinished) == self.scheduler.has_work
        assert [row.status for row in self.rows] == [row.sequence.status for row in self.rows]
        assert self.num_preempted == self.scheduler.num_preempted

    @invariant()
    def check_answers(self) -> None:
        """Check that every row has a part of its own answer, and its own end."""
        cells = self.config.row_cells
        for row in self.rows:
            sequence = row.sequence
            answer = row.answer(cells)
            assert row.prompt + answer[: sequence.num_generated] == sequence.tokens
            if row.status is not FINISHED:
                assert sequence.finish_reason is None
            elif row.reason is None:
                assert answer == sequence.generated
                assert row.end(cells) == sequence.finish_reason
            else:
                assert row.reason == sequence.finish_reason

    # One step, and its checks.

    def plan_step(self) -> StepPlan:
        """Plan a step, check the plan, and do its releases and moves in the cache."""
        waiting = [row for row in self.rows if row.status is WAITING]
        running = [row for row in self.rows if row.status is RUNNING]
        plan = self.scheduler.schedule()
        slots = {row.sequence.slot for row in running}
        preempted = [row for row in running if row.sequence.status is WAITING]
        admitted = [row for row in waiting if row.sequence.status is RUNNING]
        self.check_preemption(running, preempted)
        assert admitted == waiting[: len(admitted)], "rows are admitted in order of arrival"
        for row in admitted:
            slot = row.sequence.slot
            assert slot == min(set(range(self.config.num_slots)) - slots), (
                "not the lowest free slot"
            )
            slots.add(slot)
            row.status = RUNNING
        assert bool(plan) == self.scheduler.has_work, "there is work, so something is computed"

        self.check_releases_and_moves(plan)
        self.check_rows(plan)
        self.check_budget_is_used(plan)
        if self.streams:
            self.check_streams(plan)
        else:
            self.check_unified(plan)
        return plan

    def check_preemption(self, running: list[Row], preempted: list[Row]) -> None:
        """Check that the youngest make room, only if there is none, and never the oldest."""
        if not preempted:
            return
        event("a row is preempted for want of cells")
        assert not self.streams, "streams never lack cells"
        kept = running[: len(running) - len(preempted)]
        assert kept, "the oldest row stays"
        assert preempted == running[len(kept) :], "the victims are the youngest"
        # With the last victim left in, the cells would not have sufficed.
        wanted = sum(row.sequence.num_tokens for row in [*kept, preempted[0]])
        assert wanted > self.cache.pool_cells, "a preemption that was not needed"
        for row in preempted:
            self.lose_cells(row)

    def check_releases_and_moves(self, plan: StepPlan) -> None:
        assert len(set(plan.releases)) == len(plan.releases), "a slot is released twice"
        for slot in plan.releases:
            self.cache.release(slot)
        held = [slot for slot, tokens in enumerate(self.cache.slots) if tokens]
        for move in plan.moves:
            assert isinstance(move, Move)
            self.cache.move(move.source, move.target)
        if plan.moves:
            event("slots move")
            admits = self.config.closes_gaps_first and any(row.start == 0 for row in plan.rows)
            assert admits or not any(row.is_prefill for row in plan.rows)
            # As few as can be: the slots in use that are not below their number.
            assert len(plan.moves) == sum(slot >= len(held) for slot in held)

    def check_rows(self, plan: StepPlan) -> None:
        config = self.config
        rows = plan.rows
        assert len({row.slot for row in rows}) == len(rows), "a slot is used twice"
        assert len({id(row.sequence) for row in rows}) == len(rows), "a row is computed twice"
        assert plan.num_tokens == sum(len(row.tokens) for row in rows)
        for plan_row in rows:
            row = self.row_of(plan_row)
            num_tokens = plan_row.sequence.num_tokens
            start, end = plan_row.start, plan_row.end
            assert row.status is RUNNING
            assert plan_row.slot == plan_row.sequence.slot
            assert row.num_computed == start, "every token is computed, and once"
            assert start < end <= num_tokens
            assert plan_row.wants_logits == (end == num_tokens)
            lags = start == 0 or start < num_tokens - 1
            assert lags == plan_row.is_prefill
            if plan_row.is_prefill:
                # Starts and ends are where they would be were the row alone.
                assert start % config.chunk == 0
                assert end == min(start + config.chunk, num_tokens)
            else:
                assert plan_row.wants_logits
        prefill = sum(row.end - row.start for row in rows if row.is_prefill)
        assert prefill <= config.max_step_tokens

    def check_budget_is_used(self, plan: StepPlan) -> None:
        """Check that the head of the queue waits only for want of a slot, cells or budget."""
        head = next((row for row in self.rows if row.status is WAITING), None)
        if head is None:
            return
        running = [row for row in self.rows if row.status is RUNNING]
        tokens = sum(row.sequence.num_tokens for row in [*running, head])
        prefill = sum(row.end - row.start for row in plan.rows if row.is_prefill)
        chunk = min(self.config.chunk, head.sequence.num_tokens)
        assert (
            len(running) == self.config.num_slots
            or (not self.streams and tokens > self.cache.pool_cells)
            or prefill + chunk > self.config.max_step_tokens
        ), "the head of the queue could have started"

    def check_streams(self, plan: StepPlan) -> None:
        """Check that prefills go by themselves; else all running rows decode, densely, in order."""
        if any(row.is_prefill for row in plan.rows):
            assert all(row.is_prefill for row in plan.rows), "decode beside prefill"
            return
        running = [row.sequence for row in self.rows if row.status is RUNNING]
        assert {id(s) for s in running} == {id(row.sequence) for row in plan.rows}
        assert list(range(len(running))) == [row.slot for row in plan.rows]

    def check_unified(self, plan: StepPlan) -> None:
        """Check that all rows that don't lag decode, in every step, and that nothing moves."""
        assert plan.moves == []
        planned = {id(row.sequence) for row in plan.rows}
        for row in self.rows:
            if row.status is RUNNING and 0 < row.num_computed == row.sequence.num_tokens - 1:
                assert id(row.sequence) in planned, "a row that could decode was left out"

    def check_cache(self, plan: StepPlan) -> None:
        """Check that each slot holds its own row's tokens from 0 on, and no other has cells."""
        for plan_row in plan.rows:
            row = self.row_of(plan_row)
            row.num_computed = plan_row.end
            tokens = row.prompt + row.answer(self.config.row_cells)
            assert tokens[: plan_row.end] == self.cache.slots[plan_row.slot]
        expected: list[list[int]] = [[] for _ in self.cache.slots]
        for row in self.rows:
            if row.status is RUNNING:
                assert row.sequence.slot is not None
                expected[row.sequence.slot] = row.sequence.tokens[: row.num_computed]
        assert expected == self.cache.slots

    def take_tokens(self, plan: StepPlan) -> None:
        """Give each row that wants logits the next token of its answer; check who ended."""
        tokens: list[int | None] = []
        ended = []
        for plan_row in plan.rows:
            row = self.row_of(plan_row)
            if not plan_row.wants_logits:
                tokens.append(None)
                continue
            generated = plan_row.end - len(row.prompt)
            tokens.append(row.model_says(generated))
            if row.status is RUNNING:  # neither aborted nor preempted meanwhile
                answer = row.answer(self.config.row_cells)
                stops = row.end(self.config.row_cells) is FinishReason.STOP
                if generated == len(answer) - (not stops):
                    ended.append(row)
        finished = self.scheduler.update(plan, tokens)
        assert [row.sequence for row in ended] == finished
        for row in ended:
            row.status = FINISHED

    # Aborts and preemptions.

    def interrupt(self, interruption: Interruption) -> None:
        if interruption.kind == "abort":
            unfinished = [row for row in self.rows if row.status is not FINISHED]
            rows = unfinished if unfinished and interruption.which % 4 else self.rows
            if rows:
                row = rows[interruption.which % len(rows)]
                event(f"a {row.status.value} row is aborted")
                self.end(row, FinishReason.ABORTED)
            return
        running = [row for row in self.rows if row.status is RUNNING]
        victim = self.scheduler.preempt()
        if len(running) < 2:
            assert victim is None, "the oldest row was preempted"
            return
        event("a row is preempted from outside")
        assert victim is running[-1].sequence
        self.lose_cells(running[-1])

    def end(self, row: Row, reason: FinishReason) -> None:
        self.scheduler.finish(row.sequence, reason)
        assert row.sequence.slot is None
        row.status, row.reason = FINISHED, reason

    def lose_cells(self, row: Row) -> None:
        assert row.status is RUNNING
        row.status = WAITING
        row.num_computed = 0
        self.num_preempted += 1

    def row_of(self, plan_row: PlanRow) -> Row:
        return self.by_sequence[id(plan_row.sequence)]

    def step_bound(self) -> int:
        """Return a number of steps in which all present rows must end.

        The oldest unfinished row is never preempted. Where cells are shared it is in every plan:
        it is the first to catch up, and decodes beside the others' chunks. From the time it is the
        oldest it takes at most ceil(t / chunk) steps to have t tokens computed, t being those it
        has then, the last of which gives it one more; and after that one step for each token. With
        p prompt tokens and an answer of at most g = min(max_tokens, row_cells + 1 - p), t is at
        most p + g - 1 and the tokens at most g, hence ceil((p + g - 1) / chunk) + g steps, and for
        all rows the sum of these.

        In streams nobody is preempted now. Every step either computes a chunk of a row that lags,
        of which each row has ceil((p + g - 1) / chunk) at most, or gives every running row a token,
        of which each gets g at most: the same sum.
        """
        total = 0
        for row in self.rows:
            if row.status is not FINISHED:
                prompt = len(row.prompt)
                longest = min(row.max_tokens, self.config.row_cells + 1 - prompt)
                total += -(-(prompt + longest - 1) // self.config.chunk) + longest
        return total


TestScheduler = pytest.mark.timeout(600)(SchedulerMachine.TestCase)  # shrinking takes its time
TestScheduler.settings = settings(
    max_examples=400,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    phases=(Phase.generate, Phase.shrink),
    report_multiple_bugs=False,
)
