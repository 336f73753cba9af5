"""A first look at a model file, before llama.cpp gets it."""

from __future__ import annotations

import os
import stat
import struct
from pathlib import Path

from localbatch.data.errors import ModelError

_HEAD = struct.Struct("<4sIQQ")  # magic, version, tensors, keys: ggml/docs/gguf.md
_VERSIONS = (2, 3)
_OLD_MAGICS = (b"lmgg", b"fmgg", b"tjgg", b"algg")  # ggml, ggmf, ggjt and ggla, little endian


def check_gguf(path: str | Path) -> None:
    """Raise `ModelError`, saying what the file is, unless its head is that of a GGUF file.

    Damage behind the head is for llama.cpp to find.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait for its writer
            raise ModelError(f"{path}: is not a plain file; name a GGUF file")
        with open(path, "rb") as file:
            head = file.read(_HEAD.size)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise ModelError(f"{path}: can't be read: {error.strerror}") from None
    if not head:
        raise ModelError(f"{path}: is empty, not a GGUF file; fetch it again")
    magic = head[:4]
    if magic in _OLD_MAGICS:
        raise ModelError(f"{path}: is in a format from before GGUF; get the model as GGUF")
    if magic != b"GGUF":
        raise ModelError(f"{path}: is not a GGUF file (it starts with {_shown(head)})")
    if len(head) < _HEAD.size:
        raise ModelError(f"{path}: is cut off after {size} bytes; fetch it again")
    _magic, version, _tensors, _keys = _HEAD.unpack(head)
    if int.from_bytes(head[4:8], "big") in _VERSIONS:
        raise ModelError(f"{path}: is a big-endian GGUF file, for another kind of machine")
    if version not in _VERSIONS:
        raise ModelError(f"{path}: is GGUF version {version}; versions 2 and 3 are supported")


def _shown(head: bytes) -> str:
    if head.startswith(b"PK"):
        return "PK, like a zip file or a PyTorch checkpoint"
    if head[8:9] == b"{":
        return "what looks like a safetensors header; convert it to GGUF"
    return repr(head[:8])[1:]
