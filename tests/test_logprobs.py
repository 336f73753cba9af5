"""Logarithms of probabilities, against full softmaxes of logits from llama_cpp's C interface."""

from __future__ import annotations

import math
import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llama_cpp import llama_cpp as lib

from localbatch import Completion, Request, SamplingParams
from localbatch.data.config import EngineConfig, KVLayout, Order
from localbatch.data.errors import DecodeError
from localbatch.data.request import TokenLogprob
from localbatch.engine import sampling
from localbatch.engine.backend import Sample
from localbatch.engine.engine import Engine
from localbatch.engine.fake import FIRST_BYTE, FakeBackend
from localbatch.engine.llama import LlamaBackend
from localbatch.engine.sampling import likelihood, sample
from localbatch.scheduler.plan import PlanRow, StepPlan
from localbatch.scheduler.sequence import Sequence
from tests.test_engine import finish

NEAR = 0.01


def engine(backend: FakeBackend | LlamaBackend | None = None, **settings: Any) -> Engine:
    plain = {"threads": 1, "lanes": 1, "order": Order.INPUT}
    return Engine(backend or FakeBackend(), EngineConfig("m", **{**plain, **settings}))


def request(index: int, prompt: str = "hello", **params: Any) -> Request:
    params = {"max_tokens": 8, "logprobs": True, "top_logprobs": 3, **params}
    return Request(f"r{index}", index, prompt=prompt, params=SamplingParams(**params))


def run(rows: list[Request], **settings: Any) -> list[Completion]:
    done = finish(engine(**settings), rows)
    return [done[row.index] for row in rows]


def log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Return it in numpy's longest floats."""
    values = logits.astype(np.longdouble)
    found: npt.NDArray[np.float64] = (values - np.log(np.exp(values).sum())).astype(np.float64)
    return found


class RawContext:
    """A context of llama_cpp's low-level interface that computes one sequence.

    Decoded alone, a token may have other last bits than in a batch: see docs/architecture.md.
    """

    def __init__(self, path: Path) -> None:
        params = lib.llama_model_default_params()
        params.n_gpu_layers = 0
        self._silent = lib.llama_log_callback(lambda _level, _text, _data: None)
        lib.llama_log_set(self._silent, None)
        self.model = lib.llama_model_load_from_file(os.fsencode(path), params)
        context = lib.llama_context_default_params()
        context.n_ctx, context.n_threads, context.n_threads_batch = 256, 1, 1
        context.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.context = lib.llama_init_from_model(self.model, context)
        self.num_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))

    def logits(self, prompt: list[int], answer: list[int]) -> npt.NDArray[np.float32]:
        """Return the logits after a prompt and after each token of an answer but the last."""
        lib.llama_memory_clear(lib.llama_get_memory(self.context), True)
        rows = []
        for piece in (prompt, *([token] for token in answer[:-1])):
            tokens = (lib.llama_token * len(piece))(*piece)  # the batch only points to it
            batch = lib.llama_batch_get_one(tokens, len(piece))
            assert lib.llama_decode(self.context, batch) == 0
            row = np.ctypeslib.as_array(lib.llama_get_logits(self.context), (self.num_vocab,))
            rows.append(row.copy())
        return np.stack(rows)

    def close(self) -> None:
        lib.llama_free(self.context)
        lib.llama_model_free(self.model)


@pytest.fixture
def raw_tiny(tiny_model: Path) -> Iterator[RawContext]:
    context = RawContext(tiny_model)
    yield context
    context.close()


def check(completion: Completion, prompt: list[int], raw: RawContext, top: int) -> None:
    """Compare a completion's logprobs with the full softmax of the raw logits."""
    answer = list(completion.token_ids)
    assert completion.logprobs is not None
    assert [entry.token_id for entry in completion.logprobs] == answer
    logits = raw.logits(prompt, answer)
    for entry, row in zip(completion.logprobs, logits, strict=True):
        expected = log_softmax(row)
        assert entry.logprob == pytest.approx(expected[entry.token_id], abs=NEAR)
        likeliest = sorted(expected, reverse=True)[:top]
        assert [t.logprob for t in entry.top] == pytest.approx(likeliest, abs=NEAR)
        assert [t.logprob for t in entry.top] == pytest.approx(
            [expected[t.token_id] for t in entry.top], abs=NEAR
        )


class TestLikelihood:
    @given(
        st.lists(st.floats(-80, 80, width=32), min_size=1, max_size=30),
        st.integers(0, 20),
        st.data(),
    )
    def test_it_is_the_log_of_the_full_softmax(
        self, values: list[float], top: int, data: st.DataObject
    ) -> None:
        """By Python's exact sum; the likeliest come first, equal ones by their ids."""
        token = data.draw(st.integers(0, len(values) - 1))
        best = max(values)
        log_sum = best + math.log(math.fsum(math.exp(value - best) for value in values))

        found = likelihood(np.array(values, np.float32), token, top)

        order = sorted(range(len(values)), key=lambda t: (-values[t], t))[:top]
        assert [t for t, _ in found.top] == order
        expected = [values[t] - log_sum for t in (token, *order)]
        assert [found.logprob, *(value for _, value in found.top)] == pytest.approx(
            expected, abs=1e-9
        )

    def test_a_step_takes_the_memory_of_one_row_whatever_their_number(self) -> None:
        """64 rows of 50,000 tokens: the peak is that of a few float64 rows, and little stays."""
        params = SamplingParams(logprobs=True, top_logprobs=20)
        rows = [
            PlanRow(Sequence(Request(i, i, prompt="x", params=params), [1]), i, 0, 1, True, False)
            for i in range(64)
        ]
        logits = np.random.default_rng(0).standard_normal((64, 50_000), np.float32)
        tracemalloc.start()
        try:
            sample(rows, logits)
            stays, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()

        assert peak < 4 * 8 * 50_000
        assert stays < 64 * 21 * 200

    def test_nobody_pays_who_does_not_ask(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Greedy rows without logprobs are one argmax and no softmax."""
        monkeypatch.setattr(sampling, "likelihood", lambda *_: pytest.fail("computed"))

        assert run([request(0, logprobs=False, top_logprobs=0)])[0].logprobs is None


class TestInTheEngine:
    @pytest.mark.parametrize("prompt", ["the cat is on the", "to be or not to be " * 6])
    def test_they_are_those_of_a_context_of_ones_own(
        self, tiny_model: Path, raw_tiny: RawContext, prompt: str
    ) -> None:
        """Each generated token's, and the likeliest ones', by llama.cpp's raw logits."""
        backend = LlamaBackend(str(tiny_model))
        rows = [request(0, prompt, top_logprobs=5, ignore_eos=True), request(1, "for it was")]
        done = finish(engine(backend), rows)
        tokens = backend.tokenize(prompt, add_special=True, parse_special=False)
        backend.close()

        check(done[0], tokens, raw_tiny, top=5)

    def test_temperature_penalties_and_biases_change_nothing(
        self, tiny_model: Path, raw_tiny: RawContext
    ) -> None:
        """They are of the model's own distribution, whichever token is drawn from another."""
        backend = LlamaBackend(str(tiny_model))
        row = request(
            0, "the cat", temperature=3.0, top_k=0, min_p=0.0, top_p=1.0, repeat_penalty=1.5,
            logit_bias={300: 4.0}, ignore_eos=True,
        )  # fmt: skip
        done = finish(engine(backend), [row])
        tokens = backend.tokenize("the cat", add_special=True, parse_special=False)
        backend.close()

        check(done[0], tokens, raw_tiny, top=3)

    @pytest.mark.model
    def test_the_real_model(self, smollm2: Path) -> None:
        """SmolLM2's are those of a context of its own."""
        backend = LlamaBackend(str(smollm2))
        done = finish(engine(backend), [request(i, f"{i} and {i + 1} make") for i in range(3)])
        tokens = backend.tokenize("1 and 2 make", add_special=True, parse_special=False)
        backend.close()
        raw = RawContext(smollm2)
        try:
            check(done[1], tokens, raw, top=3)
        finally:
            raw.close()

    def test_they_end_with_the_tokens(self) -> None:
        """A stop string and the end of an answer leave one for each of `token_ids`."""
        free = run([request(0, ignore_eos=True, max_tokens=40)])[0]
        stop = FakeBackend().token_bytes(free.token_ids[4]).decode("latin-1")
        stopped, *many = run(
            [request(0, ignore_eos=True, max_tokens=40, stop=(stop,))]
            + [request(i, f"row {i}", max_tokens=400, temperature=50.0) for i in range(1, 6)]
        )

        for completion in (free, stopped, *many):
            assert completion.logprobs is not None
            assert [e.token_id for e in completion.logprobs] == list(completion.token_ids)
        assert free.logprobs is not None
        assert stopped.logprobs == free.logprobs[: len(stopped.token_ids)]
        assert any(completion.finish_reason.value == "stop" for completion in many)

    def test_tokens_have_their_bytes(self) -> None:
        """Those of the answer, put together, are its text."""
        completion = run([request(0, ignore_eos=True)])[0]

        assert completion.logprobs is not None
        data = b"".join(entry.data for entry in completion.logprobs)
        assert data.decode("utf-8", "replace") == completion.text
        assert all(isinstance(t, TokenLogprob) for e in completion.logprobs for t in e.top)
        for likely in (t for e in completion.logprobs for t in e.top if t.token_id >= FIRST_BYTE):
            assert likely.data == bytes([likely.token_id - FIRST_BYTE])

    def test_a_control_token_has_its_name(self, tiny_model: Path) -> None:
        """Among the likeliest, the end of an answer can be told from the others."""
        backend = LlamaBackend(str(tiny_model))
        row = request(0, "the", logit_bias={2: 1e9}, ignore_eos=True, max_tokens=2)
        completion = finish(engine(backend), [row])[0]
        backend.close()

        assert completion.text == ""
        assert completion.logprobs is not None
        assert [entry.data for entry in completion.logprobs] == [b"</s>", b"</s>"]

    def test_preempted_rows_have_the_same(self) -> None:
        """A pool too small for all rows makes some be recomputed; nothing is lost or doubled."""
        rows = [request(i, f"row {i}", max_tokens=90, ignore_eos=True) for i in range(6)]
        unified = {"kv_layout": KVLayout.UNIFIED, "kv_cells": 256, "parallel": 6}
        small = engine(**unified)
        done = finish(small, rows)

        assert small.lanes[0]._opened.num_preempted > 0
        assert [done[i].logprobs for i in range(6)] == [c.logprobs for c in run(rows)]

    def test_rows_that_are_begun_anew_have_the_same(self) -> None:
        """After a failed computation logprobs begin anew with the answer."""
        rows = [request(i, f"row {i}", temperature=0.9, seed=4) for i in range(5)]
        backend = FailingBackend(at=4)
        done = finish(engine(backend), rows)

        assert backend.failed
        assert [done[i].logprobs for i in range(5)] == [c.logprobs for c in run(rows)]


class FailingBackend(FakeBackend):
    """Fails one computation after its tokens were sampled."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self._at, self.failed = at, False

    def forward(self, plan: StepPlan, sample: Sample) -> list[int | None]:
        found = super().forward(plan, sample)
        if self.num_calls == self._at:
            self.failed = True  # the rows' logprobs of this step are noted already
            raise DecodeError("out of memory", -2)
        return found
