"""Drawing the tokens of many rows together: as each row alone, and as the definitions say."""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localbatch import Request, SamplingParams
from localbatch.engine.sampling import _weights, distribution, sample, sample_row, uniform
from localbatch.engine.sampling_top import MOST, rank
from localbatch.scheduler.plan import PlanRow
from localbatch.scheduler.sequence import Sequence

Floats = npt.NDArray[np.float32]

SIZES = st.sampled_from([1, 2, 63, 300, 1023, 1025, 2048, 2051, 4099, 65_539])
"""Vocabularies: smaller than k, of one block, multiples of a block's length and not."""

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.1, 0.8, 3.0]),
    top_k=st.sampled_from([0, 1, 2, 40, MOST, MOST + 1, 100_000]),
    top_p=st.sampled_from([1.0, 0.95, 0.3]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    seed=st.integers(0, 5),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5]),
    logit_bias=st.sampled_from([{}, {}, {0: 3.0}]),
)


@st.composite
def batches(draw: st.DrawFn, min_rows: int = 1) -> tuple[list[PlanRow], Floats]:
    """Rows and their logits: spread or close, tied, many or all of them -inf, broken."""
    params = draw(st.lists(PARAMS, min_size=min_rows, max_size=6))
    size = draw(SIZES)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    logits = rng.standard_normal((len(params), size)) * draw(st.sampled_from([0.01, 1.0, 5.0]))
    for i in range(len(params)):
        match draw(st.sampled_from(["plain", "ties", "banned", "equal", "ascending", "broken"])):
            case "ties":
                logits[i] = np.round(logits[i])
            case "banned":
                logits[i, rng.random(size) < draw(st.sampled_from([0.5, 0.999, 1.0]))] = -np.inf
            case "equal":
                logits[i] = draw(st.sampled_from([0.0, -0.0, -7.5]))
            case "ascending":
                logits[i].sort()
            case "broken":
                logits[i, rng.integers(size)] = draw(st.sampled_from([np.nan, np.inf]))
    rows = [plan_row(p, row_id=f"r{i}") for i, p in enumerate(params)]
    return rows, logits.astype(np.float32)


def plan_row(params: SamplingParams, row_id: str = "r") -> PlanRow:
    sequence = Sequence(Request(row_id, 0, prompt="x", params=params), [0])
    return PlanRow(sequence, 0, 0, 1, wants_logits=True, is_prefill=True)


def by_definition(sequence: Sequence, logits: Floats) -> tuple[int, bool]:
    """Return a row's token, and whether it hangs on the last bits of a sum or a product.

    Top-k, top-p, min-p and temperature as their authors define them, one token after the other in
    float64; the token is where the row's number falls among the weights, likeliest first.
    """
    params = sequence.request.params
    finite = [(value, t) for t, value in enumerate(logits.tolist()) if value > -math.inf]
    ranked = sorted(finite, key=lambda pair: (-pair[0], pair[1]))[: params.top_k or None]
    best = ranked[0][0]
    shares = [math.exp(value - best) for value, _ in ranked]
    whole = math.fsum(shares)
    reached = [total / whole for total in accumulate(shares)]
    is_close = params.top_p < 1 and any(abs(r - params.top_p) < 1e-9 for r in reached)
    if params.top_p < 1:
        ranked = ranked[: sum(r < params.top_p for r in reached) + 1]
    kept = [(v, t) for v, t in ranked if v == best or math.exp(v - best) >= params.min_p]
    is_close = is_close or any(
        abs(math.exp(v - best) - params.min_p) < 1e-9 < best - v for v, _ in ranked
    )
    sums = list(accumulate(math.exp((value - best) / params.temperature) for value, _ in kept))
    number = uniform(params.seed, sequence.request.id, sequence.num_generated) * sums[-1]
    is_close = is_close or any(abs(s - number) < 1e-9 * sums[-1] for s in sums)
    return kept[min(bisect_right(sums, number), len(kept) - 1)][1], is_close


class TestTogether:
    @given(batches(min_rows=2))
    def test_a_rows_token_does_not_hang_on_the_rows_beside_it(
        self, batch: tuple[list[PlanRow], Floats]
    ) -> None:
        """Alone, in any order and in any part of the batch it is the same."""
        rows, logits = batch

        together = sample(rows, logits)

        assert together == [sample([r], logits[i : i + 1])[0] for i, r in enumerate(rows)]
        assert together == [sample_row(r.sequence, logits[i]) for i, r in enumerate(rows)]
        assert together[::-1] == sample(rows[::-1], logits[::-1])
        assert together[1:] == sample(rows[1:], logits[1:])

    @settings(max_examples=50)
    @given(batches())
    def test_tokens_are_those_of_the_definitions(self, batch: tuple[list[PlanRow], Floats]) -> None:
        """For settings that leave the logits as they are, where these are sound."""
        rows, logits = batch

        tokens = sample(rows, logits)

        for row, values, token in zip(rows, logits, tokens, strict=True):
            params = row.sequence.request.params
            if params.changes_logits or not params.temperature or not np.isfinite(values.max()):
                continue
            expected, is_close = by_definition(row.sequence, values)
            assert token == expected or is_close

    @pytest.mark.parametrize("top_k", [0, 40])
    @pytest.mark.parametrize("values", [[-math.inf] * 4, [0, math.nan, 1, 1], [0, math.inf, 1, 1]])
    def test_a_row_without_a_distribution_costs_no_other_its_token(
        self, values: list[float], top_k: int
    ) -> None:
        """Its token is the argmax (with NaN: the NaN's), and beside it one is drawn as ever."""
        logits = np.array([values, [0, -math.inf, -math.inf, -math.inf]], np.float32)
        params = SamplingParams(temperature=1.0, top_k=top_k)

        tokens = sample([plan_row(params), plan_row(params)], logits)

        assert tokens == [int(np.argmax(logits[0])), 0]

    def test_a_tail_longer_than_the_weights_precision_does_not_change_the_draw(self) -> None:
        """Weights of 0 behind a row's last are never drawn, even where its number is near 1."""
        params = [SamplingParams(temperature=1.0, top_k=k, top_p=1.0, min_p=0.0) for k in (1, 200)]
        logits = np.zeros((2, 5000), np.float32)
        logits[0, 4321] = 1.0

        for i in range(200):
            assert sample([plan_row(p, f"r{i}") for p in params], logits)[0] == 4321


class TestSums:
    def test_top_p_cuts_at_sums_that_add_up_one_by_one(self) -> None:
        """A `top_p` of exactly the sum of the first j shares keeps j, whatever a row is padded to.

        Sums in another order differ in the last bit for some j, and keep one token more or less.
        """
        logits = np.random.default_rng(1).standard_normal((2, 3000)).astype(np.float32)
        values = np.sort(logits[0])[::-1][:100].astype(np.float64)
        shares = np.exp(values - values[0])
        total = list(accumulate(shares.tolist()))[-1]
        sums = list(accumulate((shares / total).tolist()))
        open_settings = {"temperature": 1.0, "min_p": 0.0}
        beside = SamplingParams(top_k=MOST, top_p=0.5, **open_settings)

        for kept, top_p in enumerate(sums[:-1], start=1):
            params = SamplingParams(top_k=100, top_p=top_p, **open_settings)
            alone = _weights(rank(logits[:1], np.array([100])), [params])
            padded = _weights(rank(logits, np.array([100, MOST])), [params, beside])
            assert alone[0].tolist() == [kept] == padded[0][:1].tolist()
            assert (padded[1][0, :100] == alone[1][0]).all()


class TestRank:
    @given(batches(), st.data())
    def test_is_a_sort_of_the_whole_vocabulary(
        self, batch: tuple[list[PlanRow], Floats], data: Any
    ) -> None:
        """By falling logit, then rising id, cut at k and before the first -inf."""
        _, logits = batch
        most = [data.draw(st.sampled_from([1, 2, 40, MOST])) for _ in logits]

        ranked = rank(logits, np.array(most))

        for i, row in enumerate(logits.tolist()):
            is_sound = all(value < math.inf for value in row) and max(row) > -math.inf
            finite = [t for t, value in enumerate(row) if value > -math.inf] if is_sound else []
            expected = sorted(finite, key=lambda t: (-row[t], t))[: most[i]]
            assert ranked.tokens[i, : ranked.counts[i]].tolist() == expected
            above = [row[expected[0]] - row[t] for t in expected]
            assert (-ranked.values[i, : ranked.counts[i]]).tolist() == above
            assert (ranked.values[i, ranked.counts[i] :] == -np.inf).all()

    def test_equal_logits_all_over_a_large_vocabulary_keep_the_lowest_ids(self) -> None:
        """However many blocks reach the bound, and also beside a row of other logits."""
        logits = np.zeros((2, 40_000), np.float32)
        logits[1] = np.arange(40_000)

        ranked = rank(logits, np.array([3, 2]))

        assert ranked.tokens.tolist() == [[0, 1, 2], [39_999, 39_998, 0]]
        assert ranked.counts.tolist() == [3, 2]


class TestDistribution:
    @given(batches())
    def test_weights_have_no_nan(self, batch: tuple[list[PlanRow], Floats]) -> None:
        """The likeliest has 1, and none more; a row without a distribution has none at all."""
        rows, logits = batch
        for row, values in zip(rows, logits, strict=True):
            if row.sequence.request.params.temperature == 0.0:
                continue
            _, weights = distribution(values, row.sequence.request.params)
            if np.isfinite(values.max()):
                assert weights[0] == 1.0
            assert ((weights >= 0.0) & (weights <= 1.0)).all()
