"""OpenAI batches from end to end, on the fake backend."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

import pytest
from click.testing import CliRunner, Result
from openai.types import Batch
from openai.types.chat import ChatCompletion

from localbatch.cli import main
from localbatch.data.config import EngineConfig
from localbatch.data.sampling_params import SamplingParams
from localbatch.engine import llm as llm_module
from localbatch.formats.inputs import read_requests
from localbatch.formats.openai_batch import BatchFile
from localbatch.formats.openai_results import read_results
from localbatch.jobs import run as run_module
from localbatch.jobs.job import JobConfig, JobResult
from localbatch.jobs.run import run_job
from localbatch.jobs.source import open_source

pytestmark = pytest.mark.timeout(120)

MODEL = "meta-llama/Meta-Llama-3-8B-Instruct"


def line(number: int, **body: Any) -> str:
    messages = [{"role": "user", "content": f"prompt {number}"}]
    row = {
        "custom_id": f"row-{number}", "method": "POST", "url": "/v1/chat/completions",
        "body": {"model": MODEL, "messages": messages, "max_completion_tokens": 4, **body},
    }  # fmt: skip
    return json.dumps(row) + "\n"


BAD = line(1, temperature=7e9)


class Batches:
    """A folder with an input, and the files that come of it."""

    def __init__(self, folder: Path) -> None:
        self.source, self.output = folder / "in.jsonl", folder / "out.jsonl"
        self.errors, self.batch = folder / "out.errors.jsonl", folder / "out.batch.json"
        self.journal = folder / "out.jsonl.journal"
        self.folder = folder

    def run(self, *options: str, rows: str | None = None) -> Result:
        if rows is not None:
            self.source.write_text(rows)
        return call("run", "fake", str(self.source), "-o", str(self.output), *FAKE, *options)

    def run_row_by_row(self, patch: pytest.MonkeyPatch, **fake: Any) -> JobResult:
        """Run it with settings of the fake backend that no option has."""
        patch.setattr(llm_module, "EngineConfig", partial(EngineConfig, **fake))
        engine = {"backend": "fake", "threads": 1, "parallel": 1}
        config = JobConfig("fake", str(self.source), str(self.output), quiet=True, engine=engine)
        return run_job(config)

    def object(self) -> dict[str, Any]:
        made: dict[str, Any] = json.loads(self.batch.read_text())
        Batch.model_validate(made, strict=True)
        return made

    def bytes(self) -> list[bytes | None]:
        files = (self.output, self.errors, self.batch)
        return [file.read_bytes() if file.exists() else None for file in files]

    def names(self) -> list[str]:
        return sorted(file.name for file in self.folder.iterdir())


FAKE = ("--backend", "fake", "--threads", "1", "-q")


def call(*args: str) -> Result:
    return CliRunner().invoke(main, args, catch_exceptions=False)


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(row) for row in text.splitlines()]


@pytest.fixture
def job(tmp_path: Path) -> Batches:
    return Batches(tmp_path)


def test_answers_and_errors_go_into_files_of_their_own(job: Batches) -> None:
    """In input order, with a batch object that names them, and exit code 3."""
    result = job.run(rows=line(0) + BAD + "\n" + line(2))

    assert result.exit_code == 3
    answers, errors = lines(job.output.read_text()), lines(job.errors.read_text())
    assert [row["custom_id"] for row in answers] == ["row-0", "row-2"]
    assert [row["custom_id"] for row in errors] == ["row-1"]
    for row in answers:
        parsed = ChatCompletion.model_validate(row["response"]["body"], strict=True)
        assert parsed.model == MODEL
        assert parsed.choices[0].finish_reason == "length"
    error = errors[0]["response"]["body"]["error"]
    assert (error["param"], error["code"]) == ("temperature", "invalid_value")
    batch = job.object()
    assert batch["status"] == "completed"
    assert batch["endpoint"] == "/v1/chat/completions"
    assert batch["model"] == MODEL
    assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    assert (batch["input_file_id"], batch["output_file_id"], batch["error_file_id"]) == (
        "in.jsonl", "out.jsonl", "out.errors.jsonl"
    )  # fmt: skip
    assert batch["usage"]["output_tokens"] == 8
    created = {row["response"]["body"]["created"] for row in answers}
    assert created == {batch["created_at"]}


def test_without_errors_there_is_no_error_file(job: Batches) -> None:
    """One of an earlier run goes, and the exit code is 0."""
    job.run(rows=line(0) + BAD)
    assert job.errors.exists()

    assert job.run(rows=line(0) + line(1)).exit_code == 0

    assert job.names() == ["in.jsonl", "out.batch.json", "out.jsonl", "out.jsonl.journal"]
    assert job.object()["error_file_id"] is None
    assert [row["custom_id"] for row in lines(job.output.read_text())] == ["row-0", "row-1"]


def test_without_answers_the_output_is_empty(job: Batches) -> None:
    """The batch object names no output file, and is completed all the same."""
    assert job.run(rows=BAD).exit_code == 3
    assert job.output.read_bytes() == b""
    batch = job.object()
    assert (batch["status"], batch["output_file_id"]) == ("completed", None)


def test_running_it_again_changes_no_byte(job: Batches) -> None:
    """Nor does an export; ids and times come from the journal."""
    job.run(rows=line(0) + BAD + line(2))
    before = job.bytes()

    assert job.run().exit_code == 3
    assert job.bytes() == before
    assert call("export", str(job.output), "-o", str(job.output)).exit_code == 0
    assert job.bytes() == before


def test_a_part_is_in_progress_and_the_rest_follows(
    job: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an interruption the finished rows are there; the next run adds the others alone."""
    job.source.write_text("".join(map(line, range(5))))
    finished = 0

    def interrupted(*_: object) -> None:
        nonlocal finished
        finished += 1
        if finished == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run_module, "count", interrupted)
        assert job.run_row_by_row(patch, fake_step_s=0.05).interrupted
    part, batch = job.output.read_bytes(), job.object()
    number = len(part.splitlines())
    assert 2 <= number < 5
    assert batch["status"] == "in_progress"
    assert batch["completed_at"] is None
    assert batch["request_counts"] == {"total": 5, "completed": number, "failed": 0}

    rest = job.run_row_by_row(monkeypatch)

    assert (rest.rows, rest.resumed) == (5 - number, number)
    whole = job.output.read_bytes()
    assert set(part.splitlines()) < set(whole.splitlines())
    assert [row["custom_id"] for row in lines(whole.decode())] == [f"row-{i}" for i in range(5)]
    after = job.object()
    assert after["status"] == "completed"
    assert after["id"] == batch["id"]
    assert after["created_at"] == batch["created_at"]


def test_rows_added_later_make_a_new_end(job: Batches) -> None:
    """A job that goes on is completed anew; what was there stays as it was."""
    job.run(rows=line(0))
    first = job.output.read_bytes()
    assert job.run(rows=line(0) + line(1)).exit_code == 0
    assert job.output.read_bytes().startswith(first)
    assert job.object()["request_counts"] == {"total": 2, "completed": 2, "failed": 0}


def test_a_bad_line_means_that_nothing_runs(job: Batches) -> None:
    """All bad lines are listed, the batch object has failed, exit code 2; the repaired one runs."""
    result = job.run(rows=line(0) + "{\n" + line(0))

    assert result.exit_code == 2
    assert result.stdout == ""
    assert [text.partition("jsonl:")[2].split(":")[0] for text in result.stderr.splitlines()] == [
        " is no valid OpenAI batch file", "2", "3"
    ]  # fmt: skip
    assert job.names() == ["in.jsonl", "out.batch.json"]
    batch = job.object()
    assert (batch["status"], batch["model"]) == ("failed", MODEL)
    assert [(e["code"], e["line"]) for e in batch["errors"]["data"]] == [
        ("invalid_json_line", 2), ("duplicate_custom_id", 3)
    ]  # fmt: skip

    assert job.run(rows=line(0)).exit_code == 0
    assert (job.object()["status"], job.object()["errors"]) == ("completed", None)


def test_a_batch_that_is_asked_for_may_not_be_empty(job: Batches) -> None:
    """With --style openai an empty file is refused; without, it is a job without rows."""
    assert job.run("--style", "openai", rows="\n").exit_code == 2
    assert job.object()["errors"]["data"][0]["code"] == "empty_file"
    assert job.run().exit_code == 0


def test_vllm_s_style_is_one_file(job: Batches) -> None:
    """Answers and errors in the order of the input."""
    assert job.run("--style", "vllm", rows=line(0) + BAD + line(2)).exit_code == 3
    assert job.names() == ["in.jsonl", "out.jsonl", "out.jsonl.journal"]
    found = lines(job.output.read_text())
    assert [row["custom_id"] for row in found] == ["row-0", "row-1", "row-2"]
    assert all(row["id"].startswith("vllm-") for row in found)
    assert found[1]["response"]["body"] is None
    results = list(read_results(str(job.output)))
    assert [(r.text is None, r.error is None) for r in results] == [
        (False, True), (True, False), (False, True)
    ]  # fmt: skip


def test_styles_are_made_of_the_same_journal(job: Batches) -> None:
    """An export in any style has the same rows, and nothing is computed for it."""
    job.run("--style", "native", rows=line(0) + BAD)
    native = job.output.read_text()
    assert [row["id"] for row in lines(native)] == ["row-0", "row-1"]
    assert not job.batch.exists()
    for style in ("native", "openai", "vllm", "auto"):
        exported = call("export", str(job.output), "--style", style)
        assert exported.exit_code == 0
        found = lines(exported.stdout)
        assert [row.get("custom_id", row.get("id")) for row in found] == ["row-0", "row-1"]
        if style == "native":
            assert exported.stdout == native


def test_native_rows_in_openai_s_style(job: Batches) -> None:
    """Ids are custom ids; prompts that are raw are completions, others chats."""
    rows = '{"prompt": "x", "max_tokens": 2}\n{"prompt": "y", "max_tokens": 2}\n'
    for options, kind in [((), "chat.completion"), (("--raw",), "text_completion")]:
        assert job.run("--style", "openai", "--fresh", *options, rows=rows).exit_code == 0
        found = lines(job.output.read_text())
        assert [row["custom_id"] for row in found] == ["1", "2"]
        assert {row["response"]["body"]["object"] for row in found} == {kind}
        assert {row["response"]["body"]["model"] for row in found} == {"fake"}


def test_completions_are_raw(job: Batches) -> None:
    """A prompt of /v1/completions has no template around it, and a text in its answer."""
    row = {"custom_id": "a", "method": "POST", "url": "/v1/completions",
           "body": {"prompt": "four", "max_tokens": 2}}  # fmt: skip
    assert job.run(rows=json.dumps(row)).exit_code == 0
    body = lines(job.output.read_text())[0]["response"]["body"]
    assert (body["object"], body["model"]) == ("text_completion", "fake")
    assert body["usage"]["prompt_tokens"] == 5  # a token a byte, and the first


@pytest.mark.parametrize("style", ["auto", "openai", "vllm", "native"])
def test_a_pipe_is_checked_first_too(style: str) -> None:
    """From a pipe to a pipe: one stream of answers and errors, or nothing if a line is bad."""
    command = [sys.executable, "-m", "localbatch", "run", "fake", "-", *FAKE, "--style", style]
    for rows, code in [(line(0) + BAD + line(2), 3), (line(0) + line(0), 2)]:
        done = subprocess.run(command, input=rows.encode(), capture_output=True, check=False)
        assert done.returncode == code, done.stderr
        found = lines(done.stdout.decode())
        key = "id" if style == "native" else "custom_id"
        expected = ["row-0", "row-1", "row-2"] if code == 3 else []
        assert [row[key] for row in found] == expected
        assert (b"duplicate_custom_id" in done.stderr) == (code == 2)


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[BinaryIO]:
    """Return the end of standard input that is written to."""
    reading, writing = os.pipe()
    with open(reading) as stdin, open(writing, "wb", buffering=0) as end:
        monkeypatch.setattr(sys, "stdin", stdin)
        yield cast(BinaryIO, end)


@pytest.mark.parametrize("first", ['{"prompt": "x"}', "x", '{"custom_id": "a", "prompt": "x"}'])
def test_a_pipe_of_other_rows_is_not_waited_for(pipe: BinaryIO, first: str) -> None:
    """The first row is there before the second is written, and nothing is lost."""
    pipe.write(b"\n" + first.encode() + b"\n")
    with open_source("-") as source:
        assert source.batch is None
        rows = read_requests(source.input, SamplingParams())
        assert next(rows).line == 2
        pipe.write(b'{"prompt": "y"}\n')
        pipe.close()
        assert [row.line for row in rows] == [3]


def test_a_pipe_with_a_batch_is_read_twice(pipe: BinaryIO) -> None:
    """Once to check it, and then for its rows."""
    pipe.write((line(0) + "\n" + BAD + line(2)).encode())
    pipe.close()
    with open_source("-") as source:
        assert source.batch == BatchFile("/v1/chat/completions", MODEL, 3)
        rows = list(read_requests(source.input, SamplingParams()))
    assert [(row.id, row.line) for row in rows] == [("row-0", 1), ("row-1", 3), ("row-2", 4)]


def test_files_beside_the_output_are_not_the_input(job: Batches) -> None:
    """An input where the errors would go is not overwritten."""
    job.source = job.errors
    result = job.run(rows=line(0))
    assert result.exit_code == 2
    assert "out.errors.jsonl: is the input; name another file for the answers" in result.stderr
    assert job.errors.read_text() == line(0)
    assert not job.journal.exists()


def test_a_row_that_kills_workers_is_a_server_s_error(
    job: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could not be computed and is not to blame, so it has status 500."""
    job.source.write_text("".join(map(line, range(3))))
    assert job.run_row_by_row(monkeypatch, fake_dies_on="prompt 1").failed == 1
    (error,) = lines(job.errors.read_text())
    assert (error["custom_id"], error["response"]["status_code"]) == ("row-1", 500)
    assert error["response"]["body"]["error"]["type"] == "server_error"
    assert job.object()["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
