"""Which rows of a step share a `llama_decode` call, and how they fill its batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from localbatch.data.config import MAX_SLOTS
from localbatch.engine.backend import ContextConfig
from localbatch.engine.binding import Context
from localbatch.scheduler.plan import PlanRow

_WASTE, _FULL_WASTE = 0.05, 0.25
"""Most share of a call's tokens that may be there only to make its prompts equally long, and where
calls should be full: what sharing them saves is about a sixth on a CPU, and much more on a GPU."""


def calls(
    rows: Sequence[PlanRow], config: ContextConfig, n_batch: int
) -> Iterator[Sequence[PlanRow]]:
    """Split a step's rows into calls of `n_batch` tokens at most.

    In streams a batch should hold one kind of row: llama.cpp computes sequences together only for
    as many tokens as each of them has, and only while their ids ascend by one (`split_equal` in
    src/llama-batch.cpp). So prompt chunks go alone, or with others that `fill_chunks` makes as
    long, and decode rows go together. On a CPU only first chunks share calls: those that attend to
    earlier cells take longer together. In the unified layout all rows share a pass.
    """
    streams = config.pool_cells is None
    if streams and config.pass_tokens:
        sharing: list[PlanRow] = []
        others: list[PlanRow] = []
        for row in rows:
            shares = row.is_prefill and (config.full_passes or row.start == 0)
            (sharing if shares else others).append(row)
        waste = _FULL_WASTE if config.full_passes else _WASTE
        yield from _groups(sharing, config.pass_tokens, waste)
        rows = others
    call: list[PlanRow] = []
    size = 0
    for row in rows:
        length = row.end - row.start
        if call and ((streams and row.is_prefill) or size + length > n_batch):
            yield call
            call, size = [], 0
        call.append(row)
        size += length
    if call:
        yield call


def _groups(
    rows: Sequence[PlanRow], pass_tokens: int, most_waste: float
) -> Iterator[list[PlanRow]]:
    """Put chunks in slots side by side with the same start and about the same length together."""
    group: list[PlanRow] = []
    longest = tokens = 0
    for row in sorted(rows, key=lambda row: row.slot):
        length = row.end - row.start
        size = (len(group) + 1) * max(longest, length)
        fits = size <= pass_tokens and size * (1 - most_waste) <= tokens + length
        beside = group and row.slot == group[-1].slot + 1 and row.start == group[0].start
        if group and not (fits and beside):
            yield group
            group, longest, tokens = [], 0, 0
        group.append(row)
        longest, tokens = max(longest, length), tokens + length
    if group:
        yield group


def fill_decode(context: Context, rows: Sequence[PlanRow]) -> int:
    """Put one token of each row into the batch, by ascending slot as the plan has them."""
    n = len(rows)
    context.tokens[:n] = [row.sequence.tokens[row.start] for row in rows]
    context.positions[:n] = [row.start for row in rows]
    context.set_slots(0, n, np.array([row.slot for row in rows]))
    context.wants[:n] = 1
    return n


def fill_chunks(context: Context, rows: Sequence[PlanRow], *, equal: bool = False) -> int:
    """Put the rows' tokens into the batch; only the last token of a row may give logits.

    With `equal`, tokens that mean nothing follow the shorter rows. Nothing before them sees them;
    `drop_surplus` takes them out of the cache.
    """
    at = 0
    longest = max(row.end - row.start for row in rows)
    for row in rows:
        if row.start == 0:
            context.remove(row.slot)
        length = row.end - row.start
        end = at + (longest if equal else length)
        context.tokens[at : at + length] = row.tokens
        context.tokens[at + length : end] = 0
        context.positions[at:end] = np.arange(row.start, row.start + end - at)
        context.set_slots(at, end, row.slot)
        context.wants[at:end] = 0
        context.wants[at + length - 1] = row.wants_logits
        at = end
    return at


def drop_surplus(context: Context, rows: Sequence[PlanRow]) -> None:
    """Free the cells of the tokens that made rows of a call equally long."""
    longest = max(row.end - row.start for row in rows)
    for row in rows:
        if row.end - row.start < longest:
            context.remove(row.slot, row.end)


def steady(num_rows: int) -> int:
    """Return a batch size that changes seldom while rows come and go.

    A GPU repeats a recorded graph of computations only while all sizes stay the same (`CUDA graphs`
    in ggml's src/ggml-cuda/ggml-cuda.cu).
    """
    step = 8 if num_rows <= 64 else 16
    return num_rows if num_rows <= 8 else min(-(-num_rows // step) * step, MAX_SLOTS)


def fill_padding(context: Context, used: int, size: int) -> int:
    """Fill the batch up to `size` with rows whose results nobody reads, in the free slots above."""
    for slot in range(used, size):
        context.remove(slot)
    context.tokens[used:size] = 0
    context.positions[used:size] = 0
    context.set_slots(used, size, np.arange(used, size))
    context.wants[used:size] = 1  # the output layer, too, must see the padded size
    return size
