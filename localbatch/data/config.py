"""Settings of the engine and the scheduler, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from localbatch.data.errors import ConfigError

MAX_SLOTS = 256
"""Most sequences in one llama.cpp context (LLAMA_MAX_SEQ in llama.cpp's src/llama-cparams.h)."""

MAX_LANES = 64

CELL_STEP = 256
"""llama.cpp rounds the cells of a sequence up to a multiple of this."""


class KVLayout(str, Enum):
    """How sequences share a context's KV cache; the names are llama.cpp's."""

    STREAMS = "streams"
    """Each sequence has cells of its own; exact on the CPU, and fast."""
    UNIFIED = "unified"
    """All sequences share one pool of cells; a row may use what others don't."""


class FlashAttention(str, Enum):
    """Whether attention runs fused."""

    AUTO = "auto"
    """On with a GPU, off on the CPU."""
    ON = "on"
    OFF = "off"


class SplitMode(str, Enum):
    """What several GPUs do; but for `auto` the names are llama.cpp's."""

    AUTO = "auto"
    """Each has the whole model and rows of its own, if it fits; otherwise `layer`."""
    NONE = "none"
    """Each has the whole model."""
    LAYER = "layer"
    """Each has some of the layers."""
    ROW = "row"
    """Each has some rows of the matrices."""


class Order(str, Enum):
    """The order in which rows are begun; answers do not depend on it."""

    AUTO = "auto"
    """Common beginnings together, and the longest first."""
    INPUT = "input"
    """As they come."""


class Overlength(str, Enum):
    """What becomes of a prompt that is too long for its context."""

    ERROR = "error"
    """Its row fails."""
    TRUNCATE_LEFT = "truncate-left"
    """The beginning of its text is left out."""
    TRUNCATE_MIDDLE = "truncate-middle"
    TRUNCATE_RIGHT = "truncate-right"


@dataclass(frozen=True)
class EngineConfig:
    """What the engine runs and with how much of the machine.

    `None` means: chosen from the model, the machine and the rows. Raises `ConfigError`, naming the
    field, when a value is out of range.
    """

    model: str
    """Path of the GGUF file."""
    backend: str = "llama"
    """`llama` is llama.cpp; `fake` is a deterministic stand-in that needs no model."""
    ctx: int | None = None
    """Most tokens of one row, prompt and answer together."""
    parallel: int | None = None
    """Most rows in the batch at one time, all lanes of a worker together (there is one for each
    GPU); rounded up to what lanes share evenly."""
    threads: int | None = None
    """CPU threads of llama.cpp, all lanes together; each lane has one at least."""
    lanes: int | None = None
    """Contexts on the one loaded model, each with its own thread and its share of the rows; no
    more than `parallel`."""
    gpu_layers: int | None = None
    """Layers put on GPUs; -1 is all. Left out: as many as their free memory allows."""
    devices: tuple[str, ...] | None = None
    """GPUs to use, by llama.cpp's names (`CUDA0`); left out: all there are."""
    split_mode: SplitMode = SplitMode.AUTO
    tensor_split: tuple[float, ...] | None = None
    """Shares of the model for each GPU, where it is split."""
    kv_layout: KVLayout = KVLayout.STREAMS
    kv_cells: int | None = None
    """Cells that the rows share in the unified layout; left out: enough for every row."""
    flash_attention: FlashAttention = FlashAttention.AUTO
    ubatch: int | None = None
    """Most prompt tokens computed in one pass; left out: 128 on a CPU in streams, else 512."""
    share_prefixes: bool = True
    """Compute what rows begin with alike once (streams only), and equal greedy rows once."""
    order: Order = Order.AUTO
    any_numerics: bool = False
    """On the CPU, let the plan take settings that make answers depend on the batch."""
    overlength: Overlength = Overlength.ERROR
    """Cut prompts leave room for `max_tokens`, but for no more than half of the context."""
    chat_template: str | None = None
    """Source of a Jinja template to use in place of the model's own."""
    metadata_only: bool = False
    """Read what the model says of itself, not its weights; nothing can be computed."""
    fake_step_s: float = 0.0
    """Seconds that a step of the fake backend takes."""
    fake_dies_on: str = ""
    """Text in a prompt that kills the worker of the fake backend."""
    fake_gpus: int = 0
    """GPUs that the fake backend finds."""

    def __post_init__(self) -> None:
        if self.backend not in ("llama", "fake"):
            raise ConfigError(f"backend: must be 'llama' or 'fake', not {self.backend!r}")
        _optional_range("ctx", self.ctx, 8, 2**24)
        _optional_range("lanes", self.lanes, 1, MAX_LANES)
        _optional_range("parallel", self.parallel, 1, MAX_SLOTS * MAX_LANES)
        lanes, parallel = self.lanes, self.parallel
        if lanes is not None and parallel is not None:
            if parallel > MAX_SLOTS * lanes:
                raise ConfigError(
                    f"parallel: must be at most {MAX_SLOTS} for each lane, {MAX_SLOTS * lanes} for "
                    f"{lanes}, not {parallel}"
                )
            if lanes > parallel:
                raise ConfigError(
                    f"lanes: must be at most one for each row of {parallel} at a time"
                )
        _optional_range("ubatch", self.ubatch, 32, 2**20)
        _optional_range("threads", self.threads, 1, 512)
        _optional_range("gpu_layers", self.gpu_layers, -1, 10_000)
        _optional_range("kv_cells", self.kv_cells, 8, 2**31 - 1)
        if self.devices is not None and not all(self.devices):
            raise ConfigError("devices: must be names of GPUs; `localbatch doctor` lists them")
        if self.tensor_split is not None:
            if not self.tensor_split or not all(share >= 0 for share in self.tensor_split):
                raise ConfigError("tensor_split: must be shares of 0 or more, one for each GPU")
            if self.split_mode is SplitMode.NONE:
                raise ConfigError("tensor_split: goes with a model that is split, not with none")
        if self.ubatch is not None and self.ubatch % 4:
            raise ConfigError(f"ubatch: must be a multiple of 4, not {self.ubatch}")
        if self.kv_layout is KVLayout.UNIFIED and (self.lanes or 1) > 1:
            raise ConfigError("lanes: more than one goes with the streams layout only")
        if self.kv_cells is not None and self.kv_layout is not KVLayout.UNIFIED:
            raise ConfigError("kv_cells: goes with the unified layout only")


@dataclass(frozen=True)
class SchedulerConfig:
    """The room that the scheduler hands out."""

    num_slots: int
    """Sequences that can be in the batch at one time."""
    row_cells: int
    """Most tokens of one sequence."""
    pool_cells: int | None = None
    """Cells that all sequences share (unified); `None`: each slot has `row_cells` of its own."""
    chunk: int = 512
    """Prompt chunks end at multiples of this position, whatever else is in the step; the rest of a
    block or prompt after it, if it is too short to be a piece of its own, goes with the last."""
    block: int | None = None
    """Prompts are also cut at multiples of this, however short the rest; left out: `chunk`."""
    max_step_tokens: int = 2048
    """Prompt tokens in one step, over all sequences; at least one chunk."""
    num_prefix_slots: int = 0
    """Further slots, above the others, for prefixes that sequences share."""
    closes_gaps_first: bool = False
    """Move sequences together before others are admitted, so that new ones lie side by side: their
    prompts are to share passes."""

    def __post_init__(self) -> None:
        _range("num_slots", self.num_slots, 1, MAX_SLOTS)
        _range("num_prefix_slots", self.num_prefix_slots, 0, MAX_SLOTS - self.num_slots)
        _range("row_cells", self.row_cells, 1, 2**31 - 1)
        _range("chunk", self.chunk, 1, 2**31 - 1)
        _optional_range("block", self.block, self.chunk, 2**31 - 1)
        _range("max_step_tokens", self.max_step_tokens, self.chunk, 2**31 - 1)
        if self.pool_cells is not None:
            # A lone sequence of full length must fit, or it could never end.
            _range("pool_cells", self.pool_cells, self.row_cells, 2**31 - 1)


def _range(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name}: must be a whole number from {low} to {high}, not {value!r}")


def _optional_range(name: str, value: int | None, low: int, high: int) -> None:
    if value is not None:
        _range(name, value, low, high)
