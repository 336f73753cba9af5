"""The workloads of the benchmarks: valid rows of the promised lengths, no text used twice."""

from __future__ import annotations

import importlib.util
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from llama_cpp import Llama

FOLDER = Path(__file__).parent.parent / "bench" / "workloads"
ROWS = {"short": 64, "classify": 128, "mixed": 64, "summarize": 16}
MADE = ("classify", "mixed", "summarize")
RUN = 12  # words in a row that two texts must not share

Count = Callable[[str], int]


@pytest.fixture(scope="module")
def make() -> ModuleType:
    """Return bench/workloads/make.py as a module."""
    spec = importlib.util.spec_from_file_location("workloads_make", FOLDER / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tokens(smollm2: Path) -> Iterator[Count]:
    """Return a function that counts the tokens of a text."""
    llama = Llama(str(smollm2), vocab_only=True, verbose=False)
    yield lambda text: len(llama.tokenize(text.encode()))
    llama.close()


def rows(name: str) -> list[dict[str, Any]]:
    text = (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def prompts(name: str) -> list[str]:
    return [row["prompt"] for row in rows(name)]


def source(name: str) -> str:
    return (FOLDER / "texts" / name).read_text(encoding="utf-8").strip()


def words(text: str) -> list[str]:
    return re.findall(r"[\w']+", text.lower())


def shared_runs(texts: dict[str, str]) -> list[tuple[str, str, str]]:
    """Return the runs of RUN words that occur in two of the texts, or twice in one."""
    seen: dict[tuple[str, ...], tuple[str, int]] = {}
    shared = []
    for name, text in texts.items():
        row = words(text)
        for start in range(len(row) - RUN + 1):
            run = tuple(row[start : start + RUN])
            first, _ = seen.setdefault(run, (name, start))
            if seen[run] != (name, start):
                shared.append((first, name, " ".join(run)))
    return shared


class TestRows:
    @pytest.mark.parametrize("name", ROWS)
    def test_every_row_has_an_id_a_prompt_and_a_number_of_tokens(self, name: str) -> None:
        for row in rows(name):
            assert list(row) == ["id", "prompt", "max_tokens"]
            assert row["id"].startswith(f"{name}-")
            assert row["prompt"] == row["prompt"].strip()
            assert row["prompt"]
            assert type(row["max_tokens"]) is int

    @pytest.mark.parametrize(("name", "count"), ROWS.items())
    def test_the_number_of_rows_is_the_promised_one(self, name: str, count: int) -> None:
        assert len(rows(name)) == count

    def test_no_id_and_no_prompt_occurs_twice(self) -> None:
        everything = [row for name in ROWS for row in rows(name)]
        assert len({row["id"] for row in everything}) == len(everything)
        assert len({row["prompt"] for row in everything}) == len(everything)

    @pytest.mark.parametrize(("name", "out"), [("short", 64), ("classify", 4), ("summarize", 96)])
    def test_all_rows_but_the_mixed_ones_have_the_same_length_out(
        self, name: str, out: int
    ) -> None:
        assert {row["max_tokens"] for row in rows(name)} == {out}

    def test_mixed_has_a_heavy_tail(self) -> None:
        outs = [row["max_tokens"] for row in rows("mixed")]
        assert min(outs) == 8
        assert max(outs) == 512
        assert 40 <= statistics.median(outs) <= 60
        assert 3 <= sum(out > 300 for out in outs) <= 8


class TestMake:
    def test_it_gives_the_files(self, make: ModuleType) -> None:
        for name, content in make.build(0).items():
            assert (FOLDER / name).read_text(encoding="utf-8") == content

    def test_another_seed_gives_other_files_with_as_many_rows(self, make: ModuleType) -> None:
        zero, one = make.build(0), make.build(1)
        for name in MADE:
            assert one[f"{name}.jsonl"] != zero[f"{name}.jsonl"]
            assert len(one[f"{name}.jsonl"].splitlines()) == ROWS[name]

    @pytest.mark.parametrize(("seed", "code"), [("0", 0), ("1", 1)])
    def test_check_exits_with_1_if_the_files_differ(self, seed: str, code: int) -> None:
        command = [sys.executable, str(FOLDER / "make.py"), "--check", "--seed", seed]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == code
        assert len(done.stdout.splitlines()) == (len(MADE) if code else 0)

    def test_sentences_put_together_are_the_document(self, make: ModuleType) -> None:
        for text in make.documents().values():
            assert "".join(make._SENTENCE.findall(text)) == text

    @pytest.mark.parametrize("seed", range(5))
    def test_passages_come_from_their_documents(self, make: ModuleType, seed: int) -> None:
        todo, texts = make.tasks(), make.documents()
        made = make.passage_prompts(todo, make.random.Random(seed))
        for task, prompt in zip(todo, made, strict=True):
            passage = prompt.removeprefix(task.line).removesuffix(task.cue).strip()
            assert passage
            assert passage in texts[task.document]


class TestTexts:
    def test_classify_rows_share_the_head_and_nothing_else(self) -> None:
        head = source("head.txt")
        found = []
        for prompt in prompts("classify"):
            assert prompt.startswith(f"{head}\n\nMessage: ")
            assert prompt.endswith("\nLabel:")
            found.append(prompt.removeprefix(f"{head}\n\nMessage: ").removesuffix("\nLabel:"))
        assert sorted(found) == sorted(source("messages.txt").splitlines())

    def test_summarize_rows_share_the_instruction_and_nothing_else(self) -> None:
        instruction = source("instruction.txt")
        for prompt in prompts("summarize"):
            assert prompt.startswith(f"{instruction}\n\n")
            assert prompt.endswith("\n\nSummary:")

    def test_messages_share_no_run_of_words(self) -> None:
        messages = source("messages.txt").splitlines()
        texts = {f"message {number}": message for number, message in enumerate(messages, 1)}
        assert shared_runs({"head": source("head.txt"), **texts}) == []

    def test_documents_share_no_run_of_words(self, make: ModuleType) -> None:
        assert shared_runs(make.documents()) == []

    def test_short_and_mixed_rows_share_no_run_of_words(self) -> None:
        everything = {row["id"]: row["prompt"] for row in [*rows("short"), *rows("mixed")]}
        assert shared_runs(everything) == []

    def test_short_and_mixed_rows_have_no_common_beginning(self) -> None:
        beginnings = [words(prompt) for prompt in [*prompts("short"), *prompts("mixed")]]
        for one, other in combinations(beginnings, 2):
            assert one[:4] != other[:4]


@pytest.mark.model
class TestTokens:
    @pytest.mark.parametrize(
        ("name", "low", "high"), [("short", 20, 80), ("mixed", 30, 500), ("summarize", 440, 1490)]
    )
    def test_prompts_are_within_the_range(
        self, name: str, low: int, high: int, tokens: Count
    ) -> None:
        for row in rows(name):
            assert low <= tokens(row["prompt"]) <= high, row["id"]

    def test_the_head_of_classify_has_about_540_tokens(self, tokens: Count) -> None:
        assert 525 <= tokens(source("head.txt")) <= 555

    def test_a_message_has_35_to_65_tokens(self, tokens: Count) -> None:
        for message in source("messages.txt").splitlines():
            assert 35 <= tokens(message) <= 65, message

    def test_mixed_prompts_have_a_median_near_120(self, tokens: Count) -> None:
        assert 105 <= statistics.median(map(tokens, prompts("mixed"))) <= 135

    def test_documents_are_spread_from_400_to_1400_tokens(
        self, make: ModuleType, tokens: Count
    ) -> None:
        lengths = [tokens(text) for text in make.documents().values()]
        assert 400 <= min(lengths) < 550
        assert 1200 < max(lengths) <= 1400
        assert 40 <= tokens(source("instruction.txt")) <= 80

    @pytest.mark.parametrize("name", ROWS)
    def test_the_table_in_the_readme_has_the_measured_counts(
        self, name: str, tokens: Count
    ) -> None:
        lengths = [tokens(prompt) for prompt in prompts(name)]
        outs = [row["max_tokens"] for row in rows(name)]
        out = f"{min(outs)}" if min(outs) == max(outs) else f"{min(outs)} to {max(outs)}"
        cells = [len(lengths), min(lengths), round(statistics.median(lengths)), max(lengths)]
        line = f"| `{name}.jsonl` | " + " | ".join(f"{cell:,}" for cell in cells)
        line += f" | {sum(lengths):,} | {out} | {sum(outs):,} |"
        assert line in (FOLDER / "README.md").read_text(encoding="utf-8")
