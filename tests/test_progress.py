from __future__ import annotations

import io
import sys

import pytest
import tqdm.std
from hypothesis import given
from hypothesis import strategies as st

from localbatch.data.request import Completion, FinishReason, Usage, failed_completion
from localbatch.jobs.progress import Progress, summary_line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def frames(self) -> list[str]:
        return [frame.rstrip() for frame in self.getvalue().split("\r") if frame.strip()]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def terminal_in(patch: pytest.MonkeyPatch) -> Terminal:
    """Make standard error a terminal without color; not in a fixture, for pytest sets it after."""
    stream = Terminal()
    patch.setattr(sys, "stderr", stream)
    patch.setenv("NO_COLOR", "1")
    return stream


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Set the clock of the bar by hand."""
    stub = Clock()
    monkeypatch.setattr(tqdm.std, "time", stub)
    return stub


def answer(tokens: int) -> Completion:
    return Completion("a", 0, "text", FinishReason.STOP, Usage(5, tokens))


def failure() -> Completion:
    return failed_completion("a", 0, "prompt: is empty", 1)


def test_the_bar_tells_rows_speed_failures_and_time_left(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """Speed and time left are averages over the run so far."""
    terminal = terminal_in(monkeypatch)
    with Progress(8) as progress:
        for seconds, completion in [(10, answer(3000)), (30, failure())]:
            clock.now += seconds
            progress.update(completion)
    expected = [
        ("  0%|", "| 0/8 rows, ETA ?"),
        (" 12%|", "| 1/8 rows, 300 tok/s, 0 failed, ETA 01:10"),
        (" 25%|", "| 2/8 rows, 75 tok/s, 1 failed, ETA 02:00"),
    ]
    actual = [(frame[:5], frame[frame.rindex("|") :]) for frame in terminal.frames()]
    assert expected == actual


def test_without_a_total_the_bar_tells_the_time_passed(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """Where the number of rows is not known, there is no share and no time left."""
    terminal = terminal_in(monkeypatch)
    with Progress() as progress:
        clock.now += 61
        progress.update(answer(122))
    expected = ["rows: 0, 00:00", "rows: 1, 2.0 tok/s, 0 failed, 01:01"]
    assert expected == terminal.frames()


def test_the_total_may_come_late(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """Once the number of rows is known, the bar tells the share and the time left."""
    terminal = terminal_in(monkeypatch)
    with Progress() as progress:
        clock.now += 10
        progress.update(answer(30))
        progress.set_total(4)
    last = terminal.frames()[-1]
    expected = (" 25%|", "| 1/4 rows, 3.0 tok/s, 0 failed, ETA 00:30")
    assert expected == (last[:5], last[last.rindex("|") :])


def test_notes_are_lines_above_the_bar(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """A note is a line of its own, and the bar is drawn again below it."""
    terminal = terminal_in(monkeypatch)
    with Progress() as progress:
        progress.note("rows.jsonl:7: prompt: is empty")
    *_, note, bar = terminal.frames()
    expected = ("rows.jsonl:7: prompt: is empty", "rows: 0, 00:00")
    assert expected == (note, bar)
    assert terminal.getvalue().count("\n") == 1


@pytest.mark.parametrize(("number", "more"), [(1, []), (20, []), (21, ["more"]), (500, ["more"])])
def test_notes_are_few(monkeypatch: pytest.MonkeyPatch, number: int, more: list[str]) -> None:
    """The first 20 are printed, the rest is one more line; a file gets them, too."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress() as progress:
        for note in range(number):
            progress.note(f"note {note}")
    expected = [f"note {note}" for note in range(min(number, 20))]
    expected += ["(more failed rows are only in the output)" for _ in more]
    assert expected == stream.getvalue().splitlines()


@pytest.mark.parametrize("total", [None, 0, 1, 2])
def test_the_bar_is_gone_at_the_end(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, total: int | None
) -> None:
    """The last thing on the line is blanks, also after more rows than foretold, closed twice."""
    terminal = terminal_in(monkeypatch)
    progress = Progress(total)
    for _ in range(2):
        clock.now += 1
        progress.update(answer(1))
    progress.close()
    progress.close()
    *_, blanks, end = terminal.getvalue().split("\r")
    assert blanks.isspace()
    assert end == ""
    assert "\n" not in terminal.getvalue()


@pytest.mark.parametrize(("no_color", "expected"), [(None, True), ("", True), ("0", False)])
def test_no_color_is_honoured(
    monkeypatch: pytest.MonkeyPatch, no_color: str | None, expected: bool
) -> None:
    """Any value of NO_COLOR but an empty one turns escape sequences off."""
    terminal = terminal_in(monkeypatch)
    if no_color is None:
        monkeypatch.delenv("NO_COLOR")
    else:
        monkeypatch.setenv("NO_COLOR", no_color)
    with Progress(2) as progress:
        progress.update(answer(1))
    assert expected == ("\x1b[32m" in terminal.getvalue())


def use(progress: Progress) -> None:
    with progress:
        progress.update(answer(1))
        progress.update(failure())
    progress.close()


def test_quiet_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """With quiet, the same calls write nothing, even on a terminal."""
    terminal = terminal_in(monkeypatch)
    use(Progress(2, quiet=True))
    assert terminal.getvalue() == ""


def test_a_file_gets_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where standard error is no terminal, the same calls write nothing."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    use(Progress(2))
    assert stream.getvalue() == ""


def test_no_standard_error_is_no_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A process without standard error can run a job, and nothing else gets its notes."""
    monkeypatch.setattr(sys, "stderr", None)
    progress = Progress(2)
    progress.set_total(3)
    progress.note("note")
    use(progress)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("rows", "failed", "prompt_tokens", "completion_tokens", "wall_s", "expected"),
    [
        (
            64, 0, 3200, 4096, 20.8,
            "64 rows in 20.8 s: 64 answered, 0 failed; "
            "3,200 prompt + 4,096 output tokens, 197 output tok/s",
        ),
        (
            1, 1, 0, 0, 0.0,
            "1 row in 0.0 s: 0 answered, 1 failed; 0 prompt + 0 output tokens, 0 output tok/s",
        ),
        (
            1_000_000, 1_500, 25_000_000, 9_000_000, 4000.04,
            "1,000,000 rows in 4,000.0 s: 998,500 answered, 1,500 failed; "
            "25,000,000 prompt + 9,000,000 output tokens, 2,250 output tok/s",
        ),
        (
            2, 0, 9, 99, 10.0,
            "2 rows in 10.0 s: 2 answered, 0 failed; 9 prompt + 99 output tokens, "
            "9.9 output tok/s",
        ),
        (
            0, 0, 0, 0, 1.25,
            "0 rows in 1.2 s: 0 answered, 0 failed; 0 prompt + 0 output tokens, 0 output tok/s",
        ),
    ],
)  # fmt: skip
def test_the_summary(
    rows: int,
    failed: int,
    prompt_tokens: int,
    completion_tokens: int,
    wall_s: float,
    expected: str,
) -> None:
    """One line says rows, time, answers, failures, tokens and speed."""
    actual = summary_line(
        rows=rows,
        failed=failed,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        wall_s=wall_s,
    )
    assert expected == actual


@given(st.integers(0), st.integers(0), st.floats(0, 1e9))
def test_the_summary_is_one_line(rows: int, tokens: int, wall_s: float) -> None:
    """Whatever the numbers, the summary is one printable line with a speed at its end."""
    line = summary_line(
        rows=rows, failed=0, prompt_tokens=0, completion_tokens=tokens, wall_s=wall_s
    )
    assert line.isprintable()
    assert line.endswith(" output tok/s")
