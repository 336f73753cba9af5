"""gzip and Zstandard files, read and written as a stream."""

from __future__ import annotations

import errno
import io
import zlib
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from localbatch.data.errors import ConfigError

# A Zstandard block of 4 bytes may stand for 128 KiB, so this may become 32 MiB.
_CHUNK = 1024


class Compression(str, Enum):
    """How a file is packed; the values are the suffixes."""

    GZIP = ".gz"
    ZSTD = ".zst"


class Packer(Protocol):
    """Packs data piece by piece."""

    def compress(self, data: bytes, /) -> bytes:
        """Return what is ready of the packed data."""

    def flush(self) -> bytes:
        """Return the rest."""


def split_name(path: str) -> tuple[str, Compression | None]:
    """Return a path without its suffix of compression, and which that is."""
    suffix = Path(path).suffix.lower()
    if suffix not in (Compression.GZIP.value, Compression.ZSTD.value):
        return path, None
    return path[: -len(suffix)], Compression(suffix)


def unpacked(stream: BinaryIO, compression: Compression) -> BinaryIO:
    """Return what a packed stream holds; damage is an `OSError` when it is reached.

    Files of several frames or members are read as one. Raises `ConfigError` if there is no library
    for it.
    """
    raw = _Unpacked(stream, _Codec(compression))
    return cast(BinaryIO, io.BufferedReader(raw, 2**16))


def packer(compression: Compression) -> Packer:
    """Return a packer; the same data give the same bytes. Raises `ConfigError` as `unpacked`."""
    return _Codec(compression).packer()


class _Codec:
    """The library of a compression."""

    def __init__(self, compression: Compression) -> None:
        self.compression = compression
        self.name = "gzip" if compression is Compression.GZIP else "Zstandard"
        self._library: Any = zlib if compression is Compression.GZIP else _zstd()
        self.fault: type[Exception] = getattr(self._library, "ZstdError", zlib.error)

    def unpacker(self) -> Any:
        if self.compression is Compression.GZIP:
            return zlib.decompressobj(wbits=31)
        made = self._library.ZstdDecompressor()
        return made.decompressobj() if hasattr(made, "decompressobj") else made

    def packer(self) -> Packer:
        if self.compression is Compression.GZIP:
            return zlib.compressobj(wbits=31)
        made = self._library.ZstdCompressor()
        ready = made.compressobj() if hasattr(made, "compressobj") else made
        return cast(Packer, ready)


def _zstd() -> Any:
    """Return the standard library's module (from Python 3.14), or the package."""
    for name in ("compression.zstd", "zstandard"):
        try:
            return import_module(name)
        except ImportError:
            continue
    raise ConfigError(".zst files need a further library: pip install 'localbatch[zstd]'")


class _Unpacked(io.RawIOBase):
    def __init__(self, stream: BinaryIO, codec: _Codec) -> None:
        self._stream, self._codec = stream, codec
        self._unpacker: Any = None
        self._is_begun = False
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            data = self._stream.read(_CHUNK)
            if not data:
                if self._unpacker is not None or not self._is_begun:
                    raise OSError(errno.EIO, f"its {self._codec.name} data is cut short")
                return 0
            self._rest = self._unpack(data)
        count = min(len(buffer), len(self._rest))
        buffer[:count], self._rest = self._rest[:count], self._rest[count:]
        return count

    def _unpack(self, data: bytes) -> bytes:
        parts = []
        while data:
            if self._unpacker is None:
                if self._codec.compression is Compression.GZIP and self._is_begun:
                    data = data.lstrip(b"\0")  # tapes are filled up with zeros
                    if not data:
                        break
                self._unpacker, self._is_begun = self._codec.unpacker(), True
            try:
                parts.append(self._unpacker.decompress(data))
            except self._codec.fault as error:
                reason = " ".join(str(error).split())
                message = f"its {self._codec.name} data is damaged: {reason}"
                raise OSError(errno.EIO, message) from None
            data = b""
            if self._unpacker.eof:
                data, self._unpacker = self._unpacker.unused_data, None
        return b"".join(parts)
