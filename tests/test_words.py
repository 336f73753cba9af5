"""Words of texts with and without blanks, and the checks of summaries that count them."""

from __future__ import annotations

import random

import pytest

from localbatch.summaries.checks import copies, numbers_in, repeats_itself, unknown_numbers
from localbatch.summaries.words import count_words, units

THAI = [
    "สะพาน",
    "จะ",
    "ปิด",
    "ใน",
    "วัน",
    "จันทร์",
    "และ",
    "การ",
    "ซ่อม",
    "จะ",
    "ใช้",
    "เวลา",
    "หก",
    "เดือน",
]
"""The bridge will be closed on Monday, and the repair will take six months."""


class TestWords:
    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("", 0),
            ("The bridge is closed - see p. 3!\n", 8),
            ("다리는 월요일에 폐쇄됩니다.", 3),
            ("橋は月曜日に閉鎖された。", 11),
            ("大桥于周一关闭、维修需要六个月。", 14),
            ("ｶﾀｶﾅと「PDF」を2024年に", 10),
            ("東京 Tokyo is a city", 6),
        ],
    )
    def test_counted_by_hand(self, text: str, words: int) -> None:
        """Blanks part words; a Chinese or Japanese character is one, and punctuation is none."""
        assert count_words(text) == words

    def test_thai(self) -> None:
        """Near to the number of words; signs above and below a letter are part of it."""
        assert abs(count_words("".join(THAI)) - len(THAI)) <= 2
        assert units("ซ่อม") == ["ซ่", "อ", "ม"]

    def test_texts_with_blanks_are_counted_by_them(self) -> None:
        """Whatever letters and punctuation they have."""
        for text in ("Größe: 5 m², ok?", "мост — закрыт", "جسر مغلق", "a\u00a0b"):
            assert units(text) == text.split()


class TestChecks:
    def chinese(self, number: int, seed: int = 0) -> str:
        return "".join(
            chr(random.Random(seed + i).randrange(0x4E00, 0x9000)) for i in range(number)
        )

    def test_repetition(self) -> None:
        """The same sentence again and again, without a blank in it."""
        assert repeats_itself("大桥于周一关闭、维修需要六个月。" * 4)
        assert repeats_itself("".join(THAI) * 4)
        assert not repeats_itself(self.chinese(60))
        assert not repeats_itself("".join(THAI))

    def test_copies(self) -> None:
        """A run of the source's characters, not those characters in another order."""
        source = self.chinese(400)
        assert copies(source[50:120], source)
        assert not copies("".join(random.Random(1).sample(source, 70)), source)

    def test_wide_digits(self) -> None:
        """Are the same numbers."""
        assert unknown_numbers("12 and 13", numbers_in("１２人")) == ["13"]
