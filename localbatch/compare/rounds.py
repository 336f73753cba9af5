"""Rounds of measurements: each in processes of its own, the kinds taking turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from localbatch.compare.process import run_task
from localbatch.compare.task import Outcome, Task
from localbatch.data.errors import LocalbatchError

Run: TypeAlias = Callable[[Task], Outcome]
Tell: TypeAlias = Callable[[str], object]
"""Is told of each measurement, in a line."""


@dataclass
class Series:
    """What was measured, by name and round."""

    runs: dict[str, list[Outcome]] = field(default_factory=dict)
    """Only those that never failed, each with as many as there were rounds."""
    failed: dict[str, str] = field(default_factory=dict)
    """Why, in words."""


def run_rounds(
    tasks: Mapping[str, Task], rounds: int, run: Run = run_task, tell: Tell = lambda line: None
) -> Series:
    """Measure all tasks in every round; one that fails is not run again and costs no other one."""
    series = Series()
    for number in range(rounds):
        for name in turned(list(tasks), number):
            if name in series.failed:
                continue
            try:
                outcome = run(tasks[name])
            except LocalbatchError as error:
                series.failed[name] = str(error)
                series.runs.pop(name, None)
                tell(f"round {number + 1} of {rounds}, {name}: {error}")
                continue
            series.runs.setdefault(name, []).append(outcome)
            tell(f"round {number + 1} of {rounds}, {name}: {outcome.wall_s:.2f} s")
    return series


def turned(names: Sequence[str], by: int) -> list[str]:
    """Return the names beginning with another one in each round, so that none is always first."""
    start = by % len(names) if names else 0
    return [*names[start:], *names[:start]]
