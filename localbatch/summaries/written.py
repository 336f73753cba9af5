"""The summaries that a job wrote, so that those of documents that are gone can go."""

from __future__ import annotations

import os
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from localbatch.summaries.outputs import digest_of, remove_summary, summary_path, write_summary
from localbatch.summaries.work import DocumentResult


class WrittenSummaries:
    """What was written into an output folder, and from which documents.

    `known` is to be kept from run to run: a document's name -> its path and the summary's digest.
    """

    def __init__(self, folder: Path, known: Mapping[str, Any]) -> None:
        self._folder = folder
        self.known = {name: (str(path), str(digest)) for name, (path, digest) in known.items()}
        self._failed: set[str] = set()

    def write(self, result: DocumentResult, *, with_sources: bool) -> None:
        """Write a document's summary, if there is one; raises `OutputError` if it can't be."""
        if result.error is not None:
            self._failed.add(result.name)
            return
        write_summary(self._folder, result, with_sources=with_sources)
        digest = digest_of(self._folder / summary_path(result.name))
        self.known[result.name] = (os.path.abspath(result.path), str(digest))

    def remove_stale(self, names: Container[str]) -> list[str]:
        """Remove the summaries of documents that are gone or could not be summarized this time.

        `names` are the documents of this run. A document that was not asked for, but is there, is
        not gone; a summary that was changed since it was written stays. Returns what was removed.
        """
        removed = []
        for name, (path, digest) in list(self.known.items()):
            is_gone = name not in names and not os.path.exists(path)
            if is_gone or name in self._failed:
                del self.known[name]
                if remove_summary(self._folder, name, digest):
                    removed.append(name)
        return removed
