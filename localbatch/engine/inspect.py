"""What a GGUF file says of itself, read in a process of its own without loading the weights."""

from __future__ import annotations

from localbatch.data.config import CELL_STEP, EngineConfig
from localbatch.engine.backend import ModelCard
from localbatch.engine.client import WorkerClient
from localbatch.engine.machine import available_memory
from localbatch.engine.sizing import kv_bytes
from localbatch.models.gguf import check_gguf

_MIB = 1 << 20


def read_card(path: str) -> ModelCard:
    """Return a model file's card; raises `ModelError` if llama.cpp can't read it."""
    check_gguf(path)
    client = WorkerClient(EngineConfig(model=path, metadata_only=True))
    client.close()
    return client.card


def describe(path: str, *, rows: int, ctx: int) -> list[tuple[str, str]]:
    """Return lines of (what, value) for people; `rows` and `ctx` are for the memory of a batch."""
    card = read_card(path)
    cells = -(-ctx // CELL_STEP) * CELL_STEP
    cache = kv_bytes(card, rows, cells)
    template = card.chat_template
    return [
        ("file", f"{path} ({card.file_bytes / _MIB:,.0f} MiB)"),
        ("name", card.metadata.get("general.name", "(none)")),
        ("architecture", card.architecture),
        ("parameters", f"{card.num_params / 1e6:,.1f} million"),
        ("quantization", _quantization(card)),
        ("licence", card.metadata.get("general.license", "(not stated)")),
        ("context", f"{card.max_ctx:,} tokens"),
        ("vocabulary", f"{card.num_vocab:,} tokens, {_tokenizer(card)}"),
        ("chat template", _template_line(template)),
        ("device", card.placement),
        ("KV cache", f"{card.kv_bytes_per_cell / 1024:,.1f} KiB a token"),
        (
            "a batch",
            f"{rows} rows of {cells:,} tokens: {cache / _MIB:,.0f} MiB of KV cache and "
            f"{card.file_bytes / _MIB:,.0f} MiB of weights; "
            f"{available_memory() / _MIB:,.0f} MiB are available",
        ),
    ]


def _quantization(card: ModelCard) -> str:
    """Return the weight type, the last part of llama.cpp's `architecture size type`."""
    bits = card.file_bytes * 8 / max(1, card.num_params)
    return f"{card.description.split(maxsplit=2)[-1]}, {bits:.1f} bits a weight"


def _tokenizer(card: ModelCard) -> str:
    kind = card.metadata.get("tokenizer.ggml.model", "unknown")
    pre = card.metadata.get("tokenizer.ggml.pre")
    bos = "adds BOS" if card.adds_bos else "no BOS"
    return f"{kind}{f'/{pre}' if pre else ''}, {bos}"


def _template_line(template: str | None) -> str:
    if template is None:
        return "none; use --raw"
    return f"{len(template):,} characters of Jinja"
