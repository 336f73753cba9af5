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
from collections.abc import Callable, Container
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
_W = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
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


def _guarded(what: str, read: Callable[[bytes], tuple[list[str], str]]) -> Callable[[bytes], Any]:
    """Return a reader for which a damaged file is an error of its document, whatever it raises."""

    def guarded(data: bytes) -> tuple[list[str], str]:
        try:
            return read(data)
        except LocalbatchError:
            raise
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise InputError(f"can't be read as {what} ({reason[:200]})") from None

    return guarded


def _html(data: bytes) -> tuple[list[str], str]:
    lxml_html, inscriptis = _library("lxml.html"), _library("inscriptis")
    is_utf8 = True
    try:
        data.decode()
    except UnicodeDecodeError:
        is_utf8 = False  # what the page says of its encoding holds
    parser = lxml_html.HTMLParser(encoding="utf-8") if is_utf8 else lxml_html.HTMLParser()
    try:
        tree = lxml_html.document_fromstring(data, parser=parser)
    except _library("lxml.etree").ParserError:  # there is nothing in it
        return [], ""
    titles = [title.text_content() for title in tree.xpath("//title[not(ancestor::svg)]")[:1]]
    for element in tree.xpath("//script|//style|//noscript|//nav|//template|//head|//svg"):
        element.drop_tree()
    for headings in ("//h1", "//h2|//h3"):
        titles += [heading.text_content() for heading in tree.xpath(headings)[:1]]
    return titles, inscriptis.Inscriptis(tree).get_text()


def _pdf(data: bytes) -> tuple[list[str], str]:
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
    if not reader.pages:
        raise InputError("has no pages")
    return [str(title or "")], "\n\n".join(page.extract_text() for page in reader.pages)


def _docx(data: bytes) -> tuple[list[str], str]:
    document = _library("docx").Document(io.BytesIO(data))
    _unwrap(document.element.body)
    blocks, headings = [], []
    for block in document.iter_inner_content():
        if hasattr(block, "rows"):
            blocks.append(_table(block))
            continue
        blocks.append(block.text)
        if block.style is not None and str(block.style.name).startswith(("Title", "Heading")):
            headings.append(block.text)
    blocks += _notes(document.part)
    titles = [document.core_properties.title or "", *headings[:3]]
    return titles, "\n\n".join(filter(str.strip, blocks))


def _unwrap(body: Any) -> None:
    """Put the content of controls, as forms have them, where it stands; tables of contents go."""
    for control in list(body.iter(f"{_W}sdt")):
        gallery = control.find(f"{_W}sdtPr/{_W}docPartObj/{_W}docPartGallery")
        content = control.find(f"{_W}sdtContent")
        is_contents = gallery is not None and gallery.get(f"{_W}val") == "Table of Contents"
        for element in [] if is_contents or content is None else list(content):
            control.addprevious(element)
        control.getparent().remove(control)


def _table(table: Any) -> str:
    """Return a table's text, a line for each row; cells that were merged are one."""
    lines = []
    for row in table.rows:
        cells = {id(cell._tc): cell for cell in row.cells}
        texts = []
        for cell in cells.values():
            inner = [_table(block) if hasattr(block, "rows") else block.text
                     for block in cell.iter_inner_content()]  # fmt: skip
            texts.append("\n".join(filter(str.strip, inner)))
        lines.append(" | ".join(texts))
    return "\n".join(lines)


def _notes(part: Any) -> list[str]:
    """Return the footnotes and endnotes of a document; separators are none."""
    etree, notes = _library("lxml.etree"), []
    for relation in part.rels.values():
        kind = relation.reltype.rpartition("/")[2]
        if kind not in ("footnotes", "endnotes") or relation.is_external:
            continue
        for note in etree.fromstring(relation.target_part.blob, _parser()):
            if note.get(f"{_W}type") in (None, "normal"):
                paragraphs = ("".join(p.itertext(f"{_W}t")) for p in note.iter(f"{_W}p"))
                notes.append("\n".join(paragraphs).strip())
    return notes


def _epub(data: bytes) -> tuple[list[str], str]:
    etree, parser = _library("lxml.etree"), _parser()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        if sum(info.file_size for info in archive.infolist()) > _MAX_UNPACKED_BYTES:
            raise InputError(f"unpacks to more than {_MAX_UNPACKED_BYTES:,} bytes")
        names = set(archive.namelist())
        if "META-INF/encryption.xml" in names and "META-INF/rights.xml" in names:
            raise InputError("is encrypted (DRM)")
        container = etree.fromstring(archive.read("META-INF/container.xml"), parser)
        root = container.find(f".//{_CONTAINER}rootfile").get("full-path")
        package = etree.fromstring(archive.read(root), parser)
        chapters = [_html(archive.read(name)) for name in _spine(package, root, names)]
        titles = [title.text or "" for title in package.iter(_DC_TITLE)]
        headings = [titles[-1] for titles, _ in chapters if titles]
        return titles + headings[:3], "\n\n".join(text for _, text in chapters)


def _spine(package: Any, root: str, names: Container[str]) -> list[str]:
    """Return the names of a book's chapters, in the order of reading.

    Where that leads to none of them, all there are, in the order they are named.
    """
    folder = posixpath.dirname(root)
    hrefs = {
        item.get("id"): posixpath.normpath(posixpath.join(folder, unquote(item.get("href"))))
        for item in package.iter(f"{_OPF}item")
        if item.get("href") and "html" in item.get("media-type", "html")
    }
    order = [reference.get("idref") for reference in package.iter(f"{_OPF}itemref")]
    found = [hrefs[name] for name in order if hrefs.get(name) in names]
    return found or [href for href in hrefs.values() if href in names]


def _parser() -> Any:
    """Return an XML parser that looks at nothing outside of the document."""
    return _library("lxml.etree").XMLParser(resolve_entities=False, no_network=True)


READERS: dict[str, Callable[[bytes], tuple[list[str], str]]] = {
    "html": _guarded("HTML", _html),
    "pdf": _guarded("PDF", _pdf),
    "docx": _guarded("DOCX", _docx),
    "epub": _guarded("EPUB", _epub),
}
"""Kind of document -> what returns its titles, the best first, and its text."""
