"""xllamacpp: llama-server inside of this process.

It is asked through its local port, by the same client as llama-server: its Python functions return
text only, and what is compared are tokens.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import time
from typing import Any

from peers.client import Client, body_of, clients, tokens_of
from peers.grid import context_size
from peers.job import WARM_UP, Job, Measurement, cells_of
from peers.memory import PeakMemory
from peers.server import packages_of
from peers.tokens import tokenize

HOW_TO_INSTALL = "no package xllamacpp; `pip install --target DIR xllamacpp`, then --peers DIR"
NOTE = (
    "`xllamacpp` as PyPI has it for Linux is built for any processor (no AVX-512, no AMX); built "
    "from source it may be faster"
)


def default(rows: int) -> dict[str, Any]:
    """Return the settings for when there is no llama-server to find better ones with."""
    return {"slots": min(32, rows), "unified": False, "flash": True}


def is_installed(peers: str | None) -> bool:
    """Whether the package can be found."""
    with contextlib.suppress(ImportError, ValueError), packages_of(peers):
        return importlib.util.find_spec("xllamacpp") is not None
    return False


def measure(job: Job) -> Measurement:
    """Run the rows with the settings of llama-server's best."""
    rows = job.load()
    *prompts, warm_up = tokenize(job.model, [*(row.prompt for row in rows), WARM_UP])
    with packages_of(job.peers):
        package = importlib.import_module("xllamacpp")
    settings = job.settings
    server = package.Server(
        parameters(package, job, settings, context_size(settings, cells_of(prompts, rows)))
    )
    client = Client(int(server.listening_address.rsplit(":", 1)[1]))
    client.complete(body_of(warm_up, 1, tuned=True))
    bodies = [
        body_of(prompt, row.max_tokens, tuned=True)
        for prompt, row in zip(prompts, rows, strict=True)
    ]
    with PeakMemory() as memory:
        started = time.perf_counter()
        answers = client.complete_all(bodies, settings["slots"])
        wall = time.perf_counter() - started
    return Measurement(
        wall, [a["tokens_evaluated"] for a in answers], [a["tokens_predicted"] for a in answers],
        memory.peak_mib, tokens_of(answers, rows),
        {"settings": settings, "system_info": package.get_system_info().strip()},
    )  # fmt: skip


def parameters(package: Any, job: Job, settings: dict[str, Any], cells: int) -> Any:
    """Return the package's form of llama-server's settings."""
    flash = package.llama_flash_attn_type
    params = package.CommonParams()
    params.model.path = job.model
    params.n_ctx = cells
    params.n_parallel = settings["slots"]
    params.kv_unified = settings["unified"]
    params.flash_attn_type = (
        flash.LLAMA_FLASH_ATTN_TYPE_ENABLED
        if settings["flash"]
        else flash.LLAMA_FLASH_ATTN_TYPE_DISABLED
    )
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = job.peer_threads
    params.n_threads_http = clients(len(job.load()), settings["slots"]) + 4
    params.verbosity = 1
    return params
