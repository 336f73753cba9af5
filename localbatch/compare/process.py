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
from localbatch.compare.probe import Costs, ProbeTask
from localbatch.compare.task import CardTask, Outcome, Task, joined
from localbatch.compare.worker import Failed
from localbatch.data.config import EngineConfig
from localbatch.data.errors import WorkerError
from localbatch.engine.backend import ModelCard
from localbatch.engine.client import worker_environment

_CODE = "import sys; sys.path[:] = {path!r}; from localbatch.compare.worker import main; main()"
_MEMORY_EVERY_S = 0.1
_GPU_EVERY_S = 1.0


def run_task(task: Task) -> Outcome:
    """Run a mode in fresh processes, as many as it has instances, and join what they give.

    Raises `LocalbatchError`, in words, if one of them can't, or dies.
    """
    tasks = [replace(task, instance=number) for number in range(task.instances)]
    gpu_before = read_gpus()
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(_Worker(each)) for each in tasks]
        watch = stack.enter_context(Watch([worker.pid for worker in workers], gpu_before))
        for worker in workers:
            worker.receive()
        watch.start_run()
        zero_s = time.perf_counter()
        for worker in workers:
            worker.send(zero_s)
        outcome = joined([worker.receive() for worker in workers])
        watch.end_run()
    outcome.peak_bytes = watch.peak_bytes
    outcome.gpu_use, outcome.gpu_peak_bytes = watch.gpu_use, watch.gpu_peak_bytes
    return outcome


def read_card(config: EngineConfig) -> ModelCard:
    """Return what the model says of itself, without its weights.

    Raises `LocalbatchError` for one that can't be used, and for GPUs that aren't there.
    """
    with _Worker(CardTask(replace(config, metadata_only=True))) as worker:
        found: ModelCard = worker.receive()
        return found


def run_margins(task: MarginTask) -> list[float]:
    """Return the margins of forks, computed in a fresh process."""
    with _Worker(task) as worker:
        found: list[float] = worker.receive()
        return found


def run_probe(task: ProbeTask) -> Costs:
    """Return what single computations cost, measured in a fresh process."""
    with _Worker(task) as worker:
        found: Costs = worker.receive()
        return found


class _Worker:
    """A process with a task; it is ended with the block."""

    def __init__(self, task: Task | CardTask | MarginTask | ProbeTask) -> None:
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the block
        try:
            # `-c` with the parent's own path: `-m` would put the current folder first.
            self._process = subprocess.Popen(
                [sys.executable, "-c", _CODE.format(path=sys.path)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
                env=worker_environment(),
            )  # fmt: skip
        except OSError as error:  # memory or process numbers are used up
            self._errors.close()
            raise WorkerError(f"a measuring process can't be started: {error.strerror}") from None
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
    """Samples the memory of processes, and of the GPUs, while it is entered.

    `gpu_before` is what the GPUs said before the processes began; `None`: there is none.
    """

    def __init__(self, pids: Sequence[int], gpu_before: GpuReading | None) -> None:
        self.peak_bytes = 0
        self._processes = [psutil.Process(pid) for pid in pids]
        self._gpu_before = gpu_before
        self._gpu_bytes = 0
        self._gpu_uses: list[float] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._watch_memory, daemon=True)]
        if gpu_before is not None:
            self._threads.append(threading.Thread(target=self._watch_gpus, daemon=True))

    def __enter__(self) -> Watch:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def start_run(self) -> None:
        """Note the GPUs' memory now, and forget how busy they were so far."""
        if self._gpu_before is not None:
            self._read_gpus()
            self._gpu_uses.clear()

    def end_run(self) -> None:
        """Note how busy the GPUs were last, if the run was too short for a reading."""
        if self._gpu_before is not None and not self._gpu_uses:
            self._read_gpus()

    @property
    def gpu_use(self) -> float | None:
        """Mean share of the time in which the GPUs computed; `None` without one."""
        uses = self._gpu_uses
        return sum(uses) / len(uses) if uses else None

    @property
    def gpu_peak_bytes(self) -> int | None:
        """Most memory taken on the GPUs beyond what was taken before, in bytes."""
        if self._gpu_before is None:
            return None
        return max(0, self._gpu_bytes - self._gpu_before.used_bytes)

    def _watch_memory(self) -> None:
        while not self._stop.wait(_MEMORY_EVERY_S):
            self.peak_bytes = max(self.peak_bytes, resident_bytes(self._processes))

    def _watch_gpus(self) -> None:
        while not self._stop.wait(_GPU_EVERY_S):
            self._read_gpus()

    def _read_gpus(self) -> None:
        reading = read_gpus()
        if reading is not None:
            self._gpu_bytes = max(self._gpu_bytes, reading.used_bytes)
            self._gpu_uses.append(reading.use)


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
