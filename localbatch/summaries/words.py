"""Counts the words of a text, also where a script has no blanks between them."""

from __future__ import annotations

import re

_CHARACTERS = "\u2e80-\u2fdf\u3005-\u3007\u3021-\u3029\u3041-\u3096\u30a1-\u30ff\u3105-\u312f"
_CHARACTERS += "\u31a0-\u31bf\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9f"
_CHARACTERS += "\U00020000-\U0003ffff"
"""Chinese characters, Japanese kana, bopomofo. Korean has blanks."""

_LETTERS = "\u0e01-\u0e30\u0e32\u0e33\u0e40-\u0e46"  # Thai
_LETTERS += "\u0e81-\u0eb0\u0eb2\u0eb3\u0ebd-\u0ec6"  # Lao
_LETTERS += "\u1000-\u102a\u103f\u1050-\u1055"  # Burmese
_LETTERS += "\u1780-\u17b3"  # Khmer
_SIGNS = "\u0e31\u0e34-\u0e3a\u0e47-\u0e4e\u0eb1\u0eb4-\u0ebc\u0ec8-\u0ece"
_SIGNS += "\u102b-\u103e\u1056-\u1059\u17b4-\u17d3"
"""Of vowels and tones, above, below or beside a letter."""

_STOPS = (
    "\u3000-\u3004\u3008-\u3020\u3030-\u303f\uff01-\uff0f\uff1a-\uff20\uff3b-\uff40\uff5b-\uff65"
)
"""Punctuation of those scripts, which parts words as blanks do."""

_WITHOUT_BLANKS = re.compile(f"[{_CHARACTERS}{_LETTERS}]")
_UNIT = re.compile(
    f"[{_CHARACTERS}]|[{_LETTERS}][{_SIGNS}]*|[^\\s{_CHARACTERS}{_LETTERS}{_STOPS}]+"
)
_LETTER = re.compile(f"[{_LETTERS}]")
_LETTERS_OF_A_WORD = 3


def units(text: str) -> list[str]:
    """Return what is between blanks; of scripts without blanks each character or letter."""
    if _WITHOUT_BLANKS.search(text) is None:
        return text.split()
    return _UNIT.findall(text)


def count_words(text: str) -> int:
    """Return the words of a text.

    A Chinese or Japanese character is a word, as in word processors; so are three letters of Thai,
    Lao, Khmer and Burmese, whose words can't be told apart without a dictionary.
    """
    found = units(text)
    letters = sum(_LETTER.match(unit) is not None for unit in found)
    return len(found) - letters + -(-letters // _LETTERS_OF_A_WORD)
