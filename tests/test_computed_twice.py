"""A SIGKILL costs the rows in flight: those being computed, and the last group of finished ones."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(120)

PARALLEL, ROWS = 4, 120
_JOB = """
import os, sys
from functools import partial
from localbatch.data.config import EngineConfig
from localbatch.data.sampling_params import SamplingParams
from localbatch.engine import llm
from localbatch.jobs.job import JobConfig
from localbatch.jobs.journal import Journal
from localbatch.jobs.run import run_job

llm.EngineConfig = partial(EngineConfig, fake_step_s=0.01)
log, add = os.open(sys.argv[3], os.O_WRONLY | os.O_APPEND | os.O_CREAT), Journal.add

def noted(self, entry):
    os.write(log, b"%d\\n" % entry.completion.index)
    add(self, entry)

Journal.add = noted
params = SamplingParams(max_tokens=5, ignore_eos=True)
engine = {"backend": "fake", "threads": 1, "lanes": 1, "parallel": int(sys.argv[4])}
run_job(JobConfig("fake", sys.argv[1], sys.argv[2], params, quiet=True, engine=engine))
"""


@pytest.mark.parametrize("after_s", [1.1, 1.4, 1.8])
def test_rows_computed_twice_are_those_in_flight(tmp_path: Path, after_s: float) -> None:
    """Each row that came back is written down; after a kill and a rerun few are there twice."""
    source, log = tmp_path / "in.jsonl", tmp_path / "log"
    source.write_text("".join(json.dumps({"prompt": f"row {i}"}) + "\n" for i in range(ROWS)))
    words = [str(source), str(tmp_path / "out.jsonl"), str(log), str(PARALLEL)]
    command = [sys.executable, "-c", _JOB, *words]
    process = subprocess.Popen(command)
    time.sleep(after_s)
    process.kill()
    process.wait()
    before = len(log.read_text().split()) if log.exists() else 0

    subprocess.run(command, check=True)

    counts = Counter(log.read_text().split())
    assert set(counts) == {str(i) for i in range(ROWS)}
    twice = sum(counts.values()) - ROWS
    # A batch's rows end together, and a group of 0.05 s may hold two batches of 5 steps.
    assert twice <= min(before, 3 * PARALLEL)
