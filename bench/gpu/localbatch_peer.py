"""The rows through localbatch, several times with one loaded model, as the other ways run them.

    python bench/gpu/localbatch_peer.py MODEL.gguf ROWS.jsonl [--set lanes=4] [--times 3]

The first run makes the contexts and is shown, but does not count. The GPU's use is what NVIDIA's
library says during the last run: the share of time in which any kernel ran.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import threading
import time
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))

from peers.settings import setting

from localbatch import LLM, SamplingParams

_EVERY_S = 0.05


class GpuUse:
    """Asks for the use of all GPUs while a run goes on."""

    def __init__(self) -> None:
        pynvml: Any = importlib.import_module("pynvml")
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]

        def ask() -> list[int]:
            return [pynvml.nvmlDeviceGetUtilizationRates(handle).gpu for handle in handles]

        self._ask = ask
        self._samples: list[list[int]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> GpuUse:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_EVERY_S):
            self._samples.append(self._ask())

    @property
    def text(self) -> str:
        """Mean use of each GPU, without the first and the last tenth."""
        cut = len(self._samples) // 10
        kept = self._samples[cut : len(self._samples) - cut] or [[0]]
        return ", ".join(f"{fmean(column):.0f} %" for column in zip(*kept, strict=True))


def main() -> None:
    """Measure, one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("rows", type=Path)
    parser.add_argument("--set", type=setting, action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.rows.read_text("utf-8").splitlines()]
    params = [
        SamplingParams(
            max_tokens=row["max_tokens"], ignore_eos=True, temperature=args.temperature, seed=1
        )
        for row in rows
    ]
    walls = []
    with LLM(args.model, **dict(args.set)) as llm:
        for _ in range(args.times):
            with GpuUse() as use:
                started = time.perf_counter()
                done = llm.generate([row["prompt"] for row in rows], params, raw=True)
                walls.append(time.perf_counter() - started)
        stats = llm.stats
    tokens = sum(completion.usage.completion_tokens for completion in done)
    errors = [completion.error for completion in done if completion.error]
    wanted = sum(row["max_tokens"] for row in rows)
    print(
        f"localbatch {dict(args.set) or ''}: first {walls[0]:.2f} s, then "
        f"{', '.join(f'{wall:.2f}' for wall in walls[1:])} s, "
        f"{tokens / min(walls[1:]):,.0f} tok/s; {stats.lanes} lanes, {stats.slots} rows, "
        f"{stats.row_cells} cells a row; in llama_decode {stats.decode_s / stats.run_s:.0%}; "
        f"GPU {use.text}; KV {stats.kv_bytes >> 20} MiB, buffers {stats.buffer_bytes >> 20} MiB"
        + ("" if tokens == wanted else f"; WRONG: {tokens} tokens, not {wanted}")
        + (f"; ERRORS: {errors[0]}" if errors else ""),
        flush=True,
    )


if __name__ == "__main__":
    main()
