"""Put the workloads together from the texts in `texts/`.

    python bench/workloads/make.py [--seed 0] [--check]

Writes classify.jsonl, mixed.jsonl and summarize.jsonl; the same seed gives the same files. With
--check nothing is written: the exit code is 1 if a file differs from what would be. No tokenizer
is needed: tokens are estimated from words and punctuation marks.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import sys
from collections import Counter
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

HERE = Path(__file__).parent
TEXTS = HERE / "texts"
CLASSIFY_OUT, SUMMARIZE_OUT = 4, 96
SHORTEST_PASSAGE = 60  # estimated tokens kept back for each later passage of the same document
TOKENS_PER_MARK = 1.075  # tokens of SmolLM2 for each word or punctuation mark of these texts

_MARK = re.compile(r"\w+(?:'\w+)?|[^\w\s]")
# A sentence or a heading, with the space after it; the very short ones stay with their successor.
# A number before the full stop is an item's.
_SENTENCE = re.compile(r'.{12,}?(?:(?<!\d)[.!?]"?(?=\s+["A-Z0-9])|(?=\n\n)|\Z)\s*', re.DOTALL)


class Lengths(NamedTuple):
    """A log-normal distribution of lengths in tokens, cut off at both ends."""

    median: float
    sigma: float
    low: int
    high: int

    def draw(self, rng: random.Random, count: int) -> list[int]:
        """Draw a length from each of `count` equally likely slices, in random order.

        So every seed has its short and its long rows, the longest in the last slice.
        """
        shares = [max((slice_ + rng.random()) / count, 1e-9) for slice_ in range(count)]
        rng.shuffle(shares)
        normal = NormalDist()
        lengths = (self.median * math.exp(self.sigma * normal.inv_cdf(share)) for share in shares)
        return [min(max(round(length), self.low), self.high) for length in lengths]


class Task(NamedTuple):
    """What to do with a passage of a document, and the words that lead to the answer."""

    document: str
    cue: str
    line: str


PASSAGE_ROWS = Lengths(median=150, sigma=0.75, low=45, high=460)  # prompts of mixed, estimated
MIXED_OUT = Lengths(median=50, sigma=1.2, low=8, high=512)

Row = dict[str, str | int]


def main() -> None:
    """Write the files, or check them."""
    parser = argparse.ArgumentParser(description="Put the workloads together from texts/.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", action="store_true", help="only compare; exit 1 if they differ")
    options = parser.parse_args()
    files = build(options.seed)
    if options.check:
        wrong = [name for name, content in files.items() if read(HERE / name) != content]
        for name in wrong:
            print(f"{name} is not what make.py --seed {options.seed} gives")
        sys.exit(1 if wrong else 0)
    for name, content in files.items():
        (HERE / name).write_text(content, encoding="utf-8", newline="\n")


def build(seed: int) -> dict[str, str]:
    """Return the content of each file by its name. Each has a generator of its own."""
    makers = {"classify": classify, "mixed": mixed, "summarize": summarize}
    return {
        f"{name}.jsonl": lines(name, maker(random.Random(f"{name} {seed}")))
        for name, maker in makers.items()
    }


def classify(rng: random.Random) -> list[Row]:
    """Return the messages in random order, each behind the same worked examples."""
    head = read(TEXTS / "head.txt").strip()
    messages = read(TEXTS / "messages.txt").splitlines()
    rng.shuffle(messages)
    return [
        {"prompt": f"{head}\n\nMessage: {message}\nLabel:", "max_tokens": CLASSIFY_OUT}
        for message in messages
    ]


def summarize(rng: random.Random) -> list[Row]:
    """Return the documents in random order, each behind the same instruction."""
    instruction = read(TEXTS / "instruction.txt").strip()
    texts = list(documents().values())
    rng.shuffle(texts)
    return [
        {"prompt": f"{instruction}\n\n{text}\n\nSummary:", "max_tokens": SUMMARIZE_OUT}
        for text in texts
    ]


def mixed(rng: random.Random) -> list[Row]:
    """Return the whole prompts and the tasks with their passages in random order."""
    prompts = [prompt.strip() for prompt in read(TEXTS / "prompts.txt").split("\n---\n")]
    prompts += passage_prompts(tasks(), rng)
    rng.shuffle(prompts)
    outs = MIXED_OUT.draw(rng, len(prompts))
    return [
        {"prompt": prompt, "max_tokens": out} for prompt, out in zip(prompts, outs, strict=True)
    ]


def passage_prompts(todo: list[Task], rng: random.Random) -> list[str]:
    """Put a passage behind each task; a document's follow one another and do not overlap."""
    rest = {name: _SENTENCE.findall(text) for name, text in documents().items()}
    still = Counter(task.document for task in todo)
    prompts = []
    for task, length in zip(todo, PASSAGE_ROWS.draw(rng, len(todo)), strict=True):
        still[task.document] -= 1
        sentences = rest[task.document]
        room = estimate("".join(sentences)) - SHORTEST_PASSAGE * still[task.document]
        taken = near(sentences, min(length - estimate(task.line + task.cue), room))
        passage = "".join(sentences[:taken]).strip()
        rest[task.document] = paragraph(sentences[taken:], SHORTEST_PASSAGE * still[task.document])
        prompts.append("\n\n".join(part for part in (task.line, passage, task.cue) if part))
    return prompts


def near(sentences: list[str], tokens: float) -> int:
    """Return how many sentences, at least one, come nearest to a number of tokens."""
    best, total, least = 1, 0.0, math.inf
    for number, sentence in enumerate(sentences, 1):
        total += estimate(sentence)
        if abs(total - tokens) < least:
            best, least = number, abs(total - tokens)
    return best


def paragraph(sentences: list[str], tokens: float) -> list[str]:
    """Skip to the next paragraph, unless fewer than so many tokens would be left."""
    for number, sentence in enumerate(sentences, 1):
        if sentence.endswith("\n\n"):
            left = sentences[number:]
            return left if estimate("".join(left)) >= tokens else sentences
    return sentences


def estimate(text: str) -> float:
    """Estimate the number of tokens without a tokenizer."""
    return TOKENS_PER_MARK * len(_MARK.findall(text))


def tasks() -> list[Task]:
    """Read the tasks: one a line, `document | cue | task`."""
    rows = (line.split("|", 2) for line in read(TEXTS / "tasks.txt").splitlines())
    return [Task(*(field.strip() for field in row)) for row in rows]


def documents() -> dict[str, str]:
    """Return the documents by their names, in the order of the names."""
    paths = sorted((TEXTS / "documents").glob("*.txt"))
    return {path.stem: read(path).strip() for path in paths}


def lines(name: str, rows: list[Row]) -> str:
    """Write the rows as JSON lines, with their ids in front."""
    width = len(str(len(rows)))
    numbered = ({"id": f"{name}-{number:0{width}}", **row} for number, row in enumerate(rows, 1))
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in numbered)


def read(path: Path) -> str:
    """Read a text, or nothing if there is no such file."""
    return path.read_text(encoding="utf-8") if path.exists() else ""


if __name__ == "__main__":
    main()
