"""Tables for tests: 3,000 reviews in three scripts, and what Python's csv makes of bytes."""

from __future__ import annotations

import csv
import io
import random
from typing import Any

WORDS = {
    "latin": ["great", "it broke,", 'he said "no"', "naïve", "ça va;", "a|b", "=1+1", "'quoted'"],
    "cyrillic": ["хорошо,", "«плохо»", "нет\tно", 'он: "да"', "цена\nвысокая"],
    "cjk": ["很好", "質量,一般", "「最高」", "壊れた\r\nすぐに", '"五つ星"'],
}


def reviews(number: int = 3000, seed: int = 7) -> list[list[str]]:
    """Return a header and rows of product reviews that need every kind of quoting."""
    draw = random.Random(seed)
    rows = [["id", "product, full name", "text", "stars", "temperature"]]
    for i in range(number):
        words = WORDS[draw.choice(list(WORDS))]
        text = draw.choice([" ", "\n", ", "]).join(draw.choices(words, k=draw.randint(1, 6)))
        rows.append([f"r{i}", f'{draw.randint(5, 60)}" TV', text, str(draw.randint(1, 5)), "hot"])
    return rows


def csv_bytes(rows: list[list[str]], *, bom: bool = False, **dialect: Any) -> bytes:
    """Return a CSV file as Python's csv writes it."""
    buffer = io.StringIO(newline="")
    csv.writer(buffer, **dialect).writerows(rows)
    return buffer.getvalue().encode("utf-8-sig" if bom else "utf-8")


def csv_cells(data: bytes, **dialect: Any) -> list[list[str]]:
    """Return the cells that Python's csv finds."""
    return list(csv.reader(io.StringIO(data.decode("utf-8-sig"), newline=""), **dialect))
