"""The planner: which layouts there are, what a job takes in each by measured rates, the choice."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from localbatch.cli.main import main
from localbatch.data.config import EngineConfig
from localbatch.engine import calibration, machine, numerics
from localbatch.engine.backend import ContextConfig
from localbatch.engine.calibration import Rates, measure, rates_of
from localbatch.engine.fake import FakeBackend
from localbatch.engine.llama import LlamaBackend
from localbatch.engine.machine import OtherWork
from localbatch.engine.numerics import cuts_alike
from localbatch.engine.planner import Layout, Planner, RowShape, expected_seconds
from localbatch.scheduler.prefixes import Prefix

RATES = Rates(0.01, ((1, 1.0), (4, 2.5), (8, 4.0)))
DEEP_RATES = Rates(
    0.01, ((1, 1.0), (4, 2.5)), deep_prompt_token_s=0.03, deep_steps=((1, 2.0), (4, 6.5)),
    open_byte_s=0.5,
)  # fmt: skip


class TestRates:
    @pytest.mark.parametrize(
        ("rows", "seconds"), [(1, 1.0), (2, 1.5), (4, 2.5), (6, 3.25), (8, 4.0), (16, 8.0)]
    )
    def test_steps_between_and_beyond(self, rows: int, seconds: float) -> None:
        """Straight lines between what was measured; beyond it each row costs the same."""
        assert seconds == RATES.step_s(rows)

    @pytest.mark.parametrize(
        ("rows", "cells", "seconds"),
        [(1, 256, 1.0), (1, 257, 2.0), (1, 512, 2.0), (1, 513, 3.0), (4, 800, 14.5), (8, 1, 5.0)],
    )
    def test_steps_at_depth(self, rows: int, cells: int, seconds: float) -> None:
        """Each 256 cells more cost each row a second."""
        assert DEEP_RATES.step_s(rows, cells) == seconds

    def test_a_disturbed_measurement_of_depth(self) -> None:
        """One size that says that depth costs nothing does not make deep rows cheap."""
        rates = Rates(
            0.01, ((1, 1.0), (4, 2.5), (16, 8.0)), deep_prompt_token_s=0.03,
            deep_steps=((1, 1.5), (4, 2.5), (16, 16.0)),
        )  # fmt: skip
        assert rates.step_s(4, 5 * 256) == 2.5 + 4 * 4 * 0.5

    @pytest.mark.parametrize(
        ("start", "end", "seconds"),
        [(0, 100, 1), (0, 256, 2.56), (256, 266, 0.3), (250, 262, 0.06 + 0.18), (512, 522, 0.5)],
    )
    def test_prompts_at_depth(self, start: int, end: int, seconds: float) -> None:
        """0.01 seconds for each of the first 256 tokens, 0.03 for the next, 0.05 after them."""
        assert DEEP_RATES.prompt_s(start, end) == pytest.approx(seconds)

    @pytest.mark.parametrize("rates", [RATES, DEEP_RATES])
    def test_round_trip(self, rates: Rates) -> None:
        """What is kept comes back."""
        assert Rates.from_json(rates.to_json()) == rates

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "7",
            "{}",
            RATES.to_json().replace("[[1, 1.0], [4, 2.5], [8, 4.0]]", "[]"),
            RATES.to_json().replace("0.01", "0"),
            RATES.to_json().replace("2.5", "-1"),
            DEEP_RATES.to_json().replace("6.5", "-1"),
        ],
    )
    def test_nonsense_is_refused(self, text: str) -> None:
        """A spoilt cache is measured anew."""
        assert text not in (RATES.to_json(), DEEP_RATES.to_json())
        with pytest.raises((ValueError, KeyError, TypeError)):
            Rates.from_json(text)


class TestExpectedSeconds:
    def test_one_row(self) -> None:
        """200 tokens at 100 a second, then 4 steps of one row: the prompt gave the first token."""
        assert expected_seconds([RowShape(200, 5)], Layout(1, 1, 8), RATES) == 2.0 + 4.0

    def test_rows_together(self) -> None:
        """Two rows run 2 steps side by side (1.5 s each), then the longer one 2 more alone."""
        rows = [RowShape(100, 5), RowShape(100, 3)]

        assert expected_seconds(rows, Layout(1, 1, 8), RATES) == 2.0 + 2 * 1.5 + 2 * 1.0

    def test_rows_wait_for_slots(self) -> None:
        """In one slot the second row starts when the first has ended."""
        rows = [RowShape(100, 5), RowShape(100, 3)]

        assert expected_seconds(rows, Layout(1, 1, 1), RATES) == 2.0 + 4.0 + 2.0

    def test_lanes_compute_at_one_time(self) -> None:
        """Each lane has a row: the slower one counts."""
        rows = [RowShape(100, 5), RowShape(100, 3)]

        assert expected_seconds(rows, Layout(2, 1, 1), RATES) == 1.0 + 4.0

    def test_prefixes_are_computed_once_in_a_lane(self) -> None:
        """The second row of a lane starts behind what it shares with the first: 3 x 0.8 s less."""
        prefix = Prefix(80, 5)
        rows = [RowShape(100, 1, (prefix,))] * 5

        assert expected_seconds(rows, Layout(1, 1, 8), RATES) == pytest.approx(1 + 4 * 0.2)
        assert expected_seconds(rows, Layout(2, 1, 4), RATES) == pytest.approx(1 + 2 * 0.2)

    def test_depth_is_the_longest_row_s(self) -> None:
        """A row of 300 tokens makes a short one's steps those of 512 cells until it has ended."""
        rows = [RowShape(300, 3), RowShape(10, 5)]
        prompts = 2.56 + 44 * 0.03 + 0.1

        seconds = expected_seconds(rows, Layout(1, 1, 2), DEEP_RATES)

        assert seconds == pytest.approx(prompts + 2 * (1.5 + 2 * 1.0) + 2 * 1.0)

    def test_making_slots_takes_time(self) -> None:
        """Half a second for a byte: 2 lanes of 3 slots of 10 bytes."""
        rows = [RowShape(100, 1)] * 2
        seconds = expected_seconds(rows, Layout(2, 1, 3), DEEP_RATES, slot_bytes=10)

        assert seconds == 1.0 + 30.0

    def test_of_many_rows_some_are_simulated(self) -> None:
        """Equal rows one after another take as long as that."""
        rows = [RowShape(100, 3)] * 5000

        assert expected_seconds(rows, Layout(1, 1, 1), RATES) == pytest.approx(15000)

    @given(
        st.lists(st.builds(RowShape, st.integers(1, 900), st.integers(1, 90)), max_size=40),
        st.integers(1, 9),
    )
    def test_bounds(self, rows: list[RowShape], slots: int) -> None:
        """No less than its prompts and its longest row, no more than one row after another."""
        seconds = expected_seconds(rows, Layout(1, 1, slots), RATES)

        prompts = sum(row.prompt_tokens for row in rows) / 100
        steps = [row.max_tokens - 1 for row in rows]
        assert prompts + max(steps, default=0) - 1e-6 <= seconds <= prompts + sum(steps) + 1e-6


class TestChoice:
    CONFIG = EngineConfig("m", threads=4)
    ROWS = tuple([RowShape(100, 11)] * 64)

    def test_the_fastest_is_taken(self) -> None:
        """Four lanes of one thread, each as fast as one lane of four, are four times as fast."""
        choice = Planner(self.CONFIG, lambda layout, budget_s: RATES).choose(
            self.ROWS, 64, on_gpu=False
        )

        assert choice.layout == Layout(4, 1, 8)
        assert choice.expected_s == 16 * 1.0 + 2 * 10 * 4.0
        assert [layout.lanes for layout, _ in choice.others] == [2, 1]

    def test_short_jobs_are_not_measured(self) -> None:
        """By rule: two lanes."""
        measured: list[Layout] = []

        def measure(layout: Layout, budget_s: float) -> None:
            measured.append(layout)

        choice = Planner(self.CONFIG, measure).choose(self.ROWS[:4], 4, on_gpu=False)

        assert (choice.layout, measured) == (Layout(2, 2, 2), [])
        assert choice.expected_s is None

    def test_a_knob_set_by_hand_stays(self) -> None:
        """There is nothing to measure then."""
        config = EngineConfig("m", threads=4, lanes=3, parallel=64)

        choice = Planner(config, lambda layout, budget_s: RATES).choose(self.ROWS, 64, on_gpu=False)

        assert choice.layout == Layout(3, 1, 22)

    def test_flash_attention_must_be_allowed_and_rows_be_short(self) -> None:
        """It is twice as fast here, but would change bits, or be slow on long rows."""
        fused = Rates(0.005, ((1, 0.5), (8, 2.0)))

        def measure(layout: Layout, budget_s: float) -> Rates:
            return fused if layout.flash_attention else RATES

        allowed = EngineConfig("m", threads=4, any_numerics=True)
        chosen = [
            Planner(config, measure)
            .choose(self.ROWS, 64, on_gpu=False, row_cells=cells)
            .layout.flash_attention
            for config, cells in [(self.CONFIG, 200), (allowed, 200), (allowed, 300)]
        ]

        assert chosen == [False, True, False]

    @pytest.mark.parametrize(
        ("parallel", "cell_bytes", "slots"), [(None, 0, 8), (None, 1, 4), (64, 1, 16)]
    )
    def test_fewer_slots_where_making_them_takes_longer(
        self, parallel: int | None, cell_bytes: int, slots: int
    ) -> None:
        """Answers of 2 tokens gain a second by each slot; making one takes half a second a byte."""
        rates = replace(RATES, open_byte_s=0.5)
        config = EngineConfig("m", threads=4, lanes=4, parallel=parallel)
        rows = [RowShape(100, 2)] * 64

        choice = Planner(config, lambda layout, budget_s: rates).choose(
            rows, 64, on_gpu=False, row_cells=1000, cell_bytes=cell_bytes
        )

        assert choice.layout == Layout(4, 1, slots)

    @pytest.mark.parametrize(("faster", "lanes"), [(1.05, 2), (1.2, 1)])
    def test_fewer_lanes_must_be_faster_by_a_tenth(self, faster: float, lanes: int) -> None:
        """Two lanes by rule; one that computes all in half of the time, and a little less."""
        halves = 2 * faster
        one = Rates(0.01 / halves, tuple((rows, s / halves) for rows, s in RATES.steps))
        config = EngineConfig("m", threads=2, parallel=16)

        def measure(layout: Layout, budget_s: float) -> Rates:
            return RATES if layout.lanes == 2 else one

        choice = Planner(config, measure).choose(self.ROWS, 16, on_gpu=False)

        assert choice.layout.lanes == lanes

    def test_the_time_to_measure_is_shared(self) -> None:
        """Three layouts have a third of it each; the first that is too slow ends it."""
        budgets: list[float] = []

        def measure(layout: Layout, budget_s: float) -> Rates | None:
            budgets.append(budget_s)
            return RATES if len(budgets) < 2 else None

        Planner(self.CONFIG, measure).choose(self.ROWS, 64, on_gpu=False)

        assert budgets == pytest.approx([10 / 3, 5], rel=0.01)

    def test_what_cannot_be_measured(self) -> None:
        """The rule holds."""
        choice = Planner(self.CONFIG, lambda layout, budget_s: None).choose(
            self.ROWS, 64, on_gpu=False
        )

        assert choice.layout.lanes == 2
        assert "rule" in choice.reason


class TestCalibration:
    def test_on_the_fake(self) -> None:
        """Prompts and steps of all sizes up to the slots are measured, in every lane."""
        context = ContextConfig(12, 256, None, chunk=512, threads=1)

        rates = measure([FakeBackend(), FakeBackend(step_s=0.002)], context, budget_s=9)

        assert rates is not None
        assert [rows for rows, _ in rates.steps] == [1, 4, 12]
        assert all(seconds >= 0.001 for _, seconds in rates.steps)  # the mean of both lanes
        assert rates.prompt_token_s >= 0.001 / calibration.PIECE
        assert rates.deep_steps is None

    def test_depth(self) -> None:
        """Rows of more than 256 cells are measured there, too, if the time allows it."""
        context = ContextConfig(12, 512, None, chunk=128, threads=1)

        rates = measure([FakeBackend(step_s=0.001)], context, budget_s=9)
        hurried = measure([FakeBackend(step_s=0.02)], context, budget_s=0.2)

        assert rates is not None
        assert rates.deep_steps is not None
        assert [rows for rows, _ in rates.deep_steps] == [1, 4, 12]
        assert hurried is not None
        assert hurried.deep_steps is None

    def test_too_slow(self) -> None:
        """It ends after the first 32 tokens."""
        backend = FakeBackend(step_s=0.01)
        context = ContextConfig(12, 256, None, chunk=512, threads=1)

        assert measure([backend], context, budget_s=0.05) is None
        assert backend.decode_s < 0.03

    def test_measured_once(self, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """What was found is kept, for this file and these settings."""
        backend = LlamaBackend(str(tiny_model))
        context = ContextConfig(4, 256, None, chunk=512, threads=1)
        found = rates_of(str(tiny_model), [backend], context, 9)
        monkeypatch.setattr(calibration, "measure", lambda *_: RATES)

        assert rates_of(str(tiny_model), [backend], context, 9) == found != RATES
        assert rates_of(str(tiny_model), [backend, backend], context, 9) == RATES
        backend.close()

    def test_disturbed_measurements_are_not_kept_for_good(
        self, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """After an hour they are made again; if nothing else is going on then, for good."""
        backend, context = LlamaBackend(str(tiny_model)), ContextConfig(5, 256, None, 512, 1)
        now, others = [0.0], [5.0, 0.0]  # the last comes first
        monkeypatch.setattr(calibration.time, "time", lambda: now[0])
        monkeypatch.setattr(machine, "_others_s", lambda: others.pop() if others else 0.0)
        monkeypatch.setattr(machine, "_allowed_cores", lambda: {0})
        measured = []

        def found(*_: object) -> Rates:
            measured.append(now[0])
            return RATES

        monkeypatch.setattr(calibration, "measure", found)
        for at in (0.0, 3599.0, 3601.0, 9999.0):
            now[0] = at
            rates_of(str(tiny_model), [backend], context, 9)
        backend.close()
        assert measured == [0.0, 3601.0]

    def test_other_work_is_seen(self) -> None:
        """A process that computes, and not this one."""
        command = [sys.executable, "-c", "while True: pass"]
        with subprocess.Popen(command) as other, OtherWork() as seen:
            time.sleep(0.5)
            other.kill()
        assert seen.share > 0.1 / (os.cpu_count() or 1)

    def test_no_file(self) -> None:
        """The fake has none, so nothing is measured."""
        assert rates_of("fake", [FakeBackend()], ContextConfig(4, 256, None, 512, 1), 9) is None

    def test_cut_prompts_have_the_same_bits(self, tiny_models: dict[str, Path]) -> None:
        """For every weight type, on this processor."""
        for kind, path in tiny_models.items():
            backend = LlamaBackend(str(path))
            assert cuts_alike(backend._model, 1), kind
            backend.close()

    def test_prompts_that_differ_together_are_found(
        self, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As if a kernel for many rows summed in another order."""
        backend = LlamaBackend(str(tiny_model))
        together = numerics._group_logits
        monkeypatch.setattr(numerics, "_group_logits", lambda *a: together(*a) ^ 1)
        assert not numerics.groups_alike(backend._model, 1)
        backend.close()


class TestCommand:
    def test_a_file(self, tmp_path: Path) -> None:
        """Rows are counted, bad ones apart, and what is planned stands in lines."""
        rows = tmp_path / "rows.jsonl"
        rows.write_text('{"prompt": "one"}\n{"prompt": "two"}\nnonsense\n')

        result = CliRunner().invoke(
            main, ["plan", "fake", str(rows), "--backend", "fake", "--lanes", "1", "--threads", "1"]
        )

        assert result.exit_code == 3, result.output
        lines = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
        assert lines["job"] == str(rows)
        assert lines["rows"] == "3; 1 can't be read"
        # <user>one</user><assistant> in bytes, and BOS
        assert lines["prompts"].startswith("56 tokens: 28 to 28 a row")
        assert lines["answers"] == "at most 1,024 tokens"
        assert lines["plan"].startswith("1 lane with 1 thread and 2 rows; streams of 768 cells")
        assert lines["expected"] == "not measured"

    def test_lanes_of_unlike_sizes(self, tmp_path: Path) -> None:
        """Three rows in two lanes are two and one."""
        rows = tmp_path / "rows.jsonl"
        rows.write_text('{"prompt": "one"}\n' * 9)

        result = CliRunner().invoke(
            main, ["plan", "fake", str(rows), "--backend", "fake", "--lanes", "2", "--threads", "2",
                   "--parallel", "3", "--temperature", "1"]
        )  # fmt: skip

        lines = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
        assert lines["plan"].startswith(
            "2 lanes, each with 1 thread and up to 2 rows, 3 rows in all; streams of"
        )

    def test_a_system_message_needs_the_template(self) -> None:
        """As in `run`."""
        result = CliRunner().invoke(main, ["plan", "fake", "--raw", "--system", "x"])

        assert result.exit_code == 2
        assert "--system goes with the chat template" in result.stderr

    def test_no_usable_row(self, tmp_path: Path) -> None:
        """It says so."""
        rows = tmp_path / "rows.jsonl"
        rows.write_text("nonsense\n")

        result = CliRunner().invoke(main, ["plan", "fake", str(rows), "--backend", "fake"])

        lines = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
        assert lines["rows"] == "1; 1 can't be read"
        assert lines["plan"] == "no row can be computed"
        assert result.exit_code == 3
