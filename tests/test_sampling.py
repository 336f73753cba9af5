"""Choosing tokens: against a plain reference, hand calculations and llama.cpp's own samplers."""

from __future__ import annotations

import ctypes
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localbatch import Request, SamplingParams
from localbatch.engine.sampling import adjusted, distribution, sample, sample_row, uniform
from localbatch.scheduler.plan import PlanRow
from localbatch.scheduler.sequence import Sequence

LOGITS = st.lists(
    st.one_of(st.integers(-40, 40), st.floats(-40, 40, width=32), st.just(-math.inf)),
    min_size=2, max_size=60,
).filter(lambda values: max(values) > -math.inf)  # fmt: skip


def reference(logits: list[float], params: SamplingParams) -> dict[int, float]:
    """Return each token's probability: llama.cpp's steps, written out over the whole vocabulary."""
    ranked = sorted(
        ((value, -token) for token, value in enumerate(logits) if value > -math.inf), reverse=True
    )
    if params.top_k:
        ranked = ranked[: params.top_k]
    best = ranked[0][0]
    shares = [math.exp(value - best) for value, _ in ranked]
    total, running, kept = sum(shares), 0.0, 0
    for share in shares:
        kept += 1
        running += share / total
        if params.top_p < 1 and running >= params.top_p:
            break
    ranked = [
        pair for pair in ranked[:kept]
        if params.min_p == 0 or math.exp(pair[0] - best) >= params.min_p
    ]  # fmt: skip
    weights = {-token: math.exp((value - best) / params.temperature) for value, token in ranked}
    return {token: weight / sum(weights.values()) for token, weight in weights.items()}


@given(
    LOGITS,
    st.integers(0, 70),
    st.sampled_from([1.0, 0.95, 0.5, 0.013]),
    st.sampled_from([0.0, 0.05, 0.3]),
    st.sampled_from([0.1, 0.7, 1.0, 3.0]),
)
def test_distribution_is_that_of_the_steps_written_out(
    logits: list[float], top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    """Ties, far-apart logits, -inf and k beyond the vocabulary included."""
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    values = np.array(logits, np.float32)

    tokens, weights = distribution(values, params)
    found = dict(zip(tokens.tolist(), (weights / weights.sum()).tolist(), strict=True))
    expected = reference([float(v) for v in values], params)

    # A sum that reaches top_p, or a share that reaches min_p, only by rounding may go either way.
    assert len(expected.keys() ^ found.keys()) <= 1
    if expected.keys() == found.keys():
        assert expected == pytest.approx(found)


def row(params: SamplingParams, tokens: list[int], row_id: str | int = 0) -> Sequence:
    return Sequence(Request(row_id, 0, prompt="x", params=params), tokens)


def plan_row(sequence: Sequence) -> PlanRow:
    return PlanRow(sequence, 0, 0, sequence.num_tokens, wants_logits=True, is_prefill=True)


def test_greedy_rows_take_the_largest_logit_and_the_first_of_equals() -> None:
    """A whole batch of greedy rows is one argmax."""
    logits = np.array([[0, 3, 1], [5, 5, 1]], np.float32)
    rows = [plan_row(row(SamplingParams(), [1])) for _ in range(2)]

    assert sample(rows, logits) == [1, 0]


def test_draws_follow_the_weights() -> None:
    """Of 4,000 draws with p = 0.25 between 890 and 1,110: false alarm below 1 in 10,000."""
    params = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=3)
    logits = np.log(np.array([0.25, 0.5, 0.25], np.float32))
    drawn = [sample_row(row(params, [1], row_id), logits) for row_id in range(4000)]

    assert 890 < drawn.count(0) < 1110
    assert 1876 < drawn.count(1) < 2124


def test_a_draw_is_the_same_alone_and_among_others() -> None:
    """Neighbours do not touch a row's random stream."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((3, 500)).astype(np.float32)
    params = SamplingParams(temperature=1.5, seed=9)
    rows = [row(params, [1, 2, 3], f"r{i}") for i in range(3)]

    together = sample([plan_row(r) for r in rows], logits)
    alone = [sample([plan_row(r)], logits[i : i + 1])[0] for i, r in enumerate(rows)]

    assert alone == together


@given(st.integers(0, 2**64 - 1), st.one_of(st.integers(), st.text()), st.integers(0, 10**6))
def test_random_numbers_lie_in_the_unit_interval(seed: int, row_id: int | str, step: int) -> None:
    """They are at least 0 and below 1, for any seed, id and step."""
    assert 0.0 <= uniform(seed, row_id, step) < 1.0


def test_random_numbers_depend_on_seed_id_and_step() -> None:
    """Each of the three changes the number, and nothing else does."""
    base = uniform(1, "a", 0)

    assert base == uniform(1, "a", 0)
    assert len({base, uniform(2, "a", 0), uniform(1, "b", 0), uniform(1, "a", 1)}) == 4


def test_biases_and_penalties_by_hand() -> None:
    """3 seen twice: 4/2 - 2*0.25 - 0.5 = 1; 1 seen once: -2*2 - 0.25 - 0.5 = -4.75; 0: 1 + 2."""
    params = SamplingParams(
        repeat_penalty=2.0, frequency_penalty=0.25, presence_penalty=0.5, logit_bias={"0": 2}
    )
    logits = np.array([1.0, -2.0, 7.0, 4.0], np.float32)

    assert adjusted(logits, [3, 1, 3], params).tolist() == [3.0, -4.75, 7.0, 1.0]
    assert logits.tolist() == [1.0, -2.0, 7.0, 4.0]


@given(
    st.lists(st.integers(0, 15), min_size=1, max_size=30),
    st.sampled_from([-1, 0, 1, 5, 64]),
    st.sampled_from([1.0, 1.3, 0.8]),
    st.sampled_from([0.0, 0.4]),
    st.sampled_from([0.0, -0.3]),
)
def test_penalties_are_those_of_llama_cpp(
    tokens: list[int], last_n: int, repeat: float, frequency: float, presence: float
) -> None:
    """The same logits as from `llama_sampler_init_penalties` fed the same tokens."""
    from llama_cpp import llama_cpp as lib

    logits = np.linspace(-3, 3, 16).astype(np.float32)
    params = SamplingParams(
        repeat_penalty=repeat, frequency_penalty=frequency, presence_penalty=presence,
        penalty_last_n=last_n,
    )  # fmt: skip
    window = len(tokens) if last_n < 0 else last_n
    sampler = lib.llama_sampler_init_penalties(16, window, repeat, frequency, presence)
    for token in tokens:
        lib.llama_sampler_accept(sampler, token)
    data = (lib.llama_token_data * 16)(
        *(lib.llama_token_data(i, float(logits[i]), 0.0) for i in range(16))
    )
    array = lib.llama_token_data_array(data, 16, -1, False)
    lib.llama_sampler_apply(sampler, ctypes.byref(array))
    lib.llama_sampler_free(sampler)
    expected = [data[i].logit for i in range(16)]

    found = adjusted(logits, tokens, params) if params.penalizes else logits
    assert expected == pytest.approx(found.tolist(), rel=1e-6, abs=1e-6)
