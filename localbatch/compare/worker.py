"""The process that makes one measurement, so that memory and load time are its own.

It is sent a task, says when it is ready, is sent the common start, and answers with what came of
it; all pickled, over standard input and output.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import BinaryIO

from localbatch.compare.bench import Bench
from localbatch.compare.margins import MarginTask, margins
from localbatch.compare.modes import MODES
from localbatch.compare.probe import ProbeTask, probe
from localbatch.compare.rows import requests_of
from localbatch.compare.task import CardTask, Outcome, Task
from localbatch.compare.trace import Clock, Step, Trace, TracedBackend
from localbatch.data.errors import ConfigError, EngineError, LocalbatchError
from localbatch.data.request import Request
from localbatch.engine.backend import Backend
from localbatch.engine.sampling import sample
from localbatch.engine.threads import apart
from localbatch.engine.worker import make_backend
from localbatch.scheduler.plan import PlanRow, StepPlan
from localbatch.scheduler.sequence import Sequence as TokenSequence

_WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Ready:
    """All that is not timed is done."""


@dataclass(frozen=True)
class Failed:
    """The measurement can't be made."""

    error: LocalbatchError


def main() -> None:
    """Make one measurement for the parent process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    outbox, inbox = os.fdopen(os.dup(1), "wb"), sys.stdin.buffer
    os.dup2(2, 1)  # what a library prints must not get between the messages

    def send(message: object) -> None:
        pickle.dump(message, outbox)
        outbox.flush()

    def wait_for_start() -> float:
        send(Ready())
        zero_s = float(pickle.load(inbox))
        threading.Thread(target=_end_with_parent, args=(inbox,), daemon=True).start()
        return zero_s

    task = pickle.load(inbox)
    started = time.perf_counter()
    try:
        backend = make_backend(task.config)
        load_s = time.perf_counter() - started
        if isinstance(task, CardTask):
            send(backend.card)
            return
        if isinstance(task, MarginTask):
            send(margins(backend, task))
            return
        if isinstance(task, ProbeTask):
            send(probe(backend, task))
            return
        outcome = measure(task, backend, wait_for_start)
        outcome.load_s = load_s
        send(outcome)
    except LocalbatchError as error:
        send(Failed(error))
    except Exception as error:
        send(Failed(EngineError(f"internal error: {type(error).__name__}: {error}")))


def _end_with_parent(inbox: BinaryIO) -> None:
    inbox.read()
    os._exit(0)


def measure(
    task: Task,
    loaded: Backend,
    wait_for_start: Callable[[], float],
    clock: Clock = time.perf_counter,
) -> Outcome:
    """Make ready, wait for the clock's reading at the common start, run, and say what came of it.

    Raises `ConfigError` if memory is too short or no row can be run.
    """
    began = clock()
    trace = Trace(clock)
    backend = TracedBackend(loaded, trace)
    bench = Bench(backend, trace, task.config, rows_of(task, loaded), task.batch, task.instances)
    bench.encode()
    if not bench.requests:
        raise ConfigError("no row can be run")
    mode = MODES[task.mode](bench)
    for opened in mode.prepare():
        apart(warm_up, opened, bench.prompts[bench.requests[0].index])
    outcome = Outcome(
        task.mode, setup_s=clock() - began, batch_rows=mode.batch_rows,
        width=min(mode.width, len(bench.requests)),
        lanes=mode.lanes, layout=task.config.kv_layout.value, numerics=mode.numerics,
        placement=str(loaded.placement),
    )  # fmt: skip
    trace.start(wait_for_start())
    cpu_s = time.process_time()
    mode.run()
    outcome.wall_s = trace.now()
    outcome.cpu_s = time.process_time() - cpu_s
    assert backend.context is not None
    outcome.threads = backend.context.threads * mode.lanes
    mode.close()
    fill_in(outcome, bench, trace)
    return outcome


def rows_of(task: Task, backend: Backend) -> list[Request]:
    """Return the rows that are this process's to run."""
    return requests_of(task.rows, backend)[task.instance :: task.instances]


def warm_up(backend: Backend, prompt: Sequence[int]) -> None:
    """Compute a few tokens of a prompt and one more, and forget them: the first use is slow."""
    request = Request("warm up", -1, prompt="warm up")
    sequence = TokenSequence(request, list(prompt[:_WARM_UP_TOKENS]))
    end = sequence.num_tokens
    backend.forward(StepPlan([PlanRow(sequence, 0, 0, end, True, True)], [], []), sample)
    sequence.tokens.append(prompt[-1])
    backend.forward(StepPlan([PlanRow(sequence, 0, end, end + 1, True, False)], [], []), sample)
    backend.clear()


def fill_in(outcome: Outcome, bench: Bench, trace: Trace) -> None:
    """Put in the rows' tokens and times; rows that were computed as another have that one's."""
    outcome.tokens, outcome.errors = bench.answers, bench.errors
    outcome.prompt_tokens = {i: len(bench.prompts[i]) for i in bench.answers}
    outcome.steps, outcome.padding_tokens = numbered(trace.steps), bench.padding_tokens
    first: dict[tuple[int, ...], int] = {}
    for request in bench.requests:
        if request.index in bench.answers:
            params = request.params
            key = (*bench.prompts[request.index], params.max_tokens, params.ignore_eos)
            times = trace.token_times.get(request.index)
            index = request.index if times else first[key]
            first.setdefault(key, index)
            outcome.token_times[request.index] = list(trace.token_times[index])


def numbered(steps: Sequence[Step]) -> list[Step]:
    """Return steps with their lanes numbered from 0: those of the plan's measurements are gone."""
    places = {lane: place for place, lane in enumerate(sorted({step.lane for step in steps}))}
    return [replace(step, lane=places[step.lane]) for step in steps]


if __name__ == "__main__":
    main()
