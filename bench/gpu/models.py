"""Writes models of known shapes with random weights: what they say is noise, their speed is real.

    python bench/gpu/models.py FILE.gguf --shape tinyllama-1.1b [--kind q4_k_m]

One letter of a prompt is one token. Needs the package gguf.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.tiny_gguf import FILE_TYPES, quantize, write

SHAPES: dict[str, dict[str, Any]] = {  # of the published models
    "tinyllama-1.1b": {
        "layers": 22, "embd": 2048, "ff": 5632, "heads": 32, "kv_heads": 4, "vocab": 32000,
        "ctx": 4096,
    },
    "llama-8b": {
        "layers": 32, "embd": 4096, "ff": 14336, "heads": 32, "kv_heads": 8, "vocab": 128256,
        "ctx": 8192,
    },
}  # fmt: skip


def main() -> None:
    """Write one model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--shape", choices=list(SHAPES), required=True)
    parser.add_argument("--kind", choices=list(FILE_TYPES), default="f16")
    args = parser.parse_args()
    if args.kind == "f16":
        write(args.file, **SHAPES[args.shape], spread=0.02)
        return
    raw = args.file.with_suffix(".f16")
    write(raw, **SHAPES[args.shape], spread=0.02)
    quantize(raw, args.file, args.kind)
    raw.unlink()


if __name__ == "__main__":
    main()
