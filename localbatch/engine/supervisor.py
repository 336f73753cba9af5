"""Keeps a worker alive: what kills it costs the guilty row only."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Iterator
from dataclasses import replace

from localbatch.data.config import EngineConfig, SplitMode
from localbatch.data.errors import EngineError, WorkerError
from localbatch.data.request import Completion, Later, Request, failed_completion
from localbatch.engine.backend import ModelCard
from localbatch.engine.client import WorkerClient
from localbatch.engine.engine import EngineStats, TextPiece
from localbatch.engine.preview import Preview

HOPELESS = 3
"""Rows that may kill a worker each before any was ever computed; then it isn't the rows' fault."""

_STARTS = 3
"""How often a worker may die while it starts."""


class Supervisor:
    """Runs rows in a worker; when it dies, starts another and finds the row that kills it.

    The rows that were with the dead worker are run again, half of them at a time, and those halves
    that kill another worker are split in turn, until a row is alone: it gets an error. All others
    are computed. Rows whose text is being streamed are not run again, since a part was shown.
    """

    def __init__(self, config: EngineConfig, *, debug: bool = False) -> None:
        self.num_restarts = 0
        self.config, self._debug = config, debug
        self._closed = False
        self._client = WorkerClient(config, debug=debug)

    @property
    def pid(self) -> int:
        """Process id of the worker."""
        return self._client.pid

    @property
    def card(self) -> ModelCard:
        """What the model says of itself."""
        return self._client.card

    @property
    def gpus(self) -> tuple[str, ...]:
        """The GPUs that the worker computes on."""
        return self._client.gpus

    @property
    def other_gpus(self) -> tuple[str, ...]:
        """GPUs that the model fits as well."""
        return self._client.other_gpus

    def stay_on(self, gpus: tuple[str, ...]) -> None:
        """Let workers that take over use these GPUs, whatever they find."""
        self.config = replace(self.config, devices=gpus, split_mode=SplitMode.NONE)

    @property
    def stats(self) -> EngineStats:
        """Counts of the present worker."""
        return self._client.stats

    def run(
        self, rows: Iterable[Request | Completion | Later], *, streams_text: bool = False
    ) -> Generator[Completion | TextPiece, None, None]:
        """Yield the completion of each request as it ends; see `WorkerClient.run`.

        Raises `EngineError` if workers die whatever they compute, and what the start of another
        one raises.
        """
        source = iter(rows)
        groups: list[list[Request]] = []  # to be run one by one, the last first
        num_computed = num_killers = 0
        while True:
            group = groups.pop() if groups else None
            attempt = _Attempt(source if group is None else iter(group))
            try:
                events = self._client.run(attempt.rows(), streams_text=streams_text)
                with contextlib.closing(events):
                    for event in events:
                        if isinstance(event, Completion):
                            attempt.out.pop(event.index, None)
                            num_computed += not event.failed
                        yield event
            except EngineError as error:
                lost = list(attempt.out.values())
                if self._closed or streams_text or not lost:
                    raise
                if group is not None and len(group) == 1:
                    num_killers += 1
                    if not num_computed and num_killers >= HOPELESS:
                        raise
                    yield failed_completion(lost[0].id, lost[0].index, str(error), lost[0].line)
                else:
                    middle = len(lost) // 2
                    groups += [half for half in (lost[middle:], lost[:middle]) if half]
                self._restart()
                continue
            if group is None:
                return

    def prepare(self, requests: list[Request]) -> list[Completion]:
        """Plan for rows, and make the contexts; see `WorkerClient.prepare`."""
        return self._client.prepare(requests)

    def preview(self, requests: list[Request], *, whole: bool = False) -> list[Preview]:
        """Return what would become of rows; see `WorkerClient.preview`."""
        return self._client.preview(requests, whole=whole)

    def close(self) -> None:
        """End the worker; unfinished rows are lost."""
        self._closed = True
        self._client.close()

    def _restart(self) -> None:
        self._client.close()
        for tries_left in reversed(range(_STARTS)):
            self.num_restarts += 1
            try:
                self._client = WorkerClient(self.config, debug=self._debug)
                return
            except WorkerError:
                if not tries_left:
                    raise


class _Attempt:
    """Rows on their way to a worker, and those that have not come back."""

    def __init__(self, source: Iterator[Request | Completion | Later]) -> None:
        self.out: dict[int, Request] = {}
        self._source = source

    def rows(self) -> Iterator[Request | Completion | Later]:
        """Yield the rows, taking note of them."""
        for row in self._source:
            if isinstance(row, Request):
                self.out[row.index] = row
            yield row
