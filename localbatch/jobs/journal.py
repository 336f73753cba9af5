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
from collections.abc import Iterator, Sequence
from enum import IntEnum
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from localbatch.data.errors import JournalError, OutputError
from localbatch.data.request import Completion
from localbatch.jobs.outputs import record

SUFFIX = ".journal"
_APPLICATION_ID = 0x6C626A31  # "lbj1": what `file` and we know the format by
_VERSION = 1
_SCHEMA = """
CREATE TABLE manifest (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE rows (
    number INTEGER PRIMARY KEY,  -- place in the input, from 0
    kind INTEGER NOT NULL,       -- 0 answered, 1 failed, 2 unreadable
    fingerprint BLOB NOT NULL,   -- of what was asked
    record TEXT NOT NULL,        -- the JSON record of the row
    crc INTEGER NOT NULL         -- of the record's bytes
);
"""
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


class Counts(NamedTuple):
    """Finished rows by kind."""

    answered: int
    failed: int
    unreadable: int

    @property
    def total(self) -> int:
        """All finished rows."""
        return sum(self)


def journal_path(output: str) -> Path:
    """Return where the journal of an output is; the path of a journal is itself."""
    return Path(output if output.endswith(SUFFIX) else output + SUFFIX)


class JobLock:
    """Held by the one run of a job; gone with its process, however that ends.

    SQLite's own file locks do this on every system.
    """

    def __init__(self, journal: Path) -> None:
        self._path = Path(f"{journal}.lock")
        self._connection: sqlite3.Connection | None = None

    def __enter__(self) -> JobLock:
        while True:
            self._connection = sqlite3.connect(self._path, timeout=0, isolation_level=None)
            try:
                self._connection.execute("BEGIN EXCLUSIVE")
            except sqlite3.DatabaseError as error:
                self._connection.close()
                raise self._refusal(error) from None
            if self._path.exists():
                return self
            self._connection.close()  # it was deleted just now, by the run that ended

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._connection is not None
        with contextlib.suppress(OSError):
            self._path.unlink()
        self._connection.close()

    def _refusal(self, error: sqlite3.Error) -> JournalError:
        if "locked" in str(error):
            job = str(self._path).removesuffix(f"{SUFFIX}.lock")
            return JournalError(
                f"{job}: another run is writing these answers; wait for it, or name another output"
            )
        return JournalError(f"{self._path}: can't be locked ({error})")

    @staticmethod
    def is_held(journal: Path) -> bool:
        """Whether a run holds the lock of a journal."""
        path = Path(f"{journal}.lock")
        if not path.exists():
            return False
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True, timeout=0)
        try:
            connection.execute("BEGIN EXCLUSIVE")
        except sqlite3.DatabaseError:
            return True
        finally:
            connection.close()
        return False


class Journal:
    """The finished rows of one job.

    `add` hands a row to a thread that writes; it is durable once `take_durable` returns it. Raises
    `JournalError` if the file is damaged, foreign or of another version, and `OutputError` if it
    can't be written.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self.path = path
        self._is_new = not path.exists()
        if read_only and self._is_new:
            raise JournalError(f"{path}: there is no such journal; was the job run with -o?")
        self._reader = self._connect(read_only=read_only)
        self._inbox: queue.SimpleQueue[Entry | None] = queue.SimpleQueue()
        self._durable: queue.SimpleQueue[Completion] = queue.SimpleQueue()
        self._error: OutputError | None = None
        self._thread: threading.Thread | None = None
        try:
            self._open(read_only=read_only)
        except sqlite3.DatabaseError as error:
            self._reader.close()
            raise self._damage(error) from None
        except JournalError:
            self._reader.close()
            raise

    @property
    def manifest(self) -> dict[str, Any]:
        """What the job is: names and values, empty for a new journal."""
        found = self._reader.execute("SELECT name, value FROM manifest").fetchall()
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
        found = dict(self._reader.execute("SELECT kind, COUNT(*) FROM rows GROUP BY kind"))
        return Counts(*(found.get(kind, 0) for kind in RowKind))

    def find(self, number: int) -> tuple[RowKind, bytes] | None:
        """Return kind and fingerprint of a finished row, `None` if it is not finished."""
        found = self._reader.execute(
            "SELECT kind, fingerprint FROM rows WHERE number = ?", (number,)
        ).fetchone()
        return (RowKind(found[0]), bytes(found[1])) if found else None

    def last_number(self) -> int:
        """Return the highest place of a finished row, -1 if there is none."""
        found = self._reader.execute("SELECT MAX(number) FROM rows").fetchone()[0]
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

    def records(self) -> Iterator[str]:
        """Yield the JSON records in the order of the input, as they are when this is called."""
        rows = self._reader.execute("SELECT number, record, crc FROM rows ORDER BY number")
        for number, text, crc in rows:
            if zlib.crc32(text.encode()) != crc:
                raise JournalError(f"{self.path}: row {number + 1} is damaged; --fresh starts over")
            yield text

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
        with contextlib.suppress(OutputError):
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

    def _connect(self, *, read_only: bool) -> sqlite3.Connection:
        mode = "ro" if read_only else "rwc"
        uri = f"{self.path.absolute().as_uri()}?mode={mode}"
        try:
            return sqlite3.connect(uri, uri=True, timeout=10, check_same_thread=False)
        except sqlite3.Error as error:
            raise OutputError(f"{self.path}: can't be opened ({error})") from None

    def _open(self, *, read_only: bool) -> None:
        """Check what is there, or make it."""
        if self._is_new:
            self._reader.execute("PRAGMA journal_mode = WAL")
            self._reader.executescript(
                f"PRAGMA application_id = {_APPLICATION_ID}; PRAGMA user_version = {_VERSION};"
                f"BEGIN; {_SCHEMA} COMMIT;"
            )
            return
        if self._pragma("application_id") != _APPLICATION_ID:
            raise JournalError(f"{self.path}: is no journal of localbatch; move it away")
        version = self._pragma("user_version")
        if version != _VERSION:
            raise JournalError(
                f"{self.path}: is of version {version}, this localbatch writes {_VERSION}; "
                "use the localbatch that made it, or start over with --fresh"
            )
        found = self._reader.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise self._damage(found)
        if not read_only:
            self._reader.execute("PRAGMA synchronous = FULL")

    def _pragma(self, name: str) -> int:
        return int(self._reader.execute(f"PRAGMA {name}").fetchone()[0])

    def _damage(self, reason: object) -> JournalError:
        return JournalError(
            f"{self.path}: is damaged ({reason}); --fresh starts over, "
            "and what the output file holds stays there until then"
        )

    def _write_failure(self, error: sqlite3.Error) -> OutputError:
        return OutputError(
            f"{self.path}: writing failed ({error}); what was finished before is safe: "
            "make room and run the same command again"
        )

    def _write(self) -> None:
        """Write rows in groups until told to stop; the thread's own connection."""
        connection = self._connect(read_only=False)
        try:
            connection.execute("PRAGMA synchronous = FULL")
            going_on = True
            while going_on:
                group, going_on = self._next_group()
                with connection:
                    connection.executemany(
                        "INSERT OR REPLACE INTO rows VALUES (?, ?, ?, ?, ?)", map(_row, group)
                    )
                for entry in group:
                    self._durable.put(entry.completion)
        except sqlite3.Error as error:
            self._error = self._write_failure(error)
        finally:
            connection.close()

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


def remove_journal(path: Path) -> None:
    """Delete a journal, for a job to start over."""
    for suffix in ("", "-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{path}{suffix}")


def _row(entry: Entry) -> tuple[int, int, bytes, str, int]:
    text = json.dumps(record(entry.completion), ensure_ascii=False)
    # Python's escape for half a surrogate pair is JSON's, too.
    safe = text.encode(errors="backslashreplace").decode()
    return (
        entry.completion.index, int(entry.kind), entry.fingerprint, safe, zlib.crc32(safe.encode())
    )  # fmt: skip
