"""Real llama.cpp: rows in lanes, behind copied beginnings, get the bits they get by themselves."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from localbatch import LLM, Completion, Request, SamplingParams
from localbatch.data.config import EngineConfig
from localbatch.engine import lane as lane_module
from localbatch.engine.backend import Numerics
from localbatch.engine.engine import Engine, EngineStats
from localbatch.engine.llama import LlamaBackend
from localbatch.engine.sampling import sample
from localbatch.scheduler.plan import PlanRow
from tests import tiny_gguf

KINDS = sorted(tiny_gguf.FILE_TYPES)
LETTERS = "abcdefghijklmnopqrstuvwxyz"
CONTROLS = 2
"""The tiny models' tokenizer puts BOS and a space before a text; then each letter is a token."""
HEADS = {32: 5, 47: 4, 64: 5, 510: 2, 512 + 32: 5}
"""Tokens that rows have in common, and how many rows; of 47 they may share 44, of 510 504."""
OWN = [8, 9, 15, 23, 70]
MAX_TOKENS = 5


def letters(seed: int, count: int) -> str:
    picked = np.random.default_rng(seed).integers(0, len(LETTERS), count)
    return "".join(LETTERS[i] for i in picked)


def prompts() -> list[str]:
    """Return prompts behind each head, which part at once behind it; and one that is nested."""
    made = []
    for number, (head, rows) in enumerate(HEADS.items()):
        begin = LETTERS[number] + letters(head, head - CONTROLS - 1)
        made += [begin + LETTERS[i] + letters(head + i, OWN[i] - 1) for i in range(rows)]
        if head == 64:  # three rows share 36 more
            begin += "z" + letters(99, 35)
            made += [begin + LETTERS[i] + letters(head + 10 + i, OWN[i] - 1) for i in range(3)]
    return made


def requests(temperature: float) -> list[Request]:
    params = SamplingParams(
        max_tokens=MAX_TOKENS, ignore_eos=True, temperature=temperature, top_k=0, min_p=0, seed=7
    )
    return [Request(f"row-{i}", i, prompt=p, params=params) for i, p in enumerate(prompts())]


@dataclass
class Run:
    """What an engine answered, and the bits of the logits that each token was chosen from."""

    tokens: dict[int, tuple[int, ...]] = field(default_factory=dict)
    bits: dict[tuple[int, int], bytes] = field(default_factory=dict)
    stats: EngineStats = field(default_factory=EngineStats)


def run(model: Path, rows: Sequence[Request], patch: pytest.MonkeyPatch, **settings: Any) -> Run:
    """Compute rows in an engine of their own."""
    result = Run()

    def noting(plan_rows: Sequence[PlanRow], logits: npt.NDArray[np.float32]) -> list[int]:
        for plan_row, values in zip(plan_rows, logits, strict=True):
            s = plan_row.sequence
            result.bits[s.request.index, s.num_generated] = values.tobytes()
        return sample(plan_rows, logits)

    patch.setattr(lane_module, "sample", noting)
    backend = LlamaBackend(str(model))
    engine = Engine(backend, EngineConfig(str(model), **{"threads": 2, **settings}))
    assert engine.submit(rows) == []
    while engine.has_work:
        for event in engine.step():
            assert isinstance(event, Completion)
            assert event.error is None
            assert event.index not in result.tokens
            result.tokens[event.index] = event.token_ids
    result.stats = engine.stats
    engine.close()
    backend.close()
    return result


def differences(one: Run, other: Run) -> list[str]:
    """Return where the bits of the logits differ."""
    assert one.bits.keys() == other.bits.keys()
    return [
        f"row {i}, token {k}" for i, k in sorted(one.bits) if one.bits[i, k] != other.bits[i, k]
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 0.9], ids=["greedy", "drawn"])
def test_shared_answers_are_those_of_one_row_at_a_time(
    tiny_models: dict[str, Path], kind: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two lanes, five heads and one nested in another: all logits and tokens, bit by bit."""
    model, rows = tiny_models[kind], requests(temperature)
    alone = run(model, rows, monkeypatch, lanes=1, parallel=1, share_prefixes=False, threads=1)
    if alone.stats.numerics is Numerics.VARIES:
        pytest.skip("the probe found that bits vary with the batch")

    shared = run(model, rows, monkeypatch, lanes=2, parallel=10)

    assert differences(alone, shared) == []
    assert alone.tokens == shared.tokens
    assert [len(shared.tokens[i]) for i in range(len(rows))] == [MAX_TOKENS] * len(rows)
    # Own parts of 8, 9, 15, 23 and 70 tokens, and each head at most once in each lane.
    own = sum(sum(OWN[:n]) for n in HEADS.values()) + sum(OWN[:3])
    whole = sum(n * head for head, n in HEADS.items()) + 3 * (64 + 36) + own
    assert alone.stats.prompt_tokens == shared.stats.prompt_tokens == whole
    assert shared.stats.computed_prompt_tokens <= own + 4 * 3 + 2 * 6 + 2 * (sum(HEADS) + 36)
    assert shared.stats.lanes == 2


@pytest.mark.parametrize("kind", ["f16", "q4_0"])
@pytest.mark.parametrize("ubatch", [32, 100])
def test_small_chunks(
    tiny_models: dict[str, Path], kind: str, ubatch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads end within chunks and between them, and prompts go on over many."""
    model, rows = tiny_models[kind], requests(0.0)
    alone = run(model, rows, monkeypatch, lanes=1, parallel=1, share_prefixes=False, ubatch=ubatch)
    if alone.stats.numerics is Numerics.VARIES:
        pytest.skip("the probe found that bits vary with the batch")

    shared = run(model, rows, monkeypatch, lanes=2, parallel=6, ubatch=ubatch)

    assert differences(alone, shared) == []
    assert shared.stats.computed_prompt_tokens < alone.stats.computed_prompt_tokens


# The real model.

ROWS = Path(__file__).parent.parent / "bench" / "workloads" / "short.jsonl"
TOKENS = 12
HEAD = (
    "You are a careful librarian who answers letters from readers. Answer in plain words, in at "
    "most three sentences, and name the shelf where the reader will find more. The shelves are: A "
    "for animals and plants, B for buildings and bridges, C for cooking, D for the history of the "
    "town, E for everything else. If a reader asks for advice, say kindly that you are no doctor. "
    "Never promise that a book is there, since it may be lent. Here is the letter.\n\n"
)


@pytest.fixture(scope="module")
def letters_to_the_library() -> list[str]:
    with ROWS.open(encoding="utf-8") as lines:
        return [
            HEAD + json.loads(line)["prompt"] for line, _ in zip(lines, range(12), strict=False)
        ]


@pytest.fixture(scope="module")
def llm(smollm2: Path) -> Iterator[LLM]:
    with LLM(str(smollm2), lanes=2, threads=2) as llm:
        yield llm


@pytest.mark.model
def test_a_real_models_answers_are_those_of_llama_one_at_a_time(
    smollm2: Path, llm: LLM, letters_to_the_library: list[str]
) -> None:
    """12 rows behind a head of about 100 tokens: the exact tokens of llama-cpp-python's `Llama`."""
    from llama_cpp import Llama

    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    before = llm.stats
    shared = llm.generate(letters_to_the_library, params, raw=True)
    saved = llm.stats.prompt_tokens - llm.stats.computed_prompt_tokens

    llama = Llama(str(smollm2), n_ctx=1024, verbose=False)
    alone, heads = [], []
    for prompt in letters_to_the_library:
        llama.reset()
        tokens = llama.tokenize(prompt.encode())
        heads.append(tokens)
        stream = llama.generate(tokens, temp=0.0)
        alone.append(tuple(next(stream) for _ in range(TOKENS)))
    llama.close()

    assert [c.error for c in shared] == [None] * 12
    assert [c.token_ids for c in shared] == alone
    assert len(set(alone)) > 6
    head = next(i for i, column in enumerate(zip(*heads, strict=False)) if len(set(column)) > 1)
    assert head >= 96
    # Each lane computes it once; the other 10 rows don't, but for the last few tokens.
    assert saved - (before.prompt_tokens - before.computed_prompt_tokens) >= 10 * (head - 12)


@pytest.mark.model
def test_a_real_models_drawn_answers_do_not_depend_on_what_is_shared(
    smollm2: Path, llm: LLM, letters_to_the_library: list[str]
) -> None:
    """The same rows, seeded, one at a time in one lane."""
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0.9, seed=3)

    shared = llm.generate(letters_to_the_library[:4], params, raw=True)
    with LLM(str(smollm2), lanes=1, parallel=1, share_prefixes=False) as single:
        alone = single.generate(letters_to_the_library[:4], params, raw=True)

    assert [c.error for c in shared] == [None] * 4
    assert [c.token_ids for c in shared] == [c.token_ids for c in alone]
