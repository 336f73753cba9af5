"""How large a context the rows want and the memory allows."""

from __future__ import annotations

from localbatch.data.config import CELL_STEP, MAX_SLOTS, EngineConfig, FlashAttention, KVLayout
from localbatch.data.errors import ConfigError
from localbatch.engine.backend import ContextConfig, ModelCard
from localbatch.engine.machine import available_memory, usable_threads

PREFIX_SLOTS = 4
"""Slots of a lane for prefixes that rows share."""

CPU_SLOTS, GPU_SLOTS = 64, 512
"""Rows in the batch unless told otherwise."""

BLOCK = 512
"""Prompt tokens that `llama_cpp.Llama` computes at one time. Prompts are cut at its multiples, so
that a rest of few tokens has the bits that it has there."""

_CPU_CHUNK = 128
"""A core's caches hold what it takes to compute so many tokens."""

GPU_PASS, CPU_PASS = 2048, 256
"""Prompt tokens, of several rows, in a pass."""

_PASS_BYTES = 32_000
"""Further bytes of a token in a pass on a GPU: TinyLlama's take 24,000."""

_SHARE = 0.8
"""Share of the available memory that the KV cache may take by itself."""

_MIB = 1 << 20


def wanted_slots(config: EngineConfig, num_rows: int, *, on_gpu: bool) -> int:
    """Return how many rows should run at one time, memory aside."""
    most = config.parallel or (GPU_SLOTS if on_gpu else CPU_SLOTS)
    if config.kv_layout is KVLayout.UNIFIED:
        most = min(most, MAX_SLOTS)  # one context holds them all
    return max(1, min(most, num_rows))


def context_bytes(card: ModelCard, context: ContextConfig) -> int:
    """Return the bytes of a context's KV cache."""
    return context.num_cells * card.kv_bytes_per_cell


def chunk_of(config: EngineConfig, *, on_gpu: bool) -> int:
    """Return the most prompt tokens of one pass."""
    streams = config.kv_layout is KVLayout.STREAMS
    return config.ubatch or (_CPU_CHUNK if streams and not on_gpu else BLOCK)


def block_of(chunk: int) -> int:
    """Return the tokens after which prompts are cut in any case."""
    return max(chunk, BLOCK)


def kv_budget(memory: int) -> int:
    """Return the bytes that KV caches may take of what is available."""
    return int(memory * _SHARE)


def kv_bytes(card: ModelCard, num_slots: int, row_cells: int) -> int:
    """Return the bytes of a KV cache with room for `num_slots` full rows."""
    return num_slots * row_cells * card.kv_bytes_per_cell


def pass_bytes(card: ModelCard) -> int:
    """Return about what a lane's buffers take on a GPU: logits for each token of a pass, and more.

    llama.cpp reserves room for logits of every token, wanted or not.
    """
    return GPU_PASS * (card.num_vocab * 4 + _PASS_BYTES)


def fit_context(
    config: EngineConfig,
    card: ModelCard,
    num_slots: int,
    cells: int,
    on_gpu: bool,
    memory: int | None = None,
    lanes: int = 1,
    num_prefix_slots: int = 0,
) -> ContextConfig:
    """Return the context of each of `lanes` that share `num_slots` rows of up to `cells` tokens.

    With `parallel` left out, fewer rows run at one time if memory is short. `memory` is what may be
    taken, in bytes; left out: what the machine has. Raises `ConfigError` if not even that fits.
    """
    row_cells, pool = _rounded(cells), None
    memory = available_memory() if memory is None else memory
    if on_gpu:
        memory = max(0, memory - lanes * pass_bytes(card))
    budget, fitting = kv_budget(memory), None
    if config.kv_cells is not None:  # the pool is as large as it was asked for, whatever the rows
        pool = _rounded(config.kv_cells)
        if kv_bytes(card, 1, pool) > budget:
            raise ConfigError(_pool_too_large(card, pool, budget))
    else:
        fitting = budget // max(1, kv_bytes(card, 1, row_cells))
        if fitting < num_slots and (config.parallel is not None or fitting < 1):
            raise ConfigError(_too_large(card, num_slots, row_cells, budget, fitting))
        num_slots = min(num_slots, fitting)
    each = -(-num_slots // lanes)
    if fitting is not None and each * lanes > fitting:
        each = max(1, fitting // lanes)
    if fitting is not None and (each + num_prefix_slots) * lanes > fitting:
        num_prefix_slots = 0
    if config.kv_layout is KVLayout.UNIFIED:
        pool = pool or num_slots * row_cells
    if pool is not None:
        row_cells = min(row_cells, pool)
    flash = config.flash_attention
    return ContextConfig(
        num_slots=each,
        row_cells=row_cells,
        pool_cells=pool,
        chunk=chunk_of(config, on_gpu=on_gpu),
        threads=max(1, (config.threads or usable_threads()) // lanes),
        flash_attention=flash is FlashAttention.ON or (flash is FlashAttention.AUTO and on_gpu),
        num_prefix_slots=num_prefix_slots,
        pass_tokens=(GPU_PASS if on_gpu else config.ubatch or CPU_PASS) if pool is None else None,
        full_passes=on_gpu and pool is None,
    )


def _rounded(cells: int) -> int:
    return -(-cells // CELL_STEP) * CELL_STEP


def _pool_too_large(card: ModelCard, pool: int, budget: int) -> str:
    fitting = budget // kv_bytes(card, 1, CELL_STEP) * CELL_STEP
    advice = f"--kv-cells {fitting}" if fitting else "a smaller model"
    return (
        f"the KV cache would take {pool} tokens = {kv_bytes(card, 1, pool) / _MIB:,.0f} MiB, "
        f"but only {budget / _MIB:,.0f} MiB may be used; try {advice}"
    )


def _too_large(card: ModelCard, slots: int, cells: int, budget: int, fitting: int) -> str:
    each = kv_bytes(card, 1, cells) / _MIB
    advice = f"--parallel {fitting}" if fitting else "a smaller --ctx or --max-tokens"
    return (
        f"the KV cache would take {slots} rows x {cells} tokens = {slots * each:,.0f} MiB, "
        f"but only {budget / _MIB:,.0f} MiB may be used; try {advice}"
    )
