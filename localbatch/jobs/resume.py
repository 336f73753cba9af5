"""Goes on with a job: what its journal has is not computed again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from localbatch.data.errors import JournalError
from localbatch.data.request import Completion, Request
from localbatch.jobs.journal import Entry, Journal, RowKind
from localbatch.jobs.manifest import changes, fingerprint


class Resume:
    """Passes on the rows of an input that are not finished, and knows them when they are.

    Raises `JournalError` if the journal is of another job: other settings at once, another row than
    a finished one when it comes by.
    """

    def __init__(self, journal: Journal, manifest: dict[str, Any], output: str) -> None:
        self.num_finished = 0
        """Rows that were passed over."""
        self._journal, self._manifest, self._output = journal, manifest, output
        self._asked: dict[int, bytes] = {}  # of rows that are being computed
        before = journal.manifest
        if changed := changes(before, manifest) if before else []:
            raise JournalError(f"{self._intro()} another run: {'; '.join(changed)}; {_ADVICE}")
        if created := before.get("about", {}).get("created"):
            manifest["about"]["created"] = created
        before_input = before.get("about", {}).get("input_sha256")
        now_input = manifest["about"]["input_sha256"]
        self.has_same_input = now_input is not None and now_input == before_input

    def accept(self) -> None:
        """Note that the journal is this job's now."""
        self._journal.update_manifest(self._manifest)

    def unfinished(self, rows: Iterable[Request | Completion]) -> Iterator[Request | Completion]:
        """Yield the rows that the journal does not have."""
        number = 0
        for row in rows:
            number += 1
            if self._is_finished(row):
                self.num_finished += 1
                continue
            self._asked[row.index] = fingerprint(row)
            yield row
        self._check_number(number)

    def check(self, rows: Iterable[Request | Completion]) -> None:
        """Look for changed rows before anything is computed."""
        count = 0
        for row in rows:
            self._is_finished(row)
            count += 1
        self._check_number(count)

    def entry(self, completion: Completion) -> Entry:
        """Return what to put into the journal for a row that ended."""
        asked = self._asked.pop(completion.index)
        kind = RowKind.ANSWERED
        if completion.failed:
            kind = RowKind.UNREADABLE if asked == fingerprint(completion) else RowKind.FAILED
        return Entry(completion, asked, kind)

    def _check_number(self, number: int) -> None:
        last = self._journal.last_number()
        if last >= number:
            raise JournalError(
                f"{self._intro()} {last + 1:,} rows, the input has {number:,} now; {_ADVICE}"
            )

    def _is_finished(self, row: Request | Completion) -> bool:
        found = self._journal.find(row.index)
        if found is None:
            return False
        if not self.has_same_input and found[1] != fingerprint(row):
            where = f"line {row.line}" if row.line is not None else f"row {row.index + 1}"
            raise JournalError(
                f"{self._intro()} another row where the input has {where} now; {_ADVICE}"
            )
        return True

    def _intro(self) -> str:
        return f"{self._output}: has answers of"


_ADVICE = "--fresh starts over, or name another output"
