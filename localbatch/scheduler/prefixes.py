"""Token runs that several sequences begin with: found over a whole job, computed once, copied."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from localbatch.scheduler.sequence import Sequence

ALIGNMENT, LEAST_ROWS = 4, 8
"""Prompts are cut at multiples of 4 into pieces of at least 8 tokens: llama.cpp's kernels take 4
rows at a time, and others are used for fewer than 8, so each token gets the bits of a prompt
computed in one piece."""

LEAST_GAIN = 64
"""Prompt tokens that a prefix must save to be worth its copies."""


class Prefix:
    """The first `length` tokens of `num_users` sequences."""

    __slots__ = ("length", "num_users")

    def __init__(self, length: int, num_users: int) -> None:
        self.length = length
        self.num_users = num_users

    def __repr__(self) -> str:
        return f"Prefix({self.length} tokens, {self.num_users} users)"


class _Run(NamedTuple):
    """Prompts `[left, right)` of the sorted order begin with the same `length` tokens."""

    left: int
    right: int
    length: int


class _Node(NamedTuple):
    """Prompts from `left` on begin with the same `length` tokens; `places` may be cut there."""

    length: int
    left: int
    places: set[int]


def chunk_end(start: int, total: int, chunk: int, block: int | None = None) -> int:
    """Return where the piece of a prompt of `total` tokens ends that begins at `start`.

    Pieces end at multiples of `chunk`, counted from the last multiple of `block`. What would remain
    of the block or the prompt goes with the last piece if it has fewer than 8 tokens.
    """
    first = start - start % (block or chunk)
    stop = min(total, first + (block or chunk))
    end = first + ((start - first) // chunk + 1) * chunk
    return end if stop - end >= LEAST_ROWS else stop


def find_prefixes(
    prompts: SequenceOf[list[int]], chunk: int = 512, block: int | None = None
) -> list[tuple[Prefix, ...]]:
    """Return for each prompt the prefixes it shares, shortest first.

    Prompts are cut by `chunk_end` anyway; no piece may be too short to be exact.

    They form a tree: who shares a prefix shares all those before it. In sorted order the prompts
    with a common beginning are neighbours, so every inner node of the tree is a run of them.
    """
    order = sorted(range(len(prompts)), key=prompts.__getitem__)
    common = [_common_length(prompts[a], prompts[b]) for a, b in itertools.pairwise(order)]
    runs = _runs([len(prompts[i]) for i in order], common, lambda n: _cut(n, chunk, block))
    paths: list[tuple[Prefix, ...]] = [()] * len(prompts)
    for run in sorted(set(runs), key=lambda run: run.length):
        users = [
            i for i in order[run.left : run.right] if len(prompts[i]) - LEAST_ROWS >= run.length
        ]
        if len(users) < 2:
            continue
        before = paths[users[0]][-1].length if paths[users[0]] else 0
        own = run.length - before
        if own < LEAST_ROWS or (len(users) - 1) * own < LEAST_GAIN:
            continue
        prefix = Prefix(run.length, len(users))
        for i in users:
            paths[i] += (prefix,)
    return paths


def _cut(length: int, chunk: int, block: int | None) -> int:
    """Return the last place up to `length` where a prompt may be cut."""
    start = length - length % (block or chunk)
    while (end := chunk_end(start, length + 2 * chunk, chunk, block)) <= length:
        start = end
    beyond = (length - start) // ALIGNMENT * ALIGNMENT
    if beyond < LEAST_ROWS:
        return start
    return start + min(beyond, (end - start - LEAST_ROWS) // ALIGNMENT * ALIGNMENT)


def _common_length(a: list[int], b: list[int]) -> int:
    """Return how many tokens two prompts begin with alike."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # comparing slices is much faster than comparing tokens one by one
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def _runs(
    lengths: SequenceOf[int], common: SequenceOf[int], cut: Callable[[int], int]
) -> Iterator[_Run]:
    """Yield the maximal runs of sorted prompts of `lengths` tokens that may share a prefix.

    `common` is what neighbours begin with alike. Two prompts may share what they have in common, as
    far as a piece is left of both, down to the next place where `cut` allows it.
    """
    open_nodes: list[_Node] = []  # of the tree, from the root
    for right, length in enumerate([*common, 0]):
        left, places = right, set[int]()
        while open_nodes and open_nodes[-1].length > length:
            node = open_nodes.pop()
            left = node.left
            above = max(length, open_nodes[-1].length if open_nodes else 0)
            ends = _ends(lengths[left : right + 1], common[left:right], node.length)
            places |= node.places | {cut(end) for end in ends if end > 0}
            yield from (_Run(left, right + 1, place) for place in places if place > above)
            places = {place for place in places if 0 < place <= above}
            if open_nodes and open_nodes[-1].length > length:
                open_nodes[-1].places.update(places)
                places = set()
        if length and (not open_nodes or open_nodes[-1].length < length):
            open_nodes.append(_Node(length, left, places))
        elif open_nodes:
            open_nodes[-1].places.update(places)


def _ends(lengths: SequenceOf[int], common: SequenceOf[int], length: int) -> set[int]:
    """Return what two prompts may share that have exactly `length` tokens in common.

    They are in different branches of a node, which are parted where neighbours have no more.
    """
    branches: list[list[int]] = [[lengths[0] - LEAST_ROWS]]
    for alike, tokens in zip(common, lengths[1:], strict=True):
        if alike == length:
            branches.append([])
        branches[-1].append(tokens - LEAST_ROWS)
    *_, second, first = sorted(max(branch) for branch in branches)
    ends: set[int] = set()
    for branch in branches:
        other = second if max(branch) == first else first
        ends.update(min(length, mine, other) for mine in branch)
    return ends


class PrefixSlots:
    """Slots, above those of the sequences, that keep computed prefixes; the stalest goes first.

    The first sequence with a prefix that is not there computes it as part of its own prompt; when
    it gets to the prefix's end, its cells are copied here, and the others start from that copy.
    """

    def __init__(self, first_slot: int, num_slots: int) -> None:
        self._free = list(range(first_slot, first_slot + num_slots))
        self._num_slots = num_slots
        self._saved: OrderedDict[Prefix, int] = OrderedDict()
        self._computing: dict[Prefix, Sequence] = {}

    def ends_within(self, sequence: Sequence) -> list[int]:
        """Return where `sequence` computes the end of a prefix for all."""
        return [prefix.length for prefix, s in self._computing.items() if s is sequence]

    def must_wait(self, sequence: Sequence) -> bool:
        """Return whether another sequence is computing what this one begins with."""
        return any(prefix in self._computing for prefix in sequence.prefixes)

    def start(
        self, sequence: Sequence, own_slot: int = -1, left: Prefix | None = None
    ) -> tuple[int, int]:
        """Return (slot, length) of the longest prefix there is for a sequence; length 0 if none.

        `left` is a prefix that its own slot holds already. What is missing is this sequence's to
        compute, if others want it too.
        """
        slot, length = -1, 0
        for prefix in sequence.prefixes:
            prefix.num_users -= 1
            if prefix in self._saved:
                self._saved.move_to_end(prefix)
            if prefix is left:
                slot, length = own_slot, prefix.length
            elif prefix in self._saved:
                slot, length = self._saved[prefix], prefix.length
            elif self._num_slots and prefix.num_users > 0:
                self._computing[prefix] = sequence
        for prefix in sequence.prefixes:
            if prefix.length < length:  # a longer one was there
                self._computing.pop(prefix, None)
        return slot, length

    def save(self) -> Iterator[tuple[Sequence, int, int]]:
        """Yield (sequence, slot, length): cells that are computed now and go into a slot here."""
        computed = [p for p, s in self._computing.items() if s.num_computed == p.length]
        for prefix in computed:
            sequence = self._computing.pop(prefix)
            slot = self._free.pop() if self._free else self._saved.popitem(last=False)[1]
            self._saved[prefix] = slot
            yield sequence, slot, prefix.length

    def drop(self, sequence: Sequence) -> None:
        """Forget what `sequence` was to compute; the next one with the prefix does it."""
        for prefix in [p for p, s in self._computing.items() if s is sequence]:
            del self._computing[prefix]

    def check_integrity(self, running: SequenceOf[Sequence]) -> None:
        """Raise `AssertionError` if a slot was lost, or a prefix waits for nobody."""
        assert len({*self._free, *self._saved.values()}) == self._num_slots, "prefix slots"
        assert len(self._free) + len(self._saved) == self._num_slots, "prefix slots"
        assert all(any(s is r for r in running) for s in self._computing.values()), "computing"
