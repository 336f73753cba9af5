"""The comparison's modes and figures, on a scripted backend whose computations take known times.

Every computation takes one second of a made-up clock, and nothing else takes any. All times in the
expectations are worked out by hand from that.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from localbatch.cli import main
from localbatch.compare import comparison
from localbatch.compare.bench import Bench
from localbatch.compare.comparison import CompareConfig, compare, mode_report, tasks_of
from localbatch.compare.figures import (
    Agreement,
    Difference,
    agreement,
    decode_calls,
    figures,
    gaps,
    percentiles,
)
from localbatch.compare.gpu import GpuReading, parse_gpus
from localbatch.compare.margins import Fork, MarginTask, margins
from localbatch.compare.modes import MODES
from localbatch.compare.notebook import modes_table, sweep_table
from localbatch.compare.probe import Cost, Costs, ProbeTask, probe
from localbatch.compare.process import resident_bytes, run_probe, run_task
from localbatch.compare.reasons import reasons
from localbatch.compare.report import ModeReport, spread, table, text_of
from localbatch.compare.rounds import Series, run_rounds, turned
from localbatch.compare.rows import made_up
from localbatch.compare.sweep import SweepConfig, sweep
from localbatch.compare.sweep_report import sweep_text
from localbatch.compare.task import MadeUpRows, Outcome, Task, comparable, joined
from localbatch.compare.trace import Span, Step, Trace, TracedBackend, spans, step_of
from localbatch.compare.worker import measure, numbered
from localbatch.data.config import EngineConfig, KVLayout, SplitMode
from localbatch.data.errors import ConfigError, EngineError, WorkerError
from localbatch.data.request import Request
from localbatch.data.sampling_params import SamplingParams
from localbatch.engine.backend import ContextConfig, Numerics, Sample
from localbatch.engine.fake import FakeBackend
from localbatch.scheduler.plan import PlanRow, StepPlan
from localbatch.scheduler.sequence import Sequence as TokenSequence

FAKE = EngineConfig(model="fake", backend="fake")


class Clock:
    """Seconds that pass only when something takes them."""

    def __init__(self) -> None:
        self.now = 100.0
        self._lock = threading.Lock()

    def __call__(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        with self._lock:
            self.now += seconds


class Scripted(FakeBackend):
    """The fake backend; each computation takes a second, its tokens are there at the end of it."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def sibling(self) -> Scripted:
        return Scripted(self.clock)

    def forward(self, plan: StepPlan, sample: Sample) -> list[int | None]:
        if plan.rows:
            self.clock.pass_by(1.0)
        return super().forward(plan, sample)


def rows_of(*sizes: tuple[int, int]) -> tuple[Request, ...]:
    """Return rows with (bytes of the prompt, tokens of the answer); no two of 26 begin alike."""
    return tuple(
        Request(
            i, i, prompt=chr(ord("a") + i % 26) * size,
            params=SamplingParams(max_tokens=tokens, ignore_eos=True),
        )
        for i, (size, tokens) in enumerate(sizes)
    )  # fmt: skip


def measured(mode: str, rows: Sequence[Request], batch: int = 2, **config: Any) -> Outcome:
    """Run a mode on the made-up clock; its start is when the model is ready."""
    clock = Clock()
    task = Task(mode, EngineConfig(model="fake", backend="fake", **config), tuple(rows), batch)
    return measure(task, Scripted(clock), clock, clock)


ROWS = rows_of((9, 3), (5, 1), (7, 2))
"""In one after another: computations 3 + 1 + 2 = 6, the first of each gives the first token."""


class TestModes:
    def test_sequential(self) -> None:
        """Row after row: tokens at 1 2 3, 4, and 5 6 seconds; 6 seconds in all."""
        outcome = measured("sequential", ROWS)

        assert outcome.wall_s == 6
        assert outcome.token_times == {0: [1, 2, 3], 1: [4], 2: [5, 6]}
        assert (outcome.batch_rows, outcome.width) == (1, 1)

    def test_length_sorted(self) -> None:
        """The shortest prompt first: row 1 at 1, row 2 at 2 3, row 0 at 4 5 6; keyed by row."""
        outcome = measured("length-sorted", ROWS)

        assert outcome.token_times == {1: [1], 2: [2, 3], 0: [4, 5, 6]}
        assert list(outcome.tokens) == [1, 2, 0]

    def test_interleaved(self) -> None:
        """Two alive, a computation for each token of each.

        Prompts of rows 0 and 1 at 1 and 2 (row 1 has ended); prompt of row 2 at 3; then rows 0 and
        2 take turns: 4 and 5; row 0 alone: 6.
        """
        outcome = measured("interleaved", ROWS)

        assert outcome.token_times == {0: [1, 4, 6], 1: [2], 2: [3, 5]}
        assert outcome.wall_s == 6
        assert (outcome.batch_rows, outcome.width) == (1, 2)

    def test_static(self) -> None:
        """Rows 0 and 1 first, to the end of row 0; only then row 2.

        A step computes both prompts (1 s: first tokens), row 0 decodes at 2 and 3 with the place
        of row 1 idle; row 2 at 4 and 5, beside an idle place.
        """
        outcome = measured("static", ROWS)

        assert outcome.token_times == {0: [1, 2, 3], 1: [1], 2: [4, 5]}
        assert figures(outcome).idle_rows == 3
        assert figures(outcome).occupancy == 0.5

    def test_padding_of_static_groups(self) -> None:
        """Prompts of 10 and 6 tokens (with BOS) waste 4, answers of 3 and 1 tokens 2; one row 0."""
        assert measured("static", ROWS).padding_tokens == 6

    def test_static_sorted(self) -> None:
        """Groups by length: rows 1 and 2 (6 and 8 tokens, 1 and 2 out), then row 0 alone."""
        outcome = measured("static-sorted", ROWS)

        assert outcome.token_times == {1: [1], 2: [1, 2], 0: [3, 4, 5]}
        assert outcome.padding_tokens == 3

    def test_continuous(self) -> None:
        """Row 2 takes the place of row 1 at once.

        Prompts of rows 0 and 1 at 1; of row 2 at 2; rows 0 and 2 decode at 3; row 0 at 4.
        """
        outcome = measured("continuous", ROWS)

        assert outcome.token_times == {0: [1, 3, 4], 1: [1], 2: [2, 3]}
        assert (outcome.wall_s, outcome.width, outcome.lanes) == (4, 2, 1)
        assert figures(outcome).occupancy == 0.75

    def test_equal_rows_are_timed_where_they_are_computed_once(self) -> None:
        """With the automatic plan a row that asks the same has the times of the first one."""
        equal = [Request(i, i, prompt="same", params=ROWS[0].params) for i in range(3)]

        outcome = measured("continuous-auto", equal, threads=1)

        assert outcome.token_times == {0: [1, 2, 3], 1: [1, 2, 3], 2: [1, 2, 3]}

    @pytest.mark.parametrize("mode", MODES)
    def test_all_modes_have_the_same_answers(self, mode: str) -> None:
        """Of ten rows of different lengths, in every mode."""
        rows = rows_of(*[(3 + 7 * i % 11, 1 + 5 * i % 9) for i in range(10)])
        expected = measured("sequential", rows).tokens

        assert measured(mode, rows, batch=4).tokens == expected

    @given(
        st.lists(st.tuples(st.integers(1, 20), st.integers(1, 6)), min_size=1, max_size=8),
        st.sampled_from(sorted(MODES)),
        st.integers(1, 5),
    )
    def test_every_row_has_as_many_times_as_tokens(
        self, sizes: list[tuple[int, int]], mode: str, batch: int
    ) -> None:
        """Whatever the rows and the batch; and places with and without a row add up."""
        outcome = measured(mode, rows_of(*sizes), batch)
        found = figures(outcome)

        assert {i: len(t) for i, t in outcome.token_times.items()} == {
            i: size[1] for i, size in enumerate(sizes)
        }
        assert all(times == sorted(times) for times in outcome.token_times.values())
        decoded = sum(tokens - 1 for _, tokens in sizes)
        if mode != "continuous-auto":  # equal rows are computed once
            assert decoded + found.idle_rows == found.calls * outcome.batch_rows

    def test_a_row_that_is_too_long_costs_only_itself(self) -> None:
        """It has its error, in all modes; the others are answered."""
        rows = rows_of((9, 3), (60, 3))

        outcome = measured("static", rows, ctx=32)

        assert list(outcome.tokens) == [0]
        assert "61 tokens, more than the context of 32" in outcome.errors[1]

    @pytest.mark.parametrize(
        ("mode", "layout"),
        [("static", KVLayout.STREAMS), ("interleaved", KVLayout.STREAMS),
         ("continuous", KVLayout.UNIFIED)],
    )  # fmt: skip
    def test_a_batch_beyond_a_context_is_refused(self, mode: str, layout: KVLayout) -> None:
        """llama.cpp has 256 sequences in a context; these batches have one context."""
        with pytest.raises(ConfigError, match=r"batch: 300 rows .* at most 256 rows; only contin"):
            measured(mode, rows_of(*[(3, 1)] * 300), batch=300, kv_layout=layout)

    def test_continuous_batches_go_on_in_several_contexts(self) -> None:
        """252 rows at one time are one lane (four slots are for prefixes), 300 two of 150.

        One pool has no such slots, and takes 256.
        """
        many = [measured("continuous", rows_of(*[(3, 2)] * n), batch=n) for n in (252, 300)]
        pool = measured("continuous", rows_of(*[(3, 2)] * 256), 256, kv_layout=KVLayout.UNIFIED)

        assert [(outcome.lanes, outcome.width) for outcome in many] == [(1, 252), (2, 300)]
        assert (pool.lanes, pool.width) == (1, 256)

    def test_lanes_are_numbered_from_0(self) -> None:
        """Those that only measured for the plan are not counted."""
        steps = [Step(lane, 0.0, 1.0, (0,), (0,), 1, 0) for lane in (4, 2, 4)]

        assert [step.lane for step in numbered(steps)] == [1, 0, 1]

    def test_contexts_by_hand_are_not_padded(self) -> None:
        """They are what llama.cpp does by itself; only the engine's own modes pad."""
        trace = Trace()
        bench = Bench(TracedBackend(FakeBackend(), trace), trace, FAKE, ROWS, 2)
        bench.encode()

        assert not bench.open(2).may_pad

    def test_set_up_is_not_run_time(self) -> None:
        """Two computations of warming up come before the clock starts."""
        assert measured("sequential", ROWS).setup_s == 2


class TestFigures:
    OUTCOME = Outcome(
        "static", wall_s=10.0, load_s=0.5, setup_s=0.25, cpu_s=15.0, batch_rows=4,
        prompt_tokens={0: 30, 1: 20}, tokens={0: (1, 2, 3), 1: (4, 5)},
        token_times={0: [1.0, 2.0, 6.0], 1: [3.0, 5.0]},
        steps=[
            Step(0, 0.0, 1.0, (0, 1), (0, 1), 0, 50),
            Step(0, 1.0, 2.0, (0, 1), (0, 1), 2, 0),
            Step(0, 2.0, 3.0, (0,), (0,), 1, 0),
        ],
        padding_tokens=11, peak_bytes=3 << 20,
    )  # fmt: skip

    def test_rates(self) -> None:
        """2 rows, 50 and 5 tokens in 10 s; 15 s of cores in 10 s are 1.5 cores."""
        found = figures(self.OUTCOME)

        assert (found.requests_per_s, found.prompt_tokens_per_s) == (0.2, 5.0)
        assert (found.output_tokens_per_s, found.cpu_cores, found.peak_mib) == (0.5, 1.5, 3.0)

    def test_latencies(self) -> None:
        """First tokens at 1 and 3, gaps 1, 4 and 2, ends at 6 and 5.

        Halfway of 1 and 3 is 2, at 95 % 2.9; of 1, 2, 4 the middle is 2, 95 % lies at 0.9 between
        2 and 4: 3.8; of 5 and 6: 5.5 and 5.95.
        """
        found = figures(self.OUTCOME)

        assert (found.ttft_p50_s, found.ttft_p95_s) == pytest.approx((2.0, 2.9))
        assert (found.itl_p50_s, found.itl_p95_s) == pytest.approx((2.0, 3.8))
        assert (found.latency_p50_s, found.latency_p95_s) == pytest.approx((5.5, 5.95))

    def test_occupancy(self) -> None:
        """Two decode calls with 2 and 1 of 4 places: 3 of 8, 5 idle; prompts don't count."""
        found = figures(self.OUTCOME)

        assert (found.calls, found.rows_per_call) == (2, 1.5)
        assert (found.occupancy, found.idle_rows) == (3 / 8, 5)

    def test_prompts_beside_answers_take_their_places(self) -> None:
        """In one pool a call with 2 decoding rows and a prompt has 3 of 4 places taken.

        Of the 50 prompt tokens asked for, 9 + 20 were computed: the others were shared.
        """
        steps = [Step(0, 0, 1, (0,), (0,), 0, 20), Step(0, 1, 2, (2, 0, 1), (2, 0, 1), 2, 9)]
        found = figures(replace(self.OUTCOME, steps=steps))

        assert (found.occupancy, found.idle_rows) == (3 / 4, 1)
        assert (found.prompt_tokens, found.computed_prompt_tokens) == (50, 29)

    def test_rows_of_one_token_have_no_gaps(self) -> None:
        """Nothing to wait for is 0, and a batch that never decoded is full."""
        found = figures(Outcome("x", wall_s=1.0, tokens={0: (1,)}, token_times={0: [1.0]}))

        assert (found.itl_p50_s, found.itl_p95_s, found.occupancy) == (0.0, 0.0, 1.0)

    def test_helpers(self) -> None:
        """Percentiles of nothing are 0; gaps are taken row by row; prefill is no decode call."""
        assert percentiles([]) == (0.0, 0.0)
        assert gaps([[1, 3], [10], [2, 3, 7]]) == [2, 1, 4]
        assert decode_calls(self.OUTCOME.steps) == [2, 1]


class TestAgreement:
    def test_first_difference(self) -> None:
        """Row 0 alike, row 1 differs at place 1, row 2 ends early, row 3 is missing."""
        reference = {0: (1, 2), 1: (1, 2, 3), 2: (5, 6), 3: (7,)}
        other = {0: (1, 2), 1: (1, 9, 3), 2: (5,)}

        assert agreement(reference, other) == Agreement(
            1, 4, (Difference(1, 1, 2, 9), Difference(2, 1, 6, None), Difference(3, 0, 7, None))
        )

    @given(st.dictionaries(st.integers(0, 9), st.lists(st.integers(0, 3)), max_size=6))
    def test_agrees_with_itself(self, answers: dict[int, list[int]]) -> None:
        """All rows are identical to themselves."""
        assert agreement(answers, answers) == Agreement(len(answers), len(answers))

    def test_margin(self) -> None:
        """It is the difference of the two tokens' logits after what both runs have in common."""
        row = Request(0, 0, prompt="ab", params=SamplingParams(max_tokens=2, ignore_eos=True))
        seen: list[list[float]] = []

        class Listening(FakeBackend):
            def forward(self, plan: StepPlan, sample: Sample) -> list[int | None]:
                def listen(rows: Any, logits: Any) -> list[int]:
                    seen.append(logits[0].tolist())
                    return sample(rows, logits)

                return super().forward(plan, listen)

        forks = (Fork(0, (50,), 60, 61), Fork(0, (50,), None, 61))
        found = margins(Listening(), MarginTask(FAKE, (row,), forks))

        logits = seen[0]
        assert found == [logits[60] - logits[61], logits[1] - logits[61]]  # 1 ends an answer
        assert seen[0] == seen[1]


class TestTrace:
    def test_spans_join_steps_without_a_break(self) -> None:
        """A row's neighbouring steps are one span; its prompt, a break and a new slot begin one."""
        steps = [
            Step(0, 0.0, 1.0, (0,), (0,), 0, 9),
            Step(0, 1.0, 2.0, (0, 1), (0, 1), 2, 0),
            Step(0, 2.0, 3.0, (0,), (0,), 1, 0),
            Step(0, 9.0, 10.0, (0, 1), (0, 0), 2, 0),
        ]

        assert spans(steps, gap_s=0.5) == [
            Span(0, 0, 0, 0.0, 1.0, True), Span(0, 0, 0, 1.0, 3.0, False),
            Span(1, 0, 1, 1.0, 2.0, False), Span(0, 0, 0, 9.0, 10.0, False),
            Span(1, 0, 0, 9.0, 10.0, False),
        ]  # fmt: skip

    def test_prompts_of_a_step_are_timed_one_by_one(self) -> None:
        """Four prompts from 0 to 8 seconds; the backend computes the first alone, up to 3.

        Then the second, which gives no logits yet, and the third, up to 6; then the fourth.
        """
        rows = [
            PlanRow(TokenSequence(row, [1, 2]), i, 0, 2, i != 1, True)
            for i, row in enumerate(rows_of(*[(2, 1)] * 4))
        ]
        marks = [(rows[0], 3.0), (rows[2], 6.0), (rows[3], 7.9)]

        step = step_of(StepPlan(rows, [], []), 0, 0.0, 8.0, marks)

        assert step.row_times == ((0.0, 3.0), (3.0, 6.0), (3.0, 6.0), (6.0, 8.0))
        assert [(s.row, s.start_s, s.end_s) for s in spans([step], 0.5)] == [
            (0, 0.0, 3.0), (1, 3.0, 6.0), (2, 3.0, 6.0), (3, 6.0, 8.0),
        ]  # fmt: skip

    def test_a_row_that_begins_anew_is_timed_anew(self) -> None:
        """What was known of its first try is forgotten, from the token on that comes again."""
        clock = Clock()
        trace = Trace(clock)
        trace.start()
        sequence = TokenSequence(ROWS[0], [5, 6])
        for end, now in ((2, 1), (3, 2), (4, 3), (2, 5), (3, 6)):
            clock.now = 100.0 + now
            trace.note_tokens([PlanRow(sequence, 0, 0, end, True, True)])

        assert trace.token_times == {0: [5, 6]}


class TestTasks:
    def test_comparable_rows_are_greedy(self) -> None:
        """Only max_tokens and ignore_eos are kept."""
        own = SamplingParams(
            max_tokens=5, temperature=0.8, stop=("x",), n=3, logit_bias={1: 2.0}, ignore_eos=True
        )

        kept = comparable(Request("a", 4, prompt="p", params=own))

        assert (kept.id, kept.index, kept.prompt) == ("a", 4, "p")
        assert kept.params == SamplingParams(max_tokens=5, ignore_eos=True)

    def test_joined(self) -> None:
        """Rows are put together, CPU and width added, the longest time counts, lanes numbered."""
        one = Outcome(
            "m", 5.0, 1.0, 0.1, 4.0, lanes=2, threads=1, tokens={0: (1,)},
            steps=[Step(1, 0, 1, (0,), (0,), 1, 0)],
        )  # fmt: skip
        two = Outcome(
            "m", 7.0, 0.5, 0.2, 6.0, lanes=1, threads=1, tokens={1: (2,)},
            steps=[Step(0, 0, 1, (1,), (0,), 1, 0)],
        )  # fmt: skip

        whole = joined([one, two])

        assert (whole.wall_s, whole.load_s, whole.setup_s, whole.cpu_s) == (7.0, 1.0, 0.2, 10.0)
        assert (whole.width, whole.processes, whole.threads, whole.lanes) == (2, 2, 2, 3)
        assert whole.tokens == {0: (1,), 1: (2,)}
        assert [step.lane for step in whole.steps] == [1, 2]

    def test_instances_share_the_cores(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Eight cores and three processes: two threads each; never more processes than rows."""
        monkeypatch.setattr(comparison, "usable_threads", lambda: 8)
        config = CompareConfig(FAKE, rows_of(*[(3, 1)] * 5), instances=3)

        task = tasks_of(config)["multi-instance"]
        assert (task.instances, task.config.threads) == (3, 2)
        few = CompareConfig(FAKE, rows_of((3, 1), (4, 1)))
        assert tasks_of(few)["multi-instance"].instances == 2

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"requests": ()}, "no row that can be run"),
            ({"modes": ("static", "stat")}, "modes: 'stat' is not one of sequential, "),
            ({"rounds": 0}, "rounds: must be from 1 to 1000, not 0"),
            ({"instances": 513}, "instances: must be from 1 to 512, not 513"),
            ({"batch": 2000}, "batch: must be from 1 to 1024, not 2000"),
        ],
    )
    def test_bad_settings(self, settings: dict[str, Any], message: str) -> None:
        """Each is named, with what is allowed."""
        with pytest.raises(ConfigError, match=message):
            CompareConfig(**{"engine": FAKE, "requests": ROWS, **settings})

    def test_made_up_rows(self) -> None:
        """Prompts have exactly the tokens asked for; no two begin alike."""
        rows, tokenize = made_up(FakeBackend(), MadeUpRows(12, 40, 7)), FakeBackend().tokenize

        prompts = [tokenize(r.prompt or "", add_special=True, parse_special=False) for r in rows]
        assert [len(prompt) for prompt in prompts] == [40] * 12
        assert len({(row.prompt or "").split()[0] for row in rows}) == 12
        assert all(row.params.max_tokens == 7 and row.params.ignore_eos for row in rows)


def scripted_run(walls: dict[str, list[float]]) -> Callable[[Task], Outcome]:
    """Return what runs tasks in known times, one after another for each mode."""
    left = {mode: iter(times) for mode, times in walls.items()}

    def run(task: Task) -> Outcome:
        outcome = measured(task.mode, task.rows)  # type: ignore[arg-type]
        outcome.wall_s = next(left[task.mode])
        return outcome

    return run


class TestComparison:
    def test_speedup_and_efficiency(self) -> None:
        """Medians 10 and 4: 2.5 times, round by round 8/5, 10/4, 12/4; two rows alive: 125 %."""
        config = CompareConfig(FAKE, ROWS, modes=("continuous",), batch=2)
        run = scripted_run({"sequential": [8.0, 10.0, 12.0], "continuous": [5.0, 4.0, 4.0]})

        report = compare(config, run=run)

        ours = report.modes[1]
        assert ours.speedup == (2.5, 1.6, 3.0)
        assert ours.efficiency == 1.25
        assert ours.of("wall_s") == (4.0, 4.0, 5.0)
        assert ours.agreement == Agreement(3, 3)
        assert ours.sample.wall_s == 4.0

    def test_a_mode_that_fails_says_so(self) -> None:
        """It is left out with its reason, not run again, and the others go on."""
        calls: list[str] = []

        def run(task: Task) -> Outcome:
            calls.append(task.mode)
            if task.mode == "static":
                raise ConfigError("memory is too short")
            return measured(task.mode, ROWS)

        config = CompareConfig(FAKE, ROWS, modes=("static", "continuous"), rounds=2)
        report = compare(config, run=run)

        assert [mode.mode for mode in report.modes] == ["sequential", "continuous"]
        assert report.failed == {"static": "memory is too short"}
        assert calls.count("static") == 1
        assert "static: not run: memory is too short" in text_of(report)

    def test_without_the_reference_there_is_no_comparison(self) -> None:
        """Its failure is the comparison's."""

        def run(task: Task) -> Outcome:
            raise EngineError("no")

        with pytest.raises(ConfigError, match="sequential can't be run: no"):
            compare(CompareConfig(FAKE, ROWS), run=run)

    def test_differences_have_margins(self) -> None:
        """What differs is looked at, with the tokens before it; table and JSON tell."""
        asked: list[MarginTask] = []

        def run(task: Task) -> Outcome:
            outcome = measured(task.mode, ROWS)
            if task.mode == "static":
                outcome.tokens[2] = (outcome.tokens[2][0], 9)
            return outcome

        def look(task: MarginTask) -> list[float]:
            asked.append(task)
            return [0.125]

        config = CompareConfig(FAKE, ROWS, modes=("static",), rounds=1)
        report = compare(config, run=run, look=look)

        tokens = measured("sequential", ROWS).tokens[2]
        assert asked[0].rows == (ROWS[2],)
        assert asked[0].forks == (Fork(2, tokens[:1], tokens[1], 9),)
        told = report.as_dict()["modes"][1]["agreement"]
        assert (told["identical"], told["rows"]) == (2, 3)
        assert told["differences"] == [
            {"row": 2, "position": 1, "token": tokens[1], "other": 9, "margin": 0.125}
        ]
        assert "static: row 3 differs from token 2 on, margin 0.1250" in text_of(report)

    def test_margins_are_those_of_the_round_that_differs(self) -> None:
        """What is before the fork comes from the reference of the round with least agreement.

        In round 2 both differ from round 1's, and from each other at their second token.
        """
        asked: list[MarginTask] = []
        answers = {"sequential": iter([(5, 6), (7, 8)]), "static": iter([(5, 6), (7, 9)])}

        def run(task: Task) -> Outcome:
            outcome = measured(task.mode, ROWS)
            outcome.tokens[2] = next(answers[task.mode])
            return outcome

        def look(task: MarginTask) -> list[float]:
            asked.append(task)
            return [0.5]

        compare(CompareConfig(FAKE, ROWS, modes=("static",), rounds=2), run=run, look=look)

        assert asked[0].forks == (Fork(2, (7,), 8, 9),)

    def test_equal_rows_are_told_of(self) -> None:
        """Two of three ask what the first does: the automatic plan computes it once."""
        equal = tuple(Request(i, i, prompt="same") for i in range(3))

        def run(task: Task) -> Outcome:
            return measured(task.mode, equal)

        def notes(mode: str) -> str:
            return str(compare(CompareConfig(FAKE, equal, modes=(mode,), rounds=1), run=run).notes)

        assert "2 rows ask what another one does" in notes("continuous-auto")
        assert "another one does" not in notes("continuous")

    def test_rounds_take_turns(self) -> None:
        """Each round begins with another one."""
        assert [turned(["a", "b", "c"], n) for n in range(4)] == [
            ["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"],
        ]  # fmt: skip

    def test_rounds_tell_of_each_measurement(self) -> None:
        """A line for each, failures included; what failed later has no runs."""
        lines: list[str] = []
        answers = iter([Outcome("a", 1.5), Outcome("b", 2.0), EngineError("gone"), Outcome("a", 1)])

        def run(task: Task) -> Outcome:
            answer = next(answers)
            if isinstance(answer, EngineError):
                raise answer
            return answer

        tasks = {name: Task(name, FAKE, ROWS) for name in ("a", "b")}
        series = run_rounds(tasks, 2, run, lines.append)

        assert series == Series({"a": [Outcome("a", 1.5), Outcome("a", 1)]}, {"b": "gone"})
        assert lines == [
            "round 1 of 2, a: 1.50 s", "round 1 of 2, b: 2.00 s",
            "round 2 of 2, b: gone", "round 2 of 2, a: 1.00 s",
        ]  # fmt: skip


class TestReasons:
    """Sequential takes 10 s unless said otherwise; steps are worked out by hand."""

    CORES = 2

    def mode(self, name: str, wall_s: float, *steps: Step, **settings: Any) -> ModeReport:
        settings = {"cpu_s": 2 * wall_s, "batch_rows": 4, "threads": 2, **settings}
        outcome = Outcome(
            name, wall_s=wall_s, steps=list(steps), tokens={0: (1, 2)}, prompt_tokens={0: 300},
            token_times={0: [0.5, 1.0]}, **settings,
        )  # fmt: skip
        return mode_report(name, [outcome], [outcome])

    def prompt(self, start: float, end: float, lane: int = 0) -> Step:
        return Step(lane, start, end, (0,), (0,), 0, 300)

    def decode(self, start: float, end: float, rows: int, lane: int = 0) -> Step:
        return Step(lane, start, end, (0,) * rows, (0,) * rows, rows, 0)

    def line(self, *modes: ModeReport) -> str:
        """Return the reason of the only line."""
        (line,) = reasons(modes, self.CORES)
        return line.split(": ", 1)[1]

    def test_what_comes_out_as_expected_needs_none(self) -> None:
        """Neither does what is within a twentieth."""
        faster = [self.mode("sequential", 10), self.mode("static", 5), self.mode("continuous", 5.2)]

        assert reasons(faster, self.CORES) == []

    @pytest.mark.parametrize(
        "name", ["multi-instance", "static", "static-sorted", "continuous", "continuous-auto"]
    )
    def test_every_mode_that_should_be_faster_has_one(self, name: str) -> None:
        """Beside sequential alone; the others compute the same things in another order."""
        modes = [self.mode("sequential", 10), self.mode(name, 12)]
        (line,) = reasons(modes, self.CORES)
        assert line.startswith(f"{name} took 1.20 times as long as sequential: ")
        others = [self.mode("length-sorted", 12), self.mode("interleaved", 12)]
        assert reasons([*modes[:1], *others], self.CORES) == []

    def test_prompts(self) -> None:
        """3 of 4 seconds of computing are prompts alone, 75 %; they took sequential as long."""
        static = self.mode("static", 12, self.prompt(0, 3), self.decode(3, 4, 4))

        assert self.line(self.mode("sequential", 10, self.prompt(0, 3)), static) == (
            "75% of its computing went into prompts, which are computed many tokens at a time in "
            "every mode: a row has 300 tokens of prompt and 2 of answer"
        )

    def test_prompts_that_take_longer(self) -> None:
        """8 s of 12 where sequential has 5 of 10: that is the reason, not their share."""
        static = self.mode("static", 12, self.prompt(0, 8), self.decode(8, 12, 4))
        one = self.mode("sequential", 10, self.prompt(0, 5), self.decode(5, 10, 1))

        assert self.line(one, static) == "prompts took 8.00 s, and 5.00 s in sequential"

    @pytest.mark.parametrize(("rows", "told"), [(1, "one row"), (2, "2 rows")])
    def test_few_rows(self, rows: int, told: str) -> None:
        """Of four places no more than one or two were ever taken."""
        static = self.mode("static", 12, self.decode(0, 12, 1), self.decode(0, 12, rows))

        assert self.line(self.mode("sequential", 10), static) == (
            f"no computation had more than {told}, and a batch gains by computing many together"
        )

    def test_few_rows_where_prompts_grew(self) -> None:
        """Rows computed together make answers faster only; prompts took 4 s longer."""
        static = self.mode("static", 12, self.prompt(0, 7), self.decode(7, 12, 1))
        steps = [self.prompt(0, 3, lane) for lane in (0, 1)]
        two = self.mode("multi-instance", 8, *steps, self.decode(3, 8, 1), self.decode(3, 8, 1, 1),
                        lanes=2, processes=2)  # fmt: skip

        assert self.line(two, static) == (
            "prompts took 7.00 s, and 3.00 s in multi-instance in each of 2 that run side by side"
        )

    def test_few_rows_of_both(self) -> None:
        """Where the other had no more at one time, they are not the reason."""
        static = self.mode("static", 10, self.decode(0, 10, 2), batch_rows=2)
        other = self.mode("continuous", 12, self.decode(0, 10, 2), batch_rows=2)

        (line,) = reasons([static, other], self.CORES)
        assert line == (
            "continuous took 1.20 times as long as static: 2.00 s of its time lie between "
            "computations, and 0.00 s of static's: choosing tokens, planning and waiting"
        )

    def test_empty_places(self) -> None:
        """Calls with 3, 1 and 1 of 4 places: 5 of 12, 42 %, 1.7 a call."""
        calls = [self.decode(0, 4, 3), self.decode(4, 8, 1), self.decode(8, 12, 1)]

        assert self.line(self.mode("sequential", 10), self.mode("static", 12, *calls)) == (
            "only 42% of its places had a row, 1.7 of 4 in a computation"
        )

    def test_empty_places_of_both(self) -> None:
        """Where the other's batch was no fuller, they are not the reason."""
        calls = [self.decode(0, 4, 3), self.decode(4, 8, 1), self.decode(8, 10, 1)]
        modes = [self.mode("static", 10, *calls), self.mode("continuous", 12, *calls)]

        assert "places" not in reasons(modes, self.CORES)[0]

    def test_cores(self) -> None:
        """Half a core where sequential had two: with two it would have taken 3 s.

        It says so whether or not it has fewer threads. 1.9 cores are as many; 30 s with 1.5 would
        be 22.5 s with two, still slower; and of a GPU cores tell nothing.
        """
        one = self.mode("sequential", 10)
        told = "it had 0.50 cores and sequential 2.00, "

        assert self.line(one, self.mode("static", 12, cpu_s=6)) == (
            told + "with as many threads; other programs may have used the machine"
        )
        assert self.line(one, self.mode("static", 12, cpu_s=6, threads=1)) == (
            told + "as it has 1 of 2 threads"
        )
        assert "cores" not in self.line(one, self.mode("static", 12, cpu_s=22.8))
        assert "cores" not in self.line(one, self.mode("static", 30, cpu_s=45))
        on_gpu = self.mode("static", 12, cpu_s=6, placement="all layers on X")
        assert "cores" not in self.line(one, on_gpu)

    def test_more_processes_than_cores(self) -> None:
        """Four on two cores; two on two are not too many."""
        one = self.mode("sequential", 10)

        assert self.line(one, self.mode("multi-instance", 12, processes=4, lanes=4)) == (
            "its 4 processes share 2 cores, so they wait for each other's turns"
        )
        assert "turns" not in self.line(one, self.mode("multi-instance", 12, processes=2, lanes=2))

    @pytest.mark.parametrize(("processes", "what"), [(2, "processes"), (1, "lanes")])
    def test_uneven_shares(self, processes: int, what: str) -> None:
        """One was done after 4 s, the other after 12: 8 s each would have been faster than 10."""
        steps = [self.decode(0, 4, 3, lane=0), self.decode(0, 12, 3, lane=1)]
        mode = self.mode("continuous", 12, *steps, processes=processes, lanes=2)

        assert self.line(self.mode("sequential", 10), mode) == (
            f"the first of its 2 {what} was done after 4.00 s and the last after 12.00 s; with an "
            "even share each would need about 8.00 s"
        )

    def test_uneven_shares_that_cost_little(self) -> None:
        """11.5 s each would still be slower than 10."""
        steps = [self.decode(0, 11, 3, lane=0), self.decode(0, 12, 3, lane=1)]

        said = self.line(self.mode("sequential", 10), self.mode("continuous", 12, *steps, lanes=2))
        assert "even share" not in said

    def test_steps(self) -> None:
        """Otherwise it is what a computation costs: 4 rows in 12 s, 3 for each; 1 in 2."""
        slow = self.mode("static", 12, self.decode(0, 12, 4))
        one = self.mode("sequential", 10, self.decode(0, 2, 1))

        assert self.line(one, slow) == (
            "static needs 12000.0 ms for 4.0 rows, sequential needs 2000.0 ms for 1.0 rows: "
            "3000.0 and 2000.0 ms for each row's token"
        )

    def test_steps_side_by_side(self) -> None:
        """Two processes compute at the same time, each one row in 3 s: 1.5 s for each."""
        slow = self.mode("static", 12, self.decode(0, 12, 4))
        steps = [self.decode(0, 3, 1, lane) for lane in (0, 1)]
        two = self.mode("multi-instance", 10, *steps, lanes=2, processes=2)

        assert self.line(two, slow) == (
            "static needs 12000.0 ms for 4.0 rows, multi-instance needs 3000.0 ms for 1.0 rows in "
            "each of 2 that run side by side: 3000.0 and 1500.0 ms for each row's token"
        )

    def test_chance(self) -> None:
        """Ranges 9 to 12 and 10 to 11: the medians tell nothing."""
        base = [Outcome("sequential", wall_s=wall) for wall in (9, 9.5, 12)]
        other = [Outcome("static", wall_s=wall) for wall in (10, 10.5, 11)]

        assert self.line(
            mode_report("sequential", base, base), mode_report("static", other, base)
        ) == ("their ranges overlap (10.00-11.00 and 9.00-12.00 s), so this may be chance")

    def test_no_chance(self) -> None:
        """Ranges 9 to 10 and 11 to 13 are apart."""
        base = [Outcome("sequential", wall_s=wall) for wall in (9, 9.5, 10)]
        other = [Outcome("static", wall_s=wall) for wall in (11, 12, 13)]

        modes = mode_report("sequential", base, base), mode_report("static", other, base)
        assert "chance" not in self.line(*modes)


class TestProbe:
    def test_times(self) -> None:
        """A computation takes a second: so does a decode step of any number of rows.

        A prompt of 300 tokens is three pieces of 128 at most, so 3 seconds.
        """
        clock = Clock()
        task = ProbeTask(FAKE, rows=(1, 4), cells=5, prompts=(8, 300), repeats=2)

        found = probe(Scripted(clock), task, clock)

        assert found == Costs((Cost(1, 1.0), Cost(4, 1.0)), (Cost(8, 1.0), Cost(300, 3.0)))
        assert found.decode[1].per_token_s == 0.25

    def test_in_a_process_of_its_own(self) -> None:
        """With the backend that the settings name."""
        found = run_probe(ProbeTask(FAKE, rows=(2,), prompts=(), repeats=1))

        assert [cost.tokens for cost in found.decode] == [2]
        assert found.prompt == ()

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"rows": (300,)}, "rows: 300 rows at one time .* at most 256 rows"),
            ({"rows": (0,)}, "rows: must be at least 1"),
            ({"repeats": 0}, "repeats: must be at least 1, not 0"),
        ],
    )
    def test_bad_settings(self, settings: dict[str, Any], message: str) -> None:
        """Each is named, with what is allowed."""
        with pytest.raises(ConfigError, match=message):
            ProbeTask(FAKE, **settings)


class TestNotebookTables:
    def test_shown_as_html_and_as_text(self) -> None:
        """Both have a line for each mode; names are escaped; what failed is named below."""

        def run(task: Task) -> Outcome:
            if task.mode == "static":
                raise ConfigError("needs < 1 MiB")
            return measured(task.mode, ROWS)

        config = CompareConfig(FAKE, ROWS, modes=("static", "continuous"), rounds=1)
        shown = modes_table(compare(config, run=run), "room")

        assert [line.split()[0] for line in str(shown).splitlines()] == [
            "mode", "sequential", "continuous", "static:",
        ]  # fmt: skip
        html = shown._repr_html_()
        assert html.count("<tr>") == 3
        assert "<p>static: not run: needs &lt; 1 MiB</p>" in html

    def test_of_a_sweep(self) -> None:
        """A line for each size of each curve, and the knees."""
        config = SweepConfig(FAKE, sizes=(1, 2), rounds=1, schemes=("static",))

        def run(task: Task) -> Outcome:
            assert isinstance(task.rows, MadeUpRows)
            return measured(task.mode, rows_of(*[(5, 3)] * task.rows.count), task.batch)

        shown = sweep_table(sweep(config, run=run))

        assert [row[:2] for row in shown.rows] == [
            ["static, streams", "1"], ["static, streams", "2"],
            ["static, unified", "1"], ["static, unified", "2"],
        ]  # fmt: skip
        assert len(shown.notes) == 2


class TestReport:
    def test_table(self) -> None:
        """The first column is aligned left, the others right, two spaces between."""
        assert table(["mode", "s"], [["a", "1.00"], ["bcdef", "10.00"]]) == [
            "mode       s",
            "a       1.00",
            "bcdef  10.00",
        ]

    def test_spread(self) -> None:
        """Median and range."""
        assert spread([3.0, 1.0, 2.0]) == (2.0, 1.0, 3.0)

    def test_gpus(self) -> None:
        """Two cards: mean use, memory added; words in place of numbers are no reading."""
        said = "50, 1024, NVIDIA A\n100, 1, NVIDIA B\n"
        assert parse_gpus(said) == GpuReading(0.75, 1025 << 20, ("NVIDIA A", "NVIDIA B"))
        assert parse_gpus("[N/A], 3, X") is None
        assert parse_gpus("") is None


class TestPadding:
    def test_by_hand_modes_are_not_padded(
        self, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Where the engine pads batches, a context that must not be padded is said to vary."""
        from localbatch.engine import llama

        monkeypatch.setattr(llama, "numerics_of", lambda *_: Numerics.SAME_IN_ANY_BATCH)
        backend = llama.LlamaBackend(str(tiny_model))
        config = ContextConfig(2, 256, None, chunk=512, threads=1)
        try:
            assert backend.open(config) is Numerics.SAME_IN_ANY_BATCH
            assert backend.open(replace(config, may_pad=False)) is Numerics.VARIES
        finally:
            backend.close()


class TestProcesses:
    def test_a_measurement_has_processes_of_its_own(self) -> None:
        """Two of them share the rows; memory is both's, and both count from one start."""
        outcome = run_task(Task("multi-instance", FAKE, ROWS, instances=2))

        assert sorted(outcome.tokens) == [0, 1, 2]
        assert outcome.tokens == measured("sequential", ROWS).tokens
        assert (outcome.processes, outcome.width) == (2, 2)
        assert 0 < outcome.wall_s < 60

    def test_peak_memory_is_sampled(self) -> None:
        """A process with Python and numpy takes some MiB."""
        config = EngineConfig(model="fake", backend="fake", fake_step_s=0.05)

        assert run_task(Task("sequential", config, ROWS)).peak_bytes > 5 << 20

    def test_mapped_files_count_once(self) -> None:
        """10 and 12 bytes, 4 and 5 of them mapped: 6 + 7 + 5; a process that ended has none."""

        class Process:
            def __init__(self, rss: int, shared: int) -> None:
                self.memory = SimpleNamespace(rss=rss, shared=shared)

            def memory_info(self) -> SimpleNamespace:
                if not self.memory.rss:
                    raise psutil.NoSuchProcess(1)
                return self.memory

        processes: Any = [Process(10, 4), Process(12, 5), Process(0, 0)]
        assert resident_bytes(processes) == 18

    def test_a_process_that_dies_says_how(self) -> None:
        """The signal is named."""
        config = EngineConfig(model="fake", backend="fake", fake_dies_on="aaa")

        with pytest.raises(WorkerError, match="ended by SIGKILL; memory may be too short"):
            run_task(Task("sequential", config, ROWS))

    def test_a_process_that_can_not_be_started(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """When the system has no memory for one, the mode fails, and not the comparison."""

        def refuse(*args: Any, **kwargs: Any) -> None:
            raise OSError(12, "Cannot allocate memory")

        monkeypatch.setattr("subprocess.Popen", refuse)
        with pytest.raises(WorkerError, match="can't be started: Cannot allocate memory"):
            run_task(Task("sequential", FAKE, ROWS))

    def test_what_a_process_can_not_do_is_raised_here(self) -> None:
        """With its own kind of error."""
        with pytest.raises(ConfigError, match="no row can be run"):
            run_task(Task("sequential", EngineConfig(model="f", backend="fake", ctx=8), ROWS[:1]))


class TestPlacement:
    """Of two fake GPUs the second one is asked for, or both."""

    SECOND = replace(FAKE, fake_gpus=2, devices=("FAKE1",))
    BOTH = replace(
        FAKE, fake_gpus=2, split_mode=SplitMode.ROW, tensor_split=(3.0, 1.0), gpu_layers=7
    )

    @pytest.mark.parametrize("mode", MODES)
    def test_every_mode_gets_the_gpu_options(self, mode: str) -> None:
        """Its processes put the model where it is wanted."""
        task = tasks_of(CompareConfig(self.BOTH, ROWS, modes=(mode,), instances=2))[mode]
        assert (task.config.tensor_split, task.config.devices) == ((3.0, 1.0), None)
        said = run_task(task).placement
        assert said.startswith("7 layers on FAKE0 (")
        assert said.endswith("split by rows")
        one = replace(task, config=replace(self.SECOND, threads=task.config.threads))
        assert run_task(one).placement.startswith("all layers on FAKE1 (")

    @pytest.mark.parametrize("scheme", ["static", "continuous", "sequential"])
    def test_a_sweep_gets_them(self, scheme: str) -> None:
        """Each point of each curve, and the rows one at a time."""
        seen: list[Task] = []

        def run(task: Task) -> Outcome:
            seen.append(task)
            return measured(task.mode, rows_of((5, 3)))

        sweep(SweepConfig(self.BOTH, sizes=(1,), rounds=1), run=run)
        assert {task.config.tensor_split for task in seen if task.mode == scheme} == {(3.0, 1.0)}

    def test_margins_get_them(self) -> None:
        """They are computed where the rows were."""
        asked: list[MarginTask] = []

        def run(task: Task) -> Outcome:
            outcome = measured(task.mode, ROWS)
            if task.mode == "static":
                outcome.tokens[2] = (9,)
            return outcome

        def look(task: MarginTask) -> list[float]:
            asked.append(task)
            return [0.5]

        config = CompareConfig(self.SECOND, ROWS, modes=("static",), rounds=1)
        compare(config, run=run, look=look)
        assert asked[0].config == self.SECOND

    @pytest.mark.parametrize(
        ("option", "value"),
        [("--devices", "CUDA0"), ("--gpu-layers", "5"), ("--tensor-split", "3,1"),
         ("--split-mode", "layer")],
    )  # fmt: skip
    @pytest.mark.parametrize("command", ["run", "compare", "sweep"])
    def test_without_a_gpu_they_are_refused(
        self, tmp_path: Path, command: str, option: str, value: str
    ) -> None:
        """With the same one line by all commands, before anything is measured."""
        source = tmp_path / "in.txt"
        source.write_text("x\n")
        rows = [] if command == "sweep" else [str(source)]
        arguments = [command, "fake", *rows, "--backend", "fake", option, value]
        result = CliRunner().invoke(main, arguments)

        assert result.exit_code == 2
        assert result.stderr == (
            f"Error: {option}: there is no GPU that llama.cpp can use; leave it out, or install "
            "llama-cpp-python built for your GPU (docs/install.md)\n"
        )

    def test_options_reach_the_processes(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Both commands hand all four over."""
        seen: list[EngineConfig] = []

        def look(config: EngineConfig) -> None:
            seen.append(config)
            raise EngineError("seen")

        monkeypatch.setattr("localbatch.compare.process.read_card", look)
        source = tmp_path / "in.txt"
        source.write_text("x\n")
        options = ["--devices", "A, B", "--split-mode", "row", "--tensor-split", "3,1"]
        for command in (["compare", "fake", str(source)], ["sweep", "fake"]):
            result = CliRunner().invoke(
                main, [*command, "--backend", "fake", *options, "--gpu-layers", "7"]
            )
            assert result.stderr == "Error: seen\n"
            found = seen.pop()
            assert (found.devices, found.split_mode) == (("A", "B"), SplitMode.ROW)
            assert (found.tensor_split, found.gpu_layers) == ((3.0, 1.0), 7)


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a stand-in for NVIDIA's tool first; it counts its calls.

    The first says 1,000 MiB (what others have taken), all later ones 1,750, and 60 % use.
    """
    folder, calls = tmp_path / "bin", tmp_path / "calls"
    folder.mkdir()
    tool = folder / "nvidia-smi"
    tool.write_text(
        f"#!/bin/sh\n[ -e {calls} ] && used=1750 || used=1000\necho . >> {calls}\n"
        'echo "60, $used, NVIDIA Fake 100"\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    return calls


@pytest.mark.skipif(os.name == "nt", reason="the stand-in is a shell script")
class TestGpu:
    def test_what_a_mode_took(self, nvidia_smi: Path) -> None:
        """Memory beyond what was taken before, and the mean use, also of a run of no time."""
        outcome = run_task(Task("sequential", FAKE, ROWS))

        assert (outcome.gpu_use, outcome.gpu_peak_bytes) == (0.6, 750 << 20)
        assert len(nvidia_smi.read_text().splitlines()) >= 3

    def test_columns_of_a_sweep(self, nvidia_smi: Path) -> None:
        """The table has one, the JSON both figures, and the machine the card's name."""
        config = SweepConfig(
            FAKE, sizes=(1,), rounds=1, schemes=("static",), layouts=(KVLayout.STREAMS,),
            check=False,
        )  # fmt: skip
        report = sweep(config)

        assert "GPU" in sweep_text(report)
        assert "60%, 750 MiB" in sweep_text(report)
        point = report.as_dict()["curves"][0]["points"][0]
        assert (point["gpu_use"], point["gpu_peak_mib"]) == (0.6, 750.0)
        assert report.machine["gpus"] == ["NVIDIA Fake 100"]

    def test_column_of_a_comparison(self, nvidia_smi: Path) -> None:
        """It is there only if there is a GPU."""
        config = CompareConfig(FAKE, ROWS, modes=("sequential",), rounds=1)
        assert "GPU" in text_of(compare(config))
        assert "GPU" not in text_of(compare(config, run=lambda task: measured(task.mode, ROWS)))


class TestCommand:
    def call(self, tmp_path: Path, *args: str) -> Any:
        source = tmp_path / "in.jsonl"
        lines = [{"prompt": "one", "max_tokens": 3}, {"prompt": ""}, {"prompt": "three"}]
        source.write_text("".join(json.dumps(line) + "\n" for line in lines))
        command = ["compare", "fake", str(source), "--backend", "fake", "--rounds", "1"]
        return CliRunner().invoke(main, [*command, *args], catch_exceptions=False)

    def test_table(self, tmp_path: Path) -> None:
        """A line for each chosen mode and the reference; bad rows are named on standard error."""
        result = self.call(tmp_path, "--modes", "static", "--max-tokens", "4")

        assert result.exit_code == 0
        assert [line.split()[0] for line in result.stdout.split("\n\n")[1].splitlines()] == [
            "mode", "sequential", "static",
        ]  # fmt: skip
        assert "2 of 2" in result.stdout
        assert "in.jsonl:2: prompt: is empty" in result.stderr

    def test_json(self, tmp_path: Path) -> None:
        """Standard output is one object with the modes and the machine."""
        result = self.call(tmp_path, "--json", "--modes", "static", "-q", "--ignore-eos")

        told = json.loads(result.stdout)
        assert [mode["mode"] for mode in told["modes"]] == ["sequential", "static"]
        assert told["modes"][1]["agreement"]["identical"] == 2
        assert told["modes"][1]["output_tokens"] == 3 + 64
        assert {"cpu", "cores", "memory_bytes"} <= told["machine"].keys()
        assert told["model"] == "fake"

    @pytest.mark.parametrize(
        ("option", "value", "most"),
        [("--rows", 0, 1_000_000), ("--rows", -2, 1_000_000), ("--max-tokens", 0, 2**24),
         ("--rounds", 0, 1000), ("--batch", 1025, 1024), ("--instances", 0, 512)],
    )  # fmt: skip
    def test_out_of_range(self, tmp_path: Path, option: str, value: int, most: int) -> None:
        """One line names the option, its range and the value."""
        result = self.call(tmp_path, option, str(value))

        assert result.exit_code == 2
        last = result.stderr.splitlines()[-1]
        assert last == f"Error: {option}: must be from 1 to {most}, not {value}"

    def test_unknown_mode(self, tmp_path: Path) -> None:
        """Is named as the option's, with exit code 2."""
        result = self.call(tmp_path, "--modes", "nope")

        assert result.exit_code == 2
        assert "Error: --modes: 'nope' is not one of sequential, " in result.stderr


def test_rows_that_cannot_be_used_are_in_the_report(tmp_path: Path) -> None:
    """A program that reads the JSON sees that it is not about all of the input."""
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "abc"}\nno json\n{"prompt": "def"}\n')
    options = ["--backend", "fake", "--raw", "--modes", "sequential,continuous", "--rounds", "1"]
    result = CliRunner().invoke(
        main, ["compare", "fake", str(source), *options, "--max-tokens", "4", "--json"]
    )
    report = json.loads(result.stdout)
    assert report["rows"] == 2
    assert report["notes"][0] == "1 rows of the input can't be used and are left out"
    assert [mode["rows_alive"] for mode in report["modes"]] == [1, 2]
