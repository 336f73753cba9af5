"""Documents in, summaries out: the tree, the cutting, the stream, resuming, bad documents."""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
import time
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from semantic_text_splitter import MarkdownSplitter

from localbatch.cli.main import main
from localbatch.data.errors import ConfigError, InputError, JournalError
from localbatch.engine.llm import LLM
from localbatch.formats.inputs import InputOptions
from localbatch.jobs.journal_files import JobLock
from localbatch.summaries import job as job_module
from localbatch.summaries import stream as stream_module
from localbatch.summaries.answers import Answer
from localbatch.summaries.checks import copies, repeats_itself, unknown_numbers, warnings_of
from localbatch.summaries.cutter import Cutter, Sizes, Span
from localbatch.summaries.documents import Document, find_documents
from localbatch.summaries.extract import Extracted, extract, tidy
from localbatch.summaries.job import SummaryConfig, SummaryResult, summarize
from localbatch.summaries.outputs import write_index
from localbatch.summaries.plan import plan_summaries
from localbatch.summaries.prompts import Prompts, SummaryOptions, SummaryStyle, Task
from localbatch.summaries.stream import Counts
from localbatch.summaries.tree import merge_levels
from localbatch.summaries.work import DocumentResult, Work

pytestmark = pytest.mark.timeout(120)

SHORT = SummaryOptions(length=10)


def sentences(number: int, seed: int = 0) -> str:
    """Return paragraphs of sentences, each with a number of its own."""
    things = ["river", "stone", "bridge", "winter", "market", "letter"]
    words = random.Random(seed).choices(things, k=number)
    return "".join(
        f"Sentence {i} is about the {word}.{' ' if i % 5 else chr(10) * 2}"
        for i, word in enumerate(words)
    )


class TestTree:
    @pytest.mark.parametrize(
        ("parts", "sizes"),
        [
            (1, []),
            (2, [[2]]),
            (4, [[4]]),
            (7, [[3, 4], [2]]),
            (
                500,
                [[4] * 125, [3] * 3 + [4] * 29, [4] * 8,
                 [4, 4], [2]],
            ),
        ],
    )  # fmt: skip
    def test_sizes(self, parts: int, sizes: list[list[int]]) -> None:
        """Groups of a level are as even as can be, and there are no more levels than needed."""
        found = [[len(group) for group in level] for level in merge_levels(parts, 4)]
        assert [len(level) for level in found] == [len(level) for level in sizes]
        assert [sorted(level) for level in found] == [sorted(level) for level in sizes]

    @given(st.integers(1, 2000), st.integers(2, 40))
    def test_every_part_is_merged_once(self, parts: int, fan_in: int) -> None:
        """Each level takes all nodes below, in order, and the last is one node."""
        below = parts
        for level in merge_levels(parts, fan_in):
            assert [i for group in level for i in group] == list(range(below))
            assert all(1 <= len(group) <= fan_in for group in level)
            assert len(level) < below
            below = len(level)
        assert below == 1


class TestWork:
    @settings(max_examples=40)
    @given(st.sampled_from([1, 2, 7, 60, 500]), st.integers(2, 9), st.randoms())
    def test_all_parts_are_in_the_end_once(
        self, parts: int, fan_in: int, chance: random.Random
    ) -> None:
        """In the order of the text, in whatever order the answers come."""
        words = [f"w{i}" for i in range(parts)]
        text = " ".join(words)
        ends = [0, *(i for i, letter in enumerate(text) if letter == " "), len(text)]
        spans = [Span(a, b, 1) for a, b in itertools.pairwise(ends)]
        sizes = Sizes(fan_in * 14, 10)
        assert sizes.fan_in == fan_in
        work = Work(Document(Path("x"), "x"), Extracted(text, "x", "text"), spans, sizes)
        waiting, asked = list(work.first), 0
        while waiting:
            node = waiting.pop(chance.randrange(len(waiting)))
            assert len(node.parts) <= fan_in
            ready = work.finish(node, Answer(node.text))
            asked += 1
            waiting += [ready] if ready else []
        assert work.is_done
        assert work.result.summary.split() == words
        assert asked == work.num_nodes


@pytest.fixture(scope="module")
def cutter() -> Iterator[Cutter]:
    with Cutter("fake", Prompts(SHORT), chunk_tokens=400, backend="fake") as made:
        yield made


class TestCutting:
    @settings(max_examples=60)
    @given(
        text=st.text(
            st.sampled_from("abcdef .!?\n#-`|äß漢字🙂"), min_size=1, max_size=3000
        ).map(tidy).filter(str.strip),
        markdown=st.booleans(),
    )  # fmt: skip
    def test_spans_are_the_whole_text(self, cutter: Cutter, text: str, markdown: bool) -> None:
        """Put together they are the document, nothing twice, and each has room for its answer."""
        spans = cutter.cut(text, markdown=markdown)
        assert "".join(text[span.start : span.end] for span in spans) == text
        assert all(span.tokens <= cutter.sizes.chunk for span in spans)
        task = Task.WHOLE if len(spans) == 1 else Task.PART
        for span in spans:
            request = Prompts(SHORT).request(task, "x", 0, text[span.start : span.end])
            assert cutter.fits(request)

    def test_cuts_are_between_sentences(self, cutter: Cutter) -> None:
        """Where sentences fit, none is torn apart."""
        text = sentences(60)
        spans = cutter.cut(text)
        assert len(spans) > 5
        assert all(text[: span.end].rstrip().endswith(".") for span in spans)

    def test_nothing_tiny_stands_alone(self, cutter: Cutter) -> None:
        """What is left over before and after a code block goes with a neighbour."""
        code = "\n\n".join(["x = 1\n" * 10] * 6)
        text = f"# A\n\nFirst words.\n\n```\n{code}```\n\n# B\n\n{'word ' * 71}end.\n"
        splitter = MarkdownSplitter.from_callback(lambda part: len(part.encode()), 368, trim=False)
        assert sum(len(part) <= 32 for part in splitter.chunks(text)) == 3
        assert min(span.tokens for span in cutter.cut(text, markdown=True)) > 300

    def test_what_is_little_too_long_is_cut_in_halves(self, cutter: Cutter) -> None:
        """Instead of a whole chunk and a rest that is shorter than its summary would be."""
        text = sentences(100).replace("\n\n", " ")[: cutter.sizes.chunk + 40]
        sizes = [span.tokens for span in cutter.cut(text)]
        assert len(sizes) == 2
        assert min(sizes) * 2 > cutter.sizes.chunk * 0.8

    def test_a_tokenizer_with_merges(self, tiny_model: Path) -> None:
        """With llama.cpp's own counts, chunks are the whole text and fit, too."""
        text = tidy(sentences(200) + "漢字" * 300)
        with Cutter(str(tiny_model), Prompts(SHORT), chunk_tokens=400) as cutter:
            spans = cutter.cut(text)
            assert "".join(text[a:b] for a, b, _ in spans) == text
            prompts = [Prompts(SHORT).request(Task.PART, "x", 0, text[a:b]) for a, b, _ in spans]
            assert all(map(cutter.fits, prompts))

    def test_a_context_without_room_is_refused(self) -> None:
        """The message says how large it must be, and that is enough."""
        prompts = Prompts(SummaryOptions(length=160))
        with pytest.raises(ConfigError, match=r"it must be [\d,]+ \(--ctx\)") as refused:
            Cutter("fake", prompts, ctx=512, backend="fake")
        least = int(str(refused.value).split("must be ")[1].split()[0].replace(",", ""))
        Cutter("fake", prompts, ctx=least, backend="fake").close()
        with pytest.raises(ConfigError):
            Cutter("fake", prompts, ctx=least - 1, backend="fake")


class TestPrompts:
    def text_of(self, options: SummaryOptions, task: Task, **more: Any) -> str:
        request = Prompts(options, **more).request(task, "x", 0, " the words \n")
        if request.prompt is not None:
            return request.prompt
        assert request.messages is not None
        return str(request.messages[-1]["content"])

    def test_what_is_asked(self) -> None:
        """Style, length, language and focus, before the text and in short after it."""
        options = SummaryOptions(SummaryStyle.HEADLINE, 7, "Dutch", focus="money")
        asked = self.text_of(options, Task.FINAL)
        before, after = asked.split("\n\nText:\nthe words\n\n")
        for part in (before, after):
            assert "headline" in part
            assert "about 7 words" in part
            assert "in Dutch" in part
        assert "money" in before

    def test_parts_are_alike_for_all_styles(self) -> None:
        """Only the last summary has the form that was asked for; a headline's parts are longer."""
        asked = self.text_of(SummaryOptions(SummaryStyle.HEADLINE), Task.PART)
        assert "headline" not in asked
        assert "about 80 words" in asked

    def test_ones_own_instruction(self) -> None:
        """The text is after it, or at its place in it."""
        own = SummaryOptions(instruction="Tell me.\n")
        assert self.text_of(own, Task.MERGE) == "Tell me.\n\nthe words"
        own = SummaryOptions(instruction="A {text} B {x}")
        assert self.text_of(own, Task.WHOLE) == "A the words B {x}"
        raw = self.text_of(own, Task.WHOLE, inputs=InputOptions(chat=False))
        assert raw == "A the words B {x}\n"

    def test_bad_options(self) -> None:
        """The field is named."""
        with pytest.raises(ConfigError, match="length: must be from 1 to 4000 words, not 0"):
            SummaryOptions(length=0)
        with pytest.raises(ConfigError, match="instruction: is empty"):
            SummaryOptions(instruction=" ")


class TestChecks:
    def test_numbers(self) -> None:
        """Only numbers that the source has not, however their digits are grouped."""
        known = {"1234567.50", "2024", "7"}
        said = "1. In 2024 it cost 1,234,567.50 of 8,000 for 7 days."
        assert unknown_numbers(said, known) == ["8,000"]

    def test_repetition(self) -> None:
        """The same sentence again and again is, an ordinary text is not."""
        assert repeats_itself("The river is long and the bridge is old. " * 4)
        assert not repeats_itself(sentences(8))

    def test_copies(self) -> None:
        """A run of the source is a copy; other words about it are not."""
        source = sentences(60)
        assert copies(" ".join(source.split()[20:70]), source)
        assert not copies("It tells of rivers and stones and bridges and much else, too.", source)

    MILL = (
        "The mill stood by the river for a century. Nobody knew who had built it, and when. "
        "In 1911 a flood took its wheel. The parish bought the ruin and made it a school. "
        "Children came from all farms around. It was closed when the road was built."
    )

    @pytest.mark.parametrize("form", [
        "{0} {1} {2}", "* {1}\n* {2}\n* {0}", "1) {2}\n2) {0}\n3) {1}",
        "“{1}” {2}[1] {0}", "Summary: {0} {2} {1}", "- **{2}**\n- **{1}**\n> {0}",
    ])  # fmt: skip
    def test_sentences_in_any_order_are_copies(self, form: str) -> None:
        """As a paragraph, or in lists of any kind."""
        first = "The parish bought the ruin and made it a school."
        second = "Nobody knew who had built it, and when."
        third = "The mill stood by the river for a century."
        assert copies(form.format(first, second, third), self.MILL)

    @pytest.mark.parametrize("summary", [
        "A flood took its wheel in 1911. Who had built it nobody knew. Then it was a school.",
        "Nobody knew who had built it, and when. Its wheel was lost to the waters, they say.",
        "- the mill\n- the river\n- a century\n- a flood\n- its wheel\n- the parish\n- a school",
        "... " * 20, "* - " * 12,
        "- made it a school\n- from all farms around\n- by the river\n- knew who had built",
    ])  # fmt: skip
    def test_other_words_names_and_marks_are_no_copies(self, summary: str) -> None:
        """Names and terms of the source have to be in a summary."""
        assert not copies(summary, self.MILL * 2)

    def test_letters_are_the_same_however_they_are_coded(self) -> None:
        """Composed or not, with soft hyphens or not."""
        first = "Die Mühle stand über hundert Jahre an diesem Fluß, den alle fürchteten."
        source = f"{first} Dann kam ein Regen."
        written = unicodedata.normalize("NFD", first).replace("fürch", "für\u00adch")
        assert copies(written, source)

    def test_nothing_else_is_said_of_an_empty_summary(self) -> None:
        """It is empty."""
        assert warnings_of(" \n", "source", is_cut=True) == ["is empty"]
        assert warnings_of("Fine.", "source", is_cut=True) == ["ends at the token limit"]


class Job:
    """Documents in a folder, summarized by the fake backend."""

    def __init__(self, folder: Path) -> None:
        self.source, self.output = folder / "in", folder / "out"
        (self.source / "sub").mkdir(parents=True)
        self.write("a.txt", sentences(10))
        self.write("long.md", "# The long one\n\n" + sentences(120, 1))
        self.write("sub/b.txt", sentences(30, 2))

    def write(self, name: str, text: str | bytes) -> Path:
        path = self.source / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    def config(self, **changes: Any) -> SummaryConfig:
        values: dict[str, Any] = {
            "options": SHORT, "chunk_tokens": 420, "engine": {"backend": "fake", "threads": 1},
            **changes,
        }  # fmt: skip
        return SummaryConfig("fake", [str(self.source)], str(self.output), **values)

    def run(self, **changes: Any) -> SummaryResult:
        return summarize(self.config(**changes))

    def index(self) -> list[dict[str, Any]]:
        """Return the index without its times, which are of one run."""
        lines = (self.output / "index.jsonl").read_text("utf-8").splitlines()
        return [{k: v for k, v in json.loads(x).items() if k != "seconds"} for x in lines]

    def files(self) -> dict[str, str]:
        """Return the summaries by name, and the index."""
        found = {
            str(p.relative_to(self.output)): p.read_text("utf-8") for p in self.output.rglob("*.md")
        }
        return found | {"index": json.dumps(self.index())}


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


class TestJob:
    def test_each_document_has_a_summary(self, job: Job) -> None:
        """At its place below the output, and in both indexes."""
        result = job.run()
        index = job.index()
        with (job.output / "index.csv").open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        assert [row["name"] for row in index] == ["a.txt", "long.md", "sub/b.txt"]
        assert [row["summary"] for row in rows] == [row["summary"] for row in index]
        assert [row["title"] for row in index][1] == "The long one"
        assert index[1]["levels"] >= 2
        assert result.failed == 0
        for row in index:
            assert (job.output / row["output"]).read_text("utf-8").startswith(f"# {row['title']}")
            assert row["summary"] in (job.output / row["output"]).read_text("utf-8")
            text = (job.source / row["name"]).read_text()
            assert (row["words"], row["error"]) == (len(text.split()), None)

    def test_summaries_of_several_lines(self, tmp_path: Path) -> None:
        """The table of the index keeps them in one cell."""
        summary = '- one\n- "two", three\r- four'
        write_index(tmp_path, [DocumentResult("a", "in/a", summary=summary)])
        with (tmp_path / "index.csv").open(newline="", encoding="utf-8") as file:
            assert [row["summary"] for row in csv.DictReader(file)] == [summary]

    def test_the_summary_is_what_the_model_says(self, job: Job) -> None:
        """A document in one chunk has the answer to one request, computed alone."""
        job.write("long.md", "Only this.")
        job.run()
        request = Prompts(SHORT).request(Task.WHOLE, "long.md#0.0", 0, "Only this.")
        with LLM("fake", backend="fake") as llm:
            (alone,) = llm.run([request])
        assert job.index()[1]["summary"] == alone.text.strip()  # type: ignore[union-attr]

    def test_merges_are_of_all_parts(self, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each summary of a level is in one request of the next, in the order of the text."""
        asked: dict[str, str] = {}
        original = Prompts.request

        def spy(self: Prompts, task: Task, row_id: str, index: int, text: str) -> Any:
            if row_id:
                asked[row_id] = text
            return original(self, task, row_id, index, text)

        monkeypatch.setattr(Prompts, "request", spy)
        job.run()
        lines = job.output / "index.journal"
        journal = job_module.Journal(lines)
        answers = {r["id"]: r["text"].strip() for r in map(json.loads, journal.records())}
        journal.close()
        chunks = sum(key.startswith("long.md#0.") for key in asked)
        with Cutter("fake", Prompts(SHORT), chunk_tokens=420, backend="fake") as cutter:
            levels = merge_levels(chunks, cutter.sizes.fan_in)
            for height, level in enumerate(levels):
                for place, group in enumerate(level):
                    parts = [answers[f"long.md#{height}.{i}"] for i in group]
                    if len(parts) == 1:
                        answers[f"long.md#{height + 1}.{place}"] = parts[0]
                        continue
                    want = "\n\n".join(parts)
                    shortened = "\n\n".join(cutter.head(p, cutter.sizes.part) for p in parts)
                    assert asked[f"long.md#{height + 1}.{place}"] in (want, shortened)
        assert len(levels) >= 2

    def test_a_finished_job_computes_nothing(
        self, job: Job, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The output is written anew, without the weights."""
        job.run()
        before = job.files()
        monkeypatch.delattr(job_module, "LLM")
        (job.output / "a.txt.md").unlink()
        result = job.run()
        assert result.counts.resumed_nodes == result.counts.finished_nodes > 5
        assert job.files() == before

    def test_a_changed_document_is_done_again(self, job: Job) -> None:
        """The others are not."""
        first = job.run()
        job.write("a.txt", "Something else.")
        second = job.run()
        assert second.counts.finished_nodes - second.counts.resumed_nodes == 1
        assert [d.summary for d in first.documents[1:]] == [d.summary for d in second.documents[1:]]
        assert first.documents[0].summary != second.documents[0].summary

    def test_other_settings_are_refused(self, job: Job) -> None:
        """Summaries of two styles are not mixed."""
        job.run()
        with pytest.raises(JournalError, match=r'--style was "paragraph", is "bullets"'):
            job.run(options=SummaryOptions(SummaryStyle.BULLETS, length=10))
        assert job.run(options=SummaryOptions(SummaryStyle.BULLETS, 10), fresh=True).failed == 0

    def test_bad_documents_cost_only_themselves(self, job: Job) -> None:
        """Each has one clear record."""
        job.write("empty.txt", "")
        job.write("blank.txt", " \n\n ")
        job.write("binary", b"ab\0cd")
        job.write("latin.txt", "Grüße".encode("cp1252"))
        job.write("picture.txt", b"\x89PNG\r\n")
        job.write("cjk.txt", "漢字かな。" * 200)
        result = job.run()
        errors = {d.name: d.error for d in result.documents if d.error}
        assert errors == {
            "empty.txt": "is empty",
            "blank.txt": "is empty",
            "binary": "is no text (it has zero bytes)",
            "latin.txt": "is not UTF-8 (byte 3); name its encoding with --encoding, as cp1252, "
            "or --encoding auto",
            "picture.txt": "is no text but a picture",
        }
        assert len(result.documents) == 9
        assert job.run(encoding="latin-1").failed == 4

    def test_a_summary_goes_with_its_document(self, job: Job) -> None:
        """When a document can't be summarized any more, the old summary is not left there."""
        job.run()
        job.write("a.txt", "")
        job.run()
        assert not (job.output / "a.txt.md").exists()
        assert (job.output / "long.md.md").exists()

    def test_a_killer_of_the_worker_costs_its_document_only(
        self, job: Job, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The document has the reason, the others their summaries."""
        clean = {d.name: d.summary for d in job.run().documents}
        job.write("bad.txt", "poison " + sentences(40, 5))

        class Deadly(LLM):
            def __init__(self, model: str, **engine: Any) -> None:
                from dataclasses import replace

                super().__init__(model, **engine)
                self.config = replace(self.config, fake_dies_on="poison")
                self._client.close()
                self._client = type(self._client)(self.config)

        monkeypatch.setattr(job_module, "LLM", Deadly)
        result = job.run(fresh=True)
        errors = {d.name: d.error for d in result.documents if d.error}
        assert list(errors) == ["bad.txt"]
        assert str(errors["bad.txt"]).startswith("part 1: the worker process ended by SIGKILL")
        assert {d.name: d.summary for d in result.documents if not d.error} == clean

    def test_a_missing_library_is_said_before_anything_is_computed(
        self, job: Job, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With the extra to install; there is no output yet."""
        job.write("x.pdf", b"%PDF-1.4")
        monkeypatch.setitem(sys.modules, "pypdf", None)
        with pytest.raises(ConfigError, match=r"localbatch\[docs\]"):
            job.run()
        assert not job.output.exists()

    def test_rows_ahead_are_limited(self, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
        """Documents are opened as there is room, and the answers are the same."""
        job.run()
        want = job.files()
        monkeypatch.setattr(stream_module, "AHEAD", 3)
        job.run(fresh=True)
        assert job.files() == want

    def test_ctrl_c(self, job: Job) -> None:
        """What was finished is in the output; the next run goes on."""
        job.run()
        want = job.files()

        def interrupt(counts: Counts, done: DocumentResult | None) -> None:
            if counts.finished_nodes >= 4:
                raise KeyboardInterrupt

        first = summarize(job.config(fresh=True), interrupt)
        second = job.run()
        assert first.interrupted
        assert second.counts.resumed_nodes >= 4
        assert job.files() == want

    def test_sources_are_listed(self, job: Job) -> None:
        """With the place of each part, all of the text together."""
        result = job.run(with_sources=True)
        long = result.documents[1]
        text = extract(job.source / "long.md").text
        assert "".join(text[s.start : s.end] for s in long.sources) == text
        assert [s.line for s in long.sources] == [
            text.count("\n", 0, s.start) + 1 for s in long.sources
        ]
        assert "## Sources" in (job.output / "long.md.md").read_text("utf-8")

    def test_a_plan(self, job: Job) -> None:
        """Counts what a run then does."""
        plan = plan_summaries(job.config())
        result = job.run()
        assert [(d.name, d.tokens, d.chunks) for d in plan.documents] == [
            (d.name, d.tokens, d.chunks) for d in result.documents
        ]
        chunks = sum(d.chunks for d in plan.documents)
        assert chunks + plan.merges == result.counts.finished_nodes == result.counts.nodes
        assert plan.all_tokens == result.counts.tokens == result.counts.finished_tokens


def command(job: Job, *more: str) -> list[str]:
    return [
        "summarize", "fake", str(job.source), "-o", str(job.output), "--backend", "fake",
        "--length", "10", "--chunk-tokens", "420", "--threads", "1", *more,
    ]  # fmt: skip


class TestDryRun:
    def snapshot(self, folder: Path) -> dict[str, bytes | None]:
        return {str(p): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}

    def refused(self, job: Job, *more: str) -> str:
        """Return what a dry run says, which writes nothing, and so does a real one."""
        before = self.snapshot(job.output.parent)
        dry = CliRunner().invoke(main, command(job, "--dry-run", *more))
        assert self.snapshot(job.output.parent) == before
        real = CliRunner().invoke(main, command(job, *more))
        assert (dry.exit_code, dry.stderr) == (real.exit_code, real.stderr)
        assert dry.exit_code == 2
        return dry.stderr

    def test_a_file_in_the_place_of_the_output(self, job: Job) -> None:
        """Or of a folder above it."""
        job.output.write_text("mine")
        assert "out is no folder" in self.refused(job)
        job.output = job.output / "deeper" / "still"
        assert "out is no folder" in self.refused(job)

    def test_an_output_that_can_not_be_written(
        self, job: Job, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whether it is there or not."""
        monkeypatch.setattr(os, "access", lambda *args: False)
        assert f"no permission to write in {job.output.parent}" in self.refused(job)
        job.output.mkdir()
        assert f"no permission to write in {job.output}" in self.refused(job)

    def test_an_output_that_is_the_input(self, job: Job) -> None:
        """Its summaries would be documents."""
        job.output = job.source
        assert "among the documents" in self.refused(job)

    def test_the_output_of_another_run(self, job: Job) -> None:
        """Of other settings, and one that still runs; starting over is no matter."""
        job.run()
        assert '--style was "paragraph"' in self.refused(job, "--style", "bullets")
        fresh = command(job, "--dry-run", "--style", "bullets", "--fresh")
        assert CliRunner().invoke(main, fresh).exit_code == 0
        with JobLock(job.output / "index.journal"):
            assert "another run is writing" in self.refused(job)
        (job.output / "index.journal").write_bytes(b"something else " * 10)
        assert "is no journal of localbatch" in self.refused(job, "--fresh")

    def test_it_writes_nothing(self, job: Job) -> None:
        """Not even the folder, and the numbers come all the same."""
        before = self.snapshot(job.output.parent)
        done = CliRunner().invoke(main, command(job, "--dry-run"))
        assert done.exit_code == 0
        assert re.search(r"documents +3\n", done.stdout)
        assert self.snapshot(job.output.parent) == before

    def test_documents_are_told_before_they_are_read(self, job: Job) -> None:
        """So that a bar can say which one takes its time; a run does that, too."""
        told: list[str | None] = []
        plan_summaries(job.config(), lambda counts: told.append(counts.reading))
        assert told == ["a.txt", "long.md", "sub/b.txt"]
        run: list[str | None] = []
        summarize(job.config(), lambda counts, done: run.append(counts.reading))
        assert [name for name in run if name] == told


class TestCommand:
    def test_exit_codes(self, job: Job) -> None:
        """0 when all is well, 3 with a bad document, 2 for what leads nowhere."""
        run = CliRunner().invoke
        assert run(main, command(job)).exit_code == 0
        job.write("empty.txt", "")
        bad = run(main, command(job))
        assert bad.exit_code == 3
        assert "empty.txt: is empty" in bad.stderr
        assert run(main, command(job, "--dry-run")).exit_code == 3
        assert run(main, ["summarize", "fake", "nowhere", "-o", str(job.output)]).exit_code == 2

    def test_killed_and_run_again(self, job: Job, tmp_path: Path) -> None:
        """The folder is that of an undisturbed run, and nothing finished is computed again."""
        for number in range(6):
            job.write(f"more{number}.txt", sentences(80, number))
        run = CliRunner().invoke
        assert run(main, command(job)).exit_code == 0
        want, total = job.files(), len(kept(job))
        job.output = tmp_path / "killed"
        chance = random.Random(7)
        finished: dict[int, str] = {}
        for kind in (signal.SIGKILL, signal.SIGINT, signal.SIGKILL, signal.SIGKILL):
            process = subprocess.Popen(
                [sys.executable, "-m", "localbatch", *command(job, "-q")],
                stderr=subprocess.DEVNULL,
            )
            until, some = time.monotonic() + 20, len(finished) + chance.randint(0, 15)
            while process.poll() is None and len(kept(job)) < some and time.monotonic() < until:
                time.sleep(0.01)
            process.send_signal(kind)
            process.wait()
            assert finished.items() <= kept(job).items()
            finished = kept(job)
        assert run(main, command(job)).exit_code == 0
        assert finished.items() <= kept(job).items()
        assert len(kept(job)) == total
        assert job.files() == want


def kept(job: Job) -> dict[int, str]:
    """Return the journal's records with their times, by number."""
    path = job.output / "index.journal"
    if not path.exists():
        return {}
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return dict(connection.execute("SELECT number, record FROM rows"))


class TestDocuments:
    def test_names(self, job: Job, tmp_path: Path) -> None:
        """Below a single folder as they lie there; otherwise with what was named."""
        out = str(job.source / "out")
        assert [d.name for d in find_documents([str(job.source)], out)] == [
            "a.txt", "long.md", "sub/b.txt"
        ]  # fmt: skip
        several = [str(job.source / "a.txt"), str(job.source / "sub")]
        assert [d.name for d in find_documents(several, out)] == ["a.txt", "sub/b.txt"]
        pattern = str(job.source / "**" / "*.txt")
        assert [d.name for d in find_documents([pattern], out)] == ["a.txt", "b.txt"]

    def test_the_output_and_hidden_files_are_no_documents(self, job: Job) -> None:
        """Also when the output is below the input."""
        (job.source / "out").mkdir()
        job.write("out/a.txt.md", "summary")
        job.write(".hidden", "x")
        names = [d.name for d in find_documents([str(job.source)], str(job.source / "out"))]
        assert names == ["a.txt", "long.md", "sub/b.txt"]

    def test_patterns_pass_over_the_output(self, job: Job) -> None:
        """As folders do, so that the summaries of one run are not documents of the next."""
        (job.source / "out").mkdir()
        job.write("out/a.txt.md", "summary")
        pattern = str(job.source / "**" / "*.md")
        names = [d.name for d in find_documents([pattern], str(job.source / "out"))]
        assert names == ["long.md"]
        with pytest.raises(ConfigError, match="there is no document"):
            find_documents([pattern], str(job.source))

    def test_summaries_among_the_documents_are_refused(
        self, job: Job, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """They would be documents of the next run, or lie over some of this one."""
        job.write("a.txt.md", "mine")
        monkeypatch.chdir(job.source)
        for paths, output in (["."], "."), (["../in/"], "../in"), (["sub", "a.txt"], "."):
            with pytest.raises(ConfigError, match="summaries would lie among the documents"):
                find_documents(paths, output)
        with pytest.raises(ConfigError, match=r"a.txt.md: is where the summary of a.txt would be"):
            find_documents(["a.txt", "a.txt.md"], ".")
        assert [d.name for d in find_documents(["sub/"], ".")] == ["b.txt"]

    def test_a_summary_in_the_place_of_a_folder_is_refused(self, job: Job) -> None:
        """`a.txt.md` can't be a summary and a folder of summaries."""
        (job.source / "a.txt.md").mkdir()
        job.write("a.txt.md/b.txt", "words")
        with pytest.raises(ConfigError, match="same summary file"):
            find_documents([str(job.source)], "out")

    def test_one_file_by_two_paths(self, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
        """Is one document."""
        monkeypatch.chdir(job.source)
        paths = ["a.txt", "./a.txt", "../in/a.txt", str(job.source / "a.txt")]
        assert [d.name for d in find_documents(paths, "out")] == ["a.txt"]

    @pytest.mark.skipif(sys.platform == "win32", reason="has no pipes in folders")
    def test_a_pipe_in_a_folder(self, job: Job) -> None:
        """Is passed over, for nobody may ever write to it; loops of links are no loops."""
        os.mkfifo(job.source / "pipe")
        (job.source / "sub" / "up").symlink_to("..")
        (job.source / "gone.txt").symlink_to("nowhere")
        names = [d.name for d in find_documents([str(job.source)], "out")]
        assert names == ["a.txt", "gone.txt", "long.md", "sub/b.txt"]

    @pytest.mark.skipif(sys.platform != "linux", reason="names are bytes there")
    def test_unusual_names(self, job: Job) -> None:
        """Each has its summary, or an error; the index and the notes have one line for each."""
        names = ["a b.txt", "-dash.txt", "quo\"te's.txt", "*[x]?.txt", "new\nline.txt", "x" * 253]
        for name in [*names, os.fsdecode(b"\xff\xfe.txt")]:
            job.write(name, "The bridge is closed.")
        result = job.run()
        errors = {d.name: d.error for d in result.documents if d.error}
        assert list(errors) == ["x" * 253]
        assert "has a name of 253 bytes" in errors["x" * 253]
        for name in [*names[:-1], os.fsdecode(b"\xff\xfe.txt")]:
            assert (job.output / f"{name}.md").read_text("utf-8").startswith("# The bridge")
        with (job.output / "index.csv").open(newline="", encoding="utf-8") as file:
            rows = {row["name"] for row in csv.DictReader(file)}
        assert rows >= {*names, r"\udcff\udcfe.txt"}
        lines = CliRunner().invoke(main, command(job, "--fresh")).stderr.splitlines()
        assert len(lines) == 1 + sum(bool(d.error or d.warnings) for d in result.documents)

    def test_two_of_one_name_are_refused(self, job: Job) -> None:
        """One summary would be lost."""
        job.write("sub/a.txt", "other")
        paths = [str(job.source / "a.txt"), str(job.source / "sub" / "a.txt")]
        with pytest.raises(ConfigError, match="same summary file"):
            find_documents(paths, "out")

    def test_a_byte_order_mark_says_the_encoding(self, tmp_path: Path) -> None:
        """Whatever was named."""
        path = tmp_path / "x.txt"
        for encoding in ("utf-8-sig", "utf-16"):
            path.write_bytes("Grüße\r\nvon hier".encode(encoding))
            assert extract(path, "cp1252").text == "Grüße\nvon hier"

    def test_a_run_of_letters_that_is_too_long(self, tmp_path: Path) -> None:
        """Cutting it would hold up all other documents; 100,000 of them are taken."""
        path = tmp_path / "x.txt"
        path.write_text("word " + "x" * 100_001)
        with pytest.raises(InputError, match="has 100,001 characters without a blank"):
            extract(path)
        path.write_text("word " + "x" * 100_000)
        assert len(extract(path).text) == 100_005

    def test_a_text_that_is_too_long(self, tmp_path: Path) -> None:
        """50 MB are refused without being read whole."""
        path = tmp_path / "x.txt"
        with path.open("wb") as file:
            file.truncate(50_000_000)
        with pytest.raises(InputError, match=r"too long \(50,000,000 bytes, at most 20,000,000\)"):
            extract(path)


@pytest.mark.model
def test_the_real_model(smollm2: Path, tmp_path: Path) -> None:
    """A short text gets a summary about it, the same in a second run elsewhere."""
    text = (
        "The old stone bridge over the river Elm was closed on Monday after engineers found cracks "
        "in two of its arches. The town council said that repairs will take six months and cost "
        "2 million pounds. Until then, drivers must use the bridge at Harrow, nine miles away. "
    )
    (tmp_path / "bridge.txt").write_text(text)
    summaries = []
    for name in ("one", "two"):
        config = SummaryConfig(
            str(smollm2), [str(tmp_path / "bridge.txt")], str(tmp_path / name),
            SummaryOptions(length=30),
        )  # fmt: skip
        summaries.append(summarize(config).documents[0].summary)
    assert "bridge" in summaries[0].lower()
    assert summaries[0] == summaries[1]
