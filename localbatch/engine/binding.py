"""Models and contexts of llama.cpp: thin, typed handles over llama-cpp-python's raw functions.

The package's own `Llama` and `LlamaBatch` classes serve one sequence, so only the C functions are
used. Nothing here decides anything; llama.cpp aborts the process on some wrong arguments, and each
guard against that is noted where it stands.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from localbatch.data.errors import EngineError, ModelError
from localbatch.engine.library import Device, LogTail, lib, start, supports_gpu


class Model:
    """A loaded GGUF file.

    Raises `ModelError` if llama.cpp refuses it, with llama.cpp's reason.
    """

    def __init__(
        self,
        path: str,
        *,
        gpu_layers: int = 0,
        devices: Sequence[Device] = (),
        split_mode: str = "none",
        tensor_split: Sequence[float] | None = None,
        metadata_only: bool = False,
    ) -> None:
        start()
        params = lib.llama_model_default_params()
        params.n_gpu_layers = 0 if metadata_only else gpu_layers
        handles = (ctypes.c_void_p * (len(devices) + 1))(*(device.handle for device in devices))
        if supports_gpu():  # with no device named, all would take part
            params.devices = ctypes.cast(handles, ctypes.c_void_p)
        if devices:
            params.split_mode = getattr(lib, f"LLAMA_SPLIT_MODE_{split_mode.upper()}")
        if tensor_split is not None:
            shares = [*tensor_split, *[0.0] * lib.LLAMA_MAX_DEVICES][: lib.LLAMA_MAX_DEVICES]
            params.tensor_split = (ctypes.c_float * len(shares))(*shares)
        # Without repacking the file is only mapped, so a model of any size opens at once.
        params.use_extra_bufts = not metadata_only
        log = LogTail()
        with log.listening():
            self.handle = lib.llama_model_load_from_file(os.fsencode(path), params)
        if not self.handle:
            raise ModelError(f"{path}: llama.cpp can't load it: {log.last() or 'no reason given'}")
        self.buffer_bytes = int(log.buffer_mib.get("model", 0.0) * (1 << 20))
        """Of the weights, those repacked for this processor included, by llama.cpp's log."""
        self.vocab = lib.llama_model_get_vocab(self.handle)
        self.num_vocab = int(lib.llama_vocab_n_tokens(self.vocab))

    def close(self) -> None:
        """Free the model; its contexts must be closed before."""
        if self.handle:
            lib.llama_model_free(self.handle)
            self.handle = None

    @property
    def description(self) -> str:
        """Architecture, size and quantization, as llama.cpp names them."""
        buffer = ctypes.create_string_buffer(256)
        lib.llama_model_desc(self.handle, buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace")

    @property
    def num_params(self) -> int:
        """Number of weights."""
        return int(lib.llama_model_n_params(self.handle))

    @property
    def weight_bytes(self) -> int:
        """Size of all tensors in bytes."""
        return int(lib.llama_model_size(self.handle))

    @property
    def max_ctx(self) -> int:
        """Context length in tokens that the model was trained for."""
        return int(lib.llama_model_n_ctx_train(self.handle))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Layers, embedding size, attention heads and KV heads (the first layer's)."""
        handle = self.handle
        return (
            int(lib.llama_model_n_layer(handle)), int(lib.llama_model_n_embd(handle)),
            int(lib.llama_model_n_head(handle)), int(lib.llama_model_n_head_kv(handle)),
        )  # fmt: skip

    @property
    def is_text_generator(self) -> bool:
        """Whether it is a decoder that answers token by token, with a KV cache."""
        return bool(lib.llama_model_has_decoder(self.handle)) and not (
            lib.llama_model_has_encoder(self.handle) or lib.llama_model_is_diffusion(self.handle)
        )

    def metadata(self, longest: int = 1 << 20) -> dict[str, str]:
        """Return the file's own keys and values as text; arrays in llama.cpp's short form."""
        buffer = ctypes.create_string_buffer(longest)
        found = {}
        for i in range(lib.llama_model_meta_count(self.handle)):
            lib.llama_model_meta_key_by_index(self.handle, i, buffer, len(buffer))
            key = buffer.value.decode("utf-8", "replace")
            lib.llama_model_meta_val_str_by_index(self.handle, i, buffer, len(buffer))
            found[key] = buffer.value.decode("utf-8", "replace")
        return found

    def chat_template(self) -> str | None:
        """Return the Jinja chat template, if the file has one."""
        template = lib.llama_model_chat_template(self.handle, None)
        return template.decode("utf-8", "replace") if template else None

    def special_token(self, name: str) -> int | None:
        """Return the id of `bos`, `eos`, `eot` and the like, if the vocabulary has it."""
        token = int(getattr(lib, f"llama_vocab_{name}")(self.vocab))
        return token if 0 <= token < self.num_vocab else None

    @property
    def adds_bos(self) -> bool:
        """Whether the tokenizer puts BOS first when asked for special tokens."""
        return bool(lib.llama_vocab_get_add_bos(self.vocab))

    def end_tokens(self) -> frozenset[int]:
        """Return all tokens that end an answer."""
        is_end = lib.llama_vocab_is_eog
        return frozenset(t for t in range(self.num_vocab) if is_end(self.vocab, t))

    def special_texts(self) -> dict[int, str]:
        """Return the written form of each control token."""
        mask = lib.LLAMA_TOKEN_ATTR_CONTROL | lib.LLAMA_TOKEN_ATTR_UNKNOWN
        attribute, text = lib.llama_vocab_get_attr, lib.llama_vocab_get_text
        special = (t for t in range(self.num_vocab) if attribute(self.vocab, t) & mask)
        texts = {t: text(self.vocab, t).decode("utf-8", "replace") for t in special}
        return {token: written for token, written in texts.items() if written}

    def tokenize(self, text: bytes, *, add_special: bool, parse_special: bool) -> list[int]:
        """Return the token ids of UTF-8 `text`."""
        capacity = len(text) + 8
        while True:
            tokens = (lib.llama_token * capacity)()
            count = lib.llama_tokenize(
                self.vocab, text, len(text), tokens, capacity, add_special, parse_special
            )
            if count >= 0:
                return list(tokens[:count])
            capacity = -count

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that `token` adds to a text; control tokens add none."""
        if not 0 <= token < self.num_vocab:  # llama.cpp aborts on it
            raise ValueError(f"token {token} is outside of the vocabulary")
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            count = lib.llama_token_to_piece(self.vocab, token, buffer, size, 0, False)
            if count >= 0:
                return buffer.raw[:count]
            size = -count


@dataclass(frozen=True)
class ContextShape:
    """How a context is made; names as in `llama_context_params`."""

    n_seq_max: int
    n_ctx: int
    n_batch: int
    n_ubatch: int
    threads: int
    unified: bool
    flash_attention: bool


class Context:
    """One KV cache with its compute buffers, and a reusable batch over numpy arrays.

    Fill `tokens`, `positions`, `slots` and `wants` (each of length `n_batch`), then `decode`.
    """

    def __init__(self, model: Model, shape: ContextShape) -> None:
        params = lib.llama_context_default_params()
        params.n_ctx = shape.n_ctx
        # llama.cpp aborts when sequences outnumber the batch (llama-context.cpp).
        params.n_batch = max(shape.n_batch, shape.n_seq_max)
        params.n_ubatch = max(shape.n_ubatch, shape.n_seq_max)
        params.n_seq_max = shape.n_seq_max
        params.n_threads = params.n_threads_batch = shape.threads
        params.kv_unified = shape.unified
        params.flash_attn_type = (
            lib.LLAMA_FLASH_ATTN_TYPE_ENABLED
            if shape.flash_attention
            else lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        log = LogTail()
        with log.listening():
            self.handle = lib.llama_init_from_model(model.handle, params)
        if not self.handle:
            reason = log.last() or "no reason given"
            raise EngineError(f"llama.cpp can't make a context of {shape.n_ctx} cells: {reason}")
        mib = sum(log.buffer_mib.get(kind, 0.0) for kind in ("compute", "output"))
        self.buffer_bytes = int(mib * (1 << 20))
        self.memory = lib.llama_get_memory(self.handle)
        if not self.memory:
            self.close()
            raise ModelError("this model keeps no KV cache, so it can't generate text")
        self.num_vocab = model.num_vocab
        self.n_batch = int(lib.llama_n_batch(self.handle))
        self.n_ctx_seq = int(lib.llama_n_ctx_seq(self.handle))
        self.decode_s = 0.0
        self._make_batch()

    def _make_batch(self) -> None:
        n = self.n_batch
        self.tokens = np.zeros(n, np.int32)
        self.positions = np.zeros(n, np.int32)
        self.wants = np.zeros(n, np.int8)
        self._counts = np.ones(n, np.int32)  # each token belongs to one sequence
        self._ids = np.arange(256, dtype=np.int32)
        self._id_pointers = np.zeros(n, np.uintp)  # the seq_id column: a pointer into _ids each
        self._batch = lib.llama_batch(
            n_tokens=0,
            token=self.tokens.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            embd=None,
            pos=self.positions.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            n_seq_id=self._counts.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            seq_id=self._id_pointers.ctypes.data_as(ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
            logits=self.wants.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )

    def set_slots(self, start: int, end: int, slots: npt.NDArray[np.int64] | int) -> None:
        """Say which sequences the batch's tokens `[start, end)` belong to."""
        offsets = np.asarray(slots, np.uintp) * np.uintp(self._ids.itemsize)
        self._id_pointers[start:end] = np.uintp(self._ids.ctypes.data) + offsets

    def decode(self, num_tokens: int) -> int:
        """Compute the first `num_tokens` of the batch; returns `llama_decode`'s code, 0 if well."""
        if not 0 < num_tokens <= self.n_batch:  # llama.cpp aborts on it
            raise ValueError(f"{num_tokens} tokens in a batch of {self.n_batch}")
        self._batch.n_tokens = num_tokens
        start = time.perf_counter()
        code = int(lib.llama_decode(self.handle, self._batch))
        self.decode_s += time.perf_counter() - start
        return code

    def logits(self, num_rows: int) -> npt.NDArray[np.float32]:
        """Return a view of the last decode's logits, shape (rows, vocabulary), in batch order."""
        start = time.perf_counter()
        pointer = lib.llama_get_logits(self.handle)  # waits for a GPU
        self.decode_s += time.perf_counter() - start
        return np.ctypeslib.as_array(pointer, shape=(num_rows, self.num_vocab))

    def set_threads(self, threads: int) -> None:
        """Use so many threads from the next decode on."""
        lib.llama_set_n_threads(self.handle, threads, threads)

    def remove(self, slot: int, start: int = -1) -> None:
        """Free the cells of `slot` from position `start` on; -1 is all of them."""
        lib.llama_memory_seq_rm(self.memory, slot, start, -1)

    def copy(self, source: int, target: int) -> None:
        """Give `target`, which must be empty, the cells of `source`."""
        lib.llama_memory_seq_cp(self.memory, source, target, -1, -1)

    def clear(self) -> None:
        """Free all cells."""
        lib.llama_memory_clear(self.memory, False)

    def close(self) -> None:
        """Free the context."""
        if self.handle:
            lib.llama_free(self.handle)
            self.handle = None
