"""What users of other batch runners complain of, each as a test that fails if it happens here.

In other files: tokens that differ from the reference tokenizer's (`test_prompt.py`, complaints
llama.cpp #23840, #7049), reasoning that is not split off or eats the answer (`test_reasoning.py`,
vLLM #17292), logprobs that need the memory of a whole job (`test_logprobs.py`, vLLM #5907).
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from click.testing import CliRunner

from localbatch import LLM, Completion, Request, SamplingParams
from localbatch.cli.main import main

FAKE = ["--backend", "fake", "--threads", "1", "-q"]


def run(llm: LLM, rows: list[Request]) -> dict[object, Completion]:
    return {c.id: c for c in llm.run(rows) if isinstance(c, Completion)}


def rows(count: int, **params: object) -> list[Request]:
    return [
        Request(f"row-{i}", i, prompt=f"the of {i}", params=SamplingParams(seed=i, **params))  # type: ignore[arg-type]
        for i in range(count)
    ]


@pytest.mark.parametrize("template", ["{{ bos_token }}", "", "{{ bos_token }}{{ bos_token }}"])
def test_there_is_one_bos_whatever_the_template_writes(tiny_model: Path, template: str) -> None:
    """Of llama-cpp-python #1501: the template's and the tokenizer's, or none."""
    row = Request("a", 0, messages=[{"role": "user", "content": "the"}])
    source = template + "{{ messages[0].content }}"
    with LLM(str(tiny_model), threads=1, chat_template=source) as llm:
        (seen,) = llm.preview([row], whole=True)
    assert [text for _, text in seen.pieces] == ["<s>", *" the"]


def test_seeded_rows_are_batched_and_reproducible(tiny_model: Path) -> None:
    """Of mlx-lm server.py, ollama #586: a shared generator, or seeded rows one at a time."""
    asked = rows(12, max_tokens=10, temperature=1.0, ignore_eos=True)
    with LLM(str(tiny_model), threads=1, parallel=1) as llm:
        alone = {row_id: c.token_ids for row_id, c in run(llm, asked).items()}
        steps_alone = llm.stats.steps
    shuffled = [*asked]
    random.Random(1).shuffle(shuffled)
    with LLM(str(tiny_model), threads=1, lanes=1, parallel=12) as llm:
        batched = {row_id: c.token_ids for row_id, c in run(llm, shuffled).items()}
        steps = llm.stats.steps
    assert batched == alone
    assert len(set(alone.values())) == 12
    assert steps * 4 < steps_alone


def test_one_prompt_that_is_too_long_costs_only_itself() -> None:
    """Of vLLM #16732, ray #59194: it ends the batch, or rows come twice."""
    asked = rows(9, max_tokens=3)
    asked[4] = Request("row-4", 4, prompt="x" * 5000)
    with LLM("fake", backend="fake", ctx=256) as llm:
        done = [c for c in llm.run(asked) if isinstance(c, Completion)]
    assert sorted(c.index for c in done) == list(range(9))
    assert [c.id for c in done if c.failed] == ["row-4"]


def test_answers_stand_under_their_own_id_in_the_order_of_the_input(tmp_path: Path) -> None:
    """Of google python-genai #1909, tidyllm #37: out of order, or under another's key."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lengths = [40, 1, 30, 2, 20, 3, 10, 4]
    source.write_text(
        "".join(
            json.dumps({"id": f"id-{i}", "prompt": f"p{i}", "max_tokens": n, "ignore_eos": True})
            + "\n"
            for i, n in enumerate(lengths)
        )
    )
    result = CliRunner().invoke(main, ["run", "fake", str(source), "-o", str(output), *FAKE])
    assert result.exit_code == 0
    found = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["id"] for row in found] == [f"id-{i}" for i in range(8)]
    assert [row["usage"]["completion_tokens"] for row in found] == lengths


def test_an_id_that_comes_twice_is_refused_before_anything_runs(tmp_path: Path) -> None:
    """Of sglang #1415, #4026: it hangs, or answers are another row's."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    request = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    source.write_text((json.dumps(request) + "\n") * 2)
    result = CliRunner().invoke(main, ["run", "fake", str(source), "-o", str(output), *FAKE])
    assert result.exit_code == 2
    assert f"{source}:2: " in result.stderr
    assert "duplicate_custom_id" in result.stderr
    assert not output.exists()


def test_penalties_of_a_row_touch_no_other(tiny_model: Path) -> None:
    """Of outlines #757, #650: a processor's state is shared by the batch."""
    plain = rows(4, max_tokens=12, ignore_eos=True)
    strict = SamplingParams(
        max_tokens=12, ignore_eos=True, repeat_penalty=5.0, logit_bias={300: -100.0}
    )
    others = [Request(f"other-{i}", 4 + i, prompt=f"the of {i}", params=strict) for i in range(4)]
    with LLM(str(tiny_model), threads=1, parallel=8) as llm:
        alone = {**run(llm, plain), **run(llm, others)}
        mixed = [row for pair in zip(plain, others, strict=True) for row in pair]
        together = run(llm, mixed)
    assert {i: c.token_ids for i, c in together.items()} == {
        i: c.token_ids for i, c in alone.items()
    }
    assert any(together[f"row-{i}"].token_ids != together[f"other-{i}"].token_ids for i in range(4))
