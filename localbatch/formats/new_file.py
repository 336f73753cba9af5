"""A file that takes another's place, whole, when it is finished."""

from __future__ import annotations

import os
import secrets
import stat
import sys
from contextlib import suppress
from typing import BinaryIO

from localbatch.data.errors import OutputError

_SUFFIX = ".localbatch.part"
_NAME_CHARS = 40  # of the target's name in the temporary file's: 255 bytes is the usual limit


class NewFile:
    """A file that replaces `target` when it is finished; until then, and if that fails, it stays.

    What was written is not lost: it comes from a journal. It grows beside `target` under a name of
    ours; one that a killed process left there goes. `old_mode` is handed on to it.
    """

    def __init__(self, target: str, old_mode: int | None) -> None:
        self._target = target
        self._path = os.path.realpath(target)  # a link stays, the file it leads to is replaced
        self._part, self._file = _open_part(self._path)
        if old_mode is not None:
            with suppress(OSError):  # not every file system has permissions
                os.chmod(self._part, stat.S_IMODE(old_mode))

    def put(self, line: bytes) -> None:
        """Write some bytes; raises `OutputError`."""
        try:
            self._file.write(line)
        except OSError as error:
            raise self._failure("writing failed", error) from None

    def finish(self) -> None:
        """Put the file in its place; raises `OutputError`."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            if sys.platform == "win32":  # no open file can be moved there
                self._file.close()
        except OSError as error:
            raise self._failure("writing failed", error) from None
        try:
            os.replace(self._part, self._path)
        except OSError as error:
            raise self._failure("can't be replaced", error) from None
        with suppress(OSError):
            self._file.close()

    def discard(self) -> None:
        """Leave everything as it was."""
        with suppress(OSError):
            os.unlink(self._part)
        with suppress(OSError):
            self._file.close()
        if sys.platform == "win32":
            with suppress(OSError):
                os.unlink(self._part)

    def _failure(self, what: str, error: OSError) -> OutputError:
        self.discard()
        return OutputError(
            f"{self._target}: {what} ({error.strerror}); the answers are safe in the journal: "
            "make room and run the same command again, or write them elsewhere with "
            "`localbatch export`"
        )


def _open_part(path: str) -> tuple[str, BinaryIO]:
    """Make the temporary file for `path`: the usual one, another while some process writes that."""
    folder, name = os.path.split(path)
    part = os.path.join(folder, name[:_NAME_CHARS] + _SUFFIX)
    while True:
        try:
            file = open(part, "xb")  # noqa: SIM115 - lives as long as this
        except FileExistsError:
            if not _remove_left(part):
                part = os.path.join(folder, f"{name[:_NAME_CHARS]}.{secrets.token_hex(4)}{_SUFFIX}")
            continue
        if _lock(file) and not _is_same(file, part):  # removed before it was locked
            file.close()
            continue
        return part, file


def _remove_left(part: str) -> bool:
    """Remove a file whose writer is gone, and its lock with it. Returns whether the name is free.

    A process holds the lock of its file until it has moved or removed it.
    """
    try:
        if sys.platform == "win32":  # no open file can be removed there
            os.unlink(part)
            return True
        with open(part, "r+b") as file:
            if not _lock(file):
                return False
            if _is_same(file, part):
                os.unlink(part)
            return True
    except FileNotFoundError:
        return True
    except OSError:
        return False


def _lock(file: BinaryIO) -> bool:
    """Lock a file while it is open, if no process has; where there are no such locks, it is not."""
    if sys.platform == "win32":
        return False
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_same(file: BinaryIO, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False
