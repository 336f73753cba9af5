"""localbatch against llama-cpp-python's `Llama` one row at a time, on the same rows.

    python bench/short.py [--model NAME_OR_PATH] [--rounds 3] [--parallel N] [--threads N]

64 prompts of 20 to 80 tokens, 64 tokens out each, greedy, end of text ignored, same threads. Each
measurement is a process of its own; loading the model and one warm-up row are not in it, making
localbatch's context is. The two alternate; the table has medians over the rounds. Both must give
the same tokens, or the script says which rows differ.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from localbatch import LLM, SamplingParams
from localbatch.engine.machine import usable_threads
from localbatch.models.catalog import resolve_model

ROWS = Path(__file__).parent / "workloads" / "short.jsonl"
MODES = ("sequential", "localbatch")


def main() -> None:
    """Measure, and print a table and where the details are."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parallel", type=int)
    parser.add_argument("--threads", type=int, default=usable_threads())
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--measure", choices=MODES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        json.dump(measure(args), sys.stdout)
        return
    figures: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
    for round_number in range(args.rounds):
        for mode in MODES:
            figures[mode].append(in_child(mode, args))
            wall = figures[mode][-1]["wall_s"]
            print(f"round {round_number + 1}, {mode}: {wall:.2f} s", file=sys.stderr)
    report(args, figures)


def in_child(mode: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one mode in a fresh process."""
    command = [sys.executable, __file__, "--measure", mode, "--model", args.model]
    command += ["--threads", str(args.threads), "--tokens", str(args.tokens)]
    command += ["--rows", str(args.rows)]
    command += ["--parallel", str(args.parallel)] if args.parallel else []
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run the rows in one mode; returns seconds and the tokens of each row."""
    with ROWS.open(encoding="utf-8") as lines:
        prompts = [json.loads(line)["prompt"] for line in lines][: args.rows]
    path = str(resolve_model(args.model))
    if args.measure == "sequential":
        return sequential(path, prompts, args)
    return batched(path, prompts, args)


def sequential(path: str, prompts: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Use `Llama.generate`, which does not stop at the end of text, one row after another."""
    from llama_cpp import Llama

    llama = Llama(
        path, n_ctx=1024, n_threads=args.threads, n_threads_batch=args.threads, verbose=False
    )
    next(llama.generate(llama.tokenize(b"warm up"), temp=0.0))
    started = time.perf_counter()
    answers = []
    for prompt in prompts:
        llama.reset()
        stream = llama.generate(llama.tokenize(prompt.encode()), temp=0.0)
        answers.append([next(stream) for _ in range(args.tokens)])
    return {"wall_s": time.perf_counter() - started, "tokens": answers}


def batched(path: str, prompts: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Use localbatch with its own choices but for the threads."""
    params = SamplingParams(max_tokens=args.tokens, ignore_eos=True)
    with LLM(path, threads=args.threads, parallel=args.parallel) as llm:
        started = time.perf_counter()
        rows = llm.generate(prompts, params, raw=True)
        wall = time.perf_counter() - started
        decode = llm.stats.decode_s
        numerics = llm.stats.numerics
    return {
        "wall_s": wall,
        "decode_s": decode,
        "numerics": numerics.value if numerics else None,
        "tokens": [row.token_ids for row in rows],
    }


def report(args: argparse.Namespace, figures: dict[str, list[dict[str, Any]]]) -> None:
    """Print medians and what the answers have in common."""
    medians = {m: statistics.median(f["wall_s"] for f in figures[m]) for m in MODES}
    output_tokens = args.rows * args.tokens
    print(f"\n{machine()}, {args.threads} threads; {args.model}, {args.rounds} rounds, medians\n")
    print("| mode | seconds | output tok/s | speed-up |\n|---|---|---|---|")
    for mode in MODES:
        speed, ratio = output_tokens / medians[mode], medians["sequential"] / medians[mode]
        print(f"| {mode} | {medians[mode]:.2f} | {speed:.0f} | {ratio:.2f}x |")
    ratios = [s["wall_s"] / b["wall_s"] for s, b in zip(*figures.values(), strict=True)]
    outside = [1 - f["decode_s"] / f["wall_s"] for f in figures["localbatch"]]
    same = [
        one == other
        for one, other in zip(
            figures["sequential"][0]["tokens"], figures["localbatch"][0]["tokens"], strict=True
        )
    ]
    print(f"\nspeed-up by round: {', '.join(f'{ratio:.2f}x' for ratio in ratios)}")
    print(f"time outside of llama_decode: {statistics.median(outside):.1%} of localbatch's run")
    print(f"rows with exactly the same tokens: {sum(same)} of {len(same)}")
    if args.json:
        details = {"machine": machine(), "arguments": vars(args) | {"json": str(args.json)}}
        args.json.write_text(json.dumps(details | {"figures": figures}, default=str))


def machine() -> str:
    """Return the processor's name and the number of usable cores."""
    name = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
        name = names[0] if names else name
    return f"{name}, {usable_threads()} cores"


if __name__ == "__main__":
    main()
