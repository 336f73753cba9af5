"""Which differences of answers are looked at closely, and what becomes of the margins found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from localbatch.compare.figures import Agreement, Difference
from localbatch.compare.margins import Fork, MarginTask

Margins: TypeAlias = Callable[[MarginTask], list[float]]
Answers: TypeAlias = Mapping[int, Sequence[int]]
"""The reference's tokens, by row."""


def forks_of(found: Agreement, answers: Answers, most: int) -> list[Fork]:
    """Return the forks of the first rows that differ from the reference."""
    return [_fork_of(difference, answers) for difference in found.differences[:most]]


def with_margins(found: Agreement, answers: Answers, margins: Mapping[Fork, float]) -> Agreement:
    """Put in the margins that are known."""
    differences = tuple(
        replace(each, margin=margins.get(_fork_of(each, answers))) for each in found.differences
    )
    return replace(found, differences=differences)


def _fork_of(found: Difference, answers: Answers) -> Fork:
    before = tuple(answers[found.row][: found.position])
    return Fork(found.row, before, found.token, found.other)
