"""The same rows through Hugging Face transformers, in bfloat16 with random weights.

    python bench/gpu/transformers_peer.py ROWS.jsonl --shape tinyllama-1.1b --batches 128,256,512
    python bench/gpu/transformers_peer.py ROWS.jsonl --shape tinyllama-1.1b --continuous

Static: a batch at a time, each until its longest answer is there; rows as they come, and sorted by
the length of their answers, as if that were known. Only tokens that were asked for count.
Continuous: `generate_batch`'s manager, each row with its own length, `--attention paged|sdpa` where
there are no flash attention kernels. Prompts have the same number of tokens as on the other side; a
short run before them is not counted.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
import transformers
from rows import IN_FRONT
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.generation.continuous_batching.utils import WorkloadHints

from models import SHAPES

Row = tuple[list[int], int]
"""Token ids in, number of tokens out."""


def load_rows(path: Path) -> list[Row]:
    """Return token ids of the right number, different in each row, and the tokens out."""
    rows = []
    for line in path.read_text("utf-8").splitlines():
        row = json.loads(line)
        rows.append(([1] * IN_FRONT + [ord(c) + 100 for c in row["prompt"]], row["max_tokens"]))
    return rows


def make_model(shape: str, attention: str | None) -> LlamaForCausalLM:
    """Return a model on the GPU that never ends by itself."""
    of = SHAPES[shape]
    config = LlamaConfig(
        vocab_size=of["vocab"], hidden_size=of["embd"], intermediate_size=of["ff"],
        num_hidden_layers=of["layers"], num_attention_heads=of["heads"],
        num_key_value_heads=of["kv_heads"], max_position_embeddings=of["ctx"], eos_token_id=None,
    )  # fmt: skip
    with torch.device("cuda"):
        model = LlamaForCausalLM._from_config(
            config, dtype=torch.bfloat16, attn_implementation=attention
        )
    return model.eval()


def run_static(model: LlamaForCausalLM, rows: list[Row], size: int) -> float:
    """Return the seconds of all rows, `size` of them at a time."""
    started = time.perf_counter()
    for at in range(0, len(rows), size):
        batch = rows[at : at + size]
        ids = torch.tensor([row[0] for row in batch], device="cuda")
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0,
            eos_token_id=None, max_new_tokens=max(row[1] for row in batch),
        )  # fmt: skip
        made.cpu()
    return time.perf_counter() - started


def run_continuous(model: LlamaForCausalLM, rows: list[Row], times: int) -> list[float]:
    """Return the seconds of some runs in one manager, after one of eight tokens for each row."""
    settings = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=512)
    hints = WorkloadHints(max(len(ids) for ids, _ in rows), max(row[1] for row in rows), len(rows))
    walls = []
    with model.continuous_batching_context_manager(
        generation_config=settings, block=True, timeout=5, workload_hints=hints
    ) as manager:
        for number in range(times + 1):
            wanted = [row[1] if number else 8 for row in rows]
            started = time.perf_counter()
            for place, (row, tokens) in enumerate(zip(rows, wanted, strict=True)):
                manager.add_request(
                    row[0], request_id=f"{number}-{place}", max_new_tokens=tokens, eos_token_id=-1
                )
            out = [len(_next(manager)) for _ in rows]
            walls.append(time.perf_counter() - started)
            if sum(out) != sum(wanted):
                print(f"continuous: {sum(out)} tokens, not {sum(wanted)}")
    return walls[1:]


def _next(manager: ContinuousBatchingManager) -> list[int]:
    """Wait for the next row that is done, and return its tokens."""
    while True:
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            if result.error is not None:
                raise RuntimeError(result.error)
            return list(result.generated_tokens)
        if result is None and not manager.is_running():
            raise RuntimeError("the generation thread ended")


def main() -> None:
    """Measure, a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--shape", choices=list(SHAPES), required=True)
    parser.add_argument("--batches", default="", help="sizes with commas")
    parser.add_argument("--times", type=int, default=2)
    parser.add_argument("--continuous", action="store_true")
    parser.add_argument("--attention", help="implementation, by its name in transformers")
    args = parser.parse_args()
    rows, model = load_rows(args.rows), make_model(args.shape, args.attention)
    total = sum(row[1] for row in rows)
    version = f"transformers {transformers.__version__}, torch {torch.__version__}"
    for size in map(int, filter(None, args.batches.split(","))):
        by_length = sorted(rows, key=lambda row: -row[1])
        for how, ordered in {"as they come": rows, "sorted": by_length}.items():
            run_static(model, [(ids, 8) for ids, _ in rows[:size]], size)
            walls = [run_static(model, ordered, size) for _ in range(args.times)]
            show(f"static, {size} at a time, {how} ({version})", walls, total)
            if rows == by_length:  # they have one length
                break
    if args.continuous:
        show(f"continuous ({version})", run_continuous(model, rows, args.times), total)


def show(what: str, walls: list[float], tokens: int) -> None:
    """Print the rate of the faster run."""
    each = ", ".join(f"{wall:.2f}" for wall in walls)
    print(f"{what}: {each} s, {tokens / min(walls):,.0f} tok/s", flush=True)


if __name__ == "__main__":
    main()
