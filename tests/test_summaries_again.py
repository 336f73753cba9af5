"""Runs of `summarize` after others, its journal, encodings, reasoning, the documented code."""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
import zlib
from pathlib import Path

import pytest
from click.testing import CliRunner

import localbatch
from localbatch.cli.main import main
from localbatch.data.errors import ConfigError, InputError
from localbatch.engine import fake
from localbatch.summaries.cutter import Cutter
from localbatch.summaries.extract import extract
from localbatch.summaries.job import SummaryConfig, summarize
from localbatch.summaries.prompts import Prompts, SummaryOptions, Task
from localbatch.summaries.stream import Counts
from localbatch.summaries.work import DocumentResult
from tests.test_summarize import SHORT, Job, command, job, sentences

__all__ = ["job"]

ROOT = Path(__file__).parent.parent


class TestStaleSummaries:
    def test_those_of_deleted_documents_go(self, job: Job) -> None:
        """With the folders that are empty then; the index has them no more."""
        job.run()
        (job.source / "sub" / "b.txt").unlink()
        assert job.run().removed == ["sub/b.txt"]
        assert not (job.output / "sub").exists()
        assert [row["name"] for row in job.index()] == ["a.txt", "long.md"]
        assert job.run().removed == []

    def test_also_when_starting_over(self, job: Job) -> None:
        """What was written is known from the journal that is thrown away."""
        job.run()
        (job.source / "a.txt").unlink()
        assert job.run(fresh=True).removed == ["a.txt"]

    def test_what_someone_else_wrote_stays(self, job: Job) -> None:
        """A summary that was edited, and a file that was there before."""
        job.run()
        mine = job.output / "sub" / "mine.md"
        mine.write_text("my own words")
        (job.output / "a.txt.md").write_text("edited")
        (job.source / "sub" / "b.txt").unlink()
        (job.source / "a.txt").unlink()
        assert job.run().removed == ["sub/b.txt"]
        assert mine.read_text() == "my own words"
        assert (job.output / "a.txt.md").read_text() == "edited"

    def test_documents_that_were_not_asked_for_are_not_gone(self, job: Job) -> None:
        """Of a run with other paths the summaries of the first stay."""
        job.run()
        config = job.config()
        other = SummaryConfig(
            "fake", [str(job.source / "a.txt")], config.output, SHORT, chunk_tokens=420,
            engine=config.engine,
        )  # fmt: skip
        assert summarize(other).removed == []
        assert (job.output / "long.md.md").exists()

    def test_the_command_says_so(self, job: Job) -> None:
        """In one line."""
        assert CliRunner().invoke(main, command(job)).exit_code == 0
        (job.source / "a.txt").unlink()
        again = CliRunner().invoke(main, command(job))
        assert "1 summary removed whose documents have none any more" in again.stderr


class TestJournal:
    @pytest.mark.parametrize("name", ["", "index", "index.jsonl", "index.csv", "index.journal"])
    def test_status_and_export(self, job: Job, tmp_path: Path, name: str) -> None:
        """The folder, its indexes and its journal all lead to the rows, each chunk and merge."""
        total = job.run().counts.finished_nodes
        which = str(job.output / name)
        status = CliRunner().invoke(main, ["status", which])
        assert re.search(rf"rows +{total} of {total} finished", status.stdout), status.output
        assert "complete" in status.stdout
        target = tmp_path / "rows.jsonl"
        assert CliRunner().invoke(main, ["export", which, "-o", str(target)]).exit_code == 0
        ids = [json.loads(line)["id"] for line in target.read_text("utf-8").splitlines()]
        assert len(ids) == len(set(ids)) == total
        assert "a.txt#0.0" in ids

    def ids(self, job: Job, tmp_path: Path) -> set[str]:
        """Return the ids that are exported; as many are finished, `status` says."""
        target = tmp_path / "rows.jsonl"
        assert (
            CliRunner().invoke(main, ["export", str(job.output), "-o", str(target)]).exit_code == 0
        )
        ids = {json.loads(line)["id"] for line in target.read_text("utf-8").splitlines()}
        status = CliRunner().invoke(main, ["status", str(job.output)])
        assert re.search(rf"rows +{len(ids)}\b", status.stdout), status.output
        return ids

    def test_what_is_stale_is_not_counted(self, job: Job, tmp_path: Path) -> None:
        """Documents that were changed, deleted and renamed: the rows are those of a fresh job."""
        job.run()
        job.write("long.md", "# The long one\n\n" + sentences(50, 1))
        (job.source / "a.txt").unlink()
        (job.source / "sub" / "b.txt").rename(job.source / "c.txt")
        job.run()
        ids = self.ids(job, tmp_path)
        job.run(fresh=True)
        assert ids == self.ids(job, tmp_path)
        assert {name.partition("#")[0] for name in ids} == {"long.md", "c.txt"}

    def test_rows_of_documents_that_were_not_asked_for_stay(self, job: Job, tmp_path: Path) -> None:
        """Also where a run was cut short before their summaries were there."""

        def interrupt(counts: Counts, done: DocumentResult | None) -> None:
            if counts.finished_nodes >= 4:
                raise KeyboardInterrupt

        summarize(job.config(), interrupt)
        before = self.ids(job, tmp_path)
        config = job.config()
        b = str(job.source / "sub" / "b.txt")
        summarize(SummaryConfig(
            "fake", [b], config.output, SHORT, chunk_tokens=420, engine=config.engine
        ))  # fmt: skip
        assert before < self.ids(job, tmp_path)
        assert job.run().counts.resumed_nodes >= len(before)

    def test_a_failed_part_costs_no_other_part(self, job: Job, tmp_path: Path) -> None:
        """What is finished of its document stays for `--retry-failed`."""
        job.run()
        before = self.ids(job, tmp_path)
        with contextlib.closing(sqlite3.connect(job.output / "index.journal")) as connection:
            found = connection.execute("SELECT number, record FROM rows").fetchall()
            (number,) = (n for n, record in found if json.loads(record)["id"] == "long.md#0.0")
            record = {**json.loads(dict(found)[number]), "error": {"message": "made up"}}
            text = json.dumps(record)
            connection.execute(
                "UPDATE rows SET kind = 1, record = ?, crc = ? WHERE number = ?",
                (text, zlib.crc32(text.encode()), number),
            )
            connection.commit()
        assert [d.error for d in job.run().documents if d.error] == ["part 1: made up"]
        assert self.ids(job, tmp_path) == before
        counts = job.run(retry_failed=True).counts
        assert counts.finished_nodes - counts.resumed_nodes == 1

    def test_a_folder_without_one(self, tmp_path: Path) -> None:
        """Is an error of one line."""
        status = CliRunner().invoke(main, ["status", str(tmp_path)])
        assert status.exit_code != 0
        assert "there is no such journal" in status.output


def test_a_job_of_python_goes_on_in_the_command(job: Job) -> None:
    """Settings that are left out are those that the command names."""
    total = job.run().counts.finished_nodes
    done = CliRunner().invoke(main, command(job))
    assert f"{total} chunks and merges ({total} by earlier runs)" in done.stderr, done.stderr
    assert job.run().counts.resumed_nodes == total
    other = CliRunner().invoke(main, command(job, "--kv-layout", "unified"))
    assert '--kv-layout was "streams", is "unified"' in other.stderr


class TestEncodings:
    TEXT = "Die Straße führt über den Fluß. Die Brücke wurde 1850 gebaut und ist schön. " * 20

    @pytest.mark.parametrize("encoding", ["utf-8", "cp1252", "utf-16"])
    def test_guessed(self, tmp_path: Path, encoding: str) -> None:
        """With `auto`, what is not UTF-8 is read as what it most likely is."""
        path = tmp_path / "x.txt"
        path.write_bytes(self.TEXT.encode(encoding))
        assert extract(path, "auto").text == self.TEXT

    def test_nothing_is_guessed_unasked(self, tmp_path: Path) -> None:
        """The error names what helps."""
        path = tmp_path / "x.txt"
        path.write_bytes(self.TEXT.encode("cp1252"))
        with pytest.raises(InputError, match=r"is not UTF-8 \(byte 9\).*--encoding auto"):
            extract(path)

    @pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
    def test_utf16_without_a_mark(self, tmp_path: Path, encoding: str) -> None:
        """Zero bytes are no text, unless the encoding that was named has them."""
        path = tmp_path / "x.txt"
        path.write_bytes(self.TEXT.encode(encoding))
        with pytest.raises(InputError, match=rf"zero bytes; for UTF-16 .* --encoding {encoding}\)"):
            extract(path, "auto")
        assert extract(path, encoding.replace("-", "_")).text == self.TEXT

    def test_bytes_that_are_no_text(self, tmp_path: Path) -> None:
        """Nothing is proposed for them."""
        path = tmp_path / "x.txt"
        path.write_bytes(bytes(range(256)) * 4)
        with pytest.raises(InputError, match=r"zero bytes\)$"):
            extract(path)

    def test_a_wrong_name(self) -> None:
        """Is an error before anything begins."""
        assert SummaryConfig("fake", ["x"], "y", encoding="auto").encoding == "auto"
        with pytest.raises(ConfigError, match="none of the name 'utf-99'"):
            SummaryConfig("fake", ["x"], "y", encoding="utf-99")


class TestReasoning:
    TEMPLATE = fake.CHAT_TEMPLATE + "{% if enable_thinking | default(true) %}<think>{% endif %}"

    def test_it_does_not_eat_the_summary(self, job: Job) -> None:
        """Reasoning has tokens of its own; all that comes after may be as long as ever."""
        engine = {"backend": "fake", "threads": 1, "chat_template": self.TEMPLATE}
        params = localbatch.SamplingParams(max_reasoning_tokens=20, ignore_eos=True)
        result = job.run(engine=engine, params=params)
        assert all(document.summary for document in result.documents)
        target = job.output.parent / "rows.jsonl"
        CliRunner().invoke(main, ["export", str(job.output), "-o", str(target)])
        for row in map(json.loads, target.read_text("utf-8").splitlines()):
            usage = row["usage"]
            assert 0 < usage["reasoning_tokens"] <= 28
            is_part = row["id"].startswith("long.md#0.")
            left = usage["completion_tokens"] - usage["reasoning_tokens"]
            assert left >= (176 if is_part else 36)

    def test_room_is_kept_for_it(self) -> None:
        """512 tokens if nothing is said; none if the template is told not to think."""
        options = SummaryOptions(length=10)
        with Cutter(
            "fake", Prompts(options), backend="fake", chat_template=self.TEMPLATE
        ) as cutter:
            request = cutter.prompts.request(Task.WHOLE, "x", 0, "words")
            assert request.params.max_reasoning_tokens == 512
            assert request.params.max_tokens == 36 + 512 + 8
            assert cutter.sizes.part == 176
        inputs = localbatch.formats.inputs.InputOptions(template_args={"enable_thinking": False})
        with Cutter(
            "fake", Prompts(options, inputs), backend="fake", chat_template=self.TEMPLATE
        ) as cutter:
            assert cutter.prompts.request(Task.WHOLE, "x", 0, "w").params.max_tokens == 36


def test_another_script(tiny_model: Path, tmp_path: Path) -> None:
    """Texts without spaces and in many bytes a letter are cut into chunks that fit, too."""
    source = tmp_path / "in"
    source.mkdir()
    (source / "ja.txt").write_text("橋は月曜日に閉鎖された。修理には六か月かかる。" * 60, "utf-8")
    (source / "ru.txt").write_text(
        "Мост закрыт в понедельник. Ремонт займёт полгода. " * 40, "utf-8"
    )
    (source / "en.txt").write_text(sentences(30), "utf-8")
    config = SummaryConfig(
        str(tiny_model), [str(source)], str(tmp_path / "out"), SHORT, chunk_tokens=500,
        engine={"threads": 1, "lanes": 1},
    )  # fmt: skip
    result = summarize(config)
    assert [document.error for document in result.documents] == [None] * 3
    assert all(document.chunks > 1 for document in result.documents)


def test_the_documented_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of docs/summarize.md, with a fake model."""
    page = (ROOT / "docs" / "summarize.md").read_text("utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports" / "may.txt").write_text(sentences(20))
    monkeypatch.chdir(tmp_path)
    code = code.replace('"smollm2-135m"', '"fake"').replace(
        "options)", "options, engine={'backend': 'fake'})"
    )
    exec(code, {})
    assert (tmp_path / "summaries" / "may.txt.md").exists()
