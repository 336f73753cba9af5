"""Why a mode was not as fast as one would expect, from what was measured of it."""

from __future__ import annotations

from collections.abc import Sequence

from localbatch.compare.report import ModeReport

_ORDER = (
    ("multi-instance", "sequential"), ("static", "sequential"), ("static", "multi-instance"),
    ("continuous", "static"), ("continuous", "multi-instance"), ("continuous-auto", "continuous"),
)  # fmt: skip
"""Modes, and those that they should not be slower than."""

_SLOWER = 1.05
"""Times this, a mode counts as slower: less may be noise."""

_MOSTLY = 0.5


def reasons(modes: Sequence[ModeReport]) -> list[str]:
    """Return a line for each mode that is slower than expected, with what speaks for a cause."""
    found = {mode.mode: mode for mode in modes}
    lines = []
    for name, base in _ORDER:
        if name in found and base in found:
            mode, other = found[name], found[base]
            ratio = mode.median("wall_s") / other.median("wall_s")
            if ratio > _SLOWER:
                lines.append(
                    f"{name} took {ratio:.2f} times as long as {base}: {_why(mode, other)}"
                )
    return lines


def _why(mode: ModeReport, other: ModeReport) -> str:
    """Return the likeliest cause; the first that fits is the one that explains most."""
    low, high = (mode.of("wall_s") or (0, 0, 0))[1:]
    base = other.of("wall_s")
    busy, as_busy = mode.median("cpu_cores"), other.median("cpu_cores")
    if base is not None and low <= base.high and base.low <= high and len(mode.rounds) > 1:
        return "their ranges overlap, so this may be chance"
    if busy < as_busy * 0.8:
        return (
            f"it had {busy:.2f} cores and {other.mode} {as_busy:.2f}; other programs may have "
            "used the machine, or fewer threads fit it"
        )
    if prompt_share(mode) > _MOSTLY:
        return (
            f"{prompt_share(mode):.0%} of its computing went into prompts, which are computed many "
            "tokens at a time in every mode"
        )
    if mode.median("occupancy") < _MOSTLY:
        return f"only {mode.median('occupancy'):.0%} of its places had a row"
    return f"{_step(mode)}, {_step(other)}"


def _step(mode: ModeReport) -> str:
    """Say what a computation of a mode took, and how many there were at one time."""
    rows, count = mode.median("rows_per_call"), mode.sample.lanes
    beside = f" in each of {count} that run side by side" if count > 1 else ""
    return f"{mode.mode} needs {step_ms(mode):.1f} ms for {rows:.1f} rows{beside}"


def prompt_share(mode: ModeReport) -> float:
    """Return the share of the computing time that only prompts took."""
    seconds = [(s.end_s - s.start_s, s.num_decoded == 0) for s in mode.sample.steps]
    return sum(s for s, alone in seconds if alone) / (sum(s for s, _ in seconds) or 1)


def step_ms(mode: ModeReport) -> float:
    """Return the mean time of the computations that gave running rows a token, in ms."""
    taken = [step.end_s - step.start_s for step in mode.sample.steps if step.num_decoded]
    return sum(taken) / len(taken) * 1000 if taken else 0.0
