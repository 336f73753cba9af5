"""Which GPUs a worker computes on, and how much of the model is put there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from localbatch.data.config import EngineConfig, SplitMode
from localbatch.data.errors import ConfigError

_SHARE = 0.9
"""Share of a GPU's free memory that weights may take: KV cache and buffers need some, too."""

_GIB = 1 << 30


@dataclass(frozen=True)
class Gpu:
    """A device that llama.cpp can compute on, beside the CPU."""

    name: str
    """llama.cpp's, such as `CUDA0`."""
    description: str
    free_bytes: int
    total_bytes: int

    def __str__(self) -> str:
        return f"{self.name} ({self.description.strip()}, {self.free_bytes / _GIB:,.1f} GiB free)"


@dataclass(frozen=True)
class Placement:
    """Where one worker's model is."""

    gpus: tuple[Gpu, ...] = ()
    """None: on the CPU."""
    layers: int = 0
    """Put on the GPUs; -1 is all of them."""
    split_mode: SplitMode = SplitMode.NONE
    others: tuple[str, ...] = ()
    """GPUs for further workers, each with all of the model."""

    def __str__(self) -> str:
        if not self.gpus:
            return "CPU"
        layers = "all layers" if self.layers < 0 else f"{self.layers} layers"
        split = f", split by {self.split_mode.value}s" if len(self.gpus) > 1 else ""
        others = f"; a copy on {', '.join(self.others)}, too" if self.others else ""
        return f"{layers} on {' and '.join(map(str, self.gpus))}{split}{others}"


ON_CPU = Placement()


def place(
    config: EngineConfig,
    gpus: Sequence[Gpu],
    file_bytes: int,
    num_layers: Callable[[], int],
) -> Placement:
    """Return what goes where.

    A model that fits one GPU is put on each of them whole, with a worker of its own; one that does
    not is split over all by layers; and of one that is too large for that, as many layers as fit
    are put there. Settings come first. `num_layers` is asked for only when it matters. Raises
    `ConfigError` for a GPU that isn't there.
    """
    if config.gpu_layers == 0:
        return ON_CPU
    chosen = _chosen(config, gpus)
    if not chosen:
        return ON_CPU
    mode, fits = config.split_mode, file_bytes <= _room(chosen[:1])
    if mode is SplitMode.AUTO:
        fits_each = all(file_bytes <= _room([gpu]) for gpu in chosen)
        is_split = config.tensor_split is not None or not fits_each
        mode = SplitMode.LAYER if is_split and len(chosen) > 1 else SplitMode.NONE
    used, others = tuple(chosen), tuple(gpu.name for gpu in chosen[1:])
    if mode is SplitMode.NONE:
        used = used[:1]
    else:
        others, fits = (), file_bytes <= _room(used)
    layers = config.gpu_layers
    if layers is None:
        layers = -1 if fits else int(num_layers() * _room(used) / file_bytes)
    return Placement(used, layers, mode, others) if layers else ON_CPU


def _room(gpus: Sequence[Gpu]) -> float:
    return _SHARE * sum(gpu.free_bytes for gpu in gpus)


def _chosen(config: EngineConfig, gpus: Sequence[Gpu]) -> list[Gpu]:
    if not gpus:
        wanted = {
            "devices": config.devices,
            "gpu_layers": config.gpu_layers,
            "tensor_split": config.tensor_split,
            "split_mode": config.split_mode in (SplitMode.LAYER, SplitMode.ROW),
        }
        for name in filter(wanted.get, wanted):
            raise ConfigError(_NO_GPU.format(name))
        return []
    if config.devices is None:
        return list(gpus)
    by_name = {gpu.name.lower(): gpu for gpu in gpus}
    unknown = [name for name in config.devices if name.lower() not in by_name]
    if unknown:
        there = ", ".join(gpu.name for gpu in gpus)
        raise ConfigError(f"devices: there is no {unknown[0]!r}, only {there}")
    return [by_name[name.lower()] for name in config.devices]


_NO_GPU = (
    "{}: there is no GPU that llama.cpp can use; leave it out, or install llama-cpp-python built "
    "for your GPU (docs/install.md)"
)
