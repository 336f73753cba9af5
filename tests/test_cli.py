"""The commands: what goes to which stream, exit codes, and the documents."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from docs.cli_reference import reference
from localbatch import __version__
from localbatch.cli import main
from localbatch.data.errors import JournalError
from localbatch.jobs.status import job_status

ROOT = Path(__file__).parent.parent


def call(*args: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, args, input=stdin, catch_exceptions=False)


def run_fake(*args: str, stdin: str | None = None) -> Result:
    return call("run", "fake", "--backend", "fake", *args, stdin=stdin)


def rows(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines()]


def test_answers_go_to_stdout_and_the_rest_to_stderr() -> None:
    """Standard output holds JSONL and nothing else; the summary is on standard error."""
    result = run_fake("-", "--max-tokens", "4", "--ignore-eos", stdin="one\ntwo\n")

    assert result.exit_code == 0
    assert [row["id"] for row in rows(result.stdout)] == [1, 2]
    assert re.fullmatch(
        r"2 rows in [\d.]+ s: 2 answered, 0 failed; 56 prompt \+ 8 output tokens, .* tok/s\n",
        result.stderr,
    )


def test_a_row_of_output_has_its_fields(tmp_path: Path) -> None:
    """Id, text, finish_reason, usage and timings, in input order."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"id": "a", "prompt": "x", "max_tokens": 9}\n{"prompt": "y"}\n')

    result = run_fake(str(source), "-o", str(output), "--max-tokens", "2", "--ignore-eos", "-q")

    assert (result.exit_code, result.output) == (0, "")
    first, second = rows(output.read_text())
    assert list(first) == ["id", "text", "finish_reason", "usage", "timings"]
    assert (first["id"], second["id"]) == ("a", 2)
    assert first["usage"] == {"prompt_tokens": 26, "completion_tokens": 9}
    assert second["finish_reason"] == "length"


def test_bad_rows_cost_themselves_and_exit_code_3() -> None:
    """Each is named with its line and field; the good ones are answered."""
    bad = [
        '{"prompt": ""}', '{"id": "x"}', "{not json", '{"prompt": "y", "temprature": 1}',
        '{"prompt": "y", "top_p": 7}', json.dumps({"prompt": "z" * 5000}),
    ]  # fmt: skip
    stdin = "\n".join(['{"prompt": "good"}', *bad, '{"prompt": "good"}']) + "\n"

    result = run_fake("-", "--max-tokens", "2", stdin=stdin)

    assert result.exit_code == 3
    assert [row["id"] for row in rows(result.stdout)] == [1, 2, "x", 4, 5, 6, 7, 8]
    assert {2, 3, 4, 5, 6, 7} == {
        row["error"]["line"]  # type: ignore[index]
        for row in rows(result.stdout)
        if row["finish_reason"] == "error"
    }
    assert "standard input:2: prompt: is empty\n" in result.stderr
    assert "standard input:5: temprature: unknown key; did you mean 'temperature'?" in result.stderr
    assert "standard input:7: prompt: has 5025 tokens, more than the context of 4096" in (
        result.stderr
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["missing.txt"], "missing.txt: can't be opened"),
        (["x.pdf"], "x.pdf: must end in one of .txt, .jsonl, .ndjson"),
        (["-", "--top-p", "3"], "--top-p: must be above 0 and at most 1, not 3.0"),
        (["-", "--parallel", "99999"], "--parallel: must be a whole number from 1 to 16384"),
        (["-", "--raw", "--system", "x"], "--system goes with the chat template"),
        (["-", "-o", "no/such/folder.jsonl"], "no/such/folder.jsonl: its folder does not exist"),
        (["-", "--max-tokens", "many"], "'many' is not a valid integer"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(args: list[str], message: str) -> None:
    """The message names the option or the file."""
    result = run_fake(*args, stdin="x\n")

    assert result.exit_code == 2
    assert message in result.stderr.splitlines()[-1]
    assert result.stdout == ""


def test_sizes_may_be_left_to_the_program_in_words() -> None:
    """`auto` is the same as leaving the option out; anything else must be a number."""
    assert run_fake("-", "--parallel", "auto", "--lanes", "auto", stdin="a\n").exit_code == 0
    assert (
        "'many' is neither a whole number nor 'auto'" in run_fake("-", "--parallel", "many").stderr
    )


def test_a_missing_model_is_one_line_and_exit_code_1() -> None:
    """No traceback reaches the user."""
    result = call("run", "no.gguf", "-", stdin="x\n")

    assert (result.exit_code, result.stderr) == (1, "Error: no.gguf: there is no such file\n")


def test_a_base_model_is_refused_in_words(tmp_path: Path) -> None:
    """A model without a chat template needs --raw."""
    from tests import tiny_gguf

    path = tmp_path / "base.gguf"
    tiny_gguf.write(path, template=None)

    assert call("run", str(path), "-", stdin="x\n").exit_code == 2
    assert call("run", str(path), "-", "--raw", "--max-tokens", "3", stdin="x\n").exit_code == 0


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--parallel", "0", "must be a whole number from 1 to 16384, not 0"),
        ("--ubatch", "33", "must be a multiple of 4, not 33"),
        ("--lanes", "5", "must be at most one for each row of 4 at a time"),
        ("--kv-cells", "100", "goes with the unified layout only"),
        ("--top-p", "3", "must be above 0 and at most 1, not 3.0"),
    ],
)
def test_a_setting_out_of_range_is_named_as_the_option(
    tmp_path: Path, option: str, value: str, message: str
) -> None:
    """Not as the field that it is in Python."""
    source = tmp_path / "in.txt"
    source.write_text("x\n")
    rows = ["--parallel", "4"] if option == "--lanes" else []
    result = run_fake(str(source), option, value, *rows)
    assert result.exit_code == 2
    assert result.stderr == f"Error: {option}: {message}\n"


def test_a_context_larger_than_the_models_is_noted(tmp_path: Path) -> None:
    """It may be wanted, and the answers beyond it may be nonsense."""
    source = tmp_path / "in.txt"
    source.write_text("x\n")
    result = run_fake(str(source), "--ctx", "5000", "--max-tokens", "2")
    assert "note: --ctx 5,000 is more than the 4,096 tokens of the model" in result.stderr
    assert "note" not in run_fake(str(source), "--ctx", "4096", "--max-tokens", "2").stderr


def test_a_gpu_that_is_not_there_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    """With a llama.cpp for the CPU, layers on a GPU are a mistake."""
    from localbatch.engine import library

    if library.supports_gpu():
        pytest.skip("this llama.cpp is for a GPU")
    source = tmp_path / "in.txt"
    source.write_text("x\n")
    result = CliRunner().invoke(main, ["run", str(tiny_model), str(source), "--gpu-layers", "5"])
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: --gpu-layers: there is no GPU that llama.cpp can use")


def test_the_input_is_never_overwritten(tmp_path: Path) -> None:
    """The same file for both is refused, and stays as it was."""
    path = tmp_path / "a.txt"
    path.write_text("precious\n")

    assert run_fake(str(path), "-o", str(path)).exit_code == 2
    assert path.read_text() == "precious\n"


def start(*args: str, python: Sequence[str] = ("-m", "localbatch")) -> subprocess.Popen[str]:
    """Start a real process that is not ignoring SIGINT."""
    return subprocess.Popen(
        [sys.executable, *python, "run", "fake", "--backend", "fake", *args],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # type: ignore[arg-type,return-value]
    )  # fmt: skip


# What comes before is Python's own start, which no program can answer for.
STARTED = (
    "import os, sys; from localbatch.__main__ import start; "
    "sys.addaudithook(lambda event, args: event == 'import' and args[0] == 'localbatch.cli'"
    " and os.write(1, b'.')); start()"
)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("gap_s", [None, 0.0, 0.02])
@pytest.mark.parametrize("after_s", [0.0, 0.1, 0.25, 1.0])
def test_interrupted_at_any_moment(
    tmp_path: Path, after_s: float, gap_s: float | None, number: signal.Signals
) -> None:
    """Once or twice, without a traceback; to a shell, ending by the signal is 130 as well."""
    source = tmp_path / "in.jsonl"
    row = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "temperature": 1.0}
    source.write_text((json.dumps(row) + "\n") * 500)
    process = start(str(source), "-o", str(tmp_path / "out.jsonl"), python=("-c", STARTED))
    assert process.stdout is not None
    assert process.stdout.read(1) == "."
    time.sleep(after_s)
    process.send_signal(number)
    if gap_s is not None:
        time.sleep(gap_s)
        process.send_signal(number)
    sent = time.monotonic()
    _, stderr = process.communicate(timeout=10)

    assert process.returncode in (130, -number), stderr
    assert time.monotonic() - sent < 2
    assert "Traceback" not in stderr


def test_what_an_interruption_breaks_is_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A library's cleanup fails since Ctrl-C came in the middle of it; other errors are shown."""
    source = tmp_path / "in.txt"
    source.write_text("x\n")
    is_interrupted = True

    def broken(*_: object) -> None:
        try:
            if is_interrupted:
                signal.raise_signal(signal.SIGTERM)
        finally:
            raise AttributeError("no lock")

    monkeypatch.setattr("localbatch.jobs.run.announce", broken)
    done = run_fake(str(source), "-o", str(tmp_path / "out.jsonl"))
    assert (done.exit_code, done.stderr) == (130, "interrupted\n")

    is_interrupted = False
    with pytest.raises(AttributeError, match="no lock"):
        run_fake(str(source), "-o", str(tmp_path / "out.jsonl"))


@pytest.mark.model
def test_interrupted_in_a_step_of_many_seconds(tmp_path: Path, smollm2: Path) -> None:
    """llama.cpp is not waited for."""
    source = tmp_path / "in.txt"
    source.write_text("the quick brown fox " * 1800 + "\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "localbatch", "run", str(smollm2), str(source), "--raw",
         "--ubatch", "8192", "-o", str(tmp_path / "out.jsonl")],
        stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # type: ignore[arg-type,return-value]
    )  # fmt: skip
    time.sleep(6)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    sent = time.monotonic()
    _, stderr = process.communicate(timeout=20)

    assert process.returncode == 130
    assert time.monotonic() - sent < 2
    assert "no row was finished" in stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_is_exit_code_130_with_the_finished_rows(
    tmp_path: Path, number: signal.Signals
) -> None:
    """What was finished is in the output, in order; it ends within two seconds."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    endless = json.dumps({"prompt": "x", "max_tokens": 4000, "ignore_eos": True})
    source.write_text('{"prompt": "short", "max_tokens": 1}\n' * 3 + f"{endless}\n" * 2000)
    process = start(str(source), "-o", str(output))
    deadline = time.monotonic() + 20
    finished = 0
    while finished < 3 and time.monotonic() < deadline:
        with contextlib.suppress(JournalError):
            finished = job_status(str(output)).counts.total
        time.sleep(0.05)
    sent = time.monotonic()
    process.send_signal(number)
    _, stderr = process.communicate(timeout=10)

    assert process.returncode == 130
    assert time.monotonic() - sent < 2
    assert [row["id"] for row in rows(output.read_text())][:3] == [1, 2, 3]
    assert "interrupted; the rows finished so far are in the output" in stderr
    assert list(tmp_path.glob("*.part")) == []


def test_a_reader_that_goes_away_ends_the_run_quietly(tmp_path: Path) -> None:
    """As in `localbatch run ... | head -1`."""
    source = tmp_path / "in.txt"
    source.write_text("x\n" * 5000)
    process = start(str(source), "--max-tokens", "2", "-q")
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()

    assert process.wait(timeout=20) == 141
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.stderr.close()


def test_nothing_but_answers_comes_from_a_real_model(tiny_model: Path) -> None:
    """What llama.cpp prints does not get between the answers."""
    done = subprocess.run(
        [sys.executable, "-m", "localbatch", "run", str(tiny_model), "-", "--max-tokens", "3"],
        input="one\ntwo\n", capture_output=True, text=True, check=True,
    )  # fmt: skip

    assert [row["id"] for row in rows(done.stdout)] == [1, 2]
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("option", "said"),
    [([], False), (["--kv-layout", "unified"], True), (["--flash-attention", "on"], True)],
)
def test_a_setting_that_gives_up_same_answers_says_so(
    tiny_model: Path, option: list[str], said: bool
) -> None:
    """Streams without flash attention are silent; anything else on the CPU is noted."""
    done = call("run", str(tiny_model), "-", "--max-tokens", "2", *option, stdin="one\ntwo\n")

    assert done.exit_code == 0
    assert said == ("an answer may depend on its batch" in done.stderr)


def test_models_are_listed_and_looked_into(tiny_model: Path) -> None:
    """`info` prints what the file says and what a batch takes: 2 layers x 2 heads x 16 x 2 x 2."""
    listed = call("models", "list")
    info = call("models", "info", str(tiny_model), "--rows", "4", "--ctx", "1024")
    lines = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in info.stdout.splitlines())

    assert "smollm2-135m" in listed.stdout
    assert lines["architecture"] == "llama"
    assert lines["quantization"].startswith("F16")
    assert lines["context"] == "2,048 tokens"
    assert lines["vocabulary"] == "448 tokens, llama, adds BOS"
    assert lines["KV cache"] == "0.2 KiB a token"  # 256 bytes
    assert "4 rows of 1,024 tokens: 1 MiB of KV cache" in lines["a batch"]


def test_unknown_models_are_usage_errors() -> None:
    """With the nearest names."""
    result = call("models", "path", "smollm2")

    assert (result.exit_code, result.stdout) == (1, "")
    assert "did you mean smollm2-135m" in result.stderr


def test_doctor_says_what_works() -> None:
    """It decodes with the built-in model in a process of its own."""
    result = call("doctor")

    assert result.exit_code == 0
    assert "llama-cpp-python 0.3.36" in result.stdout
    assert "12 tokens in 3 rows" in result.stdout
    assert result.stdout.endswith("All is well.\n")


def test_doctor_names_the_signal_and_the_repair(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that dies of SIGILL is reported, with the command that rebuilds."""
    code = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
    monkeypatch.setattr("localbatch.engine.client._CODE", code)

    result = call("doctor")

    assert result.exit_code == 1
    assert "FAILED: built-in model: the worker process ended by SIGILL" in result.stdout
    assert 'CFLAGS="-fno-dse -fno-tree-dse"' in result.stdout


def test_the_version_is_the_packages() -> None:
    """One version, stated once."""
    assert call("--version").stdout == f"localbatch, version {__version__}\n"


@pytest.mark.parametrize(
    "command", [["run"], ["models"], ["models", "pull"], ["models", "info"], ["doctor"]]
)
def test_every_command_has_help_and_is_in_the_documents(command: list[str]) -> None:
    """Its page is in docs/cli.md."""
    result = call(*command, "--help")

    assert result.exit_code == 0
    assert f"## localbatch {' '.join(command)}\n" in (ROOT / "docs" / "cli.md").read_text()


def test_the_command_reference_is_up_to_date() -> None:
    """`make docs` would change nothing."""
    assert (ROOT / "docs" / "cli.md").read_text() == reference()


def test_links_in_the_documents_lead_somewhere() -> None:
    """Every relative link is a file."""
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_workers_do_not_outlive_the_tests() -> None:
    """No process of ours is left when a command ends."""
    run_fake("-", stdin="x\n")
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")

    assert not children.exists() or children.read_text().split() == []
