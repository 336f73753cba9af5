"""Finds the documents of a job, and names what becomes of each."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from localbatch.data.errors import ConfigError, InputError
from localbatch.formats.folder import refuse_folder
from localbatch.jobs.journal_files import INDEX, SUFFIX

_SUFFIX = ".md"
"""Of summaries."""
_MAX_NAME_BYTES = 255


@dataclass(frozen=True)
class Document:
    """A file to be summarized."""

    path: Path
    name: str
    """Its place in the output folder, with slashes and without `.md`."""

    def check_name(self) -> None:
        """Raise `InputError` if a summary's name would be too long for a file system."""
        part = os.fsencode(os.path.basename(self.name) + _SUFFIX)
        if len(part) > _MAX_NAME_BYTES:
            raise InputError(
                f"has a name of {len(part) - len(_SUFFIX):,} bytes, too long for a summary's with "
                f"{_SUFFIX} (at most {_MAX_NAME_BYTES}); rename it"
            )

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
    was named; of a file that is named in two ways the first counts. Hidden files, the output
    folder, those of other runs, pipes and devices are passed over, but for those that are named
    themselves. Raises `ConfigError` if a path leads to nothing, two documents would have one
    summary, summaries would lie among the documents, or a folder can't be listed.
    """
    own = os.path.realpath(output)
    roots = [root for path in paths for root in _expanded(path, own)]
    found: dict[str, Document] = {}
    taken: set[str] = set()
    for root in roots:
        below = root if len(roots) == 1 and root.is_dir() else root.absolute().parent
        for file in _files(root, own):
            name = os.path.relpath(file.absolute(), below.absolute()).replace(os.sep, "/")
            if name in found and os.path.realpath(found[name].path) != os.path.realpath(file):
                raise _same_place(file, found[name])
            if (path := os.path.abspath(file)) not in taken:
                found.setdefault(name, Document(file, name))
            taken.add(path)
    if not found:
        raise ConfigError(
            f"{', '.join(paths)}: there is no document; hidden files and the output folder are none"
        )
    _check_places(found, roots, own)
    return [found[name] for name in sorted(found)]


def _expanded(path: str, output: str) -> list[Path]:
    if os.path.exists(path):
        return [Path(path)]
    matches = sorted(glob.glob(path, recursive=True)) if glob.has_magic(path) else []
    if not matches:
        raise ConfigError(f"{path}: there is no such file or folder")
    return [Path(match) for match in matches if not _is_below(os.path.realpath(match), output)]


def _files(root: Path, output: str) -> Iterator[Path]:
    if not root.is_dir():
        yield root
        return
    for folder, folders, files in os.walk(root, onerror=refuse_folder):
        if Path(folder) != root and f"{INDEX}{SUFFIX}" in files:  # another run's summaries
            folders.clear()
            continue
        folders[:] = [
            name
            for name in sorted(folders)
            if not name.startswith(".") and os.path.realpath(os.path.join(folder, name)) != output
        ]
        paths = (Path(folder, name) for name in sorted(files) if not name.startswith("."))
        yield from (path for path in paths if path.is_file() or path.is_symlink())


def _check_places(found: Mapping[str, Document], roots: Sequence[Path], output: str) -> None:
    """Raise `ConfigError` if a summary would lie over a document, or be one in the next run."""
    folders = {os.path.realpath(root): root for root in roots if root.is_dir()}
    files = {os.path.realpath(document.path): document for document in found.values()}
    above = {output} | {os.path.join(output, parent) for name in found for parent in _parents(name)}
    for place in above & folders.keys():
        raise ConfigError(
            f"{folders[place]}: summaries would lie among the documents, and be summarized in the "
            "next run; name another folder with -o, as one inside of it"
        )
    for name, document in found.items():
        for parent in _parents(name):
            if parent.endswith(_SUFFIX) and (other := found.get(parent.removesuffix(_SUFFIX))):
                raise _same_place(document.path, other)
        if over := files.get(os.path.join(output, name + _SUFFIX)):
            raise ConfigError(
                f"{over.path}: is where the summary of {document.path} would be; "
                "name another folder with -o"
            )


def _parents(name: str) -> list[str]:
    """Return the folders of a name, `a` and `a/b` of `a/b/c`."""
    parts = name.split("/")
    return ["/".join(parts[:i]) for i in range(1, len(parts))]


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(os.path.join(folder, ""))


def _same_place(file: Path, other: Document) -> ConfigError:
    return ConfigError(
        f"{file}: would have the same summary file as {other.path}; summarize them into two folders"
    )
