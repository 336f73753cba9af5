"""Several lanes, shared beginnings, equal rows and any order: the same answers, each once."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from localbatch import Completion, FinishReason, Request, SamplingParams, TextPiece
from localbatch.data.config import EngineConfig, KVLayout, Order
from localbatch.data.errors import ConfigError, DecodeError
from localbatch.engine.backend import ContextConfig, Sample
from localbatch.engine.engine import Engine, _best_lane
from localbatch.engine.fake import FIRST_BYTE, FakeBackend
from localbatch.engine.lane import Lane
from localbatch.engine.order import best_order
from localbatch.engine.planner import Layout, candidates
from localbatch.engine.rows import Row
from localbatch.engine.sizing import context_bytes, fit_context
from localbatch.engine.text import TextStream
from localbatch.scheduler.plan import StepPlan
from localbatch.scheduler.prefixes import Prefix
from localbatch.scheduler.sequence import Sequence as TokenSequence
from tests.factories import create_requests
from tests.test_engine import fake_answer

MIB = 1 << 20


def engine(backend: FakeBackend | None = None, **settings: Any) -> Engine:
    return Engine(backend or FakeBackend(), EngineConfig("m", **{"threads": 1, **settings}))


def request(
    index: int, prompt: str = "hello", *, line: int | None = None, **params: Any
) -> Request:
    sampling = SamplingParams(**{"max_tokens": 6, **params})
    return Request(f"r{index}", index, prompt=prompt, params=sampling, line=line)


HEADS = ["", "", "s" * 80, "s" * 80 + "t" * 70, "u" * 130]


def mixed_rows(count: int = 24) -> list[Request]:
    """Rows of many lengths behind several heads, some drawn, some with stop strings, some equal."""
    rows = []
    for i in range(count):
        prompt = HEADS[i % 5] + f"row {i if i % 6 else 0} " + "x" * (i * 37 % 50)
        params: dict[str, Any] = {"max_tokens": 1 + i * 5 % 9, "ignore_eos": i % 2 == 0}
        if i % 4 == 1:
            params |= {"temperature": 0.9, "seed": i}
        if i % 3 == 1:
            params |= {"stop": ["e", "\n"]}
        rows.append(request(i, prompt, line=i + 1, **params))
    equal = [replace(rows[i], id=f"r{count + i}", index=count + i) for i in (0, 1, 2, 1, 8)]
    return rows + [replace(row, id=f"r{count + i}", index=count + i) for i, row in enumerate(equal)]


class Outcome:
    """What an engine reported: completions by index, and the pieces of each row's text."""

    def __init__(self) -> None:
        self.done: dict[int, Completion] = {}
        self.pieces: dict[int, list[str]] = {}

    def take(self, events: Sequence[Completion | TextPiece]) -> None:
        for happened in events:
            if isinstance(happened, TextPiece):
                assert happened.row not in self.done, "a piece of text after the end"
                assert happened.text
                self.pieces.setdefault(happened.row, []).append(happened.text)
            else:
                assert happened.index not in self.done, "a row is answered twice"
                self.done[happened.index] = happened


def finish(running: Engine, rows: Sequence[Request] = (), steps: int = 100_000) -> Outcome:
    """Run rows to their end."""
    outcome = Outcome()
    outcome.take(running.submit(rows))
    while running.has_work:
        assert steps > 0, "it does not end"
        outcome.take(running.step())
        steps -= 1
    return outcome


def one_by_one(rows: list[Request]) -> dict[int, tuple[Any, ...]]:
    """Return each row's answer, computed with nothing before or beside it."""
    answers = {}
    for row in rows:
        single = engine(lanes=1, parallel=1, share_prefixes=False, order=Order.INPUT)
        answers |= {i: answer(c) for i, c in finish(single, [row]).done.items()}
    return answers


def answer(completion: Completion) -> tuple[Any, ...]:
    """Return all of a completion but its timings."""
    c = completion
    return (c.id, c.index, c.line, c.text, c.token_ids, c.finish_reason, c.usage, c.error)


ROWS = mixed_rows()


@cache
def alone() -> dict[int, tuple[Any, ...]]:
    return one_by_one(ROWS)


class TestSameAnswers:
    @settings(max_examples=60, deadline=None)
    @given(
        lanes=st.integers(1, 4),
        parallel=st.sampled_from([4, 5, 9, 64]),
        order=st.sampled_from(Order),
        share=st.booleans(),
        streams=st.booleans(),
        ubatch=st.sampled_from([None, 32, 64]),
        shuffle=st.randoms(use_true_random=False),
        late=st.integers(0, len(ROWS)),
    )
    def test_an_answer_depends_on_its_row_alone(
        self,
        lanes: int,
        parallel: int,
        order: Order,
        share: bool,
        streams: bool,
        ubatch: int | None,
        shuffle: random.Random,
        late: int,
    ) -> None:
        """Any number of lanes, any order, shared or not, streamed or not: every row, once."""
        rows = list(ROWS)
        shuffle.shuffle(rows)
        running = engine(
            lanes=lanes, parallel=parallel, order=order, share_prefixes=share, ubatch=ubatch
        )
        running.streams_text = streams
        outcome = Outcome()
        outcome.take(running.submit(rows[late:]))
        if running.has_work:
            outcome.take(running.step())
        outcome.take(running.submit(rows[:late]))
        while running.has_work:
            outcome.take(running.step())
        running.close()

        assert {i: answer(c) for i, c in outcome.done.items()} == alone()
        texts = {i: c.text for i, c in outcome.done.items() if c.text}
        joined = {i: "".join(pieces) for i, pieces in outcome.pieces.items()}
        assert joined == (texts if streams else {})
        stats = running.stats
        event(f"{stats.lanes} lanes, shared: {stats.computed_prompt_tokens < stats.prompt_tokens}")

    def test_greedy_answers_by_hand(self) -> None:
        """The fake's logits are a hash of all tokens before: so is the whole answer."""
        rows = [request(i, HEADS[i % 5] + f"row {i}", ignore_eos=True) for i in range(20)]
        running = engine(lanes=3)

        done = finish(running, rows).done

        assert {i: list(c.token_ids) for i, c in done.items()} == {
            row.index: fake_answer(row) for row in rows
        }
        assert running.stats.computed_prompt_tokens < running.stats.prompt_tokens
        running.close()

    def test_what_two_rows_share_is_computed_once(self) -> None:
        """BOS and 99 letters in common, 20 letters each: 100 + 4 x 20, in one lane."""
        rows = [request(i, "s" * 99 + chr(97 + i) * 20) for i in range(4)]
        running = engine(lanes=1)

        finish(running, rows)

        assert running.stats.computed_prompt_tokens == 180
        assert running.stats.prompt_tokens == 480

    def test_lanes_compute_at_the_same_time(self) -> None:
        """Each step of one waits for a step of the other; alone it would wait forever."""
        meeting = threading.Barrier(2, timeout=20)
        running = engine(Hooked(before=lambda _: meeting.wait() and None), lanes=2)

        done = finish(running, [request(i, f"p{i}", ignore_eos=True) for i in range(2)]).done

        assert sorted(done) == [0, 1]
        assert running.stats.lanes == 2
        running.close()

    def test_rows_longer_than_the_contexts_wait_for_larger_ones(self) -> None:
        """Also with several lanes, and with rows before and after them that fit."""
        rows = [request(0), request(1, "y" * 700), request(2), request(3, "z" * 1500)]
        running = engine(lanes=2, order=Order.INPUT)
        outcome = Outcome()
        outcome.take(running.submit(rows[:1]))
        outcome.take(running.step())

        outcome.take(running.submit(rows[1:]))
        while running.has_work:
            outcome.take(running.step())

        assert {i: list(c.token_ids) for i, c in outcome.done.items()} == {
            row.index: fake_answer(row) for row in rows
        }
        running.close()


class Hooked(FakeBackend):
    """Calls something before each plan or behind it, in each of its siblings."""

    def __init__(self, before: Any = None, behind: Any = None, step_s: float = 0.0) -> None:
        super().__init__(step_s)
        self.before, self.behind = before, behind
        self.siblings: list[Hooked] = [self]

    def sibling(self) -> Hooked:
        made = Hooked(self.before, self.behind, self._step_s)
        self.siblings.append(made)
        return made

    def forward(self, plan: StepPlan, sample: Sample) -> list[int | None]:
        if self.before is not None:
            self.before(plan)
        tokens = super().forward(plan, sample)
        if self.behind is not None:
            self.behind(plan)
        return tokens


class TestEqualRows:
    def test_equal_greedy_rows_are_computed_once(self) -> None:
        """Four rows ask for the same: BOS and 5 letters are computed once, and answered 4 times.

        The seed makes no difference to a greedy row.
        """
        rows = [request(i, line=10 + i, seed=i, ignore_eos=True) for i in range(4)]
        running = engine(lanes=2)

        done = finish(running, rows).done

        expected = tuple(fake_answer(rows[0]))
        assert [(done[i].id, done[i].index, done[i].line) for i in range(4)] == [
            ("r0", 0, 10), ("r1", 1, 11), ("r2", 2, 12), ("r3", 3, 13)
        ]  # fmt: skip
        assert [done[i].token_ids for i in range(4)] == [expected] * 4
        assert len({done[i].text for i in range(4)}) == 1
        assert {done[i].usage.prompt_tokens for i in range(4)} == {6}
        assert running.stats.computed_prompt_tokens == 6
        running.close()

    def test_unless_nothing_is_to_be_shared(self) -> None:
        """Then each is computed, for those who measure."""
        running = engine(lanes=1, share_prefixes=False)

        finish(running, [request(i) for i in range(4)])

        assert running.stats.computed_prompt_tokens == 4 * 6

    def test_drawn_rows_are_never_merged(self) -> None:
        """Each draws by its own id; all are computed."""
        rows = [request(i, temperature=2.0, top_k=0, ignore_eos=True) for i in range(5)]
        running = engine(lanes=2)

        done = finish(running, rows).done

        assert running.stats.computed_prompt_tokens == 5 * 6
        assert {i: answer(c) for i, c in done.items()} == one_by_one(rows)
        assert len({c.token_ids for c in done.values()}) == 5
        running.close()

    @pytest.mark.parametrize(
        "params",
        [
            {"max_tokens": 3},
            {"stop": "q"},
            {"ignore_eos": False},
            {"repeat_penalty": 1.5},
            {"logit_bias": {FIRST_BYTE + 65: 50.0}},
        ],
        ids=lambda params: next(iter(params)),
    )
    def test_rows_with_other_params_are_not_merged(self, params: dict[str, Any]) -> None:
        """Their answers may differ."""
        rows = [request(0, ignore_eos=True), request(1, **{"ignore_eos": True, **params})]
        running = engine(lanes=1)

        done = finish(running, rows).done

        assert running.stats.computed_prompt_tokens == 12
        assert {i: answer(c) for i, c in done.items()} == one_by_one(rows)

    def test_rows_with_other_prompts_are_not_merged(self) -> None:
        """One letter more, less or else."""
        rows = [request(i, text) for i, text in enumerate(["hello", "hell", "hello!", "jello"])]
        running = engine(lanes=1)

        done = finish(running, rows).done

        assert {i: answer(c) for i, c in done.items()} == one_by_one(rows)
        assert running.stats.computed_prompt_tokens == 6 + 5 + 7 + 6

    def test_a_row_that_comes_later(self) -> None:
        """While the first runs it is answered with that one; after its end it is computed anew."""
        running = engine(lanes=1)
        outcome = Outcome()
        outcome.take(running.submit([request(0, ignore_eos=True)]))
        outcome.take(running.step())
        outcome.take(running.submit([request(1, ignore_eos=True)]))
        while running.has_work:
            outcome.take(running.step())
        assert running.stats.computed_prompt_tokens == 6

        late = finish(running, [request(2, ignore_eos=True)]).done

        assert running.stats.computed_prompt_tokens == 12
        assert outcome.done[0].token_ids == outcome.done[1].token_ids == late[2].token_ids

    def test_pieces_of_merged_rows_join_to_their_texts(self) -> None:
        """Also of one that comes when the first has told half of its text; pieces come before."""
        running = engine(lanes=1)
        running.streams_text = True
        long = {"max_tokens": 20, "ignore_eos": True, "stop": ["never said"]}
        outcome = Outcome()
        outcome.take(running.submit([request(0, **long), request(1, **long)]))
        for _ in range(8):
            outcome.take(running.step())
        assert len(outcome.pieces[0]) > 2
        outcome.take(running.submit([request(2, **long)]))
        while running.has_work:
            outcome.take(running.step())

        texts = {i: c.text for i, c in outcome.done.items()}
        assert sorted(texts) == [0, 1, 2]
        assert texts == {i: "".join(pieces) for i, pieces in outcome.pieces.items()}
        assert running.stats.computed_prompt_tokens == 6

    def test_stop_strings_cut_merged_rows_alike(self) -> None:
        """The text ends before the string, for each of them."""
        full = finish(engine(), [request(0, max_tokens=40, ignore_eos=True)]).done[0].text
        stop = full[6]
        rows = [request(i, max_tokens=40, ignore_eos=True, stop=stop) for i in range(3)]

        done = finish(engine(), rows).done

        assert {c.text for c in done.values()} == {full.split(stop)[0]}
        assert {c.finish_reason for c in done.values()} == {FinishReason.STOP}

    def test_merged_rows_fail_and_are_aborted_together(self) -> None:
        """Each is reported, with its own id."""

        def fail(_plan: StepPlan) -> None:
            raise DecodeError("llama.cpp failed to compute", -3)

        rows = [request(i) for i in range(3)]
        failed = finish(engine(Hooked(behind=fail), lanes=1), rows).done
        stopped = engine(lanes=1)
        stopped.submit(rows)
        stopped.step()
        aborted = {c.index: c for c in stopped.abort()}

        assert [(failed[i].id, failed[i].error) for i in range(3)] == [
            (f"r{i}", "llama.cpp failed to compute") for i in range(3)
        ]
        assert [(aborted[i].id, aborted[i].finish_reason) for i in range(3)] == [
            (f"r{i}", FinishReason.ABORTED) for i in range(3)
        ]
        assert sorted(finish(stopped, rows).done) == [0, 1, 2]


class TestAbort:
    @pytest.mark.parametrize("lanes", [1, 2, 4])
    @pytest.mark.parametrize("steps", [0, 1, 5])
    def test_while_lanes_are_computing(self, lanes: int, steps: int) -> None:
        """Every row is reported once, with the beginning of its answer; then all is free."""
        rows = [
            request(i, HEADS[i % 5] + f"row {i}", max_tokens=4 + 10 * (i % 3), ignore_eos=True)
            for i in range(30)
        ]
        running = engine(FakeBackend(step_s=0.002), lanes=lanes, parallel=12)
        outcome = Outcome()
        outcome.take(running.submit(rows))
        for _ in range(steps):
            outcome.take(running.step())

        outcome.take(running.abort())

        assert not running.has_work
        assert sorted(outcome.done) == list(range(30))
        for row in rows:
            tokens = list(outcome.done[row.index].token_ids)
            whole = fake_answer(row)
            assert tokens == whole[: len(tokens)]
            if outcome.done[row.index].finish_reason is not FinishReason.ABORTED:
                assert tokens == whole
        assert FinishReason.ABORTED in {c.finish_reason for c in outcome.done.values()}
        again = finish(running, rows).done
        assert {i: list(c.token_ids) for i, c in again.items()} == {
            row.index: fake_answer(row) for row in rows
        }
        running.close()


class TestErrors:
    @pytest.mark.parametrize("lanes", [1, 2, 3])
    @pytest.mark.parametrize("victim", [0, 7, 19])
    @pytest.mark.parametrize("always", [False, True])
    def test_a_step_that_fails_costs_no_other_row(
        self, lanes: int, victim: int, always: bool
    ) -> None:
        """Its rows are run again in smaller batches; a row that fails alone has the error."""
        rows = [
            request(i, HEADS[i % 5] + f"row {i}", max_tokens=2 + i * 3 % 5, ignore_eos=True)
            for i in range(20)
        ]
        failed: list[int] = []

        def fail(plan: StepPlan) -> None:
            inside = [row.sequence.request.index for row in plan.rows]
            if victim in inside and (always or not failed):
                failed.extend(inside)
                raise DecodeError("llama.cpp failed to compute", -3)

        running = engine(Hooked(behind=fail), lanes=lanes, parallel=6)

        done = finish(running, rows).done

        assert sorted(done) == list(range(20))
        assert victim in failed
        assert {i for i, c in done.items() if c.failed} == ({victim} if always else set())
        for row in rows:
            if not done[row.index].failed:
                assert list(done[row.index].token_ids) == fake_answer(row)
        running.close()

    @pytest.mark.parametrize("lanes", [1, 2, 4])
    def test_what_nobody_expects_comes_out_of_step(self, lanes: int) -> None:
        """An exception in a lane's thread is not lost."""

        def fail(plan: StepPlan) -> None:
            if any(row.sequence.request.index == 5 for row in plan.rows):
                raise RuntimeError("no such thing")

        running = engine(Hooked(behind=fail), lanes=lanes)

        with pytest.raises(RuntimeError, match="no such thing"):
            finish(running, [request(i, f"p{i}") for i in range(8)], steps=200)


class TestManyRows:
    @pytest.mark.parametrize(("lanes", "expected"), [(None, 5), (4, 5), (8, 8)])
    def test_a_thousand_rows_at_one_time(self, lanes: int | None, expected: int) -> None:
        """A context holds 256 sequences, 4 of them for prefixes: 1,024 rows take 5 lanes."""
        backend = Hooked()
        running = engine(backend, lanes=lanes, parallel=1024)

        done = finish(running, [request(i, f"p{i}", max_tokens=1) for i in range(1024)]).done

        assert sorted(done) == list(range(1024))
        assert running.stats.slots >= 1024
        assert running.stats.lanes == len(backend.siblings) == expected
        for made in backend.siblings:
            assert made._config is not None
            assert made._config.num_slots + made._config.num_prefix_slots <= 256
        running.close()


def row(index: int, num_tokens: int, prefixes: Sequence[Prefix] = ()) -> Row:
    """Return a row whose tokens don't matter."""
    sequence = TokenSequence(request(index), [1] * num_tokens)
    sequence.prefixes = tuple(prefixes)
    return Row(sequence, TextStream(lambda _: b""), arrived=0.0)


def numbers(rows: Sequence[Row]) -> list[int]:
    return [row.sequence.request.index for row in rows]


class TestBestOrder:
    def test_the_longest_first(self) -> None:
        """Of equals, the one that came first."""
        rows = [row(i, n) for i, n in enumerate([5, 9, 7, 9, 30])]

        assert numbers(best_order(rows, lambda r: r.sequence.num_prompt)) == [4, 1, 3, 2, 0]

    def test_what_counts_are_all_cells_a_row_wants(self) -> None:
        """A short prompt may ask for a long answer."""
        wanted = {0: 10, 1: 500, 2: 50}
        rows = [row(i, n) for i, n in enumerate([9, 1, 5])]

        assert numbers(best_order(rows, lambda r: wanted[r.sequence.request.index])) == [1, 2, 0]

    def test_rows_with_one_beginning_stay_together(self) -> None:
        """A group stands where its longest row would, and has its longest first."""
        head, other = Prefix(64, 3), Prefix(64, 2)
        rows = [
            row(0, 100, [head]), row(1, 150), row(2, 90, [other]), row(3, 300, [head]),
            row(4, 95, [other]), row(5, 120, [head]), row(6, 70),
        ]  # fmt: skip

        ordered = best_order(rows, lambda r: r.sequence.num_prompt)

        assert numbers(ordered) == [3, 5, 0, 1, 4, 2, 6]

    def test_groups_within_a_group_stay_together(self) -> None:
        """Two heads nested in a third: not mixed, though their lengths are."""
        head, one, two = Prefix(64, 5), Prefix(96, 2), Prefix(128, 2)
        rows = [
            row(0, 200, [head, one]), row(1, 210, [head, two]), row(2, 220, [head, one]),
            row(3, 190, [head, two]), row(4, 400),
        ]  # fmt: skip

        ordered = numbers(best_order(rows, lambda r: r.sequence.num_prompt))

        assert ordered[0] == 4
        assert sorted([tuple(ordered[1:3]), tuple(ordered[3:])]) == [(1, 3), (2, 0)]

    def test_nothing_to_order(self) -> None:
        assert best_order([], lambda r: 1) == []

    def test_input_order_begins_rows_as_they_come(self) -> None:
        """And the other begins the longest first, in one lane with one slot."""
        rows = [request(i, "x" * n, max_tokens=1) for i, n in enumerate([10, 30, 20])]

        as_they_come = finish(engine(lanes=1, parallel=1, order=Order.INPUT), rows).done
        longest_first = finish(engine(lanes=1, parallel=1), rows).done

        assert list(as_they_come) == [0, 1, 2]
        assert list(longest_first) == [1, 2, 0]


def lane(num_slots: int, rows: Sequence[Row] = ()) -> Lane:
    made = Lane(FakeBackend())
    made.open(ContextConfig(num_slots, 256, None, chunk=512, threads=1))
    for taken in rows:
        made.add(taken)
    return made


class TestBestLane:
    def test_the_one_with_most_room(self) -> None:
        """Rows that share nothing are spread evenly; of equals, the first."""
        lanes = [lane(8, [row(0, 5)] * 1), lane(8), lane(8)]

        assert _best_lane(lanes, row(9, 5)) is lanes[1]

    def test_the_one_with_the_same_beginning_if_it_has_nearly_as_much(self) -> None:
        """Up to 4 rows more than in the emptiest: small groups stay in one lane."""
        head = Prefix(64, 9)
        for taken, together in ((1, True), (4, True), (5, False)):
            full = lane(8, [row(i, 80, [head]) for i in range(taken)])
            empty = lane(8)

            assert (_best_lane([empty, full], row(9, 80, [head])) is full) == together

    def test_the_beginning_is_the_longest_that_the_last_row_has(self) -> None:
        """Rows that only share a shorter one with it, or came before it, don't count."""
        head, longer = Prefix(64, 9), Prefix(128, 3)
        empty = lane(8)
        nested = lane(8, [row(0, 200, [head, longer])])
        passed = lane(8, [row(1, 80, [head]), row(2, 80)])

        assert _best_lane([empty, nested], row(8, 80, [head])) is empty
        assert _best_lane([empty, nested], row(8, 200, [head, longer])) is nested
        assert _best_lane([empty, passed], row(8, 80, [head])) is empty
        assert _best_lane([empty, passed], row(8, 80)) is empty

    def test_small_groups_are_not_torn_apart(self) -> None:
        """Two heads of 4 rows, two lanes: each computes one of them, by hand 2 x 100 + 8 x 20."""
        rows = [request(i, "st"[i // 4] * 99 + chr(97 + i) * 20) for i in range(8)]
        running = engine(lanes=2)

        finish(running, rows)

        assert running.stats.computed_prompt_tokens == 360
        running.close()


class TestNumberOfLanes:
    @pytest.mark.parametrize(
        ("slots", "settings", "lanes"),
        [
            (64, {"threads": 8}, [2, 1, 4, 8]),
            (64, {"threads": 6}, [2, 1, 6]),
            (64, {"threads": 3}, [1, 3]),
            (64, {"threads": 1}, [1]),
            (3, {"threads": 8}, [2, 1]),
            (1, {"threads": 8}, [1]),
            (64, {"threads": 8, "lanes": 1}, [1]),
            (64, {"threads": 1, "lanes": 7}, [7]),
            (2, {"threads": 8, "lanes": 7}, [2]),
            (64, {"threads": 8, "kv_layout": KVLayout.UNIFIED}, [1]),
            (252, {"threads": 1}, [1]),
            (253, {"threads": 1}, [2]),
            (300, {"threads": 4}, [2, 4]),
            (1008, {"threads": 1}, [4]),
            (1009, {"threads": 1}, [5]),
            (1009, {"threads": 1, "lanes": 3}, [5]),
            (253, {"threads": 8, "kv_layout": KVLayout.UNIFIED}, [1]),
        ],
    )
    def test_on_a_cpu(self, slots: int, settings: dict[str, Any], lanes: list[int]) -> None:
        """By rule two, if they split the threads evenly and there are rows for them.

        No more than 252 rows in each.
        """
        layouts = candidates(EngineConfig("m", **settings), slots, on_gpu=False)

        assert [layout.lanes for layout in layouts] == lanes

    def test_on_a_gpu(self) -> None:
        """Up to four, with 64 rows each at least, and more if there are too many for contexts."""
        config = EngineConfig("m", threads=8)

        assert candidates(config, 128, on_gpu=True) == [Layout(2, 4, 64, flash_attention=True)]
        assert candidates(config, 300, on_gpu=True) == [Layout(4, 2, 75, flash_attention=True)]

    def test_threads_and_rows_are_split_evenly(self) -> None:
        """With lanes by hand, threads that are left over idle; else there are none."""
        assert candidates(EngineConfig("m", threads=9), 10, on_gpu=False) == [
            Layout(1, threads=9, slots=10),
            Layout(9, threads=1, slots=2),
        ]
        set_by_hand = EngineConfig("m", threads=5, lanes=2)
        assert candidates(set_by_hand, 11, on_gpu=False) == [Layout(2, threads=2, slots=6)]

    @pytest.mark.parametrize(("lanes", "parallel"), [(4, 9), (2, 5), (2, 3), (3, 3)])
    def test_no_more_rows_than_asked_for(self, lanes: int, parallel: int) -> None:
        """Some lanes have a row less; the caches are no larger than for so many rows."""
        made = Engine(
            FakeBackend(),
            EngineConfig("m", lanes=lanes, threads=lanes, parallel=parallel, share_prefixes=False),
        )
        made.submit(mixed_rows(20))
        made.prepare()

        slots = [lane.num_slots for lane in made.lanes]
        assert (len(slots), sum(slots), max(slots) - min(slots)) == (
            lanes,
            parallel,
            parallel % lanes > 0,
        )
        assert made.stats.slots == parallel
        assert made.stats.kv_bytes == parallel * made.stats.row_cells  # a byte each


CARD = replace(FakeBackend().card, kv_bytes_per_cell=MIB)


def fit(
    slots: int, memory_mib: int, lanes: int, prefix_slots: int, cells: int = 256, **settings: Any
) -> ContextConfig:
    config = EngineConfig("m", **{"threads": 8, **settings})
    return fit_context(config, CARD, slots, cells, False, memory_mib * MIB, lanes, prefix_slots)


class TestThreads:
    def test_those_of_an_idle_lane_go_to_the_others(self) -> None:
        """A long row runs on alone with both threads, until there is work for the other lane."""
        backend = FakeBackend(step_s=0.001)
        backend.card = replace(backend.card, file_bytes=10**9)
        made = Engine(backend, EngineConfig("m", lanes=2, threads=2, parallel=2))
        made.submit(create_requests(1, 3, first=0, max_tokens=300, ignore_eos=True))
        made.submit(create_requests(1, 4, first=1, max_tokens=2, ignore_eos=True))
        seen: list[set[int]] = []
        while made.has_work:
            made.step()
            seen.append({lane.backend.threads for lane in made.lanes if lane.has_work})
        made.submit(create_requests(1, 3, first=2, max_tokens=300, ignore_eos=True))
        made.submit(create_requests(1, 4, first=3, max_tokens=300, ignore_eos=True))
        made.step()

        assert {2} in seen
        assert [lane.backend.threads for lane in made.lanes] == [1, 1]
        made.abort()
        made.close()

    def test_small_steps_are_left_to_one_thread(self) -> None:
        """A row of a model without weights is not worth the waiting."""
        made = Engine(FakeBackend(), EngineConfig("m", lanes=2, threads=2, parallel=2))
        made.submit(create_requests(1, 3, first=0, max_tokens=300, ignore_eos=True))
        made.submit(create_requests(1, 4, first=1, max_tokens=2, ignore_eos=True))
        while made.has_work:
            made.step()
            assert all(lane.backend.threads == 1 for lane in made.lanes)
        made.close()


class TestFitContext:
    def test_lanes_share_rows_and_threads(self) -> None:
        """16 rows and 8 threads in 4 lanes: 4 and 2 each; the slots for prefixes are each one's."""
        assert fit(16, 10**6, lanes=4, prefix_slots=3) == ContextConfig(
            num_slots=4, row_cells=256, pool_cells=None, chunk=128, threads=2, num_prefix_slots=3,
            pass_tokens=256,
        )  # fmt: skip

    @pytest.mark.parametrize(
        ("slots", "lanes", "each"), [(10, 4, 3), (9, 4, 3), (8, 4, 2), (1, 1, 1)]
    )
    def test_no_row_is_left_over(self, slots: int, lanes: int, each: int) -> None:
        """Lanes are alike, so there may be more room than was asked for."""
        assert fit(slots, 10**6, lanes, prefix_slots=0).num_slots == each

    def test_a_lane_has_a_thread(self) -> None:
        """Even if there are fewer threads than lanes."""
        assert fit(8, 10**6, lanes=4, prefix_slots=0, threads=3).threads == 1

    @pytest.mark.parametrize(
        ("memory_mib", "slots", "prefix_slots"),
        [(7681, 4, 2), (7679, 4, 0), (5121, 4, 0), (2561, 2, 0)],
    )
    def test_prefixes_are_the_first_to_go(
        self, memory_mib: int, slots: int, prefix_slots: int
    ) -> None:
        """16 rows and 4 x 2 prefixes of 256 MiB are 6,144 MiB, which is 0.8 of 7,680.

        The rows alone are 0.8 of 5,120; half of them are 0.8 of 2,560.
        """
        context = fit(16, memory_mib, lanes=4, prefix_slots=2)

        assert (context.num_slots, context.num_prefix_slots) == (slots, prefix_slots)
        assert 4 * context_bytes(CARD, context) <= 0.8 * memory_mib * MIB

    def test_rows_asked_for_that_do_not_fit_are_refused(self) -> None:
        """All lanes together: 16 rows of 256 MiB want 0.8 of 5,120 MiB; 15 fit in a bit less."""
        assert fit(16, 5121, lanes=4, prefix_slots=2, parallel=16).num_slots == 4
        with pytest.raises(ConfigError, match=r"16 rows x 256 tokens = 4,096 MiB.*--parallel 15"):
            fit(16, 5119, lanes=4, prefix_slots=2, parallel=16)

    def test_bytes_of_a_context(self) -> None:
        """Rows and prefixes alike have all their cells; a pool is what it is."""
        streams = ContextConfig(6, 512, None, chunk=512, threads=1, num_prefix_slots=2)
        unified = ContextConfig(6, 512, 700, chunk=512, threads=1)

        assert context_bytes(CARD, streams) == 8 * 512 * MIB
        assert context_bytes(CARD, unified) == 700 * MIB
