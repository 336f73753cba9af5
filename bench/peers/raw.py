"""What llama.cpp itself takes for the rows, in one context: nothing is sampled or scheduled.

Prompts are computed one by one, then all rows are decoded together with one token fed back again
and again. Rows are taken longest answer first, so that a row that ends leaves no gap and batches
stay full for as long as can be: a limit for the order as well. Prompts that begin alike are
computed in full, so a system that shares beginnings can be faster than this.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from llama_cpp import llama_cpp as lib

from peers.job import WARM_UP, BenchError, Job, Measurement, Row, cells_of, round_up
from peers.memory import PeakMemory
from peers.tokens import tokenize

_TOGETHER = 64
_CHUNK = 512
_FED_BACK = 0


class Context:
    """A model and a context with cells of its own for each sequence, flash attention off."""

    def __init__(self, model: str, sequences: int, cells: int, threads: int) -> None:
        lib.llama_backend_init()
        self._silent = lib.llama_log_callback(lambda _level, _text, _data: None)
        lib.llama_log_set(self._silent, None)
        handle = lib.llama_model_load_from_file(model.encode(), lib.llama_model_default_params())
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max = cells * sequences, sequences
        params.n_batch = params.n_ubatch = _CHUNK
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = False
        params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._handle = lib.llama_init_from_model(handle, params) if handle else None
        if not self._handle:
            raise BenchError(f"llama.cpp makes no context of {sequences} times {cells} cells")
        self._batch: Any = lib.llama_batch_init(_CHUNK, 0, 1)

    def clear(self) -> None:
        """Free all cells."""
        lib.llama_memory_clear(lib.llama_get_memory(self._handle), False)

    def decode(self, entries: Sequence[tuple[int, int, int]], *, last_only: bool = False) -> None:
        """Compute (token, position, sequence) entries; logits for all of them or the last."""
        batch = self._batch
        batch.n_tokens = len(entries)
        for i, (token, position, sequence) in enumerate(entries):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = not last_only or i == len(entries) - 1
        code = lib.llama_decode(self._handle, batch)
        if code != 0:
            raise BenchError(f"llama_decode returned {code}")

    def prefill(self, prompt: Sequence[int], sequence: int) -> None:
        """Compute one prompt."""
        entries = [(token, position, sequence) for position, token in enumerate(prompt)]
        for start in range(0, len(entries), _CHUNK):
            self.decode(entries[start : start + _CHUNK], last_only=True)


def measure(job: Job) -> Measurement:
    """Compute the rows, at most 64 together."""
    rows = job.load()
    *prompts, warm_up = tokenize(job.model, [*(row.prompt for row in rows), WARM_UP])
    cells = round_up(max(cells_of(prompts, rows)))
    context = Context(job.model, min(len(rows), _TOGETHER), cells, job.peer_threads)
    context.prefill(warm_up, 0)
    order = longest_first(rows)
    counts = [0] * len(rows)
    with PeakMemory() as memory:
        started = time.perf_counter()
        for start in range(0, len(order), _TOGETHER):
            compute(context, order[start : start + _TOGETHER], prompts, rows, counts)
        wall = time.perf_counter() - started
    details = {"system_info": lib.llama_print_system_info().decode().strip()}
    return Measurement(wall, [len(p) for p in prompts], counts, memory.peak_mib, None, details)


def compute(
    context: Context,
    order: Sequence[int],
    prompts: Sequence[Sequence[int]],
    rows: Sequence[Row],
    counts: list[int],
) -> None:
    """Compute some rows together, longest answer first, and count the tokens of each."""
    context.clear()
    for sequence, index in enumerate(order):
        context.prefill(prompts[index], sequence)
        counts[index] += 1  # the prompt's last logits give the first token
    running = list(order)
    while True:
        running = [index for index in running if counts[index] < rows[index].max_tokens]
        if not running:
            return
        context.decode(
            [
                (_FED_BACK, len(prompts[index]) + counts[index] - 1, sequence)
                for sequence, index in enumerate(running)
            ]
        )
        for index in running:
            counts[index] += 1


def longest_first(rows: Sequence[Row]) -> list[int]:
    """Return the rows' places, those with most tokens out first."""
    return sorted(range(len(rows)), key=lambda index: -rows[index].max_tokens)
