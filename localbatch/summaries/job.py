"""Summarizes documents, and goes on where an earlier run stopped."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from localbatch.data.errors import ConfigError, LocalbatchError
from localbatch.data.request import Request
from localbatch.data.sampling_params import SamplingParams
from localbatch.engine.backend import Numerics
from localbatch.engine.llm import LLM
from localbatch.formats.inputs import InputOptions
from localbatch.jobs.job import completions
from localbatch.jobs.journal import Journal, RowKind
from localbatch.jobs.journal_files import (
    INDEX,
    JobLock,
    check_is_journal,
    journal_path,
    remove_journal,
)
from localbatch.jobs.manifest import make_manifest
from localbatch.jobs.resume import Resume
from localbatch.models.catalog import resolve_model
from localbatch.summaries.answers import Answers
from localbatch.summaries.cutter import CHUNK_TOKENS, Cutter
from localbatch.summaries.documents import Document, find_documents
from localbatch.summaries.extract import AUTO, check_libraries, extract
from localbatch.summaries.outputs import check_folder, make_folder, write_index
from localbatch.summaries.prompts import Prompts, SummaryOptions
from localbatch.summaries.stream import Counts, SummaryStream
from localbatch.summaries.work import DocumentResult
from localbatch.summaries.written import WrittenSummaries


@dataclass(frozen=True)
class SummaryConfig:
    """What to summarize, and how."""

    model: str
    paths: Sequence[str]
    """Files, folders, patterns with `*`."""
    output: str
    """Folder."""
    options: SummaryOptions = field(default_factory=SummaryOptions)
    inputs: InputOptions = field(default_factory=InputOptions)
    params: SamplingParams = field(default_factory=SamplingParams)
    """Without `max_tokens`, which comes from the length."""
    chunk_tokens: int = CHUNK_TOKENS
    """Most tokens of a document in one prompt; fewer if the context is small."""
    encoding: str = "utf-8"
    """Of plain text and Markdown; `auto` guesses where it is not UTF-8."""
    with_sources: bool = False
    """List the parts of a document with each summary, and keep them in its `DocumentResult`."""
    fresh: bool = False
    """Forget what an earlier run finished."""
    retry_failed: bool = False
    """Compute again what failed in an earlier run."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of `LLM`."""

    @property
    def prompts(self) -> Prompts:
        """What the model is asked."""
        return Prompts(self.options, self.inputs, self.params)

    def __post_init__(self) -> None:
        try:
            "".encode("utf-8" if self.encoding == AUTO else self.encoding)
        except LookupError:
            raise ConfigError(f"encoding: there is none of the name {self.encoding!r}") from None
        if self.chunk_tokens < 1:
            raise ConfigError(f"chunk_tokens: must be at least 1, not {self.chunk_tokens}")
        if isinstance(self.paths, str):
            raise ConfigError("paths: must be a list of paths, not one string")


@dataclass
class SummaryResult:
    """How a job ended."""

    documents: list[DocumentResult] = field(default_factory=list)
    """Those that ended, by earlier runs or this one, in the order of their names."""
    counts: Counts = field(default_factory=Counts)
    prompt_tokens: int = 0
    """Of this run."""
    completion_tokens: int = 0
    wall_s: float = 0.0
    """Reading the documents included, loading the model, too."""
    interrupted: bool = False
    removed: list[str] = field(default_factory=list)
    """Names of documents that are gone, or have no summary any more, whose old one was removed."""
    numerics: Numerics | None = None
    """What a row's logits depended on; `None` if none was computed."""
    error: LocalbatchError | None = None
    """What ended the job early; what was finished is in the output all the same."""

    @property
    def failed(self) -> int:
        """Documents with an error in place of a summary."""
        return sum(result.error is not None for result in self.documents)

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Take the time of a block, and note what ends it early."""
        started = time.perf_counter()
        try:
            yield
        except KeyboardInterrupt:
            self.interrupted = True
        except LocalbatchError as error:
            if not self.counts.finished_nodes:
                raise
            self.error = error
        finally:
            self.wall_s = time.perf_counter() - started


Watch = Callable[[Counts, "DocumentResult | None"], object]
"""Told of every document that is about to be read, finished row, and document that ends."""


def summarize(config: SummaryConfig, watch: Watch = lambda counts, done: None) -> SummaryResult:
    """Summarize documents into a folder: a `.md` file for each, and an index.

    Finished chunks and merges are kept in a journal in that folder, and are not computed again. A
    document without a summary has an `error` and costs the others nothing. Ctrl-C, a dead worker
    and a full disk end the job early. Raises `LocalbatchError` if it can't start.
    """
    documents = find_documents(config.paths, config.output)
    check_libraries((document.path for document in documents), config.encoding)
    folder = make_folder(config.output)
    path = journal_path(str(folder / INDEX))
    with JobLock(path):
        old = _written(path)
        if config.fresh:
            remove_journal(path)
        with _dropped_if_empty(path), Journal(path) as journal:
            _claim(config, journal)
            result = SummaryResult()
            ended: dict[str, DocumentResult] = {}
            written = WrittenSummaries(folder, old)
            answers, places = Answers(journal), _places(documents, journal, old)
            answers.drop_stale(places.__contains__)
            journal.update_manifest({"documents": places})

            def on_document(done: DocumentResult) -> None:
                written.write(done, with_sources=config.with_sources)
                if not config.with_sources:
                    done.sources.clear()  # of thousands of documents they would be many
                ended[done.name] = done
                watch(result.counts, done)

            try:
                with result.timed():
                    _compute(config, documents, answers, result, on_document, watch)
            finally:
                result.documents = [ended[name] for name in sorted(ended)]
                result.removed = written.remove_stale({d.name for d in documents})
                journal.update_manifest({"written": written.known})
                if ended:
                    write_index(folder, result.documents)
                answers.drop_stale(lambda n: n in places and not _is_settled(ended.get(n)))
                _note_end(journal, result)
    return result


@contextlib.contextmanager
def _dropped_if_empty(path: Path) -> Iterator[None]:
    """Remove the journal of a run that could not start; the next one may have other settings."""
    try:
        yield
    except LocalbatchError:
        with contextlib.suppress(LocalbatchError):
            with Journal(path, read_only=True) as journal:
                is_empty = not journal.counts().total and not journal.manifest.get("written")
            if is_empty:
                remove_journal(path)
        raise


def _written(path: Path) -> dict[str, Any]:
    """Return what an earlier run noted of its summaries, nothing if its journal can't be read."""
    try:
        with Journal(path, read_only=True) as journal:
            return dict(journal.manifest.get("written") or {})
    except LocalbatchError:
        return {}


def _places(
    documents: Sequence[Document], journal: Journal, written: Mapping[str, Any]
) -> dict[str, str]:
    """Return name -> path of the documents that are there, of this run and earlier ones."""
    known = {name: path for name, (path, _) in written.items()}
    known |= journal.manifest.get("documents") or {}
    places = {name: path for name, path in known.items() if os.path.exists(path)}
    return places | {document.name: os.path.abspath(document.path) for document in documents}


def _is_settled(done: DocumentResult | None) -> bool:
    """Whether all that was asked of a document is known: not so if a part of it failed."""
    return done is not None and (done.error is None or not done.chunks)


def _note_end(journal: Journal, result: SummaryResult) -> None:
    """Note whether all is done, for `localbatch status`."""
    is_done = not result.interrupted and result.error is None
    journal.update_manifest({"rows": journal.counts().total if is_done else None})


def _compute(
    config: SummaryConfig,
    documents: Sequence[Document],
    answers: Answers,
    result: SummaryResult,
    on_document: Callable[[DocumentResult], object],
    watch: Watch,
) -> None:
    """Compute what is left; without anything left the model's weights are not even loaded."""
    with open_cutter(config) as cutter:
        stream = SummaryStream(
            documents, partial(extract, encoding=config.encoding), cutter, cutter.prompts,
            answers, on_document, lambda: watch(stream.counts, None),
        )  # fmt: skip
        result.counts = stream.counts
        rows = stream.rows()
        first = next(rows, None)
        if not isinstance(first, Request):
            return
        try:
            with LLM(config.model, **config.engine) as llm:
                for completion in completions(llm, itertools.chain([first], rows)):
                    stream.finish(completion)
                    result.prompt_tokens += completion.usage.prompt_tokens
                    result.completion_tokens += completion.usage.completion_tokens
                    result.numerics = llm.stats.numerics
                    watch(result.counts, None)
        finally:
            answers.flush()


def open_cutter(config: SummaryConfig) -> Cutter:
    """Return what cuts the documents of a job; raises `LocalbatchError` if the model won't do."""
    engine = config.engine
    return Cutter(
        config.model, config.prompts,
        chunk_tokens=config.chunk_tokens, ctx=engine.get("ctx"),
        chat_template=engine.get("chat_template"), backend=engine.get("backend", "llama"),
    )  # fmt: skip


def check_output(config: SummaryConfig) -> None:
    """Raise `LocalbatchError` if a run would be refused its output; writes nothing."""
    check_folder(config.output)
    path = journal_path(str(Path(config.output, INDEX)))
    JobLock.check(path)
    check_is_journal(path)
    if not config.fresh and path.exists() and path.stat().st_size:
        with Journal(path, read_only=True) as journal:
            Resume(journal, _manifest(config), config.output)


def _claim(config: SummaryConfig, journal: Journal) -> None:
    """Compare the job with its journal; raises `JournalError` if it is of other settings."""
    Resume(journal, _manifest(config), config.output).accept()
    journal.update_manifest({"rows": None})
    if config.retry_failed:
        journal.forget([RowKind.FAILED])


def _manifest(config: SummaryConfig) -> dict[str, Any]:
    """Return what makes the job the same job."""
    model = config.model
    if config.engine.get("backend", "llama") == "llama":
        model = str(resolve_model(model))
    manifest = make_manifest(
        model, ", ".join(config.paths), config.params, inputs=config.inputs, engine=config.engine
    )
    options = {f"--{name}": value for name, value in asdict(config.options).items()}
    del manifest["same"]["--max-tokens"]  # set by the length
    manifest["same"] |= {**options, "--style": config.options.style.value}
    manifest["same"]["--chunk-tokens"] = config.chunk_tokens
    return manifest
