"""Tokens to text on real vocabularies, against llama.cpp's own detokenization of the whole.

SentencePiece (a small one), BPE (SmolLM2) and SentencePiece with 262,144 tokens (Gemma 3).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_cpp import llama_cpp as lib

from localbatch import Completion, Request, SamplingParams
from localbatch.data.config import EngineConfig
from localbatch.engine.backend import Numerics
from localbatch.engine.binding import Model
from localbatch.engine.engine import Engine
from localbatch.engine.llama import LlamaBackend
from localbatch.engine.text import TextStream
from tests.test_engine import finish
from tests.test_text import expected_text

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    " one  two   three\n\n\tfour ",
    "Straße, naïve café, Ελλάδα, Привет, עברית, हिन्दी, 日本語の文章, 한국어",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🎉🦤 \U0001fae9\U0001f9ff",
    "x = {'a': [1, 2]}  # done\r\n",
    "\u2581\u0120 \ufeff\ufffd\u200b",
]


@dataclass(frozen=True)
class Vocabulary:
    """A model's vocabulary, without its weights."""

    model: Model
    has_prefix_space: bool
    is_sentencepiece: bool

    @functools.cached_property
    def pieces(self) -> list[bytes]:
        return [self.model.token_bytes(token) for token in range(self.model.num_vocab)]

    @functools.cached_property
    def byte_tokens(self) -> dict[bytes, int]:
        return {piece: token for token, piece in enumerate(self.pieces) if len(piece) == 1}

    def tokenize(self, text: str) -> list[int]:
        return self.model.tokenize(text.encode(), add_special=False, parse_special=False)

    def detokenize(self, tokens: list[int]) -> bytes:
        """Return llama.cpp's text of the whole, put behind a letter.

        At the very beginning it takes off the space that SentencePiece puts before a text.
        """
        tokens = [self.byte_tokens[b"a"], *tokens]
        array = (lib.llama_token * len(tokens))(*tokens)
        buffer = bytes(1 << 16)
        size = lib.llama_detokenize(
            self.model.vocab, array, len(tokens), buffer, len(buffer), False, False
        )
        assert size > 0
        assert buffer[:1] == b"a"
        return buffer[1:size]

    def random_tokens(self, rng: np.random.Generator) -> list[int]:
        """Return any tokens, and ever again bytes, whole characters and texts cut anywhere."""
        tokens: list[int] = []
        for kind in rng.integers(0, 4, rng.integers(1, 12)):
            text = TEXTS[rng.integers(len(TEXTS))]
            if kind == 0:
                tokens += rng.integers(0, self.model.num_vocab, 4).tolist()
            elif kind == 1:
                tokens += rng.choice([*self.byte_tokens.values()], 3).tolist()
            elif kind == 2:
                character = text[rng.integers(len(text))].encode()
                tokens += [self.byte_tokens[bytes([b])] for b in character]
            else:
                whole = self.tokenize(text)
                tokens += whole[rng.integers(len(whole)) :][:6]
        return tokens


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("tiny_model", True, True), id="spm"),
        pytest.param(("smollm2", False, False), id="bpe", marks=pytest.mark.model),
        pytest.param(("gemma", False, True), id="gemma", marks=pytest.mark.gemma),
    ],
)
def vocabulary(request: pytest.FixtureRequest) -> Iterator[Vocabulary]:
    name, has_prefix_space, is_sentencepiece = request.param
    path = request.getfixturevalue(name)
    model = Model(str(path), metadata_only=True)
    yield Vocabulary(model, has_prefix_space, is_sentencepiece)
    model.close()


def streamed(vocabulary: Vocabulary, tokens: list[int], stop: tuple[str, ...] = ()) -> list[str]:
    """Return the pieces of a text; at the end what was held back."""
    stream = TextStream(vocabulary.model.token_bytes, stop)
    taken = []
    for token in tokens:
        stream.push(token)
        taken.append(stream.take())
        if stream.stopped:
            break
    whole = stream.finish()
    taken.append(stream.take())
    assert "".join(taken) == whole
    return taken


def test_random_tokens_give_the_text_of_the_whole(vocabulary: Vocabulary) -> None:
    """No character is lost, doubled or torn, whatever the tokens are."""
    for seed in range(300):
        tokens = vocabulary.random_tokens(np.random.default_rng(seed))
        expected = vocabulary.detokenize(tokens).decode("utf-8", "replace")

        assert "".join(streamed(vocabulary, tokens)) == expected, tokens


def test_a_tokenized_text_comes_back(vocabulary: Vocabulary) -> None:
    """Also its spaces; a vocabulary that puts a space first gives that one too.

    SentencePiece writes a space as U+2581 and can't tell the two apart.
    """
    for text in TEXTS:
        if vocabulary.is_sentencepiece:
            text = text.replace("\u2581", " ")
        space = " " if vocabulary.has_prefix_space else ""
        assert "".join(streamed(vocabulary, vocabulary.tokenize(text))) == space + text


def test_stop_strings_over_token_borders_are_cut_exactly(vocabulary: Vocabulary) -> None:
    """The text ends before the first token's worth that holds a stop string, to the character."""
    stopped = 0
    for seed in range(300):
        rng = np.random.default_rng(seed)
        tokens = vocabulary.random_tokens(rng)
        pieces = [vocabulary.pieces[token] for token in tokens]
        whole = b"".join(pieces).decode(errors="ignore")
        if b"".join(pieces) != whole.encode() or len(whole) < 4:
            continue
        at = int(rng.integers(len(whole) - 2))
        stops = [whole[at : at + int(rng.integers(1, 9))], whole[-3:] + "x"]
        stopped += 1

        assert "".join(streamed(vocabulary, tokens, tuple(stops))) == expected_text(pieces, stops)
    assert stopped > 10


def test_an_emoji_over_four_tokens_comes_whole(vocabulary: Vocabulary) -> None:
    """Nothing is shown until its fourth byte is there."""
    emoji = "\N{PARTY POPPER}"
    tokens = [vocabulary.byte_tokens[bytes([byte])] for byte in emoji.encode()]

    assert streamed(vocabulary, [*tokens, *tokens]) == ["", "", "", emoji] * 2 + [""]
    assert streamed(vocabulary, tokens[:3])[-1] == "\ufffd"


@pytest.mark.gemma
class TestGemma:
    """A model with attention in sliding windows of 512 tokens, through the whole engine."""

    def test_batched_answers_are_those_of_one_row_at_a_time(self, gemma: Path) -> None:
        """To the token and the logprob where the run says so, beyond the window and shared too."""
        prompts = ["The capital of France is", "def fib(n):", "1, 2, 3, 4,"]
        prompts += ["word " * 560 + f"number {i} is" for i in range(2)]
        batched = _answers(gemma, prompts)
        alone = [_answers(gemma, [prompt])[0] for prompt in prompts]

        assert [c.token_ids for c in batched] == [c.token_ids for c in alone]
        assert [c.logprobs for c in batched] == [c.logprobs for c in alone]
        assert batched[2].text.startswith(" 5, 6")


def _answers(path: Path, prompts: list[str], **settings: Any) -> list[Completion]:
    params = SamplingParams(max_tokens=8, logprobs=True, top_logprobs=2)
    backend = LlamaBackend(str(path))
    engine = Engine(backend, EngineConfig(str(path), lanes=1, **settings))
    rows = [Request(i, i, prompt=prompt, params=params) for i, prompt in enumerate(prompts)]
    try:
        done = finish(engine, rows)
        if engine.stats.numerics is Numerics.VARIES:
            pytest.skip("on this machine answers vary with the batch")
    finally:
        engine.close()
        backend.close()
    return [done[i] for i in range(len(prompts))]
