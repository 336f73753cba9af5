"""Several answers of a row, and rows that ask for the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localbatch import Completion, FinishReason, Request, SamplingParams, TextPiece, Timings, Usage
from localbatch.data.config import EngineConfig, KVLayout, Order
from localbatch.data.errors import DecodeError
from localbatch.engine.answers import joined
from localbatch.engine.backend import Sample
from localbatch.engine.engine import Engine
from localbatch.engine.fake import FakeBackend
from localbatch.engine.llama import LlamaBackend
from localbatch.engine.supervisor import Supervisor
from localbatch.scheduler.plan import StepPlan
from tests.test_engine import finish


def engine(backend: FakeBackend | LlamaBackend | None = None, **settings: Any) -> Engine:
    plain = {"threads": 1, "lanes": 1}
    return Engine(backend or FakeBackend(), EngineConfig("m", **{**plain, **settings}))


def request(index: int, prompt: str = "hello", **params: Any) -> Request:
    params = {"max_tokens": 10, "temperature": 0.9, "ignore_eos": True, **params}
    return Request(f"r{index}", index, prompt=prompt, params=SamplingParams(**params))


def texts(completion: Completion) -> list[str]:
    return [choice.text for choice in completion.choices]


class TestDrawnAnswers:
    @pytest.mark.parametrize("config", [
        {}, {"parallel": 2}, {"lanes": 2, "threads": 2}, {"share_prefixes": False},
        {"order": Order.INPUT}, {"kv_layout": KVLayout.UNIFIED},
    ])  # fmt: skip
    def test_the_first_is_the_only_one_of_a_row_that_asks_for_one(
        self, config: dict[str, Any]
    ) -> None:
        """Whatever the settings; the others are others, and come in order."""
        ones = finish(engine(), [request(i, f"row {i} " + "x" * 150) for i in range(4)])
        several = engine(**config)
        done = finish(several, [request(i, f"row {i} " + "x" * 150, n=3) for i in range(4)])
        several.close()

        assert [done[i].text for i in range(4)] == [ones[i].text for i in range(4)]
        assert all(len(set(texts(done[i]))) == 3 for i in range(4))
        again = finish(engine(), [request(i, f"row {i} " + "x" * 150, n=3) for i in range(4)])
        assert [texts(done[i]) for i in range(4)] == [texts(again[i]) for i in range(4)]

    def test_fewer_answers_are_the_first_of_more(self) -> None:
        """An answer hangs on the row's id and its own number alone."""
        few = finish(engine(), [request(0, n=2)])[0]
        more = finish(engine(), [request(0, n=5)])[0]

        assert texts(few) == texts(more)[:2]

    def test_a_prompt_is_counted_once_and_answers_are_summed(self) -> None:
        """`usage` is the row's; each answer has its own tokens."""
        done = finish(engine(), [request(0, "x" * 99, n=4)])[0]

        assert done.usage == Usage(prompt_tokens=100, completion_tokens=40)
        assert [len(choice.token_ids) for choice in done.choices] == [10] * 4

    def test_all_of_a_prompt_but_its_end_is_computed_once(self) -> None:
        """A prompt of 200 tokens, 8 answers: 192 once and 8 for each, the fewest that are exact."""
        lone = engine(parallel=8)
        finish(lone, [request(0, "x" * 199, n=8)])

        assert lone.stats.prompt_tokens == 8 * 200
        assert lone.stats.computed_prompt_tokens == 192 + 8 * 8

    def test_logprobs_go_with_their_answers(self) -> None:
        """Each answer's logprobs are of its own tokens."""
        done = finish(engine(), [request(0, n=3, logprobs=True)])[0]

        for choice in done.choices:
            assert choice.logprobs is not None
            assert tuple(entry.token_id for entry in choice.logprobs) == choice.token_ids

    def test_an_answer_may_end_before_the_others(self) -> None:
        """Each has its own reason to end; the row ends with the last one."""
        free = finish(engine(), [request(0, n=3)])[0]
        stop = FakeBackend().token_bytes(free.more[0].token_ids[2]).decode("latin-1")
        done = finish(engine(), [request(0, n=3, stop=(stop,))])[0]

        assert done.more[0].finish_reason is FinishReason.STOP
        assert len(done.more[0].token_ids) <= 3
        assert done.usage.completion_tokens == sum(len(c.token_ids) for c in done.choices)

    def test_the_real_arithmetic_gives_each_the_same_alone(self, tiny_model: Path) -> None:
        """Sharing the prompt's cells changes no bit of any answer."""
        backend = LlamaBackend(str(tiny_model))
        prompt = "the cat is on the mat and in it " * 6
        shared = finish(engine(backend), [request(0, prompt, n=4, logprobs=True)])[0]
        own = finish(
            engine(backend, share_prefixes=False, parallel=1),
            [request(0, prompt, n=4, logprobs=True)],
        )[0]
        backend.close()

        assert shared.choices == own.choices


class TestGreedyAnswers:
    def test_they_are_computed_once(self) -> None:
        """Four times the same answer, for the work of one."""
        lone = engine()
        done = finish(lone, [request(0, temperature=0.0, n=4), request(1, temperature=0.0, n=2)])

        assert lone.stats.completion_tokens == 10
        assert [len(done[i].choices) for i in (0, 1)] == [4, 2]
        assert len({text for i in (0, 1) for text in texts(done[i])}) == 1
        assert [done[i].usage.completion_tokens for i in (0, 1)] == [40, 20]
        assert [done[i].id for i in (0, 1)] == ["r0", "r1"]

    def test_each_is_computed_if_nothing_is_shared(self) -> None:
        """Without sharing, equal answers are computed again."""
        lone = engine(share_prefixes=False)
        done = finish(lone, [request(0, temperature=0.0, n=4)])[0]

        assert lone.stats.completion_tokens == 40
        assert len(set(texts(done))) == 1


class TestEndings:
    def test_an_abort_ends_the_row_once(self) -> None:
        """Answers that were done are kept, the others end where they stand."""
        lone = engine(parallel=2)
        lone.submit([request(0, n=3), request(1, n=2), request(2)])
        for _ in range(6):
            assert not [e for e in lone.step() if isinstance(e, Completion)]
        ended = lone.abort()

        assert sorted(c.index for c in ended) == [0, 1, 2]
        assert [len(c.choices) for c in sorted(ended, key=lambda c: c.index)] == [3, 2, 1]
        assert all(ch.finish_reason is FinishReason.ABORTED for c in ended for ch in c.choices)
        assert finish(lone, [request(3, n=2)])[3].finish_reason is FinishReason.LENGTH

    def test_an_error_in_one_answer_is_the_rows(self) -> None:
        """The row has the error and no answer; other rows have theirs."""
        backend = BrokenBackend(choice=1)
        done = finish(engine(backend), [request(0, n=3), request(1)])

        assert done[0].error == "llama.cpp failed to compute"
        assert done[0].more == ()
        assert done[1].finish_reason is FinishReason.LENGTH

    def test_the_first_answer_is_streamed(self) -> None:
        """Pieces, put together, are the text of the first answer."""
        lone = engine()
        lone.streams_text = True
        lone.submit([request(0, n=3), request(1, temperature=0.0, n=2)])
        pieces = {0: "", 1: ""}
        done: dict[int, Completion] = {}
        while lone.has_work:
            for event in lone.step():
                if isinstance(event, TextPiece):
                    pieces[event.row] += event.text
                else:
                    done[event.index] = event

        assert pieces == {0: done[0].text, 1: done[1].text}

    def test_a_row_that_kills_the_worker_costs_only_itself(self) -> None:
        """All answers of the other rows come, one completion for each row."""
        config = EngineConfig("m", backend="fake", threads=1, fake_dies_on="deadly")
        rows = [request(i, "deadly" if i == 2 else f"row {i}", n=3) for i in range(5)]
        supervisor = Supervisor(config)
        try:
            done = list(supervisor.run(rows))
        finally:
            supervisor.close()

        by_index = {c.index: c for c in done if isinstance(c, Completion)}
        assert len(done) == len(by_index) == 5
        assert [by_index[i].failed for i in range(5)] == [False, False, True, False, False]
        expected = finish(engine(), rows[:2])
        assert [texts(by_index[i]) for i in (0, 1)] == [texts(expected[i]) for i in (0, 1)]


class BrokenBackend(FakeBackend):
    """Can't compute one of a row's answers."""

    def __init__(self, choice: int) -> None:
        super().__init__()
        self._choice = choice

    def forward(self, plan: StepPlan, sample: Sample) -> list[int | None]:
        if any(row.sequence.choice == self._choice for row in plan.rows):
            raise DecodeError("llama.cpp failed to compute", -3)
        return super().forward(plan, sample)


TIMES = st.floats(0, 1e6)


@given(st.lists(st.tuples(TIMES, TIMES, TIMES), min_size=1, max_size=5))
def test_times_of_all_answers_add_up_to_the_last_end(
    parts: list[tuple[float, float, float]],
) -> None:
    """None is negative; the first begins the row's time, the last ends it."""
    answers = [Completion(0, 0, "", FinishReason.STOP, timings=Timings(*times)) for times in parts]
    timings = joined(answers).timings
    queue, prefill, decode = timings.queue_s, timings.prefill_s, timings.decode_s

    assert min(queue, prefill, decode) >= 0
    assert queue + prefill + decode == pytest.approx(max(map(sum, parts)))
    assert queue == min(times[0] for times in parts)


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(1, 4), st.booleans(), st.integers(0, 2)), max_size=8))
def test_rows_in_are_completions_out(shapes: list[tuple[int, bool, int]]) -> None:
    """Any mix of greedy and drawn rows, equal or not: each once, with as many answers as asked."""
    rows = [
        request(i, f"p{prompt}", n=n, temperature=0.0 if greedy else 0.7, max_tokens=4)
        for i, (n, greedy, prompt) in enumerate(shapes)
    ]
    done = finish(engine(parallel=3), rows)

    assert [len(done[i].choices) for i in range(len(rows))] == [n for n, _, _ in shapes]
