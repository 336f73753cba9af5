"""Turns step plans into llama.cpp batches."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from localbatch.data.config import MAX_SLOTS, EngineConfig
from localbatch.data.errors import DecodeError, ModelError
from localbatch.engine import binding, library
from localbatch.engine.backend import ContextConfig, ModelCard, Numerics, Sample
from localbatch.engine.batches import (
    calls,
    drop_surplus,
    fill_chunks,
    fill_decode,
    fill_padding,
    steady,
)
from localbatch.engine.machine import available_memory
from localbatch.engine.numerics import cuts_alike_of, groups_alike_of, numerics_of, padded
from localbatch.engine.placement import ON_CPU, Gpu, Placement, place
from localbatch.engine.sizing import BLOCK
from localbatch.engine.threads import apart
from localbatch.scheduler.plan import PlanRow, StepPlan
from localbatch.scheduler.prefixes import LEAST_ROWS

_CODES = {  # include/llama.h, llama_decode
    1: "no room in the KV cache",
    2: "aborted",
    -1: "llama.cpp refused the batch",
    -2: "llama.cpp could not allocate memory",
    -3: "llama.cpp failed to compute",
}
_UNIFIED_BATCH = 2048
_WORTH_SHARING = 4
"""Rows of a lane for which it is worth finding out whether their prompts may share passes."""


class LlamaBackend:
    """A GGUF model in llama.cpp: one context, a sequence id for each slot.

    How a plan becomes `llama_decode` calls depends on the layout (`batches.py`).
    """

    def __init__(
        self,
        model: str,
        *,
        placement: Placement = ON_CPU,
        tensor_split: Sequence[float] | None = None,
        metadata_only: bool = False,
    ) -> None:
        names = [gpu.name for gpu in placement.gpus]
        loaded = apart(  # weights are rearranged by several threads
            binding.Model, model, gpu_layers=placement.layers,
            devices=[device for device in library.gpu_devices() if device.name in names],
            split_mode=placement.split_mode.value, tensor_split=tensor_split,
            metadata_only=metadata_only,
        )  # fmt: skip
        if not loaded.is_text_generator:
            loaded.close()
            raise ModelError(f"{model}: this is not a model that generates text row by row")
        card = replace(model_card(loaded, model), placement=str(placement))
        self._use(loaded, model, card, placement)
        self._owns_model = True

    def _use(self, model: binding.Model, path: str, card: ModelCard, placement: Placement) -> None:
        """Start without a context on a loaded model."""
        self.card, self.placement = card, placement
        self.on_gpu = bool(placement.gpus)
        self.build = f"{library.check_binding()} {library.system_info()}"
        self._model, self._path = model, path
        self._owns_model = False
        self._context: binding.Context | None = None
        self._config: ContextConfig | None = None
        self._padded: Callable[[int], int] = int
        """Returns the rows of the decode batch that so many rows are computed in."""
        self._num_padding = 0
        self.open_s = 0.0
        self.num_calls = 0
        self._past_decode_s = 0.0

    @property
    def decode_s(self) -> float:
        """Seconds spent in `llama_decode`, all contexts together."""
        return self._past_decode_s + (self._context.decode_s if self._context else 0.0)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the compute and output buffers, by llama.cpp's log."""
        return self._context.buffer_bytes if self._context else 0

    def free_bytes(self) -> int:
        """Return the bytes that KV caches and buffers can still take where the model is.

        Of a model that is only partly on GPUs, the KV cache is split as the layers are.
        """
        if not self.on_gpu:
            return available_memory()
        names = [gpu.name for gpu in self.placement.gpus]
        free = sum(d.free_bytes for d in library.gpu_devices() if d.name in names)
        layers, all_layers = self.placement.layers, self._model.shape[0]
        if not 0 <= layers < all_layers:
            return free
        share = layers / all_layers
        return int(min(free / share, available_memory() / (1 - share)))

    def set_threads(self, threads: int) -> None:
        """Compute with another number of threads from now on; bits don't depend on it."""
        self._opened().set_threads(threads)

    def sibling(self) -> LlamaBackend:
        """Return a backend with a context of its own on the same loaded model."""
        sibling = LlamaBackend.__new__(LlamaBackend)
        sibling._use(self._model, self._path, self.card, self.placement)
        return sibling

    def open(self, config: ContextConfig) -> Numerics:
        """Make the context; on the CPU in streams, find out what keeps a row's bits its own."""
        self._close_context()
        self._config = config
        exact = config.pool_cells is None and not config.flash_attention and not self.on_gpu
        numerics = Numerics.VARIES
        if exact:
            numerics = numerics_of(self._model, self._path, config.threads)
        if numerics is Numerics.SAME_IN_ANY_BATCH and not config.may_pad:
            numerics = Numerics.VARIES
        if numerics is Numerics.SAME_IN_ANY_BATCH:
            self._padded = padded
        elif config.may_pad and self.on_gpu and config.pool_cells is None:
            self._padded = steady
        else:
            self._padded = int
        room = MAX_SLOTS - config.num_slots - config.num_prefix_slots
        self._num_padding = min(self._padded(config.num_slots) - config.num_slots, room)
        if not self.on_gpu and not (
            config.pass_tokens
            and config.num_slots >= _WORTH_SHARING
            and numerics is Numerics.SAME_AS_ALONE
            and groups_alike_of(self._model, self._path, config.threads)
        ):
            self._config = config = replace(config, pass_tokens=None)
        if exact and (config.num_prefix_slots or config.chunk % BLOCK):
            alike = cuts_alike_of(self._model, self._path, config.threads)
            numerics = numerics if alike else Numerics.VARIES
        started = time.perf_counter()
        self._context = binding.Context(self._model, self._shape(config))
        self.open_s = time.perf_counter() - started
        if self._context.n_ctx_seq < config.row_cells:
            raise DecodeError(
                f"llama.cpp gives {self._context.n_ctx_seq} cells a row, not {config.row_cells}", 1
            )
        return numerics

    def _shape(self, config: ContextConfig) -> binding.ContextShape:
        streams = config.pool_cells is None
        # A short rest goes with the chunk before it (scheduler/prefixes.py).
        most = config.chunk + (LEAST_ROWS if config.chunk % BLOCK else 0)
        n_seq_max = config.num_slots + self._num_padding + config.num_prefix_slots
        return binding.ContextShape(
            n_seq_max=n_seq_max,
            n_ctx=config.row_cells * n_seq_max if config.pool_cells is None else config.pool_cells,
            n_batch=max(most, config.pass_tokens or 0) if streams else max(most, _UNIFIED_BATCH),
            n_ubatch=max(most, config.pass_tokens or 0),
            threads=config.threads,
            unified=not streams,
            flash_attention=config.flash_attention,
        )

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Return token ids."""
        return self._model.tokenize(
            text.encode(), add_special=add_special, parse_special=parse_special
        )

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token adds to the text."""
        return self._model.token_bytes(token)

    def forward(self, plan: StepPlan, sample: Sample) -> list[int | None]:
        """Compute a plan call by call, sampling after each: the next call overwrites the logits."""
        context = self._opened()
        self._check_slots(plan)
        for slot in plan.releases:
            context.remove(slot)
        for source, target in plan.moves:
            context.remove(target)
            context.copy(source, target)
            context.remove(source)
        for source, target, length in plan.copies:
            source, target = self._sequence_id(source), self._sequence_id(target)
            if source != target:
                context.remove(target)
                context.copy(source, target)
            context.remove(target, length)
        assert self._config is not None
        tokens: dict[int, int | None] = {}  # by slot
        for rows in calls(plan.rows, self._config, context.n_batch):
            chosen = self._compute(context, rows, sample)
            tokens |= {row.slot: token for row, token in zip(rows, chosen, strict=True)}
        return [tokens[row.slot] for row in plan.rows]

    def _check_slots(self, plan: StepPlan) -> None:
        """Raise `DecodeError` for a slot that isn't there; llama.cpp aborts on some of them."""
        assert self._config is not None
        slots = [row.slot for row in plan.rows] + plan.releases
        slots += [slot for move in plan.moves for slot in move]
        _check_range(slots, self._config.num_slots)
        copied = [slot for copy in plan.copies for slot in copy[:2]]
        _check_range(copied, self._config.num_slots + self._config.num_prefix_slots)

    def _sequence_id(self, slot: int) -> int:
        """Return llama.cpp's id of a slot; prefixes lie above the slots that padding may use."""
        assert self._config is not None
        return slot if slot < self._config.num_slots else slot + self._num_padding

    def _compute(
        self, context: binding.Context, rows: Sequence[PlanRow], sample: Sample
    ) -> list[int | None]:
        assert self._config is not None
        equal = len(rows) > 1 and self._config.pool_cells is None
        if rows[0].is_prefill:
            num_tokens = fill_chunks(context, rows, equal=equal)
        else:
            num_tokens = fill_decode(context, rows)
            most = self._config.num_slots + self._num_padding
            num_tokens = fill_padding(context, num_tokens, min(self._padded(num_tokens), most))
        code = context.decode(num_tokens)
        self.num_calls += 1
        if code != 0:
            raise DecodeError(_CODES.get(code, f"llama_decode returned {code}"), code)
        if equal:
            drop_surplus(context, rows)
        wanting = [row for row in rows if row.wants_logits]
        if not wanting:
            return [None] * len(rows)
        chosen = iter(sample(wanting, context.logits(len(wanting))))
        return [next(chosen) if row.wants_logits else None for row in rows]

    def clear(self) -> None:
        """Empty the whole KV cache."""
        self._opened().clear()

    def close(self) -> None:
        """Free the context, and the model with its first backend."""
        self._close_context()
        if self._owns_model:
            self._model.close()

    def _close_context(self) -> None:
        if self._context is not None:
            self._past_decode_s += self._context.decode_s
            self._context.close()
            self._context = None

    def _opened(self) -> binding.Context:
        assert self._context is not None, "open() comes first"
        return self._context


def _check_range(slots: Sequence[int], num_slots: int) -> None:
    if slots and not 0 <= min(slots) <= max(slots) < num_slots:
        raise DecodeError(f"a slot is outside of 0..{num_slots - 1}", -1)


def found_gpus() -> list[Gpu]:
    """Return the GPUs that llama.cpp can use."""
    return [Gpu(*device[1:]) for device in library.gpu_devices()]


def find_placement(config: EngineConfig) -> Placement:
    """Return where a model is put; raises `ConfigError` if that can't be as it is wanted."""

    def num_layers() -> int:
        model = binding.Model(config.model, metadata_only=True)
        try:
            return model.shape[0]
        finally:
            model.close()

    return place(config, found_gpus(), Path(config.model).stat().st_size, num_layers)


def model_card(model: binding.Model, path: str) -> ModelCard:
    """Return what a loaded model says of itself."""
    metadata = model.metadata()
    bos, eos = model.special_token("bos"), model.special_token("eos")
    return ModelCard(
        description=model.description,
        architecture=metadata.get("general.architecture", "unknown"),
        num_params=model.num_params,
        file_bytes=Path(path).stat().st_size,
        loaded_bytes=max(model.buffer_bytes, Path(path).stat().st_size),
        num_vocab=model.num_vocab,
        max_ctx=model.max_ctx,
        kv_bytes_per_cell=_kv_bytes_per_cell(model, metadata),
        bos_token=bos,
        eos_token=eos,
        end_tokens=model.end_tokens(),
        adds_bos=model.adds_bos,
        chat_template=model.chat_template(),
        special_texts=model.special_texts(),
        metadata=metadata,
    )


def _kv_bytes_per_cell(model: binding.Model, metadata: dict[str, str]) -> int:
    """Return the bytes of keys and values of one token over all layers, at two bytes a number."""
    architecture = metadata.get("general.architecture", "")
    layers, embedding, heads, kv_heads = model.shape
    head_size = embedding // max(1, heads)

    def size(name: str) -> int:
        value = metadata.get(f"{architecture}.attention.{name}", "")
        return int(value) if value.isdigit() else head_size

    per_layer = metadata.get(f"{architecture}.attention.head_count_kv", "")
    try:
        total_heads = sum(json.loads(per_layer)) if per_layer.startswith("[") else layers * kv_heads
    except (ValueError, TypeError):
        total_heads = layers * kv_heads
    return int(total_heads) * (size("key_length") + size("value_length")) * 2
