"""Which GPUs a model is put on."""

from __future__ import annotations

from typing import Any

import pytest

from localbatch.data.config import EngineConfig, SplitMode
from localbatch.data.errors import ConfigError
from localbatch.engine.placement import Gpu, Placement, place

GIB = 1 << 30
ONE = [Gpu("CUDA0", "Card", 80 * GIB, 80 * GIB)]
TWO = [*ONE, Gpu("CUDA1", "Card", 80 * GIB, 80 * GIB)]


def placed(gpus: list[Gpu], size: float, **settings: Any) -> Placement:
    return place(EngineConfig("m", **settings), gpus, int(size * GIB), lambda: 40)


def names(placement: Placement) -> list[str]:
    return [gpu.name for gpu in placement.gpus]


class TestAutomatic:
    def test_without_a_gpu(self) -> None:
        """Everything is on the CPU."""
        assert placed([], 1) == Placement()
        assert str(placed([], 1)) == "CPU"

    def test_a_model_that_fits(self) -> None:
        """All of it goes to the one there is: 72 GiB are nine tenths of 80."""
        found = placed(ONE, 72)
        assert (names(found), found.layers, found.others) == (["CUDA0"], -1, ())

    def test_a_model_that_does_not_fit(self) -> None:
        """As many of its 40 layers as nine tenths of 80 GiB hold: 72 of 96 GiB are 30."""
        found = placed(ONE, 96)
        assert (names(found), found.layers) == (["CUDA0"], 30)
        assert str(found) == "30 layers on CUDA0 (Card, 80.0 GiB free)"

    def test_several_gpus_have_a_copy_each(self) -> None:
        """The first worker takes the first."""
        found = placed(TWO, 10)
        assert (names(found), found.layers, found.others) == (["CUDA0"], -1, ("CUDA1",))

    def test_a_model_too_large_for_one_is_split(self) -> None:
        """All of it fits both."""
        found = placed(TWO, 100)
        assert (names(found), found.layers) == (["CUDA0", "CUDA1"], -1)
        assert (found.split_mode, found.others) == (SplitMode.LAYER, ())

    def test_a_model_too_large_for_all(self) -> None:
        """144 of 192 GiB are 30 of 40 layers."""
        found = placed(TWO, 192)
        assert (names(found), found.layers, found.split_mode) == (
            ["CUDA0", "CUDA1"], 30, SplitMode.LAYER,
        )  # fmt: skip

    def test_gpus_of_different_sizes(self) -> None:
        """What does not fit the smaller one is split, or it could not take part."""
        gpus = [*ONE, Gpu("CUDA1", "Small", 8 * GIB, 8 * GIB)]
        assert placed(gpus, 40).split_mode is SplitMode.LAYER
        assert placed(gpus, 7).others == ("CUDA1",)

    def test_a_full_gpu_is_no_use(self) -> None:
        """Not one layer fits."""
        assert placed([Gpu("CUDA0", "Card", 1 << 20, 80 * GIB)], 10) == Placement()


class TestSettings:
    def test_no_layers_are_the_cpu(self) -> None:
        """Whatever is there."""
        assert placed(TWO, 1, gpu_layers=0) == Placement()

    def test_layers_by_hand(self) -> None:
        """Are taken as they are."""
        assert placed(ONE, 1, gpu_layers=7).layers == 7
        assert placed(ONE, 1000, gpu_layers=-1).layers == -1

    def test_one_of_several(self) -> None:
        """By name, in any case."""
        found = placed(TWO, 1, devices=("cuda1",))
        assert (names(found), found.others) == (["CUDA1"], ())

    @pytest.mark.parametrize("mode", ["layer", "row"])
    def test_a_split_by_hand(self, mode: str) -> None:
        """Even if one GPU would do."""
        found = placed(TWO, 1, split_mode=SplitMode(mode))
        assert (names(found), found.split_mode.value) == (["CUDA0", "CUDA1"], mode)

    def test_shares_split(self) -> None:
        """Shares only make sense for a split model."""
        assert placed(TWO, 1, tensor_split=(3.0, 1.0)).split_mode is SplitMode.LAYER

    @pytest.mark.parametrize(
        "settings",
        [
            {"gpu_layers": 5}, {"devices": ("CUDA0",)}, {"tensor_split": (3.0, 1.0)},
            {"split_mode": SplitMode.ROW},
        ],
    )  # fmt: skip
    def test_a_gpu_asked_for_and_not_there(self, settings: dict[str, Any]) -> None:
        """Is refused, with what to do."""
        with pytest.raises(ConfigError, match=r"there is no GPU .*docs/install\.md"):
            placed([], 1, **settings)

    def test_an_unknown_name(self) -> None:
        """Is refused with those there are."""
        with pytest.raises(ConfigError, match="devices: there is no 'CUDA7', only CUDA0, CUDA1"):
            placed(TWO, 1, devices=("CUDA7",))

    @pytest.mark.parametrize(
        "settings",
        [
            {"devices": ("",)}, {"tensor_split": ()}, {"tensor_split": (-1.0,)},
            {"tensor_split": (1.0,), "split_mode": SplitMode.NONE},
        ],
    )  # fmt: skip
    def test_settings_that_make_no_sense(self, settings: dict[str, Any]) -> None:
        """Are refused."""
        with pytest.raises(ConfigError):
            EngineConfig("m", **settings)
