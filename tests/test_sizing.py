"""Context sizes, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from localbatch.data.config import EngineConfig
from localbatch.data.errors import ConfigError
from localbatch.engine.fake import FakeBackend
from localbatch.engine.sizing import fit_context, kv_bytes, wanted_slots

CARD = replace(FakeBackend().card, kv_bytes_per_cell=1 << 20)  # a MiB a token
GIB = 1 << 30


def test_cells_are_rounded_up_to_256() -> None:
    """llama.cpp hands out cells by 256."""
    context = fit_context(EngineConfig("m", threads=1), CARD, 2, 300, on_gpu=False, memory=8 * GIB)

    assert (context.num_slots, context.row_cells) == (2, 512)
    assert kv_bytes(CARD, 2, 512) == 2 * 512 * (1 << 20)


def test_batch_shrinks_to_the_memory_there_is() -> None:
    """Of 4 GiB 0.8 may be used: 3,276.8 MiB hold 6 rows of 512 MiB."""
    context = fit_context(EngineConfig("m"), CARD, 32, 512, on_gpu=False, memory=4 * GIB)

    assert context.num_slots == 6


def test_a_batch_asked_for_that_does_not_fit_is_refused_with_the_numbers() -> None:
    """The message has the arithmetic and the largest setting that fits."""
    with pytest.raises(ConfigError) as refused:
        fit_context(EngineConfig("m", parallel=8), CARD, 8, 512, on_gpu=False, memory=4 * GIB)

    assert str(refused.value) == (
        "the KV cache would take 8 rows x 512 tokens = 4,096 MiB, but only 3,277 MiB may be used; "
        "try --parallel 6"
    )


def test_slots_are_at_most_the_rows() -> None:
    """Three rows need three slots; more rows than the default get the default."""
    assert wanted_slots(EngineConfig("m"), 3, on_gpu=False) == 3
    assert wanted_slots(EngineConfig("m"), 1000, on_gpu=False) == 64
    assert wanted_slots(EngineConfig("m", parallel=2), 1000, on_gpu=False) == 2
