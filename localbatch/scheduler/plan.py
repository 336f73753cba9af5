"""What one step computes; enough to replay it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from localbatch.scheduler.sequence import Sequence


class PlanRow(NamedTuple):
    """Tokens `[start, end)` of one sequence, to be computed in `slot`."""

    sequence: Sequence
    slot: int
    start: int
    end: int
    wants_logits: bool
    is_prefill: bool

    @property
    def tokens(self) -> list[int]:
        """The token ids to compute."""
        return self.sequence.tokens[self.start : self.end]


class Move(NamedTuple):
    """All cells of slot `source` go to the free slot `target`."""

    source: int
    target: int


class Copy(NamedTuple):
    """Slot `target` gets the first `length` cells of slot `source`, and nothing else.

    If they are the same slot, it keeps those cells.
    """

    source: int
    target: int
    length: int


@dataclass(frozen=True)
class StepPlan:
    """One step: first `releases`, then `moves`, then `copies` in their order, then `rows`."""

    rows: list[PlanRow]
    moves: list[Move]
    releases: list[int]
    """Slots whose cells are to be freed; a row with `start == 0` finds its slot empty."""
    copies: list[Copy] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.rows)

    @property
    def num_tokens(self) -> int:
        """Tokens computed by this step."""
        return sum(row.end - row.start for row in self.rows)
