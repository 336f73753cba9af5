"""What this machine gives to one process: cores and memory, container limits included."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def usable_threads() -> int:
    """Return the number of physical cores that this process may use, at least 1.

    llama.cpp is bound by the cores' arithmetic and memory, which two threads of a core share.
    """
    try:
        allowed = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS and Windows
        allowed = os.cpu_count() or 1
    physical = psutil.cpu_count(logical=False) or allowed
    return max(1, min(allowed, physical, _cgroup_cpus() or allowed))


def available_memory() -> int:
    """Return the bytes this process can still take: free memory, or less in a container."""
    available = int(psutil.virtual_memory().available)
    limit = _cgroup_memory_left()
    return available if limit is None else min(available, limit)


def _cgroup_cpus() -> int | None:
    """Return the whole cores of a cgroup v2 quota (`cpu.max`: quota and period in microseconds)."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = (_CGROUP / "cpu.max").read_text().split()
        return max(1, int(quota) // int(period))
    return None


def _cgroup_memory_left() -> int | None:
    """Return the bytes left under a cgroup v2 limit; file cache counts as free."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
        cache = next(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
        return max(0, limit - used + cache)
    return None
