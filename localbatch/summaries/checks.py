"""What may be wrong with a summary, found without a model."""

from __future__ import annotations

import re
import unicodedata

from localbatch.summaries.words import count_words, units

_NUMBER = re.compile(r"\d+(?:[.,:]\d+)*")
_MARKS = re.compile(r"^[\W_]+|[\W_]+$")
_COPIED_SHARE = 0.8
_LEAST_WORDS = 12
_PHRASE = 6
_REPEATED_SHARE = 0.3


def numbers_in(text: str) -> set[str]:
    """Return the numbers in a text, without what groups their digits or ends a sentence."""
    return {_plain(found) for found in _NUMBER.findall(text)}


def unknown_numbers(summary: str, known: set[str]) -> list[str]:
    """Return the numbers of a summary that its source does not have, as they are written."""
    digits = re.compile(r"(?m)^\s*\d+[.)]\s")  # of a numbered list, they are no claim
    found = _NUMBER.findall(digits.sub(" ", summary))
    return list(dict.fromkeys(n for n in found if _plain(n) not in known))


def repeats_itself(text: str) -> bool:
    """Return whether a large share of a text's phrases came before in it."""
    found, number = units(text.lower()), count_words(text)
    if number < _LEAST_WORDS:
        return False
    size = _PHRASE * len(found) // number
    phrases = [tuple(found[i : i + size]) for i in range(len(found) - size + 1)]
    return 1 - len(set(phrases)) / len(phrases) > _REPEATED_SHARE


def copies(summary: str, source: str) -> bool:
    """Return whether nearly all words of a summary stand in phrases that its source has, too.

    In whichever order the phrases come. This is the coverage by extractive fragments of Grusky et
    al. (2018), https://arxiv.org/abs/1804.11283, of fragments that are no mere names or terms.
    """
    found = _bare_units(summary)
    number = count_words(" ".join(found))
    if number < _LEAST_WORDS or number > 0.8 * count_words(source):
        return False
    whole = f" {' '.join(_bare_units(source))} "
    size = max(1, _PHRASE * len(found) // number)
    covered = [False] * len(found)
    for start in range(len(found) - size + 1):
        if f" {' '.join(found[start : start + size])} " in whole:
            covered[start : start + size] = [True] * size
    return sum(covered) >= _COPIED_SHARE * len(found)


def warnings_of(summary: str, source: str, *, is_cut: bool) -> list[str]:
    """Return what is suspicious about a summary of a source, in a few words each."""
    if not summary.strip():
        return ["is empty"]
    found = []
    if is_cut:
        found.append("ends at the token limit")
    if repeats_itself(summary):
        found.append("repeats itself")
    if copies(summary, source):
        found.append("copies its source")
    return found


def _bare_units(text: str) -> list[str]:
    """Return the words of a text in one form of writing them, without marks around them."""
    text = unicodedata.normalize("NFKC", text.replace("\N{SOFT HYPHEN}", "")).lower()
    return [bare for unit in units(text) if (bare := _MARKS.sub("", unit))]


def _plain(number: str) -> str:
    """Return 1,234,567.50 as 1234567.50, so that it is found however it is grouped or wide."""
    return re.sub(r",(?=\d{3}(?!\d))", "", unicodedata.normalize("NFKC", number))
