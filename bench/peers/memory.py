"""The most memory that a process and its children took."""

from __future__ import annotations

import contextlib
import os
import threading
from types import TracebackType

import psutil

_EVERY_S = 0.2


class PeakMemory:
    """Samples resident memory while it is entered; `peak_mib` is the largest sum it saw.

    Pages that processes share, such as a mapped library, count once for each of them.
    """

    def __init__(self, pid: int | None = None) -> None:
        self.peak_mib = 0.0
        self._pid = pid or os.getpid()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()

    def _watch(self) -> None:
        while not self._stop.wait(_EVERY_S):
            self._sample()

    def _sample(self) -> None:
        self.peak_mib = max(self.peak_mib, tree_rss(self._pid) / 2**20)


def tree_rss(pid: int) -> int:
    """Return the resident bytes of a process and all below it; those that just ended count 0."""
    total = 0
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
    return total
