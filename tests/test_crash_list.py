"""What llama.cpp answers with an abort, a segmentation fault or nonsense, as far as users reach it.

Each test gives what would do that to a program that passes it on. The process that is asked must
live, and say what is wrong; what no input can reach, because the engine makes the batches itself,
is held by the scheduler's and the backend's tests.
"""

from __future__ import annotations

import math
from pathlib import Path

import gguf
import pytest

from localbatch import LLM, Completion, FinishReason, SamplingParams
from localbatch.data.errors import ConfigError, LocalbatchError, ModelError
from localbatch.engine import client
from tests import tiny_gguf

pytestmark = pytest.mark.timeout(120)

SHORT = SamplingParams(max_tokens=2, ignore_eos=True)
LONG_PROMPT = "the of and to in " * 300


def answers(model: Path, prompts: list[str], params: SamplingParams, **sizes: int) -> list[str]:
    """Run raw prompts; returns each text or error. The worker must not have died."""
    with LLM(str(model), threads=1, **sizes) as llm:
        done = llm.generate(prompts, params, raw=True)
        assert llm.num_restarts == 0
    return [completion.error or completion.text for completion in done]


@pytest.mark.parametrize("token", [448, 10**6, 2**31 - 1, 2**31, 10**10])
def test_token_ids_outside_of_the_vocabulary(tiny_model: Path, token: int) -> None:
    """They would be an exception in C++, which nothing catches."""
    params = SamplingParams(max_tokens=2, logit_bias={token: 1.0})
    (error,) = answers(tiny_model, ["the"], params)
    assert error == f"logit_bias: token {token} is not in the vocabulary"


def test_a_text_that_gives_no_tokens(tiny_model: Path) -> None:
    """An empty batch is refused by llama_decode."""
    with LLM(str(tiny_model), threads=1) as llm:
        (done,) = llm.generate([""], SHORT, raw=True)
    assert done.error == "prompt: is empty"


@pytest.mark.parametrize("ubatch", [32, 128, 1024])
def test_more_tokens_than_a_batch_holds(tiny_model: Path, ubatch: int) -> None:
    """It is an abort; prompts are cut, and the answer is that of whole ones."""
    whole = answers(tiny_model, [LONG_PROMPT], SHORT, ctx=2048)
    assert whole == answers(tiny_model, [LONG_PROMPT], SHORT, ctx=2048, ubatch=ubatch)


@pytest.mark.parametrize("parallel", [256, 257, 1024])
def test_more_sequences_than_a_context_holds(tiny_model: Path, parallel: int) -> None:
    """256 are the most, and more of them than tokens in a batch are an abort."""
    prompts = [f"the {i}" for i in range(300)]
    done = answers(tiny_model, prompts, SHORT, parallel=parallel, ctx=64, ubatch=32)
    assert done == answers(tiny_model, prompts, SHORT, parallel=4, ctx=64)


def test_more_sequences_than_the_lanes_hold(tiny_model: Path) -> None:
    """It is a wrong setting, said before anything is made."""
    with pytest.raises(
        ConfigError, match="parallel: must be at most 256 for each lane, 512 for 2, not 513"
    ):
        LLM(str(tiny_model), lanes=2, parallel=513)


def test_all_tokens_banned(tiny_model: Path) -> None:
    """With no candidate left, llama.cpp's samplers abort."""
    params = SamplingParams(
        max_tokens=2, temperature=1.0, logit_bias=dict.fromkeys(range(448), -math.inf)
    )
    with LLM(str(tiny_model), threads=1) as llm:
        (done,) = llm.generate(["the"], params, raw=True)
        assert isinstance(done, Completion)
        assert done.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        assert llm.num_restarts == 0


def test_prefixes_copied_between_streams(tiny_model: Path) -> None:
    """A part of a stream can't be copied, it is an abort; all of it is, and the rest removed."""
    prompts = [LONG_PROMPT + f"word {i}" for i in range(6)]
    shared = answers(tiny_model, prompts, SHORT, ctx=2048, parallel=3)
    assert shared == [answers(tiny_model, [p], SHORT, ctx=2048)[0] for p in prompts]


def test_positions_beyond_the_training_context(tiny_model: Path) -> None:
    """A row ends where the context does, a longer prompt is refused."""
    params = SamplingParams(max_tokens=5000, ignore_eos=True)
    with LLM(str(tiny_model), threads=1, ctx=256) as llm:
        fits, too_long = llm.generate(["the of", LONG_PROMPT], params, raw=True)
    assert fits.finish_reason is FinishReason.LENGTH
    # The last token of an answer is never computed, so it needs no cell.
    assert fits.usage.prompt_tokens + fits.usage.completion_tokens == 256 + 1
    assert "more than the context of 256" in str(too_long.error)


def test_a_cache_larger_than_memory(tiny_model: Path) -> None:
    """llama.cpp fills it with zeros at once, and the kernel would end the process."""
    with LLM(str(tiny_model), threads=1, parallel=16384, ctx=2**20) as llm:
        params = SamplingParams(max_tokens=2**20 - 100)
        with pytest.raises(ConfigError, match=r"the KV cache would take .* MiB, but only"):
            llm.generate([f"the {i}" for i in range(16384)], params, raw=True)


def make_gguf(path: Path, architecture: str, *, tensors: bool = True) -> None:
    """Write a file with what any model has, and perhaps a tensor."""
    writer = gguf.GGUFWriter(str(path), architecture)
    tokens, scores, types = tiny_gguf.vocabulary(448)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_layer_norm_eps(1e-5)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    if tensors:
        import numpy as np

        writer.add_tensor("token_embd.weight", np.zeros((448, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("architecture", "tensors"),
    [("llama", False), ("llama", True), ("bert", True), ("t5", True), ("no-such", True)],
)
def test_files_that_are_no_text_generator(tmp_path: Path, architecture: str, tensors: bool) -> None:
    """A vocabulary alone, some of the tensors, an encoder, an unknown architecture."""
    path = tmp_path / "model.gguf"
    make_gguf(path, architecture, tensors=tensors)
    with pytest.raises(ModelError, match=r"model\.gguf") as caught:
        LLM(str(path), threads=1)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": ["a"] * 448},
        {"scores": [math.nan] * 448},
        {"types": [99] * 448},
        {"bos": 10**6},
        {"eos": 2**32 - 1},
        {"heads": 0},
        {"layers": 2**31},
    ],
)
def test_a_head_that_makes_no_sense(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, object]
) -> None:
    """Some of it is an assertion of llama.cpp's: the worker dies, the parent says so and lives."""
    tokens, scores, types = tiny_gguf.vocabulary(448)
    made = change.get("tokens", tokens), change.get("scores", scores), change.get("types", types)
    monkeypatch.setattr(tiny_gguf, "vocabulary", lambda size: made)
    write = gguf.GGUFWriter
    for name, method in [("bos", "add_bos_token_id"), ("eos", "add_eos_token_id"),
                         ("heads", "add_head_count"), ("layers", "add_block_count")]:  # fmt: skip
        if name in change:
            original = getattr(write, method)
            monkeypatch.setattr(
                write, method, lambda self, _, f=original, v=change[name]: f(self, v)
            )
    path = tmp_path / "model.gguf"
    tiny_gguf.write(path)
    monkeypatch.setattr(client, "HANG_S", 20.0)
    error = ""
    try:
        with LLM(str(path), threads=1) as llm:
            llm.generate(["the"], SHORT, raw=True)
    except LocalbatchError as caught:
        error = str(caught)
    assert "\n" not in error


def test_models_are_freed_in_any_order(tiny_model: Path) -> None:
    """Contexts before models, whatever the caller closes first, and twice."""
    first, second = LLM(str(tiny_model), threads=1), LLM(str(tiny_model), threads=1)
    texts = [c.text for c in first.generate(["the"], SHORT, raw=True)]
    first.close()
    assert [c.text for c in second.generate(["the"], SHORT, raw=True)] == texts
    first.close()
    second.close()
