"""The work on one document: its chunks, and the merges that become ready as answers come."""

from __future__ import annotations

from dataclasses import dataclass, field

from localbatch.summaries.answers import Answer
from localbatch.summaries.checks import numbers_in, unknown_numbers, warnings_of
from localbatch.summaries.cutter import Sizes, Span
from localbatch.summaries.documents import Document
from localbatch.summaries.extract import Extracted
from localbatch.summaries.prompts import Task
from localbatch.summaries.tree import merge_levels
from localbatch.summaries.words import count_words

_NAMED = 5
"""So many parts are named in a warning."""


@dataclass(frozen=True)
class Source:
    """A span of a document and what was made of it."""

    start: int
    """First character of the extracted text."""
    end: int
    line: int
    """Of the first character, from 1."""
    summary: str


@dataclass
class DocumentResult:
    """What came of one document."""

    name: str
    path: str
    title: str = ""
    kind: str = ""
    words: int = 0
    """Of its text, as `count_words` counts."""
    tokens: int = 0
    """Of its text."""
    chunks: int = 0
    levels: int = 0
    """Of merges."""
    summary: str = ""
    seconds: float = 0.0
    """In the engine; those of other documents' rows beside it are counted with each of them."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    warnings: list[str] = field(default_factory=list)
    error: str | None = None
    sources: list[Source] = field(default_factory=list)


@dataclass
class Node:
    """A chunk or a merge."""

    work: Work
    level: int
    """0 is a chunk."""
    position: int
    parts: list[str]
    """What is summarized: a chunk's text, or summaries; dropped when it is done."""
    tokens: int
    """Of its parts, for those of a merge at most."""

    @property
    def text(self) -> str:
        """The parts as one text."""
        return "\n\n".join(self.parts)

    @property
    def row_id(self) -> str:
        """The id of the node's request, the same in every run."""
        return f"{self.work.result.name}#{self.level}.{self.position}"

    @property
    def task(self) -> Task:
        """What is asked for."""
        last = self.level == len(self.work.levels)
        if self.level == 0:
            return Task.WHOLE if last else Task.PART
        return Task.FINAL if last else Task.MERGE


class Work:
    """A document on its way: `first` nodes, then those that `finish` returns."""

    def __init__(
        self, document: Document, extracted: Extracted, spans: list[Span], sizes: Sizes
    ) -> None:
        text = extracted.text
        self.spans = [span for span in spans if text[span.start : span.end].strip()]
        self.levels = merge_levels(len(self.spans), sizes.fan_in)
        self.result = DocumentResult(
            document.name, str(document.path), extracted.title, extracted.kind,
            words=count_words(text), tokens=sum(span.tokens for span in self.spans),
            chunks=len(self.spans), levels=len(self.levels),
        )  # fmt: skip
        self._numbers = numbers_in(text)
        self._lines = _lines(text, self.spans)
        self._summaries: list[dict[int, str]] = [{} for _ in range(len(self.levels) + 1)]
        self.first = [
            Node(self, 0, i, [text[span.start : span.end]], span.tokens)
            for i, span in enumerate(self.spans)
        ]
        self._part_tokens = sizes.part
        self._warned: dict[str, list[Node]] = {}

    @property
    def num_nodes(self) -> int:
        """Chunks and merges, those of a single part left out: they are not computed."""
        merges = sum(len(group) > 1 for level in self.levels for group in level)
        return len(self.spans) + merges

    @property
    def num_tokens(self) -> int:
        """Tokens of all chunks, and at most of all that is merged."""
        merged = sum(len(group) for level in self.levels for group in level if len(group) > 1)
        return self.result.tokens + merged * self._part_tokens

    @property
    def is_done(self) -> bool:
        """Whether there is a summary, or an error in its place."""
        return self.result.error is not None or 0 in self._summaries[-1]

    def finish(self, node: Node, answer: Answer) -> Node | None:
        """Take in a node's answer; returns the merge that is ready by it, if one is."""
        result = self.result
        result.seconds += answer.seconds
        result.prompt_tokens += answer.prompt_tokens
        result.completion_tokens += answer.completion_tokens
        if answer.error is not None:
            what = "" if result.chunks == 1 else f"{_name(node)}: "
            result.error = result.error or what + answer.error
        if result.error is not None:
            return None
        summary = answer.text.strip()
        found = warnings_of(summary, node.text, is_cut=answer.is_cut)
        for warning in found:
            self._warned.setdefault(warning, []).append(node)
        node.parts = []
        return self._settle(node.level, node.position, summary)

    def _warning(self, what: str, nodes: list[Node]) -> str:
        """Say what is suspicious, and where: in the summary itself, if nothing else is said."""
        if any(node.level == len(self.levels) for node in nodes):
            return what
        names = [_name(node) for node in sorted(nodes, key=lambda n: (n.level, n.position))]
        more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
        return f"{what} ({', '.join(names[:_NAMED])}{more})"

    def _settle(self, level: int, position: int, summary: str) -> Node | None:
        self._summaries[level][position] = summary
        if level == len(self.levels):
            self._end(summary)
            return None
        above = self.levels[level]
        parent = next(i for i, group in enumerate(above) if position in group)
        below = [self._summaries[level].get(i) for i in above[parent]]
        if any(summary is None for summary in below):
            return None
        parts = [part for part in below if part]
        if len(parts) > 1 or (parts and level + 1 == len(self.levels)):
            return Node(self, level + 1, parent, parts, len(parts) * self._part_tokens)
        return self._settle(level + 1, parent, parts[0] if parts else "")

    def _end(self, summary: str) -> None:
        result = self.result
        result.summary = summary
        result.warnings = [self._warning(what, self._warned[what]) for what in sorted(self._warned)]
        if not summary and not result.warnings:
            result.warnings.append("is empty")
        if unknown := unknown_numbers(summary, self._numbers):
            result.warnings.append(f"has numbers that its source has not: {', '.join(unknown)}")
        parts = self._summaries[0]
        result.sources = [
            Source(span.start, span.end, line, parts[i])
            for i, (span, line) in enumerate(zip(self.spans, self._lines, strict=True))
        ]


def _lines(text: str, spans: list[Span]) -> list[int]:
    """Return the line that each span begins in, from 1."""
    lines, line, place = [], 1, 0
    for span in spans:
        line += text.count("\n", place, span.start)
        place = span.start
        lines.append(line)
    return lines


def _name(node: Node) -> str:
    """Name a part or a merge for people, from 1."""
    if node.level == 0:
        return f"part {node.position + 1}"
    return f"merge {node.level}.{node.position + 1}"
