"""Finds out, on this machine and for this model, what keeps a row's bits its own.

llama.cpp picks its matrix kernels by the number of rows: one row may go another way than two
(llamafile's sgemm), the last `rows % 4` of a repacked matrix another way than the rest, and eight
rows or more another way again (its tiled integer kernels). Which of these apply depends on the
processor and the weight types. Each sums in another order, so a row's logits may change in the last
bits with the number of rows beside it. On some machines none does (AMX, or weights that only
have one kernel); on the others decode batches of a multiple of 4, at least 8, are all alike. Prompt
chunks are cut at fixed places, and computed alone unless the first is the case.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from localbatch.data.errors import EngineError
from localbatch.engine import binding, library
from localbatch.engine.backend import Numerics
from localbatch.engine.cache import FactCache, fact_key

_STEP, _LEAST = 4, 8
_PROMPT = 5
_SIZES_ALIKE = (1, 9, 16)  # alone; over both thresholds with a remainder; and without one
_PADDED_ALIKE = (8, 12, 16)
_CUT_PROMPT, _CUTS = 47, (8, 20, 36)  # a remainder to 4 at the end; pieces from 8 to 39 tokens
_GROUPS = ((21, 20, 18), (2, 1))  # other remainders together than alone


def padded(rows: int) -> int:
    """Return the number of rows of a padded decode batch."""
    return max(_LEAST, -(-rows // _STEP) * _STEP)


def cuts_alike_of(model: binding.Model, path: str, threads: int) -> bool:
    """Return what `cuts_alike` finds, or found in an earlier run on this machine."""
    return _found("cuts 1", cuts_alike, model, path, threads)


def _found(
    name: str,
    probe: Callable[[binding.Model, int], bool],
    model: binding.Model,
    path: str,
    threads: int,
) -> bool:
    """Return what a probe finds, or found in an earlier run on this machine."""
    cache = FactCache()
    key = fact_key(name, path, threads, library.check_binding(), library.system_info())
    known = cache.get(key)
    if known not in ("alike", "differ"):
        known = "alike" if probe(model, threads) else "differ"
        cache.put(key, known)
    return known == "alike"


def cuts_alike(model: binding.Model, threads: int) -> bool:
    """Compute a prompt whole and in two pieces, as rows with a shared prefix do; compare bits.

    Shared prefixes end at multiples of 4 and leave at least 8 tokens on both sides
    (`scheduler/prefixes.py`).
    """
    shape = binding.ContextShape(
        n_seq_max=1, n_ctx=256, n_batch=_CUT_PROMPT, n_ubatch=_CUT_PROMPT, threads=threads,
        unified=False, flash_attention=False,
    )  # fmt: skip
    context = binding.Context(model, shape)
    try:
        whole = _prompt_logits(context, (_CUT_PROMPT,))
        return all(
            np.array_equal(_prompt_logits(context, (cut, _CUT_PROMPT)), whole) for cut in _CUTS
        )
    finally:
        context.close()


def groups_alike_of(model: binding.Model, path: str, threads: int) -> bool:
    """Return what `groups_alike` finds, or found in an earlier run on this machine."""
    return _found("groups 1", groups_alike, model, path, threads)


def groups_alike(model: binding.Model, threads: int) -> bool:
    """Compute prompts alone and together, filled up to the same length; compare bits."""
    most = max(len(lengths) * max(lengths) for lengths in _GROUPS)
    shape = binding.ContextShape(
        n_seq_max=max(map(len, _GROUPS)), n_ctx=256 * max(map(len, _GROUPS)), n_batch=most,
        n_ubatch=most, threads=threads, unified=False, flash_attention=False,
    )  # fmt: skip
    context = binding.Context(model, shape)
    try:
        return all(
            np.array_equal(_group_logits(context, lengths)[i], _prompt_logits(context, (length,)))
            for lengths in _GROUPS
            for i, length in enumerate(lengths)
        )
    finally:
        context.close()


def _group_logits(context: binding.Context, lengths: tuple[int, ...]) -> npt.NDArray[np.uint32]:
    """Return the bits of prompts' logits, a row for each, computed in one call."""
    size = max(lengths)
    for slot, length in enumerate(lengths):
        context.remove(slot)
        at = slot * size
        context.tokens[at : at + size] = np.arange(size) % context.num_vocab
        context.positions[at : at + size] = np.arange(size)
        context.set_slots(at, at + size, slot)
        context.wants[at : at + size] = 0
        context.wants[at + length - 1] = 1
    _checked(context.decode(size * len(lengths)))
    bits: npt.NDArray[np.uint32] = context.logits(len(lengths)).view(np.uint32).copy()
    return bits


def _prompt_logits(context: binding.Context, ends: tuple[int, ...]) -> npt.NDArray[np.uint32]:
    """Return the bits of a prompt's logits, computed in pieces with these ends."""
    context.remove(0)
    for start, end in itertools.pairwise((0, *ends)):
        size = end - start
        context.tokens[:size] = np.arange(start, end) % context.num_vocab
        context.positions[:size] = np.arange(start, end)
        context.set_slots(0, size, 0)
        context.wants[:size] = 0
        context.wants[size - 1] = 1
        _checked(context.decode(size))
    bits: npt.NDArray[np.uint32] = context.logits(1)[0].view(np.uint32).copy()
    return bits


def numerics_of(model: binding.Model, path: str, threads: int) -> Numerics:
    """Return what `probe` finds, or found in an earlier run on this machine."""
    cache = FactCache()
    key = fact_key("numerics 1", path, threads, library.check_binding(), library.system_info())
    known = cache.get(key)
    if known in {numerics.value for numerics in Numerics}:
        return Numerics(known)
    numerics = probe(model, threads)
    cache.put(key, numerics.value)
    return numerics


def probe(model: binding.Model, threads: int) -> Numerics:
    """Decode one token in batches of several sizes and compare the logits bit by bit.

    Costs about 30 rows of decode, 50 where kernels change.
    """
    size = max(_SIZES_ALIKE + _PADDED_ALIKE)
    context = binding.Context(
        model,
        binding.ContextShape(
            n_seq_max=size, n_ctx=256 * size, n_batch=size, n_ubatch=size, threads=threads,
            unified=False, flash_attention=False,
        ),
    )  # fmt: skip
    try:
        _prefill_alike(context, size)
        if _alike(context, _SIZES_ALIKE):
            return Numerics.SAME_AS_ALONE
        return Numerics.SAME_IN_ANY_BATCH if _alike(context, _PADDED_ALIKE) else Numerics.VARIES
    finally:
        context.close()


def _prefill_alike(context: binding.Context, num_slots: int) -> None:
    """Give every slot the same few tokens, computed once."""
    context.tokens[:_PROMPT] = np.arange(_PROMPT) % context.num_vocab
    context.positions[:_PROMPT] = np.arange(_PROMPT)
    context.set_slots(0, _PROMPT, 0)
    context.wants[:_PROMPT] = 0
    _checked(context.decode(_PROMPT))
    for slot in range(1, num_slots):
        context.copy(0, slot)


def _decode(context: binding.Context, num_rows: int) -> npt.NDArray[np.float32]:
    """Return the logits of the next token in the first `num_rows` slots, which forget it again."""
    context.tokens[:num_rows] = _PROMPT % context.num_vocab
    context.positions[:num_rows] = _PROMPT
    context.set_slots(0, num_rows, np.arange(num_rows))
    context.wants[:num_rows] = 1
    _checked(context.decode(num_rows))
    logits = context.logits(num_rows).copy()
    for slot in range(num_rows):
        context.remove(slot, _PROMPT)
    return logits


def _alike(context: binding.Context, sizes: tuple[int, ...]) -> bool:
    """Return whether all rows of batches of these sizes have the same bits."""
    reference = _decode(context, sizes[0])[0].view(np.uint32)
    return all(bool((_decode(context, n).view(np.uint32) == reference).all()) for n in sizes[1:])


def _checked(code: int) -> None:
    if code != 0:
        raise EngineError(f"the model can't decode: llama_decode returned {code}")
