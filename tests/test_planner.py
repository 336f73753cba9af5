"""The planner: which layouts there are, what a job takes in each by measured rates, the choice."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from localbatch.cli.main import main
from localbatch.data.config import EngineConfig
from localbatch.engine import calibration
from localbatch.engine.backend import ContextConfig
from localbatch.engine.calibration import Rates, rates_of
from localbatch.engine.fake import FakeBackend
from localbatch.engine.llama import LlamaBackend
from localbatch.engine.numerics import cuts_alike
from localbatch.engine.planner import Layout, Planner, RowShape, expected_seconds

RATES = Rates(100.0, ((1, 1.0), (4, 2.5), (8, 4.0)))


class TestRates:
    @pytest.mark.parametrize(
        ("rows", "seconds"), [(1, 1.0), (2, 1.5), (4, 2.5), (6, 3.25), (8, 4.0), (16, 8.0)]
    )
    def test_steps_between_and_beyond(self, rows: int, seconds: float) -> None:
        """Straight lines between what was measured; beyond it each row costs the same."""
        assert seconds == RATES.step_s(rows)

    def test_round_trip(self) -> None:
        """What is kept comes back."""
        assert Rates.from_json(RATES.to_json()) == RATES

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "7",
            "{}",
            '{"prefill_tok_s": 1, "steps": []}',
            '{"prefill_tok_s": 0, "steps": [[1, 1]]}',
            '{"prefill_tok_s": 1, "steps": [[1, -1]]}',
        ],
    )
    def test_nonsense_is_refused(self, text: str) -> None:
        """A spoilt cache is measured anew."""
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
        choice = Planner(self.CONFIG, lambda layout: RATES).choose(self.ROWS, 64, on_gpu=False)

        assert choice.layout == Layout(4, 1, 16)
        assert choice.expected_s == 16 * 1.0 + 10 * 8.0
        assert [layout.lanes for layout, _ in choice.others] == [2, 1]

    def test_short_jobs_are_not_measured(self) -> None:
        """By rule: two lanes."""
        measured: list[Layout] = []

        choice = Planner(self.CONFIG, measured.append).choose(self.ROWS[:4], 4, on_gpu=False)

        assert (choice.layout, measured) == (Layout(2, 2, 2), [])
        assert choice.expected_s is None

    def test_a_knob_set_by_hand_stays(self) -> None:
        """There is nothing to measure then."""
        config = EngineConfig("m", threads=4, lanes=3)

        choice = Planner(config, lambda layout: RATES).choose(self.ROWS, 64, on_gpu=False)

        assert choice.layout == Layout(3, 1, 22)

    def test_flash_attention_must_be_allowed_and_rows_be_short(self) -> None:
        """It is twice as fast here, but would change bits, or be slow on long rows."""
        fused = Rates(200.0, ((1, 0.5), (8, 2.0)))

        def measure(layout: Layout) -> Rates:
            return fused if layout.flash_attention else RATES

        allowed = EngineConfig("m", threads=4, any_numerics=True)
        chosen = [
            Planner(config, measure)
            .choose(self.ROWS, 64, on_gpu=False, row_cells=cells)
            .layout.flash_attention
            for config, cells in [(self.CONFIG, 200), (allowed, 200), (allowed, 300)]
        ]

        assert chosen == [False, True, False]

    def test_what_cannot_be_measured(self) -> None:
        """The rule holds."""
        choice = Planner(self.CONFIG, lambda layout: None).choose(self.ROWS, 64, on_gpu=False)

        assert choice.layout.lanes == 2
        assert "rule" in choice.reason


class TestCalibration:
    def test_on_the_fake(self) -> None:
        """Prompts and steps of all sizes up to the slots are measured, in every lane."""
        context = ContextConfig(12, 256, None, chunk=512, threads=1)

        rates = calibration.measure([FakeBackend(), FakeBackend(step_s=0.002)], context)

        assert [rows for rows, _ in rates.steps] == [1, 8, 12]
        assert all(seconds >= 0.002 for _, seconds in rates.steps)
        assert 0 < rates.prefill_tok_s < 2 * calibration.PROMPT_TOKENS / 0.002

    def test_measured_once(self, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """What was found is kept, for this file and these settings."""
        backend = LlamaBackend(str(tiny_model))
        context = ContextConfig(4, 256, None, chunk=512, threads=1)
        found = rates_of(str(tiny_model), [backend], context)
        monkeypatch.setattr(calibration, "measure", lambda *_: RATES)

        assert rates_of(str(tiny_model), [backend], context) == found != RATES
        assert rates_of(str(tiny_model), [backend, backend], context) == RATES
        backend.close()

    def test_no_file(self) -> None:
        """The fake has none, so nothing is measured."""
        assert rates_of("fake", [FakeBackend()], ContextConfig(4, 256, None, 512, 1)) is None

    def test_cut_prompts_have_the_same_bits(self, tiny_models: dict[str, Path]) -> None:
        """For every weight type, on this processor."""
        for kind, path in tiny_models.items():
            backend = LlamaBackend(str(path))
            assert cuts_alike(backend._model, 1), kind
            backend.close()


class TestCommand:
    def test_a_file(self, tmp_path: Path) -> None:
        """Rows are counted, bad ones apart, and what is planned stands in lines."""
        rows = tmp_path / "rows.jsonl"
        rows.write_text('{"prompt": "one"}\n{"prompt": "two"}\nnonsense\n')

        result = CliRunner().invoke(
            main, ["plan", "fake", str(rows), "--backend", "fake", "--lanes", "1", "--threads", "1"]
        )

        assert result.exit_code == 0, result.output
        lines = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
        assert lines["job"] == f"2 rows of {rows}; 1 can't be read"
        assert lines["plan"].startswith(
            "1 lane, each with 1 thread and 2 rows; streams of 768 cells"
        )
        assert lines["expected"] == "not measured"

    def test_a_system_message_needs_the_template(self) -> None:
        """As in `run`."""
        result = CliRunner().invoke(main, ["plan", "fake", "--raw", "--system", "x"])

        assert result.exit_code == 2
        assert "--system goes with the chat template" in result.stderr

    def test_no_usable_row(self, tmp_path: Path) -> None:
        """One line that says so, exit code 2."""
        rows = tmp_path / "rows.jsonl"
        rows.write_text("nonsense\n")

        result = CliRunner().invoke(main, ["plan", "fake", str(rows), "--backend", "fake"])

        assert result.exit_code == 2
        assert result.stderr == f"Error: {rows}: no row can be computed\n"
