"""Which rows share a call, and that prompts made equally long leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localbatch import Completion, Request, SamplingParams
from localbatch.data.config import EngineConfig
from localbatch.engine import lanes
from localbatch.engine.backend import Backend, ContextConfig, Logits, Numerics
from localbatch.engine.batches import calls, steady
from localbatch.engine.engine import Engine
from localbatch.engine.fake import FakeBackend
from localbatch.engine.llama import LlamaBackend
from localbatch.engine.placement import Gpu, Placement
from localbatch.engine.rows import TextPiece
from localbatch.scheduler.plan import PlanRow, StepPlan
from localbatch.scheduler.sequence import Sequence as TokenSequence

GROUPED = ContextConfig(8, 256, None, 512, 1, pass_tokens=256, full_passes=True)
ON_CPU = ContextConfig(8, 256, None, 128, 1, pass_tokens=256)
ALONE = ContextConfig(8, 256, None, 512, 1)


def prompt(slot: int, length: int) -> PlanRow:
    tokens = [(7 * slot + 13 * i) % 300 for i in range(length)]
    sequence = TokenSequence(Request(slot, slot, prompt="-"), tokens)
    return PlanRow(sequence, slot, 0, length, wants_logits=True, is_prefill=True)


def following(row: PlanRow) -> PlanRow:
    """Return the decode row after a prompt."""
    row.sequence.tokens.append(5)
    return PlanRow(row.sequence, row.slot, row.end, row.end + 1, True, False)


rows_of_prompts = st.lists(st.integers(1, 300), min_size=1, max_size=40).map(
    lambda lengths: [prompt(slot, length) for slot, length in enumerate(lengths)]
)


class TestGroups:
    @given(rows_of_prompts)
    def test_each_row_is_in_one_call(self, rows: list[PlanRow]) -> None:
        """Slots ascend within a call; no call is over the size of a pass, or mostly filling."""
        found = list(calls(rows, GROUPED, 512))

        assert sorted(r.slot for call in found for r in call) == [r.slot for r in rows]
        for call in found:
            lengths = [row.end - row.start for row in call]
            assert all(a.slot < b.slot for a, b in pairwise(call))
            if len(call) > 1:
                assert len(call) * max(lengths) <= 256
                assert sum(lengths) >= 0.75 * len(call) * max(lengths)

    def test_equal_prompts_fill_a_pass(self) -> None:
        """Ten prompts of 60 tokens: four are 240 of 256."""
        found = list(calls([prompt(slot, 60) for slot in range(10)], GROUPED, 512))
        assert [len(call) for call in found] == [4, 4, 2]

    def test_other_starts_go_apart(self) -> None:
        """Their positions would not be those of a prompt of the same length."""
        first, second = prompt(0, 60), prompt(1, 60)
        later = PlanRow(second.sequence, 1, 20, 60, wants_logits=True, is_prefill=True)
        assert [len(call) for call in calls([first, later], GROUPED, 512)] == [1, 1]

    def test_on_a_cpu_only_first_chunks_share(self) -> None:
        """Chunks behind others take longer together; a twentieth may be there to fill up."""
        later = [prompt(slot, 60)._replace(start=20) for slot in range(2)]
        assert [len(call) for call in calls(later, ON_CPU, 512)] == [1, 1]

        lengths = [50, 50, 48, 40]
        firsts = [prompt(slot, length) for slot, length in enumerate(lengths)]
        assert [len(call) for call in calls(firsts, ON_CPU, 512)] == [3, 1]

    def test_slots_side_by_side(self) -> None:
        """Else llama.cpp would compute them apart, and what fills them up for nothing."""
        rows = [prompt(slot, 60) for slot in (0, 1, 3)]
        assert [len(call) for call in calls(rows, ON_CPU, 512)] == [2, 1]

    def test_alone_unless_they_may_share(self) -> None:
        """So that a row's bits are its own."""
        rows = [prompt(slot, 60) for slot in range(3)]
        assert [len(call) for call in calls(rows, ALONE, 512)] == [1, 1, 1]


@given(st.integers(1, 256))
def test_steady_sizes(rows: int) -> None:
    """There are few of them, none is smaller than asked for, and up to 8 rows are as they are."""
    assert rows <= steady(rows) <= min(256, rows + 15)
    assert steady(rows) == rows or rows > 8
    assert len({steady(n) for n in range(9, 257)}) == 7 + 12


@pytest.fixture
def backend(tiny_model: Path) -> Iterator[LlamaBackend]:
    made = LlamaBackend(str(tiny_model))
    yield made
    made.close()


def logits_of(backend: LlamaBackend, steps: Sequence[Sequence[PlanRow]]) -> list[Logits]:
    """Return the last step's logits, by row."""
    seen: dict[int, Logits] = {}

    def keep(rows: Sequence[PlanRow], logits: Logits) -> list[int]:
        seen.update({row.slot: logits[i].copy() for i, row in enumerate(rows)})
        return [0 for _ in rows]

    for rows in steps:
        backend.forward(StepPlan(list(rows), [], []), keep)
    return [seen[row.slot] for row in steps[-1]]


def test_prompts_made_equally_long_are_as_alone(backend: LlamaBackend) -> None:
    """Their logits, and those of the token after, up to rounding: what filled them up is gone."""
    lengths = [50, 47, 60, 52, 45, 60]

    def computed(config: ContextConfig) -> tuple[list[Logits], list[Logits]]:
        backend.open(config)
        prompts = [prompt(slot, length) for slot, length in enumerate(lengths)]
        first = logits_of(backend, [prompts])
        second = logits_of(backend, [[following(row) for row in prompts]])
        return first, second

    grouped, alone = computed(GROUPED), computed(ALONE)

    assert len(list(calls([prompt(i, n) for i, n in enumerate(lengths)], GROUPED, 512))) == 2
    for mine, others in zip(grouped, alone, strict=True):
        np.testing.assert_allclose(mine, others, rtol=1e-2, atol=1e-2)


def test_shared_passes_change_no_bit(tiny_models: dict[str, Path]) -> None:
    """Of prompts, and of the tokens after them; where kernels change with the rows, none share."""
    lengths = [50, 49, 49, 30, 30, 7, 7, 1, 1]

    def computed(backend: LlamaBackend, pass_tokens: int | None) -> tuple[Numerics, list[Logits]]:
        shape = ContextConfig(len(lengths), 256, None, 128, 1, pass_tokens=pass_tokens)
        numerics = backend.open(shape)
        prompts = [prompt(slot, length) for slot, length in enumerate(lengths)]
        first = logits_of(backend, [prompts])
        return numerics, first + logits_of(backend, [[following(row) for row in prompts]])

    for kind, path in tiny_models.items():
        backend = LlamaBackend(str(path))
        numerics, together = computed(backend, 256)
        calls_together = backend.num_calls
        _, alone = computed(backend, None)
        calls_alone = backend.num_calls - calls_together
        backend.close()

        assert (calls_together < calls_alone) == (numerics is Numerics.SAME_AS_ALONE), kind
        for mine, others in zip(together, alone, strict=True):
            np.testing.assert_array_equal(mine.view(np.uint32), others.view(np.uint32), kind)


def rows_of_all_kinds() -> list[Request]:
    """Return rows with common beginnings, other lengths, and answers from 1 to 40 tokens."""
    heads = ["", "of the and to in is that it for was on are as " * 3, "was that it is " * 9]
    return [
        Request(
            i, i, prompt=heads[i % 3] + " ".join(chr(97 + (i * k) % 26) for k in range(i % 23 + 2)),
            params=SamplingParams(max_tokens=1 + (i * 17) % 40, ignore_eos=True),
        )
        for i in range(70)
    ]  # fmt: skip


def answers_of(backend: Backend) -> dict[int, tuple[int, ...]]:
    """Return the tokens of `rows_of_all_kinds`, at most 8 rows at a time."""
    engine = Engine(backend, EngineConfig("m", parallel=8, lanes=1, ctx=512, threads=1))
    engine.submit(rows_of_all_kinds())
    done: list[Completion | TextPiece] = []
    while engine.has_work:
        done += engine.step()
    engine.close()
    return {c.index: c.token_ids for c in done if isinstance(c, Completion)}


def test_answers_do_not_depend_on_shared_passes() -> None:
    """The stand-in finds any mistake in slots, positions and copies as it would on a GPU."""
    on_gpu = Placement((Gpu("FAKE0", "no device", 1, 1),), -1)
    assert answers_of(FakeBackend(placement=on_gpu)) == answers_of(FakeBackend())


@pytest.mark.parametrize(("mib", "num_lanes"), [(10_000, 4), (600, 2), (300, 1), (90, 1)])
def test_lanes_leave_memory_for_rows(
    monkeypatch: pytest.MonkeyPatch, mib: int, num_lanes: int
) -> None:
    """A lane's buffers take 2,048 x (258 x 4 + 32,000) bytes, 64.5 MiB; a quarter may be that."""
    monkeypatch.setattr(FakeBackend, "free_bytes", lambda _: mib << 20)
    on_gpu = Placement((Gpu("FAKE0", "no device", 1, 1),), -1)
    engine = Engine(FakeBackend(placement=on_gpu), EngineConfig("m", ctx=512))
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    engine.submit([Request(i, i, prompt=f"row {i}", params=params) for i in range(512)])
    engine.prepare()
    assert engine.stats.lanes == num_lanes


def test_answers_of_llama_with_shared_passes(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounding may turn a few of the 70; a wrong cell would turn most."""
    alone = answers_of(LlamaBackend(str(tiny_model)))
    fit = lanes.fit_context
    monkeypatch.setattr(
        lanes, "fit_context", lambda *a, **k: replace(fit(*a, **k), pass_tokens=512, chunk=512)
    )
    monkeypatch.setattr(LlamaBackend, "free_bytes", lambda _: 1 << 30)
    monkeypatch.setattr(LlamaBackend, "open", opened_as_on_a_gpu(LlamaBackend.open))
    together = answers_of(LlamaBackend(str(tiny_model)))
    assert sum(alone[i] == together[i] for i in range(70)) >= 63


def opened_as_on_a_gpu(
    method: Callable[[LlamaBackend, ContextConfig], Numerics],
) -> Callable[[LlamaBackend, ContextConfig], Numerics]:
    """Return `LlamaBackend.open` that makes no promise of bits."""

    def open_it(backend: LlamaBackend, config: ContextConfig) -> Numerics:
        backend.on_gpu = True
        return method(backend, config)

    return open_it
