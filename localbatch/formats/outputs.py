"""The output: a JSON record a row, in input order, whatever order the rows end in."""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any, BinaryIO

from localbatch.data.errors import OutputError
from localbatch.data.request import Completion
from localbatch.formats.archives import packer, split_name
from localbatch.formats.new_file import NewFile
from localbatch.formats.records import json_line, record


class OutputClosedError(OutputError):
    """Whoever read standard output has stopped reading, as `head` does: end without a word."""


def is_file_target(target: str) -> bool:
    """Whether an output is a file, there or to be, and no pipe, device or standard output."""
    if target == "-":
        return False
    try:
        return stat.S_ISREG(os.stat(target).st_mode) or stat.S_ISDIR(os.stat(target).st_mode)
    except OSError:
        return True


def check_target(target: str) -> None:
    """Raise `OutputError` if a file can't be written."""
    _open_sink(target).discard()


def write_lines(target: str, lines: Iterable[str]) -> int:
    """Replace a file by these lines, all or none; returns how many there were.

    A file grows under a temporary name beside it (`NAME.localbatch.part`), so `target` is never
    half-written, and what was there before stays until then and hands on its permissions.
    """
    number = 0

    def numbered() -> Iterator[bytes]:
        nonlocal number
        for number, line in enumerate(lines, 1):  # noqa: B007 - the last one is the result
            yield line.encode() + b"\n"

    write_bytes(target, numbered())
    return number


def write_bytes(target: str, parts: Iterable[bytes]) -> None:
    """Replace a file by these bytes, all or none, as `write_lines`; a suffix of it packs them."""
    _, compression = split_name(target)
    packed = None if compression is None else packer(compression)
    sink = _open_sink(target)
    try:
        for part in parts:
            sink.put(part if packed is None else packed.compress(part))
        if packed is not None:
            sink.put(packed.flush())
    except BaseException:
        sink.discard()
        raise
    sink.finish()


class OrderedWriter:
    """Writes records in input order; holds only those that came too early.

    Standard output (`-`), a pipe and a device get each record at its turn. As a context manager it
    closes itself, after an exception with `complete=False`. Raises `OutputError` if the output
    can't be opened or written; `OutputClosedError` is for a closed pipe. `form` makes another
    object of each record.
    """

    def __init__(
        self, target: str, form: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    ) -> None:
        self.num_written = 0
        self._form = form
        self._next = 0
        self._early: dict[int, bytes] = {}
        self._is_open = True
        self._sink = _open_stream(target)

    def write(self, completion: Completion) -> None:
        """Take in a row; raises `ValueError` if it came before, or after `close`."""
        index = completion.index
        if not self._is_open or index < self._next or index in self._early:
            raise ValueError(f"row {index} came twice, or after the end")
        row = record(completion)
        line = json_line(row if self._form is None else self._form(row)) + "\n"
        self._early[index] = line.encode()
        while self._next in self._early:
            self._put(self._next)

    def close(self, *, complete: bool = True) -> None:
        """Write the rows after a gap, too, and close; again, it does nothing.

        A gap is an error with `complete`: raises `ValueError` when all is written.
        """
        if not self._is_open:
            return
        gap = self._next if self._early else None
        for index in sorted(self._early):
            self._put(index)
        self._sink.finish()
        self._is_open = False
        if complete and gap is not None:
            raise ValueError(f"row {gap} never came")

    def __enter__(self) -> OrderedWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(complete=kind is None)

    def _put(self, index: int) -> None:
        # An interruption here leaves the row for `close`.
        try:
            self._sink.put(self._early[index])
        except OutputError:
            self._is_open = False
            raise
        self._next = index + 1
        self.num_written += 1
        del self._early[index]


class _Stream:
    """Standard output, a pipe or a device: what is written is gone."""

    def __init__(self, name: str, stream: BinaryIO, *, is_ours: bool) -> None:
        self._name = name
        # Past the buffer: what a closed pipe leaves there would fail once more at exit.
        self._stream: BinaryIO = getattr(stream, "raw", stream)
        self._is_ours = is_ours

    def put(self, line: bytes) -> None:
        try:
            _write_all(self._stream, line)
        except OSError as error:
            self.finish()
            if isinstance(error, BrokenPipeError):
                raise OutputClosedError(f"{self._name}: was closed by its reader") from None
            raise OutputError(f"{self._name}: writing failed ({error.strerror})") from None

    def finish(self) -> None:
        if self._is_ours:
            with suppress(OSError):
                self._stream.close()

    discard = finish


def _open_sink(target: str) -> NewFile | _Stream:
    try:
        if target == "-":
            return _standard_output()
        if not os.path.basename(target):
            raise OutputError(f"{target!r}: names no file; give the output file a name")
        mode = _mode(target)
        if mode is None or stat.S_ISREG(mode):
            return NewFile(target, mode)
        if stat.S_ISCHR(mode) or stat.S_ISFIFO(mode):
            return _Stream(target, open(target, "wb", buffering=0), is_ours=True)
    except FileNotFoundError:
        raise OutputError(f"{target}: its folder does not exist; make it first") from None
    except OSError as error:
        message = f"{target}: can't be written ({error.strerror}); choose another place"
        raise OutputError(message) from None
    raise OutputError(f"{target}: is a folder or no file at all; name a file")


def _open_stream(target: str) -> _Stream:
    sink = _open_sink(target)
    if isinstance(sink, NewFile):
        sink.discard()
        raise ValueError(f"{target}: is a file; use write_lines")
    return sink


def _standard_output() -> _Stream:
    if sys.stdout is None:
        raise OutputError("standard output: is closed; name an output file")
    sys.stdout.flush()
    return _Stream("standard output", sys.stdout.buffer, is_ours=False)


def _mode(target: str) -> int | None:
    """Return type and permissions of what is at `target`, which must be writable."""
    try:
        mode = os.stat(target).st_mode
    except FileNotFoundError:
        return None
    if not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), target)
    return mode


def _write_all(stream: BinaryIO, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        count: int | None = stream.write(rest)
        if count is None:  # a raw stream that does not block, and is full
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        rest = rest[count:]
