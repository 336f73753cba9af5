"""Threads that llama.cpp computes in.

OpenMP keeps helpers for every thread that ever computed with several. When all helpers are more
than the cores, GNU's puts them to sleep at once instead of letting them spin while they wait for
each other (`gomp_managed_threads` in libgomp's `config/linux/wait.h`), some hundred times a step:
on two cores a step of one row of a small model then takes 32 ms instead of 6. So whatever computes
does so in a thread that ends when its helpers are no longer wanted.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


class ComputeThread:
    """A thread that starts when there is something to do, and can be ended with its helpers."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None

    def begin(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Call a function in the thread, after those that were begun before."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="compute")
        return self._executor.submit(function, *args, **kwargs)

    def end(self) -> None:
        """Wait for what was begun, and end the thread; the next call starts another."""
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None


def apart(function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Call a function in a thread that ends with it."""
    thread = ComputeThread()
    try:
        return thread.begin(function, *args, **kwargs).result()
    finally:
        thread.end()
