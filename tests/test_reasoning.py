"""Reasoning split off from answers; the expected values are worked out by hand or by one regex."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from localbatch import Completion, FinishReason, Request, SamplingParams, TextPiece, Usage
from localbatch.cli import main
from localbatch.data.config import EngineConfig
from localbatch.data.errors import DecodeError
from localbatch.engine import fake
from localbatch.engine.backend import Sample
from localbatch.engine.engine import Engine
from localbatch.engine.fake import EOS, FIRST_BYTE, NUM_VOCAB, FakeBackend
from localbatch.engine.reasoning import Splitter, Tags, tags_of
from localbatch.jobs.job import JobResult
from localbatch.jobs.progress import reasoning_line
from localbatch.scheduler.plan import StepPlan
from tests import tiny_gguf
from tests.test_engine import finish

THINK = Tags("<think>", "</think>")
KNOWS = "{% for m in messages %}{{ m.content }}{% endfor %}{# <think></think> #}#"
OPENS = "{% for m in messages %}{{ m.content }}{% endfor %}%<think>\n\n"


def backend_of(template: str | None) -> FakeBackend:
    backend = FakeBackend()
    backend.card = replace(backend.card, chat_template=template)
    return backend


def say(patch: pytest.MonkeyPatch, script: str) -> None:
    """Make the fake model answer with a script's bytes, then end, behind a prompt as below.

    A closing tag that comes too early is answered with "So." and the end.
    """
    wanted = script.encode()

    def logits(tokens: list[int]) -> np.ndarray[Any, Any]:
        text = bytes(max(t - FIRST_BYTE, 0) for t in tokens)
        said = re.split(rb"#|%<think>\n", text)[-1]
        plan = wanted
        if not wanted.startswith(said):
            plan = said.partition(b"</think>\n\n")[0] + b"</think>\n\nSo."
        found = np.zeros(NUM_VOCAB, np.float32)
        found[FIRST_BYTE + plan[len(said)] if len(said) < len(plan) else EOS] = 9
        return found

    patch.setattr(fake, "_logits", logits)


def chat(index: int = 0, **params: Any) -> Request:
    params = {"max_tokens": 200, **params}
    messages = [{"role": "user", "content": "why"}]
    return Request(index, index, messages=messages, params=SamplingParams(**params))


def answer(backend: FakeBackend, row: Request | None = None, **params: Any) -> Completion:
    engine = Engine(backend, EngineConfig("m", threads=1, lanes=1))
    return finish(engine, [row or chat(**params)])[0]


class TestSplitting:
    @pytest.mark.parametrize(
        ("template", "says", "reasoning", "text"),
        [
            (KNOWS, "<think>\nhm\n</think>\n\nBecause.", "hm", "Because."),
            (KNOWS, "\n <think>hm</think>Because.", "hm", "Because."),
            (KNOWS, "<think></think>Because.", None, "Because."),
            (KNOWS, "<think>\n\n</think>\n\n  two", None, "  two"),
            (KNOWS, "Because <think>hm</think>.", None, "Because <think>hm</think>."),
            (KNOWS, "<thin air", None, "<thin air"),
            (KNOWS, "<think>a <think> b</think> c</think> d", "a <think> b", " c</think> d"),
            (KNOWS, "  plain", None, "  plain"),
            (OPENS, "hm\n</think>\n\nBecause.", "hm", "Because."),
            (OPENS, "<think>hm</think>Because.", "hm", "Because."),
            (OPENS, "</think>Because.", None, "Because."),
            (OPENS, "hm é 🎉</think>\r\nç", "hm é 🎉", "ç"),
            (None, "x", None, "x"),
        ],
    )
    def test_reasoning_and_answer(
        self, monkeypatch: pytest.MonkeyPatch, template: str | None, says: str,
        reasoning: str | None, text: str,
    ) -> None:  # fmt: skip
        """Tags and the line ends after them belong to neither; elsewhere they are text."""
        say(monkeypatch, says)
        backend = backend_of(template or fake.CHAT_TEMPLATE + "#")

        completion = answer(backend)

        assert (completion.reasoning, completion.text) == (reasoning, text)
        assert completion.finish_reason is FinishReason.STOP

    @given(
        st.text("<think>/ a\n", max_size=40),
        st.lists(st.integers(0, 40), max_size=8),
        st.booleans(),
    )
    def test_pieces_do_not_matter(self, text: str, places: list[int], is_open: bool) -> None:
        """Cut anywhere, the parts are those that one regular expression finds in the whole."""
        splitter = Splitter(THINK, is_open=is_open)
        cuts = sorted({0, len(text), *(min(place, len(text)) for place in places)})
        found = "".join(splitter.push(text[a:b]) for a, b in itertools.pairwise(cuts))
        found += splitter.finish()

        begins = r"[ \n]*<think>" if not is_open else r"(?:[ \n]*<think>)?"
        match = re.match(rf"{begins}(.*?)(?:</think>\n*(.*))?\Z", text, re.DOTALL)
        whole = re.match(rf"{begins}(.*?)</think>\n*(.*)\Z", text, re.DOTALL) or match
        if whole is None:
            assert (splitter.reasoning, found) == ("", text)
        else:
            assert (splitter.reasoning, found) == (whole[1].strip(), whole[2] or "")

    @pytest.mark.parametrize(
        ("template", "tags"),
        [
            ("{{ x.split('</think>')[-1] }}", THINK),
            ("<thinking>", Tags("<thinking>", "</thinking>")),
            ("[THINK]{{ x }}[/THINK]", Tags("[THINK]", "[/THINK]")),
            ("I think", None),
            (None, None),
        ],
    )
    def test_the_template_tells_the_tags(self, template: str | None, tags: Tags | None) -> None:
        """A model whose template knows no tag has no reasoning."""
        assert tags_of(backend_of(template).card.chat_template) == tags

    def test_prompts_that_are_no_chats_are_left_alone(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A raw prompt is continued; the tags are text, also beside an equal chat."""
        say(monkeypatch, "<think>hm</think>ok")
        engine = Engine(backend_of(KNOWS), EngineConfig("m", threads=1, lanes=1))
        raw = Request(1, 1, prompt="why#", params=chat().params)
        done = finish(engine, [chat(), raw])

        assert (done[0].reasoning, done[0].text) == ("hm", "ok")
        assert (done[1].reasoning, done[1].text) == (None, "<think>hm</think>ok")

    def test_tags_may_be_control_tokens(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Their bytes, that are in no text, count as the tag all the same."""
        say(monkeypatch, "\x01hm\x02ok")
        backend = backend_of(KNOWS)
        special = {FIRST_BYTE + 1: "<think>", FIRST_BYTE + 2: "</think>"}
        backend.card = replace(backend.card, special_texts=special)
        whole = backend.token_bytes
        monkeypatch.setattr(backend, "token_bytes", lambda t: b"" if t in special else whole(t))

        completion = answer(backend)

        assert (completion.reasoning, completion.text) == ("hm", "ok")
        assert completion.usage.reasoning_tokens == 4

    def test_tokens_of_the_reasoning_are_counted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Up to the closing tag, itself included; a token is a byte here."""
        say(monkeypatch, "<think>hm</think>\n\nok")

        assert answer(backend_of(KNOWS)).usage == Usage(5, 21, len("<think>hm</think>"))

    def test_a_stop_string_counts_within_the_reasoning(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As in servers that speak OpenAI's language, it is looked for in the whole text."""
        say(monkeypatch, "<think>one two three</think>ok")
        completion = answer(backend_of(KNOWS), stop=("two",))

        assert (completion.reasoning, completion.text) == ("one", "")
        assert completion.finish_reason is FinishReason.STOP

    def test_a_stop_string_that_holds_back_a_tag(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A closing tag may be the beginning of a stop string, and is one when it goes on."""
        say(monkeypatch, "<think>a</think>b</think>c")
        completion = answer(backend_of(KNOWS), stop=("</think>c",))

        assert (completion.reasoning, completion.text) == ("a", "b")

    def test_the_answer_is_streamed_without_reasoning(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Pieces, put together, are the text."""
        say(monkeypatch, "<think>hm</think>\n\nBecause of it.")
        engine = Engine(backend_of(KNOWS), EngineConfig("m", threads=1, lanes=1))
        engine.streams_text = True
        engine.submit([chat()])
        pieces: list[str] = []
        while engine.has_work:
            pieces += [e.text for e in engine.step() if isinstance(e, TextPiece)]

        assert "".join(pieces) == "Because of it."
        assert len(pieces) > 5


class TestEndingInside:
    @pytest.mark.parametrize(("template", "says"), [(KNOWS, "<think>a b c d"), (OPENS, "a b c d")])
    def test_an_answer_that_ends_within_reasoning(
        self, monkeypatch: pytest.MonkeyPatch, template: str, says: str
    ) -> None:
        """Its text is empty, what was thought is kept, and it is counted."""
        say(monkeypatch, says + " e f g")
        engine = Engine(backend_of(template), EngineConfig("m", threads=1, lanes=1))
        completion = finish(engine, [chat(max_tokens=len(says))])[0]

        assert (completion.reasoning, completion.text) == ("a b c d", "")
        assert completion.finish_reason is FinishReason.LENGTH
        assert completion.usage.reasoning_tokens == completion.usage.completion_tokens
        assert engine.stats.ended_in_reasoning == 1

    def test_a_row_that_is_called_off_is_not_counted(self) -> None:
        """Nor one that was only planned for."""
        engine = Engine(backend_of(OPENS), EngineConfig("m", threads=1, lanes=1))
        engine.submit([chat()])
        engine.prepare()
        engine.abort()

        assert engine.stats.ended_in_reasoning == 0

    def test_a_run_counts_and_says_it(self) -> None:
        """Each answer of a row counts; what ended otherwise does not."""
        cut = Completion(0, 0, "", FinishReason.LENGTH, reasoning="hm")
        result = JobResult()
        result.count(replace(cut, more=(cut.choices[0],)))
        result.count(replace(cut, text="so"))
        result.count(replace(cut, reasoning=None))

        assert result.ended_in_reasoning == 2
        assert reasoning_line(2).startswith("warning: 2 answers ended while")
        assert reasoning_line(1).startswith("warning: 1 answer ended while")


class TestLimit:
    @pytest.mark.parametrize(
        ("template", "limit", "reasoning"),
        [
            (KNOWS, 10, "abc"), (KNOWS, 7, None), (KNOWS, 0, None), (KNOWS, 99, "abcdefgh"),
            (OPENS, 3, "abc"), (OPENS, 0, None), (OPENS, 99, "abcdefgh"), (KNOWS, None, "abcdefgh"),
        ],
    )  # fmt: skip
    def test_reasoning_is_closed_after_so_many_tokens(
        self,
        monkeypatch: pytest.MonkeyPatch,
        template: str,
        limit: int | None,
        reasoning: str | None,
    ) -> None:
        """Then the model goes on with its answer; a shorter reasoning is left alone."""
        say(monkeypatch, ("<think>" if template is KNOWS else "") + "abcdefgh</think>\n\nThus.")
        completion = answer(backend_of(template), max_reasoning_tokens=limit)

        is_cut = reasoning != "abcdefgh"
        assert (completion.reasoning, completion.text) == (reasoning, "So." if is_cut else "Thus.")
        assert completion.finish_reason is FinishReason.STOP
        if is_cut and limit is not None:
            begun = max(limit, len("<think>") if template is KNOWS else 0)
            assert completion.usage.reasoning_tokens == begun + len("</think>")

    def test_it_holds_after_a_restart_and_has_logprobs(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A failed computation begins the answer anew; forced tokens have the model's logprobs."""
        say(monkeypatch, "abcdefgh</think>Thus.")
        for limit, fails_at in [(0, 2), (3, 6)]:
            backend = backend_of(OPENS)
            _fail_once(monkeypatch, backend, fails_at)
            completion = answer(backend, max_reasoning_tokens=limit, logprobs=True)

            assert completion.text == "So."
            assert completion.logprobs is not None
            assert [e.token_id for e in completion.logprobs] == list(completion.token_ids)
            assert completion.logprobs[limit].data == b"<"
            assert completion.logprobs[limit].logprob < -9

    def test_it_is_idle_without_reasoning(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """An answer that does not begin with reasoning is never cut."""
        say(monkeypatch, "A long answer with no tag in it")

        assert answer(backend_of(KNOWS), max_reasoning_tokens=4).text.endswith("no tag in it")


def _fail_once(patch: pytest.MonkeyPatch, backend: FakeBackend, at: int) -> None:
    forward, done = backend.forward, [0]

    def failing(plan: StepPlan, sample: Sample) -> list[int | None]:
        tokens = forward(plan, sample)
        done[0] += 1
        if done[0] == at:
            raise DecodeError("out of memory", -2)
        return tokens

    patch.setattr(backend, "forward", failing)


class TestARun:
    def test_a_run_warns_of_reasoning_that_eats_the_answer(self, tmp_path: Path) -> None:
        """One line on standard error, with what to do; none if the reasoning is closed."""
        model = tmp_path / "m.gguf"
        tiny_gguf.write(model, template=OPENS)
        runner = CliRunner()
        command = ["run", str(model), "-", "--max-tokens", "24", "--ignore-eos", "--lanes", "1"]
        cut = runner.invoke(main, command, input="one\ntwo\n")
        closed = runner.invoke(main, [*command, "--max-reasoning-tokens", "4"], input="one\ntwo\n")

        assert (cut.exit_code, closed.exit_code) == (0, 0)
        assert [json.loads(line)["text"] for line in cut.stdout.splitlines()] == ["", ""]
        assert cut.stderr.splitlines()[1:] == [reasoning_line(2)]
        assert all(json.loads(line)["text"] for line in closed.stdout.splitlines())
        assert "warning" not in closed.stderr
