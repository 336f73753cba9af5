"""The comparison's modes and figures, on a scripted backend whose computations take known times.

Every computation takes one second of a made-up clock, and nothing else takes any. All times in the
expectations are worked out by hand from that.
"""

from __future__ import annotations

import json
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
from localbatch.compare.comparison import CompareConfig, compare, tasks_of
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
from localbatch.compare.process import resident_bytes, run_task
from localbatch.compare.report import spread, table, text_of
from localbatch.compare.rounds import Series, run_rounds, turned
from localbatch.compare.rows import made_up
from localbatch.compare.task import MadeUpRows, Outcome, Task, comparable, joined
from localbatch.compare.trace import Span, Step, Trace, TracedBackend, spans
from localbatch.compare.worker import measure
from localbatch.data.config import EngineConfig
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

    def test_a_batch_beyond_a_context_is_refused(self) -> None:
        """llama.cpp has 256 sequences in a context; static batches have one context."""
        with pytest.raises(ConfigError, match="at most 256 rows"):
            measured("static", rows_of(*[(3, 1)] * 300), batch=300)

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

        forks = (Fork(row, (50,), 60, 61), Fork(row, (50,), None, 61))
        found = margins(Listening(), MarginTask(FAKE, forks))

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
        assert asked[0].forks == (Fork(ROWS[2], tokens[:1], tokens[1], 9),)
        told = report.as_dict()["modes"][1]["agreement"]
        assert (told["identical"], told["rows"]) == (2, 3)
        assert told["differences"] == [
            {"row": 2, "position": 1, "token": tokens[1], "other": 9, "margin": 0.125}
        ]
        assert "static: row 3 differs from token 2 on, margin 0.1250" in text_of(report)

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

    def test_what_a_process_can_not_do_is_raised_here(self) -> None:
        """With its own kind of error."""
        with pytest.raises(ConfigError, match="no row can be run"):
            run_task(Task("sequential", EngineConfig(model="f", backend="fake", ctx=8), ROWS[:1]))


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

    def test_unknown_mode(self, tmp_path: Path) -> None:
        """Is named as the option's, with exit code 2."""
        result = self.call(tmp_path, "--modes", "nope")

        assert result.exit_code == 2
        assert "Error: --modes: 'nope' is not one of sequential, " in result.stderr
