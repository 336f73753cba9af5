"""Writes tiny GGUF models with random weights, for tests and for `localbatch doctor`.

    python tests/tiny_gguf.py localbatch/engine/selftest.gguf

The text that such a model generates is noise; the arithmetic and the file format are real.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import gguf
import numpy as np

FILE_TYPES = {  # enum llama_ftype in llama.h
    "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q4_k_m": 15, "q6_k": 18, "iq4_nl": 25,
}  # fmt: skip
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MOST_DRAWN = (1 << 22) - 3
"""Random numbers of a matrix; no multiple of its columns, so that no two rows are alike."""
WORDS = ["the", "of", "and", "to", "in", "is", "that", "it", "for", "was", "on", "are", "as"]


def vocabulary(size: int) -> tuple[list[str], list[float], list[int]]:
    """Return a SentencePiece vocabulary: controls, all bytes, words and letters, filler."""
    controls = ["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"]
    pieces = [f"\u2581{word}" for word in WORDS] + [chr(c) for c in range(33, 127)] + ["\u2581"]
    tokens = controls + [f"<0x{byte:02X}>" for byte in range(256)] + pieces
    tokens += [f"\u2581w{i:x}" for i in range(size - len(tokens))]
    normal, unknown, control, byte = 1, 2, 3, 6  # gguf.TokenType
    types = [unknown] + [control] * (len(controls) - 1) + [byte] * 256
    types += [normal] * (len(tokens) - len(types))
    return tokens[:size], [-float(i) for i in range(size)], types[:size]


def write(
    path: Path,
    *,
    layers: int = 2,
    embd: int = 64,
    ff: int = 128,
    heads: int = 4,
    kv_heads: int = 2,
    vocab: int = 448,
    ctx: int = 2048,
    seed: int = 0,
    template: str | None = CHAT_TEMPLATE,
    spread: float = 0.2,
) -> None:
    """Write a llama-architecture model in F16; large matrices repeat what was drawn."""
    writer = gguf.GGUFWriter(str(path), "llama")
    tokens, scores, types = vocabulary(vocab)
    writer.add_name("tiny random model")
    writer.add_context_length(ctx)
    writer.add_embedding_length(embd)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(ff)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(embd // heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(vocab)
    writer.add_file_type(FILE_TYPES["f16"])
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    if template is not None:
        writer.add_chat_template(template)
    rng = np.random.default_rng(seed)

    def matrix(rows: int, cols: int) -> np.ndarray:
        if rows * cols <= MOST_DRAWN:
            return (rng.standard_normal((rows, cols)) * spread).astype(np.float16)
        drawn = (rng.standard_normal(MOST_DRAWN) * spread).astype(np.float16)
        return np.resize(drawn, (rows, cols))

    kv = embd // heads * kv_heads
    writer.add_tensor("token_embd.weight", matrix(vocab, embd))
    writer.add_tensor("output_norm.weight", np.ones(embd, np.float32))
    writer.add_tensor("output.weight", matrix(vocab, embd))
    shapes = {
        "attn_q": (embd, embd), "attn_k": (kv, embd), "attn_v": (kv, embd),
        "attn_output": (embd, embd), "ffn_gate": (ff, embd), "ffn_up": (ff, embd),
        "ffn_down": (embd, ff),
    }  # fmt: skip
    for layer in range(layers):
        writer.add_tensor(f"blk.{layer}.attn_norm.weight", np.ones(embd, np.float32))
        writer.add_tensor(f"blk.{layer}.ffn_norm.weight", np.ones(embd, np.float32))
        for name, (rows, cols) in shapes.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", matrix(rows, cols))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantize(source: Path, target: Path, kind: str) -> None:
    """Write `source` in another weight type, by llama.cpp itself."""
    from llama_cpp import llama_cpp as lib

    silent = lib.llama_log_callback(lambda _level, _text, _data: None)
    lib.llama_log_set(silent, ctypes.c_void_p(0))
    params = lib.llama_model_quantize_default_params()
    params.ftype = FILE_TYPES[kind]
    code = lib.llama_model_quantize(os.fsencode(source), os.fsencode(target), params)
    if code != 0:
        raise RuntimeError(f"llama.cpp can't quantize to {kind}: {code}")


if __name__ == "__main__":
    out = Path(sys.argv[1])
    raw = out.with_suffix(".f16")
    write(raw, layers=1, vocab=384)
    quantize(raw, out, "q4_0")
    raw.unlink()
