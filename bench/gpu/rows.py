"""Writes the rows: random letters, each of them one token in the models of `models.py`.

python bench/gpu/rows.py FILE.jsonl --rows 512 --prompt 128 --out 128
python bench/gpu/rows.py FILE.jsonl --rows 512 --prompt 128 --out 8-512
python bench/gpu/rows.py FILE.jsonl --rows 512 --prompt 512 --alike 448 --out 64
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from string import ascii_letters

IN_FRONT = 2
"""Tokens that the tokenizer puts before the letters: BOS, and a space."""


def main() -> None:
    """Write one file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=128, help="tokens in")
    parser.add_argument("--alike", type=int, default=0, help="letters that all rows begin with")
    parser.add_argument("--out", default="128", help="tokens out, or the least and the most")
    args = parser.parse_args()
    least, _, most = args.out.partition("-")
    draw = random.Random(args.file.stem)
    own = args.prompt - IN_FRONT - args.alike
    if own < 1:
        parser.error(f"--alike {args.alike} leaves no letter of --prompt {args.prompt} to a row")
    alike = "".join(draw.choices(ascii_letters, k=args.alike))
    with args.file.open("w", encoding="utf-8") as file:
        for number in range(args.rows):
            prompt = alike + "".join(draw.choices(ascii_letters, k=own))
            tokens = draw.randint(int(least), int(most or least))
            row = {"id": f"{number:04}", "prompt": prompt, "max_tokens": tokens}
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
