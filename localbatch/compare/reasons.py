"""Why a mode was not as fast as one would expect, from what was measured of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from localbatch.compare.figures import decode_calls
from localbatch.compare.report import ModeReport

_ORDER = (
    ("multi-instance", "sequential"), ("static", "sequential"), ("static", "multi-instance"),
    ("static-sorted", "sequential"), ("continuous", "sequential"), ("continuous", "static"),
    ("continuous", "multi-instance"), ("continuous-auto", "sequential"),
    ("continuous-auto", "continuous"),
)  # fmt: skip
"""Modes, and those that they should not be slower than."""

_ONE_BY_ONE = {"sequential", "multi-instance"}
"""Modes that compute one row at a time."""

_SLOWER = 1.05
"""Times this, a mode counts as slower: less may be noise."""

_MOSTLY = 0.5
_FEW_ROWS = 2
"""A batch of no more than so many rows gains little."""

_FEWER_CORES = 0.8


def reasons(modes: Sequence[ModeReport], cores: int) -> list[str]:
    """Return a line for each mode that is slower than expected, with what speaks for a cause."""
    found = {mode.mode: mode for mode in modes}
    lines = []
    for name, base in _ORDER:
        if name in found and base in found:
            mode, other = found[name], found[base]
            ratio = mode.median("wall_s") / other.median("wall_s")
            if ratio > _SLOWER:
                lines.append(
                    f"{name} took {ratio:.2f} times as long as {base}: {_why(mode, other, cores)}"
                )
    return lines


def _why(mode: ModeReport, other: ModeReport, cores: int) -> str:
    """Return the likeliest cause; the first that fits is the one that explains most.

    Loading and set-up are no causes: they come before the clock starts.
    """
    return (
        _chance(mode, other)
        or _crowded(mode, other, cores)
        or _uneven(mode, other)
        or _fewer_cores(mode, other)
        or _prompts(mode, other)
        or _few_rows(mode, other)
        or _empty_places(mode, other)
        or _grown(mode, other)
    )


def _chance(mode: ModeReport, other: ModeReport) -> str:
    mine, theirs = mode.of("wall_s"), other.of("wall_s")
    if mine is None or theirs is None or len(mode.rounds) < 2:
        return ""
    if mine.low > theirs.high or theirs.low > mine.high:
        return ""
    return (
        f"their ranges overlap ({mine.low:.2f}-{mine.high:.2f} and "
        f"{theirs.low:.2f}-{theirs.high:.2f} s), so this may be chance"
    )


def _crowded(mode: ModeReport, other: ModeReport, cores: int) -> str:
    count = mode.sample.processes
    if not _on_cpu(mode) or not count > cores >= other.sample.processes:
        return ""
    return f"its {count} processes share {cores} cores, so they wait for each other's turns"


def _uneven(mode: ModeReport, other: ModeReport) -> str:
    """Lanes or processes that end early leave the others alone."""
    sample = mode.sample
    ends = [0.0] * sample.lanes
    for step in sample.steps:
        ends[step.lane] = max(ends[step.lane], step.end_s)
    even = sum(ends) / len(ends)
    if len(ends) == 1 or not 0 < even <= other.sample.wall_s * _SLOWER:
        return ""
    what = "processes" if sample.processes > 1 else "lanes"
    return (
        f"the first of its {len(ends)} {what} was done after {min(ends):.2f} s and the last after "
        f"{max(ends):.2f} s; with an even share each would need about {even:.2f} s"
    )


def _fewer_cores(mode: ModeReport, other: ModeReport) -> str:
    """Whether it would not be slower with as many cores busy; on a GPU they tell nothing."""
    busy, as_busy = mode.median("cpu_cores"), other.median("cpu_cores")
    if not _on_cpu(mode) or busy >= as_busy * _FEWER_CORES:
        return ""
    if mode.median("wall_s") * busy > other.median("wall_s") * as_busy * _SLOWER:
        return ""
    mine, theirs = mode.sample.threads, other.sample.threads
    told = f"it had {busy:.2f} cores and {other.mode} {as_busy:.2f}"
    if mine < theirs:
        return f"{told}, as it has {mine} of {theirs} threads"
    return f"{told}, with as many threads; other programs may have used the machine"


def _prompts(mode: ModeReport, other: ModeReport) -> str:
    share = prompt_share(mode)
    if share <= _MOSTLY or parts_of(mode).prompts > parts_of(other).prompts * _SLOWER:
        return ""
    rows = mode.median("rows") or 1
    prompt, output = mode.median("prompt_tokens") / rows, mode.median("output_tokens") / rows
    return (
        f"{share:.0%} of its computing went into prompts, which are computed many tokens at a time "
        f"in every mode: a row has {prompt:,.0f} tokens of prompt and {output:,.0f} of answer"
    )


def _few_rows(mode: ModeReport, other: ModeReport) -> str:
    """Whether too little was computed together, if it is the answers that took longer."""
    most = _fullest(mode)
    if mode.mode in _ONE_BY_ONE or not 0 < most <= _FEW_ROWS:
        return ""
    if most_grown(mode, other) != "answers":
        return ""
    if other.mode not in _ONE_BY_ONE and most >= _fullest(other):
        return ""
    rows = "one row" if most == 1 else f"{most} rows"
    return f"no computation had more than {rows}, and a batch gains by computing many together"


def _empty_places(mode: ModeReport, other: ModeReport) -> str:
    share, rows = mode.median("occupancy"), mode.median("rows_per_call")
    fuller = other.mode in _ONE_BY_ONE or share < other.median("occupancy")
    if share >= _MOSTLY or not fuller or most_grown(mode, other) != "answers":
        return ""
    return (
        f"only {share:.0%} of its places had a row, {rows:.1f} of {mode.sample.batch_rows} in a "
        "computation"
    )


def _grown(mode: ModeReport, other: ModeReport) -> str:
    """Say which part of the time there is more of."""
    mine, theirs, most = parts_of(mode), parts_of(other), most_grown(mode, other)
    if most == "answers":
        return (
            f"{_step(mode)}, {_step(other)}: {token_ms(mode):.1f} and {token_ms(other):.1f} ms for "
            "each row's token"
        )
    if most == "prompts":
        return (
            f"prompts took {mine.prompts:.2f} s{_beside(mode)}, and {theirs.prompts:.2f} s in "
            f"{other.mode}{_beside(other)}"
        )
    return (
        f"{mine.between:.2f} s of its time lie between computations, and {theirs.between:.2f} s of "
        f"{other.mode}'s: choosing tokens, planning and waiting"
    )


def _on_cpu(mode: ModeReport) -> bool:
    return mode.sample.placement == "CPU"


def _fullest(mode: ModeReport) -> int:
    """Return the most rows that a computation gave a token."""
    return max(decode_calls(mode.sample.steps), default=0)


def _step(mode: ModeReport) -> str:
    """Say what a computation of a mode took, and how many there were at one time."""
    rows = mode.median("rows_per_call")
    return f"{mode.mode} needs {step_ms(mode):.1f} ms for {rows:.1f} rows{_beside(mode)}"


def _beside(mode: ModeReport) -> str:
    count = mode.sample.lanes
    return f" in each of {count} that run side by side" if count > 1 else ""


class Parts(NamedTuple):
    """Where the time went, in seconds, on average over lanes and processes."""

    prompts: float
    """Computations of prompts only."""
    answers: float
    """Computations that gave running rows a token."""
    between: float


def parts_of(mode: ModeReport) -> Parts:
    """Return the parts of the wall time of the round that is shown."""
    taken = [(step.end_s - step.start_s, step.num_decoded) for step in mode.sample.steps]
    prompts = sum(s for s, decoded in taken if not decoded) / mode.sample.lanes
    answers = sum(s for s, decoded in taken if decoded) / mode.sample.lanes
    return Parts(prompts, answers, mode.sample.wall_s - prompts - answers)


def most_grown(mode: ModeReport, other: ModeReport) -> str:
    """Return the name of the part that took most longer than the other's."""
    mine, theirs = parts_of(mode)._asdict(), parts_of(other)._asdict()
    return max(mine, key=lambda name: float(mine[name] - theirs[name]))


def prompt_share(mode: ModeReport) -> float:
    """Return the share of the computing time that only prompts took."""
    found = parts_of(mode)
    return found.prompts / ((found.prompts + found.answers) or 1)


def step_ms(mode: ModeReport) -> float:
    """Return the mean time of the computations that gave running rows a token, in ms."""
    taken = [step.end_s - step.start_s for step in mode.sample.steps if step.num_decoded]
    return sum(taken) / len(taken) * 1000 if taken else 0.0


def token_ms(mode: ModeReport) -> float:
    """Return `step_ms` for each row of a computation, and of those beside it."""
    return step_ms(mode) / (mode.median("rows_per_call") * mode.sample.lanes or 1)
