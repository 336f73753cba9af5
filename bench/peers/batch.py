"""localbatch through its Python API, with its own choices but for the settings given."""

from __future__ import annotations

import time
from typing import Any

from localbatch import LLM, Request, SamplingParams
from peers.job import WARM_UP, BenchError, Job, Measurement
from peers.memory import PeakMemory


def measure(job: Job) -> Measurement:
    """Run the rows; making the context and tokenizing are in the time."""
    rows = job.load()
    options: dict[str, Any] = {"threads": job.threads} if job.threads else {}
    params = [SamplingParams(max_tokens=row.max_tokens, ignore_eos=True) for row in rows]
    plan_s = prepare(job, options, params)
    with LLM(job.model, **options | job.settings) as llm:
        llm.generate([WARM_UP], SamplingParams(max_tokens=1, ignore_eos=True), raw=True)
        decoded = llm.stats.decode_s
        with PeakMemory() as memory:
            started = time.perf_counter()
            done = llm.generate([row.prompt for row in rows], params, raw=True)
            wall = time.perf_counter() - started
        stats = llm.stats
    failed = [f"{rows[c.index].id}: {c.error}" for c in done if c.error]
    if failed:
        raise BenchError(f"{len(failed)} rows failed; the first is {failed[0]}")
    return Measurement(
        wall, [c.usage.prompt_tokens for c in done], [len(c.token_ids) for c in done],
        memory.peak_mib, [list(c.token_ids) for c in done],
        {
            "plan_s": plan_s,
            "decode_s": stats.decode_s - decoded,
            "stats": {name: value for name, value in vars(stats).items() if name != "plan"},
            "plan": getattr(stats, "plan", None),
        },
    )  # fmt: skip


def prepare(job: Job, options: dict[str, Any], params: list[SamplingParams]) -> float:
    """Let the model be measured for the plan, unless it was before; returns the seconds."""
    with LLM(job.model, **options | job.settings) as llm:
        started = time.perf_counter()
        rows = zip(job.load(), params, strict=True)
        llm.prepare([Request(i, i, prompt=r.prompt, params=p) for i, (r, p) in enumerate(rows)])
        return time.perf_counter() - started
