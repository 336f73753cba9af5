"""The parent's side of a worker."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import platform
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from typing import IO

from localbatch.data.config import EngineConfig
from localbatch.data.errors import EngineError, WorkerError
from localbatch.data.request import Completion, Later, Request
from localbatch.engine.engine import EngineStats, TextPiece
from localbatch.engine.messages import (
    Abort,
    Failed,
    Heartbeat,
    Look,
    Prepare,
    Ready,
    Report,
    Seen,
    Start,
    Submit,
)
from localbatch.engine.preview import Preview

WINDOW = 4096
"""Most answers that the worker has to compute at one time; more rows wait in the parent's input."""

HANG_S = 300.0
"""A worker that gets nothing done for so long, while it has rows, is taken for dead. The slowest
single computation, 128 tokens of a very large model on a CPU, takes about half of it."""

_SPINS = "5000" if platform.machine() in ("x86_64", "AMD64") else "20000"
"""How often OpenMP's threads look before they sleep: about 0.1 ms. On x86 each look has a pause of
some dozen nanoseconds."""
_KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_TOP_PAD_": str(32 << 20)}
_CODE = "import sys; sys.path[:] = {path!r}; from localbatch.engine.worker import main; main()"


class WorkerClient:
    """Starts a worker, feeds it rows and yields what comes back.

    Raises what the worker could not do: `ModelError`, `ConfigError`, `BindingError`; and
    `WorkerError` if it dies.
    """

    def __init__(self, config: EngineConfig, *, debug: bool = False) -> None:
        self.stats = EngineStats()
        self._debug = debug or bool(os.environ.get("LOCALBATCH_DEBUG"))
        self._stderr_tail: deque[str] = deque(maxlen=20)
        self._inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._runs = itertools.count(1)
        self._running = False
        self._calls = (-1, 0.0)  # of the worker's backend, and when that number was new
        # `-c` with the parent's own path: `-m` would put the current folder first.
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CODE.format(path=sys.path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=worker_environment(),
        )  # fmt: skip
        self._threads = [
            threading.Thread(target=target, args=(pipe,), daemon=True)
            for target, pipe in (
                (self._receive, self._process.stdout),
                (self._collect_stderr, self._process.stderr),
            )
        ]
        for thread in self._threads:
            thread.start()
        try:
            self._send(Start(config))
            ready = self._next()
            assert isinstance(ready, Ready)
        except BaseException:
            self.close()
            raise
        self.card, self.gpus, self.other_gpus = ready.card, ready.gpus, ready.other_gpus

    @property
    def pid(self) -> int:
        """Process id of the worker."""
        return self._process.pid

    def run(
        self, rows: Iterable[Request | Completion | Later], *, streams_text: bool = False
    ) -> Generator[Completion | TextPiece, None, None]:
        """Yield the completion of each request as it ends, and text pieces before if asked for.

        Rows are taken from the iterable as there is room; completions among them (rows that
        failed before) pass through. At a `Later` no more are taken until the next completions came
        back. Closing the iterator calls off what is unfinished. One run at a time.
        """
        if self._running:
            raise EngineError("another run is going on with this model")
        self._running = True
        run, source = next(self._runs), iter(rows)
        in_flight: dict[int, int] = {}  # answers to compute, by row
        batch: list[Request | Completion] = []
        exhausted = False
        try:
            while True:
                if not exhausted and (room := WINDOW - sum(in_flight.values())) >= WINDOW // 2:
                    batch, exhausted = _take(source, room)
                    requests = [row for row in batch if isinstance(row, Request)]
                    in_flight |= {row.index: _num_answers(row) for row in requests}
                    if requests:
                        self._send(Submit(run, requests, streams_text))
                    yield from (row for row in batch if isinstance(row, Completion))
                if not in_flight and exhausted:
                    return
                if not in_flight:
                    if not batch:
                        raise EngineError("rows wait for answers, and none is being computed")
                    continue
                for event in self._events_of(run):
                    if isinstance(event, Completion):
                        del in_flight[event.index]
                    yield event
        finally:
            self._running = False
            if in_flight:
                with contextlib.suppress(EngineError):
                    self._send(Abort())

    def prepare(self, requests: list[Request]) -> list[Completion]:
        """Plan for rows, and make the contexts, without computing any; `stats` tells the result.

        Returns the records of rows that can't be computed.
        """
        run = next(self._runs)
        self._send(Prepare(run, requests))
        return [event for event in self._events_of(run) if isinstance(event, Completion)]

    def preview(self, requests: list[Request], *, whole: bool = False) -> list[Preview]:
        """Return what would become of rows; with `whole`, their text and tokens, too."""
        self._send(Look(requests, whole))
        while not isinstance(seen := self._next(HANG_S), Seen):
            pass  # a report that was under way
        return seen.previews

    def close(self) -> None:
        """End the worker; unfinished rows are lost."""
        process = self._process
        if process.poll() is None:
            process.kill()
        process.wait()
        for thread in self._threads:
            thread.join()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _events_of(self, run: int) -> list[Completion | TextPiece]:
        report = self._next(HANG_S)
        assert isinstance(report, Report)
        self.stats = report.stats
        return report.events if report.run == run else []

    def _next(self, hang_s: float | None = None) -> object:
        """Return the next message; raises if the worker failed, died or hangs."""
        since = time.monotonic()
        while True:
            try:
                message = self._inbox.get(timeout=1.0)
            except queue.Empty:
                message = Heartbeat(self._calls[0])
            if not isinstance(message, Heartbeat):
                break
            now = time.monotonic()
            if message.calls != self._calls[0]:
                self._calls = (message.calls, now)
            if hang_s is not None and now - max(since, self._calls[1]) > hang_s:
                self._process.kill()
                raise WorkerError(f"the worker process got nothing done for {hang_s:.0f} s")
        if isinstance(message, Failed):
            raise message.error
        if message is None:
            self._inbox.put(None)  # whoever asks again must not wait forever
            raise WorkerError(self._obituary())
        return message

    def _send(self, message: object) -> None:
        assert self._process.stdin is not None
        if self._process.stdin.closed:
            raise EngineError("the model is closed; load it again")
        try:
            pickle.dump(message, self._process.stdin)
            self._process.stdin.flush()
        except OSError:
            raise WorkerError(self._obituary()) from None

    def _receive(self, pipe: IO[bytes]) -> None:
        with contextlib.suppress(EOFError, OSError, pickle.UnpicklingError):
            while True:
                self._inbox.put(pickle.load(pipe))
        self._inbox.put(None)

    def _collect_stderr(self, pipe: IO[bytes]) -> None:
        for line in pipe:
            text = line.decode("utf-8", "replace").rstrip()
            self._stderr_tail.append(text)
            if self._debug:
                sys.stderr.write(text + "\n")

    def _obituary(self) -> str:
        """Say how the worker ended."""
        code = self._process.wait()
        how = f"with exit code {code}"
        if code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
            how = f"by {name}"
        self._threads[1].join(timeout=1.0)
        said = [line for line in self._stderr_tail if line.strip()]
        last = f": {said[-1].strip()}" if said else ""
        return f"the worker process ended {how}{last}; `localbatch doctor` tests what works"


def _take(
    source: Iterator[Request | Completion | Later], room: int
) -> tuple[list[Request | Completion], bool]:
    """Return rows of so many answers, the last may have more, and whether there are no others."""
    batch: list[Request | Completion] = []
    for row in source:
        if isinstance(row, Later):
            return batch, False
        batch.append(row)
        room -= _num_answers(row)
        if room <= 0:
            return batch, False
    return batch, True


def _num_answers(row: Request | Completion) -> int:
    """Return how many answers of a row are computed; greedy ones are all the same."""
    return row.params.n if isinstance(row, Request) and row.params.temperature else 1


def worker_environment() -> dict[str, str]:
    """Return the worker's environment.

    llama.cpp's threads wait for each other some hundred times a step, spinning. With the default
    of GNU's OpenMP, which is to spin for milliseconds, another busy process on the same cores makes
    a step take some ten times as long as with a short spin, which takes its share. An idle machine
    is as fast.
    With many sequences llama.cpp allocates and frees megabytes in each step, to be able to undo it.
    GNU's malloc would give them back to the system each time: of the milliseconds that 256 rows
    take outside of the kernels, that is a third.
    When llama.cpp aborts, it starts a debugger on itself for a backtrace, which may take long.
    """
    environment = dict(os.environ)
    environment.setdefault("GGML_NO_BACKTRACE", "1")
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", _SPINS)
    for name, value in _KEEP_MEMORY.items():
        environment.setdefault(name, value)
    return environment
