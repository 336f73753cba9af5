"""A job that was cut short goes on where it was; another job is refused."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from localbatch.cli.main import main
from localbatch.data.errors import ConfigError, JournalError, OutputError
from localbatch.data.sampling_params import SamplingParams
from localbatch.formats.inputs import InputOptions
from localbatch.jobs import results as results_module
from localbatch.jobs import run as run_module
from localbatch.jobs.job import JobConfig, JobResult
from localbatch.jobs.journal_files import JobLock, journal_path
from localbatch.jobs.run import export_job, run_job
from localbatch.jobs.status import job_status

pytestmark = pytest.mark.timeout(120)


class Job:
    """A job on the fake backend, in a folder of its own."""

    def __init__(self, folder: Path, rows: int = 12) -> None:
        self.source, self.output = folder / "rows.jsonl", folder / "out.jsonl"
        self.journal = journal_path(str(self.output))
        self.write([{"prompt": f"prompt {i}"} for i in range(rows)])

    def write(self, rows: list[dict[str, Any] | str]) -> None:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        self.source.write_text("".join(line + "\n" for line in lines))

    def run(self, *, max_tokens: int = 4, system: str | None = None, **changes: Any) -> JobResult:
        engine = {"backend": "fake", "threads": 1, **changes.pop("engine", {})}
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        config = JobConfig(
            "fake", str(self.source), str(self.output), params,
            InputOptions(changes.pop("chat", True), system), quiet=True, engine=engine, **changes,
        )  # fmt: skip
        return run_job(config)

    def answers(self) -> list[dict[str, Any]]:
        """Return the output without its times, which are of one run."""
        rows = [json.loads(line) for line in self.output.read_text().split("\n")[:-1]]
        return [{k: v for k, v in row.items() if k != "timings"} for row in rows]

    def drop(self, condition: str) -> None:
        """Take rows out of the journal, as if they had not been finished."""
        with sqlite3.connect(self.journal) as connection:
            connection.execute(f"DELETE FROM rows WHERE {condition}")


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_what_is_finished_is_not_computed_again(job: Job) -> None:
    """The rest is, and the output is that of an undisturbed run."""
    first = job.run()
    answers = job.answers()
    job.drop("number % 3 = 1")
    job.output.unlink()

    second = job.run()

    assert (first.rows, first.resumed) == (12, 0)
    assert (second.rows, second.resumed) == (4, 8)
    assert job.answers() == answers


def test_a_finished_job_does_not_even_load_the_model(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output is written anew."""
    job.run()
    text = job.output.read_text()
    job.output.unlink()
    monkeypatch.delattr(run_module, "LLM")

    assert (job.run().rows, job.run().resumed) == (0, 12)
    assert job.output.read_text() == text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"max_tokens": 5}, "--max-tokens was 4, is 5"),
        ({"system": "Be brief."}, '--system was left out, is "Be brief."'),
        ({"chat": False}, "--raw was false, is true"),
        ({"engine": {"ctx": 128}}, "--ctx was left out, is 128"),
    ],
)
def test_other_settings_are_refused(job: Job, change: dict[str, Any], said: str) -> None:
    """The message says which; nothing is changed."""
    job.run()
    before = job.output.read_text()

    with pytest.raises(JournalError) as caught:
        job.run(**change)

    assert said in str(caught.value)
    assert str(job.output) in str(caught.value)
    assert "--fresh" in str(caught.value)
    assert job.output.read_text() == before
    assert job.run(**change, fresh=True).rows == 12


def test_settings_that_change_no_answer_may_change(job: Job) -> None:
    """Lanes, threads, order, rows at one time."""
    job.run()
    job.drop("number > 5")

    result = job.run(engine={"parallel": 2, "lanes": 2, "threads": 2, "order": "input"})

    assert (result.rows, result.resumed) == (6, 6)


def test_another_model_file_is_refused(job: Job, tiny_model: Path, tmp_path: Path) -> None:
    """Known by its content, not by its name."""
    model = tmp_path / "model.gguf"
    model.write_bytes(tiny_model.read_bytes())
    job.write([{"prompt": "w"}])
    config = JobConfig(
        str(model), str(job.source), str(job.output), SamplingParams(max_tokens=2),
        inputs=InputOptions(chat=False), quiet=True, engine={"threads": 1},
    )  # fmt: skip
    assert run_job(config).rows == 1
    assert run_job(config).resumed == 1
    with model.open("ab") as file:
        file.write(b"\0")

    with pytest.raises(JournalError, match="the model is another file"):
        run_job(config)


@pytest.mark.parametrize("change", ["prompt", "id", "parameter", "order"])
def test_a_changed_row_is_refused_before_anything_is_computed(
    job: Job, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """The line is named."""
    job.run()
    job.drop("number > 8")
    rows: list[dict[str, Any] | str] = [{"prompt": f"prompt {i}"} for i in range(12)]
    changed: dict[str, dict[str, Any]] = {
        "prompt": {"prompt": "another"},
        "id": {"prompt": "prompt 6", "id": "x"},
        "parameter": {"prompt": "prompt 6", "temperature": 1},
    }
    if change == "order":
        rows[6], rows[7] = rows[7], rows[6]
    else:
        rows[6] = changed[change]
    job.write(rows)
    monkeypatch.delattr(run_module, "LLM")

    with pytest.raises(JournalError, match="another row where the input has line 7 now"):
        job.run()


def test_rows_may_be_added_and_unfinished_ones_changed(job: Job) -> None:
    """Only finished rows must stay."""
    job.run()
    job.drop("number = 3")
    rows: list[dict[str, Any] | str] = [{"prompt": f"prompt {i}"} for i in range(15)]
    rows[3] = {"prompt": "another"}
    job.write(rows)

    result = job.run()

    assert (result.rows, result.resumed) == (4, 11)
    assert len(job.answers()) == 15


def test_rows_that_are_gone_are_noticed(job: Job) -> None:
    """An answer without a row would be in the output."""
    job.run()
    job.write([{"prompt": f"prompt {i}"} for i in range(10)])

    with pytest.raises(JournalError, match=r"answers of 12 rows, the input has 10 now"):
        job.run()


def test_failed_rows_are_taken_again_if_asked_for(job: Job) -> None:
    """A row that was too long for the context stays failed without, and is computed with it."""
    job.write([{"prompt": "short"}, {"prompt": "x" * 5000}, "nonsense"])
    first = job.run()
    again = job.run()
    retried = job.run(retry_failed=True)

    assert (first.rows, first.failed) == (3, 2)
    assert (again.rows, again.resumed, again.failed, again.resumed_failed) == (1, 2, 1, 1)
    assert (retried.rows, retried.resumed, retried.failed) == (2, 1, 2)
    assert [row["finish_reason"] for row in job.answers()] == ["length", "error", "error"]


def test_a_line_that_was_repaired_is_computed(job: Job) -> None:
    """Nothing has to be asked for: it never was a row."""
    job.write([{"prompt": "one"}, "nonsense", {"prompt": "three"}])
    job.run()
    job.write([{"prompt": "one"}, {"prompt": "two"}, {"prompt": "three"}])

    result = job.run()

    assert (result.rows, result.resumed, result.failed) == (1, 2, 0)
    assert [row["finish_reason"] for row in job.answers()] == ["length"] * 3


def test_two_runs_of_a_job(job: Job) -> None:
    """The second is refused; the first is not disturbed."""
    with JobLock(job.journal), pytest.raises(JournalError, match="another run"):
        job.run()
    assert job.run().rows == 12


def test_a_link_to_an_output_is_the_same_job(job: Job) -> None:
    """One output has one journal and one lock, by whatever name it is called."""
    job.run()
    link = job.output.with_name("link.jsonl")
    link.symlink_to(job.output)
    config = JobConfig(
        "fake", str(job.source), str(link), SamplingParams(max_tokens=4, ignore_eos=True),
        quiet=True, engine={"backend": "fake", "threads": 1},
    )  # fmt: skip

    assert run_job(config).resumed == 12
    with JobLock(job.journal), pytest.raises(JournalError, match="another run"):
        run_job(config)
    assert link.is_symlink()


@pytest.mark.parametrize("ending", ["", "-wal", ".lock"])
def test_an_output_is_never_laid_over_a_journal(job: Job, ending: str) -> None:
    """Neither by a run nor by an export; nor is the input overwritten by one."""
    job.run()
    target = f"{job.journal}{ending}"
    config = JobConfig("fake", str(job.source), target, engine={"backend": "fake"})

    with pytest.raises(ConfigError, match="is the name of a journal"):
        run_job(config)
    with pytest.raises(ConfigError, match="is the name of a journal"):
        export_job(str(job.output), target)
    with pytest.raises(ConfigError, match="is the input of this job"):
        export_job(str(job.output), str(job.source))
    assert job.run().resumed == 12


def test_a_refused_run_changes_nothing(job: Job) -> None:
    """What the journal says of its job stays, too."""
    job.run()
    other = job.source.with_name("other.jsonl")
    other.write_text('{"prompt": "another"}\n')
    config = JobConfig(
        "fake", str(other), str(job.output), SamplingParams(max_tokens=4, ignore_eos=True),
        quiet=True, engine={"backend": "fake", "threads": 1},
    )  # fmt: skip

    with pytest.raises(JournalError, match="another row"):
        run_job(config)

    assert job_status(str(job.output)).source == str(job.source)
    assert list(job.source.parent.glob("*.journal-*")) == []


def test_streams_have_no_journal(job: Job) -> None:
    """So there is nothing to start over."""
    config = JobConfig("fake", str(job.source), "-", fresh=True, engine={"backend": "fake"})

    with pytest.raises(ConfigError, match="go with a file"):
        run_job(config)


class TestCommands:
    def test_status_and_export(self, job: Job, tmp_path: Path) -> None:
        """Of a job that is half done, by its output's name or its journal's."""
        job.run()
        job.drop("number >= 9")
        copy = tmp_path / "copy.jsonl"

        half = job_status(str(job.output))
        result = CliRunner().invoke(main, ["export", str(job.journal), "-o", str(copy)])

        assert (half.rows, half.counts.total, half.is_running) == (12, 9, False)
        assert result.exit_code == 0
        assert "9 rows written" in result.stderr
        assert copy.read_text().split("\n")[:-1] == job.output.read_text().split("\n")[:9]

    def test_status_in_words(self, job: Job) -> None:
        """Complete, running, or neither."""
        job.run()
        complete = CliRunner().invoke(main, ["status", str(job.output)]).stdout
        job.drop("number >= 9")
        with JobLock(job.journal):
            running = CliRunner().invoke(main, ["status", str(job.output)]).stdout

        assert "state     complete" in complete
        assert "rows      12 of 12 finished (100%); 0 failed" in complete
        assert "state     running" in running
        assert "rows      9 of 12 finished (75%)" in running

    def test_export_to_standard_output(self, job: Job) -> None:
        """Only the rows."""
        job.run()

        result = CliRunner().invoke(main, ["export", str(job.output)])

        assert result.stdout == job.output.read_text()

    def test_there_is_no_such_job(self, tmp_path: Path) -> None:
        """One line."""
        result = CliRunner().invoke(main, ["status", str(tmp_path / "none.jsonl")])

        assert result.exit_code != 0
        assert result.stderr.startswith("Error: ")
        assert "there is no such journal" in result.stderr


def killed(command: list[str], after_s: float) -> int:
    """Run a command and kill it after a time; returns its exit code."""
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        process.communicate(timeout=after_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
    return process.returncode


def test_killed_at_any_moment(job: Job) -> None:
    """After the reruns every row is there once, with the answer of an undisturbed run."""
    job.write([{"prompt": f"prompt {i}"} for i in range(3000)])
    command = [
        sys.executable, "-m", "localbatch", "run", "fake", str(job.source), "-o", str(job.output),
        "--backend", "fake", "--threads", "1", "--max-tokens", "16", "--ignore-eos", "-q",
    ]  # fmt: skip
    started = time.monotonic()
    assert killed(command, 60) == 0
    whole_s = time.monotonic() - started
    expected = job.answers()
    for path in (job.output, job.journal):
        path.unlink()

    kills = 0
    for number in range(8):
        kills += killed(command, whole_s * (0.3 + 0.05 * number)) != 0
    assert killed(command, 60) == 0

    assert kills >= 1
    assert job.answers() == expected


def test_nothing_is_lost_when_the_output_cannot_be_written(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal has it; the next run only writes."""

    def full(*_: object) -> None:
        raise OutputError("out.jsonl: writing failed (No space left on device)")

    with monkeypatch.context() as patch:
        patch.setattr(results_module, "write_lines", full)
        with pytest.raises(OutputError):
            job.run()
    assert not job.output.exists()

    result = job.run()

    assert (result.rows, result.resumed) == (0, 12)
    assert len(job.answers()) == 12
