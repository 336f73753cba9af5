"""The scheduler by examples; every plan here was computed by hand.

A row of a plan is written (request index, slot, start, end).
"""

from __future__ import annotations

import pytest

from localbatch.data.request import FinishReason
from localbatch.scheduler.scheduler import Scheduler
from localbatch.scheduler.sequence import Likelihood, Sequence, SequenceStatus
from localbatch.scheduler.slots import SlotPool
from tests.factories import (
    ANSWER,
    END,
    compute,
    create_requests,
    create_scheduler,
    create_sequences,
    run_step,
    shape,
)


def add_all(scheduler: Scheduler, *groups: list[Sequence]) -> list[Sequence]:
    """Queue all sequences, in order, and return them as one list."""
    sequences = [sequence for group in groups for sequence in group]
    for sequence in sequences:
        scheduler.add(sequence)
    return sequences


class TestSequence:
    def test_counts_prompt_and_answer(self) -> None:
        """A sequence tells prompt tokens from generated ones."""
        (sequence,) = create_sequences(1, num_tokens=3)
        sequence.tokens += [ANSWER, ANSWER]
        assert sequence.num_prompt == 3
        assert sequence.num_tokens == 5
        assert sequence.num_generated == 2
        assert sequence.generated == [ANSWER, ANSWER]

    @pytest.mark.parametrize(
        ("num_computed", "lags"), [(0, True), (1, True), (2, False), (3, False)]
    )
    def test_lags_until_only_the_newest_token_is_left(self, num_computed: int, lags: bool) -> None:
        """With three tokens, a sequence lags while two or more are not computed."""
        (sequence,) = create_sequences(1, num_tokens=3)
        sequence.num_computed = num_computed
        assert lags == sequence.lags

    def test_one_token_that_is_not_computed_lags(self) -> None:
        """A prompt of one token is a prefill, not a decode."""
        (sequence,) = create_sequences(1, num_tokens=1)
        assert sequence.lags

    def test_keeps_a_copy_of_the_prompt(self) -> None:
        """Generated tokens are not added to the caller's list."""
        prompt = [5, 6]
        sequence = Sequence(create_requests(1)[0], prompt)
        sequence.tokens.append(ANSWER)
        assert prompt == [5, 6]

    def test_refuses_an_empty_prompt(self) -> None:
        """Nothing can follow from no token at all."""
        with pytest.raises(ValueError, match=r"^a sequence starts with at least one token$"):
            Sequence(create_requests(1)[0], [])

    def test_repr_says_where_it_stands(self) -> None:
        """A sequence in a log line names its row, state, slot and progress."""
        (sequence,) = create_sequences(1, num_tokens=3)
        assert repr(sequence) == "Sequence('row-0', waiting, slot=None, 0/3 computed)"


class TestAdmission:
    def test_starts_as_many_rows_as_there_are_slots(self) -> None:
        """With two slots and three rows, the first two start and the third waits."""
        scheduler = create_scheduler(num_slots=2)
        rows = add_all(scheduler, create_sequences(3, num_tokens=3))
        assert shape(run_step(scheduler)) == [(0, 0, 0, 3), (1, 1, 0, 3)]
        assert [s.status for s in rows] == [
            SequenceStatus.RUNNING,
            SequenceStatus.RUNNING,
            SequenceStatus.WAITING,
        ]

    def test_stops_at_the_token_budget(self) -> None:
        """Rows of 3 tokens under a budget of 8: two in this step, the third in the next."""
        scheduler = create_scheduler(chunk=8, max_step_tokens=8)
        add_all(scheduler, create_sequences(3, num_tokens=3))
        assert shape(run_step(scheduler)) == [(0, 0, 0, 3), (1, 1, 0, 3)]
        assert shape(run_step(scheduler)) == [(2, 2, 0, 3)]

    def test_nobody_overtakes_the_head_of_the_queue(self) -> None:
        """A short row that would fit the budget does not go before a long one that doesn't."""
        scheduler = create_scheduler(chunk=8, max_step_tokens=8)
        add_all(
            scheduler,
            create_sequences(1, num_tokens=4),
            create_sequences(1, num_tokens=6, first=1),
            create_sequences(1, num_tokens=1, first=2),
        )
        assert shape(run_step(scheduler)) == [(0, 0, 0, 4)]
        assert shape(run_step(scheduler)) == [(1, 1, 0, 6), (2, 2, 0, 1)]

    def test_finished_row_s_slot_is_taken_in_the_next_step(self) -> None:
        """Continuous batching: row 2 takes the slot of row 0 while row 1 is still at work."""
        scheduler = create_scheduler(num_slots=2)
        add_all(
            scheduler,
            create_sequences(1, num_tokens=3, max_tokens=2),
            create_sequences(1, num_tokens=3, max_tokens=9, first=1),
            create_sequences(1, num_tokens=2, max_tokens=9, first=2),
        )
        assert shape(run_step(scheduler)) == [(0, 0, 0, 3), (1, 1, 0, 3)]
        assert shape(run_step(scheduler)) == [(0, 0, 3, 4), (1, 1, 3, 4)]  # the end of row 0
        refill = run_step(scheduler)
        assert refill.releases == [0]
        assert shape(refill) == [(2, 0, 0, 2)]
        assert shape(run_step(scheduler)) == [(2, 0, 2, 3), (1, 1, 4, 5)]

    def test_refill_goes_beside_decodes_in_a_shared_pool(self) -> None:
        """As above, but in the unified layout row 1 decodes in the very step of the refill."""
        scheduler = create_scheduler(num_slots=2, pool_cells=64)
        add_all(
            scheduler,
            create_sequences(1, num_tokens=3, max_tokens=2),
            create_sequences(1, num_tokens=3, max_tokens=9, first=1),
            create_sequences(1, num_tokens=2, max_tokens=9, first=2),
        )
        run_step(scheduler)
        run_step(scheduler)
        refill = run_step(scheduler)
        assert refill.releases == [0]
        assert shape(refill) == [(2, 0, 0, 2), (1, 1, 4, 5)]
        assert [row.is_prefill for row in refill.rows] == [True, False]

    def test_refuses_a_prompt_that_can_never_fit(self) -> None:
        """A prompt as long as the row's cells is taken, one token more is not."""
        scheduler = create_scheduler(row_cells=8)
        fits, too_long = [*create_sequences(1, num_tokens=8), *create_sequences(1, num_tokens=9)]
        scheduler.add(fits)
        with pytest.raises(ValueError, match=r"^9 tokens do not fit 8 cells$"):
            scheduler.add(too_long)
        assert list(scheduler.waiting) == [fits]


class TestChunkedPrefill:
    def test_cuts_a_long_prompt_at_multiples_of_the_chunk(self) -> None:
        """Ten tokens in chunks of 4 are [0, 4), [4, 8), [8, 10); only the last gives logits."""
        scheduler = create_scheduler(chunk=4)
        add_all(scheduler, create_sequences(1, num_tokens=10))
        plans = [run_step(scheduler) for _ in range(4)]
        assert [shape(plan) for plan in plans] == [
            [(0, 0, 0, 4)],
            [(0, 0, 4, 8)],
            [(0, 0, 8, 10)],
            [(0, 0, 10, 11)],
        ]
        assert [plan.rows[0].wants_logits for plan in plans] == [False, False, True, True]
        assert [plan.rows[0].is_prefill for plan in plans] == [True, True, True, False]

    def test_chunk_holds_the_prompt_s_tokens(self) -> None:
        """A row of a plan carries the token ids of its positions."""
        scheduler = create_scheduler(chunk=4)
        add_all(scheduler, create_sequences(1, num_tokens=6))
        assert run_step(scheduler).rows[0].tokens == [1000, 1001, 1002, 1003]
        assert run_step(scheduler).rows[0].tokens == [1004, 1005]

    @pytest.mark.parametrize(
        ("num_tokens", "cuts"),
        [
            (1, [(0, 1)]),
            (3, [(0, 3)]),
            (4, [(0, 4)]),
            (5, [(0, 4), (4, 5)]),
            (8, [(0, 4), (4, 8)]),
            (9, [(0, 4), (4, 8), (8, 9)]),
        ],
    )
    @pytest.mark.parametrize("pool_cells", [None, 64])
    def test_cuts_do_not_depend_on_the_neighbours(
        self, num_tokens: int, cuts: list[tuple[int, int]], pool_cells: int | None
    ) -> None:
        """A prompt is cut alike alone and among rows that eat most of the budget."""
        for neighbours in ([], create_sequences(2, num_tokens=7, first=1, max_tokens=1)):
            scheduler = create_scheduler(chunk=4, max_step_tokens=5, pool_cells=pool_cells)
            row = create_sequences(1, num_tokens=num_tokens, max_tokens=1)
            add_all(scheduler, neighbours, row)
            seen = []
            while scheduler.has_work:
                seen += [cut for cut in shape(run_step(scheduler)) if cut[0] == 0]
            assert cuts == [(start, end) for _, _, start, end in seen]

    def test_running_rows_catch_up_before_new_ones_start(self) -> None:
        """Row 0 is half done and takes its chunk first; row 1 gets what is left of the budget."""
        scheduler = create_scheduler(chunk=4, max_step_tokens=6)
        add_all(
            scheduler,
            create_sequences(1, num_tokens=8),
            create_sequences(1, num_tokens=2, first=1),
            create_sequences(1, num_tokens=2, first=2),
        )
        assert shape(run_step(scheduler)) == [(0, 0, 0, 4), (1, 1, 0, 2)]
        assert shape(run_step(scheduler)) == [(0, 0, 4, 8), (2, 2, 0, 2)]

    def test_streams_do_not_decode_beside_a_prefill(self) -> None:
        """In streams row 0 waits while row 1, which came later, is read in; then both decode."""
        scheduler = create_scheduler(chunk=4)
        add_all(scheduler, create_sequences(1, num_tokens=2))
        run_step(scheduler)
        add_all(scheduler, create_sequences(1, num_tokens=6, first=1))
        assert shape(run_step(scheduler)) == [(1, 1, 0, 4)]
        assert shape(run_step(scheduler)) == [(1, 1, 4, 6)]
        assert shape(run_step(scheduler)) == [(0, 0, 2, 3), (1, 1, 6, 7)]

    def test_single_token_after_the_last_full_chunk_goes_with_the_decodes(self) -> None:
        """The fifth token of a prompt in chunks of 4 is computed like any newest token."""
        scheduler = create_scheduler(chunk=4)
        add_all(
            scheduler,
            create_sequences(1, num_tokens=2),
            create_sequences(1, num_tokens=5, first=1),
        )
        assert shape(run_step(scheduler)) == [(0, 0, 0, 2), (1, 1, 0, 4)]
        plan = run_step(scheduler)
        assert shape(plan) == [(0, 0, 2, 3), (1, 1, 4, 5)]
        assert [row.is_prefill for row in plan.rows] == [False, False]

    def test_plan_counts_its_tokens(self) -> None:
        """A plan knows how many tokens it computes, and is false when there are none."""
        scheduler = create_scheduler(chunk=4)
        assert not scheduler.schedule()
        add_all(
            scheduler,
            create_sequences(1, num_tokens=6),
            create_sequences(1, num_tokens=3, first=1),
        )
        plan = scheduler.schedule()
        assert plan
        assert plan.num_tokens == 7


class TestClosingGaps:
    def test_highest_slot_moves_into_the_lowest_gap(self) -> None:
        """Rows 0 and 2 of four end: slot 3 moves to 0, slot 1 stays, and 0 and 1 are in use."""
        scheduler = create_scheduler(num_slots=4)
        rows = add_all(
            scheduler,
            create_sequences(1, num_tokens=2, max_tokens=1),
            create_sequences(1, num_tokens=2, first=1),
            create_sequences(1, num_tokens=2, max_tokens=1, first=2),
            create_sequences(1, num_tokens=2, first=3),
        )
        run_step(scheduler)
        plan = run_step(scheduler)
        assert plan.releases == [0, 2]
        assert plan.moves == [(3, 0)]
        assert shape(plan) == [(3, 0, 2, 3), (1, 1, 2, 3)]
        assert [rows[1].slot, rows[3].slot] == [1, 0]

    def test_two_gaps_below_two_rows(self) -> None:
        """Rows 0 and 1 of four end: slot 3 moves to 0, then slot 2 to 1."""
        scheduler = create_scheduler(num_slots=4)
        add_all(
            scheduler,
            create_sequences(2, num_tokens=2, max_tokens=1),
            create_sequences(2, num_tokens=2, first=2),
        )
        run_step(scheduler)
        plan = run_step(scheduler)
        assert plan.moves == [(3, 0), (2, 1)]
        assert shape(plan) == [(3, 0, 2, 3), (2, 1, 2, 3)]

    def test_free_slots_above_are_no_gap(self) -> None:
        """Rows 2 and 3 of four end: nothing moves."""
        scheduler = create_scheduler(num_slots=4)
        add_all(
            scheduler,
            create_sequences(2, num_tokens=2),
            create_sequences(2, num_tokens=2, max_tokens=1, first=2),
        )
        run_step(scheduler)
        plan = run_step(scheduler)
        assert plan.releases == [2, 3]
        assert plan.moves == []
        assert shape(plan) == [(0, 0, 2, 3), (1, 1, 2, 3)]

    def test_rows_move_together_for_new_ones_that_share_passes(self) -> None:
        """Rows 0 and 2 of four end: 3 moves to slot 0, and the two that waited get 2 and 3."""
        scheduler = create_scheduler(closes_gaps_first=True)
        short, long = {"num_tokens": 2, "max_tokens": 1}, {"num_tokens": 2, "max_tokens": 9}
        for number, settings in enumerate([short, long, short, long, long, long]):
            add_all(scheduler, create_sequences(1, first=number, **settings))
        run_step(scheduler)
        plan = run_step(scheduler)
        assert plan.moves == [(3, 0)]
        assert shape(plan) == [(4, 2, 0, 2), (5, 3, 0, 2)]

    def test_waiting_row_fills_the_gap_instead(self) -> None:
        """While rows wait, a gap is filled by the next of them and nothing moves."""
        scheduler = create_scheduler(num_slots=2)
        add_all(
            scheduler,
            create_sequences(1, num_tokens=2, max_tokens=1),
            create_sequences(2, num_tokens=2, first=1),
        )
        run_step(scheduler)
        plan = run_step(scheduler)
        assert plan.moves == []
        assert shape(plan) == [(2, 0, 0, 2)]

    def test_moved_row_goes_on_where_it_was(self) -> None:
        """A moved row computes the same positions as if it had stayed; none twice."""
        scheduler = create_scheduler(num_slots=2)
        add_all(
            scheduler,
            create_sequences(1, num_tokens=2, max_tokens=1),
            create_sequences(1, num_tokens=2, max_tokens=4, first=1),
        )
        plans = [run_step(scheduler) for _ in range(4)]
        assert [cut for plan in plans for cut in shape(plan) if cut[0] == 1] == [
            (1, 1, 0, 2),
            (1, 0, 2, 3),
            (1, 0, 3, 4),
            (1, 0, 4, 5),
        ]

    def test_shared_pool_has_no_gaps(self) -> None:
        """In the unified layout slots need not be dense, and nothing moves."""
        scheduler = create_scheduler(num_slots=2, pool_cells=64)
        add_all(
            scheduler,
            create_sequences(1, num_tokens=2, max_tokens=1),
            create_sequences(1, num_tokens=2, first=1),
        )
        run_step(scheduler)
        plan = run_step(scheduler)
        assert plan.moves == []
        assert shape(plan) == [(1, 1, 2, 3)]

    def test_decode_rows_ascend_by_slot(self) -> None:
        """Row 3 is the youngest but sits in slot 1, so it decodes between rows 0 and 2.

        llama.cpp computes streams together only while their ids ascend by one from row to row.
        """
        scheduler = create_scheduler(num_slots=3)
        add_all(
            scheduler,
            create_sequences(1, num_tokens=2),
            create_sequences(1, num_tokens=2, max_tokens=1, first=1),
            create_sequences(2, num_tokens=2, first=2),
        )
        run_step(scheduler)
        run_step(scheduler)
        assert shape(run_step(scheduler)) == [(0, 0, 2, 3), (3, 1, 2, 3), (2, 2, 2, 3)]


class TestPreemption:
    def test_youngest_row_makes_room_and_is_recomputed(self) -> None:
        """Two rows outgrow 10 cells: the younger loses its cells, waits, and starts over.

        Both have 4 prompt tokens and generate 6; each step is worked out at its line.
        """
        scheduler = create_scheduler(num_slots=2, row_cells=10, pool_cells=10, chunk=4)
        first, second = add_all(scheduler, create_sequences(2, num_tokens=4, max_tokens=6))
        assert shape(run_step(scheduler)) == [(0, 0, 0, 4), (1, 1, 0, 4)]  # 8 cells
        assert shape(run_step(scheduler)) == [(0, 0, 4, 5), (1, 1, 4, 5)]  # 10 cells
        assert scheduler.num_preempted == 0

        plan = run_step(scheduler)  # wants 12: row 1 gives its 5 back, row 0 goes on to 6
        assert plan.releases == [1]
        assert shape(plan) == [(0, 0, 5, 6)]
        assert scheduler.num_preempted == 1
        assert [second.status, second.num_computed] == [SequenceStatus.WAITING, 0]
        assert second.generated == [ANSWER, ANSWER]  # what it had found out is kept

        for start in (6, 7, 8):  # row 1 wants 6 cells; of 10 there are 4, 3, 2 free
            assert shape(run_step(scheduler)) == [(0, 0, start, start + 1)]
        assert first.finish_reason == FinishReason.LENGTH
        assert first.generated == [ANSWER] * 6

        plan = run_step(scheduler)  # row 1 again: 4 prompt tokens and the 2 generated ones
        assert plan.releases == [0]
        assert shape(plan) == [(1, 0, 0, 4)]
        assert shape(run_step(scheduler)) == [(1, 0, 4, 6)]
        for start in (6, 7, 8):
            assert shape(run_step(scheduler)) == [(1, 0, start, start + 1)]
        assert second.finish_reason == FinishReason.LENGTH
        assert second.generated == [ANSWER] * 6
        assert not scheduler.has_work

    def test_victims_are_the_youngest_and_keep_their_order(self) -> None:
        """Four rows of 2 fill 8 cells; each wants one more, and two must go: rows 3 and 2.

        Rows 0 and 1 then have 3 cells each; of the 2 left, row 2 would want 3.
        """
        scheduler = create_scheduler(num_slots=4, row_cells=8, pool_cells=8)
        rows = add_all(scheduler, create_sequences(5, num_tokens=2))
        run_step(scheduler)
        plan = run_step(scheduler)
        assert plan.releases == [3, 2]
        assert shape(plan) == [(0, 0, 2, 3), (1, 1, 2, 3)]
        assert list(scheduler.waiting) == [rows[2], rows[3], rows[4]]

    def test_nobody_overtakes_a_preempted_row(self) -> None:
        """Rows 0 and 1 fill 8 cells; row 1 is called back for row 0's next token.

        Of its 4 cells 3 are left. Row 2, with its one token, could start in them, but waits behind.
        """
        scheduler = create_scheduler(num_slots=3, row_cells=8, pool_cells=8)
        rows = add_all(
            scheduler,
            create_sequences(2, num_tokens=4),
            create_sequences(1, num_tokens=1, first=2),
        )
        run_step(scheduler)
        assert shape(run_step(scheduler)) == [(0, 0, 4, 5)]
        assert list(scheduler.waiting) == [rows[1], rows[2]]

    def test_admission_counts_what_running_rows_still_need(self) -> None:
        """Row 0 has 4 of its 8 tokens computed; the other 4 cells of 10 are its own already."""
        scheduler = create_scheduler(num_slots=2, row_cells=10, pool_cells=10, chunk=4)
        add_all(
            scheduler,
            create_sequences(1, num_tokens=8, max_tokens=1),
            create_sequences(1, num_tokens=3, first=1),
        )
        assert shape(run_step(scheduler)) == [(0, 0, 0, 4)]
        assert shape(run_step(scheduler)) == [(0, 0, 4, 8)]
        assert shape(run_step(scheduler)) == [(1, 0, 0, 3)]
        assert scheduler.num_preempted == 0

    def test_cache_of_exactly_one_row_finishes_a_job_of_three(self) -> None:
        """8 cells, rows of 4 + 4 tokens: one after the other, in order, with one preemption.

        The first two start together, since their prompts fit; the second is called back at once.
        After that there is never room for a second one.
        """
        scheduler = create_scheduler(num_slots=3, row_cells=8, pool_cells=8, chunk=4)
        rows = add_all(scheduler, create_sequences(3, num_tokens=4, max_tokens=4))
        plans = []
        while scheduler.has_work:
            plans.append(shape(run_step(scheduler)))
        assert plans == [
            [(0, 0, 0, 4), (1, 1, 0, 4)],
            [(0, 0, 4, 5)],
            [(0, 0, 5, 6)],
            [(0, 0, 6, 7)],
            [(1, 0, 0, 4)],
            [(1, 0, 4, 5)],
            [(1, 0, 5, 6)],
            [(1, 0, 6, 7)],
            [(2, 0, 0, 4)],
            [(2, 0, 4, 5)],
            [(2, 0, 5, 6)],
            [(2, 0, 6, 7)],
        ]
        assert scheduler.num_preempted == 1
        assert [s.generated for s in rows] == [[ANSWER] * 4] * 3

    def test_lone_row_is_not_preempted(self) -> None:
        """The oldest row keeps its cells, so the work always gets on."""
        scheduler = create_scheduler()
        assert scheduler.preempt() is None
        add_all(scheduler, create_sequences(1))
        run_step(scheduler)
        assert scheduler.preempt() is None
        assert scheduler.num_preempted == 0

    def test_row_preempted_while_it_is_computed_gets_its_token_later(self) -> None:
        """A token that comes for a row without cells is dropped, and found again."""
        scheduler = create_scheduler(num_slots=2)
        _, second = add_all(scheduler, create_sequences(2, num_tokens=2))
        plan = scheduler.schedule()
        assert scheduler.preempt() is second
        assert scheduler.update(plan, compute(plan)) == []
        assert second.generated == []
        assert shape(run_step(scheduler)) == [(1, 1, 0, 2)]
        assert second.generated == [ANSWER]


class TestAbort:
    def test_waiting_row(self) -> None:
        """A row that never started leaves the queue; no slot is released."""
        scheduler = create_scheduler(num_slots=1)
        _, second = add_all(scheduler, create_sequences(2, num_tokens=2))
        run_step(scheduler)
        scheduler.finish(second, FinishReason.ABORTED)
        plan = run_step(scheduler)
        assert plan.releases == []
        assert shape(plan) == [(0, 0, 2, 3)]
        assert second.finish_reason == FinishReason.ABORTED
        assert second.status == SequenceStatus.FINISHED

    def test_row_in_the_middle_of_its_prompt(self) -> None:
        """Its slot is released in the next plan and taken by the next row there."""
        scheduler = create_scheduler(num_slots=1, chunk=4)
        first, _ = add_all(scheduler, create_sequences(2, num_tokens=6))
        run_step(scheduler)
        scheduler.finish(first, FinishReason.ABORTED)
        plan = run_step(scheduler)
        assert plan.releases == [0]
        assert shape(plan) == [(1, 0, 0, 4)]

    def test_row_in_the_middle_of_its_answer(self) -> None:
        """It keeps the tokens that it has generated."""
        scheduler = create_scheduler()
        (row,) = add_all(scheduler, create_sequences(1))
        run_step(scheduler)
        run_step(scheduler)
        scheduler.finish(row, FinishReason.ABORTED)
        assert row.generated == [ANSWER, ANSWER]
        assert row.slot is None
        assert not scheduler.has_work

    def test_row_that_is_being_computed(self) -> None:
        """A token that comes for an aborted row is dropped; the other rows get theirs."""
        scheduler = create_scheduler()
        first, second = add_all(scheduler, create_sequences(2))
        plan = scheduler.schedule()
        scheduler.finish(first, FinishReason.ABORTED)
        assert scheduler.update(plan, compute(plan)) == []
        assert first.generated == []
        assert second.generated == [ANSWER]

    def test_preempted_row(self) -> None:
        """Its slot is released once, by the preemption."""
        scheduler = create_scheduler()
        _, second = add_all(scheduler, create_sequences(2, num_tokens=2))
        run_step(scheduler)
        scheduler.preempt()
        scheduler.finish(second, FinishReason.ABORTED)
        plan = run_step(scheduler)
        assert plan.releases == [1]
        assert shape(plan) == [(0, 0, 2, 3)]

    def test_finished_row(self) -> None:
        """Only the reason changes: a stop string is found after the last token was taken in."""
        scheduler = create_scheduler()
        (row,) = add_all(scheduler, create_sequences(1, max_tokens=1))
        run_step(scheduler)
        assert row.finish_reason == FinishReason.LENGTH
        scheduler.finish(row, FinishReason.STOP)
        assert row.finish_reason is FinishReason.STOP  # type: ignore[comparison-overlap]
        assert row.generated == [ANSWER]
        assert scheduler.schedule().releases == [0]


class TestFinish:
    def test_length_after_max_tokens(self) -> None:
        """The row ends with exactly `max_tokens` tokens, returned by the step of the last one."""
        scheduler = create_scheduler()
        (row,) = add_all(scheduler, create_sequences(1, max_tokens=2))
        plan = scheduler.schedule()
        assert scheduler.update(plan, compute(plan)) == []
        plan = scheduler.schedule()
        assert scheduler.update(plan, compute(plan)) == [row]
        assert row.generated == [ANSWER, ANSWER]
        assert row.finish_reason == FinishReason.LENGTH

    @pytest.mark.parametrize(("num_tokens", "num_generated"), [(6, 3), (7, 2), (8, 1)])
    def test_length_when_the_context_is_full(self, num_tokens: int, num_generated: int) -> None:
        """With 8 cells, 9 tokens can be known: the last one is never computed itself."""
        scheduler = create_scheduler(row_cells=8)
        (row,) = add_all(scheduler, create_sequences(1, num_tokens=num_tokens, max_tokens=100))
        while scheduler.has_work:
            run_step(scheduler)
        assert num_generated == row.num_generated
        assert row.finish_reason == FinishReason.LENGTH

    def test_stop_on_an_end_token(self) -> None:
        """The end token is not part of the answer."""
        scheduler = create_scheduler()
        (row,) = add_all(scheduler, create_sequences(1))
        run_step(scheduler)
        run_step(scheduler, END)
        assert row.generated == [ANSWER]
        assert row.finish_reason == FinishReason.STOP

    def test_stop_before_the_first_token(self) -> None:
        """An answer may be empty."""
        scheduler = create_scheduler()
        (row,) = add_all(scheduler, create_sequences(1, max_tokens=1))
        run_step(scheduler, END)
        assert row.generated == []
        assert row.finish_reason == FinishReason.STOP

    def test_end_token_with_ignore_eos(self) -> None:
        """With `ignore_eos` an end token is a token like any other."""
        scheduler = create_scheduler()
        (row,) = add_all(scheduler, create_sequences(1, max_tokens=3, ignore_eos=True))
        for _ in range(3):
            run_step(scheduler, END)
        assert row.generated == [END, END, END]
        assert row.finish_reason == FinishReason.LENGTH

    def test_update_wants_a_token_for_each_row(self) -> None:
        """A backend that returns too few or too many tokens is found out."""
        scheduler = create_scheduler()
        add_all(scheduler, create_sequences(2))
        plan = scheduler.schedule()
        with pytest.raises(ValueError, match="shorter"):
            scheduler.update(plan, [ANSWER])


class TestCheckIntegrity:
    def test_finds_a_lost_slot(self) -> None:
        """A slot that is neither free nor in use is reported."""
        pool = SlotPool(2, None)
        pool.check_integrity()
        pool._free.remove(1)
        with pytest.raises(AssertionError, match="slots"):
            pool.check_integrity()

    def test_finds_cells_counted_wrongly(self) -> None:
        """The total must be the sum over the slots, and within the pool."""
        pool = SlotPool(2, 8)
        slot = pool.take()
        assert slot == 0
        pool.grow(slot, 8)
        pool.check_integrity()
        pool.grow(slot, 1)
        with pytest.raises(AssertionError, match="too many cells"):
            pool.check_integrity()
        pool._used = 8
        with pytest.raises(AssertionError, match="cells"):
            pool.check_integrity()

    def test_finds_a_running_sequence_without_its_slot(self) -> None:
        """Running sequences and slots in use must match one to one."""
        scheduler = create_scheduler()
        add_all(scheduler, create_sequences(2))
        run_step(scheduler)
        scheduler.running.pop()
        with pytest.raises(AssertionError, match="slots in use"):
            scheduler.check_integrity()


def test_a_sequence_that_begins_anew_forgets_its_answer() -> None:
    """Its prompt stays; tokens, likelihoods and what was to be forced on it go."""
    (sequence,) = create_sequences(1, 5)
    scheduler = create_scheduler()
    scheduler.add(sequence)
    for _ in range(3):
        run_step(scheduler)
    sequence.forced = [3]
    sequence.likelihoods.append(Likelihood(ANSWER, -1.0, ()))

    scheduler.restart([sequence])

    assert sequence.tokens == [1000, 1001, 1002, 1003, 1004]
    assert (sequence.num_computed, sequence.likelihoods, list(sequence.forced)) == (0, [], [])
