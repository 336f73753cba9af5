"""One contract, two backends: what is right, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from localbatch import DecodeError
from localbatch.engine.backend import Backend, ContextConfig
from localbatch.engine.fake import FakeBackend
from localbatch.engine.llama import LlamaBackend
from localbatch.scheduler.plan import Move, PlanRow, StepPlan
from localbatch.scheduler.sequence import Sequence
from tests.factories import create_requests


@pytest.fixture(params=["fake", "llama"])
def backend(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[Backend]:
    made = FakeBackend() if request.param == "fake" else LlamaBackend(str(tiny_model))
    yield made
    made.close()


@pytest.fixture(params=["streams", "unified"])
def opened(request: pytest.FixtureRequest, backend: Backend) -> Backend:
    pool = 1024 if request.param == "unified" else None
    backend.open(ContextConfig(4, row_cells=256, pool_cells=pool, chunk=512, threads=1))
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
) -> list[np.ndarray]:
    """Compute rows; returns the logits of those that want them."""
    seen: list[np.ndarray] = []

    def sample(wanting: object, logits: np.ndarray) -> list[int]:
        seen.extend(logits.copy())
        return [5] * len(logits)

    tokens = backend.forward(StepPlan(rows, moves or [], releases or []), sample)  # type: ignore[arg-type]
    assert [5 if r.wants_logits else None for r in rows] == tokens
    return seen


def close(one: np.ndarray, other: np.ndarray) -> bool:
    """Unified rows may differ in the last bits; those of another sequence differ in all."""
    return bool(np.allclose(one, other, atol=0.05))


def test_a_row_gets_the_same_logits_alone_and_among_others(opened: Backend) -> None:
    """Rows come back in the order of the plan, each with its own logits."""
    one, two = sequence(9, 10, 11), sequence(12, 13)
    together = run(opened, [row(one, 0, 0, 3), row(two, 1, 0, 2)])
    alone = []
    for tokens in (one, two):
        opened.clear()
        alone += run(opened, [row(tokens, 0, 0, tokens.num_tokens)])

    assert close(together[0], alone[0])
    assert close(together[1], alone[1])
    assert not close(together[0], together[1])


def test_a_prompt_in_chunks_is_that_prompt(opened: Backend) -> None:
    """Only the last chunk gives logits, those of the whole."""
    whole = sequence(9, 10, 11, 12, 13)
    expected = run(opened, [row(whole, 0, 0, 5)])[0]

    assert run(opened, [row(whole, 1, 0, 3)]) == []
    assert close(expected, run(opened, [row(whole, 1, 3, 5)])[0])


def test_a_released_slot_starts_empty(opened: Backend) -> None:
    """The next sequence in a slot sees nothing of the one before."""
    one, two = sequence(9, 10, 11), sequence(12, 13)
    expected = run(opened, [row(two, 1, 0, 2)])[0]
    run(opened, [row(one, 0, 0, 3)])

    assert close(expected, run(opened, [row(two, 0, 0, 2)], releases=[0])[0])


def test_a_moved_sequence_goes_on_where_it_was(backend: Backend) -> None:
    """All its cells come along, and the slot it leaves is empty."""
    backend.open(ContextConfig(4, row_cells=256, pool_cells=None, chunk=512, threads=1))
    one, two = sequence(9, 10, 11, 12), sequence(13, 14)
    run(backend, [row(one, 0, 0, 3)])
    expected = run(backend, [row(one, 0, 3, 4, prefill=False)])[0]
    backend.clear()
    run(backend, [row(one, 2, 0, 3)])

    moved = run(backend, [row(one, 0, 3, 4, prefill=False)], moves=[Move(2, 0)])[0]

    assert close(expected, moved)
    assert len(run(backend, [row(two, 2, 0, 2)])) == 1


@pytest.mark.parametrize(("slot", "start"), [(0, 2), (4, 0), (-1, 0)])
def test_gaps_and_unknown_slots_are_refused(opened: Backend, slot: int, start: int) -> None:
    """A position that does not follow, or a slot that isn't there, is an error and no crash."""
    one = sequence(9, 10, 11, 12)
    run(opened, [row(one, 0, 0, 1)])

    with pytest.raises(DecodeError):
        run(opened, [row(one, slot, start, 4, prefill=False)])


def test_a_row_longer_than_its_cells_is_refused(backend: Backend) -> None:
    """A full cache is an error with code 1, as in llama.cpp."""
    backend.open(ContextConfig(2, row_cells=256, pool_cells=None, chunk=512, threads=1))

    with pytest.raises(DecodeError) as refused:
        run(backend, [row(sequence(*[9] * 300), 0, 0, 300)])

    assert refused.value.code == 1


def test_text_goes_through_tokens_and_back(backend: Backend) -> None:
    """Any UTF-8 text, and control tokens add nothing."""
    text = "Grüße, 世界 🎉"
    tokens = backend.tokenize(text, add_special=False, parse_special=False)

    assert text == b"".join(map(backend.token_bytes, tokens)).decode().removeprefix(" ")
    assert backend.token_bytes(backend.card.bos_token or 0) == b""
