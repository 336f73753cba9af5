"""Context sizes, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from localbatch.data.config import EngineConfig, FlashAttention, KVLayout
from localbatch.data.errors import ConfigError
from localbatch.engine import sizing
from localbatch.engine.backend import ContextConfig
from localbatch.engine.fake import FakeBackend
from localbatch.engine.sizing import CPU_SLOTS, GPU_SLOTS, fit_context, kv_bytes, wanted_slots

MIB, GIB = 1 << 20, 1 << 30
CARD = replace(FakeBackend().card, kv_bytes_per_cell=MIB)  # a MiB a token


def fit(
    slots: int, cells: int, memory: int, *, on_gpu: bool = False, **settings: Any
) -> ContextConfig:
    config = EngineConfig("m", **{"threads": 1, **settings})
    return fit_context(config, CARD, slots, cells, on_gpu, memory)


class TestFitContext:
    def test_the_whole_context_by_hand(self) -> None:
        """Two rows of 300 tokens: cells by 256, chunks of 128, no flash attention on the CPU."""
        assert fit(2, 300, memory=8 * GIB) == ContextConfig(
            num_slots=2, row_cells=512, pool_cells=None, chunk=128, threads=1,
            flash_attention=False, pass_tokens=256,
        )  # fmt: skip

    @pytest.mark.parametrize(
        ("settings", "tokens"), [({"ubatch": 64}, 64), ({"kv_layout": KVLayout.UNIFIED}, None)]
    )
    def test_prompts_that_share_a_pass(self, settings: dict[str, Any], tokens: int | None) -> None:
        """No more tokens than a pass may have by hand; in the unified layout all share anyway."""
        assert fit(2, 300, 8 * GIB, **settings).pass_tokens == tokens

    @pytest.mark.parametrize(("cells", "rounded"), [(1, 256), (256, 256), (257, 512), (512, 512)])
    def test_cells_are_rounded_up_to_256(self, cells: int, rounded: int) -> None:
        """llama.cpp hands out cells by 256."""
        assert fit(1, cells, memory=GIB).row_cells == rounded

    def test_kv_bytes(self) -> None:
        """Rows x cells x bytes of a cell: 2 x 512 x 1 MiB = 1 GiB."""
        assert kv_bytes(CARD, 2, 512) == GIB

    @pytest.mark.parametrize(
        ("memory", "slots"), [(4 * GIB, 6), (640 * MIB, 1), (1280 * MIB - 2, 1), (1280 * MIB, 2)]
    )
    def test_the_batch_shrinks_to_the_memory_there_is(self, memory: int, slots: int) -> None:
        """Of 4 GiB 0.8 may be used: 3,276.8 MiB hold 6 rows of 512 MiB; 0.8 x 1,280 is two."""
        assert fit(32, 512, memory).num_slots == slots

    def test_a_batch_asked_for_that_does_not_fit_is_refused_with_the_numbers(self) -> None:
        """The message has the arithmetic and the largest setting that fits."""
        with pytest.raises(ConfigError) as refused:
            fit(8, 512, memory=4 * GIB, parallel=8)

        assert str(refused.value) == (
            "the KV cache would take 8 rows x 512 tokens = 4,096 MiB, "
            "but only 3,277 MiB may be used; try --parallel 6"
        )

    @pytest.mark.parametrize("settings", [{}, {"parallel": 1}])
    def test_memory_for_not_even_one_row_is_refused(self, settings: dict[str, Any]) -> None:
        """Fewer rows are no help then."""
        with pytest.raises(ConfigError) as refused:
            fit(1, 512, memory=512 * MIB, **settings)

        assert str(refused.value) == (
            "the KV cache would take 1 rows x 512 tokens = 512 MiB, "
            "but only 410 MiB may be used; try a smaller --ctx or --max-tokens"
        )

    def test_memory_left_out_is_that_of_the_machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """And threads left out are the cores that may be used."""
        monkeypatch.setattr(sizing, "available_memory", lambda: 4 * GIB)
        monkeypatch.setattr(sizing, "usable_threads", lambda: 7)

        context = fit_context(EngineConfig("m"), CARD, 32, 512, on_gpu=False)

        assert (context.num_slots, context.threads) == (6, 7)

    def test_on_a_gpu_buffers_come_first(self) -> None:
        """A pass of 2,048 tokens has room for logits and 32,000 bytes more for each of them."""
        buffers = 2048 * (CARD.num_vocab * 4 + 32_000)
        rows = 20 * 512 * CARD.kv_bytes_per_cell

        context = fit(32, 512, memory=buffers + int(rows / 0.8) + 100, on_gpu=True)

        assert context.num_slots == 20

    @pytest.mark.parametrize(
        ("setting", "on_gpu", "flash"),
        [("auto", False, False), ("auto", True, True), ("on", False, True), ("off", True, False)],
    )
    def test_flash_attention(self, setting: str, on_gpu: bool, flash: bool) -> None:
        """Left open, it is on with a GPU only."""
        context = fit(1, 1, GIB, on_gpu=on_gpu, flash_attention=FlashAttention(setting))

        assert context.flash_attention is flash


class TestUnified:
    def test_the_pool_left_out_holds_every_row(self) -> None:
        """Six rows of 512 cells are what fits."""
        context = fit(32, 512, memory=4 * GIB, kv_layout=KVLayout.UNIFIED)

        assert (context.num_slots, context.row_cells, context.pool_cells) == (6, 512, 3072)

    def test_a_pool_asked_for_is_what_counts(self) -> None:
        """Sixteen rows of 512 cells would not fit, but 3,000 cells, rounded to 3,072, do."""
        settings = {"kv_layout": KVLayout.UNIFIED, "kv_cells": 3000, "parallel": 16}

        context = fit(16, 512, memory=4 * GIB, **settings)

        assert (context.num_slots, context.row_cells, context.pool_cells) == (16, 512, 3072)

    def test_a_row_is_no_longer_than_the_pool(self) -> None:
        """One that wants more ends when the pool does."""
        context = fit(2, 2000, memory=4 * GIB, kv_layout=KVLayout.UNIFIED, kv_cells=300)

        assert (context.row_cells, context.pool_cells) == (512, 512)

    @pytest.mark.parametrize(("memory", "advice"), [(4 * GIB, "--kv-cells 3072"), (MIB, "model")])
    def test_a_pool_that_does_not_fit_is_refused_with_the_numbers(
        self, memory: int, advice: str
    ) -> None:
        """3,276.8 MiB hold 3,072 tokens, in steps of 256."""
        with pytest.raises(ConfigError) as refused:
            fit(2, 512, memory, kv_layout=KVLayout.UNIFIED, kv_cells=3300)

        share = f"{memory * 0.8 / MIB:,.0f}"
        assert str(refused.value).startswith(
            f"the KV cache would take 3328 tokens = 3,328 MiB, but only {share} MiB may be used; "
        )
        assert str(refused.value).endswith(advice)


class TestWantedSlots:
    def test_are_at_most_the_rows(self) -> None:
        """Three rows need three slots; not even no rows need none."""
        assert wanted_slots(EngineConfig("m"), 3, on_gpu=False) == 3
        assert wanted_slots(EngineConfig("m"), 0, on_gpu=False) == 1

    def test_are_the_default_or_what_was_asked_for(self) -> None:
        """A GPU takes more rows at a time."""
        assert wanted_slots(EngineConfig("m"), 1000, on_gpu=False) == CPU_SLOTS
        assert wanted_slots(EngineConfig("m"), 1000, on_gpu=True) == GPU_SLOTS > CPU_SLOTS
        assert wanted_slots(EngineConfig("m", parallel=2), 1000, on_gpu=True) == 2
