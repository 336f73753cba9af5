"""Finds the documents of a job, and names what becomes of each."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from localbatch.data.errors import ConfigError


@dataclass(frozen=True)
class Document:
    """A file to be summarized."""

    path: Path
    name: str
    """Its place in the output folder, with slashes and without `.md`."""

    @property
    def size(self) -> int:
        """Bytes, 0 if the file is gone."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0


def find_documents(paths: Sequence[str], output: str) -> list[Document]:
    """Return the files that are named, those below folders, and those that patterns match.

    Sorted by name. Of a single folder, names begin below it; otherwise with the last part of what
    was named. Hidden files and the output folder are passed over. Raises `ConfigError` if a path
    leads to nothing, or two documents would have one name.
    """
    roots = [root for path in paths for root in _expanded(path)]
    own = os.path.realpath(output)
    found: dict[str, Document] = {}
    for root in roots:
        below = root if len(roots) == 1 and root.is_dir() else root.absolute().parent
        for file in _files(root, own):
            name = os.path.relpath(file.absolute(), below.absolute()).replace(os.sep, "/")
            if name in found and os.path.realpath(found[name].path) != os.path.realpath(file):
                raise ConfigError(
                    f"{file}: would have the same summary file as {found[name].path}; "
                    "summarize them into two folders"
                )
            found.setdefault(name, Document(file, name))
    if not found:
        raise ConfigError(f"{', '.join(paths)}: there is no document")
    return [found[name] for name in sorted(found)]


def _expanded(path: str) -> list[Path]:
    if os.path.exists(path):
        return [Path(path)]
    matches = sorted(glob.glob(path, recursive=True)) if glob.has_magic(path) else []
    if not matches:
        raise ConfigError(f"{path}: there is no such file or folder")
    return [Path(match) for match in matches]


def _files(root: Path, output: str) -> Iterator[Path]:
    if not root.is_dir():
        yield root
        return
    for folder, folders, files in os.walk(root):
        folders[:] = [
            name
            for name in sorted(folders)
            if not name.startswith(".") and os.path.realpath(os.path.join(folder, name)) != output
        ]
        yield from (Path(folder, name) for name in sorted(files) if not name.startswith("."))
