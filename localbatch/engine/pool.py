"""Several workers, each with a GPU of its own, fed from one queue of rows."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import NamedTuple, TypeAlias

from localbatch.data.config import EngineConfig, SplitMode
from localbatch.data.errors import EngineError
from localbatch.data.request import Completion, Later, Request
from localbatch.engine.backend import ModelCard
from localbatch.engine.client import WINDOW
from localbatch.engine.engine import EngineStats, TextPiece
from localbatch.engine.preview import Preview
from localbatch.engine.sizing import GPU_SLOTS
from localbatch.engine.supervisor import Supervisor

_JOIN_S = 2.0

Rows: TypeAlias = Iterable[Request | Completion | Later]
Event: TypeAlias = Completion | TextPiece

_SUMS = ("steps", "prompt_tokens", "computed_prompt_tokens", "completion_tokens", "slots", "lanes",
         "ended_in_reasoning", "kv_bytes", "buffer_bytes")  # fmt: skip


class Pool:
    """Runs rows in a worker, or in one for each GPU if the model fits each of them.

    The first worker finds the GPUs. Rows are read in the caller's thread, and given out as workers
    have room for them, the last ones evenly, so that all end together.
    """

    def __init__(self, config: EngineConfig, *, debug: bool = False) -> None:
        first = Supervisor(config, debug=debug)
        self.members = [first]
        if first.other_gpus:
            first.stay_on(first.gpus)
            alone = replace(config, split_mode=SplitMode.NONE)
            others = [replace(alone, devices=(name,)) for name in first.other_gpus]
            try:
                with ThreadPoolExecutor() as starting:
                    self.members += starting.map(lambda c: Supervisor(c, debug=debug), others)
            except BaseException:
                self.close()
                raise

    @property
    def pid(self) -> int:
        """Process id of the first worker."""
        return self.members[0].pid

    @property
    def card(self) -> ModelCard:
        """What the model says of itself."""
        return self.members[0].card

    @property
    def num_restarts(self) -> int:
        """How often a worker died and another one took over."""
        return sum(member.num_restarts for member in self.members)

    @property
    def stats(self) -> EngineStats:
        """Counts of the present workers, added up; times are means."""
        return merged([member.stats for member in self.members])

    def run(self, rows: Rows, *, streams_text: bool = False) -> Generator[Event, None, None]:
        """Yield the completion of each request as it ends; see `Supervisor.run`."""
        if len(self.members) == 1:
            return self.members[0].run(rows, streams_text=streams_text)
        return _SharedRun(self.members, rows, streams_text).events()

    def prepare(self, requests: list[Request]) -> list[Completion]:
        """Plan for rows, and make the contexts, with the first worker's share of them.

        Returns the records of rows that can't be computed.
        """
        failed: list[Completion] = []
        for number, member in enumerate(self.members):
            share = requests[number :: len(self.members)]
            if share:
                failed += member.prepare(share)
        return failed

    def preview(self, requests: list[Request], *, whole: bool = False) -> list[Preview]:
        """Return what would become of rows; see `Supervisor.preview`."""
        return self.members[0].preview(requests, whole=whole)

    def close(self) -> None:
        """End the workers; unfinished rows are lost."""
        for member in self.members:
            member.close()


def merged(stats: list[EngineStats]) -> EngineStats:
    """Return the counts of several workers together; what is no count is the first one's."""
    if len(stats) == 1:
        return stats[0]
    sums = {name: sum(getattr(each, name) for each in stats) for name in _SUMS}
    means = {
        name: sum(getattr(each, name) for each in stats) / len(stats)
        for name in ("decode_s", "run_s")
    }
    rest = {f.name: getattr(stats[0], f.name) for f in fields(EngineStats)}
    return EngineStats(**(rest | sums | means))


class _Wish(NamedTuple):
    """A worker has room for so many rows."""

    member: int
    rows: int


class _End(NamedTuple):
    """A worker is through, or can't go on."""

    member: int
    error: BaseException | None


@dataclass
class _Member:
    """One worker's part of a run."""

    worker: Supervisor
    given: queue.SimpleQueue[list[Request | Completion] | None]
    in_flight: int = 0
    """Rows that it has; touched by its own thread only, as the next one is."""
    has_asked: bool = False

    @property
    def room(self) -> int:
        """Rows it lacks to have its batch twice; 0 while it lacks only few of them.

        Rows of one length end together, and the next ones must be there by then: a worker asks
        when it reports.
        """
        slots = self.worker.stats.slots or GPU_SLOTS
        room = 2 * slots - self.in_flight
        return room if room >= max(1, slots // 4) or not self.in_flight else 0


class _SharedRun:
    """One run over several workers."""

    def __init__(self, workers: list[Supervisor], rows: Rows, streams_text: bool) -> None:
        self._source = iter(rows)
        self._streams_text = streams_text
        self._members = [_Member(worker, queue.SimpleQueue()) for worker in workers]
        self._inbox: queue.SimpleQueue[Event | _Wish | _End] = queue.SimpleQueue()
        self._ahead: deque[Request | Completion] = deque()  # read, but not given out
        self._exhausted = self._must_wait = False
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=self._work, args=(number,), daemon=True)
            for number in range(len(workers))
        ]

    def events(self) -> Generator[Event, None, None]:
        """Yield what comes back, and give out rows on the way."""
        for thread in self._threads:
            thread.start()
        wishes, num_out, num_working = list[_Wish](), 0, len(self._threads)
        try:
            while num_working:
                message = self._inbox.get()
                if isinstance(message, _Wish):
                    wishes.append(message)
                elif isinstance(message, _End):
                    num_working -= 1
                    if message.error is not None:
                        raise message.error
                else:
                    num_out -= isinstance(message, Completion)
                    yield message
                    self._must_wait = False
                wishes, given = self._grant(wishes)
                num_out += given
                if wishes and not num_out:
                    raise EngineError("rows wait for answers, and none is being computed")
        finally:
            self._stopped.set()
            for member in self._members:
                member.given.put(None)
            for thread in self._threads:
                thread.join(_JOIN_S)

    def _grant(self, wishes: list[_Wish]) -> tuple[list[_Wish], int]:
        """Give rows to those who want some; returns what is left, and how many were given."""
        num_given = 0
        while wishes:
            self._read_ahead()
            if not self._ahead and not self._exhausted:
                break
            member = self._members[wishes[0].member]
            share = self._share(wishes[0].rows)
            member.given.put(share or None)
            num_given += len(share)
            wishes = wishes[1:]
        return wishes, num_given

    def _read_ahead(self) -> None:
        most = WINDOW * len(self._members)
        while len(self._ahead) < most and not (self._exhausted or self._must_wait):
            row = next(self._source, None)
            if row is None:
                self._exhausted = True
            elif isinstance(row, Later):
                self._must_wait = True
            else:
                self._ahead.append(row)

    def _share(self, most: int) -> list[Request | Completion]:
        """Take an even share of what was read, or what is wanted of it."""
        size = -(-len(self._ahead) // len(self._members))
        return [self._ahead.popleft() for _ in range(min(size, most))]

    def _work(self, number: int) -> None:
        """Run what one worker is given; in a thread of its own."""
        member, error = self._members[number], None
        try:
            events = member.worker.run(self._rows_of(number), streams_text=self._streams_text)
            for event in events:
                member.in_flight -= isinstance(event, Completion)
                self._inbox.put(event)
                if self._stopped.is_set():
                    events.close()
                    break
        except BaseException as raised:
            error = raised
        self._inbox.put(_End(number, error))

    def _rows_of(self, number: int) -> Iterator[Request | Completion | Later]:
        """Yield a worker's rows, and `Later` while none are there for it."""
        member = self._members[number]
        while not self._stopped.is_set():
            room = member.room
            if room and not member.has_asked:
                self._inbox.put(_Wish(number, room))
                member.has_asked = True
            try:
                # What it has must go on while others are being read, or these hang on it.
                share = member.given.get(block=not member.in_flight)
            except queue.Empty:
                yield Later.LATER
                continue
            if share is None:
                return
            member.has_asked = False
            member.in_flight += len(share)
            yield from share
            yield Later.LATER
