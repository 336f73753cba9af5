"""A disk that is full at any moment: it is said, nothing is lost, the rerun completes.

The limit on the size of files makes the write that crosses it a short one and the next one fail, as
a full disk does, at any byte wanted.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("resource")
import resource

pytestmark = pytest.mark.timeout(120)

ROWS = 300


def run(source: Path, output: Path, limit: int | None = None) -> subprocess.CompletedProcess[str]:
    """Run the job, with the largest file that may be written, in bytes."""

    def prepare() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    return subprocess.run(
        [sys.executable, "-m", "localbatch", "run", "fake", str(source), "-o", str(output),
         "--backend", "fake", "--ignore-eos", "--max-tokens", "3", "-q"],
        capture_output=True, text=True, preexec_fn=prepare, check=False,
    )  # fmt: skip


def texts(output: Path) -> list[tuple[object, object]]:
    rows = [json.loads(line) for line in output.read_text().split("\n")[:-1]]
    return [(row["id"], row["text"]) for row in rows]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"row {i}"}) + "\n" for i in range(ROWS)))
    return path


@pytest.mark.parametrize("limit", [0, 100, 5_000, 20_000, 50_000, 70_000, 90_000])
def test_a_full_disk_loses_nothing(tmp_path: Path, source: Path, limit: int) -> None:
    """One line says what could not be written; the same command completes after making room."""
    whole = tmp_path / "whole.jsonl"
    assert run(source, whole).returncode == 0
    output = tmp_path / "out.jsonl"

    cut_short = run(source, output, limit)

    assert cut_short.returncode in (1, 2)
    (line,) = cut_short.stderr.strip().split("\n")
    assert line.startswith("Error: ")
    assert "out.jsonl" in line
    assert any(words in line for words in ("failed", "can't be"))
    again = run(source, output)
    assert (again.returncode, again.stderr) == (0, "")
    assert texts(output) == texts(whole)
    assert sorted(p.name for p in tmp_path.glob("out*")) == ["out.jsonl", "out.jsonl.journal"]
