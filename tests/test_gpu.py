"""On a real GPU; skipped where llama.cpp finds none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from localbatch import LLM, SamplingParams
from localbatch.data.config import EngineConfig
from localbatch.engine.backend import ContextConfig, Logits
from localbatch.engine.llama import LlamaBackend, find_placement, found_gpus
from localbatch.scheduler.plan import PlanRow, StepPlan
from tests.test_batches import following, prompt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not found_gpus(), reason="llama.cpp finds no GPU"),
]


def logits_of(backend: LlamaBackend, rows: list[PlanRow]) -> Logits:
    seen: dict[int, Logits] = {}

    def keep(rows: Sequence[PlanRow], logits: Logits) -> list[int]:
        seen.update({row.slot: logits[i].copy() for i, row in enumerate(rows)})
        return [0 for _ in rows]

    backend.forward(StepPlan(rows, [], []), keep)
    return np.stack([seen[row.slot] for row in rows])


def test_logits_are_those_of_the_cpu(tiny_model: Path) -> None:
    """Up to rounding: prompts of several lengths in one pass, and the token after each."""
    context = ContextConfig(20, 256, None, 512, 1, flash_attention=True, pass_tokens=2048)
    lengths = [60, 52, 45, 61, 100, 7, 58, 58, 59, 60, 61, 62]
    found = []
    for layers in (0, None):
        placement = find_placement(EngineConfig(str(tiny_model), gpu_layers=layers))
        backend = LlamaBackend(str(tiny_model), placement=placement)
        assert backend.on_gpu is (layers is None)
        backend.open(context)
        prompts = [prompt(slot, length) for slot, length in enumerate(lengths)]
        both = [logits_of(backend, prompts)]
        found.append([*both, logits_of(backend, [following(row) for row in prompts])])
        backend.close()
    for on_cpu, on_gpu in zip(*found, strict=True):
        spread = float(np.std(on_cpu))
        assert float(np.abs(on_cpu - on_gpu).max()) < 0.1 * spread


@pytest.mark.parametrize("settings", [{}, {"lanes": 2, "parallel": 8}, {"parallel": 300}])
def test_every_row_is_answered(tiny_model: Path, settings: dict[str, int]) -> None:
    """With as many tokens as were asked for, whatever rows and lanes there are."""
    prompts = [f"row {i} " + "word " * (i % 37) for i in range(400)]
    params = [SamplingParams(max_tokens=1 + i % 50, ignore_eos=True) for i in range(400)]
    with LLM(str(tiny_model), **settings) as llm:  # type: ignore[arg-type]
        done = llm.generate(prompts, params, raw=True)
        assert "CUDA" in llm.card.placement or "on " in llm.card.placement
    assert [c.usage.completion_tokens for c in done] == [1 + i % 50 for i in range(400)]
    assert not any(c.error for c in done)


def test_seeds_hold(tiny_model: Path) -> None:
    """The same seed draws the same numbers; most answers are the same in another batch."""
    prompts = [f"row {i}" for i in range(40)]
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=3, ignore_eos=True)
    with LLM(str(tiny_model)) as llm:
        first = [c.token_ids for c in llm.generate(prompts, params, raw=True)]
        again = [c.token_ids for c in llm.generate(prompts, params, raw=True)]
    assert sum(a == b for a, b in zip(first, again, strict=True)) >= 30


def test_what_does_not_fit_is_refused_in_words(tiny_model: Path) -> None:
    """Before llama.cpp tries."""
    with LLM(str(tiny_model), parallel=256, ctx=2**22) as llm:
        params = SamplingParams(max_tokens=2**22 - 100, ignore_eos=True)
        with pytest.raises(Exception, match="MiB may be used"):
            llm.generate([f"hello {i}" for i in range(256)], params, raw=True)
