"""Small facts measured once for a model on a machine, kept between runs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import tempfile
from pathlib import Path

_MOST = 200


class FactCache:
    """A JSON file of key and value under the user's cache folder.

    It only ever saves time: what can't be read is measured again, what can't be written is not
    kept.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path or cache_folder() / "measured.json"

    def get(self, key: str) -> str | None:
        """Return what was kept for `key`."""
        value = self._read().get(key)
        return value if isinstance(value, str) else None

    def put(self, key: str, value: str) -> None:
        """Keep `value`; the oldest facts go when there are too many."""
        facts = {k: v for k, v in self._read().items() if k != key} | {key: value}
        kept = dict(list(facts.items())[-_MOST:])
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", dir=self._path.parent, suffix=".part", delete=False, encoding="utf-8"
            ) as file:
                json.dump(kept, file, indent=1)
            os.replace(file.name, self._path)

    def _read(self) -> dict[str, object]:
        with contextlib.suppress(OSError, ValueError):
            facts = json.loads(self._path.read_text(encoding="utf-8"))
            if isinstance(facts, dict):
                return facts
        return {}


def cache_folder() -> Path:
    """Return the user's cache folder for localbatch."""
    if os.name == "nt" and (local := os.environ.get("LOCALAPPDATA")):
        return Path(local) / "localbatch"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "localbatch"


def fact_key(question: str, model: str, *conditions: object) -> str:
    """Return the key of a fact about a model file on this processor under some conditions."""
    stat = os.stat(model)
    parts = [question, os.path.realpath(model), stat.st_size, stat.st_mtime_ns, _processor()]
    return hashlib.sha256(repr([*parts, *conditions]).encode()).hexdigest()


def _processor() -> str:
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line for line in lines if line.startswith("model name"))
    return platform.processor() or platform.machine()
