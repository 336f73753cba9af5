"""What the engine asks of whatever computes the logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from localbatch.engine.placement import Placement
from localbatch.scheduler.plan import PlanRow, StepPlan

Logits: TypeAlias = npt.NDArray[np.float32]
"""Shape (rows, vocabulary)."""

Sample: TypeAlias = Callable[[Sequence[PlanRow], Logits], list[int]]
"""Chooses a token for each row; the logits are only valid during the call."""


@dataclass(frozen=True)
class ModelCard:
    """What a loaded model says of itself."""

    description: str
    """Architecture, size and quantization in llama.cpp's words, such as `llama 135M Q4_1`."""
    architecture: str
    num_params: int
    file_bytes: int
    loaded_bytes: int
    """What the weights take in memory: more than the file where they are repacked."""
    num_vocab: int
    max_ctx: int
    """Context length in tokens that the model was trained for."""
    kv_bytes_per_cell: int
    """KV cache bytes of one token."""
    bos_token: int | None
    eos_token: int | None
    end_tokens: frozenset[int]
    """Tokens that end an answer."""
    adds_bos: bool
    """Whether the tokenizer puts the BOS token first."""
    chat_template: str | None
    placement: str = "CPU"
    """Where its weights are, in words."""
    special_texts: dict[int, str] = field(default_factory=dict, repr=False)
    """How the control tokens are written; text from a row must not become one."""
    metadata: dict[str, str] = field(default_factory=dict, repr=False)
    """The GGUF file's own keys and values, long ones cut."""


@dataclass(frozen=True)
class ContextConfig:
    """The size and shape of the KV cache, and how it is computed."""

    num_slots: int
    row_cells: int
    """Most tokens of one sequence."""
    pool_cells: int | None
    """Cells shared by all (unified); `None`: streams."""
    chunk: int
    """Most prompt tokens computed in one pass."""
    threads: int
    flash_attention: bool = False
    num_prefix_slots: int = 0
    """Slots above the others that only ever are the source or the target of copies."""
    may_pad: bool = True
    """Let decode batches be padded where that keeps a row's bits its own, or is faster."""
    pass_tokens: int | None = None
    """Prompt tokens of several rows that are computed in one pass, in streams; `None`: each prompt
    chunk alone."""
    full_passes: bool = False
    """Begin several rows at a time, in slots side by side, and let all their chunks share passes,
    not only the first ones."""

    @property
    def admit_together(self) -> int:
        """Free slots that are worth a pass over new prompts."""
        return max(1, self.num_slots // 16) if self.full_passes else 1

    @property
    def num_cells(self) -> int:
        """Cells of all slots together."""
        if self.pool_cells is not None:
            return self.pool_cells
        return (self.num_slots + self.num_prefix_slots) * self.row_cells


class Numerics(Enum):
    """What a row's logits depend on besides the row itself, in the last bit."""

    SAME_AS_ALONE = "same as alone"
    """On nothing: a batch gives the bits of a context with one sequence."""
    SAME_IN_ANY_BATCH = "same in any batch"
    """On nothing, since decode batches are padded to sizes that llama.cpp computes alike."""
    VARIES = "varies with the batch"
    """On the rows beside it."""


class Backend(Protocol):
    """Computes step plans.

    `forward` needs what llama.cpp needs: positions without gaps, slots and cells within the
    context's bounds; anything else is a `DecodeError`.
    """

    card: ModelCard
    on_gpu: bool
    placement: Placement
    build: str
    """What computes, and with which of the processor's features."""

    open_s: float
    """Seconds that making the context took."""
    num_calls: int
    """Computations that have come back; another thread may read it."""

    @property
    def decode_s(self) -> float:
        """Seconds spent computing (not sampling) since the start."""
        ...

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the context beside the KV cache, as far as they are known."""
        ...

    def open(self, config: ContextConfig) -> Numerics:
        """Make the context, replacing an earlier one."""
        ...

    def free_bytes(self) -> int:
        """Return the bytes that KV caches and buffers can still take where the model is."""
        ...

    def set_threads(self, threads: int) -> None:
        """Compute with another number of threads from now on."""
        ...

    def sibling(self) -> Backend:
        """Return a backend with a context of its own on the same loaded model.

        It may compute in another thread, must be closed first, and leaves the model loaded.
        """
        ...

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Return token ids; `parse_special` lets written control tokens count as such."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token adds to the text; control tokens add none."""
        ...

    def forward(self, plan: StepPlan, sample: Sample) -> list[int | None]:
        """Compute a plan; returns the sampled token of each row, `None` where none was wanted."""
        ...

    def clear(self) -> None:
        """Empty the whole KV cache."""
        ...

    def close(self) -> None:
        """Free context and model."""
        ...
