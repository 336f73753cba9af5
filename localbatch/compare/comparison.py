"""Runs the modes on the same rows, in turn, and compares time, room and answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from localbatch.compare.figures import Agreement, agreement, figures
from localbatch.compare.forks import Margins, forks_of, with_margins
from localbatch.compare.machine import machine
from localbatch.compare.margins import MarginTask
from localbatch.compare.modes import MODES, Sequential
from localbatch.compare.process import run_margins, run_task
from localbatch.compare.reasons import reasons
from localbatch.compare.report import Comparison, ModeReport, Spread, spread
from localbatch.compare.rounds import Run, Series, Tell, run_rounds
from localbatch.compare.task import MOST_ROUNDS, Outcome, Task, check_range, comparable
from localbatch.data.config import EngineConfig, KVLayout
from localbatch.data.errors import ConfigError, LocalbatchError
from localbatch.data.request import Request
from localbatch.engine.backend import Numerics
from localbatch.engine.machine import available_memory, usable_threads

REFERENCE = Sequential.name
"""The mode that speed and answers of all others are compared with; always run."""

_MEMORY_SHARE = 0.8
_MODEL_SIZES = 2
"""How much a process with a model takes, in sizes of its file, or about so: weights that are laid
out anew are there twice."""
_MOST_MARGINS = 20

PADDED = (
    "on this processor continuous batches are padded, so that a row has the same bits in any of "
    "them; all others are not, and answers may differ"
)


@dataclass(frozen=True)
class CompareConfig:
    """What is to be compared. Raises `ConfigError`, naming the setting, when a value won't do."""

    engine: EngineConfig
    requests: tuple[Request, ...]
    modes: tuple[str, ...] = tuple(MODES)
    rounds: int = 3
    batch: int = 16
    """Rows that are alive at one time."""
    instances: int | None = None
    """Processes of the mode that has several; left out: one for each core, if memory allows."""
    name: str = ""
    """What the report calls the model."""

    def __post_init__(self) -> None:
        if not self.requests:
            raise ConfigError("the input has no row that can be run")
        if unknown := [mode for mode in self.modes if mode not in MODES]:
            raise ConfigError(f"modes: {unknown[0]!r} is not one of {', '.join(MODES)}")
        check_range("rounds", self.rounds, 1, MOST_ROUNDS)
        check_range("batch", self.batch, 1, 1024)
        check_range("instances", self.instances, 1, 512)


def compare(
    config: CompareConfig,
    *,
    run: Run = run_task,
    look: Margins = run_margins,
    tell: Tell = lambda line: None,
) -> Comparison:
    """Run every mode in every round and return what came of it.

    A mode that fails is in `failed`. Raises `LocalbatchError` if the reference mode fails.
    """
    tasks = tasks_of(config)
    series = run_rounds(tasks, config.rounds, run, tell)
    if REFERENCE in series.failed:
        raise ConfigError(f"{REFERENCE} can't be run: {series.failed[REFERENCE]}")
    reference = series.runs[REFERENCE]
    modes, found = [], machine()
    for name in (name for name in tasks if name in series.runs):
        report = mode_report(name, series.runs[name], reference)
        base = least_agreement(series.runs[name], reference)[1]
        modes.append(looked_at(report, base, config, look))
    return Comparison(
        model=config.name or config.engine.model, machine=found, rows=len(config.requests),
        rounds=config.rounds, modes=tuple(modes), failed=series.failed,
        notes=(*notes_on(series, config), *reasons(modes, found["cores"])),
    )  # fmt: skip


def tasks_of(config: CompareConfig) -> dict[str, Task]:
    """Return a task for each mode, the reference among them, in the order of `MODES`."""
    rows = tuple(map(comparable, config.requests))
    tasks = {}
    for name, mode in MODES.items():
        if name not in config.modes and name != REFERENCE:
            continue
        task = Task(name, config.engine, rows, config.batch)
        if mode.instances:
            task = shared_out(task, len(rows), config.instances)
        tasks[name] = task
    return tasks


def shared_out(task: Task, num_rows: int, instances: int | None) -> Task:
    """Give a task to several processes that share the cores evenly, so that they don't fight."""
    cores = task.config.threads or usable_threads()
    count = min(instances or min(cores, fitting_instances(task.config)), num_rows)
    engine = replace(task.config, threads=max(1, cores // count))
    return replace(task, config=engine, instances=count)


def fitting_instances(config: EngineConfig) -> int:
    """Return how many models memory has room for, at least 1."""
    if config.backend == "fake":
        return usable_threads()
    size = Path(config.model).stat().st_size * _MODEL_SIZES
    return max(1, int(available_memory() * _MEMORY_SHARE) // size)


def mode_report(name: str, runs: Sequence[Outcome], reference: Sequence[Outcome]) -> ModeReport:
    """Put the rounds of a mode together."""
    walls, reference_walls = [r.wall_s for r in runs], [r.wall_s for r in reference]
    ratios = [slow / fast for slow, fast in zip(reference_walls, walls, strict=True)]
    of_medians = spread(reference_walls).median / spread(walls).median
    found = least_agreement(runs, reference)[0]
    by_time = sorted(runs, key=lambda r: r.wall_s)
    return ModeReport(
        mode=name, about=MODES[name].about, rounds=tuple(map(figures, runs)),
        sample=by_time[(len(runs) - 1) // 2],
        speedup=Spread(of_medians, min(ratios), max(ratios)),
        efficiency=of_medians / min(runs[0].width, max(1, len(runs[0].tokens))),
        agreement=found,
    )  # fmt: skip


def least_agreement(
    runs: Sequence[Outcome], reference: Sequence[Outcome]
) -> tuple[Agreement, Outcome]:
    """Return the agreement of the round that has least of it, and the reference's run there."""
    pairs = zip(reference, runs, strict=True)
    found = [(agreement(base.tokens, run.tokens), base) for base, run in pairs]
    return min(found, key=lambda one: one[0].identical)


def looked_at(
    report: ModeReport, base: Outcome, config: CompareConfig, look: Margins
) -> ModeReport:
    """Look at how close the first tokens were that differ from a run, for some rows."""
    forks = forks_of(report.agreement, base.tokens, _MOST_MARGINS)
    if not forks:
        return report
    rows = {fork.row for fork in forks}
    requests = tuple(request for request in config.requests if request.index in rows)
    try:
        values = look(MarginTask(config.engine, requests, tuple(forks)))
    except LocalbatchError:  # the comparison is worth having without
        return report
    known = dict(zip(forks, values, strict=True))
    return replace(report, agreement=with_margins(report.agreement, base.tokens, known))


def notes_on(series: Series, config: CompareConfig) -> list[str]:
    """Return what a reader of the figures must know."""
    notes = []
    found = {run.numerics for runs in series.runs.values() for run in runs}
    if Numerics.VARIES in found:
        notes.append("with these settings a row's last bits depend on the rows beside it")
    if Numerics.SAME_IN_ANY_BATCH in found:
        notes.append(PADDED)
    if config.engine.kv_layout is KVLayout.UNIFIED:
        notes.append("one pool of KV cells for all rows (unified)")
    multi = series.runs.get("multi-instance")
    if multi and multi[0].processes == 1:
        notes.append("multi-instance ran one process only: cores, rows or memory allow no more")
    equal = len(config.requests) - len({_asked(request) for request in config.requests})
    if equal and "continuous-auto" in series.runs and config.engine.share_prefixes:
        notes.append(f"{equal} rows ask what another one does; continuous-auto computes them once")
    failed = max((len(run.errors) for run in series.runs[REFERENCE]), default=0)
    if failed:
        notes.append(f"{failed} rows can't be run and are left out")
    return notes


def _asked(request: Request) -> str:
    return repr(replace(comparable(request), id=0, index=0, line=None))
