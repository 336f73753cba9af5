"""The files of a job beside its output: the journal and its lock."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path
from types import TracebackType

from localbatch.data.errors import ConfigError, JournalError, OutputError

SUFFIX = ".journal"
INDEX = "index"
"""What `summarize` names its index and its journal by."""
APPLICATION_ID = 0x6C626A31  # "lbj1": what `file` and we know the format by
VERSION = 1
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
_MAGIC = b"SQLite format 3\0"


def journal_path(output: str) -> Path:
    """Return where the journal of an output is; the path of a journal is itself.

    A link has the journal of what it leads to, so that one output has one journal.
    """
    path = os.path.realpath(output) if os.path.islink(output) else output
    return Path(path if path.endswith(SUFFIX) else path + SUFFIX)


def find_journal(job: str) -> Path:
    """Return the journal of a job that is named by its output, by its journal, or by a folder.

    `summarize` has one journal for a folder, which its index may stand for, too.
    """
    path = journal_path(job)
    if path.exists():
        return path
    inside = Path(job, f"{INDEX}{SUFFIX}") if os.path.isdir(job) else Path(job).with_suffix(SUFFIX)
    return inside if inside.stem == INDEX and inside.exists() else path


class JobLock:
    """Held by the one run of a job; gone with its process, however that ends.

    SQLite's own file locks do this on every system.
    """

    def __init__(self, journal: Path) -> None:
        self._path = Path(f"{journal}.lock")
        self._connection: sqlite3.Connection | None = None

    def __enter__(self) -> JobLock:
        while True:
            try:
                self._connection = sqlite3.connect(self._path, timeout=0, isolation_level=None)
                self._connection.execute("BEGIN EXCLUSIVE")
            except sqlite3.DatabaseError as error:
                if self._connection is not None:
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
            return self._in_use()
        return JournalError(
            f"{self._path}: can't be locked ({error}); make room, or choose a shorter name or "
            "another folder for the output"
        )

    def _in_use(self) -> JournalError:
        job = str(self._path).removesuffix(f"{SUFFIX}.lock")
        return JournalError(
            f"{job}: another run is writing these answers; wait for it, or name another output"
        )

    @classmethod
    def check(cls, journal: Path) -> None:
        """Raise `JournalError` if a run holds the lock of a journal."""
        if cls.is_held(journal):
            raise cls(journal)._in_use()

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


def check_is_journal(path: Path) -> None:
    """Raise `JournalError` if there is something else in the place of a journal."""
    if path.is_file():
        with path.open("rb") as file:
            head = file.read(72)
        is_ours = int.from_bytes(head[68:72], "big") == APPLICATION_ID or len(head) < 72
        if not (is_ours and head.startswith(_MAGIC[: len(head)])):
            raise JournalError(f"{path}: is no journal of localbatch; move it away")


def remove_journal(path: Path) -> None:
    """Delete a journal, for a job to start over; raises `JournalError` if it is something else."""
    check_is_journal(path)
    for suffix in ("", "-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{path}{suffix}")


def refuse_journal_name(output: str) -> None:
    """Raise `ConfigError` if an output would lie over a journal."""
    name = os.path.realpath(output)
    if output != "-" and any(
        name.endswith(SUFFIX + more) for more in ("", "-wal", "-shm", ".lock")
    ):
        raise ConfigError(f"{output}: is the name of a journal; choose another for the output")


def make_journal(path: Path) -> None:
    """Make a journal without rows, whole or not at all."""
    part = f"{path}.part"
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)
        with contextlib.closing(sqlite3.connect(part, isolation_level=None)) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.executescript(
                f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {VERSION};"
                f"BEGIN; {_SCHEMA} COMMIT;"
            )
        os.replace(part, path)
    except (sqlite3.Error, OSError) as error:
        for suffix in ("", "-wal", "-shm"):
            with contextlib.suppress(OSError):
                os.unlink(f"{part}{suffix}")
        raise OutputError(
            f"{path}: can't be made ({error}); make room, or choose another place for the output"
        ) from None
