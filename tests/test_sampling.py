"""Choosing tokens: against a plain reference, hand calculations and llama.cpp's own samplers."""

from __future__ import annotations

import ctypes
import math
import subprocess
import sys
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from llama_cpp import llama_cpp as lib

from localbatch import Request, SamplingParams
from localbatch.engine.sampling import adjusted, distribution, sample, sample_row, uniform
from localbatch.scheduler.plan import PlanRow
from localbatch.scheduler.sequence import Sequence

Floats = npt.NDArray[np.float32]

LOGITS = st.lists(
    st.one_of(st.integers(-40, 40), st.floats(-40, 40, width=32), st.just(-math.inf)),
    min_size=2, max_size=60,
).filter(lambda values: max(values) > -math.inf)  # fmt: skip
TOP_K = st.integers(0, 70)
TOP_P = st.sampled_from([1.0, 0.95, 0.5, 0.013])
MIN_P = st.sampled_from([0.0, 0.05, 0.3, 1.0])
TEMPERATURE = st.sampled_from([0.1, 0.7, 1.0, 3.0])

OPEN = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
"""All tokens are kept."""


def params_of(**settings: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, **OPEN, **settings})


def row(params: SamplingParams, tokens: list[int] | None = None, row_id: str | int = 0) -> Sequence:
    return Sequence(Request(row_id, 0, prompt="x", params=params), tokens or [1])


def plan_row(sequence: Sequence) -> PlanRow:
    return PlanRow(sequence, 0, 0, sequence.num_tokens, wants_logits=True, is_prefill=True)


def kept(logits: list[float], **settings: Any) -> list[int]:
    return distribution(np.array(logits, np.float32), params_of(**settings))[0].tolist()


def reference(logits: list[float], params: SamplingParams) -> tuple[dict[int, float], bool]:
    """Return each token's probability, and whether it hangs on the last bit of a comparison.

    llama.cpp's steps, written out over the whole vocabulary in float64.
    """
    ranked = sorted(
        ((value, -token) for token, value in enumerate(logits) if value > -math.inf), reverse=True
    )
    if params.top_k:
        ranked = ranked[: params.top_k]
    best = ranked[0][0]
    shares = [math.exp(value - best) for value, _ in ranked]
    total, running, close = sum(shares), 0.0, False
    if params.top_p < 1:
        for place, share in enumerate(shares):
            running += share / total
            close = close or abs(running - params.top_p) < 1e-9
            if running >= params.top_p:
                ranked = ranked[: place + 1]
                break
    # Equals of the best are no close call: their share is 1, whatever `exp` makes of it.
    others = [math.exp(value - best) for value, _ in ranked if value != best]
    close = close or any(abs(share - params.min_p) < 1e-9 for share in others)
    ranked = [pair for pair in ranked if math.exp(pair[0] - best) >= params.min_p]
    weights = {-token: math.exp((value - best) / params.temperature) for value, token in ranked}
    return {token: weight / sum(weights.values()) for token, weight in weights.items()}, close


class TestDistribution:
    @given(LOGITS, TOP_K, TOP_P, MIN_P, TEMPERATURE)
    @example([0.0, -13.0, -14.0, -30.0], 2, 1.0, 0.0, 1.0)
    @example([5.0, -math.inf, -math.inf], 2, 1.0, 0.0, 1.0)
    def test_is_that_of_the_steps_written_out(
        self, logits: list[float], top_k: int, top_p: float, min_p: float, temperature: float
    ) -> None:
        """Ties, far-apart logits, -inf and k beyond the vocabulary included."""
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        values = np.array(logits, np.float32)
        expected, close = reference([float(v) for v in values], params)
        assume(not close)

        tokens, weights = distribution(values, params)
        found = dict(zip(tokens.tolist(), (weights / weights.sum()).tolist(), strict=True))

        assert expected.keys() == found.keys()
        assert expected == pytest.approx(found)

    @given(LOGITS, st.integers(1, 70), TOP_P, MIN_P, TEMPERATURE)
    def test_is_that_of_llama_cpps_own_samplers(
        self, logits: list[float], top_k: int, top_p: float, min_p: float, temperature: float
    ) -> None:
        """The same logits survive `top_k`, `top_p`, `min_p` and `temp`, with the same values.

        Tokens are not compared: which of equal ones survive a cut is llama.cpp's own choice.
        """
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        values = np.array(logits, np.float32)
        finite = values[values > -np.inf]
        _, close = reference([float(v) for v in finite], params)
        assume(not close and _is_clear_in_float32(finite, params))

        _, weights = distribution(values, params)
        survived = sorted(
            apply_samplers(
                finite,
                lib.llama_sampler_init_top_k(top_k),
                lib.llama_sampler_init_top_p(top_p, 1),
                lib.llama_sampler_init_min_p(min_p, 1),
                lib.llama_sampler_init_temp(temperature),
            ).values(),
            reverse=True,
        )

        expected = [math.exp(value - survived[0]) for value in survived]
        assert expected == pytest.approx(weights.tolist(), rel=1e-4, abs=1e-30)

    def test_equal_logits_at_the_cut_of_top_k_keep_the_lowest_ids(self) -> None:
        """Of four equal tokens behind the best, k=3 keeps the first two."""
        assert kept([1, 2, 1, 1, 1], top_k=3) == [1, 0, 2]

    def test_equal_logits_come_in_the_order_of_their_ids(self) -> None:
        """Also in a large vocabulary, where an unstable sort would mix them."""
        assert kept([float(i % 2) for i in range(1000)]) == [
            *range(1, 1000, 2), *range(0, 1000, 2)
        ]  # fmt: skip

    def test_top_p_is_reached_by_the_token_that_reaches_it_exactly(self) -> None:
        """Four tokens of a quarter: a half is reached by the second, just above it by the third."""
        assert kept([0, 0, 0, 0], top_p=0.5) == [0, 1]
        assert kept([0, 0, 0, 0], top_p=0.5000001) == [0, 1, 2]
        assert kept([0, 0, 0, 0], top_p=0.25) == [0]

    def test_top_p_counts_what_top_k_left(self) -> None:
        """Of ten equal tokens two are left, and the first is a half of them."""
        assert kept([0] * 10, top_k=2, top_p=0.5) == [0]

    def test_top_p_comes_before_the_temperature(self) -> None:
        """A share of 0.95 at temperature 1 is enough, however flat temperature 50 is."""
        logits = [3.0, 0.0]  # shares 0.953 and 0.047; at temperature 50 0.515 and 0.485

        assert kept(logits, top_p=0.9, temperature=50.0) == [0]
        assert kept(logits, min_p=0.1, temperature=50.0) == [0]

    def test_min_p_of_one_keeps_the_best_and_its_equals(self) -> None:
        """A share of exactly `min_p` is enough."""
        assert kept([2, 1, 2, 0], min_p=1.0) == [0, 2]

    def test_min_p_is_a_share_of_the_best_token(self) -> None:
        """Shares of the best: 1, 0.61, 0.37, 0.22 (exp of the differences)."""
        assert kept([0, -0.5, -1, -1.5], min_p=0.3) == [0, 1, 2]


def _is_clear_in_float32(logits: Floats, params: SamplingParams) -> bool:
    """Say whether float32 sums can't land on the other side of `top_p` or `min_p`."""
    best = np.sort(logits.astype(np.float64))[::-1][: params.top_k]
    shares = np.exp(best - best[0])
    sums = np.cumsum(shares) / shares.sum()
    # An equal of the best is kept by min_p=1 in float32 as well: log(1) is 0.
    shares = shares[best != best[0]]
    return bool(
        (params.top_p == 1 or (abs(sums - params.top_p) > 1e-4).all())
        and (params.min_p == 0 or (abs(shares - params.min_p) > 1e-4 * params.min_p).all())
    )


def apply_samplers(logits: Floats, *samplers: Any) -> dict[int, float]:
    """Return token and logit of what llama.cpp's samplers leave; frees them."""
    size = len(logits)
    data = (lib.llama_token_data * size)(
        *(lib.llama_token_data(i, float(logits[i]), 0.0) for i in range(size))
    )
    array = lib.llama_token_data_array(data, size, -1, False)
    for sampler in samplers:
        lib.llama_sampler_apply(sampler, ctypes.byref(array))
        lib.llama_sampler_free(sampler)
    return {array.data[i].id: array.data[i].logit for i in range(array.size)}


class TestAdjusted:
    def test_biases_and_penalties_by_hand(self) -> None:
        """3 seen twice: 4/2 - 2*0.25 - 0.5 = 1; 1 once: -2*2 - 0.25 - 0.5 = -4.75; 0: 1 + 2."""
        params = SamplingParams(
            repeat_penalty=2.0, frequency_penalty=0.25, presence_penalty=0.5, logit_bias={"0": 2}
        )
        logits = np.array([1.0, -2.0, 7.0, 4.0], np.float32)

        assert adjusted(logits, [3, 1, 3], params).tolist() == [3.0, -4.75, 7.0, 1.0]
        assert logits.tolist() == [1.0, -2.0, 7.0, 4.0]

    def test_bias_comes_before_the_penalties(self) -> None:
        """(1 + 3) / 2 = 2; the other order would give 1/2 + 3."""
        params = SamplingParams(repeat_penalty=2.0, logit_bias={0: 3.0})

        assert adjusted(np.array([1.0, 0.0], np.float32), [0], params).tolist() == [2.0, 0.0]

    def test_biases_of_tokens_outside_of_the_vocabulary_are_idle(self) -> None:
        """A model with fewer tokens than the row thinks is no error."""
        params = SamplingParams(logit_bias={0: 1.0, 2: 5.0, 10**9: 5.0})

        assert adjusted(np.zeros(2, np.float32), [0], params).tolist() == [1.0, 0.0]

    @pytest.mark.parametrize(
        ("last_n", "expected"), [(2, [4, 4, 1]), (3, [4, 1, 1]), (-1, [1] * 3)]
    )
    def test_only_the_latest_tokens_count(self, last_n: int, expected: list[float]) -> None:
        """Of tokens 0, 1, 2, 2 the last two are 2 and 2, the last three reach 1, all reach 0."""
        params = SamplingParams(presence_penalty=3.0, penalty_last_n=last_n)

        assert adjusted(np.full(3, 4.0, np.float32), [0, 1, 2, 2], params).tolist() == expected

    @given(
        st.lists(st.floats(-20, 20, width=32), min_size=16, max_size=16),
        st.lists(st.integers(0, 15), min_size=1, max_size=30),
        st.sampled_from([-1, 1, 5, 64]),
        st.sampled_from([1.0, 1.3, 0.8]),
        st.sampled_from([0.0, 0.4]),
        st.sampled_from([0.0, -0.3]),
    )
    def test_penalties_are_those_of_llama_cpp(
        self,
        logits: list[float],
        tokens: list[int],
        last_n: int,
        repeat: float,
        frequency: float,
        presence: float,
    ) -> None:
        """The same logits as from `llama_sampler_init_penalties` fed the same tokens."""
        values = np.array(logits, np.float32)
        params = SamplingParams(
            repeat_penalty=repeat, frequency_penalty=frequency, presence_penalty=presence,
            penalty_last_n=last_n,
        )  # fmt: skip
        assume(params.penalizes)
        window = len(tokens) if last_n < 0 else last_n
        sampler = lib.llama_sampler_init_penalties(16, window, repeat, frequency, presence)
        for token in tokens:
            lib.llama_sampler_accept(sampler, token)
        expected = apply_samplers(values, sampler)

        found = adjusted(values, tokens, params).tolist()

        assert [expected[i] for i in range(16)] == pytest.approx(found, rel=1e-6, abs=1e-6)


class TestSample:
    def test_greedy_rows_take_the_largest_logit_and_the_first_of_equals(self) -> None:
        """A whole batch of greedy rows is one argmax."""
        logits = np.array([[0, 3, 1], [5, 5, 1]], np.float32)
        rows = [plan_row(row(SamplingParams())) for _ in range(2)]

        assert sample(rows, logits) == [1, 0]

    def test_greedy_rows_heed_penalties_and_biases(self) -> None:
        """4 - 3 is less than 2; a banned token is never the largest."""
        logits = np.array([[1, 2, 4]] * 2, np.float32)
        rows = [
            plan_row(row(SamplingParams(presence_penalty=3.0), [2])),
            plan_row(row(SamplingParams(logit_bias={2: -math.inf}), [0])),
        ]

        assert sample(rows, logits) == [1, 1]

    def test_each_row_is_sampled_by_its_own_settings(self) -> None:
        """Greedy, drawn and banned rows in one batch, each on its own logits."""
        never = -math.inf
        logits = np.array([[1, 2, 3], [never, 0, never], [3, 2, 1]], np.float32)
        rows = [
            plan_row(row(SamplingParams())),
            plan_row(row(params_of(temperature=2.0))),
            plan_row(row(params_of(top_k=1, logit_bias={0: never}))),
        ]

        assert sample(rows, logits) == [2, 1, 1]

    @pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"top_k": 0}, {"top_k": 5}])
    def test_a_row_that_bans_every_token_still_gets_one(self, settings: dict[str, Any]) -> None:
        """Its mistake ends neither the step nor the run."""
        banned = dict.fromkeys(range(4), -math.inf)
        params = params_of(logit_bias=banned, **settings)

        assert sample_row(row(params), np.zeros(4, np.float32)) in banned

    def test_draws_follow_the_weights(self) -> None:
        """Chi-square of 20,000 draws over 8 tokens is below 29.9.

        With other seeds that would fail once in 10,000 (7 degrees of freedom).
        """
        logits = np.array([0.5, -1.0, 2.0, 0.0, 1.5, -0.3, 0.9, -2.0], np.float32)
        params = params_of(temperature=0.8, seed=3)
        weights = [math.exp(float(value) / 0.8) for value in logits]
        expected = [20_000 * weight / sum(weights) for weight in weights]

        drawn = Counter(sample_row(row(params, row_id=i), logits) for i in range(20_000))

        assert sum((drawn[t] - e) ** 2 / e for t, e in enumerate(expected)) < 29.9

    def test_a_draw_is_the_same_alone_and_among_others(self) -> None:
        """Neighbours do not touch a row's random stream."""
        logits = np.random.default_rng(0).standard_normal((6, 500)).astype(np.float32)
        settings = [params_of(temperature=1.5, seed=9), params_of(top_k=50), SamplingParams()] * 2
        rows = [row(p, [1, 2, 3], f"r{i}") for i, p in enumerate(settings)]

        together = sample([plan_row(r) for r in rows], logits)
        alone = [sample([plan_row(r)], logits[i : i + 1])[0] for i, r in enumerate(rows)]
        backwards = sample([plan_row(r) for r in reversed(rows)], logits[::-1])

        assert alone == together == backwards[::-1]

    def test_a_draw_hangs_on_generated_tokens_not_on_the_prompt(self) -> None:
        """Prompts of any length draw alike; each token generated draws anew."""
        logits = np.zeros(100_000, np.float32)  # so that two draws hardly ever agree
        one, other = row(params_of(), [5]), row(params_of(), [5, 6, 7, 8])
        first = sample_row(one, logits)

        assert first == sample_row(other, logits)
        one.tokens.append(9)
        assert first != sample_row(one, logits)


class TestUniform:
    @given(st.integers(0, 2**64 - 1), st.one_of(st.integers(), st.text()), st.integers(0, 10**6))
    def test_lies_in_the_unit_interval(self, seed: int, row_id: int | str, step: int) -> None:
        """At least 0 and below 1, for any seed, id and step."""
        assert 0.0 <= uniform(seed, row_id, step) < 1.0

    def test_hangs_on_seed_id_and_step(self) -> None:
        """Each of the three changes the number."""
        keys = [(1, "a", 0), (2, "a", 0), (1, "b", 0), (1, "a", 1), (1, "a0", 0), (11, "a", 0)]

        assert len({uniform(*key) for key in keys}) == len(keys)

    def test_is_the_same_for_ever(self) -> None:
        """The number behind a seed, an id, a step and an answer must not change with a version.

        The high 53 bits of the little-endian digests that coreutils print:
        `printf '0\\0row-1\\0000' | b2sum -l 64`, `printf '7\\0003\\00012' | b2sum -l 64`, and
        for a row's second answer `printf '0\\0row-1\\0000\\0001' | b2sum -l 64`.
        """
        digests = {
            (0, "row-1", 0): "382141a6596c65d2",
            (7, 3, 12): "008e6f3807a90fc1",
            (0, "row-1", 0, 1): "ce38834aed2b3820",
        }

        for key, digest in digests.items():
            number = int.from_bytes(bytes.fromhex(digest), "little")
            assert uniform(*key) == (number >> 11) / 2**53

    def test_is_the_same_in_another_process(self) -> None:
        """Python's own hash of strings, which changes from process to process, has no part."""
        code = "from localbatch.engine.sampling import uniform; print(uniform(5, 'some id', 6))"
        child = subprocess.run(
            [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {code}"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip

        assert float(child.stdout) == uniform(5, "some id", 6)

    def test_successive_numbers_of_a_row_are_spread_evenly_and_independent(self) -> None:
        """Chi-square of 20,000 successive pairs over 10 x 10 fields is below 161.

        With another seed that would fail once in 10,000 (99 degrees of freedom).
        """
        numbers = [uniform(1, "row", step) for step in range(40_000)]
        fields = Counter((int(a * 10), int(b * 10)) for a, b in zip(*[iter(numbers)] * 2))  # noqa: B905
        expected = 20_000 / 100

        found = sum((fields[a, b] - expected) ** 2 for a in range(10) for b in range(10))

        assert found / expected < 161
