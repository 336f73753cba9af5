"""The parent's side of a measurement: one or several processes that start together."""

from __future__ import annotations

import contextlib
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import IO, Any

import psutil

from localbatch.compare.gpu import GpuReading, read_gpus
from localbatch.compare.margins import MarginTask
from localbatch.compare.task import Outcome, Task, joined
from localbatch.compare.worker import Failed
from localbatch.data.errors import WorkerError
from localbatch.engine.client import worker_environment

_CODE = "import sys; sys.path[:] = {path!r}; from localbatch.compare.worker import main; main()"
_MEMORY_EVERY_S = 0.1
_GPU_EVERY_S = 1.0


def run_task(task: Task) -> Outcome:
    """Run a mode in fresh processes, as many as it has instances, and join what they give.

    Raises `LocalbatchError`, in words, if one of them can't, or dies.
    """
    tasks = [replace(task, instance=number) for number in range(task.instances)]
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(_Worker(each)) for each in tasks]
        watch = stack.enter_context(Watch([worker.pid for worker in workers]))
        for worker in workers:
            worker.receive()
        watch.forget_gpu()
        zero_s = time.perf_counter()
        for worker in workers:
            worker.send(zero_s)
        outcome = joined([worker.receive() for worker in workers])
    outcome.peak_bytes = watch.peak_bytes
    outcome.gpu_use, outcome.gpu_peak_bytes = watch.gpu_use, watch.gpu_peak_bytes
    return outcome


def run_margins(task: MarginTask) -> list[float]:
    """Return the margins of forks, computed in a fresh process."""
    with _Worker(task) as worker:
        found: list[float] = worker.receive()
        return found


class _Worker:
    """A process with a task; it is ended with the block."""

    def __init__(self, task: Task | MarginTask) -> None:
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the block
        # `-c` with the parent's own path: `-m` would put the current folder first.
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CODE.format(path=sys.path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            env=worker_environment(),
        )  # fmt: skip
        self.pid = self._process.pid
        try:
            self.send(task)
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> _Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def send(self, message: object) -> None:
        """Send a message; raises `WorkerError` if the process is gone."""
        assert self._process.stdin is not None
        try:
            pickle.dump(message, self._process.stdin)
            self._process.stdin.flush()
        except OSError:
            raise WorkerError(self._obituary()) from None

    def receive(self) -> Any:
        """Return the next message; raises what the process could not do."""
        assert self._process.stdout is not None
        try:
            message = pickle.load(self._process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError):
            raise WorkerError(self._obituary()) from None
        if isinstance(message, Failed):
            raise message.error
        return message

    def _end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _obituary(self) -> str:
        """Say how the process ended."""
        code = self._process.wait()
        how = f"with exit code {code}"
        if code < 0:
            names = {int(member): member.name for member in signal.Signals}
            how = f"by {names.get(-code, str(-code))}"
        self._errors.seek(0)
        said = self._errors.read().decode("utf-8", "replace").split("\n")
        last = next((line.strip() for line in reversed(said) if line.strip()), "")
        memory = "; memory may be too short" if code == -signal.SIGKILL else ""
        return f"a measuring process ended {how}{memory}{': ' + last if last else ''}"


class Watch:
    """Samples the memory of processes, and of the GPUs, while it is entered."""

    def __init__(self, pids: Sequence[int]) -> None:
        self.peak_bytes = 0
        self._processes = [psutil.Process(pid) for pid in pids]
        self._gpu_before = read_gpus()
        self._gpu: list[GpuReading] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def forget_gpu(self) -> None:
        """Forget what the GPUs did so far."""
        self._gpu.clear()

    @property
    def gpu_use(self) -> float | None:
        """Mean share of the time in which the GPUs computed; `None` without one."""
        readings = self._gpu
        return sum(r.use for r in readings) / len(readings) if readings else None

    @property
    def gpu_peak_bytes(self) -> int | None:
        """Most memory taken on the GPUs since the start, in bytes; `None` without one."""
        if not self._gpu or self._gpu_before is None:
            return None
        return max(r.used_bytes for r in self._gpu) - self._gpu_before.used_bytes

    def _run(self) -> None:
        next_gpu = time.monotonic() + _GPU_EVERY_S
        while not self._stop.wait(_MEMORY_EVERY_S):
            self.peak_bytes = max(self.peak_bytes, resident_bytes(self._processes))
            if self._gpu_before is not None and time.monotonic() >= next_gpu:
                reading = read_gpus()
                self._gpu += [reading] if reading else []
                next_gpu = time.monotonic() + _GPU_EVERY_S


def resident_bytes(processes: Sequence[psutil.Process]) -> int:
    """Return the resident bytes of all processes; those that ended have none.

    What they map of files, such as the weights, counts once for all of them, where the system tells
    it apart (Linux), whoever else maps it, too.
    """
    own, mapped = 0, 0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            memory = process.memory_info()
            shared = int(getattr(memory, "shared", 0))
            own += int(memory.rss) - shared
            mapped = max(mapped, shared)
    return own + mapped
