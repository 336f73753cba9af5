"""A folder, or a pattern such as `notes/*.md`: each file is a row.

No path leads out of the folder: a link to a place outside is passed over.
"""

from __future__ import annotations

import glob
import hashlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple, NoReturn

from localbatch.data.errors import ConfigError, InputError
from localbatch.formats.lines import MAX_LINE_BYTES


@dataclass(frozen=True)
class Folder:
    """The files that are rows."""

    root: str
    names: tuple[str, ...]
    """Paths from `root`, in the order of their code points."""


class FileText(NamedTuple):
    """A file's text, or why it has none."""

    path: str
    """From the folder, with `/` between its parts."""
    text: str
    error: InputError | None = None


def is_folder(path: str) -> bool:
    """Whether a path is a folder, or a pattern and no file."""
    return os.path.isdir(path) or (glob.has_magic(path) and not os.path.lexists(path))


def find_files(path: str) -> Folder:
    """Return the files of a folder and the folders below it, or those that a pattern matches.

    Names that begin with a dot are passed over, as shells do. A pattern's folder is what stands
    before the first part with a wildcard. Raises `ConfigError` if there is no file.
    """
    if os.path.isdir(path):
        root, found = path, _walk(path)
    else:
        root = _root_of(path)
        found = iter(glob.glob(path, recursive=True))
    inside = os.path.realpath(root)
    names = {os.path.relpath(file, root) for file in found if _is_row(file, inside)}
    if not names:
        what = "holds no files" if os.path.isdir(path) else "matches no file"
        raise ConfigError(f"{path}: {what}; check the path")
    if not os.path.isdir(path):
        names = _once(root, names)
    return Folder(root, tuple(sorted(names, key=_shown)))


def read_files(folder: Folder) -> Iterator[FileText]:
    """Yield the text of each file; one is in memory at a time."""
    inside = os.path.realpath(folder.root)
    for name in folder.names:
        path = os.path.join(folder.root, name)
        try:
            text = _read(path, inside)
            os.fsencode(name).decode()
        except InputError as error:
            yield FileText(_shown(name), "", error)
        except UnicodeDecodeError:
            yield FileText(_shown(name), "", InputError("has a name that is not UTF-8"))
        else:
            yield FileText(_shown(name), text)


def folder_digest(folder: Folder) -> str:
    """Return a SHA-256 of all names and contents."""
    digest, inside = hashlib.sha256(), os.path.realpath(folder.root)
    for name in folder.names:
        try:
            with _open(os.path.join(folder.root, name), inside) as file:
                content = hashlib.sha256(file.read(MAX_LINE_BYTES + 1)).digest()
        except InputError:
            content = b""
        digest.update(os.fsencode(name) + b"\0" + content)
    return digest.hexdigest()


def _once(root: str, names: set[str]) -> set[str]:
    """Return each file once; patterns follow links to folders, which may lead in a circle."""
    shortest: dict[str, str] = {}
    for name in sorted(names, key=lambda name: (name.count(os.sep), name)):
        shortest.setdefault(os.path.realpath(os.path.join(root, name)), name)
    return set(shortest.values())


def _shown(name: str) -> str:
    """Return a path as an id: with `/`, and what is not UTF-8 in it escaped."""
    posix = name.replace(os.sep, "/")
    return os.fsencode(posix).decode(errors="backslashreplace")


def _root_of(pattern: str) -> str:
    parts = []
    for part in pattern.split("/"):
        if glob.has_magic(part):
            break
        parts.append(part)
    return "/".join(parts) or ("/" if pattern.startswith("/") else ".")


def refuse_folder(error: OSError) -> NoReturn:
    """Raise `ConfigError` for a folder whose files can't be listed: they would count as gone."""
    raise ConfigError(
        f"{error.filename}: can't be read ({error.strerror}); make it readable, or leave it out"
    )


def _walk(root: str) -> Iterator[str]:
    for folder, folders, files in os.walk(root, onerror=refuse_folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (os.path.join(folder, name) for name in files if not name.startswith("."))


def _is_row(path: str, inside: str) -> bool:
    try:
        return stat.S_ISREG(os.stat(path).st_mode) and _is_inside(path, inside)
    except OSError:
        return False


def _is_inside(path: str, inside: str) -> bool:
    return os.path.realpath(path).startswith(inside.rstrip(os.sep) + os.sep)


def _open(path: str, inside: str) -> BinaryIO:
    if not _is_inside(path, inside):  # it may have become a link since it was found
        raise InputError("leads out of the folder")
    try:
        return open(path, "rb")
    except OSError as error:
        raise InputError(f"can't be opened ({error.strerror})") from None


def _read(path: str, inside: str) -> str:
    try:
        with _open(path, inside) as file:
            data = file.read(MAX_LINE_BYTES + 1)
    except OSError as error:
        raise InputError(f"can't be read ({error.strerror})") from None
    if len(data) > MAX_LINE_BYTES:
        raise InputError(f"is larger than {MAX_LINE_BYTES // 2**20} MiB")
    if b"\0" in data:
        raise InputError("is binary, not text")
    try:
        text = data.decode()
    except UnicodeDecodeError as bad:
        reason = f"byte 0x{data[bad.start]:02x} at offset {bad.start}"
        raise InputError(f"is not UTF-8: {reason}") from None
    text = text.removeprefix("\ufeff")
    if not text.strip():
        raise InputError("is empty")
    return text
