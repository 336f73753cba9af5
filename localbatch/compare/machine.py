"""The machine that figures belong to."""

from __future__ import annotations

import contextlib
import platform
from pathlib import Path
from typing import Any

import psutil

from localbatch.compare.gpu import read_gpus
from localbatch.engine.machine import usable_threads

_CPUINFO = Path("/proc/cpuinfo")


def machine() -> dict[str, Any]:
    """Return processor, usable cores, memory in bytes, GPUs and system."""
    gpus = read_gpus()
    return {
        "cpu": _cpu_name(),
        "cores": usable_threads(),
        "memory_bytes": int(psutil.virtual_memory().total),
        "gpus": list(gpus.names) if gpus else [],
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def _cpu_name() -> str:
    with contextlib.suppress(OSError, StopIteration):
        lines = _CPUINFO.read_text("utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line[:10] == "model name")
    return platform.processor() or platform.machine()
