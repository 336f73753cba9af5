"""Makes documents of many kinds, to be summarized: python examples/documents.py FOLDER.

Needs `pip install 'localbatch[docs,examples]'`.
"""

import html
import io
import re
import shutil
import sys
import zipfile
from datetime import datetime, timezone
from email.message import EmailMessage
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import docx
from PIL import Image, ImageDraw
from reportlab.lib.pagesizes import A4
from reportlab.lib.pdfencrypt import StandardEncryption
from reportlab.lib.styles import getSampleStyleSheet
from reportlab.lib.utils import ImageReader
from reportlab.pdfgen.canvas import Canvas
from reportlab.platypus import Paragraph, SimpleDocTemplate, Spacer

ROOT = Path(__file__).parent.parent
OWN = ROOT / "bench" / "workloads" / "texts" / "documents"
OTHERS = ROOT / "examples" / "texts"
HEADING = re.compile(r"(Chapter \d+\.|Article [IV]+$|Amendment [IVX]+$|Section \d+$|Preamble$).*")
CONTAINER = """<?xml version="1.0"?>
<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container" version="1.0"><rootfiles>
<rootfile full-path="book.opf" media-type="application/oebps-package+xml"/></rootfiles></container>
"""
PACKAGE = """<?xml version="1.0"?>
<package xmlns="http://www.idpf.org/2007/opf" version="3.0" unique-identifier="id"><metadata
xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:identifier id="id">{name}</dc:identifier>
<dc:title>{title}</dc:title><dc:language>en</dc:language></metadata>
<manifest>{items}</manifest><spine>{spine}</spine></package>
"""


def paragraphs(path: Path) -> list[str]:
    """Return the title and the paragraphs of a text, each on one line."""
    blocks = re.split(r"\n\s*\n", path.read_text(encoding="utf-8").strip())
    return [" ".join(block.split()) for block in blocks]


def as_html(blocks: list[str], title: str) -> str:
    """Return a page; headings are marked as such."""
    body = []
    for block in blocks:
        tag = "h2" if HEADING.fullmatch(block) else "p"
        body.append(f"<{tag}>{html.escape(block)}</{tag}>")
    head = f"<head><meta charset='utf-8'/><title>{html.escape(title)}</title></head>"
    return (
        f"<html xmlns='http://www.w3.org/1999/xhtml'>{head}<body><h1>{html.escape(title)}</h1>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def write_html(path: Path, blocks: list[str]) -> None:
    """Write a web page, with a menu and a script that are none of its text."""
    page = as_html(blocks[1:], blocks[0])
    more = "<body><nav><a href='/'>Home</a> <a href='/about'>About</a></nav><script>run()</script>"
    path.write_text(page.replace("<body>", more), encoding="utf-8")


def write_pdf(path: Path, blocks: list[str], password: str | None = None) -> None:
    """Write pages; with a password they can't be read without it."""
    styles = getSampleStyleSheet()
    story: list[Any] = [Paragraph(html.escape(blocks[0]), styles["Title"])]
    for block in blocks[1:]:
        style = styles["Heading2" if HEADING.fullmatch(block) else "BodyText"]
        story += [Paragraph(html.escape(block), style), Spacer(1, 4)]
    encrypt = None if password is None else StandardEncryption(password)
    SimpleDocTemplate(
        str(path), pagesize=A4, title=blocks[0], invariant=1, encrypt=encrypt
    ).build(story)  # fmt: skip


def write_scan(path: Path, blocks: list[str]) -> None:
    """Write a page that is a picture of text."""
    picture = Image.new("L", (1000, 1400), 255)
    ImageDraw.Draw(picture).multiline_text((60, 60), "\n".join(blocks)[:1500], fill=0)
    canvas = Canvas(str(path), pagesize=A4, invariant=1)
    canvas.drawImage(ImageReader(picture), 0, 0, *A4)
    canvas.save()


def write_docx(path: Path, blocks: list[str]) -> None:
    """Write a Word document; short lines are headings."""
    document = docx.Document()
    document.core_properties.title = blocks[0]
    document.add_heading(blocks[0], 0)
    for block in blocks[1:]:
        if len(block) < 60 and not block.endswith("."):
            document.add_heading(block, 1)
        else:
            document.add_paragraph(block)
    document.save(str(path))


def write_epub(path: Path, blocks: list[str]) -> None:
    """Write a book of chapters."""
    chapters: list[list[str]] = []
    for block in blocks[1:]:
        if block.startswith("Chapter ") or not chapters:
            chapters.append([])
        chapters[-1].append(block)
    names = [f"chapter{i}" for i in range(1, len(chapters) + 1)]
    items = "".join(
        f'<item id="{name}" href="{name}.xhtml" media-type="application/xhtml+xml"/>'
        for name in names
    )
    spine = "".join(f'<itemref idref="{name}"/>' for name in names)
    title = html.escape(blocks[0])
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as book:
        book.writestr("mimetype", "application/epub+zip", zipfile.ZIP_STORED)
        book.writestr("META-INF/container.xml", CONTAINER)
        package = PACKAGE.format(name=path.stem, title=title, items=items, spine=spine)
        book.writestr("book.opf", package)
        for name, chapter in zip(names, chapters, strict=True):
            book.writestr(f"{name}.xhtml", as_html(chapter[1:], chapter[0]))


def write_mail(path: Path, blocks: list[str], sender: str, subject: str) -> None:
    """Write a mail with a picture attached, which is none of its text."""
    mail = EmailMessage()
    mail["From"], mail["To"], mail["Subject"] = sender, "ruth@example.org", subject
    mail["Date"] = format_datetime(datetime(2024, 3, 5, 9, 30, tzinfo=timezone.utc))
    mail.set_content("\n\n".join(blocks) + "\n")
    picture = io.BytesIO()
    Image.new("L", (40, 30), 128).save(picture, "PNG")
    mail.add_attachment(picture.getvalue(), maintype="image", subtype="png", filename="view.png")
    mail.set_boundary("=-=-=")
    path.write_bytes(bytes(mail))


def write_all(folder: Path) -> None:
    """Write 25 documents, of which three have no text to be had."""

    def place(name: str) -> Path:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    for name in ("news", "folktale", "speech"):
        shutil.copy(OWN / f"{name}.txt", place(f"notes/{name}.txt"))
    speech = (OWN / "diary.txt").read_text(encoding="utf-8")
    place("notes/diary-utf16.txt").write_bytes(speech.encode("utf-16"))
    shutil.copy(OTHERS / "declaration.txt", place("history/declaration.txt"))
    for name in ("architecture", "formats", "prompts"):
        shutil.copy(ROOT / "docs" / f"{name}.md", place(f"manual/{name}.md"))
    for name in ("article", "review", "notice"):
        write_html(place(f"web/{name}.html"), paragraphs(OWN / f"{name}.txt"))
    for name in ("minutes", "lecture", "experiment"):
        write_pdf(place(f"papers/{name}.pdf"), paragraphs(OWN / f"{name}.txt"))
    write_pdf(place("history/constitution.pdf"), paragraphs(OTHERS / "constitution.txt"))
    for name in ("interview", "obituary", "report", "instructions"):
        write_docx(place(f"office/{name}.docx"), paragraphs(OWN / f"{name}.txt"))
    write_epub(place("books/jargon.epub"), paragraphs(OTHERS / "jargon.txt"))
    letter = paragraphs(OWN / "letter.txt")
    write_mail(place("mail/letter.eml"), letter, "Ann <ann@example.org>", "News from the island")
    story = paragraphs(OWN / "story.txt")
    write_mail(place("mail/story.eml"), story, "Tom <tom@example.org>", f"A story: {story[0]}")
    place("bad/empty.txt").touch()
    write_scan(place("bad/scan.pdf"), letter)
    write_pdf(place("bad/locked.pdf"), letter, "secret")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/documents.py FOLDER")
    target = Path(sys.argv[1])
    write_all(target)
    print(f"{sum(path.is_file() for path in target.rglob('*')):,} documents in {target}")
