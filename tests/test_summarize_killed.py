"""SIGKILL at any moment of `summarize`: the folder in the end is that of an undisturbed run."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import random
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(600)

KILLS = 20
_JOB = """
import sys, time
from localbatch import SummaryConfig, SummaryOptions, summarize

slow_s = float(sys.argv[4])
config = SummaryConfig(
    sys.argv[1], [sys.argv[2]], sys.argv[3], SummaryOptions(length=8), chunk_tokens=400,
    with_sources=True, engine={"threads": 1, "lanes": 1, "parallel": 8},
)
result = summarize(config, lambda counts, done: time.sleep(slow_s))
assert result.error is None, result.error
print(result.counts.finished_nodes, result.counts.resumed_nodes)
"""
THINGS = ["river", "stone", "bridge", "winter", "market", "letter"]


def document(seed: int) -> str:
    chance = random.Random(seed)
    return "".join(
        f"Item {i} is the {chance.choice(THINGS)}.{' ' if i % 4 else chr(10) * 2}"
        for i in range(chance.choice([2, 30, 120, 300]))
    )


def command(model: Path, source: Path, output: Path, slow_s: float) -> list[str]:
    return [sys.executable, "-c", _JOB, str(model), str(source), str(output), str(slow_s)]


def kept(output: Path) -> dict[int, str]:
    """Return the journal's records by number; their times tell one computation from another."""
    with contextlib.suppress(sqlite3.Error):
        uri = f"{(output / 'index.journal').absolute().as_uri()}?mode=ro"
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as connection:
            return dict(connection.execute("SELECT number, record FROM rows"))
    return {}


def files(output: Path) -> dict[str, object]:
    """Return all files but the journal's: the summaries as they are, the indexes without times."""
    found: dict[str, object] = {}
    for path in output.rglob("*"):
        name = path.relative_to(output).as_posix()
        if path.is_file() and not name.startswith("index.journal"):
            found[name] = path.read_bytes()
    rows = [json.loads(line) for line in bytes(found["index.jsonl"]).splitlines()]  # type: ignore[arg-type]
    table = list(csv.DictReader(io.StringIO(bytes(found["index.csv"]).decode(), newline="")))  # type: ignore[arg-type]
    for row in (*rows, *table):
        del row["seconds"]
    return found | {"index.jsonl": rows, "index.csv": table}


def wait_for_a_moment(
    process: subprocess.Popen[bytes], output: Path, chance: random.Random
) -> None:
    """Wait for some time, or until some more rows are finished and a moment has passed."""
    until = time.monotonic() + (chance.uniform(0, 3) if chance.random() < 0.4 else 30)
    rows = len(kept(output)) + chance.randint(1, 12)
    while process.poll() is None and time.monotonic() < until and len(kept(output)) < rows:
        time.sleep(0.01)
    time.sleep(chance.uniform(0, 0.1))


def test_killed_at_twenty_moments(tiny_model: Path, tmp_path: Path) -> None:
    """All files are those of an undisturbed run, and no finished chunk is computed again."""
    source, calm, killed = tmp_path / "in", tmp_path / "calm", tmp_path / "killed"
    for number in range(12):
        path = source / ("sub" if number % 2 else "") / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(document(number))
    (source / "empty.txt").touch()
    subprocess.run(command(tiny_model, source, calm, 0), check=True, stdout=subprocess.DEVNULL)
    total = len(kept(calm))
    assert total > 100
    chance, finished, seen = random.Random(20), {}, []

    for _ in range(KILLS):
        process = subprocess.Popen(
            command(tiny_model, source, killed, 0.02), stdout=subprocess.DEVNULL
        )
        wait_for_a_moment(process, killed, chance)
        process.kill()
        process.wait()
        now = kept(killed)
        assert finished.items() <= now.items()
        finished = now
        seen.append(len(now))

    last = subprocess.run(command(tiny_model, source, killed, 0), check=True, capture_output=True)
    done, resumed = map(int, last.stdout.split())
    assert len(set(seen)) > KILLS // 3, seen
    assert (done, resumed) == (total, len(finished))
    assert finished.items() <= kept(killed).items()
    assert files(killed) == files(calm)
