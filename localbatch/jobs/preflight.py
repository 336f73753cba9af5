"""What is known of a job's rows before any is computed."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from localbatch.data.config import Overlength
from localbatch.data.request import Completion, Request, failed_completion
from localbatch.engine.client import WINDOW
from localbatch.engine.llm import LLM


@dataclass
class Preflight:
    """All rows of a job, parsed, rendered and tokenized."""

    unreadable: int = 0
    """Rows that are none."""
    refused: int = 0
    """Rows that can't be computed: too long, not for this template, and the like."""
    cut: int = 0
    """Rows of which something is cut out to fit the context."""
    short_of_room: int = 0
    """Rows whose context may be full before their `max_tokens` are reached."""
    cut_tokens: int = 0
    shared_tokens: int = 0
    """Of prompts, that are computed with another row's."""
    answer_tokens: int = 0
    """If every row runs to its `max_tokens`."""
    lengths: array[int] = field(default_factory=lambda: array("q"))
    """Tokens of each prompt that will be computed."""
    first: list[Request] = field(default_factory=list)
    """The rows that a plan is made for."""

    @property
    def rows(self) -> int:
        """All rows of the input."""
        return len(self.lengths) + self.refused + self.unreadable

    @property
    def windows(self) -> float:
        """How many times the rows are those that a plan is made for, at least once."""
        return max(1.0, len(self.lengths) / max(1, len(self.first)))

    @property
    def failed(self) -> int:
        """Rows that will have an error in place of an answer."""
        return self.refused + self.unreadable

    def lines(self, overlength: Overlength) -> list[tuple[str, str]]:
        """Return what there is to say, as (what, value)."""
        told = [("rows", self._rows_line(overlength))]
        if self.lengths:
            told.append(("prompts", self._prompts_line()))
            told.append(("answers", self._answers_line()))
        return told

    def summary(self) -> str:
        """Return what there is to say in one line."""
        rows = f"{self.rows:,} row{'' if self.rows == 1 else 's'}"
        if self.failed:
            rows += f", {self.failed:,} of them can't be computed"
        if not self.lengths:
            return rows
        lengths = np.frombuffer(self.lengths, np.int64)
        prompts = (
            f"{lengths.sum():,} tokens of prompts ({lengths.min():,} to {lengths.max():,} a row"
        )
        if self.shared_tokens:
            prompts += f"; {self.shared_tokens:,} are common beginnings"
        if self.cut:
            prompts += f"; {self.cut:,} rows are cut to fit"
        return f"{rows}: {prompts}), at most {self.answer_tokens:,} of answers"

    def _rows_line(self, overlength: Overlength) -> str:
        parts = [f"{self.rows:,}"]
        if self.unreadable:
            parts.append(f"{self.unreadable:,} can't be read")
        if self.refused:
            parts.append(f"{self.refused:,} can't be computed")
        if self.cut:
            where = overlength.value.removeprefix("truncate-")
            parts.append(
                f"{self.cut:,} too long, {self.cut_tokens:,} tokens are cut ({where}) to fit"
            )
        return "; ".join(parts)

    def _prompts_line(self) -> str:
        lengths = np.frombuffer(self.lengths, np.int64)
        low, median, high, most = np.percentile(lengths, [0, 50, 95, 100], method="nearest")
        line = (
            f"{lengths.sum():,} tokens: {low:,} to {most:,} a row, half of them up to {median:,}, "
            f"95 % up to {high:,}"
        )
        if self.shared_tokens:
            line += f"; {self.shared_tokens:,} are common beginnings, computed once"
        return line

    def _answers_line(self) -> str:
        line = f"at most {self.answer_tokens:,} tokens"
        if self.short_of_room:
            rows = "row" if self.short_of_room == 1 else "rows"
            line += f"; in {self.short_of_room:,} {rows} the context may be full before"
        return line


MOST_BYTES = 16 << 20
"""Size of an input that is looked through at the start of a run; it takes some seconds."""


def look_through(
    llm: LLM,
    rows: Iterable[Request | Completion],
    note: Callable[[Completion], object] = lambda bad: None,
) -> Preflight:
    """Parse, render and tokenize all rows; memory holds some thousands of them and the lengths.

    `note` is called for each row that will have an error.
    """
    found, source = Preflight(), iter(rows)
    while window := list(itertools.islice(source, WINDOW)):
        requests = {row.index: row for row in window if isinstance(row, Request)}
        for bad in (row for row in window if isinstance(row, Completion)):
            found.unreadable += 1
            note(bad)
        for seen in llm.preview(requests.values()):
            request = requests[seen.index]
            if seen.error is not None:
                found.refused += 1
                note(failed_completion(request.id, request.index, seen.error, request.line))
                continue
            found.lengths.append(seen.num_tokens)
            found.cut += seen.cut_tokens > 0
            found.cut_tokens += seen.cut_tokens
            found.short_of_room += seen.is_short_of_room
            found.shared_tokens += seen.shared_tokens
            found.answer_tokens += request.params.max_tokens * request.params.n
        found.first = found.first or list(requests.values())
    return found
