"""`localbatch summarize` against the obvious script, on the same documents.

    python examples/documents.py build/documents
    python bench/summarize.py [PATHS...] [--rounds 3] [--json FILE]

The script reads the documents, cuts them, asks llama-cpp-python's `Llama` for one summary after
another, and merges. Chunks, prompts, limits of tokens and merges are those of localbatch, for both
use the same functions for them. Each measurement is a process of its own; in the time are reading,
cutting, loading the model, computing and writing. Systems take turns in each round.

Occupancy is the share of localbatch's slots that have a row, for each tenth of the time between the
first row's begin and the last one's end.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from localbatch.data.errors import InputError
from localbatch.data.request import Completion, FinishReason, Later, Request, Usage
from localbatch.engine.llm import LLM
from localbatch.jobs.job import completions
from localbatch.jobs.journal import Journal
from localbatch.models.catalog import resolve_model
from localbatch.summaries import job as job_module
from localbatch.summaries.answers import Answers
from localbatch.summaries.documents import find_documents
from localbatch.summaries.extract import extract
from localbatch.summaries.job import SummaryConfig, open_cutter, summarize
from localbatch.summaries.prompts import SummaryOptions
from localbatch.summaries.stream import SummaryStream
from localbatch.summaries.work import DocumentResult

SYSTEMS = ("script", "localbatch")
TENTHS = 10


@dataclass
class Slots:
    """When localbatch's slots had rows."""

    rows: list[tuple[float, float]] = field(default_factory=list)
    """Begin and end of each, in seconds of one clock."""
    slots: int = 0

    def watched(self, llm: LLM, rows: Iterable[Request | Completion | Later]) -> Iterator[Any]:
        """Pass rows on to the engine and note when each had a slot."""
        for completion in completions(llm, rows):
            now, times = time.perf_counter(), completion.timings
            self.rows.append((now - times.prefill_s - times.decode_s, now))
            self.slots = max(self.slots, llm.stats.slots)
            yield completion

    def tenths(self) -> list[float]:
        """Return the occupancy in each tenth of the time."""
        if not self.rows:
            return []
        first, last = min(begin for begin, _ in self.rows), max(end for _, end in self.rows)
        width = (last - first) / TENTHS
        edges = [first + width * i for i in range(TENTHS + 1)]
        return [
            sum(max(0.0, min(end, b) - max(begin, a)) for begin, end in self.rows)
            / (width * self.slots)
            for a, b in itertools.pairwise(edges)
        ]


def main() -> int:
    """Measure in turns and write the table; 1 if a measurement failed."""
    args = parser().parse_args()
    if args.measure:
        measure(args)
        return 0
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in SYSTEMS}
    for number in range(args.rounds):
        for name in SYSTEMS if number % 2 == 0 else SYSTEMS[::-1]:
            command = [sys.executable, __file__, *sys.argv[1:], "--measure", name]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            if done.returncode:
                print(f"{name} failed", file=sys.stderr)
                return 1
            found[name].append(json.loads(done.stdout.splitlines()[-1]))
            print(f"round {number + 1}, {name}: {found[name][-1]['wall_s']:.1f} s", file=sys.stderr)
    print(report(found))
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(description="localbatch summarize against the obvious script.")
    made.add_argument("paths", nargs="*", default=["build/documents"])
    made.add_argument("--model", default="smollm2-135m")
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--length", type=int, default=60, help="words of a summary")
    made.add_argument("--chunk-tokens", type=int, default=1000)
    made.add_argument("--ctx", type=int, default=2048, help="most tokens of a row, for both")
    made.add_argument("--threads", type=int, default=os.cpu_count(), help="of the script's Llama")
    made.add_argument("--json", help="file for all figures")
    made.add_argument("--measure", choices=SYSTEMS, help=argparse.SUPPRESS)
    return made


def measure(args: argparse.Namespace) -> None:
    """Run one system, and print what came of it as a line of JSON."""
    with tempfile.TemporaryDirectory() as folder:
        config = SummaryConfig(
            args.model, args.paths, str(Path(folder, "out")), SummaryOptions(length=args.length),
            chunk_tokens=args.chunk_tokens, engine={"ctx": args.ctx},
        )  # fmt: skip
        if args.measure == "script":
            print(json.dumps(run_script(config, args.threads)))
        else:
            print(json.dumps(run_localbatch(config)))


def run_localbatch(config: SummaryConfig) -> dict[str, Any]:
    """Summarize as the command does."""
    slots = Slots()
    setattr(job_module, "completions", slots.watched)  # noqa: B010 (not exported)
    result = summarize(config)
    if result.error is not None:
        raise result.error
    return {
        "wall_s": result.wall_s, "rows": len(slots.rows), **tokens_and_texts(result.documents),
        "slots": slots.slots, "tenths": slots.tenths(),
    }  # fmt: skip


def run_script(config: SummaryConfig, threads: int) -> dict[str, Any]:
    """Ask `Llama` for one summary after another."""
    from llama_cpp import Llama

    started = time.perf_counter()
    llama = Llama(
        str(resolve_model(config.model)), n_ctx=config.engine["ctx"], n_threads=threads,
        n_threads_batch=threads, verbose=False,
    )  # fmt: skip
    ended: list[DocumentResult] = []
    rows = 0
    path = Path(f"{config.output}.journal")
    with open_cutter(config) as cutter, Journal(path) as journal:
        stream = SummaryStream(
            find_documents(config.paths, config.output), partial(extract, encoding="utf-8"),
            cutter, cutter.prompts, Answers(journal), ended.append,
        )  # fmt: skip
        for request in stream.rows():
            if not isinstance(request, Request):
                raise InputError("a merge waits for what no one computes")
            stream.finish(ask(llama, request))
            rows += 1
    wall_s = time.perf_counter() - started
    return {"wall_s": wall_s, "rows": rows, **tokens_and_texts(ended)}


def ask(llama: Any, request: Request) -> Completion:
    """Return what `Llama` answers to a chat, greedy."""
    answer = llama.create_chat_completion(
        [dict(message) for message in request.messages or ()],
        max_tokens=request.params.max_tokens, temperature=0.0, repeat_penalty=1.0,
    )  # fmt: skip
    choice, usage = answer["choices"][0], answer["usage"]
    return Completion(
        request.id, request.index, choice["message"]["content"],
        FinishReason(choice["finish_reason"]),
        Usage(usage["prompt_tokens"], usage["completion_tokens"]),
    )  # fmt: skip


def tokens_and_texts(documents: list[DocumentResult]) -> dict[str, Any]:
    """Return how many tokens there were, and the summaries."""
    return {
        "prompt_tokens": sum(d.prompt_tokens for d in documents),
        "completion_tokens": sum(d.completion_tokens for d in documents),
        "summaries": {d.name: d.summary for d in documents if d.error is None},
    }


def report(found: dict[str, list[dict[str, Any]]]) -> str:
    """Return the table of medians, whether the summaries are the same, and the occupancy."""
    script, ours = (found[name] for name in SYSTEMS)
    lines = [
        "| system | seconds, median (all) | rows | prompt tokens | output tokens |",
        "|---|---|---|---|---|",
    ]
    for name, runs in found.items():
        walls = [run["wall_s"] for run in runs]
        lines.append(
            f"| {name} | {statistics.median(walls):.1f} ({', '.join(f'{w:.1f}' for w in walls)}) | "
            f"{runs[0]['rows']} | {runs[0]['prompt_tokens']:,} | {runs[0]['completion_tokens']:,} |"
        )
    ratios = [a["wall_s"] / b["wall_s"] for a, b in zip(script, ours, strict=True)]
    theirs, own = script[0]["summaries"], ours[0]["summaries"]
    alike = sum(own.get(name) == summary for name, summary in theirs.items())
    tenths = [statistics.mean(values) for values in zip(*(r["tenths"] for r in ours), strict=True)]
    return "\n".join([
        *lines, "",
        f"localbatch is {statistics.median(ratios):.2f} times as fast "
        f"({min(ratios):.2f} to {max(ratios):.2f}); {alike} of {len(theirs)} summaries are alike.",
        f"Occupancy of {ours[0]['slots']} slots, by tenths: "
        f"{', '.join(f'{share:.0%}' for share in tenths)}; "
        f"until the last tenth {statistics.mean(tenths[:-1] or [0.0]):.0%}.",
    ])  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
