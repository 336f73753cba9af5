"""What NVIDIA's own tool says of the GPUs."""

from __future__ import annotations

import shutil
import subprocess
from typing import NamedTuple

_QUERY = ("--query-gpu=utilization.gpu,memory.used,name", "--format=csv,noheader,nounits")
_MIB = 1 << 20


class GpuReading(NamedTuple):
    """All GPUs at one moment."""

    use: float
    """Mean share of the last moments in which they computed, from 0 to 1."""
    used_bytes: int
    """By all processes."""
    names: tuple[str, ...]


def read_gpus() -> GpuReading | None:
    """Ask `nvidia-smi`; `None` where there is none, or no GPU."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    try:
        said = subprocess.run(
            [tool, *_QUERY], capture_output=True, text=True, timeout=10, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_gpus(said)


def parse_gpus(said: str) -> GpuReading | None:
    """Read `utilization.gpu [%], memory.used [MiB], name` of each GPU; `None` if a value lacks."""
    uses, used, names = [], 0, []
    for line in said.splitlines():
        parts = [part.strip() for part in line.split(",", 2)]
        if len(parts) != 3 or not parts[0].isdigit() or not parts[1].isdigit():
            return None
        uses.append(int(parts[0]) / 100)
        used += int(parts[1]) * _MIB
        names.append(parts[2])
    return GpuReading(sum(uses) / len(uses), used, tuple(names)) if uses else None
