"""What prompts begin with alike: found, computed once, copied; never another row's tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from localbatch import DecodeError
from localbatch.data.config import SchedulerConfig
from localbatch.data.request import FinishReason
from localbatch.engine import llama as llama_module
from localbatch.engine.backend import Backend, ContextConfig, Numerics
from localbatch.engine.fake import FakeBackend
from localbatch.engine.llama import LlamaBackend
from localbatch.scheduler.plan import Copy, PlanRow, StepPlan
from localbatch.scheduler.prefixes import Prefix, chunk_end, find_prefixes
from localbatch.scheduler.scheduler import Scheduler
from localbatch.scheduler.sequence import Sequence, SequenceStatus
from tests.factories import create_requests

Floats = npt.NDArray[np.float32]
LEAST_PIECE = 8
"""With fewer rows llama.cpp takes other kernels."""
LEAST_GAIN = 64


# What may be shared, said once more, and slowly.


def may_cut(place: int, chunk: int) -> bool:
    """Say whether a prompt may be cut here: between chunks, or by fours with 8 on each side."""
    inside = place % chunk
    return inside == 0 or (inside % 4 == 0 and LEAST_PIECE <= inside <= chunk - LEAST_PIECE)


def common(one: list[int], other: list[int]) -> int:
    """Return how many tokens two prompts begin with alike."""
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return i
    return min(len(one), len(other))


def naive_paths(prompts: list[list[int]], chunk: int) -> list[list[tuple[int, frozenset[int]]]]:
    """Return for each prompt what it shares: (tokens, the prompts that share them).

    A place counts if it is the last at which some other prompt can be parted from this one, with 8
    tokens left to both. There
    all prompts with the same beginning share it that have 8 tokens left, if these are two or more,
    the piece since the place before is not too short, and 64 tokens are saved.
    """
    paths: list[list[tuple[int, frozenset[int]]]] = []
    for i, mine in enumerate(prompts):
        places = set()
        for j, other in enumerate(prompts):
            place = common(mine, other) if i != j else 0
            place = max(0, min(place, len(mine) - LEAST_PIECE, len(other) - LEAST_PIECE))
            while not may_cut(place, chunk):
                place -= 1
            places.add(place)
        path: list[tuple[int, frozenset[int]]] = []
        for place in sorted(places - {0}):
            users = frozenset(
                j
                for j, other in enumerate(prompts)
                if other[:place] == mine[:place] and len(other) >= place + LEAST_PIECE
            )
            piece = place - (path[-1][0] if path else 0)
            saved = (len(users) - 1) * piece
            if i in users and len(users) > 1 and piece >= LEAST_PIECE and saved >= LEAST_GAIN:
                path.append((place, users))
        paths.append(path)
    return paths


LENGTHS = st.sampled_from([3, 4, 7, 8, 9, 12, 20, 24, 31, 32, 33, 40, 63, 64, 70])


@st.composite
def prompt_trees(draw: st.DrawFn) -> list[list[int]]:
    """Prompts made of pieces that come in many of them, some cut off, some twice."""
    pieces = [
        [100 * (i + 1) + p for p in range(draw(LENGTHS))] for i in range(draw(st.integers(1, 4)))
    ]
    prompts = []
    for number in range(draw(st.integers(0, 9))):
        prompt: list[int] = []
        for piece in draw(st.lists(st.sampled_from(pieces), max_size=3)):
            prompt = prompt + piece
        own = draw(st.integers(0, 12))
        prompt += [-number - 1] * own  # equal tokens, but no other prompt's
        cut = draw(st.none() | st.integers(1, 80))
        prompts.append(prompt[:cut] or [0])
    for again in draw(st.lists(st.integers(0, 8), max_size=3)):
        prompts += prompts[again : again + 1]
    return draw(st.permutations(prompts))


CHUNKS = st.sampled_from([512, 32, 36, 64, 100])


def run_of(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


def lengths(paths: list[tuple[Prefix, ...]]) -> list[list[int]]:
    return [[prefix.length for prefix in path] for path in paths]


class TestFindPrefixes:
    @settings(max_examples=300, deadline=None)
    @given(prompt_trees(), CHUNKS)
    def test_what_is_shared_may_be_shared(self, prompts: list[list[int]], chunk: int) -> None:
        """True beginnings, cut where they may be, with 8 own tokens; a tree; none for no gain."""
        paths = find_prefixes(prompts, chunk)

        assert len(paths) == len(prompts)
        users: dict[Prefix, list[int]] = {}
        for i, path in enumerate(paths):
            ends = [0, *(prefix.length for prefix in path)]
            assert all(b - a >= LEAST_PIECE for a, b in pairwise(ends)), "pieces ascend"
            assert all(may_cut(end, chunk) for end in ends)
            assert not path or len(prompts[i]) - path[-1].length >= LEAST_PIECE
            for place, prefix in enumerate(path):
                users.setdefault(prefix, []).append(i)
                event(f"{place + 1} prefixes in a row")
        for prefix, sharing in users.items():
            assert len(sharing) == prefix.num_users > 1
            assert len({tuple(prompts[i][: prefix.length]) for i in sharing}) == 1
            above = {paths[i][: paths[i].index(prefix)] for i in sharing}
            assert len(above) == 1, "who shares a prefix shares all those before it"
            before = next(iter(above))
            piece = prefix.length - (before[-1].length if before else 0)
            assert (len(sharing) - 1) * piece >= LEAST_GAIN

    @settings(max_examples=300, deadline=None)
    @given(prompt_trees(), CHUNKS)
    def test_all_that_is_worth_it_is_shared(self, prompts: list[list[int]], chunk: int) -> None:
        """Two prompts share a prefix exactly if the slow way to find it says so."""
        expected = naive_paths(prompts, chunk)
        paths = find_prefixes(prompts, chunk)

        assert lengths(paths) == [[length for length, _ in path] for path in expected]
        prefix_of: dict[tuple[int, frozenset[int]], Prefix] = {}
        for path, keys in zip(paths, expected, strict=True):
            for prefix, key in zip(path, keys, strict=True):
                assert prefix_of.setdefault(key, prefix) is prefix
        assert len(set(map(id, prefix_of.values()))) == len(prefix_of)

    def test_one_head(self) -> None:
        """Five prompts behind 102 tokens share 100, the last multiple of four."""
        prompts = [run_of(0, 102) + run_of(1000 * i, 10 + i) for i in range(1, 6)]

        paths = find_prefixes(prompts)

        assert lengths(paths) == [[100]] * 5
        assert len({path[0] for path in paths}) == 1
        assert paths[0][0].num_users == 5

    def test_two_nested_heads(self) -> None:
        """Six prompts share 64 tokens; three of them 40 more, and three others 60 more."""
        first, second = run_of(0, 64) + run_of(200, 40), run_of(0, 64) + run_of(300, 60)
        prompts = [(second if i % 2 else first) + run_of(1000 * (i + 1), 9) for i in range(6)]

        paths = find_prefixes(prompts)

        assert lengths(paths) == [[64, 104], [64, 124]] * 3
        assert len({path[0] for path in paths}) == 1
        assert len({path[1] for path in paths}) == 2
        assert [path[1].num_users for path in paths] == [3] * 6
        assert paths[0][0].num_users == 6

    def test_a_prompt_that_ends_inside_the_head(self) -> None:
        """It keeps 8 tokens to compute; the others share the whole head nevertheless."""
        head = run_of(0, 100)
        prompts = [head + run_of(1000 * (i + 1), 8) for i in range(4)] + [head[:50]]

        paths = find_prefixes(prompts)

        assert [path[-1].length for path in paths[:4]] == [100] * 4
        assert len({path[-1] for path in paths[:4]}) == 1
        assert all(prefix.length <= 42 for prefix in paths[4])

    @pytest.mark.parametrize("length", [7, 8, 64, 100, 103, 512, 520])
    def test_equal_prompts_keep_tokens_of_their_own(self, length: int) -> None:
        """The logits of the last token must be computed, with seven more beside it."""
        for path in find_prefixes([run_of(0, length)] * 20):
            assert all(prefix.length <= length - LEAST_PIECE for prefix in path)

    def test_nothing_to_share(self) -> None:
        """No prompts, one prompt, and prompts that have nothing in common."""
        assert find_prefixes([]) == []
        assert find_prefixes([run_of(0, 500)]) == [()]
        assert find_prefixes([run_of(1000 * i, 200) for i in range(5)]) == [()] * 5

    @pytest.mark.parametrize(
        ("users", "head", "shared"), [(2, 60, 0), (2, 64, 64), (3, 28, 0), (3, 32, 32), (9, 8, 8)]
    )
    def test_too_little_gain(self, users: int, head: int, shared: int) -> None:
        """All but one row save the head's tokens: 64 in all, or it isn't worth a copy."""
        prompts = [run_of(0, head) + run_of(1000 * (i + 1), 20) for i in range(users)]

        assert lengths(find_prefixes(prompts)) == [[shared] if shared else []] * users

    @pytest.mark.parametrize(
        ("head", "shared"), [(503, 500), (508, 504), (511, 504), (512, 512), (519, 512), (520, 520)]
    )
    def test_no_short_piece_at_the_border_of_a_chunk(self, head: int, shared: int) -> None:
        """Chunks end at 512, so a cut is there, or 8 tokens away from it."""
        prompts = [run_of(0, head) + run_of(1000 * (i + 1), 30) for i in range(3)]

        assert lengths(find_prefixes(prompts, 512)) == [[shared]] * 3

    @pytest.mark.parametrize(
        ("head", "shared"), [(125, 120), (128, 128), (135, 128), (136, 136), (511, 504), (519, 512)]
    )
    def test_no_short_piece_at_the_border_of_a_smaller_chunk(self, head: int, shared: int) -> None:
        """The same at 128, the chunk, and at 512, the block."""
        prompts = [run_of(0, head) + run_of(1000 * (i + 1), 30) for i in range(3)]

        assert lengths(find_prefixes(prompts, 128, 512)) == [[shared]] * 3


def pieces_of(total: int, chunk: int, block: int) -> list[int]:
    """Return the lengths of the pieces of a prompt."""
    at, pieces = 0, []
    while at < total:
        end = chunk_end(at, total, chunk, block)
        pieces.append(end - at)
        at = end
    return pieces


class TestPieces:
    @pytest.mark.parametrize(
        ("total", "pieces"),
        [
            (7, [7]),
            (128, [128]),
            (135, [135]),
            (136, [128, 8]),
            (300, [128, 128, 44]),
            (391, [128, 128, 135]),
            (512, [128] * 4),
            (513, [128] * 4 + [1]),
            (648, [128] * 5 + [8]),
            (647, [128] * 4 + [135]),
        ],
    )
    def test_of_a_prompt(self, total: int, pieces: list[int]) -> None:
        """Chunks of 128; less than 8 tokens are no piece of their own, but after a block of 512."""
        assert pieces_of(total, 128, 512) == pieces

    @given(st.integers(1, 3000), st.integers(8, 130).map(lambda n: 4 * n))
    def test_are_never_too_short_or_too_long(self, total: int, chunk: int) -> None:
        """All are cut by fours; only what is left of the last block may be short."""
        pieces = pieces_of(total, chunk, max(chunk, 512))
        ends = list(itertools.accumulate(pieces))

        assert ends[-1] == total
        assert all(end % 4 == 0 for end in ends[:-1])
        assert max(pieces) < chunk + 8
        assert min(pieces[:-1], default=8) >= 8
        assert pieces[-1] >= 8 or total - pieces[-1] in (0, *range(0, total, max(chunk, 512)))


# The scheduler, on cells that hold tokens.


class Cells:
    """What the slots hold: tokens at positions 0, 1, ...; slots of prefixes are the last."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.num_slots = config.num_slots
        self.slots: list[list[int]] = [
            [] for _ in range(config.num_slots + config.num_prefix_slots)
        ]

    def prepare(self, plan: StepPlan) -> None:
        """Do what comes before the rows, in its order."""
        for slot in plan.releases:
            self.own(slot)
            self.slots[slot] = []
        for source, target in plan.moves:
            self.own(source)
            self.own(target)
            assert self.slots[source], "an empty slot moves"
            assert not self.slots[target], "a move onto a slot in use"
            self.slots[target], self.slots[source] = self.slots[source], []
        for source, target, length in plan.copies:
            assert 0 <= source < len(self.slots)
            assert 0 <= target < len(self.slots)
            prefix = (source < self.num_slots) != (target < self.num_slots)
            assert prefix or source == target < self.num_slots, "to or from a prefix, or kept"
            assert 0 < length <= len(self.slots[source]), "a copy of cells that are not there"
            self.slots[target] = self.slots[source][:length]
        if all(not row.is_prefill for row in plan.rows):
            # A backend may fill a decode batch up with rows in the slots above.
            assert not any(self.slots[len(plan.rows) : self.num_slots]), "a free slot is not empty"

    def compute(self, row: PlanRow) -> None:
        """Add a row's tokens; all tokens before must be there, and be its own."""
        self.own(row.slot)
        held = self.slots[row.slot]
        assert held == row.sequence.tokens[: row.start], "other tokens, or too few"
        assert row.start < row.end
        held += row.tokens

    def own(self, slot: int) -> None:
        assert 0 <= slot < self.num_slots, "not a slot of a row"


@dataclass
class Node:
    """A piece of prompt that rows have in common, behind that of another node."""

    above: int | None
    length: int
    is_prefix: bool


@dataclass
class Leaf:
    """A row: where it hangs, what it has of its own, and when it comes."""

    node: int | None
    own: int
    max_tokens: int
    late: bool


@dataclass
class Disturbance:
    """Something that goes wrong at a step; `abort` of a row, before or after it is computed."""

    step: int
    kind: str
    which: int


@dataclass
class Scene:
    config: SchedulerConfig
    nodes: list[Node]
    leaves: list[Leaf]
    disturbances: list[Disturbance]


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    """Trees of prompts with few tokens, for few slots; prefixes end anywhere."""
    nodes: list[Node] = []
    for i in range(draw(st.integers(0, 5))):
        above = draw(st.none() | st.integers(0, i - 1)) if i else None
        nodes.append(Node(above, draw(st.integers(1, 7)), draw(st.integers(0, 4)) > 0))
    places = st.none() | st.integers(0, len(nodes) - 1) if nodes else st.none()
    leaf = st.builds(Leaf, places, st.integers(2, 9), st.integers(1, 5), st.booleans())
    chunk = draw(st.integers(1, 6))
    config = SchedulerConfig(
        num_slots=draw(st.integers(1, 5)),
        row_cells=64,
        chunk=chunk,
        max_step_tokens=draw(st.integers(chunk, 4 * chunk)),
        num_prefix_slots=draw(st.integers(0, 3)),
        closes_gaps_first=draw(st.booleans()),
    )
    kinds = st.sampled_from(["abort before", "abort after", "fail", "restart", "preempt"])
    disturbance = st.builds(Disturbance, st.integers(0, 25), kinds, st.integers(0, 12))
    return Scene(
        config,
        nodes,
        draw(st.lists(leaf, min_size=1, max_size=12)),
        draw(st.just([]) | st.lists(disturbance, max_size=4)),
    )


class Play:
    """Drives a scheduler through a scene and checks every step."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.config = scene, scene.config
        self.scheduler = Scheduler(scene.config)
        self.cells = Cells(scene.config)
        self.prefixes: list[Prefix | None] = []
        for node in range(len(scene.nodes)):
            users = sum(node in self.path(leaf.node) for leaf in scene.leaves)
            shared = scene.nodes[node].is_prefix and users > 1
            length = sum(scene.nodes[n].length for n in self.path(node))
            self.prefixes.append(Prefix(length, users) if shared else None)
        self.sequences = [self.sequence(i) for i in range(len(scene.leaves))]
        self.ended: dict[int, FinishReason] = {}
        self.admitted: list[int] = []
        self.times_computed: dict[Prefix, int] = {}
        self.num_prompt_tokens = 0
        self.steps = 0

    def path(self, node: int | None) -> list[int]:
        """Return the nodes above a node, the node included, from the root on."""
        path: list[int] = []
        while node is not None:
            path.insert(0, node)
            node = self.scene.nodes[node].above
        return path

    def sequence(self, number: int) -> Sequence:
        leaf = self.scene.leaves[number]
        path = self.path(leaf.node)
        tokens = [100 * (n + 1) + p for n in path for p in range(self.scene.nodes[n].length)]
        tokens += [10_000 * (number + 1) + p for p in range(leaf.own)]
        request = create_requests(1, first=number, max_tokens=leaf.max_tokens)[0]
        sequence = Sequence(request, tokens)
        sequence.prefixes = tuple(p for p in map(self.prefixes.__getitem__, path) if p)
        return sequence

    def run(self) -> None:
        """Let the scene play to its end."""
        most = 4 * sum(s.num_tokens + leaf.max_tokens for s, leaf in self.both())
        late = [s for s, leaf in self.both() if leaf.late]
        for sequence, leaf in self.both():
            if not leaf.late:
                self.scheduler.add(sequence)
        while self.scheduler.has_work or late:
            assert self.steps < most, "it does not end"
            if late and (self.steps % 2 or not self.scheduler.has_work):
                self.scheduler.add(late.pop(0))
            self.step()
            self.steps += 1
        for number, (sequence, leaf) in enumerate(self.both()):
            assert sequence.status is SequenceStatus.FINISHED
            answer = self.answer(number)[: leaf.max_tokens]
            if number in self.ended:
                assert sequence.finish_reason is self.ended[number]
                assert answer[: sequence.num_generated] == sequence.generated
            else:
                assert (sequence.finish_reason, sequence.generated) == (FinishReason.LENGTH, answer)

    def both(self) -> list[tuple[Sequence, Leaf]]:
        return list(zip(self.sequences, self.scene.leaves, strict=True))

    def answer(self, number: int) -> list[int]:
        return [-100 * (number + 1) - k for k in range(10)]

    def step(self) -> None:
        disturbances = [d for d in self.scene.disturbances if d.step == self.steps]
        for disturbance in disturbances:
            self.disturb(disturbance, before=True)
        if not self.scheduler.has_work:
            return
        waiting = list(self.scheduler.waiting)
        plan = self.scheduler.schedule()
        assert plan, "there is work, so something is computed"
        new = [s for s in waiting if s.status is SequenceStatus.RUNNING]
        assert new == waiting[: len(new)], "rows are admitted in order of arrival"
        self.cells.prepare(plan)
        failing = [d for d in disturbances if d.kind in ("fail", "restart")]
        for row in plan.rows[: failing[0].which if failing else None]:
            self.cells.compute(row)
        self.check_rows(plan)
        if failing and failing[0].kind == "restart":
            self.scheduler.restart([row.sequence for row in plan.rows])
        elif failing:
            for row in plan.rows:
                self.end(row.sequence, FinishReason.ERROR)
        else:
            for disturbance in disturbances:
                self.disturb(disturbance, before=False)
            tokens = [self.next_token(row) if row.wants_logits else None for row in plan.rows]
            self.scheduler.update(plan, tokens)
        self.scheduler.check_integrity()

    def next_token(self, row: PlanRow) -> int:
        sequence = row.sequence
        return self.answer(sequence.request.index)[row.end - sequence.num_prompt]

    def disturb(self, disturbance: Disturbance, *, before: bool) -> None:
        if disturbance.kind == "preempt" and before:
            self.scheduler.preempt()
        elif disturbance.kind == ("abort before" if before else "abort after"):
            known = [*self.scheduler.running, *self.scheduler.waiting]
            if known:
                self.end(known[disturbance.which % len(known)], FinishReason.ABORTED)
        self.scheduler.check_integrity()

    def end(self, sequence: Sequence, reason: FinishReason) -> None:
        self.scheduler.finish(sequence, reason)
        self.ended[sequence.request.index] = reason

    def check_rows(self, plan: StepPlan) -> None:
        assert len({row.slot for row in plan.rows}) == len(plan.rows), "a slot is used twice"
        for row in plan.rows:
            sequence = row.sequence
            ends = [sequence.num_tokens, *(prefix.length for prefix in sequence.prefixes)]
            assert row.end in ends or row.end % self.config.chunk == 0, "cut at a place of its own"
            assert row.end - row.start <= self.config.chunk
            assert row.wants_logits == (row.end == sequence.num_tokens)
            for prefix in sequence.prefixes:
                if row.start < prefix.length <= row.end:
                    self.times_computed[prefix] = self.times_computed.get(prefix, 0) + 1
            self.num_prompt_tokens += max(0, min(row.end, sequence.num_prompt) - row.start)
        prefill = [row.end - row.start for row in plan.rows if row.is_prefill]
        assert sum(prefill) <= self.config.max_step_tokens
        if not prefill:
            assert [row.slot for row in plan.rows] == list(range(len(self.scheduler.running)))
        else:
            assert len(prefill) == len(plan.rows), "decode beside prefill"


class TestScheduler:
    @settings(max_examples=600, deadline=None)
    @given(scenes())
    def test_every_row_finds_its_own_tokens(self, scene: Scene) -> None:
        """Copied, moved, aborted, preempted: a computed row stands behind its own tokens.

        And where nothing is called off and there are slots for all prefixes, each of these is
        computed once: by hand, all own parts, and each prefix from the one before it.
        """
        play = Play(scene)
        play.run()

        prefixes = [p for p in play.prefixes if p]
        if scene.disturbances or len(prefixes) > scene.config.num_prefix_slots:
            event("disturbed, or too few slots")
            return
        event(f"{len(prefixes)} prefixes are computed once")
        assert play.times_computed == dict.fromkeys(prefixes, 1)
        own = sum(
            s.num_prompt - (s.prefixes[-1].length if s.prefixes else 0) for s in play.sequences
        )
        pieces = {
            prefix: prefix.length - (s.prefixes[i - 1].length if i else 0)
            for s in play.sequences
            for i, prefix in enumerate(s.prefixes)
        }
        assert play.num_prompt_tokens == own + sum(pieces.values())

    def test_the_first_row_computes_the_head_and_the_others_copy_it(self) -> None:
        """Three rows of 4 + 3 tokens: the head, then all that is left at one time."""
        config = SchedulerConfig(num_slots=4, row_cells=64, num_prefix_slots=1)
        scene = Scene(config, [Node(None, 4, True)], [Leaf(0, 3, 1, False)] * 3, [])
        play = Play(scene)
        for sequence in play.sequences:
            play.scheduler.add(sequence)

        first = play.scheduler.schedule()
        play.scheduler.update(first, [None])
        second = play.scheduler.schedule()

        assert first.copies == []
        assert [(row.slot, row.start, row.end) for row in first.rows] == [(0, 0, 4)]
        assert second.copies == [Copy(0, 4, 4), Copy(4, 1, 4), Copy(4, 2, 4)]
        assert [(r.slot, r.start, r.end) for r in second.rows] == [(i, 4, 7) for i in range(3)]

    def test_the_next_row_goes_on_in_the_slot_of_one_that_ended(self) -> None:
        """Its head is there already; at the next decode what is left in a slot is forgotten."""
        config = SchedulerConfig(num_slots=2, row_cells=64, num_prefix_slots=1)
        leaves = [Leaf(0, 3, 2, False), Leaf(0, 3, 1, False), Leaf(0, 3, 9, False)]
        play = Play(Scene(config, [Node(None, 4, True)], leaves, []))
        for sequence in play.sequences:
            play.scheduler.add(sequence)

        play.scheduler.update(play.scheduler.schedule(), [None])
        second = play.scheduler.schedule()
        play.scheduler.update(second, [7, 7])
        third = play.scheduler.schedule()

        assert second.copies == [Copy(0, 2, 4), Copy(2, 1, 4)]
        assert third.copies == [Copy(1, 1, 4)]
        assert third.releases == []
        assert [(row.slot, row.start, row.end) for row in third.rows] == [(1, 4, 7)]

    def test_without_slots_for_prefixes_nothing_is_cut(self) -> None:
        """Every row computes its prompt in one piece, all at one time."""
        config = SchedulerConfig(num_slots=4, row_cells=64)
        scene = Scene(config, [Node(None, 4, True)], [Leaf(0, 3, 1, False)] * 3, [])
        play = Play(scene)
        for sequence in play.sequences:
            play.scheduler.add(sequence)

        plan = play.scheduler.schedule()

        assert plan.copies == []
        assert [(row.slot, row.start, row.end) for row in plan.rows] == [
            (i, 0, 7) for i in range(3)
        ]

    def test_the_next_row_computes_what_an_aborted_one_left(self) -> None:
        """Rows that wait for a head are not lost with the one that was computing it."""
        config = SchedulerConfig(num_slots=4, row_cells=64, chunk=2, num_prefix_slots=1)
        scene = Scene(config, [Node(None, 4, True)], [Leaf(0, 3, 1, False)] * 3, [])
        play = Play(scene)
        for sequence in play.sequences:
            play.scheduler.add(sequence)
        play.scheduler.update(play.scheduler.schedule(), [None])

        play.scheduler.finish(play.sequences[0], FinishReason.ABORTED)
        plan = play.scheduler.schedule()

        assert [(r.sequence.request.index, r.start, r.end) for r in plan.rows] == [(1, 0, 2)]

    def test_the_stalest_prefix_makes_room(self) -> None:
        """Two slots and three heads: the one that goes is the one not used for longest.

        The third row finds the first head, so the fourth, with the third head, takes the slot of
        the second; the last rows find the first and the third head, and compute the second again.
        """
        config = SchedulerConfig(num_slots=1, row_cells=64, num_prefix_slots=2)
        nodes = [Node(None, length, True) for length in (4, 5, 6)]
        leaves = [Leaf(node, 3, 1, False) for node in (0, 1, 0, 2, 0, 1, 2)]
        play = Play(Scene(config, nodes, leaves, []))

        play.run()

        heads = [prefix for prefix in play.prefixes if prefix]
        assert [play.times_computed[head] for head in heads] == [1, 2, 1]

    def test_a_longer_prefix_stands_in_for_a_shorter_one(self) -> None:
        """Nobody waits for a head that a row skips because it starts behind it.

        Heads of 4 tokens, of 5 more, and another of 4; when the first row has computed the second
        head, the first has to go. The third row starts from the second, and the fourth, which only
        has the first head, at once from the start.
        """
        config = SchedulerConfig(num_slots=3, row_cells=64, num_prefix_slots=2)
        nodes = [Node(None, 4, True), Node(0, 5, True), Node(None, 4, True)]
        leaves = [Leaf(node, 3, 1, False) for node in (1, 2, 1, 0, 2)]
        play = Play(Scene(config, nodes, leaves, []))
        for sequence in play.sequences:
            play.scheduler.add(sequence)

        plans = []
        for _ in range(3):
            plans.append(play.scheduler.schedule())
            play.scheduler.update(
                plans[-1], [0 if r.wants_logits else None for r in plans[-1].rows]
            )

        planned = [
            [(row.sequence.request.index, row.start, row.end) for row in plan.rows]
            for plan in plans
        ]
        assert planned == [
            [(0, 0, 4), (1, 0, 4)],
            [(0, 4, 9), (1, 4, 7)],
            [(0, 9, 12), (2, 9, 12), (3, 0, 7)],
        ]


# The backends.


@pytest.fixture(params=["fake", "llama"])
def backend(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[Backend]:
    made = FakeBackend() if request.param == "fake" else LlamaBackend(str(tiny_model))
    yield made
    made.close()


def open_slots(backend: Backend, num_slots: int = 3, num_prefix_slots: int = 2) -> None:
    backend.open(
        ContextConfig(num_slots, 256, None, chunk=512, threads=1, num_prefix_slots=num_prefix_slots)
    )


def sequence(*tokens: int) -> Sequence:
    return Sequence(create_requests(1)[0], list(tokens))


def run(
    backend: Backend, rows: list[tuple[Sequence, int, int, int]], copies: list[Copy] | None = None
) -> list[bytes]:
    """Compute (sequence, slot, start, end); return the bytes of the logits of those at their end.

    Rows of one token behind others are decoded together.
    """
    seen: list[bytes] = []

    def sample(wanting: list[PlanRow], logits: Floats) -> list[int]:
        seen.extend(values.tobytes() for values in logits)
        return [0] * len(wanting)

    plan_rows = [
        PlanRow(s, slot, start, end, end == s.num_tokens, start == 0 or end - start > 1)
        for s, slot, start, end in rows
    ]
    backend.forward(StepPlan(plan_rows, [], [], copies or []), sample)  # type: ignore[arg-type]
    return seen


HEAD = tuple(10 + i * i % 200 for i in range(40))
ONE, TWO = HEAD + tuple(range(60, 80)), HEAD + tuple(range(90, 105))


def computed(backend: Backend, *tokens: int) -> bytes:
    """Return the logits behind tokens that are computed from the start, with a cut at 40."""
    backend.clear()
    whole = sequence(*tokens)
    run(backend, [(whole, 0, 0, 40)])
    logits = run(backend, [(whole, 0, 40, len(tokens))])[0]
    backend.clear()
    return logits


class TestCopies:
    def test_a_copy_goes_on_as_if_it_had_been_computed(self, backend: Backend) -> None:
        """Cut to the head, by way of a prefix slot, and bit by bit the same; the source, too."""
        open_slots(backend)
        expected = [computed(backend, *ONE), computed(backend, *TWO)]
        one, two, longer = sequence(*ONE), sequence(*TWO), sequence(*ONE, 7)
        go_on = computed(backend, *ONE, 7)

        run(backend, [(one, 0, 0, 40)])
        first = run(backend, [(one, 0, 40, 60)])
        copies = [Copy(0, 3, 40), Copy(3, 1, 40), Copy(3, 2, 40)]
        found = run(backend, [(two, 1, 40, 55), (longer, 2, 40, 61)], copies)
        again = run(backend, [(one, 1, 40, 60)], [Copy(3, 1, 40)])

        assert first == [expected[0]]
        assert found == [expected[1], go_on]
        assert again == [expected[0]]
        assert len({*expected, go_on}) == 3

    def test_a_copy_replaces_all_that_was_in_its_target(self, backend: Backend) -> None:
        """A slot used before, with more tokens and others, in both directions."""
        open_slots(backend)
        expected = computed(backend, *TWO)
        one, other = sequence(*ONE), sequence(*range(100, 200))
        run(backend, [(one, 0, 0, 40), (other, 1, 0, 100)])
        run(backend, [(one, 0, 40, 60)], [Copy(1, 4, 100)])

        found = run(backend, [(sequence(*TWO), 1, 40, 55)], [Copy(0, 4, 40), Copy(4, 1, 40)])

        assert found == [expected]

    def test_copies_are_done_in_their_order(self, backend: Backend) -> None:
        """A slot that is copied from and then written gives what it held before."""
        open_slots(backend)
        other_tokens = tuple(reversed(ONE))
        expected = [computed(backend, *ONE), computed(backend, *other_tokens)]
        one, other = sequence(*ONE), sequence(*other_tokens)
        run(backend, [(one, 0, 0, 40), (other, 1, 0, 40)], [])

        copies = [Copy(0, 3, 40), Copy(3, 2, 40), Copy(1, 3, 40), Copy(3, 0, 40)]
        found = run(backend, [(other, 0, 40, 60), (one, 2, 40, 60)], copies)

        assert found == expected[::-1]

    def test_padding_never_touches_prefixes(
        self, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Batches of 1 to 3 rows are computed as 8, while two prefixes lie in the slots above."""
        monkeypatch.setattr(llama_module, "numerics_of", lambda *_: Numerics.SAME_IN_ANY_BATCH)
        backend = LlamaBackend(str(tiny_model))
        open_slots(backend)
        other_tokens = tuple(reversed(ONE))
        expected = [computed(backend, *ONE), computed(backend, *other_tokens)]
        one, other = sequence(*ONE), sequence(*other_tokens)
        run(backend, [(one, 0, 0, 40), (other, 1, 0, 40)])
        short = [sequence(50 + i, 60, 61, 62, 63) for i in range(3)]
        run(backend, [(short[0], 2, 0, 2)], [Copy(0, 3, 40), Copy(1, 4, 40)])
        backend.forward(StepPlan([], [], [0, 1, 2]), lambda *_: [])
        run(backend, [(s, slot, 0, 2) for slot, s in enumerate(short)])
        for start, width in ((2, 3), (3, 2), (4, 1)):
            run(backend, [(short[slot], slot, start, start + 1) for slot in range(width)])

        found = run(
            backend,
            [(one, 1, 40, 60), (other, 2, 40, 60)],
            [Copy(3, 1, 40), Copy(4, 2, 40)],
        )

        assert found == expected
        backend.close()

    @pytest.mark.parametrize("slot", [5, 8, 256, -1])
    def test_unknown_slots(self, backend: Backend, slot: int) -> None:
        """A copy from or to a slot that isn't there is an error, and nothing is changed."""
        open_slots(backend)
        expected = computed(backend, *ONE)
        one = sequence(*ONE)
        run(backend, [(one, 0, 0, 40)])

        for copy in (Copy(0, slot, 40), Copy(slot, 1, 40)):
            with pytest.raises(DecodeError, match=r"outside of 0\.\.4") as refused:
                run(backend, [(one, 0, 40, 60)], [copy])
            assert refused.value.code == -1
        assert run(backend, [(one, 0, 40, 60)]) == [expected]

    def test_rows_are_never_computed_in_the_slots_of_prefixes(self, tiny_model: Path) -> None:
        """Padding may use what llama.cpp has under these numbers."""
        backend = LlamaBackend(str(tiny_model))
        open_slots(backend)

        with pytest.raises(DecodeError, match=r"outside of 0\.\.2"):
            run(backend, [(sequence(*ONE), 3, 0, 60)])
        backend.close()
