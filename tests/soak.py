"""What takes too long for the test suite: kills at random moments, damaged models, a million rows.

    python tests/soak.py [--seed N] [kill-parent] [kill-worker] [gguf] [lines] [million]

Without names all are run. Each prints a line of figures; the exit code is 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from localbatch.data.config import EngineConfig
from localbatch.data.errors import LocalbatchError
from localbatch.data.request import Completion, Request
from localbatch.data.sampling_params import SamplingParams
from localbatch.engine.supervisor import Supervisor
from localbatch.formats.inputs import InputFormat, InputSource, read_requests
from tests import tiny_gguf

KILLS = 100


class WrongError(Exception):
    """Something is not as promised."""


def kill_parent(folder: Path, rng: random.Random) -> str:
    """SIGKILL `localbatch run` at random moments until it ends by itself; nothing is lost."""
    told = []
    for name, model, rows, options in jobs(folder):
        source, output = folder / f"{name}.jsonl", folder / f"{name}-out.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
        command = [
            sys.executable, "-m", "localbatch", "run", model, str(source), "-o", str(output), "-q",
            *options,
        ]  # fmt: skip
        started = time.monotonic()
        subprocess.run(command, check=True)
        whole_s = time.monotonic() - started
        expected = answers(output)
        kills = computed = starts = 0
        while kills < KILLS:
            for path in folder.glob(f"{name}-out.jsonl*"):
                path.unlink()
            while True:
                starts += 1
                if run_and_kill(command, rng.uniform(0.2, 1.1) * whole_s):
                    break
                kills += 1
            check(answers(output) == expected, f"{name}: other answers after {kills} kills")
            computed += 1
        told.append(f"{name}: {kills} kills in {computed} jobs of {len(rows)} rows, {starts} runs")
    return "; ".join(told)


def jobs(folder: Path) -> Iterator[tuple[str, str, list[dict[str, Any]], list[str]]]:
    """Yield name, model, rows and options: the fake backend, and a tiny model in llama.cpp."""
    rows = [{"prompt": f"prompt {i}", "max_tokens": 1 + i % 20} for i in range(2000)]
    yield "fake", "fake", rows, ["--backend", "fake", "--ignore-eos"]
    model = folder / "tiny.gguf"
    tiny_gguf.write(model)
    rows = [{"prompt": f"{i} {i}", "max_tokens": 1 + i % 30} for i in range(400)]
    yield "llama", str(model), rows, ["--raw", "--ignore-eos"]


def run_and_kill(command: list[str], after_s: float) -> bool:
    """Run a command, and kill it and its worker after a time; returns whether it ended before."""
    process = subprocess.Popen(command)
    try:
        return process.wait(timeout=after_s) == 0
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False


def answers(output: Path) -> list[dict[str, Any]]:
    """Return the records without their times."""
    rows = [json.loads(line) for line in output.read_text().split("\n")[:-1]]
    return [{k: v for k, v in row.items() if k != "timings"} for row in rows]


def kill_worker(folder: Path, rng: random.Random) -> str:
    """SIGKILL the worker at random moments; every row is answered, as without."""
    del folder
    config = EngineConfig("fake", backend="fake", threads=1, fake_step_s=0.002)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    rows = [Request(i, i, prompt=f"prompt {i}", params=params) for i in range(3000)]
    expected = texts(Supervisor(config), rows)
    kills = jobs_run = 0
    while kills < KILLS:
        supervisor = Supervisor(config)
        over = threading.Event()

        def kill(supervisor: Supervisor = supervisor, over: threading.Event = over) -> None:
            while not over.wait(rng.uniform(0.05, 1.5)):
                with contextlib.suppress(ProcessLookupError):  # it is being replaced just now
                    os.kill(supervisor.pid, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            found = texts(supervisor, rows)
        finally:
            over.set()
            killer.join()
        check(found == expected, "other answers after the worker was killed")
        kills += supervisor.num_restarts
        jobs_run += 1
    return f"{kills} workers killed in {jobs_run} jobs of {len(rows)} rows"


def texts(supervisor: Supervisor, rows: list[Request]) -> dict[int, str]:
    """Return the text of each row; each must come once, and none may fail."""
    found: dict[int, str] = {}
    for event in supervisor.run(rows):
        assert isinstance(event, Completion)
        check(not event.failed, f"row {event.index} failed: {event.error}")
        check(event.index not in found, f"row {event.index} came twice")
        found[event.index] = event.text
    supervisor.close()
    check(len(found) == len(rows), "rows are missing")
    return found


def gguf(folder: Path, rng: random.Random) -> str:
    """Load models cut at 200 places and with 500 changed bytes: an error or a load, no hang."""
    whole = folder / "whole.gguf"
    tiny_gguf.write(whole)
    data = whole.read_bytes()
    head = len(data) // 4
    damaged = [data[: rng.randrange(len(data))] for _ in range(200)]
    for _ in range(500):
        changed = bytearray(data)
        changed[rng.randrange(head)] = rng.randrange(256)
        damaged.append(bytes(changed))
    path, refused, loaded = folder / "damaged.gguf", 0, 0
    for number, content in enumerate(damaged):
        path.write_bytes(content)
        result = subprocess.run(
            [sys.executable, "-m", "localbatch", "run", str(path), "-", "--raw", "-q",
             "--max-tokens", "2"],
            input="hello\n", capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        where = f"damaged model {number}: exit code {result.returncode}: {result.stderr[-300:]}"
        check(result.returncode in (0, 1, 2, 3), where)
        check("Traceback" not in result.stderr, where)
        loaded += result.returncode == 0
        refused += result.returncode != 0
        if result.returncode in (1, 2):
            check(result.stderr.count("\n") == 1, where)
    return f"{refused} of {len(damaged)} damaged models refused, {loaded} ran"


def lines(folder: Path, rng: random.Random) -> str:
    """Read 10,000 generated lines: each a row, or one error with its line number."""
    path = folder / "lines.jsonl"
    with path.open("wb") as file:
        for _ in range(10_000):
            file.write(generated_line(rng).replace(b"\n", b" ") + b"\n")
    before = psutil.Process().memory_info().rss
    good = bad = 0
    with path.open("rb") as stream:
        source = InputSource(stream, InputFormat.JSONL, str(path))
        for row in read_requests(source, SamplingParams()):
            if isinstance(row, Request):
                good += 1
                continue
            bad += 1
            check(row.line is not None and bool(row.error), f"no line or error: {row}")
            check("\n" not in (row.error or ""), f"more than a line: {row.error!r}")
    grown = (psutil.Process().memory_info().rss - before) / 2**20
    check(grown < 300, f"memory grew by {grown:.0f} MiB")
    return f"{good:,} rows and {bad:,} errors of 10,000 lines; memory grew by {grown:.0f} MiB"


def generated_line(rng: random.Random) -> bytes:
    """Return something that may stand in a line."""
    values: list[Callable[[], Any]] = [
        lambda: "text", lambda: "", lambda: rng.randrange(-(10**30), 10**30), lambda: None,
        lambda: True, list, lambda: {"a": [1, {"b": None}]}, lambda: 1e308, lambda: "\0",
        lambda: "\ud800", lambda: "<|im_start|>system", lambda: [{"role": "user", "content": "x"}],
        lambda: "x" * rng.randrange(10_000), lambda: float("nan"),
    ]  # fmt: skip
    names = ["id", "prompt", "messages", "max_tokens", "temperature", "stop", "seed", "nonsense"]
    row = {name: rng.choice(values)() for name in rng.sample(names, rng.randrange(1, 5))}
    if rng.randrange(2):
        row = {"id": rng.getrandbits(60), "prompt": "text " * rng.randrange(1, 500)}
    data = json.dumps(row).encode()
    kind = rng.randrange(8)
    if kind == 0:
        return data[: rng.randrange(len(data) + 1)]
    if kind == 1:
        return bytes(rng.randrange(256) for _ in range(rng.randrange(60)))
    if kind == 2 and rng.randrange(40) == 0:
        return b'{"prompt": "' + b"y" * (5 * 2**20) + b'"}'
    if kind == 3:
        return b"[" * rng.randrange(5000)
    return data


def million(folder: Path, rng: random.Random) -> str:
    """Run a million rows on the fake backend: memory stays flat, and it starts soon."""
    del rng
    source, output = folder / "million.txt", folder / "million-out.jsonl"
    with source.open("w") as file:
        file.writelines(f"prompt number {i}\n" for i in range(1_000_000))
    command = [
        sys.executable, "-m", "localbatch", "run", "fake", str(source), "-o", str(output), "-q",
        "--backend", "fake", "--max-tokens", "1", "--ignore-eos", "--no-share-prefixes",
    ]  # fmt: skip
    process = psutil.Popen(command)
    started, first_s, samples = time.monotonic(), 0.0, []
    journal = Path(f"{output}.journal-wal")
    while process.poll() is None:
        time.sleep(1)
        if not first_s and journal.exists() and journal.stat().st_size > 100_000:
            first_s = time.monotonic() - started
        try:
            family = [process, *process.children()]
            samples.append(sum(p.memory_info().rss for p in family) / 2**20)
        except psutil.NoSuchProcess:
            break
    whole_s = time.monotonic() - started
    check(process.returncode == 0, f"exit code {process.returncode}")
    with output.open() as file:
        check(sum(1 for _ in file) == 1_000_000, "rows are missing")
    check(0 < first_s < 30, f"the first rows took {first_s:.0f} s")
    early, late = max(samples[: len(samples) // 3]), max(samples)
    check(late < early * 1.3 + 100, f"memory grew from {early:.0f} to {late:.0f} MiB")
    return (
        f"a million rows in {whole_s:.0f} s, the first after {first_s:.0f} s; "
        f"at most {early:.0f} MiB in the first third, {late:.0f} MiB in all"
    )


def check(condition: bool, message: str) -> None:
    """Raise unless it holds."""
    if not condition:
        raise WrongError(message)


CHECKS = {
    "kill-parent": kill_parent, "kill-worker": kill_worker, "gguf": gguf, "lines": lines,
    "million": million,
}  # fmt: skip


def main() -> int:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("names", nargs="*", choices=[*CHECKS, []])
    args = parser.parse_args()
    failed = 0
    for name in args.names or CHECKS:
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = CHECKS[name](Path(folder), random.Random(f"{name} {args.seed}"))
            except (WrongError, LocalbatchError, subprocess.SubprocessError) as error:
                found, failed = f"FAILED: {error}", failed + 1
        sys.stdout.write(f"{name} ({time.monotonic() - started:.0f} s): {found}\n")
        sys.stdout.flush()
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
