"""Token ids of raw prompts, by the model's own tokenizer.

This runs as a script in a process of its own, so that the tokenizer's copy of the model is not in
the memory that is measured, and llama-cpp-python's library not beside another one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence


def tokenize(model: str, prompts: Sequence[str]) -> list[list[int]]:
    """Return the ids of each prompt, with the tokens that the model wants in front."""
    done = subprocess.run(
        [sys.executable, __file__, model],
        input=json.dumps(list(prompts)), stdout=subprocess.PIPE, check=True, text=True,
    )  # fmt: skip
    ids: list[list[int]] = json.loads(done.stdout.splitlines()[-1])
    return ids


def main() -> None:
    """Read a list of prompts from standard input, and write their ids."""
    from llama_cpp import Llama

    llama = Llama(sys.argv[1], vocab_only=True, verbose=False)
    ids = [
        llama.tokenize(prompt.encode(), add_bos=True, special=False)
        for prompt in json.load(sys.stdin)
    ]
    print(json.dumps(ids))


if __name__ == "__main__":
    main()
