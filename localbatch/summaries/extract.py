"""From a file to its text: plain text and Markdown; the rest is in `extract_*`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from localbatch.data.errors import InputError
from localbatch.summaries import extract_docs
from localbatch.summaries.extract_mail import read_mail
from localbatch.summaries.titles import MAX_CHARS, best_title, markdown_titles

MAX_WORD = 100_000
"""Most characters between blanks or full stops: cutting a longer run takes more than seconds."""

_BREAK = re.compile(r"[\s。．！？｡]")  # noqa: RUF001 - the full stops of texts without blanks

MAX_BYTES = 20_000_000
"""Most bytes of a document's text; longer ones are hardly one document."""

AUTO = "auto"
"""In place of an encoding: UTF-8, or what the text is most likely in."""

_MAX_FILE_BYTES = 500_000_000
_KINDS = {
    **dict.fromkeys((".md", ".markdown", ".mdown", ".mkd"), "markdown"),
    **dict.fromkeys((".html", ".htm", ".xhtml"), "html"),
    ".pdf": "pdf",
    ".docx": "docx",
    ".epub": "epub",
    ".eml": "email",
}
_BINARY = {
    b"%PDF-": "pdf",
    b"PK\x03\x04": "a zip archive",
    b"\x89PNG": "a picture",
    b"\xff\xd8\xff": "a picture",
    b"GIF8": "a picture",
    b"\xd0\xcf\x11\xe0": "an old Office file; save it as .docx or .pdf",
    b"\x7fELF": "a program",
}
_BOMS = ((b"\xef\xbb\xbf", "utf-8-sig"), (b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16"))


@dataclass(frozen=True)
class Extracted:
    """The text of a document."""

    text: str
    title: str
    kind: str
    """`text`, `markdown`, `html`, `pdf`, `docx`, `epub` or `email`."""


def check_libraries(paths: Iterable[Path], encoding: str = "utf-8") -> None:
    """Raise `ConfigError`, naming the extra, if documents need libraries that are not there."""
    kinds = {_kind(path) for path in paths} | ({AUTO} if encoding == AUTO else set())
    for kind in kinds:
        extract_docs.check_libraries(kind)


def _kind(path: Path) -> str:
    return _KINDS.get(path.suffix.lower(), "text")


def extract(path: Path, encoding: str = "utf-8") -> Extracted:
    """Return a document's text; plain text is in `encoding` unless a byte order mark says else.

    `encoding` may be `auto`: UTF-8 if the text is that, otherwise what is most likely.

    Raises `InputError` if the file has no text to be had, and `ConfigError` naming the extra if a
    library is missing.
    """
    kind = _kind(path)
    try:
        data = _read(path, MAX_BYTES if kind in ("text", "markdown") else _MAX_FILE_BYTES)
    except OSError as error:
        raise InputError(f"can't be read ({error.strerror})") from None
    if not data.strip():
        raise InputError("is empty")
    titles: list[str] = []
    if kind in ("text", "markdown"):
        text = _decoded(data, encoding)
    elif kind == "email":
        titles, text = read_mail(data)
    else:
        titles, text = extract_docs.READERS[kind](data)
    text = tidy(text)
    if not text.strip():
        raise InputError(extract_docs.WITHOUT_TEXT.get(kind, "has no text"))
    if len(text) > MAX_BYTES:
        raise _too_long(len(text))
    if (longest := max(map(len, _BREAK.split(text)))) > MAX_WORD:
        raise InputError(
            f"has {longest:,} characters without a blank or line end, which take too long to cut "
            f"(at most {MAX_WORD:,}); break them up, or leave the file out"
        )
    title = best_title([*titles, *_first_lines(text, kind), path.stem])
    return Extracted(text, title or _plain_name(path), kind)


def _first_lines(text: str, kind: str) -> list[str]:
    """Return what may be the title in a text itself, the best first."""
    if kind == "email":  # it begins with the sender
        return []
    titles = markdown_titles(text) if kind == "markdown" else []
    first = text.lstrip().split("\n", 1)[0].strip()
    return [*titles, first] if len(first) <= MAX_CHARS else titles


def _plain_name(path: Path) -> str:
    return " ".join(path.stem.split())[:MAX_CHARS]


def tidy(text: str) -> str:
    """Return text with plain line ends, at most two empty lines in a row, no control characters."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\f", "\n\n")
    text = re.sub(r"[\x00-\x08\x0b\x0e-\x1f\x7f\ud800-\udfff\ufeff]", "", text)
    text = re.sub(r"[ \t]+\n", "\n", text)
    return re.sub(r"\n{4,}", "\n\n\n", text)


def _read(path: Path, most: int) -> bytes:
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise _too_long(path.stat().st_size)
    return data


def _too_long(size: int) -> InputError:
    return InputError(f"is too long ({size:,} bytes, at most {MAX_BYTES:,}); cut it into files")


def _utf16_hint(data: bytes) -> str:
    """Return what to try where most characters would be of one byte in UTF-16 without a mark."""
    for zeros, others, name in ((1, 0, "utf-16-le"), (0, 1, "utf-16-be")):
        if 2 * data[zeros::2].count(0) > len(data[zeros::2]) and 0 not in data[others::2]:
            return f"; for UTF-16 without a mark, --encoding {name}"
    return ""


def _decoded(data: bytes, encoding: str) -> str:
    for begin, what in _BINARY.items():
        if data.startswith(begin):
            raise InputError(f"is no text but {what}")
    for mark, marked in _BOMS:
        if data.startswith(mark):
            encoding = marked
    if b"\0" in data and not encoding.replace("_", "-").lower().startswith(("utf-16", "utf-32")):
        raise InputError(f"is no text (it has zero bytes{_utf16_hint(data)})")
    if encoding == AUTO:
        return extract_docs.guessed(data)
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        raise InputError(
            f"is not {encoding.upper()} (byte {error.start + 1:,}); "
            "name its encoding with --encoding, as cp1252, or --encoding auto"
        ) from None
