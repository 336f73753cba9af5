"""The engine on the fake backend: continuous batching, texts, errors."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localbatch import Completion, FinishReason, Request, SamplingParams, TextPiece
from localbatch.data.config import EngineConfig, KVLayout
from localbatch.data.errors import DecodeError
from localbatch.engine.backend import Sample
from localbatch.engine.engine import Engine
from localbatch.engine.fake import FakeBackend
from localbatch.scheduler.plan import StepPlan


def engine(**settings: object) -> Engine:
    return Engine(FakeBackend(), EngineConfig("fake", backend="fake", **settings))  # type: ignore[arg-type]


def requests(count: int, **params: object) -> list[Request]:
    sampling = SamplingParams(**{"max_tokens": 12, **params})  # type: ignore[arg-type]
    return [
        Request(f"r{i}", i, prompt=f"prompt {i} " + "x" * (i * 37 % 90), params=sampling)
        for i in range(count)
    ]


def finish(engine: Engine, rows: list[Request]) -> dict[int, Completion]:
    """Run rows to their end; returns completions by index."""
    done = {c.index: c for c in engine.submit(rows)}
    while engine.has_work:
        done |= {c.index: c for c in engine.step() if isinstance(c, Completion)}
    return done


def texts(done: dict[int, Completion]) -> list[str]:
    return [done[i].text for i in sorted(done)]


def test_every_row_gets_an_answer_however_many_there_are() -> None:
    """More rows than slots: all are answered, each once."""
    done = finish(engine(parallel=4), requests(50))

    assert sorted(done) == list(range(50))
    assert all(c.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) for c in done.values())


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 9), st.randoms(use_true_random=False), st.sampled_from([0.0, 0.9]))
def test_an_answer_depends_on_its_row_alone(
    parallel: int, shuffle: random.Random, temperature: float
) -> None:
    """Any batch size and order of arrival give the answers of one row at a time."""
    rows = requests(12, temperature=temperature, top_k=0)
    alone = finish(engine(parallel=1), rows)
    mixed = list(rows)
    shuffle.shuffle(mixed)

    assert texts(alone) == texts(finish(engine(parallel=parallel), mixed))


def test_a_pool_that_holds_one_row_gives_the_same_answers() -> None:
    """A full cache preempts and delays rows; it fails none."""
    rows = requests(9)
    small = engine(kv_layout=KVLayout.UNIFIED, kv_cells=256, parallel=8, ctx=256)

    done = finish(small, rows)

    assert texts(finish(engine(), rows)) == texts(done)
    assert small._scheduler is not None
    assert small._scheduler.num_preempted > 0


def test_a_pool_smaller_than_a_row_wants_cuts_the_answer() -> None:
    """A prompt that fits is answered up to the pool's end; one that doesn't is one failed row."""
    params = SamplingParams(max_tokens=4000, ignore_eos=True)
    rows = [Request(i, i, prompt="x" * n, params=params) for i, n in enumerate((200, 400))]

    done = finish(engine(kv_layout=KVLayout.UNIFIED, kv_cells=256), rows)

    # BOS and 200 tokens leave 55 of 256 cells, and the last token needs none.
    assert (done[0].finish_reason, done[0].usage.completion_tokens) == (FinishReason.LENGTH, 56)
    assert done[1].error == "prompt: has 401 tokens, more than the context of 256 (see --ctx)"


def test_pieces_put_together_are_the_text() -> None:
    """Also where characters and stop strings lie over several tokens."""
    streaming = engine()
    streaming.streams_text = True
    streaming.submit(requests(5, max_tokens=40, ignore_eos=True, stop=["a", "\n"]))
    pieces: dict[int, str] = {}
    done: dict[int, str] = {}
    while streaming.has_work:
        for event in streaming.step():
            if isinstance(event, TextPiece):
                assert event.row not in done
                pieces[event.row] = pieces.get(event.row, "") + event.text
            else:
                done[event.index] = event.text

    assert done == {i: pieces.get(i, "") for i in range(5)}


def test_a_stop_string_ends_the_row_and_is_not_in_the_text() -> None:
    """The text ends before it; without it the answer goes on."""
    full = finish(engine(), requests(1, max_tokens=60, ignore_eos=True))[0]
    stop = full.text[5]

    cut = finish(engine(), requests(1, max_tokens=60, ignore_eos=True, stop=stop))[0]

    assert cut.text == full.text.split(stop)[0]
    assert cut.finish_reason is FinishReason.STOP


def test_max_tokens_and_ignore_eos_count_exactly() -> None:
    """Every row has its 30 tokens, whatever the model says."""
    done = finish(engine(), requests(20, max_tokens=30, ignore_eos=True))

    assert {(30, FinishReason.LENGTH)} == {
        (c.usage.completion_tokens, c.finish_reason) for c in done.values()
    }


def test_a_prompt_longer_than_the_context_is_one_failed_row() -> None:
    """It says how many tokens there are and how many fit; its neighbours are answered."""
    rows = [*requests(2), Request("long", 2, prompt="y" * 300)]

    done = finish(engine(ctx=256), rows)

    assert done[2].error == ("prompt: has 301 tokens, more than the context of 256 (see --ctx)")
    assert [done[0].error, done[1].error] == [None, None]


def test_the_context_grows_for_a_longer_row() -> None:
    """A later row that needs more cells waits for the rows before it, then gets them."""
    growing = engine()
    growing.submit(requests(2))
    growing.step()
    assert growing.stats.row_cells == 256

    done = finish(growing, [Request("long", 2, prompt="z" * 900, params=SamplingParams())])

    assert growing.stats.row_cells == 1536  # 901 + 512 in steps of 256
    assert done[2].error is None


class _Breaking(FakeBackend):
    """Fails at one step."""

    steps = 0

    def forward(self, plan: StepPlan, sample: Sample) -> list[int | None]:
        self.steps += 1
        if self.steps == 3:
            raise DecodeError("llama.cpp failed to compute", -3)
        return super().forward(plan, sample)


def test_a_step_that_fails_costs_the_rows_in_it() -> None:
    """The rows that were waiting are answered as ever."""
    rows = requests(8)
    broken = Engine(_Breaking(), EngineConfig("fake", backend="fake", parallel=3))

    done = finish(broken, rows)

    failed = [i for i in done if done[i].failed]
    assert sorted(done) == list(range(8))
    assert 1 <= len(failed) <= 3
    assert {"llama.cpp failed to compute"} == {done[i].error for i in failed}
    whole = finish(engine(), rows)
    assert all(done[i].text == whole[i].text for i in done if i not in failed)


def test_aborted_rows_are_reported() -> None:
    """Running and waiting ones alike; the engine is free for others then."""
    stopped = engine(parallel=2)
    stopped.submit(requests(5, ignore_eos=True))
    stopped.step()

    done = stopped.abort()

    assert {FinishReason.ABORTED} == {c.finish_reason for c in done}
    assert sorted(c.index for c in done) == [0, 1, 2, 3, 4]
    assert not stopped.has_work
    assert texts(finish(engine(), requests(5))) == texts(finish(stopped, requests(5)))


def test_timings_and_usage_add_up() -> None:
    """No time is negative, and tokens are those of the prompt and the answer."""
    done = finish(engine(parallel=2), requests(6))

    for i, completion in done.items():
        timings = completion.timings
        assert min(timings.queue_s, timings.prefill_s, timings.decode_s) >= 0
        assert completion.usage.prompt_tokens == 1 + len(requests(6)[i].prompt or "")
        assert completion.usage.completion_tokens == len(completion.token_ids)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_same_run_twice_gives_the_same_answers(temperature: float) -> None:
    """There is no hidden state in the random streams."""
    rows = requests(4, temperature=temperature)

    assert texts(finish(engine(), rows)) == texts(finish(engine(), rows))
