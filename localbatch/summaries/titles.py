"""Tells a document's title from what programs put in its place."""

from __future__ import annotations

import re
from collections.abc import Iterable

MAX_CHARS = 120

_PROGRAM = re.compile(r"^\W*microsoft (?:office )?(?:word|excel|powerpoint) ?- ", re.IGNORECASE)
_NOTHING = re.compile(
    r"(?:anonymous|untitled|unnamed|unknown|unspecified|no title|none|null|undefined|n/?a"
    r"|unbenannt(?:es)?|ohne titel|sans titre|document sans titre|sin t[íi]tulo|senza titolo"
    r"|(?:new |(?:microsoft )?word )?document|pdf document|dokument|documento"
    r"|(?:powerpoint |new )?presentation|pr[äa]sentation)"
    r"(?:[ _-]?(?:document|title|page|book|presentation|dokument))?[ _-]*\d*",
    re.IGNORECASE,
)
_FILE = re.compile(
    r".*\w\.(?:docx?|dotx?|rtf|odt|wpd|pages|tex|dvi|ps|eps|pdf|indd|qxd|pmd|p65|fm|cdr|ai|pptx?"
    r"|odp|xlsx?|ods|html?|xhtml|epub|mobi|txt|md|rst)|file:.*",
    re.IGNORECASE,
)


def best_title(candidates: Iterable[str]) -> str:
    """Return the first title that says something, `""` if none does."""
    for candidate in candidates:
        title = " ".join(re.sub(r"[\x00-\x1f\x7f\ufeff\u200b]", " ", candidate).split())
        title = _PROGRAM.sub("", title)
        core = re.sub(r"^[\W_]+|[\W_]+$", "", title)
        if core and not _NOTHING.fullmatch(core) and not _FILE.fullmatch(core):
            return title[:MAX_CHARS]
    return ""


def markdown_titles(text: str) -> list[str]:
    """Return the title of a front matter, and the first heading outside of code."""
    found = []
    front = re.match(r"---\n(.*?)\n(?:---|\.\.\.)\n", text, re.DOTALL)
    if front is not None:
        text = text[front.end() :]
        found += re.findall(r"(?m)^title:[ \t]*[\"']?(.*?)[\"']?[ \t]*$", front[1])[:1]
    text = re.sub(r"(?ms)^ {0,3}(```+|~~~+).*?(?:^ {0,3}\1[`~]*[ \t]*$|\Z)", "", text)
    headings = re.finditer(r"(?m)^ {0,3}#{1,6}[ \t]+(.+?)[ \t#]*$|^(\S.*)\n=+[ \t]*$", text)
    return found + [heading[1] or heading[2] for heading in headings][:1]
