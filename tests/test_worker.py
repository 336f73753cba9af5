"""The worker process and the parent's side of it: messages, windows, and ends of every kind."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from localbatch import (
    Completion,
    ConfigError,
    EngineError,
    FinishReason,
    Request,
    SamplingParams,
    TextPiece,
    WorkerError,
)
from localbatch.data.config import EngineConfig, Order
from localbatch.data.request import Later, failed_completion
from localbatch.engine import client as client_module
from localbatch.engine import worker
from localbatch.engine.client import WINDOW, WorkerClient
from localbatch.engine.fake import NUM_VOCAB
from localbatch.engine.messages import Abort, Failed, Ready, Report, Start, Submit
from localbatch.engine.supervisor import Supervisor

pytestmark = pytest.mark.timeout(60)

EACH_AS_IT_COMES: dict[str, Any] = {"order": Order.INPUT, "share_prefixes": False}
FAKE = EngineConfig("fake", backend="fake", ctx=256, parallel=8, threads=1, **EACH_AS_IT_COMES)
SLOW = EngineConfig(
    "fake", backend="fake", fake_step_s=0.02, parallel=8, lanes=1, **EACH_AS_IT_COMES
)


def request(index: int, prompt: str = "hello", **params: Any) -> Request:
    settings = {"max_tokens": 1, "ignore_eos": True, **params}
    return Request(index, index, prompt=prompt, params=SamplingParams(**settings))


def too_long(index: int) -> Request:
    return request(index, "x" * 300)


def test_an_abort_starts_no_debugger() -> None:
    """llama.cpp's wish for a backtrace is turned off, unless it is asked for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("GGML_NO_BACKTRACE", raising=False)
        assert client_module.worker_environment()["GGML_NO_BACKTRACE"] == "1"
        patch.setenv("GGML_NO_BACKTRACE", "0")
        assert client_module.worker_environment()["GGML_NO_BACKTRACE"] == "0"


class HungUpError(Exception):
    """The parent has nothing more to say."""


class Script:
    """An inbox that holds all messages from the start, and ends the worker behind the last."""

    def __init__(self, messages: tuple[object, ...]) -> None:
        self._left = list(messages)

    def empty(self) -> bool:
        return not self._left

    def get(self) -> object:
        if not self._left:
            raise HungUpError
        return self._left.pop(0)


def serve(*messages: object) -> list[object]:
    """Return all that a worker on the fake backend says to these messages."""
    outbox = io.BytesIO()
    with pytest.raises(HungUpError):
        worker._serve(Script((Start(FAKE), *messages)), outbox)  # type: ignore[arg-type]
    outbox.seek(0)
    said = []
    while outbox.tell() < len(outbox.getvalue()):
        said.append(pickle.load(outbox))
    return said


def events(said: list[object], run: int) -> list[Completion | TextPiece]:
    return [event for m in said if isinstance(m, Report) and m.run == run for event in m.events]


class TestServing:
    def test_says_first_what_the_model_is(self) -> None:
        """The parent waits for it."""
        ready = serve()[0]

        assert isinstance(ready, Ready)
        assert ready.card.num_vocab == NUM_VOCAB

    def test_reports_every_row_once_under_the_number_of_its_run(self) -> None:
        """Good and bad rows, with the counts so far."""
        said = serve(Submit(7, [request(0), too_long(1), request(2)], False))

        done = events(said, run=7)
        assert [(c.index, c.failed) for c in done if isinstance(c, Completion)] == [
            (1, True), (0, False), (2, False)
        ]  # fmt: skip
        last = said[-1]
        assert isinstance(last, Report)
        assert (last.stats.steps, last.stats.completion_tokens) == (1, 2)

    def test_reports_bad_rows_though_there_is_nothing_to_compute(self) -> None:
        """The parent may be waiting for just them."""
        done = events(serve(Submit(1, [too_long(4)], False)), run=1)

        assert [event.index for event in done if isinstance(event, Completion)] == [4]

    def test_nothing_of_a_run_that_was_called_off_gets_into_the_next(self) -> None:
        """Not even rows that had failed before they were reported."""
        said = serve(
            Submit(1, [request(0), too_long(1)], False), Abort(), Submit(2, [request(5)], False)
        )

        assert events(said, run=1) == []
        assert [e.index for e in events(said, run=2) if isinstance(e, Completion)] == [5]

    def test_sends_pieces_only_to_runs_that_want_them(self) -> None:
        """Each run says so for itself."""
        rows = [request(0, max_tokens=3, logit_bias={67: 1000.0})]  # token 67 is byte 65, an A

        said = serve(Submit(1, rows, True), Abort(), Submit(2, rows, True))
        with_pieces = [e.text for e in events(said, run=2)]
        without = [e.text for e in events(serve(Submit(3, rows, False)), run=3)]

        assert with_pieces == ["A", "A", "A", "AAA"]
        assert without == ["AAA"]


def start_by_hand(preparation: str) -> subprocess.Popen[bytes]:
    """Start a worker's `main` after some preparation in its process."""
    code = f"import sys; sys.path[:] = {sys.path!r}\n{preparation}\n"
    return subprocess.Popen(
        [sys.executable, "-c", code + "from localbatch.engine.worker import main; main()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def talk(preparation: str, *messages: object) -> tuple[list[object], bytes, int]:
    """Return all that a worker says to messages, its stderr and exit code; then hang up."""
    child = start_by_hand(preparation)
    assert child.stdin is not None
    assert child.stdout is not None
    said: list[object] = []
    for message in messages:
        pickle.dump(message, child.stdin)
        child.stdin.flush()
        while not said or not isinstance(said[-1], (Ready, Report, Failed)):
            said.append(pickle.load(child.stdout))
        said.append(None)
    _, stderr = child.communicate(timeout=30)
    return [m for m in said if m is not None], stderr, child.returncode


NOISY = """\
import os
from localbatch.engine.fake import FakeBackend
forward = FakeBackend.forward
def noisy(*arguments):
    os.write(1, b"noise from C\\n")
    print("noise from Python", flush=True)
    return forward(*arguments)
FakeBackend.forward = noisy
"""


class TestProcess:
    def test_what_a_library_prints_does_not_get_between_the_messages(self) -> None:
        """It goes to standard error."""
        said, stderr, code = talk(NOISY, Start(FAKE), Submit(1, [request(0)], False))

        assert [type(message) for message in said] == [Ready, Report]
        assert [e.index for e in events(said, run=1) if isinstance(e, Completion)] == [0]
        assert stderr.splitlines() == [b"noise from C", b"noise from Python"]
        assert code == 0

    def test_a_mistake_in_the_worker_is_reported(self) -> None:
        """In one line to the parent, in full on standard error."""
        broken = "from localbatch.engine import worker\nworker.make_backend = lambda config: 1 / 0"

        said, stderr, _ = talk(broken, Start(FAKE))

        assert [type(message) for message in said] == [Failed]
        assert isinstance(said[0], Failed)
        assert str(said[0].error) == "internal error: ZeroDivisionError: division by zero"
        assert stderr.startswith(b"Traceback")

    @pytest.mark.parametrize("name", ["SIGKILL", "SIGABRT"])
    def test_a_worker_that_dies_is_noticed_at_once(self, name: str) -> None:
        """While the parent waits for it; the error names the signal, now and later."""
        worker_client = WorkerClient(SLOW)
        running = worker_client.run([request(0), request(1, max_tokens=3000)])
        assert next(running) is not None
        killer = threading.Timer(0.3, os.kill, (worker_client.pid, getattr(signal, name)))
        killer.start()
        started = time.monotonic()

        with pytest.raises(WorkerError, match=rf"^the worker process ended by {name}.*doctor"):
            list(running)
        with pytest.raises(WorkerError, match=name):
            list(worker_client.run([request(2)]))

        assert time.monotonic() - started < 10
        killer.join()
        worker_client.close()

    def test_a_worker_that_dies_while_it_loads_is_noticed(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The exit code and the last thing it said are in the error."""
        code = "import sys; sys.exit('no luck here')  # {path}"
        monkeypatch.setattr(client_module, "_CODE", code)

        with pytest.raises(WorkerError, match=r"ended with exit code 1: no luck here;"):
            WorkerClient(FAKE)

    def test_ctrl_c_is_the_parents_to_handle(self) -> None:
        """The terminal sends it to the worker as well, which goes on."""
        interrupted = WorkerClient(SLOW)
        running = interrupted.run([request(0), request(1, max_tokens=20)])
        next(running)

        os.kill(interrupted.pid, signal.SIGINT)

        assert [c.index for c in running if isinstance(c, Completion)] == [1]
        interrupted.close()

    def test_stderr_is_passed_on_for_debugging_only(
        self, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """A traceback is for whoever asked for it."""
        for debug in (False, True):
            with pytest.raises(EngineError, match="internal error: AttributeError"):
                WorkerClient(None, debug=debug)  # type: ignore[arg-type]

            out, err = capfd.readouterr()
            assert out == ""
            assert ("Traceback" in err) is debug

    def test_threads_wait_for_each_other_briefly(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Unless the user has a policy of their own."""
        monkeypatch.setenv("GGML_NO_BACKTRACE", "1")
        monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
        monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
        monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "7")
        monkeypatch.delenv("MALLOC_TOP_PAD_", raising=False)
        assert client_module.worker_environment() == {
            **os.environ, "GOMP_SPINCOUNT": client_module._SPINS,
            "MALLOC_TOP_PAD_": str(32 * 1024 * 1024),
        }  # fmt: skip

        monkeypatch.setenv("GOMP_SPINCOUNT", "5")
        assert client_module.worker_environment()["GOMP_SPINCOUNT"] == "5"

        monkeypatch.delenv("GOMP_SPINCOUNT")
        monkeypatch.setenv("OMP_WAIT_POLICY", "active")
        monkeypatch.setenv("MALLOC_TOP_PAD_", "7")
        assert client_module.worker_environment() == dict(os.environ)

    def test_close_ends_the_process(self) -> None:
        """Also twice, and in the middle of a run."""
        closed = WorkerClient(SLOW)
        running = closed.run([request(0), request(1, max_tokens=3000)])
        next(running)

        closed.close()
        closed.close()

        assert closed._process.returncode == -signal.SIGKILL
        with pytest.raises(EngineError):
            list(running)


@pytest.fixture(scope="module")
def worker_client() -> Iterator[WorkerClient]:
    made = WorkerClient(FAKE)
    yield made
    made.close()


class Counted:
    """Rows that are made when they are taken."""

    def __init__(self, count: int, make: Callable[[int], Request | Completion]) -> None:
        self.taken = 0
        self._count, self._make = count, make

    def __iter__(self) -> Iterator[Request | Completion]:
        for index in range(self._count):
            self.taken += 1
            yield self._make(index)


class TestRuns:
    def test_more_rows_than_the_window(self, worker_client: WorkerClient) -> None:
        """Ten thousand rows come back once each; never are more than a window's worth ahead."""
        rows = Counted(10_000, request)
        done: list[int] = []
        at_half_a_window = 0

        for event in worker_client.run(rows):
            assert isinstance(event, Completion)
            assert rows.taken <= len(done) + WINDOW
            done.append(event.index)
            if len(done) == WINDOW - 100:
                at_half_a_window = rows.taken

        assert sorted(done) == list(range(10_000))
        # More are taken before the worker runs out of them.
        assert at_half_a_window > WINDOW

    def test_the_window_counts_answers(self, worker_client: WorkerClient) -> None:
        """Of rows with many answers, fewer are taken at one time; each comes back once."""

        def many(index: int) -> Request:
            params = SamplingParams(max_tokens=1, ignore_eos=True, n=128, temperature=1.0)
            return Request(index, index, prompt="x", params=params)

        rows = Counted(100, many)
        done = []
        for event in worker_client.run(rows):
            assert rows.taken <= len(done) + WINDOW // 128
            done.append(event)

        assert [len(c.choices) for c in done if isinstance(c, Completion)] == [128] * 100

    def test_rows_that_failed_before_pass_through(self, worker_client: WorkerClient) -> None:
        """However many there are, and also alone."""

        def every_third(index: int) -> Request | Completion:
            return (
                request(index) if index % 3 == 0 else failed_completion(index, index, "bad", None)
            )

        for count in (2 * WINDOW, 5):
            done = list(worker_client.run(Counted(count, every_third)))
            assert sorted(c.index for c in done if isinstance(c, Completion)) == list(range(count))
            failed = [c for c in done if isinstance(c, Completion) and c.error == "bad"]
            assert len(failed) == count - -(-count // 3)
        only_bad = [failed_completion(0, 0, "bad", 3)]
        assert list(worker_client.run(only_bad)) == only_bad
        assert list(worker_client.run([])) == []

    def test_rows_that_do_not_fit_are_among_the_completions(
        self, worker_client: WorkerClient
    ) -> None:
        """Each is one failed row, and a run of nothing else ends, too."""
        done = [
            c for c in worker_client.run([too_long(0), request(1)]) if isinstance(c, Completion)
        ]

        assert [(c.index, c.finish_reason) for c in sorted(done, key=lambda c: c.index)] == [
            (0, FinishReason.ERROR), (1, FinishReason.LENGTH)
        ]  # fmt: skip
        assert len(list(worker_client.run([too_long(0)]))) == 1

    def test_what_came_of_an_earlier_run_stays_out(self, worker_client: WorkerClient) -> None:
        """Reports that were on their way when it was called off are dropped."""
        first = worker_client.run([request(i, "first") for i in range(100)])
        next(first)
        deadline = time.monotonic() + 5
        while worker_client._inbox.qsize() < 5 and time.monotonic() < deadline:
            time.sleep(0.01)
        first.close()

        second = list(worker_client.run([request(i, "second", max_tokens=2) for i in (3, 4)]))

        assert sorted(c.index for c in second if isinstance(c, Completion)) == [3, 4]
        assert {len(c.token_ids) for c in second if isinstance(c, Completion)} == {2}

    def test_closing_calls_off_what_is_unfinished(self) -> None:
        """The worker stops computing it: the next row does not wait for 2,000 steps."""
        slow = WorkerClient(SLOW)
        long = slow.run([request(0), *(request(i, max_tokens=2000) for i in range(1, 9))])
        next(long)
        long.close()
        started = time.monotonic()

        assert len(list(slow.run([request(9)]))) == 1

        assert time.monotonic() - started < 10
        slow.close()

    def test_a_second_run_at_the_same_time_is_refused(self, worker_client: WorkerClient) -> None:
        """Its rows would get mixed up with the first one's, which goes on."""
        first = worker_client.run([request(0), request(1, max_tokens=50)])
        next(first)

        with pytest.raises(EngineError, match="another run is going on with this model"):
            next(worker_client.run([request(2)]))

        assert [c.index for c in first if isinstance(c, Completion)] == [1]

    def test_an_error_of_the_source_is_the_callers(self, worker_client: WorkerClient) -> None:
        """It ends the run where it is; the next one works."""

        def failing(index: int) -> Request:
            if index == WINDOW + 10:
                raise ConfigError("params: too few")
            return request(index)

        with pytest.raises(ConfigError, match="params: too few"):
            list(worker_client.run(Counted(2 * WINDOW, failing)))

        assert len(list(worker_client.run([request(0)]))) == 1

    def test_counts_are_those_of_the_worker(self, worker_client: WorkerClient) -> None:
        """As of the last report, over all runs."""
        before = worker_client.stats.completion_tokens

        list(worker_client.run([request(i, max_tokens=3) for i in range(4)]))

        assert worker_client.stats.completion_tokens == before + 12
        assert worker_client.stats.slots == 8


class TestLater:
    """Rows that are made of the answers of others."""

    def test_rows_are_asked_for_again_when_answers_came(self) -> None:
        """Each row is made of the answer before; nothing blocks, and all are computed."""
        answers: list[Completion] = []

        def rows() -> Iterator[Request | Later]:
            for index in range(5):
                while len(answers) < index:
                    yield Later.LATER
                before = answers[-1].text if answers else ""
                yield request(index, f"after {before}!")

        with contextlib.closing(WorkerClient(FAKE)) as client:
            for event in client.run(rows()):
                assert isinstance(event, Completion)
                answers.append(event)
            alone = [
                event
                for index in range(5)
                for event in client.run(
                    [request(index, f"after {answers[index - 1].text if index else ''}!")]
                )
            ]
        assert [a.text for a in answers] == [a.text for a in alone if isinstance(a, Completion)]

    def test_waiting_for_nothing_is_an_error(self) -> None:
        """Rows that wait when none is being computed would wait forever."""
        with (
            contextlib.closing(WorkerClient(FAKE)) as client,
            pytest.raises(EngineError, match="none is being computed"),
        ):
            list(client.run([request(0), Later.LATER, Later.LATER, Later.LATER, Later.LATER]))

    def test_others_go_on_meanwhile(self) -> None:
        """A row that waits for the first answer holds up none of the others."""
        taken: list[int] = []

        def rows() -> Iterator[Request | Later]:
            yield request(0)
            yield request(1, max_tokens=50)
            while 0 not in taken:
                yield Later.LATER
            yield request(2)

        with contextlib.closing(WorkerClient(SLOW)) as client:
            for event in client.run(rows()):
                assert isinstance(event, Completion)
                taken.append(event.index)
        assert taken == [0, 2, 1]

    def test_a_dead_worker_costs_only_the_guilty_row(self) -> None:
        """Rows that came of others' answers are run again like any."""
        taken: list[Completion] = []
        config = replace(FAKE, fake_dies_on="poison")

        def rows() -> Iterator[Request | Later]:
            yield from (request(index) for index in range(4))
            while len(taken) < 4:
                yield Later.LATER
            yield request(4, "poison")
            yield from (request(index, f"{index}") for index in range(5, 8))

        with contextlib.closing(Supervisor(config)) as supervisor:
            for event in supervisor.run(rows()):
                assert isinstance(event, Completion)
                taken.append(event)
        assert sorted(c.index for c in taken) == list(range(8))
        assert [c.index for c in taken if c.failed] == [4]
