from __future__ import annotations

import io
import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localbatch.data.errors import OutputError
from localbatch.data.request import Completion, FinishReason, Timings, Usage, failed_completion
from localbatch.formats import new_file
from localbatch.formats.outputs import (
    OrderedWriter,
    OutputClosedError,
    check_target,
    is_file_target,
    write_lines,
)
from localbatch.formats.records import record

OLD = "what was there before\n"


def row(index: int, text: str = "text") -> Completion:
    return Completion(f"id {index}", index, text, FinishReason.STOP)


def lines_of(completions: Iterable[Completion]) -> str:
    return "".join(
        json.dumps(record(completion), ensure_ascii=False) + "\n" for completion in completions
    )


def assert_names(folder: Path, *expected: str) -> None:
    assert sorted(expected) == sorted(path.name for path in folder.iterdir())


# The record


def test_the_record_of_an_answer() -> None:
    """Its keys come in a fixed order, its times in microseconds."""
    completion = Completion(
        7, 3, "é\n", FinishReason.LENGTH, Usage(5, 2), Timings(1.23456789, 0.1, 2e-9), (1, 2)
    )
    expected = (
        '{"id": 7, "text": "é\\n", "finish_reason": "length", '
        '"usage": {"prompt_tokens": 5, "completion_tokens": 2}, '
        '"timings": {"queue_s": 1.234568, "prefill_s": 0.1, "decode_s": 0.0}}'
    )
    assert expected == json.dumps(record(completion), ensure_ascii=False)


@pytest.mark.parametrize(
    ("line", "error"),
    [(4, '{"message": "prompt: is empty", "line": 4}'), (None, '{"message": "prompt: is empty"}')],
)
def test_the_record_of_a_failed_row(line: int | None, error: str) -> None:
    """It has no text, and an error that names the line where there is one."""
    expected = (
        f'{{"id": "a", "text": null, "finish_reason": "error", "error": {error}, '
        '"usage": {"prompt_tokens": 0, "completion_tokens": 0}, '
        '"timings": {"queue_s": 0.0, "prefill_s": 0.0, "decode_s": 0.0}}'
    )
    assert expected == json.dumps(record(failed_completion("a", 0, "prompt: is empty", line)))


def test_the_record_of_an_aborted_row_has_its_text() -> None:
    """A row that was called off keeps what it had, and is no error."""
    actual = record(replace(row(0, "so far"), finish_reason=FinishReason.ABORTED))
    expected = {"text": "so far", "finish_reason": "aborted"}
    assert expected == {key: actual[key] for key in expected}
    assert "error" not in actual


# Files


def test_lines_replace_what_was_there(tmp_path: Path) -> None:
    """All of them, each with a line end, and nothing else is left in the folder."""
    target = tmp_path / "out.jsonl"
    target.write_text(OLD)
    assert write_lines(str(target), ["é", "b"]) == 2
    assert target.read_text("utf-8") == "é\nb\n"
    assert write_lines(str(target), []) == 0
    assert target.read_text() == ""
    assert_names(tmp_path, "out.jsonl")


def test_the_target_changes_at_the_end_only(tmp_path: Path) -> None:
    """Until then, the old file is there, and the new lines are in a file beside it."""
    target = tmp_path / "out.jsonl"
    target.write_text(OLD)

    def lines() -> Iterator[str]:
        yield "a"
        assert len(list(tmp_path.glob("out.jsonl.*.part"))) == 1
        assert target.read_text() == OLD
        yield "b"

    write_lines(str(target), lines())
    assert target.read_text() == "a\nb\n"


_WRITER = """
import sys, time
from localbatch.formats.outputs import write_lines

def lines():
    yield "half"
    print("writing", flush=True)
    time.sleep(60)

write_lines(sys.argv[1], lines())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="uses SIGKILL")
def test_what_a_killed_writer_left_goes(tmp_path: Path) -> None:
    """The next one removes it; while a writer lives, its file stays."""
    target = tmp_path / "out.jsonl"
    with subprocess.Popen([sys.executable, "-c", _WRITER, target], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"writing\n"
        assert write_lines(str(target), ["while it lives"]) == 1
        assert_names(tmp_path, "out.jsonl", "out.jsonl.localbatch.part")
        other.kill()
    assert write_lines(str(target), ["later"]) == 1
    assert target.read_text() == "later\n"
    assert_names(tmp_path, "out.jsonl")


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_exception_leaves_all_as_it_was(tmp_path: Path, error: type[BaseException]) -> None:
    """The old file stays, the new one goes."""
    target = tmp_path / "out.jsonl"
    target.write_text(OLD)

    def lines() -> Iterator[str]:
        yield "a"
        raise error

    with pytest.raises(error):
        write_lines(str(target), lines())
    assert target.read_text() == OLD
    assert_names(tmp_path, "out.jsonl")


def test_what_is_a_file(tmp_path: Path) -> None:
    """What is not there will be one; a folder is left to the one who opens it."""
    os.mkfifo(tmp_path / "pipe")
    found = [is_file_target(str(tmp_path / name)) for name in ("new", "pipe", ".")]
    assert [*found, is_file_target("-"), is_file_target(os.devnull)] == [
        True, False, True, False, False
    ]  # fmt: skip


def test_permissions_are_kept(tmp_path: Path) -> None:
    """A new file has the usual permissions, one that replaces another has those of the other."""
    usual, new, secret = (tmp_path / name for name in ("usual", "new", "secret"))
    usual.touch()
    secret.touch()
    secret.chmod(0o600)
    for target in (new, secret):
        write_lines(str(target), [])
    assert stat.S_IMODE(usual.stat().st_mode) == stat.S_IMODE(new.stat().st_mode)
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    """The file that a link leads to is replaced, in its own folder."""
    (tmp_path / "real").mkdir()
    target, link = tmp_path / "real" / "out.jsonl", tmp_path / "link.jsonl"
    link.symlink_to(target)
    write_lines(str(link), ["a"])
    assert_names(tmp_path, "link.jsonl", "real")
    assert link.is_symlink()
    assert target.read_text() == "a\n"


def test_a_long_name_fits(tmp_path: Path) -> None:
    """A name of the greatest length that the file system takes can be written."""
    target = tmp_path / ("é" * 127 + "x")
    write_lines(str(target), ["a"])
    assert target.read_text() == "a\n"


def test_a_relative_name_is_beside_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bare name is a file in the folder that was current at the start."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()

    def lines() -> Iterator[str]:
        monkeypatch.chdir(tmp_path / "elsewhere")
        yield "a"

    write_lines("out.jsonl", lines())
    assert_names(tmp_path, "elsewhere", "out.jsonl")


# What can't be written


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("folder", "folder: is a folder or no file at all; name a file"),
        ("folder/", "'folder/': names no file; give the output file a name"),
        ("new/", "'new/': names no file; give the output file a name"),
        ("", "'': names no file; give the output file a name"),
        ("missing/out.jsonl", "missing/out.jsonl: its folder does not exist; make it first"),
        (
            "file/out.jsonl",
            "file/out.jsonl: can't be written (Not a directory); choose another place",
        ),
    ],
)
def test_a_place_that_is_none_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, expected: str
) -> None:
    """It takes no row to find out, nothing is made, and the one line names path and remedy."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(OutputError) as caught:
        check_target(target)
    assert expected == str(caught.value)
    assert_names(tmp_path, "file", "folder")
    assert_names(tmp_path / "folder")


def test_a_read_only_place_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder where no file can be made, and a file that may not be written, are errors."""
    target = tmp_path / "out.jsonl"
    expected = f"{target}: can't be written (Permission denied); choose another place"

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(new_file, "open", denied, raising=False)
        with pytest.raises(OutputError) as in_folder:
            check_target(str(target))
    assert expected == str(in_folder.value)
    target.write_text(OLD)
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)
        with pytest.raises(OutputError) as at_file:
            check_target(str(target))
    assert expected == str(at_file.value)
    assert target.read_text() == OLD
    assert_names(tmp_path, "out.jsonl")


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Make every write beyond `size` bytes of a file fail, as a full disk does."""
    resource = pytest.importorskip("resource")
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


def test_a_full_disk_leaves_the_target(tmp_path: Path) -> None:
    """When a write fails, the old file stays, nothing else does, and the error says what to do."""
    target = tmp_path / "out.jsonl"
    target.write_text(OLD)
    with file_size_limit(100_000), pytest.raises(OutputError) as caught:
        write_lines(str(target), ["x" * 1000] * 200)
    assert str(caught.value).startswith(
        f"{target}: writing failed (File too large); the answers are safe in the journal"
    )
    assert target.read_text() == OLD
    assert_names(tmp_path, "out.jsonl")


def test_a_full_disk_at_the_end_leaves_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when it only shows in the last moment."""

    def failing(_: int) -> None:
        raise OSError(28, "No space left on device")

    target = tmp_path / "out.jsonl"
    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OutputError, match=r"writing failed \(No space left on device\)"):
        write_lines(str(target), ["a"])
    assert_names(tmp_path)


def test_a_file_that_cannot_be_put_in_place(tmp_path: Path) -> None:
    """If a folder took the target's place, the error says so, and no temporary file is left."""
    target = tmp_path / "out.jsonl"

    def lines() -> Iterator[str]:
        yield "a"
        target.mkdir()

    with pytest.raises(OutputError, match=r"can't be replaced \(Is a directory\)"):
        write_lines(str(target), lines())
    assert_names(tmp_path, "out.jsonl")


# Standard output, pipes and devices


def test_standard_output_gets_each_row_at_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is out as soon as those before it are, after what was printed before, and not closed.

    At the end, the rows after a gap follow.
    """
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, "ascii"))
    sys.stdout.write("printed\n")
    seen = []
    writer = OrderedWriter("-")
    for index in (1, 0, 5, 2, 4):
        writer.write(row(index, "é"))
        seen.append(raw.getvalue().decode().count("\n") - 1)
    writer.close(complete=False)
    expected = [0, 2, 2, 3, 3]
    assert expected == seen
    rows = lines_of(row(index, "é") for index in (0, 1, 2, 4, 5))
    assert f"printed\n{rows}" == raw.getvalue().decode()
    assert not raw.closed


@contextmanager
def in_memory() -> Iterator[io.BytesIO]:
    """Put standard output into memory."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, "ascii")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        yield raw


@settings(deadline=None)
@given(st.integers(0, 12).flatmap(lambda n: st.permutations(range(n))), st.data())
def test_any_order_comes_out_in_input_order(order: list[int], data: st.DataObject) -> None:
    """Completions in any order make the same lines, one each, in the order of the input."""
    texts = [data.draw(st.text()) for _ in order]
    with in_memory() as raw, OrderedWriter("-") as writer:
        for index in order:
            writer.write(row(index, texts[index]))
        lines = raw.getvalue().decode().split("\n")
    expected = [(f"id {index}", text) for index, text in enumerate(texts)]
    assert lines.pop() == ""
    assert expected == [(json.loads(line)["id"], json.loads(line)["text"]) for line in lines]
    assert len(order) == writer.num_written


def test_a_gap_is_an_error_after_all_is_written() -> None:
    """A job that claims to be complete but lacks a row is told so, and keeps the others."""
    with in_memory() as raw:
        writer = OrderedWriter("-")
        writer.write(row(0))
        writer.write(row(2))
        with pytest.raises(ValueError, match=r"^row 1 never came$"):
            writer.close()
        assert lines_of([row(0), row(2)]) == raw.getvalue().decode()


@pytest.mark.parametrize("index", [0, 2])
def test_a_row_comes_once(index: int) -> None:
    """A second row with an index is refused, be the first written or waiting."""
    with in_memory() as raw, OrderedWriter("-") as writer:
        for first in (0, 2):
            writer.write(row(first))
        with pytest.raises(ValueError, match=f"^row {index} came twice"):
            writer.write(row(index))
        writer.write(row(1))
        assert raw.getvalue().count(b"\n") == 3


def test_closing_twice_is_once() -> None:
    """After the first close, another does nothing, and a row is refused."""
    with in_memory() as raw:
        writer = OrderedWriter("-")
        writer.close(complete=True)
        writer.close(complete=False)
        writer.close()
        with pytest.raises(ValueError, match=r"after the end"):
            writer.write(row(0))
        assert raw.getvalue() == b""


def test_half_a_surrogate_pair_is_escaped() -> None:
    """Text that UTF-8 can't hold is written as JSON's escape and reads back the same."""
    with in_memory() as raw, OrderedWriter("-") as writer:
        writer.write(row(0, "é\ud800"))
        text = raw.getvalue().decode()
    assert '"é\\ud800"' in text
    assert json.loads(text)["text"] == "é\ud800"


def test_a_file_is_not_a_stream(tmp_path: Path) -> None:
    """Files are written as a whole."""
    with pytest.raises(ValueError, match="use write_lines"):
        OrderedWriter(str(tmp_path / "out.jsonl"))
    assert_names(tmp_path)


def test_closed_standard_output_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without standard output gets an error, not a crash."""
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(OutputError, match=r"^standard output: is closed; name an output file$"):
        OrderedWriter("-")


@contextmanager
def standard_output(monkeypatch: pytest.MonkeyPatch, descriptor: int) -> Iterator[None]:
    with open(descriptor, "w") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        yield


def test_a_closed_pipe_has_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the reader goes away, the error says so once; closing is quiet, and so is the exit."""
    reader, descriptor = os.pipe()
    with standard_output(monkeypatch, descriptor):
        writer = OrderedWriter("-")
        writer.write(row(0))
        os.close(reader)
        with pytest.raises(OutputClosedError, match=r"^standard output: was closed by its reader$"):
            writer.write(row(1))
        writer.close(complete=False)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's /dev/full")
def test_a_full_device_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing write to standard output is an error with the system's reason."""
    with (
        standard_output(monkeypatch, os.open("/dev/full", os.O_WRONLY)),
        pytest.raises(OutputError) as caught,
        OrderedWriter("-") as writer,
    ):
        writer.write(row(0))
    assert str(caught.value) == "standard output: writing failed (No space left on device)"


def test_a_pipe_that_would_block_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe that does not wait for its reader ends in an error, not in lost bytes."""
    reader, descriptor = os.pipe()
    os.set_blocking(descriptor, False)
    with (
        standard_output(monkeypatch, descriptor),
        pytest.raises(OutputError, match=r"Resource temporarily unavailable"),
        OrderedWriter("-") as writer,
    ):
        writer.write(row(0, "x" * 2**20))
    os.close(reader)


def test_head_ends_a_process_without_a_word() -> None:
    """A process whose reader stops leaves nothing on standard error, not even at exit."""
    code = (
        "from localbatch.data.request import Completion, FinishReason\n"
        "from localbatch.formats.outputs import OrderedWriter, OutputClosedError\n"
        "try:\n"
        "    with OrderedWriter('-') as writer:\n"
        "        for index in range(100_000):\n"
        "            writer.write(Completion(index, index, 'x' * 99, FinishReason.STOP))\n"
        "except OutputClosedError:\n"
        "    raise SystemExit(3)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert json.loads(process.stdout.readline())["id"] == 0
        process.stdout.close()
        errors = process.stderr.read()
    assert errors == b""
    assert process.returncode == 3


def test_a_device_is_written_not_replaced(tmp_path: Path) -> None:
    """Devices and named pipes get the rows at once and stay what they are."""
    with OrderedWriter("/dev/null") as writer:
        writer.write(row(0))
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(fifo.read_text()))
    reader.start()
    with OrderedWriter(str(fifo)) as writer:
        writer.write(row(0))
    reader.join()
    assert [lines_of([row(0)])] == read
    assert_names(tmp_path, "fifo")
