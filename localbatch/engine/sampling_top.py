"""Finds the largest logits of many rows at a time.

A row's logits are cut into blocks. The k-th largest of the blocks' own largest logits is no larger
than the row's k-th largest, and one comparison with it leaves little more than k. Only the search
for the blocks' largest reads the whole vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from localbatch.engine.backend import Logits

MOST = 256
"""Largest k for which looking at blocks pays."""

_BLOCK = 64
_FEWEST_BLOCKS = 1024
_LOWEST = np.finfo(np.float32).min
_NOTHING = np.iinfo(np.uint64).max
"""Sorts behind the key of any token."""

_Ints = npt.NDArray[np.int64]
_Keys = npt.NDArray[np.uint64]


class Ranked(NamedTuple):
    """Tokens of some rows, largest logit first; equal logits are in the order of their ids."""

    tokens: _Ints
    """Shape (rows, width); 0 behind a row's last."""
    values: npt.NDArray[np.float64]
    """Logit minus the row's largest one; -inf behind a row's last."""
    counts: _Ints
    """Tokens of each row; 0 if its largest logit is no finite number. None has a logit of -inf."""


def rank(logits: Logits, most: _Ints) -> Ranked:
    """Return for each row its `most` largest logits, from 1 to `MOST`; all if it has fewer."""
    num_rows, size = logits.shape
    width = int(most.max())
    depth = max(1, min(_BLOCK, 1 << (size // _FEWEST_BLOCKS).bit_length() >> 1))
    num = size // depth
    blocks = logits[:, : depth * num].reshape(num_rows, depth, num)
    rest = logits[:, depth * num :]
    largest = blocks.max(axis=1)
    best = largest.max(axis=1)
    if rest.size:
        best = np.maximum(best, rest.max(axis=1))
    is_sound = np.isfinite(best)
    bounds = np.where(is_sound, np.maximum(_bounds(largest, most), _LOWEST), np.float32(np.inf))

    chosen = np.flatnonzero(largest >= bounds[:, None])
    num_chosen = np.bincount(chosen // num, minlength=num_rows)
    crowded = is_sound & (num_chosen > 2 * width + 64)  # of equal logits there may be any number
    skipped = crowded | ~is_sound
    if skipped.any():
        chosen = chosen[~skipped[chosen // num]]
    table = _of_blocks(blocks, chosen, bounds, width)
    if rest.size:
        keys = _keys(rest, np.arange(depth * num, size))
        table = np.concatenate([table, np.where(rest >= bounds[:, None], keys, _NOTHING)], axis=1)
    table.sort(axis=1)
    for i in np.flatnonzero(crowded):
        table[i] = _NOTHING
        found = _row_keys(logits[i], int(most[i]))
        table[i, : len(found)] = found
    table[~is_sound] = _NOTHING
    table = table[:, :width]
    counts = np.minimum((table != _NOTHING).sum(axis=1), most)
    return _unpacked(logits, table, counts)


def rank_row(logits: Logits, most: int) -> Ranked:
    """Return the `most` largest logits, or all if 0, of the only row of `logits`."""
    if not np.isfinite(logits.max()):
        counts = np.zeros(1, np.int64)
        return Ranked(np.zeros((1, 1), np.int64), np.full((1, 1), -np.inf), counts)
    keys = _row_keys(logits[0], most)[None]
    return _unpacked(logits, keys, np.array([keys.shape[1]]))


def _bounds(largest: Logits, most: _Ints) -> npt.NDArray[np.float32]:
    """Return a number for each row that no more than its `most` largest logits need be below."""
    num_rows, num = largest.shape
    groups = max(1, num // max(4 * int(most.max()), _FEWEST_BLOCKS // 4))
    span = num // groups
    if groups > 1:  # blocks of blocks: fewer to order
        largest = largest[:, : groups * span].reshape(num_rows, groups, span).max(axis=1)
    places = span - np.minimum(most, span)
    parted = np.partition(largest, np.unique(places), axis=1)
    bounds: npt.NDArray[np.float32] = parted[np.arange(num_rows), places]
    return bounds


def _of_blocks(blocks: Logits, chosen: _Ints, bounds: npt.NDArray[np.float32], width: int) -> _Keys:
    """Return the keys of the logits in the chosen blocks that reach their row's bound.

    `chosen` counts through the blocks of all rows. Shape (rows, at least `width`), filled up with
    `_NOTHING`.
    """
    num_rows, _, num = blocks.shape
    row, block = np.divmod(chosen, num)
    values = blocks[row, :, block]
    hits = np.flatnonzero(values >= bounds[row, None])
    at, place = np.divmod(hits, values.shape[1])
    keys = _keys(values.ravel()[hits], place * num + block[at])
    row = row[at]
    counts = np.bincount(row, minlength=num_rows)
    table = np.full((num_rows, max(width, int(counts.max()))), _NOTHING)
    table[row, np.arange(len(row)) - (np.cumsum(counts) - counts)[row]] = keys
    return table


def _row_keys(logits: npt.NDArray[np.float32], most: int) -> _Keys:
    """Return the keys of a row's `most` largest finite logits (all if 0) in their order."""
    tokens = np.flatnonzero(logits > -np.inf)
    keys = _keys(logits[tokens], tokens)
    if 0 < most < len(keys):
        keys = np.partition(keys, most - 1)[:most]
    keys.sort()
    return keys


def _keys(values: npt.NDArray[np.float32], tokens: _Ints) -> _Keys:
    """Return numbers in whose order the larger logit comes first, and of equals the lower id.

    IEEE floats of one sign are ordered like their bits, and none is negative zero here.
    """
    bits = (np.float32(0.0) - values).view(np.int32)
    ordered = (bits ^ ((bits >> 31) | np.int32(-(2**31)))).view(np.uint32)
    return (ordered.astype(np.uint64) << np.uint64(32)) | tokens.astype(np.uint64)


def _unpacked(logits: Logits, keys: _Keys, counts: _Ints) -> Ranked:
    """Return tokens and logits of sorted keys; those behind a row's count are dropped."""
    is_kept = np.arange(keys.shape[1]) < counts[:, None]
    tokens = np.where(is_kept, (keys & np.uint64(2**32 - 1)).astype(np.int64), 0)
    values = np.take_along_axis(logits, tokens, axis=1).astype(np.float64)
    values -= np.where(counts[:, None] > 0, values[:, :1], 0.0)
    values[~is_kept] = -np.inf
    return Ranked(tokens, values, counts)
