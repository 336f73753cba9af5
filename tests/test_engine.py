"""The engine, mostly on the fake backend: continuous batching, texts, errors."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localbatch import (
    Completion,
    ConfigError,
    FinishReason,
    Request,
    SamplingParams,
    TextPiece,
    Usage,
)
from localbatch.data.config import EngineConfig, KVLayout, Order
from localbatch.data.errors import DecodeError
from localbatch.engine import engine as engine_module
from localbatch.engine import lane as lane_module
from localbatch.engine.backend import Sample
from localbatch.engine.engine import Engine
from localbatch.engine.fake import BOS, EOS, FIRST_BYTE, FakeBackend
from localbatch.engine.llama import LlamaBackend
from localbatch.scheduler.plan import StepPlan


def engine(backend: FakeBackend | LlamaBackend | None = None, **settings: Any) -> Engine:
    """Return an engine that takes rows as they come and computes each of them."""
    plain = {"threads": 1, "lanes": 1, "order": Order.INPUT, "share_prefixes": False}
    return Engine(backend or FakeBackend(), EngineConfig("m", **{**plain, **settings}))


def request(index: int, prompt: str = "hello", **params: Any) -> Request:
    return Request(f"r{index}", index, prompt=prompt, params=SamplingParams(**params))


def requests(count: int, **params: Any) -> list[Request]:
    return [
        request(i, f"prompt {i} " + "x" * (i * 37 % 90), **{"max_tokens": 12, **params})
        for i in range(count)
    ]


def finish(engine: Engine, rows: Sequence[Request] = ()) -> dict[int, Completion]:
    """Run rows to their end; returns completions by index, in the order they came."""
    done = {c.index: c for c in engine.submit(rows)}
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, Completion):
                assert event.index not in done
                done[event.index] = event
    return done


def texts(done: dict[int, Completion]) -> list[str]:
    return [done[i].text for i in sorted(done)]


def fake_answer(request: Request) -> list[int]:
    """Return a greedy answer's tokens: the fake's logits are a hash of all tokens before."""
    assert request.prompt is not None
    tokens = [BOS, *(FIRST_BYTE + byte for byte in request.prompt.encode())]
    answer: list[int] = []
    while len(answer) < request.params.max_tokens:
        digest = blake2b(np.array(tokens + answer, np.int32).tobytes(), digest_size=8).digest()
        stream = np.random.Generator(np.random.Philox(int.from_bytes(digest, "little")))
        token = int(stream.random(FIRST_BYTE + 256, dtype=np.float32).argmax())
        if token == EOS and not request.params.ignore_eos:
            break
        answer.append(token)
    return answer


class TestContinuousBatching:
    @pytest.mark.parametrize("parallel", [1, 3, 8, 64])
    def test_every_row_gets_its_own_answer(self, parallel: int) -> None:
        """More rows than slots: all are answered, each once, as one by one by hand."""
        rows = requests(50)
        done = finish(engine(parallel=parallel), rows)

        assert sorted(done) == list(range(50))
        for row in rows:
            completion, expected = done[row.index], fake_answer(row)
            ended = FinishReason.LENGTH if len(expected) == 12 else FinishReason.STOP
            assert (completion.id, completion.finish_reason) == (row.id, ended)
            assert list(completion.token_ids) == expected
            assert completion.usage == Usage(1 + len(row.prompt or ""), len(expected))

    def test_a_free_slot_is_taken_at_once(self) -> None:
        """Short rows pass through the second slot while a long one runs in the first."""
        lengths = [4, 1, 1, 1]
        rows = [request(i, max_tokens=n, ignore_eos=True) for i, n in enumerate(lengths)]
        running = engine(parallel=2)

        done = finish(running, rows)

        assert list(done) == [1, 2, 3, 0]
        # Two prompts together, two more alone, and three more tokens of the long row.
        assert running.stats.steps == 6

    @settings(max_examples=25, deadline=None)
    @given(
        st.sampled_from([1, 3, 8]),
        st.randoms(use_true_random=False),
        st.sampled_from([0.0, 0.9]),
        st.integers(0, 12),
    )
    def test_an_answer_depends_on_its_row_alone(
        self, parallel: int, shuffle: random.Random, temperature: float, late: int
    ) -> None:
        """Any batch size and order of arrival give the answers of one row at a time."""
        rows = requests(12, temperature=temperature, top_k=0)
        alone = {row.index: finish(engine(), [row])[row.index].text for row in rows}
        mixed = list(rows)
        shuffle.shuffle(mixed)
        running = engine(parallel=parallel)
        assert running.submit(mixed[late:]) == []
        early = running.step() if late < 12 else []

        done = finish(running, mixed[:late])

        done |= {event.index: event for event in early if isinstance(event, Completion)}
        assert alone == {index: completion.text for index, completion in done.items()}

    @pytest.mark.parametrize(("parallel", "kv_cells"), [(2, 256), (8, 256), (8, 512)])
    def test_a_small_pool_gives_the_same_answers(self, parallel: int, kv_cells: int) -> None:
        """A full cache preempts and delays rows; it fails none."""
        rows = [request(i, "x" * (20 + 11 * i), max_tokens=90, ignore_eos=True) for i in range(9)]
        small = engine(
            kv_layout=KVLayout.UNIFIED, kv_cells=kv_cells, parallel=parallel, ctx=256
        )  # fmt: skip

        done = finish(small, rows)

        assert texts(done) == texts(finish(engine(), rows))
        assert small.lanes[0]._scheduler is not None
        assert small.lanes[0]._scheduler.num_preempted > 0

    def test_the_same_run_twice_gives_the_same_answers(self) -> None:
        """There is no hidden state in the random streams."""
        rows = requests(4, temperature=0.7)

        assert texts(finish(engine(), rows)) == texts(finish(engine(), rows))

    def test_rows_of_a_real_model_do_not_depend_on_the_batch(self, tiny_model: Path) -> None:
        """Greedy and drawn answers of a tiny model, one by one and together."""
        rows = [
            request(i, "of the " * (1 + i * 5 % 40), max_tokens=3 + i % 5, temperature=i % 2 * 0.8)
            for i in range(12)
        ]
        answers = {}
        for parallel in (1, 3, 8):
            backend = LlamaBackend(str(tiny_model))
            answers[parallel] = {
                i: c.token_ids for i, c in finish(engine(backend, parallel=parallel), rows).items()
            }
            backend.close()

        assert answers[1] == answers[3] == answers[8]
        assert len(set(answers[1].values())) == 12


class TestTexts:
    def test_pieces_put_together_are_the_text(self) -> None:
        """Also where characters and stop strings lie over several tokens; none comes late."""
        streaming = engine()
        streaming.streams_text = True
        streaming.submit(requests(8, max_tokens=40, ignore_eos=True, stop=["a", "\n", "~"]))
        pieces: dict[int, list[str]] = {i: [] for i in range(8)}
        done: dict[int, str] = {}
        while streaming.has_work:
            for event in streaming.step():
                if isinstance(event, TextPiece):
                    assert event.row not in done
                    assert event.text
                    pieces[event.row].append(event.text)
                else:
                    done[event.index] = event.text

        assert done == {i: "".join(parts) for i, parts in pieces.items()}
        assert any(len(parts) > 5 for parts in pieces.values())

    def test_no_pieces_unless_asked_for(self) -> None:
        """They would cost more than the answers."""
        plain = engine()
        plain.submit(requests(2))

        events = [event for _ in range(12) for event in (plain.step() if plain.has_work else [])]

        assert [type(event) for event in events] == [Completion, Completion]

    def test_a_text_is_that_of_its_tokens(self) -> None:
        """All bytes decoded at once; what is no UTF-8 becomes U+FFFD."""
        for row in requests(20):
            done = finish(engine(), [row])[row.index]
            data = bytes(t - FIRST_BYTE for t in fake_answer(row) if t >= FIRST_BYTE)

            assert done.text == data.decode("utf-8", "replace")

    def test_a_stop_string_ends_the_row_and_is_not_in_the_text(self) -> None:
        """The text ends before it; without it the answer goes on."""
        full = finish(engine(), requests(1, max_tokens=60, ignore_eos=True))[0]
        stop = full.text[5]

        cut = finish(engine(), requests(1, max_tokens=60, ignore_eos=True, stop=stop))[0]

        assert cut.text == full.text.split(stop)[0]
        assert cut.finish_reason is FinishReason.STOP
        assert cut.usage.completion_tokens < 60

    def test_a_stop_string_in_the_last_token_still_counts(self) -> None:
        """The row ended for it, not for its length."""
        letter = {FIRST_BYTE + ord("q"): 1000.0}

        done = finish(engine(), [request(0, max_tokens=3, logit_bias=letter, stop="qqq")])[0]

        assert (done.text, done.finish_reason) == ("", FinishReason.STOP)
        assert done.usage.completion_tokens == 3

    def test_the_models_end_ends_the_row(self) -> None:
        """The token that did is neither in the text nor in the count."""
        done = finish(engine(), [request(0, logit_bias={EOS: 1000.0})])[0]

        assert (done.text, done.token_ids, done.finish_reason) == ("", (), FinishReason.STOP)
        assert done.usage == Usage(prompt_tokens=6, completion_tokens=0)

    def test_ignore_eos_goes_on_to_max_tokens(self) -> None:
        """Whatever the model says; its ends add no text."""
        only_ends = request(0, max_tokens=7, ignore_eos=True, logit_bias={EOS: 1000.0})

        done = finish(engine(), [only_ends])[0]

        assert (done.text, done.token_ids) == ("", (EOS,) * 7)
        assert done.finish_reason is FinishReason.LENGTH

    def test_max_tokens_count_exactly(self) -> None:
        """Every row has its 30 tokens."""
        done = finish(engine(), requests(20, max_tokens=30, ignore_eos=True))

        assert {(c.usage.completion_tokens, c.finish_reason) for c in done.values()} == {
            (30, FinishReason.LENGTH)
        }


class TestContext:
    def test_a_prompt_longer_than_the_context_is_one_failed_row(self) -> None:
        """It says how many tokens there are and how many fit; its neighbours are answered."""
        chat = [{"role": "user", "content": "y" * 300}]  # <user></user><assistant>: 24 more
        rows = [
            *requests(2), request(2, "y" * 300), Request("chat", 3, messages=chat, line=9)
        ]  # fmt: skip

        done = finish(engine(ctx=256), rows)

        more = "more than the context of 256 (see --ctx and --overlength)"
        assert done[2].error == f"prompt: has 301 tokens, {more}"
        assert done[3].error == f"prompt: has 325 tokens, {more}"
        assert (done[2].id, done[3].line, done[3].finish_reason) == ("r2", 9, FinishReason.ERROR)
        assert [done[0].error, done[1].error] == [None, None]

    @pytest.mark.parametrize(("length", "answer"), [(255, 1), (254, 2), (200, 56)])
    def test_a_row_ends_where_its_context_does(self, length: int, answer: int) -> None:
        """BOS and the prompt leave room, and the last token needs no cell."""
        row = request(0, "x" * length, max_tokens=4000, ignore_eos=True)

        done = finish(engine(ctx=256), [row])[0]

        assert (done.finish_reason, done.usage.completion_tokens) == (FinishReason.LENGTH, answer)

    def test_a_pool_smaller_than_a_row_wants_cuts_the_answer(self) -> None:
        """A prompt that fits is answered up to the pool's end; one that doesn't is a failed row."""
        rows = [
            request(i, "x" * n, max_tokens=4000, ignore_eos=True) for i, n in enumerate((200, 400))
        ]

        done = finish(engine(kv_layout=KVLayout.UNIFIED, kv_cells=256), rows)

        # BOS and 200 tokens leave 55 of 256 cells, and the last token needs none.
        assert (done[0].finish_reason, done[0].usage.completion_tokens) == (FinishReason.LENGTH, 56)
        more = "more than the context of 256 (see --ctx and --overlength)"
        assert done[1].error == f"prompt: has 401 tokens, {more}"

    def test_it_grows_for_a_longer_row(self) -> None:
        """A later row that needs more cells waits for the rows before it, then gets them."""
        growing = engine()
        growing.submit(requests(2))
        growing.step()
        assert (growing.stats.slots, growing.stats.row_cells) == (2, 256)
        long = request(2, "z" * 900, max_tokens=512)

        done = finish(growing, [long, request(3)])

        assert list(done)[:2] == [0, 1]
        # BOS, 900 and 512 in steps of 256; no fewer rows at a time than before.
        assert (growing.stats.slots, growing.stats.row_cells) == (2, 1536)
        assert list(done[2].token_ids) == fake_answer(long)
        assert done[3].error is None

    def test_it_grows_for_more_rows(self) -> None:
        """One row wants one slot; eight more run together, in cells no fewer than before."""
        growing = engine()
        finish(growing, [request(0, "x" * 300, max_tokens=1)])
        assert (growing.stats.slots, growing.stats.row_cells) == (1, 512)

        finish(growing, requests(8))

        assert (growing.stats.slots, growing.stats.row_cells) == (8, 512)

    def test_it_stays_for_rows_that_fit(self) -> None:
        """Making one anew takes time."""
        backend = FakeBackend()
        opened = []
        real = backend.open
        backend.open = lambda config: opened.append(config) or real(config)  # type: ignore[assignment, func-returns-value]
        running = engine(backend)

        for count in (5, 2, 5):
            finish(running, requests(count))

        assert len(opened) == 1

    def test_the_memory_of_the_old_one_counts_as_free(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """4 rows of 512 cells out of 2,048 bytes and what the present 4 x 256 take.

        0.8 of 2,048 + 1,024 holds them, 0.8 of 2,048 would not; a cell of the fake is a byte.
        """
        growing = engine(parallel=4)
        finish(growing, requests(4))
        monkeypatch.setattr(FakeBackend, "free_bytes", lambda _: 2048)

        done = finish(growing, [request(i, "x" * 300, max_tokens=1) for i in range(4)])

        assert [done[i].error for i in range(4)] == [None] * 4
        assert (growing.stats.slots, growing.stats.row_cells) == (4, 512)


class TestErrors:
    def test_a_row_that_cannot_be_rendered_fails_alone(self) -> None:
        """Its neighbours are answered."""
        backend = FakeBackend()
        refuses = "{% if messages[0].content == 'no' %}{{ raise_exception('no!') }}{% endif %}x"
        backend.card = replace(backend.card, chat_template=refuses)
        rows = [
            Request(i, i, messages=[{"role": "user", "content": text}])
            for i, text in enumerate(["yes", "no", "yes"])
        ]

        done = finish(engine(backend), rows)

        assert [done[i].error for i in range(3)] == [
            None, "messages: the chat template refuses them: no!", None
        ]  # fmt: skip

    def test_messages_without_a_template_end_the_run(self) -> None:
        """No row can be answered, so it is better said once."""
        backend = FakeBackend()
        backend.card = replace(backend.card, chat_template=None)

        with pytest.raises(ConfigError, match="--raw"):
            engine(backend).submit([Request(0, 0, messages=[{"role": "user", "content": "x"}])])

    @pytest.mark.parametrize("victim", [0, 4, 7])
    @pytest.mark.parametrize("settings", [{}, {"kv_layout": KVLayout.UNIFIED, "kv_cells": 256}])
    def test_a_row_that_cannot_be_computed_fails_alone(
        self, victim: int, settings: dict[str, Any]
    ) -> None:
        """The others of its steps are run again, and answered as ever."""
        rows = requests(8, ignore_eos=True)
        whole = finish(engine(parallel=3, **settings), rows)

        done = finish(engine(_Breaking(victim), parallel=3, **settings), rows)

        assert sorted(done) == list(range(8))
        assert {i for i in done if done[i].failed} == {victim}
        assert done[victim].error == "llama.cpp failed to compute"
        assert done[victim].finish_reason is FinishReason.ERROR
        assert all(done[i].text == whole[i].text for i in done if i != victim)

    @pytest.mark.parametrize("victim", [0, 4, 7])
    @pytest.mark.parametrize("at", [1, 3, 6])
    def test_a_passing_failure_costs_nothing(self, victim: int, at: int) -> None:
        """Whenever it comes; stop strings that lay behind it are found again."""
        rows = requests(8, ignore_eos=True)
        whole = finish(engine(parallel=3), rows)
        rows = requests(8, ignore_eos=True, stop=whole[1].text[2])
        whole = finish(engine(parallel=3), rows)

        done = finish(engine(_Breaking(victim, only_at=at), parallel=3), rows)

        assert {i: (c.text, c.error) for i, c in done.items()} == {
            i: (c.text, None) for i, c in whole.items()
        }

    def test_shown_text_is_not_taken_back(self) -> None:
        """Rows that are streamed fail with their step."""
        streaming = engine(_Breaking(0, only_at=3), parallel=3)
        streaming.streams_text = True
        events = streaming.submit(requests(3, ignore_eos=True))
        while streaming.has_work:
            events += streaming.step()  # type: ignore[arg-type]

        failed = [e.index for e in events if isinstance(e, Completion) and e.failed]
        assert sorted(failed) == [0, 1, 2]


class _Breaking(FakeBackend):
    """Fails at steps that have a certain row: all of them, or only the one that is its n-th."""

    def __init__(self, victim: int, only_at: int | None = None) -> None:
        super().__init__()
        self.victim, self.only_at = victim, only_at
        self.times = 0

    def forward(self, plan: StepPlan, sample: Sample) -> list[int | None]:
        has_it = any(row.sequence.request.index == self.victim for row in plan.rows)
        self.times += has_it
        if has_it and self.only_at in (None, self.times):
            raise DecodeError("llama.cpp failed to compute", -3)
        return super().forward(plan, sample)


class TestAbort:
    def test_aborted_rows_are_reported(self) -> None:
        """Running and waiting ones alike, with the text so far; the engine is free then."""
        rows = requests(5, ignore_eos=True)
        stopped = engine(parallel=2)
        stopped.submit(rows)
        for _ in range(4):
            stopped.step()

        done = {c.index: c for c in stopped.abort()}

        assert {c.finish_reason for c in done.values()} == {FinishReason.ABORTED}
        assert sorted(done) == [0, 1, 2, 3, 4]
        assert list(done[0].token_ids) == fake_answer(rows[0])[:4]
        assert done[4].token_ids == ()
        assert not stopped.has_work
        assert texts(finish(stopped, requests(5))) == texts(finish(engine(), requests(5)))

    def test_rows_that_never_started_are_reported(self) -> None:
        """Before the first step there is not even a context."""
        stopped = engine()
        stopped.submit(requests(3))

        assert [c.index for c in stopped.abort()] == [0, 1, 2]
        assert not stopped.has_work


class _Clock:
    """Time that only passes in the backend: a second a step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        for module in (engine_module, lane_module):
            monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def backend(self) -> FakeBackend:
        backend = FakeBackend()
        real = backend.forward

        def forward(plan: StepPlan, sample: Sample) -> list[int | None]:
            self.now += 1.0
            return real(plan, sample)

        backend.forward = forward  # type: ignore[method-assign]
        return backend


class TestTimings:
    def test_by_hand(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Rows of 3 tokens, one at a time: a second for the prompt, two for the other tokens."""
        clock = _Clock(monkeypatch)
        timed = engine(clock.backend(), parallel=1)

        done = finish(timed, requests(3, max_tokens=3, ignore_eos=True))

        for i in range(3):
            timings = done[i].timings
            assert (timings.queue_s, timings.prefill_s, timings.decode_s) == (3.0 * i, 1.0, 2.0)
        assert (timed.stats.steps, timed.stats.run_s) == (9, 9.0)

    def test_a_prompt_in_chunks_and_its_neighbour(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """1,100 tokens are three chunks; the neighbour's two tokens come first and last."""
        clock = _Clock(monkeypatch)
        rows = [request(0, "x" * 1099, max_tokens=1), request(1, max_tokens=2, ignore_eos=True)]

        done = finish(engine(clock.backend(), ubatch=512), rows)

        assert (done[0].timings.prefill_s, done[0].timings.decode_s) == (3.0, 0.0)
        assert (done[1].timings.prefill_s, done[1].timings.decode_s) == (1.0, 3.0)

    def test_a_preempted_row_was_admitted_when_it_first_was(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Losing its cells is no second queue: the parts add up to arrival to end."""
        clock = _Clock(monkeypatch)
        rows = [request(i, "x" * 120, max_tokens=60, ignore_eos=True) for i in range(2)]
        small = engine(clock.backend(), kv_layout=KVLayout.UNIFIED, kv_cells=256, parallel=2)

        done = finish(small, rows)

        assert small.lanes[0]._scheduler is not None
        assert small.lanes[0]._scheduler.num_preempted > 0
        for completion in done.values():
            assert (completion.timings.queue_s, completion.timings.prefill_s) == (0.0, 1.0)
        last = done[1].timings
        assert last.queue_s + last.prefill_s + last.decode_s == clock.now - 1000.0

    def test_a_failed_step_and_an_abort(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A row that never was admitted waited all the time; nothing is negative."""
        clock = _Clock(monkeypatch)
        stopped = engine(clock.backend(), parallel=1)
        stopped.submit(requests(2, ignore_eos=True))
        for _ in range(3):
            stopped.step()

        first, second = (completion.timings for completion in stopped.abort())

        assert (first.queue_s, first.prefill_s, first.decode_s) == (0.0, 1.0, 2.0)
        assert (second.queue_s, second.prefill_s, second.decode_s) == (3.0, 0.0, 0.0)

    def test_stats_add_up(self) -> None:
        """Tokens are those of all completions, and computing is part of the time."""
        counted = engine(parallel=2)

        done = finish(counted, requests(6))

        assert counted.stats.prompt_tokens == sum(c.usage.prompt_tokens for c in done.values())
        assert counted.stats.completion_tokens == sum(len(c.token_ids) for c in done.values())
        assert 0 < counted.stats.decode_s <= counted.stats.run_s
