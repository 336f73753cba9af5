"""What one measurement is given, and what comes of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from localbatch.engine.machine import usable_threads

WORKLOADS = Path(__file__).parent.parent / "workloads"
DEFAULT_TOKENS = 64
WARM_UP = "warm up"


class BenchError(Exception):
    """A measurement that can't be made or that does not count; the text says why."""


@dataclass(frozen=True)
class Row:
    """One line of a workload."""

    id: str
    prompt: str
    max_tokens: int


@dataclass(frozen=True)
class Job:
    """One measurement of one system, complete enough to be run by another process."""

    kind: str
    model: str
    """Path of the GGUF file."""
    workload: str
    """A name, or the path of a file that ends in .jsonl."""
    rows: int | None = None
    """The first so many rows; all if left out."""
    tokens: int | None = None
    """Tokens out for each row, in place of the workload's own."""
    threads: int | None = None
    """Left out: localbatch chooses, the others get what it would choose on an idle machine."""
    settings: dict[str, Any] = field(default_factory=dict)
    server: str | None = None
    """Path of llama-server."""
    limit_s: float | None = None
    """The measurement is broken off after so many seconds."""
    peers: str | None = None
    """A folder of installed packages to look in for the peers."""

    @property
    def peer_threads(self) -> int:
        """The number of threads for a system that is told how many to use."""
        return self.threads or usable_threads()

    def load(self) -> list[Row]:
        """Return the rows to be run."""
        path = Path(self.workload)
        if path.suffix != ".jsonl":
            path = WORKLOADS / f"{self.workload}.jsonl"
        return load_rows(path, self.rows, self.tokens)


@dataclass
class Measurement:
    """What one run of all rows gave, by row in the order of the workload."""

    wall_s: float
    prompt_tokens: list[int]
    counts: list[int]
    """Tokens out."""
    peak_mib: float
    tokens: list[list[int]] | None = None
    """None: the system chooses none."""
    details: dict[str, Any] = field(default_factory=dict)


def load_rows(path: Path, limit: int | None = None, tokens: int | None = None) -> list[Row]:
    """Read the first `limit` rows of a workload; `tokens` overrides the tokens out of each."""
    rows = []
    for number, line in enumerate(path.read_text("utf-8").splitlines()[:limit], 1):
        row = json.loads(line)
        length = tokens or row.get("max_tokens", DEFAULT_TOKENS)
        rows.append(Row(str(row.get("id", number)), row["prompt"], length))
    return rows


def cells_of(prompts: Sequence[Sequence[int]], rows: Sequence[Row]) -> list[int]:
    """Return the KV cells that each row needs."""
    return [len(prompt) + row.max_tokens for prompt, row in zip(prompts, rows, strict=True)]


def round_up(number: int, multiple: int = 256) -> int:
    """Round up as llama.cpp does with the cells of a context."""
    return -(-number // multiple) * multiple


def check(
    measured: Measurement, rows: Sequence[Row], prompt_tokens: Sequence[int] | None = None
) -> None:
    """Raise `BenchError` unless every row has as many tokens as were asked for, in and out."""
    counts = measured.counts
    if measured.tokens is not None and [len(tokens) for tokens in measured.tokens] != counts:
        raise BenchError("the token counts are not those of the tokens")
    _compare("tokens out", rows, counts, [row.max_tokens for row in rows])
    if prompt_tokens is not None:
        _compare("prompt tokens", rows, measured.prompt_tokens, prompt_tokens)


def _compare(what: str, rows: Sequence[Row], found: Sequence[int], wanted: Sequence[int]) -> None:
    if len(found) != len(rows):
        raise BenchError(f"{len(found)} rows came back, not {len(rows)}")
    wrong = [i for i in range(len(rows)) if found[i] != wanted[i]]
    if wrong:
        first = wrong[0]
        raise BenchError(
            f"{len(wrong)} of {len(rows)} rows have a wrong number of {what}; "
            f"the first is {rows[first].id} with {found[first]}, not {wanted[first]}"
        )


def to_json(value: object) -> str:
    """Write anything as JSON; what JSON can't hold becomes text."""
    return json.dumps(value, default=_plain)


def _plain(value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return str(value)
