"""From files of all kinds to their text."""

from __future__ import annotations

import importlib
import io
import zipfile
from email.message import EmailMessage
from pathlib import Path
from typing import Any

import pytest

from localbatch.data.errors import ConfigError, InputError
from localbatch.summaries import extract_docs
from localbatch.summaries.extract import extract

PAGE = """<html><head><title>The Elm  Bridge</title><style>p {}</style></head><body>
<nav>Home About</nav><h1>Bridge</h1><p>Closed on <b>Mon</b>day.</p><script>x()</script>
<ul><li>one</li><li>two</li></ul></body></html>"""


def make_pdf(text: str | None) -> bytes:
    """Return a PDF of one page by hand, after the example in the PDF reference, appendix H."""
    stream = b"" if text is None else f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET".encode()
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R"
        b" /Resources << /Font << /F1 5 0 R >> >> >>",
        b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    data, places = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        places.append(len(data))
        data += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    start = len(data)
    return data + (
        b"xref\n0 6\n0000000000 65535 f \n%strailer\n<< /Size 6 /Root 1 0 R >>\nstartxref\n%d\n"
        b"%%%%EOF\n" % (table, start)
    )


def make_epub(**more: str) -> bytes:
    """Return a book of two chapters, of which the second comes first in the archive."""
    container = (
        '<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>'
        '<rootfile full-path="OEBPS/book.opf"/></rootfiles></container>'
    )
    package = (
        '<package xmlns="http://www.idpf.org/2007/opf"><metadata '
        'xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:title>Two Rivers</dc:title></metadata>'
        '<manifest><item id="b" href="text/b%20b.xhtml"/><item id="a" href="text/a.xhtml"/>'
        '</manifest><spine><itemref idref="a"/><itemref idref="b"/></spine></package>'
    )
    files = {
        "META-INF/container.xml": container,
        "OEBPS/book.opf": package,
        "OEBPS/text/b b.xhtml": "<html><body><p>Chapter B.</p></body></html>",
        "OEBPS/text/a.xhtml": "<html><body><p>Chapter A.</p></body></html>",
        **more,
    }
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return target.getvalue()


def written(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


class TestMail:
    def make(self, folder: Path, **parts: str) -> Path:
        mail = EmailMessage()
        mail["From"], mail["Subject"] = "Ann <ann@example.org>", "Grüße"
        for kind, text in parts.items():
            if mail.is_multipart() or mail.get_content_type() != "text/plain" or mail.get_payload():
                mail.add_alternative(text, subtype=kind)
            else:
                mail.set_content(text, subtype=kind)
        mail.add_attachment(b"\0\1", maintype="application", subtype="pdf", filename="x.pdf")
        return written(folder, "m.eml", bytes(mail))

    def test_plain_text_needs_no_extra(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Subject and sender are part of it, attachments are not."""
        monkeypatch.delattr(extract_docs, "_library")
        found = extract(self.make(tmp_path, plain="The bridge is closed.", html="<p>other</p>"))
        assert (found.title, found.kind) == ("Grüße", "email")
        assert found.text.split() == [
            "From:", "Ann", "<ann@example.org>", "Subject:", "Grüße",
            "The", "bridge", "is", "closed.",
        ]  # fmt: skip

    def test_html_alone(self, tmp_path: Path) -> None:
        """Is laid out as text."""
        assert "Closed on Monday." in extract(self.make(tmp_path, html=PAGE)).text

    def test_html_beside_an_empty_text(self, tmp_path: Path) -> None:
        """Some programs send a blank line as the plain text."""
        found = extract(self.make(tmp_path, plain="\n", html=PAGE))
        assert "Closed on Monday." in found.text

    @pytest.mark.parametrize(
        ("charset", "written_in"),
        [("utf-8", "cp1252"), ("us-ascii", "utf-8"), ("x-unknown", "cp1252"), ("big5", "utf-8")],
    )
    def test_a_wrong_charset(self, tmp_path: Path, charset: str, written_in: str) -> None:
        """What can't be read as the mail says is read as what it is."""
        head = f"Subject: x\nContent-Type: text/plain; charset={charset}\n"
        mail = f"{head}Content-Transfer-Encoding: 8bit\n\nGrüße aus Köln".encode(written_in)
        assert extract(written(tmp_path, "m.eml", mail)).text.endswith("Grüße aus Köln")

    def test_attachments_alone(self, tmp_path: Path) -> None:
        """Are no text of the mail."""
        with pytest.raises(InputError, match="only what is attached"):
            extract(self.make(tmp_path))

    def test_no_mail(self, tmp_path: Path) -> None:
        """Bytes of no meaning have an error."""
        path = written(tmp_path, "x.eml", b"Content-Type: image/png\n\n\x89PNG")
        with pytest.raises(InputError, match="no text"):
            extract(path)


class TestHtml:
    def test_what_is_seen(self, tmp_path: Path) -> None:
        """Words are not torn apart; scripts, styles and menus are left out."""
        found = extract(written(tmp_path, "p.html", PAGE.encode()))
        assert found.title == "The Elm Bridge"
        assert found.text.split() == ["Bridge", "Closed", "on", "Monday.", "*", "one", "*", "two"]

    def test_its_own_encoding(self, tmp_path: Path) -> None:
        """What the page says of its encoding holds, if it is not UTF-8."""
        page = '<meta charset="cp1252"><p>Grüße</p>'
        assert extract(written(tmp_path, "p.htm", page.encode("cp1252"))).text.strip() == "Grüße"
        page = "<p>Grüße</p>"
        assert extract(written(tmp_path, "q.htm", page.encode())).text.strip() == "Grüße"

    def test_nothing_to_be_seen(self, tmp_path: Path) -> None:
        """Is no text, whatever else the page has."""
        head = "<html><head><title>x</title><style>b{}</style></head><body>"
        for page in ("<!-- x -->", f"{head}<nav>Home</nav><script>var a</script></body></html>"):
            with pytest.raises(InputError, match="has no text"):
                extract(written(tmp_path, "p.html", page.encode()))


class TestPdf:
    def test_without_pages(self, tmp_path: Path) -> None:
        """Is no scan."""
        import pypdf

        pypdf.PdfWriter().write(tmp_path / "a.pdf")
        with pytest.raises(InputError, match="has no pages"):
            extract(tmp_path / "a.pdf")

    def test_text(self, tmp_path: Path) -> None:
        """The text of its pages."""
        found = extract(written(tmp_path, "a.pdf", make_pdf("The bridge is closed.")))
        assert (found.text.strip(), found.kind) == ("The bridge is closed.", "pdf")

    def test_scanned(self, tmp_path: Path) -> None:
        """Pages without text are named for what they are."""
        with pytest.raises(InputError, match=r"has no text \(a scan\?\)"):
            extract(written(tmp_path, "a.pdf", make_pdf(None)))

    def test_encrypted(self, tmp_path: Path) -> None:
        """A password is asked for in vain; one that is empty is tried."""
        import pypdf

        for password, name in (("secret", "a.pdf"), ("", "b.pdf")):
            writer = pypdf.PdfWriter(clone_from=io.BytesIO(make_pdf("Closed.")))
            writer.encrypt(password, owner_password="owner", algorithm="RC4-128")
            writer.write(tmp_path / name)
        with pytest.raises(InputError, match="is encrypted; save it without a password"):
            extract(tmp_path / "a.pdf")
        assert extract(tmp_path / "b.pdf").text.strip() == "Closed."

    @pytest.mark.parametrize("name", ["a.pdf", "a.docx", "a.epub"])
    def test_damaged(self, tmp_path: Path, name: str) -> None:
        """Whatever the library raises is an error of the document."""
        kind = name[2:].upper()
        for data in (b"%PDF-1.4\nnonsense", make_pdf("x")[:150], b"PK\x03\x04nonsense"):
            with pytest.raises(InputError, match=rf"can't be read as {kind} \(.+\)"):
                extract(written(tmp_path, name, data))


class TestDocx:
    def test_paragraphs_and_tables(self, tmp_path: Path) -> None:
        """In their order; the title is that of the properties."""
        import docx

        document = docx.Document()
        document.core_properties.title = "Minutes"
        document.add_paragraph("Before.")
        table = document.add_table(1, 2)
        table.cell(0, 0).text, table.cell(0, 1).text = "left", "right"
        document.add_paragraph("After.")
        document.save(str(tmp_path / "m.docx"))
        found = extract(tmp_path / "m.docx")
        assert found.text == "Before.\n\nleft | right\n\nAfter."
        assert found.title == "Minutes"

    def test_what_word_keeps_apart(self, tmp_path: Path) -> None:
        """Notes, tables in tables and form fields; merged cells once, no table of contents."""
        import docx
        from docx.opc.constants import RELATIONSHIP_TYPE
        from docx.opc.packuri import PackURI
        from docx.opc.part import Part
        from docx.oxml import parse_xml

        w = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'
        document = docx.Document()
        table = document.add_table(2, 2)
        table.cell(0, 0).merge(table.cell(0, 1)).text = "wide"
        table.cell(1, 0).text = "left"
        table.cell(1, 1).add_table(1, 1).cell(0, 0).text = "inner"
        for gallery, text in (("Table of Contents", "contents"), ("Cover Pages", "cover")):
            document.element.body.insert(0, parse_xml(
                f'<w:sdt {w}><w:sdtPr><w:docPartObj><w:docPartGallery w:val="{gallery}"/>'
                f"</w:docPartObj></w:sdtPr><w:sdtContent><w:p><w:r><w:t>{text}</w:t></w:r></w:p>"
                "</w:sdtContent></w:sdt>"
            ))  # fmt: skip
        notes = (
            f'<w:footnotes {w}><w:footnote w:type="separator"><w:p><w:r><w:t>-</w:t></w:r></w:p>'
            "</w:footnote><w:footnote><w:p><w:r><w:t>It cost </w:t></w:r><w:r><w:t>700.</w:t></w:r>"
            "</w:p></w:footnote></w:footnotes>"
        )
        part = Part(
            PackURI("/word/footnotes.xml"), "application/xml", notes.encode(),
            document.part.package,
        )  # fmt: skip
        document.part.relate_to(part, RELATIONSHIP_TYPE.FOOTNOTES)
        document.save(str(tmp_path / "m.docx"))
        found = extract(tmp_path / "m.docx")
        assert found.text == "cover\n\nwide\nleft | inner\n\nIt cost 700."


class TestEpub:
    @pytest.mark.parametrize("spine", ["", '<itemref idref="gone"/>'])
    def test_a_broken_spine(self, tmp_path: Path, spine: str) -> None:
        """The chapters are those there are; an empty one is no error."""
        package = (
            '<package xmlns="http://www.idpf.org/2007/opf"><manifest>'
            '<item id="a" href="text/a.xhtml"/><item id="c" href="c.xhtml"/>'
            f"</manifest><spine>{spine}</spine></package>"
        )
        more = {"OEBPS/book.opf": package, "OEBPS/c.xhtml": ""}
        found = extract(written(tmp_path, "b.epub", make_epub(**more)))
        assert found.text.split() == ["Chapter", "A."]

    def test_chapters(self, tmp_path: Path) -> None:
        """In the order of reading."""
        found = extract(written(tmp_path, "b.epub", make_epub()))
        assert found.title == "Two Rivers"
        assert found.text.split() == ["Chapter", "A.", "Chapter", "B."]

    def test_encrypted(self, tmp_path: Path) -> None:
        """Books with DRM are named for what they are."""
        more = {"META-INF/encryption.xml": "", "META-INF/rights.xml": ""}
        with pytest.raises(InputError, match="DRM"):
            extract(written(tmp_path, "b.epub", make_epub(**more)))

    def test_entities_are_not_expanded(self, tmp_path: Path) -> None:
        """An entity that names a file of the reader's does not bring it in."""
        secret = written(tmp_path, "secret", b"secret words")
        evil = (
            f'<!DOCTYPE p [<!ENTITY e SYSTEM "{secret.as_uri()}">]>'
            '<package xmlns="http://www.idpf.org/2007/opf"><metadata '
            'xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:title>&e;</dc:title></metadata>'
            '<manifest><item id="a" href="text/a.xhtml"/></manifest>'
            '<spine><itemref idref="a"/></spine></package>'
        )
        found = extract(written(tmp_path, "b.epub", make_epub(**{"OEBPS/book.opf": evil})))
        assert "secret" not in found.title + found.text


def test_a_missing_library_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line; other kinds of documents don't need it."""

    def without(name: str, package: str | None = None) -> Any:
        raise ImportError(name)

    path = written(tmp_path, "a.pdf", make_pdf("x"))
    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(ConfigError, match=r"pypdf is needed .* pip install 'localbatch\[docs\]'"):
        extract(path)
    assert extract(written(tmp_path, "a.md", b"# Title\n\ntext")).title == "Title"


class TestTitles:
    @pytest.mark.parametrize(
        "title",
        ["(anonymous)", "untitled", "Untitled Document", "Untitled-1", " ", "letter.dvi", "[ ]",
         "Microsoft Word - report final v3.doc", "Document1", "unknown", "PowerPoint Presentation",
         "file:///home/me/x", "\ufeffuntitled", "Unbenanntes Dokument"],
    )  # fmt: skip
    def test_one_that_says_nothing(self, tmp_path: Path, title: str) -> None:
        """The first heading stands for it, and the file's name where there is none."""
        import docx

        for heading, expected in (("Bridge closed", "Bridge closed"), ("", "mayor")):
            long = "The river is long and the bridge is old and grey. " * 6
            page = f"<title>{title}</title><p>{long}</p><h1>{heading}</h1>"
            assert extract(written(tmp_path, "mayor.html", page.encode())).title == expected
            document = docx.Document()
            document.core_properties.title = title
            document.add_paragraph(long)
            document.add_heading(heading, 1)
            document.save(str(tmp_path / "mayor.docx"))
            assert extract(tmp_path / "mayor.docx").title == expected

    @pytest.mark.parametrize(
        ("title", "expected"),
        [("Untitled (1951) by an unknown painter", None), ("Document management", None),
         ("1984", None), ("Microsoft Word - Annual Report", "Annual Report"),
         ("None of the above", None), ("Presentation skills", None)],
    )  # fmt: skip
    def test_one_that_says_something(
        self, tmp_path: Path, title: str, expected: str | None
    ) -> None:
        """Stays, but for the name of the program."""
        page = f"<title>{title}</title><h1>Other</h1><p>words</p>"
        assert extract(written(tmp_path, "a.html", page.encode())).title == (expected or title)

    @pytest.mark.parametrize(
        ("text", "expected"),
        [("```\n# no heading\n```\n\n# The Bridge #\n", "The Bridge"),
         ("---\ntitle: 'The Bridge'\n---\n\n# Other\n", "The Bridge"),
         ("some words\n\nThe Bridge\n=====\n", "The Bridge"),
         ("#\n\n### The Bridge\n", "The Bridge"), ("-----\n" + "word " * 60, "a")],
    )  # fmt: skip
    def test_of_markdown(self, tmp_path: Path, text: str, expected: str) -> None:
        """The title of its front matter, or the first heading."""
        assert extract(written(tmp_path, "a.md", text.encode())).title == expected

    def test_of_an_e_mail_without_a_subject(self, tmp_path: Path) -> None:
        """Is not its sender."""
        mail = b"From: ann@example.org\nSubject:\n\nThe bridge is closed."
        assert extract(written(tmp_path, "bridge.eml", mail)).title == "bridge"


def test_a_long_text_without_blanks(tmp_path: Path) -> None:
    """Is refused at once; full stops part one that needs no blanks."""
    with pytest.raises(InputError, match="has 3,000,000 characters without a blank"):
        extract(written(tmp_path, "a.min.js", b"a;" * 1_500_000))
    novel = "橋は月曜日に閉鎖された。" * 20_000
    assert extract(written(tmp_path, "novel.txt", novel.encode())).text == novel
