"""Where rows come from: a file, packed or not, a folder, or standard input."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from localbatch.data.errors import ConfigError
from localbatch.formats.archives import split_name, unpacked
from localbatch.formats.folder import Folder, find_files, folder_digest, is_folder


class InputFormat(str, Enum):
    """What a row is."""

    TXT = "txt"
    """A line: the prompt."""
    JSONL = "jsonl"
    """A line: a JSON object (https://jsonlines.org)."""
    CSV = "csv"
    """A row of a table; so it is for the next two."""
    TSV = "tsv"
    PARQUET = "parquet"
    FOLDER = "folder"
    """A file."""

    @property
    def is_table(self) -> bool:
        """Whether rows are those of a table."""
        return self in (InputFormat.CSV, InputFormat.TSV, InputFormat.PARQUET)


_FORMATS = {
    ".txt": InputFormat.TXT, ".jsonl": InputFormat.JSONL, ".ndjson": InputFormat.JSONL,
    ".csv": InputFormat.CSV, ".tsv": InputFormat.TSV, ".parquet": InputFormat.PARQUET,
}  # fmt: skip


@dataclass(frozen=True)
class InputSource:
    """An open input."""

    stream: BinaryIO
    """Unpacked; of a folder, empty."""
    format: InputFormat | None
    """`None`: JSONL if the first line that isn't blank starts with `{`, otherwise txt."""
    name: str
    """What messages call it."""
    folder: Folder | None = None


@contextmanager
def open_input(path: str) -> Iterator[InputSource]:
    """Open an input: a file, its format told by the suffix, a folder, or standard input for `-`.

    Reads nothing yet, but finds a folder's files. Raises `ConfigError` for another suffix and for a
    file that can't be opened.
    """
    if path == "-":
        if sys.stdin is None:
            raise ConfigError("standard input: is closed; name an input file")
        yield InputSource(sys.stdin.buffer, None, "standard input")
        return
    if is_folder(path):
        yield InputSource(BytesIO(), InputFormat.FOLDER, path, find_files(path))
        return
    _, compression = split_name(path)
    input_format = _input_format(path)
    if compression is not None and input_format is InputFormat.PARQUET:
        raise ConfigError(f"{path}: Parquet files are packed inside; unpack it first")
    try:
        stream = open(path, "rb")  # noqa: SIM115 - errors of the caller's block are not for here
    except OSError as error:
        raise ConfigError(f"{path}: can't be opened ({error.strerror}); check the path") from None
    with stream:
        inner: BinaryIO = stream if compression is None else unpacked(stream, compression)
        yield InputSource(inner, input_format, path)


def suffix_format(path: str) -> InputFormat | None:
    """Return the format that a file's name tells, packed or not, `None` for no such suffix."""
    plain, _ = split_name(path)
    return _FORMATS.get(Path(plain).suffix.lower())


def can_be_read_again(path: str) -> bool:
    """Whether an input is a file or a folder, and no pipe."""
    return path != "-" and (Path(path).is_file() or is_folder(path))


def folder_sha256(path: str) -> str | None:
    """Return a SHA-256 of all files of a folder or a pattern; `None` if there are none."""
    try:
        return folder_digest(find_files(path))
    except ConfigError:
        return None


def _input_format(path: str) -> InputFormat:
    found = suffix_format(path)
    if found is None:
        known = ", ".join(_FORMATS)
        raise ConfigError(
            f"{path}: must end in one of {known} (.gz and .zst may follow), be a folder or a "
            "pattern like 'notes/*.md', or be '-' for standard input"
        )
    return found
