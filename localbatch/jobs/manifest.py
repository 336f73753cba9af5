"""What makes a job the same job: the model, the settings that answers depend on, and the rows."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from localbatch._version import __version__
from localbatch.data.config import EngineConfig
from localbatch.data.request import Completion, Request
from localbatch.data.sampling_params import SamplingParams
from localbatch.engine.cache import FactCache, fact_key
from localbatch.formats.folder import is_folder
from localbatch.formats.inputs import InputOptions
from localbatch.formats.sources import can_be_read_again, folder_sha256

# Answers on the CPU don't depend on the others: lanes, threads, rows at one time, order, pieces.
_SETTINGS = (
    "backend", "ctx", "overlength", "chat_template", "kv_layout", "flash_attention", "any_numerics",
    "gpu_layers",
)  # fmt: skip
_DEFAULTS = {
    f"--{field.name.replace('_', '-')}": field.default
    for field in fields(EngineConfig)
    if field.name in _SETTINGS
}
"""What a setting is that was left out: the command names them all, the Python API need not."""
_SHOWN_CHARS = 60
_BLOCK = 1 << 20


def make_manifest(
    model: str,
    source: str,
    params: SamplingParams,
    *,
    inputs: InputOptions,
    engine: Mapping[str, Any],
) -> dict[str, Any]:
    """Return names and values; those under `same` must not change while a job is unfinished.

    `model` is the path of the model file, or any name where that is none; so is `source`, the
    input. Of the input only the finished rows must not change; `input_sha256` tells that none did.
    """
    same = {
        "model": _sha256(model) if Path(model).is_file() else model,
        "llama-cpp-python": _version("llama-cpp-python"),
        "--raw": not inputs.chat,
        "--system": inputs.system,
        "--template-arg": dict(inputs.template_args),
        "--prompt-column": inputs.prompt_column,
        "--id-column": inputs.id_column,
        "--template": inputs.template,
        **{f"--{name.replace('_', '-')}": value for name, value in asdict(params).items()},
        **{f"--{name.replace('_', '-')}": engine.get(name) for name in _SETTINGS},
    }
    about = {
        "model": model,
        "input": source,
        "input_sha256": input_sha256(source),
        "localbatch": __version__,
        "created": time.time(),
    }
    plain: dict[str, Any] = json.loads(json.dumps({"same": same, "about": about}, default=str))
    return plain


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return what is another than before, each in a few words."""
    old, new = before.get("same", {}), now["same"]
    found = []
    for name in sorted({*old, *new}):
        was, is_now = _setting(old, name), _setting(new, name)
        if was == is_now:
            continue
        if name == "model" and Path(now["about"]["model"]).is_file():
            found.append(f"the model is another file than {before['about']['model']} was")
        else:
            found.append(f"{name} was {_shown(was)}, is {_shown(is_now)}")
    return found


def _setting(settings: Mapping[str, Any], name: str) -> Any:
    value = settings.get(name)
    return _DEFAULTS.get(name) if value is None else value


def fingerprint(row: Request | Completion) -> bytes:
    """Return 16 bytes that are the same for the same row: its id, its prompt, its parameters.

    For a row that could not be read, that it is this row with this error.
    """
    if isinstance(row, Completion):
        asked: list[Any] = [row.id, row.error]
    else:
        messages = None if row.messages is None else [dict(m) for m in row.messages]
        asked = [
            row.id, row.prompt, messages, row.tools, dict(row.template_args), asdict(row.params)
        ]  # fmt: skip
    text = json.dumps(asked, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def input_sha256(source: str) -> str | None:
    """Return the SHA-256 of a file, or of all files of a folder; `None` for a pipe."""
    if not can_be_read_again(source):
        return None
    return folder_sha256(source) if is_folder(source) else _sha256(source)


def _sha256(path: str) -> str:
    """Return a file's SHA-256, once computed as long as it stays the same."""
    key, cache = fact_key("sha256", path), FactCache()
    known = cache.get(key)
    if known is None:
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
        known = digest.hexdigest()
        cache.put(key, known)
    return known


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _shown(value: object) -> str:
    text = "left out" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…"
