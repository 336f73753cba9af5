"""From a file to its text where that takes a library: HTML, PDF, DOCX, EPUB.

inscriptis lays out HTML as a browser without pictures would, so that tables and lists stay legible;
pypdf is pure Python and knows encrypted files; python-docx is the library for DOCX. An EPUB is a
zip of HTML, which needs no further one.
"""

from __future__ import annotations

import importlib
import io
import logging
import posixpath
import zipfile
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

from localbatch.data.errors import ConfigError, InputError, LocalbatchError

WITHOUT_TEXT = {"pdf": "has no text (a scan?); recognize its text first, as with ocrmypdf"}
"""What is said of a document without text."""

_LIBRARIES = {
    "html": ("lxml.html", "inscriptis"),
    "pdf": ("pypdf",),
    "docx": ("docx",),
    "epub": ("lxml.html", "inscriptis"),
    "auto": ("charset_normalizer",),
}
_MAX_UNPACKED_BYTES = 500_000_000
_CONTAINER = "{urn:oasis:names:tc:opendocument:xmlns:container}"
_OPF = "{http://www.idpf.org/2007/opf}"
_DC_TITLE = "{http://purl.org/dc/elements/1.1/}title"


def check_libraries(kind: str) -> None:
    """Raise `ConfigError`, naming the extra, if a kind of document needs what is not there."""
    for name in _LIBRARIES.get(kind, ()):
        _library(name)


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ConfigError(
            f"{name.split('.')[0]} is needed for this kind of document: "
            "pip install 'localbatch[docs]'"
        ) from None


def guessed(data: bytes) -> str:
    """Return a text whose encoding nobody told; raises `InputError` if none fits."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        best = _library("charset_normalizer").from_bytes(data).best()
    if best is None:
        raise InputError("is in no encoding that is known; name it with --encoding")
    return str(best)


def _guarded(what: str, read: Callable[[bytes], tuple[str, str]]) -> Callable[[bytes], Any]:
    """Return a reader for which a damaged file is an error of its document, whatever it raises."""

    def guarded(data: bytes) -> tuple[str, str]:
        try:
            return read(data)
        except LocalbatchError:
            raise
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise InputError(f"can't be read as {what} ({reason[:200]})") from None

    return guarded


def _html(data: bytes) -> tuple[str, str]:
    lxml_html, inscriptis = _library("lxml.html"), _library("inscriptis")
    is_utf8 = True
    try:
        data.decode()
    except UnicodeDecodeError:
        is_utf8 = False  # what the page says of its encoding holds
    parser = lxml_html.HTMLParser(encoding="utf-8") if is_utf8 else lxml_html.HTMLParser()
    tree = lxml_html.document_fromstring(data, parser=parser)
    title = tree.findtext(".//title") or ""
    for element in tree.xpath("//script|//style|//noscript|//nav|//template|//head"):
        element.drop_tree()
    return " ".join(title.split()), inscriptis.Inscriptis(tree).get_text()


def _pdf(data: bytes) -> tuple[str, str]:
    pypdf = _library("pypdf")
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)
    reader = pypdf.PdfReader(io.BytesIO(data))
    if reader.is_encrypted:
        try:
            is_open = bool(reader.decrypt(""))
        except Exception:  # a cipher that needs a library, or an unknown one
            is_open = False
        if not is_open:
            raise InputError("is encrypted; save it without a password")
    title = reader.metadata.title if reader.metadata else None
    return str(title or ""), "\n\n".join(page.extract_text() for page in reader.pages)


def _docx(data: bytes) -> tuple[str, str]:
    document = _library("docx").Document(io.BytesIO(data))
    blocks = []
    for block in document.iter_inner_content():
        if hasattr(block, "rows"):
            rows = [" | ".join(cell.text for cell in row.cells) for row in block.rows]
            blocks.append("\n".join(rows))
        else:
            blocks.append(block.text)
    return document.core_properties.title or "", "\n\n".join(filter(str.strip, blocks))


def _epub(data: bytes) -> tuple[str, str]:
    etree = _library("lxml.etree")
    parser = etree.XMLParser(resolve_entities=False, no_network=True)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        if sum(info.file_size for info in archive.infolist()) > _MAX_UNPACKED_BYTES:
            raise InputError(f"unpacks to more than {_MAX_UNPACKED_BYTES:,} bytes")
        names = set(archive.namelist())
        if "META-INF/encryption.xml" in names and "META-INF/rights.xml" in names:
            raise InputError("is encrypted (DRM)")
        container = etree.fromstring(archive.read("META-INF/container.xml"), parser)
        root = container.find(f".//{_CONTAINER}rootfile").get("full-path")
        package = etree.fromstring(archive.read(root), parser)
        chapters = [_html(archive.read(name))[1] for name in _spine(package, root) if name in names]
        return package.findtext(f".//{_DC_TITLE}") or "", "\n\n".join(chapters)


def _spine(package: Any, root: str) -> Iterator[str]:
    """Yield the names of a book's chapters, in the order of reading."""
    hrefs = {item.get("id"): item.get("href") for item in package.iter(f"{_OPF}item")}
    for reference in package.iter(f"{_OPF}itemref"):
        if href := hrefs.get(reference.get("idref")):
            yield posixpath.normpath(posixpath.join(posixpath.dirname(root), unquote(href)))


READERS: dict[str, Callable[[bytes], tuple[str, str]]] = {
    "html": _guarded("HTML", _html),
    "pdf": _guarded("PDF", _pdf),
    "docx": _guarded("DOCX", _docx),
    "epub": _guarded("EPUB", _epub),
}
"""Kind of document -> what returns its title and its text."""
