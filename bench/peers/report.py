"""Tables of medians and ratios."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from peers import xllama
from peers.grid import label
from peers.job import Measurement
from peers.rounds import Results

BASELINE = "llama"
OURS = "localbatch"
COLUMNS = (
    "system", "seconds", "output tok/s", f"against `{BASELINE}`", f"`{OURS}` against it",
    "peak MiB", "outside of `llama_decode`", f"same tokens as `{BASELINE}`",
)  # fmt: skip
HEAD = "| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|"


def document(
    machine: str, versions: dict[str, str], parameters: str, all_results: Sequence[Results]
) -> str:
    """Return the whole report in Markdown."""
    names = ", ".join(f"{name} {number}" for name, number in versions.items())
    parts = [f"{machine}; {parameters}.\n{names}."]
    parts += [section(results) for results in all_results]
    return "\n\n".join(parts) + "\n"


def section(results: Results) -> str:
    """Return one workload's table, and what belongs to it."""
    out = sum(row.max_tokens for row in results.rows)
    into = sum(results.prompt_tokens or [])
    size = f"{len(results.rows)} rows, {into:,} prompt + {out:,} output tokens."
    notes = "\n".join(f"- {note}" for note in notes_on(results))
    return "\n\n".join(
        part for part in (f"## {results.workload}", size, table(results), notes) if part
    )


def table(results: Results) -> str:
    """Return a line for each system that never failed."""
    runs = results.complete
    return "\n".join([HEAD, *(line(name, results) for name in runs)])


def line(name: str, results: Results) -> str:
    """Return one system's line: medians over the rounds, in brackets the rounds' range."""
    runs, complete = results.complete[name], results.complete
    walls = seconds(runs)
    out = sum(row.max_tokens for row in results.rows)
    median = statistics.median(walls)
    cells = [
        name,
        f"{median:.2f} ({min(walls):.2f} to {max(walls):.2f})",
        f"{out / median:.0f}",
        ratio(complete.get(BASELINE), runs),
        ratio(runs, complete.get(OURS)),
        f"{max(run.peak_mib for run in runs):.0f}",
        outside(runs),
        same(complete.get(BASELINE), runs),
    ]
    return "| " + " | ".join(cells) + " |"


def seconds(runs: Sequence[Measurement]) -> list[float]:
    """Return the wall times."""
    return [run.wall_s for run in runs]


def ratio(slow: Sequence[Measurement] | None, fast: Sequence[Measurement] | None) -> str:
    """Return how many times as fast the second is: of the medians, then the rounds' range."""
    if not slow or not fast:
        return "-"
    of_medians = statistics.median(seconds(slow)) / statistics.median(seconds(fast))
    by_round = [a / b for a, b in zip(seconds(slow), seconds(fast), strict=True)]
    return f"{of_medians:.2f}x ({min(by_round):.2f} to {max(by_round):.2f})"


def outside(runs: Sequence[Measurement]) -> str:
    """Return the median share of the time that was not spent in `llama_decode`."""
    if any("decode_s" not in run.details for run in runs):
        return "-"
    shares = [1 - run.details["decode_s"] / run.wall_s for run in runs]
    return f"{statistics.median(shares) * 100:.1f} %"


def same(baseline: Sequence[Measurement] | None, runs: Sequence[Measurement]) -> str:
    """Return for how many rows the tokens are the baseline's, in the round with the fewest."""
    if not baseline:
        return "-"
    counts = []
    for one, other in zip(baseline, runs, strict=True):
        if one.tokens is None or other.tokens is None:
            return "-"
        pairs = zip(one.tokens, other.tokens, strict=True)
        counts.append(sum(a == b for a, b in pairs))
    return f"{min(counts)} of {len(runs[0].counts)}"


def notes_on(results: Results) -> list[str]:
    """Return settings, plans, what was left out and what failed."""
    notes = [
        f"`{name}`: {', '.join(f'{key}={value}' for key, value in job.settings.items())}"
        for name, job in results.jobs.items()
        if job.settings and job.kind == "localbatch"
    ]
    notes += [
        f"`{name}`: {label(job.settings)}"
        for name, job in results.jobs.items()
        if job.kind in ("server", "xllamacpp") and job.settings
    ]
    notes += [
        f"`{name}` planned: {plan}"
        for name, runs in results.complete.items()
        if (plan := runs[0].details.get("plan"))
    ]
    notes += [
        f"llama-server, tried once: {label(settings)}: "
        + ("failed" if taken is None else f"{taken:.2f} s")
        for settings, taken in results.trials
    ]
    notes += [xllama.NOTE] if "xllamacpp" in results.complete else []
    notes += [f"`{name}` left out: {reason}" for name, reason in results.left_out.items()]
    return notes + [f"`{name}` FAILED: {reason}" for name, reason in results.failed.items()]
