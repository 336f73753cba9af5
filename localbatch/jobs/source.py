"""Opens the input of a job; all lines of an OpenAI batch are checked before any is computed."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import IO, BinaryIO, cast

from localbatch.formats.inputs import InputFormat, InputSource, open_input
from localbatch.formats.openai_batch import BatchFile, check_batch


@dataclass(frozen=True)
class JobSource:
    """An open input, and what it is."""

    input: InputSource
    batch: BatchFile | None = None
    """`None` if it is no OpenAI batch."""


@contextlib.contextmanager
def open_source(
    path: str, *, is_batch: bool = False, has_batches: bool = True
) -> Iterator[JobSource]:
    """Open an input; an OpenAI batch is read to its end, and then again from its start.

    A pipe is kept in a temporary file for that, as far as it was read. With `is_batch` an input
    without rows is an error; without `has_batches` no input is a batch. Raises `ConfigError` if it
    can't be opened, and `BatchFileError` for a batch with lines that are no requests.
    """
    with open_input(path) as source, contextlib.ExitStack() as stack:
        if not has_batches or source.format not in (None, InputFormat.JSONL):
            yield JobSource(source)
            return
        stream = source.stream
        may_be_text = source.format is None
        if stream.seekable():
            start = stream.tell()
            batch = check_batch(stream, source.name, may_be_text=may_be_text, is_batch=is_batch)
            stream.seek(start)
        else:
            kept = _Kept(stream, stack.enter_context(tempfile.TemporaryFile()))
            stream = cast(BinaryIO, kept)
            batch = check_batch(stream, source.name, may_be_text=may_be_text, is_batch=is_batch)
            kept.rewind()
        yield JobSource(replace(source, stream=stream), batch)


class _Kept:
    """A stream that can be read from its start again, once; it reads no further than asked."""

    def __init__(self, stream: BinaryIO, copy: IO[bytes]) -> None:
        self._stream, self._copy, self._keeps = stream, copy, True

    def rewind(self) -> None:
        self._copy.seek(0)
        self._keeps = False

    def readline(self, limit: int) -> bytes:
        if self._keeps:
            data = self._stream.readline(limit)
            self._copy.write(data)
            return data
        return self._copy.readline(limit) or self._stream.readline(limit)
