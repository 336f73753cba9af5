"""The answers that a job has: finished chunks and merges, known again by what was asked."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple

from localbatch.data.request import Completion, Request
from localbatch.jobs.journal import Entry, Journal, RowKind
from localbatch.jobs.manifest import fingerprint


class Answer(NamedTuple):
    """What came of a request."""

    text: str
    is_cut: bool = False
    """Whether it ended at its most tokens."""
    error: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    """In the engine, waiting left out."""


class Answers:
    """The journal of a job, by the ids of requests.

    An id has one place in the journal. When something else is asked under it, as of a document that
    changed, the answer is not found, and the new one takes the place.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._known: dict[str, tuple[int, bytes]] = {}
        self._asked: dict[int, bytes] = {}
        for row in journal.rows():
            self._known[str(json.loads(row.record)["id"])] = (row.number, row.fingerprint)
        self._stored = {number for number, _ in self._known.values()}
        self._current: set[int] = set()
        self._next = journal.last_number() + 1

    def place(self, row_id: str) -> int:
        """Return the number under which the answer to a request is kept: its `index`."""
        if row_id in self._known:
            return self._known[row_id][0]
        self._known[row_id] = (self._next, b"")
        self._next += 1
        return self._next - 1

    def find(self, request: Request) -> Answer | None:
        """Return the answer to a request, if it is finished."""
        asked = fingerprint(request)
        number, known = self._known[str(request.id)]
        if known == asked:
            self._current.add(number)
            return _answer(self._journal.record(number))
        self._asked[number] = asked
        return None

    def add(self, completion: Completion) -> Answer:
        """Keep what came of a request that was not found."""
        asked = self._asked.pop(completion.index)
        kind = RowKind.FAILED if completion.failed else RowKind.ANSWERED
        self._journal.add(Entry(completion, asked, kind))
        self._current.add(completion.index)
        usage, timings = completion.usage, completion.timings
        return Answer(
            completion.text, completion.finish_reason.value == "length", completion.error,
            usage.prompt_tokens, usage.completion_tokens,
            round(timings.prefill_s, 6) + round(timings.decode_s, 6),
        )  # fmt: skip

    def flush(self) -> None:
        """Wait until all answers are durable; raises `OutputError` if they can't be."""
        self._journal.flush()

    def drop_stale(self, is_kept: Callable[[str], bool]) -> None:
        """Drop the answers that this run did not come by, and those to what is not asked any more.

        Those of documents that `is_kept` says true of, by name, stay.
        """
        stale = {
            row_id: number
            for row_id, (number, _) in self._known.items()
            if number in self._stored - self._current
            and (number in self._asked or not is_kept(row_id.rpartition("#")[0]))
        }
        self._journal.drop(stale.values())
        self._stored.difference_update(stale.values())
        for row_id in stale:
            del self._known[row_id]


def _answer(line: str) -> Answer:
    row = json.loads(line)
    usage, timings = row["usage"], row["timings"]
    return Answer(
        row["text"] or "", row["finish_reason"] == "length",
        row["error"]["message"] if "error" in row else None,
        usage["prompt_tokens"], usage["completion_tokens"],
        timings["prefill_s"] + timings["decode_s"],
    )  # fmt: skip
