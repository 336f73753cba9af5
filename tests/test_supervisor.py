"""A worker that dies: all rows are computed but the one that kills it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localbatch import Completion, Request, SamplingParams, WorkerError
from localbatch.data.config import EngineConfig
from localbatch.data.request import failed_completion
from localbatch.engine import client
from localbatch.engine.supervisor import Supervisor

pytestmark = pytest.mark.timeout(120)

DEADLY = "poison"
FAKE = EngineConfig("fake", backend="fake", ctx=256, parallel=4, threads=1, fake_dies_on=DEADLY)


def row(index: int, prompt: str = "hello") -> Request:
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    return Request(f"row-{index}", index, prompt=f"{prompt} {index}", params=params)


def run(config: EngineConfig, rows: list[Request | Completion]) -> tuple[list[Completion], int]:
    with contextlib.closing(Supervisor(config)) as supervisor:
        done = [event for event in supervisor.run(rows) if isinstance(event, Completion)]
    return sorted(done, key=lambda completion: completion.index), supervisor.num_restarts


@pytest.mark.parametrize(
    ("rows", "killers"), [(1, {0}), (2, {1}), (9, {4}), (9, {0, 8}), (30, {3, 4, 17})]
)
def test_only_the_row_that_kills_gets_an_error(rows: int, killers: set[int]) -> None:
    """The others have the answers that they have without it."""
    healthy = [row(i) for i in range(rows) if i not in killers]
    expected, _ = run(FAKE, [*healthy])

    done, restarts = run(FAKE, [row(i, DEADLY if i in killers else "hello") for i in range(rows)])

    assert [c.index for c in done] == list(range(rows))
    assert {c.index for c in done if c.failed} == killers
    assert [c.text for c in done if not c.failed] == [c.text for c in expected]
    assert all("SIGKILL" in (done[i].error or "") for i in killers)
    assert restarts >= len(killers)


@settings(max_examples=5, deadline=None)
@given(st.sets(st.integers(0, 19), min_size=1, max_size=4))
def test_any_killers_are_found(killers: set[int]) -> None:
    """Each row ends once."""
    done, _ = run(FAKE, [row(i, DEADLY if i in killers else "hello") for i in range(20)])

    assert [(c.index, c.failed) for c in done] == [(i, i in killers) for i in range(20)]


def test_rows_that_were_bad_before_pass_through_once() -> None:
    """They never were with the worker."""
    bad = failed_completion("bad", 1, "no prompt", 2)
    done, _ = run(FAKE, [row(0), bad, row(2, DEADLY), row(3)])

    assert [(c.index, c.failed) for c in done] == [(0, False), (1, True), (2, True), (3, False)]
    assert done[1] is bad


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGABRT"])
def test_a_death_from_outside_costs_no_row(name: str) -> None:
    """All that was in flight is run again in another worker."""
    supervisor = Supervisor(replace(FAKE, fake_step_s=0.01))
    rows = [row(i) for i in range(40)]
    done: list[int] = []
    for event in supervisor.run(rows):
        assert isinstance(event, Completion)
        assert not event.failed
        done.append(event.index)
        if len(done) in (5, 20):
            os.kill(supervisor.pid, getattr(signal, name))
    supervisor.close()

    assert sorted(done) == list(range(40))
    assert supervisor.num_restarts >= 1


def test_a_worker_that_stands_still_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stopped here, as a hanging driver would stop it; a second is much for the fake."""
    monkeypatch.setattr(client, "HANG_S", 2.0)
    supervisor = Supervisor(replace(FAKE, fake_step_s=0.01))
    stopped = threading.Timer(0.2, os.kill, (supervisor.pid, signal.SIGSTOP))
    stopped.start()
    started = time.monotonic()

    done = list(supervisor.run([row(i) for i in range(60)]))
    supervisor.close()

    assert len(done) == 60
    assert supervisor.num_restarts == 1
    assert 2.0 < time.monotonic() - started < 20


def test_a_long_step_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as something is done within the time."""
    monkeypatch.setattr(client, "HANG_S", 3.0)
    done, restarts = run(replace(FAKE, fake_step_s=0.8), [row(0)])

    assert (len(done), restarts) == (1, 0)


def test_where_every_row_kills_it_is_not_the_rows() -> None:
    """After three rows alone it gives up, with the reason."""
    with pytest.raises(WorkerError, match="SIGKILL"):
        run(FAKE, [row(i, DEADLY) for i in range(50)])


def test_text_that_was_shown_is_not_shown_again() -> None:
    """A death in a stream is an error."""
    supervisor = Supervisor(FAKE)
    with pytest.raises(WorkerError, match="SIGKILL"):
        list(supervisor.run([row(0, DEADLY)], streams_text=True))
    supervisor.close()


def test_rows_are_still_taken_as_there_is_room() -> None:
    """The input is not read to its end because of a death."""
    taken = 0

    def rows() -> Iterator[Request]:
        nonlocal taken
        for i in range(20_000):
            taken += 1
            yield row(i, DEADLY if i == 1 else "hello")

    supervisor = Supervisor(FAKE)
    events = supervisor.run(rows())
    first = next(events)
    supervisor.close()
    events.close()

    assert isinstance(first, Completion)
    assert taken <= client.WINDOW


def test_a_worker_may_die_while_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are tried; after three the reason is raised."""
    with contextlib.closing(Supervisor(replace(FAKE, fake_step_s=0.01))) as supervisor:
        events = supervisor.run([row(i) for i in range(20)])
        next(events)
        monkeypatch.setattr(client, "_CODE", "import os; os.abort() # {path!r}")
        os.kill(supervisor.pid, signal.SIGKILL)
        with pytest.raises(WorkerError, match="SIGABRT"):
            list(events)
        assert supervisor.num_restarts == 3
