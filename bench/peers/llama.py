"""llama-cpp-python's `Llama`, one row after another.

It is not reset between rows: `generate` then keeps the longest common beginning of a row and the
one before it, so prompts that begin alike are already cheaper here. A user has that without asking
for it, so the baseline has it as well.
"""

from __future__ import annotations

import time

from peers.job import WARM_UP, Job, Measurement, cells_of, round_up
from peers.memory import PeakMemory
from peers.tokens import tokenize


def measure(job: Job) -> Measurement:
    """Run the rows through `Llama.generate`, which does not stop at the end of text."""
    from llama_cpp import Llama, llama_cpp

    rows = job.load()
    *prompts, warm_up = tokenize(job.model, [*(row.prompt for row in rows), WARM_UP])
    threads = job.peer_threads
    llama = Llama(
        job.model, n_ctx=round_up(max(cells_of(prompts, rows))), n_threads=threads,
        n_threads_batch=threads, verbose=False,
    )  # fmt: skip
    next(llama.generate(warm_up, temp=0.0))
    answers = []
    with PeakMemory() as memory:
        started = time.perf_counter()
        for prompt, row in zip(prompts, rows, strict=True):
            stream = llama.generate(prompt, temp=0.0)
            answers.append([next(stream) for _ in range(row.max_tokens)])
        wall = time.perf_counter() - started
    return Measurement(
        wall, [len(p) for p in prompts], [len(a) for a in answers], memory.peak_mib, answers,
        {"system_info": llama_cpp.llama_print_system_info().decode().strip()},
    )  # fmt: skip
