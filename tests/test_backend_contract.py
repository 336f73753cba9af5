"""One contract, two backends: what is right, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from localbatch import DecodeError
from localbatch.data.config import SchedulerConfig
from localbatch.engine.backend import Backend, ContextConfig
from localbatch.engine.fake import FakeBackend
from localbatch.engine.llama import LlamaBackend
from localbatch.scheduler.plan import Move, PlanRow, StepPlan
from localbatch.scheduler.scheduler import Scheduler
from localbatch.scheduler.sequence import Sequence
from tests.factories import create_requests

Floats = npt.NDArray[np.float32]


@pytest.fixture(params=["fake", "llama"])
def backend(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[Backend]:
    made = FakeBackend() if request.param == "fake" else LlamaBackend(str(tiny_model))
    yield made
    made.close()


def open_streams(backend: Backend, num_slots: int = 4) -> None:
    backend.open(ContextConfig(num_slots, row_cells=256, pool_cells=None, chunk=512, threads=1))


def open_unified(backend: Backend, pool_cells: int = 1024) -> None:
    config = ContextConfig(4, row_cells=256, pool_cells=pool_cells, chunk=512, threads=1)
    backend.open(config)


@pytest.fixture(params=[open_streams, open_unified], ids=["streams", "unified"])
def opened(request: pytest.FixtureRequest, backend: Backend) -> Backend:
    request.param(backend)
    return backend


def sequence(*tokens: int) -> Sequence:
    return Sequence(create_requests(1)[0], list(tokens))


def row(tokens: Sequence, slot: int, start: int, end: int, *, prefill: bool = True) -> PlanRow:
    return PlanRow(tokens, slot, start, end, end == tokens.num_tokens, prefill)


def run(
    backend: Backend,
    rows: list[PlanRow],
    moves: list[Move] | None = None,
    releases: list[int] | None = None,
) -> list[Floats]:
    """Compute rows; returns the logits of those that want them, each checked to be where it is."""
    seen: list[Floats] = []
    asked: list[Sequence] = []

    def sample(wanting: list[PlanRow], logits: Floats) -> list[int]:
        assert len(wanting) == len(logits)
        asked.extend(r.sequence for r in wanting)
        seen.extend(logits.copy())
        return [100 + len(asked) - len(wanting) + i for i in range(len(wanting))]

    tokens = backend.forward(StepPlan(rows, moves or [], releases or []), sample)  # type: ignore[arg-type]
    wanting = [r.sequence for r in rows if r.wants_logits]
    numbers = iter(range(100, 100 + len(rows)))
    assert asked == wanting
    assert tokens == [next(numbers) if r.wants_logits else None for r in rows]
    assert all(values.shape == (backend.card.num_vocab,) for values in seen)
    return seen


def close(one: Floats, other: Floats) -> bool:
    """Unified rows may differ in the last bits; those of another sequence differ in all."""
    return bool(np.allclose(one, other, atol=0.02))


def logits_alone(backend: Backend, *tokens: int) -> Floats:
    """Return the logits behind some tokens, which are all there is in the cache."""
    backend.clear()
    logits = run(backend, [row(sequence(*tokens), 0, 0, len(tokens))])[0]
    backend.clear()
    return logits


@dataclass
class Served:
    """What came of a scheduler's run."""

    logits: dict[int, list[Floats]] = field(default_factory=dict)
    """By request index, one for each token."""
    moves: int = 0
    releases: int = 0
    preempted: int = 0


def serve(
    backend: Backend, lengths: list[int], *, num_slots: int, pool_cells: int | None
) -> Served:
    """Run prompts of these lengths; row i gets 2 + i % 3 tokens, which are set beforehand.

    So that rows end apart, and slots are left, taken again and moved.
    """
    backend.open(ContextConfig(num_slots, 256, pool_cells, chunk=64, threads=1))
    scheduler = Scheduler(
        SchedulerConfig(num_slots, row_cells=256, pool_cells=pool_cells, chunk=64)
    )
    served = Served()
    for i, length in enumerate(lengths):
        request = create_requests(1, first=i, max_tokens=2 + i % 3)[0]
        scheduler.add(Sequence(request, [10 + (i * 31 + p * 17) % 200 for p in range(length)]))

    def sample(rows: list[PlanRow], logits: Floats) -> list[int]:
        chosen = []
        for plan_row, values in zip(rows, logits, strict=True):
            index = plan_row.sequence.request.index
            mine = served.logits.setdefault(index, [])
            mine.append(values.copy())
            chosen.append(10 + (index * 7 + len(mine) * 13) % 200)
        return chosen

    while scheduler.has_work:
        plan = scheduler.schedule()
        scheduler.update(plan, backend.forward(plan, sample))  # type: ignore[arg-type]
        served.moves += len(plan.moves)
        served.releases += len(plan.releases)
    served.preempted = scheduler.num_preempted
    return served


LENGTHS = [5, 40, 1, 100, 110, 17, 3, 64, 65, 9, 150, 2, 30]
"""The first five fill a pool of 256 cells to the last, so that one of them must give way."""


class TestPlansOfTheScheduler:
    def test_streams(self, backend: Backend) -> None:
        """Rows in shared steps, moved and in used slots get the logits they get one by one."""
        alone = serve(backend, LENGTHS, num_slots=1, pool_cells=None)
        together = serve(backend, LENGTHS, num_slots=5, pool_cells=None)

        assert together.moves > 0
        assert together.releases > 5
        assert sorted(together.logits) == list(range(len(LENGTHS)))
        for i, expected in alone.logits.items():
            assert [2 + i % 3] * 2 == [len(expected), len(together.logits[i])]
            assert all(map(close, expected, together.logits[i]))

    def test_unified(self, backend: Backend) -> None:
        """The same where rows share cells, mix chunks with tokens, and lose their cells."""
        alone = serve(backend, LENGTHS, num_slots=1, pool_cells=256)
        together = serve(backend, LENGTHS, num_slots=5, pool_cells=256)

        assert together.preempted > 0
        for i, expected in alone.logits.items():
            assert [2 + i % 3] * 2 == [len(expected), len(together.logits[i])]
            assert all(map(close, expected, together.logits[i]))


class TestPlansByHand:
    def test_rows_get_the_same_logits_alone_and_together(self, opened: Backend) -> None:
        """Rows come back in the order of the plan, each with its own logits."""
        one, two, three = (9, 10, 11), (12, 13), (9, 10)
        alone = [logits_alone(opened, *tokens) for tokens in (one, two, three)]

        together = run(
            opened,
            [row(sequence(*t), slot, 0, len(t)) for slot, t in enumerate((one, two, three))],
        )

        assert all(map(close, alone, together))
        assert not close(alone[0], alone[1])
        assert not close(alone[0], alone[2])

    def test_a_prompt_in_chunks_is_that_prompt(self, opened: Backend) -> None:
        """Only the last chunk gives logits, those of the whole."""
        whole = sequence(9, 10, 11, 12, 13)
        expected = logits_alone(opened, 9, 10, 11, 12, 13)

        assert run(opened, [row(whole, 1, 0, 3)]) == []
        assert close(expected, run(opened, [row(whole, 1, 3, 5)])[0])

    def test_rows_without_logits_leave_the_others_theirs(self, opened: Backend) -> None:
        """A chunk that is no prompt's last stands before and between rows that want logits."""
        part, two, three = sequence(*range(9, 20)), sequence(12, 13), sequence(14, 15, 16)
        expected = [logits_alone(opened, 12, 13), logits_alone(opened, 14, 15, 16)]

        rows = [row(part, 0, 0, 5), row(two, 1, 0, 2), row(part, 0, 5, 9), row(three, 2, 0, 3)]

        assert all(map(close, expected, run(opened, rows)))

    def test_chunks_and_tokens_share_a_step_in_unified(self, backend: Backend) -> None:
        """As the scheduler plans them: chunks first, then rows that go on."""
        open_unified(backend)
        expected = [logits_alone(backend, 9, 10, 11), logits_alone(backend, 12, 13, 14)]
        one, part = sequence(9, 10, 11), sequence(*range(12, 40))
        run(backend, [row(one, 2, 0, 2)])

        rows = [
            row(part, 0, 0, 20),
            row(sequence(12, 13, 14), 1, 0, 3),
            row(one, 2, 2, 3, prefill=False),
        ]
        found = run(backend, rows)

        assert close(expected[1], found[0])
        assert close(expected[0], found[1])

    def test_tokens_come_from_the_slots_that_the_plan_names(self, backend: Backend) -> None:
        """In unified the rows that go on may have gaps between them."""
        open_unified(backend)
        expected = [logits_alone(backend, 9, 10, 11), logits_alone(backend, 12, 13, 14)]
        one, two = sequence(9, 10, 11), sequence(12, 13, 14)
        run(backend, [row(one, 1, 0, 2), row(two, 3, 0, 2)])

        rows = [row(one, 1, 2, 3, prefill=False), row(two, 3, 2, 3, prefill=False)]

        assert all(map(close, expected, run(backend, rows)))

    def test_a_released_slot_starts_empty(self, opened: Backend) -> None:
        """The next sequence in a slot sees nothing of the one before."""
        expected = logits_alone(opened, 12, 13)
        run(opened, [row(sequence(9, 10, 11), 0, 0, 3)])

        assert close(expected, run(opened, [row(sequence(12, 13), 0, 0, 2)], releases=[0])[0])

    def test_released_cells_are_free_for_other_slots(self, backend: Backend) -> None:
        """A full pool takes a row in another slot as soon as one is released, not before."""
        open_unified(backend, pool_cells=256)
        run(backend, [row(sequence(*[9] * 200), 0, 0, 200)])
        late = row(sequence(*[10] * 100), 1, 0, 100)

        with pytest.raises(DecodeError, match="KV") as refused:
            run(backend, [late])
        assert refused.value.code == 1
        assert len(run(backend, [late], releases=[0, 1])) == 1

    def test_moved_sequences_go_on_where_they_were(self, backend: Backend) -> None:
        """All their cells come along, into slots used before; the slots they leave are empty."""
        open_streams(backend)
        expected = [
            logits_alone(backend, *tokens) for tokens in ((9, 10, 11, 12), (13, 14, 15), (16, 17))
        ]
        one, two, new = sequence(9, 10, 11, 12), sequence(13, 14, 15), sequence(16, 17)
        run(backend, [row(sequence(20 + i, 21, 22, 23, 24), i, 0, 5) for i in (0, 1)])
        run(backend, [row(one, 2, 0, 3), row(two, 3, 0, 2)])

        found = run(
            backend,
            [row(two, 0, 2, 3, prefill=False), row(one, 1, 3, 4, prefill=False)],
            moves=[Move(3, 0), Move(2, 1)],
            releases=[0, 1],
        )
        found += run(backend, [row(new, 2, 0, 2)])

        assert close(expected[1], found[0])
        assert close(expected[0], found[1])
        assert close(expected[2], found[2])

    def test_clear_empties_all_slots(self, opened: Backend) -> None:
        """No row goes on behind what was there before.

        llama.cpp lets a sequence begin at any place, so it may not be an error either.
        """
        before = logits_alone(opened, 9, 10, 11, 12)
        going_on = sequence(9, 10, 11, 12)
        run(opened, [row(sequence(9, 10, 11), slot, 0, 3) for slot in range(4)])

        opened.clear()

        for slot in range(4):
            try:
                found = run(opened, [row(going_on, slot, 3, 4)])
            except DecodeError:
                continue
            assert not close(before, found[0])

    def test_clear_frees_all_cells(self, backend: Backend) -> None:
        """A pool that was full takes as many tokens again."""
        open_unified(backend, pool_cells=256)
        run(backend, [row(sequence(*[9] * 128), slot, 0, 128) for slot in (0, 1)])

        backend.clear()

        assert len(run(backend, [row(sequence(*[9] * 256), 2, 0, 256)])) == 1

    def test_open_makes_a_new_cache(self, backend: Backend) -> None:
        """Of the new size, empty, and with the time of the old one still counted."""
        open_streams(backend, num_slots=1)
        expected = run(backend, [row(sequence(9, 10), 0, 0, 2)])[0]
        spent = backend.decode_s

        open_streams(backend, num_slots=2)
        found = run(backend, [row(sequence(9, 10), i, 0, 2) for i in (0, 1)])

        assert close(expected, found[0])
        assert close(expected, found[1])
        assert backend.decode_s > spent > 0


class TestRefusals:
    @pytest.mark.parametrize("start", [0, 2])
    @pytest.mark.parametrize("slot", [4, 8, 255, 256, 10**6, -1])
    def test_unknown_slots(self, opened: Backend, slot: int, start: int) -> None:
        """A slot that isn't there is an error and no crash."""
        with pytest.raises(DecodeError, match=r"slot .* outside of 0\.\.3") as refused:
            run(opened, [row(sequence(9, 10, 11), slot, start, 3, prefill=start == 0)])

        assert refused.value.code == -1

    @pytest.mark.parametrize("slot", [4, 300, -1])
    def test_unknown_slots_of_moves_and_releases(self, opened: Backend, slot: int) -> None:
        """There, too, before anything is done."""
        expected = logits_alone(opened, 9, 10, 11)
        one = sequence(9, 10, 11)
        run(opened, [row(one, 0, 0, 2)])
        last = row(one, 0, 2, 3, prefill=False)

        for moves, releases in (([], [slot]), ([Move(0, slot)], []), ([Move(slot, 1)], [])):
            with pytest.raises(DecodeError, match="slot") as refused:
                run(opened, [last], moves, releases)
            assert refused.value.code == -1
        assert close(expected, run(opened, [last])[0])

    @pytest.mark.parametrize("start", [2, 3])
    def test_a_gap_in_the_positions(self, opened: Backend, start: int) -> None:
        """A token whose place is not the next one of its slot."""
        one = sequence(9, 10, 11, 12)
        run(opened, [row(one, 0, 0, 1)])

        with pytest.raises(DecodeError) as refused:
            run(opened, [row(one, 0, start, start + 1, prefill=False)])

        assert refused.value.code == -1

    def test_a_token_computed_twice(self, opened: Backend) -> None:
        """A token whose place is taken."""
        one = sequence(9, 10, 11, 12)
        run(opened, [row(one, 0, 0, 3)])

        with pytest.raises(DecodeError) as refused:
            run(opened, [row(one, 0, 1, 2, prefill=False)])

        assert refused.value.code == -1

    @pytest.mark.parametrize("token", [-1, 10**6])
    def test_a_token_outside_of_the_vocabulary(self, opened: Backend, token: int) -> None:
        """No model knows it."""
        with pytest.raises(DecodeError) as refused:
            run(opened, [row(sequence(9, token), 0, 0, 2)])

        assert refused.value.code == -1

    def test_a_row_longer_than_its_cells(self, backend: Backend) -> None:
        """A full cache is an error with code 1, as in llama.cpp."""
        open_streams(backend, num_slots=2)
        long = sequence(*[9] * 257)
        run(backend, [row(long, 0, 0, 256)])

        with pytest.raises(DecodeError) as refused:
            run(backend, [row(long, 0, 256, 257, prefill=False)])

        assert refused.value.code == 1

    def test_rows_that_fill_the_pool(self, backend: Backend) -> None:
        """Each has room by itself; together they are too many."""
        open_unified(backend, pool_cells=256)
        run(backend, [row(sequence(*[9] * 200), 0, 0, 200)])

        with pytest.raises(DecodeError) as refused:
            run(backend, [row(sequence(*[9] * 57), 1, 0, 57)])

        assert refused.value.code == 1

    def test_the_next_plan_works_as_ever(self, opened: Backend) -> None:
        """An error leaves nothing behind in the slots that are released for it."""
        expected = logits_alone(opened, 9, 10)
        other = sequence(11, 12, 13, 14)
        run(opened, [row(other, 0, 0, 1)])
        with pytest.raises(DecodeError):
            run(opened, [row(other, 0, 2, 3, prefill=False)])

        assert close(expected, run(opened, [row(sequence(9, 10), 0, 0, 2)], releases=[0])[0])


class TestTokens:
    @pytest.mark.parametrize("text", ["a", "Grüße, 世界 🎉", " two  spaces ", "line\nline\t\0"])
    def test_text_goes_through_tokens_and_back(self, backend: Backend, text: str) -> None:
        """Any text; SentencePiece puts one space before it."""
        tokens = backend.tokenize(text, add_special=False, parse_special=False)

        space = " " if isinstance(backend, LlamaBackend) else ""
        assert b"".join(map(backend.token_bytes, tokens)) == (space + text).encode()

    def test_bos_comes_first_if_asked_for(self, backend: Backend) -> None:
        """Both models want one."""
        plain = backend.tokenize("ab", add_special=False, parse_special=False)

        tokens = backend.tokenize("ab", add_special=True, parse_special=False)

        assert tokens == [backend.card.bos_token, *plain]

    def test_control_tokens_have_no_bytes(self, backend: Backend) -> None:
        """They are no part of an answer's text."""
        card = backend.card
        controls = {card.bos_token, card.eos_token, *card.end_tokens} - {None}

        assert len(controls) == 2
        assert [backend.token_bytes(t or 0) for t in controls] == [b"", b""]

    def test_every_token_of_the_vocabulary_has_bytes_or_none(self, backend: Backend) -> None:
        """The first that is outside is refused; llama.cpp would abort."""
        lengths = [len(backend.token_bytes(t)) for t in range(backend.card.num_vocab)]

        assert lengths.count(1) >= 256
        with pytest.raises(ValueError):  # noqa: PT011 - the words differ
            backend.token_bytes(backend.card.num_vocab)
