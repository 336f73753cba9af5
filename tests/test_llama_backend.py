"""The llama.cpp backend: a row's bits do not depend on the rows beside it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from localbatch import BindingError, ModelError
from localbatch.data.config import SchedulerConfig
from localbatch.engine import binding
from localbatch.engine.backend import ContextConfig, Numerics
from localbatch.engine.llama import LlamaBackend
from localbatch.engine.numerics import probe
from localbatch.scheduler.plan import PlanRow
from localbatch.scheduler.scheduler import Scheduler
from localbatch.scheduler.sequence import Sequence
from tests import tiny_gguf
from tests.factories import create_requests

Bits = npt.NDArray[np.uint32]
STEPS = 4
LENGTHS = [5, 1, 2, 40, 3, 17, 64, 9, 30, 8, 4, 33]


def prompt_of(index: int, length: int) -> list[int]:
    return [7 + (index * 31 + place * 17) % 300 for place in range(length)]


def logits_of(
    backend: LlamaBackend, prompts: list[list[int]], num_slots: int, threads: int = 1
) -> list[list[Bits]]:
    """Run prompts to STEPS tokens each; returns the bits of each row's logits at each step.

    The next token of a row is set by its place and step, so that rows can be compared.
    """
    config = ContextConfig(num_slots, row_cells=1024, pool_cells=None, chunk=512, threads=threads)
    backend.open(config)
    scheduler = Scheduler(SchedulerConfig(num_slots=num_slots, row_cells=1024))
    requests = create_requests(len(prompts), max_tokens=STEPS)
    sequences = [Sequence(r, tokens) for r, tokens in zip(requests, prompts, strict=True)]
    place = {id(s): i for i, s in enumerate(sequences)}
    seen: list[list[Bits]] = [[] for _ in prompts]

    def choose(rows: list[PlanRow], logits: npt.NDArray[np.float32]) -> list[int]:
        chosen = []
        for row, values in zip(rows, logits, strict=True):
            mine = seen[place[id(row.sequence)]]
            mine.append(values.copy().view(np.uint32))
            chosen.append(10 + (sum(row.sequence.tokens[:3]) + len(mine)) % 200)
        return chosen

    for sequence in sequences:
        scheduler.add(sequence)
    while scheduler.has_work:
        plan = scheduler.schedule()
        scheduler.update(plan, backend.forward(plan, choose))  # type: ignore[arg-type]
    return seen


def assert_same(expected: list[list[Bits]], actual: list[list[Bits]]) -> None:
    for row, (one, other) in enumerate(zip(expected, actual, strict=True)):
        assert len(one) == len(other) == STEPS
        for step in range(STEPS):
            assert np.array_equal(one[step], other[step]), f"row {row}, step {step}"


@pytest.mark.parametrize("kind", sorted(tiny_gguf.FILE_TYPES))
def test_logits_are_the_same_bits_in_any_batch(tiny_models: dict[str, Path], kind: str) -> None:
    """Whatever the batch size, the neighbours (one of 700 tokens), the place and the threads."""
    backend = LlamaBackend(str(tiny_models[kind]))
    prompts = [prompt_of(i, length) for i, length in enumerate(LENGTHS)]
    reference = logits_of(backend, prompts, num_slots=1)

    for num_slots in (2, 3, 8, 9, 12):
        assert_same(reference, logits_of(backend, prompts, num_slots, threads=1 + num_slots % 2))
    many = [prompt_of(99, 700), *[prompt_of(50 + i, 20) for i in range(20)], *prompts]
    assert_same(reference, logits_of(backend, many, num_slots=33)[21:])
    backend.close()


def test_logits_of_long_prompts_do_not_depend_on_the_batch(tiny_model: Path) -> None:
    """Prompts around the border of a chunk, and of two."""
    backend = LlamaBackend(str(tiny_model))
    prompts = [prompt_of(i, length) for i, length in enumerate([511, 512, 513, 514, 700, 1000])]

    reference = logits_of(backend, prompts, num_slots=1)

    assert_same(reference, logits_of(backend, prompts, num_slots=4))
    assert_same(reference[::-1], logits_of(backend, prompts[::-1], num_slots=6))
    backend.close()


@pytest.mark.parametrize("kind", ["q8_0", "q4_1", "f16"])
def test_same_as_alone_means_a_context_of_one_sequence(
    tiny_models: dict[str, Path], kind: str
) -> None:
    """Where the probe says so, logits have the bits of a plain single-sequence context."""
    model = binding.Model(str(tiny_models[kind]))
    numerics = probe(model, threads=1)
    context = binding.Context(
        model, binding.ContextShape(1, 256, 64, 64, threads=1, unified=True, flash_attention=False)
    )
    prompt = prompt_of(0, 9)
    alone = []
    for start, tokens in ((0, prompt), (9, [10 + (sum(prompt[:3]) + 1) % 200])):
        n = len(tokens)
        context.tokens[:n], context.wants[:n] = tokens, 0
        context.positions[:n] = np.arange(start, start + n)
        context.set_slots(0, n, 0)
        context.wants[n - 1] = 1
        assert context.decode(n) == 0
        alone.append(context.logits(1)[0].copy().view(np.uint32))
    context.close()
    model.close()

    backend = LlamaBackend(str(tiny_models[kind]))
    batched = logits_of(backend, [prompt, *[prompt_of(i, 20) for i in range(1, 12)]], num_slots=12)
    backend.close()

    assert np.array_equal(alone[0], batched[0][0])
    if numerics is Numerics.SAME_AS_ALONE:
        assert np.array_equal(alone[1], batched[0][1])


def test_a_damaged_model_is_refused_with_llama_cpps_reason(
    tiny_model: Path, tmp_path: Path
) -> None:
    """The message names the file and says what is wrong with it."""
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny_model.read_bytes()[:-1000])

    with pytest.raises(ModelError, match=r"cut\.gguf: .*not within the file bounds"):
        LlamaBackend(str(cut))


def test_a_binding_without_a_field_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """A structure that lacks a field would be written at the wrong place."""

    class Other:
        _fields_ = [("n_ctx", int)]  # noqa: RUF012 - as ctypes has it

    monkeypatch.setattr(binding.lib, "llama_context_params", Other)

    with pytest.raises(BindingError, match=r"does not fit \(llama_context_params lacks .*n_batch"):
        binding.check_binding()


def test_a_binding_with_shifted_fields_is_refused_in_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Documented defaults that are not in their places mean another layout."""
    params = binding.lib.llama_context_default_params()
    params.n_batch = 0
    monkeypatch.setattr(binding.lib, "llama_context_default_params", lambda: params)

    with pytest.raises(BindingError, match="llama_context_params reads as"):
        binding.check_binding()
