"""The scaling sweep: its arithmetic, worked by hand, and the command."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from localbatch.cli import main
from localbatch.compare.curves import Curve, curve_of, knee
from localbatch.compare.figures import Agreement, Difference
from localbatch.compare.html import sweep_page
from localbatch.compare.margins import Fork, MarginTask
from localbatch.compare.rows import made_up
from localbatch.compare.sweep import SweepConfig, sweep, tasks_of
from localbatch.compare.sweep_report import knee_line, sweep_text
from localbatch.compare.task import MadeUpRows, Outcome, Task
from localbatch.data.config import EngineConfig, KVLayout
from localbatch.data.errors import ConfigError, EngineError
from localbatch.engine.fake import FakeBackend, _logits

FAKE = EngineConfig(model="fake", backend="fake")


def outcome(rows: int, wall_s: float, peak_mib: int = 100) -> Outcome:
    """Return a run of rows with 6 prompt tokens and 4 tokens out."""
    return Outcome(
        "static", wall_s=wall_s, peak_bytes=peak_mib << 20,
        prompt_tokens=dict.fromkeys(range(rows), 6),
        tokens=dict.fromkeys(range(rows), (1, 2, 3, 4)),
        token_times={i: [wall_s] * 4 for i in range(rows)},
    )  # fmt: skip


class TestCurve:
    def test_point(self) -> None:
        """Batch 4: median of 1, 2 and 4 s; 40 tokens in 2 s; 16 out, 8 a second.

        Batch 1 makes 4 tokens in 2 s, 2 a second: 4 times as fast, 100 %. Batch 2 makes 8 in 2 s:
        twice as fast. Memory is 30 MiB more than with batch 1.
        """
        runs = {
            1: [outcome(1, 2.0)], 2: [outcome(2, 2.0)],
            4: [outcome(4, wall, 130) for wall in (1.0, 4.0, 2.0)],
        }  # fmt: skip
        point = curve_of("static", "streams", runs, {}).points[2]

        assert (point.batch, point.wall_s, point.wall_range_s) == (4, 2.0, (1.0, 4.0))
        assert (point.total_tokens, point.tokens_per_s) == (40, 20.0)
        assert (point.output_tokens_per_s, point.memory_change_mib) == (8.0, 30.0)
        assert (point.speedup_over_1, point.speedup_over_2) == (4.0, 2.0)
        assert point.efficiency == 1.0

    def test_without_batch_1_there_is_no_speedup_over_it(self) -> None:
        """Nothing is made up for what was not measured."""
        point = curve_of("static", "streams", {4: [outcome(4, 2.0)]}, {}).points[0]

        assert (point.speedup_over_1, point.speedup_over_2, point.efficiency) == (None,) * 3


class TestKnee:
    @pytest.mark.parametrize(
        ("rates", "expected"),
        [
            ({1: 10, 2: 19, 4: 30, 8: 32, 16: 33}, 4),  # 30 to 32 is 7 %, to 33 is 10 % in two
            ({1: 10, 2: 19, 4: 30}, None),  # 58 % more at the end
            ({1: 10, 2: 8, 4: 30, 8: 31}, 4),  # a dip is no knee
            ({1: 10, 4: 12}, 1),  # 10 % for each of two doublings would be 12.1
            ({1: 10, 4: 12.2}, None),
            ({8: 10}, None),
            ({}, None),
        ],
    )
    def test_knee(self, rates: dict[int, float], expected: int | None) -> None:
        """It is the least size over which no larger one gains a tenth for each doubling."""
        assert knee(rates) == expected

    @given(st.integers(1, 9), st.floats(0.01, 100))
    def test_flat_curves_bend_at_the_start(self, doublings: int, rate: float) -> None:
        """Where more rows give nothing, the smallest batch is the knee."""
        assert knee({2**k: rate for k in range(doublings + 1)}) == 1

    @given(st.integers(1, 9))
    def test_linear_curves_have_no_knee(self, doublings: int) -> None:
        """Where twice the rows are twice as fast, it is not reached."""
        assert knee({2**k: 2.0**k for k in range(doublings + 1)}) is None

    def test_in_words(self) -> None:
        """With the batch size; or that it is not reached."""
        points = curve_of("s", "l", {1: [outcome(1, 1)], 2: [outcome(2, 2)]}, {})
        assert knee_line(points).startswith("the knee is at 1 rows")
        rising = curve_of("s", "l", {1: [outcome(1, 1)], 2: [outcome(2, 1)]}, {})
        assert "not flattened at 2 rows" in knee_line(rising)
        assert "shows no knee" in knee_line(curve_of("s", "l", {1: [outcome(1, 1)]}, {}))
        assert knee_line(Curve("s", "l", (), {1: "no"}, None)) == "nothing could be measured"


class TestSweep:
    def test_tasks(self) -> None:
        """Each scheme, layout and size is one, with as many rows as it has places."""
        config = SweepConfig(FAKE, sizes=(4, 1, 4), prompt_tokens=9, max_tokens=3, waves=2)

        tasks = tasks_of(config)

        assert len(tasks) == 2 * 2 * 2
        task = tasks["continuous, unified, 4"]
        assert (task.mode, task.batch, task.rows) == ("continuous", 4, MadeUpRows(8, 9, 3))
        assert task.config.kv_layout is KVLayout.UNIFIED

    def test_what_does_not_fit_says_so(self) -> None:
        """A size that fails is named with its reason and costs no other."""

        def run(task: Task) -> Outcome:
            if task.batch == 2:
                raise ConfigError("too large")
            return outcome(task.batch, 1.0)

        config = SweepConfig(FAKE, sizes=(1, 2, 4), rounds=1, schemes=("static",))
        report = sweep(config, run=run)

        assert [point.batch for point in report.curves[0].points] == [1, 4]
        assert report.curves[0].failed == {2: "too large"}
        assert "batch 2: not run: too large" in sweep_text(report)

    def test_answers_are_compared_with_those_of_one_at_a_time(self) -> None:
        """Of 4 rows in a batch of 4 row 3 differs; smaller batches don't have it.

        Only the rows of a size count, in the round with the fewest alike; the reference runs once.
        What differs is looked at as the rows are one at a time, in streams; a margin is in all
        reports.
        """
        references: list[Task] = []
        asked: list[MarginTask] = []

        def run(task: Task) -> Outcome:
            made = outcome(task.rows.count, 1.0)  # type: ignore[union-attr]
            if task.mode == "sequential":
                references.append(task)
            elif task.batch == 4 and task.config.kv_layout is KVLayout.UNIFIED:
                made.tokens[3] = (1, 2, 9, 4)
            return made

        def look(task: MarginTask) -> list[float]:
            asked.append(task)
            return [0.125]

        config = SweepConfig(FAKE, sizes=(1, 2, 4), rounds=2, schemes=("static",))
        report = sweep(config, run=run, look=look)

        streams, unified = ([p.agreement for p in curve.points] for curve in report.curves)
        assert streams == [Agreement(1, 1), Agreement(2, 2), Agreement(4, 4)]
        assert unified == [Agreement(1, 1), Agreement(2, 2),
                           Agreement(3, 4, (Difference(3, 2, 3, 9, 0.125),))]  # fmt: skip
        (task,) = references
        assert (task.batch, task.rows, task.config.kv_layout) == (
            1, MadeUpRows(4, 64, 32), KVLayout.STREAMS,
        )  # fmt: skip
        assert asked == [MarginTask(FAKE, MadeUpRows(4, 64, 32), (Fork(3, (1, 2), 3, 9),))]
        told = "batch 4: row 4 differs from token 3 on, margin 0.1250"
        assert told in sweep_text(report).splitlines()
        assert f"<p>{told}</p>" in sweep_page(report)
        assert "3 of 4" in sweep_text(report)
        told = report.as_dict()["curves"][1]["points"][2]["agreement"]
        assert (told["identical"], told["rows"], told["share"]) == (3, 4, 0.75)
        assert [each["margin"] for each in told["differences"]] == [0.125]

    def test_margins(self) -> None:
        """They are those of the logits after the prompt and what both answers begin with.

        Of eight rows six have another second token, in both schemes: the first five are looked at,
        once. The fake model's logits are a hash of all tokens before.
        """
        backend = FakeBackend()
        wanted = MadeUpRows(8, 10, 3)
        prompts = [
            backend.tokenize(row.prompt or "", add_special=True, parse_special=False)
            for row in made_up(backend, wanted)
        ]

        def run(task: Task) -> Outcome:
            made = outcome(8, 1.0)
            for row in range(8):
                ours = 78 if task.mode != "sequential" and row > 1 else 77
                made.tokens[row] = (66, ours, 70)
            return made

        config = SweepConfig(
            FAKE, sizes=(8,), rounds=1, prompt_tokens=10, max_tokens=3, layouts=(KVLayout.STREAMS,)
        )
        report = sweep(config, run=run)

        logits = [_logits([*prompts[row], 66]) for row in range(2, 7)]
        expected = [pytest.approx(float(each[77] - each[78])) for each in logits]
        for curve in report.curves:
            (point,) = curve.points
            assert point.agreement is not None
            found = [each.margin for each in point.agreement.differences]
            assert found == [*expected, None]
        largest = max(abs(float(each[77] - each[78])) for each in logits)
        assert (
            f"batch 8: row 3 differs from token 2 on, margin {logits[0][77] - logits[0][78]:.4f}; "
            f"5 more rows differ, largest margin of the first 5: {largest:.4f}"
        ) in sweep_text(report)

    def test_margins_that_can_not_be_had(self) -> None:
        """The sweep is worth having without."""

        def run(task: Task) -> Outcome:
            made = outcome(1, 1.0)
            made.tokens[0] = (5 if task.mode == "sequential" else 6,)
            return made

        def look(task: MarginTask) -> list[float]:
            raise EngineError("broken")

        report = sweep(SweepConfig(FAKE, sizes=(1,), rounds=1), run=run, look=look)
        assert "batch 1: row 1 differs from token 1 on" in sweep_text(report).splitlines()

    def test_unchecked(self) -> None:
        """Without the check nothing is run for it and no column shows it; a failed one is told."""

        def run(task: Task) -> Outcome:
            if task.mode == "sequential":
                raise EngineError("broken")
            return outcome(1, 1.0)

        config = SweepConfig(FAKE, sizes=(1,), rounds=1, schemes=("static",))
        told = sweep_text(sweep(config, run=run))
        assert "note: answers were not checked: broken" in told
        silent = sweep_text(sweep(replace(config, check=False), run=run))
        assert "same answers" not in silent
        assert "note" not in silent

    def test_one_context_takes_256_rows(self) -> None:
        """Static batches and one pool end there, without a try; streams go on."""
        tried: list[str] = []

        def run(task: Task) -> Outcome:
            tried.append(f"{task.mode} {task.config.kv_layout.value}")
            return outcome(2, 1.0)

        report = sweep(SweepConfig(FAKE, sizes=(512,), rounds=1, check=False), run=run)

        assert tried == ["continuous streams"]
        reason = "512 rows at one time would need one llama.cpp context, which takes at most 256"
        for curve in report.curves[0], report.curves[1], report.curves[3]:
            assert curve.failed[512].startswith(reason)

    def test_nothing_measured(self) -> None:
        """When all fails, the first reason is the error."""

        def run(task: Task) -> Outcome:
            raise EngineError("broken")

        with pytest.raises(EngineError, match="nothing could be measured: broken"):
            sweep(SweepConfig(FAKE, sizes=(1,), rounds=1), run=run)

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"sizes": ()}, "sizes: must be whole numbers from 1 to 1,024, .* found nothing"),
            ({"sizes": (1, 1025)}, "sizes: must be whole numbers from 1 to 1,024, .* found 1,025"),
            ({"schemes": ("x",)}, "schemes: 'x' is not one of static, continuous"),
            ({"waves": 0}, "waves: must be from 1 to 1000, not 0"),
        ],
    )
    def test_bad_settings(self, settings: dict[str, Any], message: str) -> None:
        """Each is named, with what is allowed."""
        with pytest.raises(ConfigError, match=message):
            SweepConfig(FAKE, **settings)


class TestCommand:
    def call(self, *args: str) -> Any:
        command = ["sweep", "fake", "--backend", "fake", "--rounds", "1", "--max-tokens", "4"]
        return CliRunner().invoke(main, [*command, *args], catch_exceptions=False)

    def test_json(self) -> None:
        """Standard output is one object; curves have a point for each size."""
        result = self.call("--sizes", "1,3", "--schemes", "continuous", "--json", "-q")

        told = json.loads(result.stdout)
        assert [(c["scheme"], c["layout"]) for c in told["curves"]] == [
            ("continuous", "streams"), ("continuous", "unified"),
        ]  # fmt: skip
        assert [p["batch"] for p in told["curves"][0]["points"]] == [1, 3]
        assert result.stderr == ""

    def test_table(self) -> None:
        """A table for each curve, and its knee in words."""
        result = self.call("--sizes", "1,2", "--kv-layout", "streams")

        assert result.exit_code == 0
        assert "static, streams\nbatch  wall s" in result.stdout
        assert "round 1 of 1, static, streams, 2: " in result.stderr

    @pytest.mark.parametrize(
        ("sizes", "found"),
        [("", "nothing"), ("1,,2", "nothing"), ("1,x", "'x'"), ("4,0", "0"), ("-1", "-1"),
         ("8,2048", "2,048")],
    )  # fmt: skip
    def test_bad_sizes(self, sizes: str, found: str) -> None:
        """They are wrong usage; the one line names what was wrong."""
        result = self.call(f"--sizes={sizes}")

        assert result.exit_code == 2
        assert result.stderr == (
            f"Error: --sizes: must be whole numbers from 1 to 1,024, as 1,2,4; found {found}\n"
        )

    @pytest.mark.parametrize(
        ("options", "context"),
        [(["--prompt-tokens", "4093"], "4,096 (the model's)"),
         (["--prompt-tokens", "4093", "--ctx", "4090"], "4,090 (--ctx)")],
    )  # fmt: skip
    def test_rows_longer_than_the_context(self, options: list[str], context: str) -> None:
        """4,093 + 4 tokens are one more than the fake model's 4,096; nothing is measured."""
        result = self.call(*options)

        assert result.exit_code == 2
        assert result.stderr == (
            "Error: --prompt-tokens: 4,093 and --max-tokens 4 are 4,097 tokens a row, "
            f"more than the context of {context}\n"
        )

    def test_rows_as_long_as_the_context(self) -> None:
        """4,092 + 4 are measured."""
        options = ("--sizes", "1", "--schemes", "static", "--kv-layout", "streams", "--no-check")
        assert self.call("--prompt-tokens", "4092", *options).exit_code == 0
