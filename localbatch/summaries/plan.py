"""What a job would be: documents, tokens, chunks, merges and the expected time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from localbatch.data.request import Request
from localbatch.engine.llm import LLM
from localbatch.summaries.cutter import Sizes
from localbatch.summaries.documents import find_documents
from localbatch.summaries.extract import check_libraries, extract
from localbatch.summaries.job import SummaryConfig, check_output, open_cutter
from localbatch.summaries.stream import AHEAD, Counts, opened
from localbatch.summaries.work import DocumentResult, Node, Work


class SummaryPlan:
    """All documents of a job, read and cut."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.documents: list[DocumentResult] = []
        self.merges = 0
        self.all_tokens = 0
        """Of chunks, and at most of what is merged."""
        self.expected_s: float | None = None
        """If every answer is as long as it may be; `None` if nothing is computed or measured."""

    def add(self, work: Work | DocumentResult) -> list[Node]:
        """Take in a document; returns its chunks, none if it can't be summarized."""
        if isinstance(work, DocumentResult):
            self.documents.append(work)
            return []
        self.documents.append(work.result)
        self.merges += work.num_nodes - work.result.chunks
        self.all_tokens += work.num_tokens
        return work.first

    @property
    def failed(self) -> int:
        """Documents that will have an error in place of a summary."""
        return sum(document.error is not None for document in self.documents)

    @property
    def lines(self) -> list[tuple[str, str]]:
        """What there is to say, as (what, value)."""
        good = [document for document in self.documents if document.error is None]
        bad = f"; {self.failed:,} can't be summarized" if self.failed else ""
        tokens, chunks = sum(d.tokens for d in good), sum(d.chunks for d in good)
        longest = max((d.chunks for d in good), default=0)
        expected = "not measured"
        if self.expected_s is not None:
            expected = f"{self.expected_s:,.0f} s if every answer is as long as it may be"
        return [
            ("documents", f"{len(self.documents):,}{bad}"),
            ("text", f"{sum(d.words for d in good):,} words, {tokens:,} tokens"),
            ("chunks", f"{chunks:,} of up to {self.sizes.chunk:,} tokens, {longest:,} at most"
                       " in a document"),
            ("merges", f"{self.merges:,} of up to {self.sizes.fan_in} summaries"),
            ("expected", expected),
        ]  # fmt: skip


def plan_summaries(
    config: SummaryConfig, watch: Callable[[Counts], object] = lambda counts: None
) -> SummaryPlan:
    """Read and cut all documents of a job, and plan it, without computing or writing anything.

    `watch` is told before each document is read. Raises `LocalbatchError` if the model, a path, the
    output or the settings won't do.
    """
    documents = find_documents(config.paths, config.output)
    check_libraries((document.path for document in documents), config.encoding)
    check_output(config)
    counts = Counts(len(documents), all_bytes=sum(document.size for document in documents))
    first: list[Request] = []
    first_tokens = 0
    with open_cutter(config) as cutter:
        plan = SummaryPlan(cutter.sizes)
        for document in documents:
            counts.reading = document.name
            watch(counts)
            work = opened(document, partial(extract, encoding=config.encoding), cutter)
            counts.finished_documents += 1
            counts.opened_bytes += document.size
            for node in plan.add(work)[: AHEAD - len(first)]:
                request = cutter.prompts.request(node.task, node.row_id, len(first), node.text)
                first.append(request)
                first_tokens += node.tokens
    if first:
        with LLM(config.model, **config.engine) as llm:
            llm.prepare(first)
            choice = llm.stats.plan
        if choice is not None and choice.expected_s is not None:
            plan.expected_s = choice.expected_s * plan.all_tokens / max(1, first_tokens)
    return plan
