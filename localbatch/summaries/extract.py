"""From a file to its text: plain text, Markdown and e-mail; the rest is in `extract_docs`."""

from __future__ import annotations

import email
import email.policy
import re
from collections.abc import Iterable
from dataclasses import dataclass
from email.message import EmailMessage
from pathlib import Path

from localbatch.data.errors import InputError
from localbatch.summaries import extract_docs

MAX_WORD = 100_000
"""Most characters between blanks: cutting a longer run takes more than seconds."""

MAX_BYTES = 20_000_000
"""Most bytes of a document's text; longer ones are hardly one document."""

AUTO = "auto"
"""In place of an encoding: UTF-8, or what the text is most likely in."""

_MAX_FILE_BYTES = 500_000_000
_TITLE_CHARS = 120
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
    title = ""
    if kind in ("text", "markdown"):
        text = _decoded(data, encoding)
    elif kind == "email":
        title, text = _email(data)
    else:
        title, text = extract_docs.READERS[kind](data)
    text = tidy(text)
    if not text.strip():
        raise InputError(extract_docs.WITHOUT_TEXT.get(kind, "has no text"))
    if len(text) > MAX_BYTES:
        raise _too_long(len(text))
    if (longest := max(map(len, text.split()))) > MAX_WORD:
        raise InputError(
            f"has {longest:,} characters without a blank or line end, which take too long to cut "
            f"(at most {MAX_WORD:,}); break them up, or leave the file out"
        )
    return Extracted(text, (title.strip() or _title(text, kind) or path.stem)[:_TITLE_CHARS], kind)


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


def _decoded(data: bytes, encoding: str) -> str:
    for begin, what in _BINARY.items():
        if data.startswith(begin):
            raise InputError(f"is no text but {what}")
    for mark, marked in _BOMS:
        if data.startswith(mark):
            encoding = marked
    if b"\0" in data and not encoding.replace("_", "-").lower().startswith(("utf-16", "utf-32")):
        raise InputError("is no text (it has zero bytes)")
    if encoding == AUTO:
        return extract_docs.guessed(data)
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        raise InputError(
            f"is not {encoding.upper()} (byte {error.start + 1:,}); "
            "name its encoding with --encoding, as cp1252, or --encoding auto"
        ) from None


def _title(text: str, kind: str) -> str:
    """Return the first heading of Markdown, otherwise the first line if it is a short one."""
    heading = re.search(r"^#{1,2}\s+(.+?)\s*#*$", text, re.MULTILINE)
    if kind == "markdown" and heading:
        return heading[1]
    first = text.lstrip().split("\n", 1)[0].strip()
    return first if len(first) <= _TITLE_CHARS else ""


def _email(data: bytes) -> tuple[str, str]:
    """Return subject and text; what came with the mail is left out."""
    message = email.message_from_bytes(data, policy=email.policy.default)
    assert isinstance(message, EmailMessage)
    body = message.get_body(("plain", "html"))
    if body is None:
        raise InputError("has no text; it may be no e-mail")
    try:
        text = body.get_content()
    except (LookupError, ValueError) as error:
        raise InputError(f"its text can't be decoded ({error})") from None
    if body.get_content_subtype() == "html":
        text = extract_docs.READERS["html"](text.encode())[1]
    heads = [f"{name}: {message[name]}" for name in ("From", "Date", "Subject") if message[name]]
    return str(message["Subject"] or ""), "\n".join(heads) + "\n\n" + text
