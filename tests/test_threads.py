"""Nothing that computed leaves helpers behind: they would slow down all that computes later."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from localbatch.compare.task import Task
from localbatch.compare.worker import measure as measure_task
from localbatch.data.config import EngineConfig
from localbatch.engine.backend import ContextConfig
from localbatch.engine.calibration import measure
from localbatch.engine.engine import Engine
from localbatch.engine.llama import LlamaBackend
from localbatch.engine.threads import ComputeThread, apart
from tests.factories import create_requests

TASKS = Path("/proc/self/task")


def threads() -> set[str]:
    """Threads of this process by the kernel's names, OpenMP's helpers included."""
    return set(os.listdir(TASKS))


def end_soon(started: Callable[[], set[str]], allowed: int = 0) -> bool:
    """Whether no more of them are left soon: helpers end a moment after their thread."""
    for _ in range(400):
        if len(started()) <= allowed:
            return True
        time.sleep(0.05)
    return False


class TestComputeThread:
    def test_calls_are_made_one_after_another_in_one_thread(self) -> None:
        thread = ComputeThread()
        first, second = (thread.begin(threading.get_ident) for _ in range(2))
        assert first.result() == second.result() != threading.get_ident()
        thread.end()

    def test_it_ends_and_starts_again(self) -> None:
        before = threading.active_count()
        thread = ComputeThread()
        thread.end()
        for _ in range(2):
            assert thread.begin(threading.active_count).result() == before + 1
            thread.end()
            assert threading.active_count() == before

    def test_apart_raises_what_is_raised_and_leaves_no_thread(self) -> None:
        before = threading.active_count()
        assert apart(divmod, 7, 2) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            apart(divmod, 7, 0)
        assert threading.active_count() == before


@pytest.mark.skipif(not TASKS.exists(), reason="counts threads in /proc, as Linux has it")
class TestHelpers:
    def test_of_an_engine(self, tiny_model: Path) -> None:
        """It computes with a helper, and after its end and the model's there is none."""
        before = threads()
        backend = LlamaBackend(str(tiny_model))
        assert end_soon(lambda: threads() - before)
        engine = Engine(backend, EngineConfig(str(tiny_model), lanes=1, threads=2))
        engine.submit(create_requests(2, 5, first=0, max_tokens=8, ignore_eos=True))
        most = 0
        while engine.has_work:
            engine.step()
            most = max(most, len(threads() - before))
        assert most >= 2
        engine.close()
        backend.close()
        assert end_soon(lambda: threads() - before)

    def test_of_a_measurement(self, tiny_model: Path) -> None:
        before = threads()
        backend = LlamaBackend(str(tiny_model))
        context = ContextConfig(4, 256, None, chunk=128, threads=2)
        assert measure([backend], context, 10.0) is not None
        assert end_soon(lambda: threads() - before)
        backend.close()

    def test_of_a_lane_with_fewer_threads(self, tiny_model: Path) -> None:
        """A lane that gives threads back gives the helpers back, too."""
        before = threads()
        backend = LlamaBackend(str(tiny_model))
        engine = Engine(backend, EngineConfig(str(tiny_model), lanes=1, threads=2))
        engine.submit(create_requests(1, 5, first=0, max_tokens=8, ignore_eos=True))
        engine.step()
        lane = engine.lanes[0]
        computing = threads() - before
        lane.use_threads(1)
        assert len(computing) >= 2
        assert end_soon(lambda: threads() & computing)
        engine.close()
        backend.close()

    @pytest.mark.parametrize("mode", ["sequential", "static", "continuous", "continuous-auto"])
    def test_of_what_is_compared(self, mode: str, tiny_model: Path) -> None:
        """At the start of a measurement nothing is left of warming up, and none after it."""
        config = EngineConfig(str(tiny_model), lanes=1, threads=2)
        task = Task(mode, config, tuple(create_requests(4, 5, first=0, ignore_eos=True)), 2)
        before, at_start = threads(), list[bool]()
        allowed = 1 + mode.startswith("continuous")  # what measures, and the lane

        def start() -> float:
            at_start.append(end_soon(lambda: threads() - before, allowed))
            return time.perf_counter()

        for _ in range(2):  # the first one also finds out about bits
            apart(measure_task, task, LlamaBackend(str(tiny_model)), start)
        assert at_start[-1]
        assert end_soon(lambda: threads() - before)
