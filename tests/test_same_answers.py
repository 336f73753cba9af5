"""The promise: batched answers are those of one row at a time, to the bit, on a real model."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from localbatch import LLM, Completion, Request, SamplingParams

ROWS = Path(__file__).parent.parent / "bench" / "workloads" / "short.jsonl"
TOKENS = 24

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    """64 real prompts of 20 to 80 tokens."""
    with ROWS.open(encoding="utf-8") as lines:
        return [json.loads(line)["prompt"] for line in lines]


@pytest.fixture(scope="module")
def llm(smollm2: Path) -> Iterator[LLM]:
    with LLM(str(smollm2), parallel=32) as llm:
        yield llm


@pytest.fixture(scope="module")
def greedy(llm: LLM, prompts: list[str]) -> list[tuple[int, ...]]:
    """Return the tokens of the greedy answers, 32 rows at a time."""
    return tokens_of(llm.generate(prompts, greedy_params(), raw=True))


def greedy_params() -> SamplingParams:
    return SamplingParams(max_tokens=TOKENS, ignore_eos=True)


def tokens_of(completions: list[Completion]) -> list[tuple[int, ...]]:
    assert [None] * len(completions) == [c.error for c in completions]
    return [c.token_ids for c in completions]


def test_batched_greedy_answers_are_those_of_llama_one_at_a_time(
    smollm2: Path, prompts: list[str], greedy: list[tuple[int, ...]]
) -> None:
    """All 64 rows, 32 at a time, give exactly the tokens of llama-cpp-python's `Llama`."""
    from llama_cpp import Llama

    llama = Llama(str(smollm2), n_ctx=512, verbose=False)
    alone = []
    for prompt in prompts:
        llama.reset()
        stream = llama.generate(llama.tokenize(prompt.encode()), temp=0.0)
        alone.append(tuple(next(stream) for _ in range(TOKENS)))
    llama.close()

    assert alone == greedy


def test_order_of_the_rows_does_not_matter(
    llm: LLM, prompts: list[str], greedy: list[tuple[int, ...]]
) -> None:
    """Shuffled rows get the answers they get in order."""
    order = list(range(len(prompts)))
    random.Random(5).shuffle(order)

    shuffled = tokens_of(llm.generate([prompts[i] for i in order], greedy_params(), raw=True))

    assert [greedy[i] for i in order] == shuffled


@pytest.mark.parametrize("parallel", [3, 13])
def test_size_of_the_batch_does_not_matter(
    smollm2: Path, prompts: list[str], greedy: list[tuple[int, ...]], parallel: int
) -> None:
    """Other batch sizes, on other numbers of threads, give the same answers."""
    some = prompts[:20]

    with LLM(str(smollm2), parallel=parallel, threads=1 + parallel % 2) as llm:
        answers = tokens_of(llm.generate(some, greedy_params(), raw=True))

    assert greedy[:20] == answers


def test_seeded_answers_are_those_of_one_at_a_time(smollm2: Path, prompts: list[str]) -> None:
    """Drawn answers depend on the seed and the row's id alone."""
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0.9, seed=11)
    requests = [
        Request(f"row-{i}", i, prompt=prompt, params=params) for i, prompt in enumerate(prompts)
    ][:16]

    answers = {}
    for parallel in (1, 16):
        with LLM(str(smollm2), parallel=parallel) as llm:
            done = [c for c in llm.run(requests) if isinstance(c, Completion)]
        answers[parallel] = tokens_of(sorted(done, key=lambda c: c.index))

    assert answers[1] == answers[16]
    assert len(set(answers[1])) == 16
