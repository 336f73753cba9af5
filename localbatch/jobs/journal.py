"""The journal: every finished row of a job, safe in a SQLite file beside the output.

A row counts as done when it is in here. The output file is made from it, so it can be written again
at any time, and a run that was cut short goes on where it was.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import sqlite3
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from localbatch.data.errors import JournalError, LocalbatchError, OutputError
from localbatch.data.request import Completion
from localbatch.formats.records import json_line, record
from localbatch.jobs.journal_files import APPLICATION_ID, VERSION, make_journal

_SURROUNDINGS = ("unable to open", "readonly", "disk is full", "disk I/O", "locked")
"""In SQLite's messages: it is not the file that is wrong."""

_ROWS = "SELECT number, kind, fingerprint, record, crc FROM rows"

_GROUP_S = 0.05
"""Rows that end within this time are made durable together."""


class RowKind(IntEnum):
    """How a row ended."""

    ANSWERED = 0
    FAILED = 1
    """In the engine; it is taken again if asked for."""
    UNREADABLE = 2
    """In the input; it is read again in every run."""


class Entry(NamedTuple):
    """A finished row."""

    completion: Completion
    fingerprint: bytes
    kind: RowKind


class FinishedRow(NamedTuple):
    """A row as it is kept."""

    number: int
    kind: RowKind
    fingerprint: bytes
    record: str
    """A line of JSON."""


class Counts(NamedTuple):
    """Finished rows by kind."""

    answered: int
    failed: int
    unreadable: int

    @property
    def total(self) -> int:
        """All finished rows."""
        return sum(self)


class Journal:
    """The finished rows of one job.

    `add` hands a row to a thread that writes; it is durable once `take_durable` returns it. Raises
    `JournalError` if the file is damaged, foreign or of another version, and `OutputError` if it
    can't be written.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self.path = path
        is_new = not path.exists() or path.stat().st_size == 0
        if read_only and is_new:
            raise JournalError(f"{path}: there is no such journal; was the job run with -o?")
        if is_new:
            make_journal(path)
        self._file = os.stat(path)
        self._reader = self._connect()
        self._inbox: queue.SimpleQueue[Entry | None] = queue.SimpleQueue()
        self._durable: queue.SimpleQueue[Completion] = queue.SimpleQueue()
        self._error: LocalbatchError | None = None
        self._thread: threading.Thread | None = None
        try:
            try:
                self._open()
            except JournalError:
                if not read_only:
                    raise
                self._reader.close()  # perhaps it is where nothing can be written
                self._reader = self._connect("mode=ro&immutable=1")
                self._open()
        except LocalbatchError:
            self._reader.close()
            raise

    @property
    def manifest(self) -> dict[str, Any]:
        """What the job is: names and values, empty for a new journal."""
        found = self._query("SELECT name, value FROM manifest")
        return {name: json.loads(value) for name, value in found}

    def update_manifest(self, values: dict[str, Any]) -> None:
        """Note names and values; those there are replaced."""
        pairs = [(name, json.dumps(value)) for name, value in values.items()]
        try:
            with self._reader:
                self._reader.executemany("INSERT OR REPLACE INTO manifest VALUES (?, ?)", pairs)
        except sqlite3.Error as error:
            raise self._write_failure(error) from None

    def counts(self) -> Counts:
        """Return how many rows there are of each kind."""
        found = dict(self._query("SELECT kind, COUNT(*) FROM rows GROUP BY kind"))
        return Counts(*(found.get(kind, 0) for kind in RowKind))

    def find(self, number: int) -> tuple[RowKind, bytes] | None:
        """Return kind and fingerprint of a finished row, `None` if it is not finished."""
        found = self._query("SELECT kind, fingerprint FROM rows WHERE number = ?", number)
        return (RowKind(found[0][0]), bytes(found[0][1])) if found else None

    def last_number(self) -> int:
        """Return the highest place of a finished row, -1 if there is none."""
        found = self._query("SELECT MAX(number) FROM rows")[0][0]
        return -1 if found is None else int(found)

    def forget(self, kinds: Sequence[RowKind]) -> int:
        """Drop the rows of these kinds, to be taken again; returns how many there were."""
        marks = ", ".join("?" * len(kinds))
        try:
            with self._reader:
                dropped = self._reader.execute(f"DELETE FROM rows WHERE kind IN ({marks})", kinds)
        except sqlite3.Error as error:
            raise self._write_failure(error) from None
        return dropped.rowcount

    def drop(self, numbers: Iterable[int]) -> None:
        """Drop the rows at these places."""
        try:
            with self._reader:
                self._reader.executemany(
                    "DELETE FROM rows WHERE number = ?", [(number,) for number in numbers]
                )
        except sqlite3.Error as error:
            raise self._write_failure(error) from None

    def records(self) -> Iterator[str]:
        """Yield the JSON records in the order of the input, as they are when this is called."""
        for row in self.rows():
            yield row.record

    def rows(self) -> Iterator[FinishedRow]:
        """Yield the finished rows in the order of the input, as they are when this is called."""
        try:
            yield from map(self._checked, self._reader.execute(f"{_ROWS} ORDER BY number"))
        except sqlite3.Error as error:
            raise self._read_failure(error) from None

    def record(self, number: int) -> str:
        """Return the JSON record of a finished row."""
        return self._checked(self._query(f"{_ROWS} WHERE number = ?", number)[0]).record

    def _checked(self, row: tuple[Any, ...]) -> FinishedRow:
        number, kind, fingerprint, text, crc = row
        if zlib.crc32(text.encode()) != crc:
            raise self._damage(f"row {number + 1} is not what it was")
        return FinishedRow(number, RowKind(kind), bytes(fingerprint), text)

    def add(self, entry: Entry) -> None:
        """Hand a finished row over to be written; raises `OutputError` if writing failed before."""
        if self._error is not None:
            raise self._error
        if self._thread is None:
            self._thread = threading.Thread(target=self._write, daemon=True)
            self._thread.start()
        self._inbox.put(entry)

    def take_durable(self) -> list[Completion]:
        """Return the rows that became durable since the last call."""
        taken = []
        with contextlib.suppress(queue.Empty):
            while True:
                taken.append(self._durable.get_nowait())
        return taken

    def flush(self) -> None:
        """Wait until all rows are durable; raises `OutputError` if they can't be."""
        if self._thread is not None:
            self._inbox.put(None)
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Write what is to be written and close; errors that `flush` would raise are dropped."""
        with contextlib.suppress(LocalbatchError):
            self.flush()
        with contextlib.suppress(sqlite3.Error):
            self._reader.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _connect(self, mode: str = "mode=rw") -> sqlite3.Connection:
        uri = f"{self.path.absolute().as_uri()}?{mode}"
        try:
            return sqlite3.connect(uri, uri=True, timeout=10, check_same_thread=False)
        except sqlite3.Error as error:
            raise self._read_failure(error) from None

    def _open(self) -> None:
        """Check what is there."""
        if self._query("PRAGMA application_id")[0][0] != APPLICATION_ID:
            raise JournalError(f"{self.path}: is no journal of localbatch; move it away")
        version = self._query("PRAGMA user_version")[0][0]
        if version != VERSION:
            raise JournalError(
                f"{self.path}: is of version {version}, this localbatch writes {VERSION}; "
                "use the localbatch that made it, or start over with --fresh"
            )
        found = self._query("PRAGMA quick_check(1)")[0][0]
        if found != "ok":
            raise self._damage(found)
        self._query("PRAGMA synchronous = FULL")

    def _query(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        try:
            return self._reader.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            raise self._read_failure(error) from None

    def _read_failure(self, error: sqlite3.Error) -> JournalError:
        if any(words in str(error) for words in _SURROUNDINGS):
            return JournalError(
                f"{self.path}: can't be used ({error}); check the disk and its permissions"
            )
        return self._damage(error)

    def _damage(self, reason: object) -> JournalError:
        if "not a database" in str(reason):
            return JournalError(f"{self.path}: is no journal, or not any more; move it away")
        return JournalError(
            f"{self.path}: is damaged ({' '.join(str(reason).split())}); --fresh starts over, "
            "and what the output file holds stays there until then"
        )

    def _write_failure(self, error: sqlite3.Error) -> OutputError:
        return OutputError(
            f"{self.path}: writing failed ({error}); what was finished before is safe: "
            "make room and run the same command again"
        )

    def _write(self) -> None:
        """Write rows in groups until told to stop; the thread's own connection."""
        try:
            self._check_place()
            with contextlib.closing(self._connect()) as connection:
                connection.execute("PRAGMA synchronous = FULL")
                going_on = True
                while going_on:
                    group, going_on = self._next_group()
                    self._check_place()
                    with connection:
                        connection.executemany(
                            "INSERT OR REPLACE INTO rows VALUES (?, ?, ?, ?, ?)", map(_row, group)
                        )
                    for entry in group:
                        self._durable.put(entry.completion)
        except sqlite3.Error as error:
            self._error = self._write_failure(error)
        except LocalbatchError as error:
            self._error = error

    def _check_place(self) -> None:
        """Raise `OutputError` if the file is not where it was; SQLite would go on without it."""
        try:
            is_there = os.path.samestat(os.stat(self.path), self._file)
        except OSError:
            is_there = False
        if not is_there:
            raise OutputError(
                f"{self.path}: was deleted or replaced during the run; what was finished before is "
                "written to the output, run again for the rest"
            )

    def _next_group(self) -> tuple[list[Entry], bool]:
        """Wait for a row, and a moment for others; returns them and whether more will come."""
        group: list[Entry] = []
        entry = self._inbox.get()
        until = time.monotonic() + _GROUP_S
        while entry is not None:
            group.append(entry)
            try:
                entry = self._inbox.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                return group, True
        return group, False


def _row(entry: Entry) -> tuple[int, int, bytes, str, int]:
    text = json_line(record(entry.completion))
    return (
        entry.completion.index, int(entry.kind), entry.fingerprint, text, zlib.crc32(text.encode())
    )  # fmt: skip
