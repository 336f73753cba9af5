"""What this machine gives to one process: cores and memory, container limits included."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def usable_threads() -> int:
    """Return the number of physical cores that this process may use, at least 1.

    llama.cpp is bound by the cores' arithmetic and memory, which two threads of a core share.
    """
    allowed = len(_allowed_cores())
    physical = psutil.cpu_count(logical=False) or allowed
    return max(1, min(allowed, physical, _cgroup_cpus() or allowed))


def available_memory() -> int:
    """Return the bytes this process can still take: free memory, or less in a container."""
    available = int(psutil.virtual_memory().available)
    limit = _cgroup_memory_left()
    return available if limit is None else min(available, limit)


class OtherWork:
    """Finds out how much of the cores other processes take while a block runs."""

    def __init__(self) -> None:
        self.share = 0.0
        """Of the time of all cores that this process may use."""
        self._started = self._before = 0.0

    def __enter__(self) -> OtherWork:
        self._started, self._before = time.perf_counter(), _others_s()
        return self

    def __exit__(self, *_: object) -> None:
        wall_s = time.perf_counter() - self._started
        self.share = (_others_s() - self._before) / max(1e-9, wall_s * len(_allowed_cores()))


def _others_s() -> float:
    """Return the seconds that the usable cores have worked for others than this process."""
    cores = psutil.cpu_times(percpu=True)
    used = [cores[i] for i in _allowed_cores() if i < len(cores)]
    busy = sum(
        core.user + core.system + getattr(core, "nice", 0.0) + getattr(core, "steal", 0.0)
        for core in used
    )
    own = psutil.Process().cpu_times()
    return float(busy - own.user - own.system)


def _allowed_cores() -> set[int]:
    try:
        return os.sched_getaffinity(0)
    except AttributeError:  # not on macOS and Windows
        return set(range(os.cpu_count() or 1))


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
