"""What is said of a job before it runs: lengths, rows that do not fit, prompts as they are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from localbatch import LLM, Completion, Request, SamplingParams
from localbatch.cli.main import main
from localbatch.data.config import Overlength
from localbatch.data.errors import InputError
from localbatch.engine.fake import BOS, FIRST_BYTE, FakeBackend
from localbatch.engine.llama import LlamaBackend
from localbatch.engine.overlength import cut, room_for_prompt
from localbatch.engine.prompt import PromptEncoder
from localbatch.jobs.preflight import look_through

LEFT, MIDDLE, RIGHT = (
    Overlength.TRUNCATE_LEFT, Overlength.TRUNCATE_MIDDLE, Overlength.TRUNCATE_RIGHT,
)  # fmt: skip


def invoke(*args: str) -> Result:
    return CliRunner().invoke(main, args, catch_exceptions=False)


def write(folder: Path, rows: list[dict[str, Any]]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


class TestCut:
    @pytest.mark.parametrize(
        ("where", "surplus", "expected"),
        [
            (LEFT, 3, [3, 4, 5, 6]), (RIGHT, 3, [0, 1, 2, 3]), (MIDDLE, 3, [0, 1, 5, 6]),
            (MIDDLE, 4, [0, 1, 6]), (LEFT, 9, []), (RIGHT, 0, [0, 1, 2, 3, 4, 5, 6]),
        ],
    )  # fmt: skip
    def test_by_hand(self, where: Overlength, surplus: int, expected: list[int]) -> None:
        """Of seven tokens."""
        assert cut(list(range(7)), surplus, where) == expected

    def test_room_by_hand(self) -> None:
        """The answer has its max_tokens, but no more than half."""
        assert room_for_prompt(1000, 200) == 800
        assert room_for_prompt(1000, 900) == 500


class TestOverlength:
    def fit(self, row: Request, ctx: int, where: Overlength) -> tuple[str, int]:
        tokens, num_cut = PromptEncoder(FakeBackend()).encode_fitting(row, ctx, where)
        assert tokens[0] == BOS
        return bytes(t - FIRST_BYTE for t in tokens[1:]).decode(), num_cut

    @pytest.mark.parametrize(
        ("where", "expected"), [(LEFT, "56789"), (RIGHT, "01234"), (MIDDLE, "01289")]
    )
    def test_a_raw_prompt(self, where: Overlength, expected: str) -> None:
        """BOS and five of ten letters fit, with ten tokens of answer."""
        row = Request("id", 0, prompt="0123456789", params=SamplingParams(max_tokens=10))
        text, num_cut = self.fit(row, 16, where)
        # 16 cells less 8 for the answer, less BOS; what is cut is at least what must be.
        assert text in (expected, {LEFT: "3456789", RIGHT: "0123456", MIDDLE: "0123789"}[where])
        assert num_cut == 10 - len(text)

    def test_a_conversation_keeps_its_turns(self) -> None:
        """The longest message is cut, the template around it stays whole."""
        messages = [{"role": "system", "content": "brief"}, {"role": "user", "content": "x" * 300}]
        row = Request("id", 0, messages=messages, params=SamplingParams(max_tokens=20))
        text, num_cut = self.fit(row, 200, LEFT)
        assert text.startswith("<system>brief</system><user>xxx")
        assert text.endswith("xxx</user><assistant>")
        assert len(text) + 1 == 180
        assert num_cut == 300 - text.count("x")

    def test_a_row_that_fits_is_not_touched(self) -> None:
        """Nor one whose answer is all that has no room, if that is not asked for."""
        row = Request("id", 0, prompt="0123456789", params=SamplingParams(max_tokens=5))
        assert self.fit(row, 16, LEFT) == ("0123456789", 0)

    def test_what_cannot_be_cut_is_an_error(self) -> None:
        """The template alone is too long."""
        row = Request("id", 0, messages=[{"role": "user", "content": "x"}])
        with pytest.raises(InputError, match="too long even without its longest text"):
            self.fit(row, 20, MIDDLE)

    @settings(max_examples=60, deadline=None)
    @given(st.text(min_size=1, max_size=400), st.sampled_from([LEFT, MIDDLE, RIGHT]))
    def test_any_text_of_a_real_vocabulary_fits(self, text: str, where: Overlength) -> None:
        """Also where cutting parts a character or joins other tokens."""
        try:
            row = Request("id", 0, prompt=text, params=SamplingParams(max_tokens=8))
        except InputError:
            return
        encoder = PromptEncoder(self.backend)
        try:
            tokens, num_cut = encoder.encode_fitting(row, 32, where)
        except InputError:
            return  # nothing but blanks would be left
        assert len(tokens) <= 24
        assert num_cut == len(encoder.encode(row)) - len(tokens)

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _backend(cls, tiny_model: Path) -> Iterator[None]:
        cls.backend = LlamaBackend(str(tiny_model), metadata_only=True)
        yield
        cls.backend.close()

    backend: LlamaBackend


class TestPreflight:
    def test_counts_by_hand(self) -> None:
        """On the fake, whose tokens are bytes: BOS and the letters."""
        params = SamplingParams(max_tokens=100)
        rows = [
            Request("a", 0, prompt="x" * 9, params=params),
            Request("b", 1, prompt="x" * 199, params=params),
            Request("c", 2, prompt="x" * 299, params=params, line=3),
        ]
        noted = []
        with LLM("fake", backend="fake", ctx=256) as llm:
            found = look_through(llm, rows, noted.append)

        assert list(found.lengths) == [10, 200]
        assert (found.rows, found.refused, found.short_of_room) == (3, 1, 1)
        assert found.answer_tokens == 200
        assert [(bad.id, bad.line) for bad in noted] == [("c", 3)]
        assert found.lines(Overlength.ERROR) == [
            ("rows", "3; 1 can't be computed"),
            ("prompts", "210 tokens: 10 to 200 a row, half of them up to 10, 95 % up to 200"),
            ("answers", "at most 200 tokens; in 1 row the context may be full before"),
        ]

    def test_looking_ahead_leaves_no_trace(self) -> None:
        """Rows that were planned for are counted when they are run, not before."""
        rows = [
            Request(i, i, prompt=f"row {i}", params=SamplingParams(max_tokens=3)) for i in (0, 1)
        ]
        with LLM("fake", backend="fake") as llm:
            assert look_through(llm, rows).windows == 1
            assert llm.prepare(rows) == []
            assert llm.stats.plan is not None
            assert llm.stats.prompt_tokens == 0
            done = [c for c in llm.run(rows) if isinstance(c, Completion)]
            assert len(done) == 2
            assert llm.stats.prompt_tokens == 2 * 6

    def test_common_beginnings(self) -> None:
        """What two rows have in common is computed once, in whole fours."""
        head = "the same beginning of two rows " * 8
        rows = [Request(i, i, prompt=f"{head}{i} and something else") for i in range(3)]
        with LLM("fake", backend="fake", lanes=1) as llm:
            found = look_through(llm, rows)
            llm.generate([f"{head}{i} and something else" for i in range(3)], raw=True)
            computed = llm.stats.computed_prompt_tokens
        assert found.shared_tokens == 2 * ((len(head) + 1) // 4 * 4)
        assert sum(found.lengths) - found.shared_tokens == computed


class TestCommands:
    def test_dry_run(self, tmp_path: Path) -> None:
        """All rows are checked, none is run, no file is made; exit 3 if some can't be."""
        source = write(tmp_path, [{"prompt": "x"}, {"prompt": "y" * 500}, {"promt": "z"}])
        output = tmp_path / "out.jsonl"
        args = ["run", "fake", source, "-o", str(output), "--backend", "fake", "--dry-run"]

        result = invoke(*args, "--ctx", "256", "--threads", "1")

        assert result.exit_code == 3
        assert "rows      3; 1 can't be read; 1 can't be computed" in result.stdout
        assert f"{source}:3: promt: unknown key" in result.stderr
        assert f"{source}:2: prompt: has 525 tokens" in result.stderr
        assert list(tmp_path.iterdir()) == [Path(source)]

        result = invoke(*args, "--ctx", "1024", "--threads", "1")
        assert result.exit_code == 3

    def test_a_dry_run_names_all_rows(self, tmp_path: Path) -> None:
        """There is no output where the others would be."""
        source = write(tmp_path, [{"promt": "z"}] * 30)

        result = invoke("run", "fake", source, "--backend", "fake", "--dry-run")

        named = [line.split(": ")[0] for line in result.stderr.splitlines()]
        assert named == [f"{source}:{line}" for line in range(1, 31)]

    def test_overlength_in_a_run(self, tmp_path: Path) -> None:
        """The row is answered, and what was cut is in its usage."""
        source = write(tmp_path, [{"prompt": "y" * 500, "max_tokens": 5}])
        args = ["run", "fake", source, "--backend", "fake", "--ctx", "256"]
        assert invoke(*args).exit_code == 3

        result = invoke(*args, "--overlength", "truncate-middle")

        assert result.exit_code == 0
        usage = json.loads(result.stdout)["usage"]
        assert usage["prompt_tokens"] <= 251

    def test_show_prompt(self, tmp_path: Path) -> None:
        """The text with its control tokens, and every token."""
        source = write(tmp_path, [{"prompt": "hi"}, {"id": "b", "prompt": "yo"}])
        args = ["show-prompt", "fake", source, "--backend", "fake"]

        assert invoke(*args).stdout.startswith("<user>hi</user><assistant>\n\n27 tokens:\n0:")
        shown = json.loads(invoke(*args, "b", "--json").stdout)
        assert shown["text"] == "<user>yo</user><assistant>"
        assert [token["id"] for token in shown["tokens"][:3]] == [0, 2 + ord("<"), 2 + ord("u")]
        missing = invoke(*args, "c")
        assert (missing.exit_code, missing.stderr) == (
            2, f"Error: {source}: has no row with the id 'c'\n",
        )  # fmt: skip

    def test_a_chat_template_of_ones_own(self, tmp_path: Path) -> None:
        """From a file; without the template there is nothing to take it."""
        template = tmp_path / "template.jinja"
        template.write_text("Q: {{ messages[0].content }} {{ style }} A:")
        source = write(tmp_path, [{"prompt": "hi"}])
        args = ["show-prompt", "fake", source, "--backend", "fake", "--chat-template"]

        result = invoke(*args, str(template), "--template-arg", "style=brief")
        assert result.stdout.startswith("Q: hi brief A:\n")
        result = invoke(*args, str(template), "--raw")
        assert result.exit_code == 2
        assert "--chat-template goes with the chat template, not with --raw" in result.stderr
