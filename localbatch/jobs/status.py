"""How far a job is, read from its journal, also while it runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from localbatch.jobs.journal import Counts, Journal
from localbatch.jobs.journal_files import JobLock, find_journal


@dataclass(frozen=True)
class JobStatus:
    """What a journal says of its job."""

    journal: Path
    model: str
    source: str
    counts: Counts
    rows: int | None
    """In the input; `None` as long as it was not read to its end."""
    is_running: bool

    def lines(self) -> list[tuple[str, str]]:
        """Return the status as (what, value), for people."""
        counts = self.counts
        total = "" if self.rows is None else f" of {self.rows:,}"
        share = f" ({counts.total / self.rows:.0%})" if self.rows else ""
        bad = f"; {counts.failed + counts.unreadable:,} failed" if counts.total else ""
        state = "running" if self.is_running else "not running"
        if not self.is_running and self.rows is not None and counts.total >= self.rows:
            state = "complete"
        return [
            ("state", state),
            ("rows", f"{counts.total:,}{total} finished{share}{bad}"),
            ("model", self.model),
            ("input", self.source),
            ("journal", str(self.journal)),
        ]


def job_status(job: str) -> JobStatus:
    """Return how far a job is; `job` is its output, its journal, or a folder of summaries.

    Raises `JournalError` if there is no journal, or it can't be read.
    """
    path = find_journal(job)
    with Journal(path, read_only=True) as journal:
        manifest, counts = journal.manifest, journal.counts()
    about = manifest.get("about", {})
    return JobStatus(
        journal=path,
        model=str(about.get("model", "unknown")),
        source=str(about.get("input", "unknown")),
        counts=counts,
        rows=manifest.get("rows"),
        is_running=JobLock.is_held(path),
    )
