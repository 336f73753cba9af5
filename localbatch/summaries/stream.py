"""All chunks and merges of all documents as one stream of requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from localbatch.data.errors import ConfigError, InputError
from localbatch.data.request import Completion, Later, Request
from localbatch.summaries.answers import Answer, Answers
from localbatch.summaries.cutter import Cutter
from localbatch.summaries.documents import Document
from localbatch.summaries.extract import Extracted
from localbatch.summaries.prompts import Prompts
from localbatch.summaries.work import DocumentResult, Node, Work

AHEAD = 512
"""Rows in the engine, above which no further document is opened."""


@dataclass
class Counts:
    """How far a job is."""

    documents: int = 0
    finished_documents: int = 0
    nodes: int = 0
    """Chunks and merges of the documents that were opened."""
    finished_nodes: int = 0
    resumed_nodes: int = 0
    """Of `finished_nodes`, by earlier runs."""
    tokens: int = 0
    """Of `nodes`; of what is merged at most."""
    finished_tokens: int = 0
    resumed_tokens: int = 0
    reading: str | None = None
    """The name of the document that is being read and cut."""
    opened_bytes: int = 0
    all_bytes: int = 0

    @property
    def unopened(self) -> float:
        """What share of all is not opened yet, of what was: by the sizes of the files."""
        rest = self.all_bytes - self.opened_bytes
        return rest / self.opened_bytes if self.opened_bytes else 0.0

    def time_left(self, elapsed_s: float) -> float | None:
        """Return the seconds that the rest takes at the pace so far, `None` if there is none."""
        computed = self.finished_tokens - self.resumed_tokens
        if computed <= 0:
            return None
        rest = self.tokens * (1 + self.unopened) - self.finished_tokens
        return max(0.0, rest) * elapsed_s / computed


def opened(
    document: Document, extract: Callable[[Path], Extracted], cutter: Cutter
) -> Work | DocumentResult:
    """Read and cut a document; returns the error in place of its summary if that can't be done."""
    try:
        document.check_name()
        extracted = extract(document.path)
        spans = cutter.cut(extracted.text, markdown=extracted.kind == "markdown")
    except (InputError, ConfigError) as error:
        return DocumentResult(document.name, str(document.path), error=str(error))
    return Work(document, extracted, spans, cutter.sizes)


class SummaryStream:
    """Opens documents as there is room, and makes requests of their chunks and merges.

    `extract` returns the text of a file and raises `InputError` if there is none. `on_document` is
    told of each document when it ends, in whatever order that is; `on_reading` before one is read.
    """

    def __init__(
        self,
        documents: Iterable[Document],
        extract: Callable[[Path], Extracted],
        cutter: Cutter,
        prompts: Prompts,
        answers: Answers,
        on_document: Callable[[DocumentResult], object],
        on_reading: Callable[[], object] = lambda: None,
    ) -> None:
        documents = list(documents)
        self.counts = Counts(len(documents), all_bytes=sum(d.size for d in documents))
        self._documents = iter(documents)
        self._extract, self._cutter, self._prompts = extract, cutter, prompts
        self._answers = answers
        self._on_document, self._on_reading = on_document, on_reading
        self._merges: deque[Node] = deque()
        self._chunks: deque[Node] = deque()
        self._out: dict[int, Node] = {}
        self._is_filling = True
        self._is_exhausted = False

    def rows(self) -> Iterator[Request | Later]:
        """Yield what is to be computed, merges before chunks, and `Later` while none is ready."""
        while True:
            node = self._next()
            if node is not None:
                if (request := self._request(node)) is not None:
                    yield request
            elif self._out:
                yield Later.LATER
            else:
                return

    def finish(self, completion: Completion) -> None:
        """Take in the answer to one of the requests."""
        node = self._out.pop(completion.index)
        self._settle(node, self._answers.add(completion))

    def _next(self) -> Node | None:
        """Return the next node, `None` if none is ready or there is enough to do."""
        if self._merges:
            return self._merges.popleft()
        self._is_filling = len(self._out) < (AHEAD if self._is_filling else AHEAD // 2)
        while self._is_filling:
            while self._chunks:
                node = self._chunks.popleft()
                if node.work.result.error is None:
                    return node
            if self._merges or not self._open_next():
                break
        return self._merges.popleft() if self._merges else None

    def _open_next(self) -> bool:
        """Cut another document into chunks; returns whether there was one."""
        document = next(self._documents, None)
        if document is None:
            return False
        self.counts.reading = document.name
        self._on_reading()
        work = opened(document, self._extract, self._cutter)
        self.counts.reading = None
        self.counts.opened_bytes += document.size
        if isinstance(work, DocumentResult):
            self._end(work)
            return True
        self.counts.nodes += work.num_nodes
        self.counts.tokens += work.num_tokens
        self._chunks += work.first
        return True

    def _request(self, node: Node) -> Request | None:
        """Return a node's request; `None` if it was answered in an earlier run."""
        row_id = node.row_id
        index = self._answers.place(row_id)
        request = self._prompts.request(node.task, row_id, index, node.text)
        if node.level:
            request = self._fitting(node, request)
        found = self._answers.find(request)
        if found is None:
            self._out[index] = node
            return request
        self.counts.resumed_nodes += 1
        self.counts.resumed_tokens += node.tokens
        self._settle(node, found)
        return None

    def _fitting(self, node: Node, request: Request) -> Request:
        """Return the request of a merge, its parts shortened if they have more tokens than planned.

        Text that a model wrote may have more tokens when it is read again.
        """
        if self._cutter.fits(request):
            return request
        tokens = self._cutter.sizes.part
        parts = [self._cutter.head(part, tokens) for part in node.parts]
        text = "\n\n".join(parts)
        return self._prompts.request(node.task, node.row_id, request.index, text)

    def _settle(self, node: Node, answer: Answer) -> None:
        work = node.work
        had_ended = work.result.error is not None
        self.counts.finished_nodes += 1
        self.counts.finished_tokens += node.tokens
        ready = work.finish(node, answer)
        if ready is not None:
            self._merges.append(ready)
        elif work.is_done and not had_ended:
            self._end(work.result)

    def _end(self, result: DocumentResult) -> None:
        self.counts.finished_documents += 1
        self._on_document(result)
