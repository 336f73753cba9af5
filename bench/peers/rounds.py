"""Rounds of measurements, each in a process of its own, the systems taking turns."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from peers.grid import Settings, Trial, best, label, search
from peers.job import BenchError, Job, Measurement, Row, check, to_json

SCRIPT = Path(__file__).parent.parent / "compare.py"
_LIMIT_S = 2 * 3600
_START_S = 20.0

Run = Callable[[Job], Measurement]


@dataclass
class Results:
    """All that was measured on one workload."""

    workload: str
    rows: list[Row]
    jobs: dict[str, Job] = field(default_factory=dict)
    runs: dict[str, list[Measurement]] = field(default_factory=dict)
    """By system, then by round."""
    failed: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    trials: list[Trial] = field(default_factory=list)
    """The settings of llama-server that were tried."""
    prompt_tokens: list[int] | None = None

    @property
    def complete(self) -> dict[str, list[Measurement]]:
        """The runs of the systems that never failed."""
        return {name: runs for name, runs in self.runs.items() if name not in self.failed}


def run_job(job: Job) -> Measurement:
    """Measure in a fresh process; raises `BenchError` if that fails."""
    process = subprocess.Popen(
        command(job), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        output, errors = process.communicate(timeout=job.limit_s or _LIMIT_S)
    except subprocess.TimeoutExpired:
        raise BenchError(f"took more than {job.limit_s or _LIMIT_S:.0f} s") from None
    finally:
        end_tree(process)
    if process.returncode != 0:
        lines = [line.strip() for line in errors.splitlines() if line.strip()]
        raise BenchError(f"exit code {process.returncode}: {lines[-1] if lines else 'no reason'}")
    return Measurement(**json.loads(output.splitlines()[-1]))


def command(job: Job) -> list[str]:
    """Return the command that makes one measurement."""
    return [sys.executable, str(SCRIPT), "--measure", to_json(job)]


def end_tree(process: subprocess.Popen[str]) -> None:
    """End a process that still runs, and all below it."""
    if process.poll() is not None:
        return
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()
    process.wait()


def find_best(
    results: Results, job: Job, size: str, rows: int | None = None, run: Run = run_job
) -> Settings | None:
    """Find the server's fastest settings on the rows of `job`, or the first so many of them.

    Settings that take more than twice as long as others are broken off.
    """
    fastest: list[float] = []
    searched = results
    if rows is not None and rows < len(results.rows):
        job = replace(job, rows=rows)
        searched = Results(results.workload, results.rows[:rows])

    def seconds(settings: Settings) -> float | None:
        limit_s = 2 * min(fastest) + _START_S if fastest else None
        trial = replace(job, settings=settings, limit_s=limit_s)
        measured = measure(searched, f"server, {label(settings)}", trial, run)
        if not isinstance(measured, Measurement):
            return None
        fastest.append(measured.wall_s)
        return measured.wall_s

    results.trials = search(size, len(searched.rows), seconds)
    return best(results.trials)


def run_rounds(
    results: Results,
    rounds: int,
    run: Run = run_job,
    after_round: Callable[[], object] = lambda: None,
) -> None:
    """Measure all systems of `results.jobs` in every round; one that fails is not run again."""
    names = list(results.jobs)
    for number in range(rounds):
        for name in turned(names, number):
            if name in results.failed:
                continue
            title = f"round {number + 1}, {name}"
            measured = measure(results, title, results.jobs[name], run)
            if isinstance(measured, Measurement):
                results.runs.setdefault(name, []).append(measured)
            else:
                results.failed[name] = measured
        after_round()


def turned(names: Sequence[str], by: int) -> list[str]:
    """Return the names beginning with another one in each round, so that none is always first."""
    start = by % len(names) if names else 0
    return [*names[start:], *names[:start]]


def measure(results: Results, title: str, job: Job, run: Run) -> Measurement | str:
    """Measure once and check the counts; returns what is wrong, in words, if anything is."""
    try:
        measured = run(job)
        check(measured, results.rows, results.prompt_tokens)
    except BenchError as error:
        say(f"{results.workload}, {title}: FAILED: {error}")
        return str(error)
    results.prompt_tokens = results.prompt_tokens or measured.prompt_tokens
    say(f"{results.workload}, {title}: {measured.wall_s:.2f} s")
    return measured


def say(text: str) -> None:
    """Report progress."""
    print(text, file=sys.stderr, flush=True)


def figures(results: Results) -> dict[str, Any]:
    """Return everything but the tokens, as plain data."""
    return {
        "workload": results.workload,
        "rows": [[row.id, row.max_tokens] for row in results.rows],
        "prompt_tokens": results.prompt_tokens,
        "commands": {name: command(job) for name, job in results.jobs.items()},
        "runs": {
            name: [vars(run) | {"tokens": None} for run in runs]
            for name, runs in results.runs.items()
        },
        "failed": results.failed,
        "left_out": results.left_out,
        "server_trials": [
            {"options": label(settings), "wall_s": seconds} for settings, seconds in results.trials
        ],
    }
