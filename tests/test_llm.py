"""The Python API and the worker process behind it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from localbatch import (
    LLM,
    Completion,
    ConfigError,
    EngineError,
    FinishReason,
    ModelError,
    SamplingParams,
    TextPiece,
)
from localbatch.engine.client import WINDOW
from tests import tiny_gguf

pytestmark = pytest.mark.timeout(60)

SHORT = SamplingParams(max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def fake() -> Iterator[LLM]:
    with LLM("fake", backend="fake", parallel=8, order="input", share_prefixes=False) as llm:
        yield llm


def test_generate_returns_answers_in_order(fake: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    """One completion a prompt, and nothing is printed."""
    done = fake.generate([f"prompt {i}" for i in range(30)], SHORT)

    assert [c.index for c in done] == list(range(30))
    assert {5} == {c.usage.completion_tokens for c in done}
    assert capfd.readouterr() == ("", "")


def test_generate_gives_each_prompt_its_own_settings(fake: LLM) -> None:
    """One for each prompt; too few of them are the caller's mistake, and no run is left behind."""
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (3, 1, 2)]

    assert [len(c.token_ids) for c in fake.generate(["a", "b", "c"], params)] == [3, 1, 2]
    with pytest.raises(ConfigError, match="params: 3 of them, fewer than prompts"):
        fake.generate(["a", "b", "c", "d"], params)
    assert [len(c.token_ids) for c in fake.generate(["a"])] != [0]


def test_a_prompt_may_have_several_answers_with_logprobs(fake: LLM) -> None:
    """They are the completion's choices, the first of them its own text; the others in order."""
    params = SamplingParams(max_tokens=5, ignore_eos=True, n=3, temperature=1.0, logprobs=True)
    done = fake.generate(["one", "two"], params)
    first = fake.generate(["one", "two"], replace(params, n=1))

    assert [[len(choice.token_ids) for choice in c.choices] for c in done] == [[5] * 3] * 2
    assert [c.choices[:1] for c in done] == [c.choices for c in first]
    assert all(choice.logprobs for c in done for choice in c.choices)


def test_each_completion_comes_as_it_ends(fake: LLM) -> None:
    """A short answer does not wait for a long one before it."""
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (3000, 2)]

    done = [c.index for c in fake.iter_completions(["long", "short"], params)]

    assert done == [1, 0]


def test_streamed_pieces_are_the_text(fake: LLM) -> None:
    """Pieces come before the completion, and are its text put together."""
    text, completion = "", None
    for event in fake.stream(["hello"], SamplingParams(max_tokens=50, ignore_eos=True)):
        if isinstance(event, TextPiece):
            assert completion is None
            text += event.text
        else:
            completion = event

    assert completion is not None
    assert text == completion.text


def test_pieces_of_many_rows_are_told_apart_by_their_row(fake: LLM) -> None:
    """Each piece names its row, and no piece comes behind the row's completion."""
    texts: dict[int, str] = {}
    done: dict[int, str] = {}
    for event in fake.stream([f"prompt {i}" for i in range(20)], SamplingParams(max_tokens=20)):
        if isinstance(event, TextPiece):
            assert event.row not in done
            texts[event.row] = texts.get(event.row, "") + event.text
        else:
            done[event.index] = event.text

    assert sorted(done) == list(range(20))
    assert done == {index: texts.get(index, "") for index in done}


def test_prompts_may_be_messages_or_text(fake: LLM) -> None:
    """A string is a user's message; `raw` takes it as it is, so it has fewer tokens."""
    as_text, as_messages = fake.generate(["hi", [{"role": "user", "content": "hi"}]], SHORT)
    raw = fake.generate(["hi"], SHORT, raw=True)[0]
    system = fake.generate(["hi"], SHORT, system="be brief")[0]

    assert as_text.token_ids == as_messages.token_ids
    assert raw.usage.prompt_tokens == 3  # BOS, h, i
    # <user>hi</user><assistant> behind BOS, and <system>be brief</system> before it
    assert as_text.usage.prompt_tokens == 1 + 15 + 11
    assert system.usage.prompt_tokens == 1 + 15 + 11 + 25


def test_a_bad_row_is_a_completion_with_an_error(fake: LLM) -> None:
    """It does not raise, and its neighbours are answered."""
    done = fake.generate(["good", "", [{"role": "user"}]], SHORT)

    assert [c.error for c in done[:2]] == [None, "prompt: is empty"]
    assert done[2].error == "messages[0].content: must be a string, not NoneType"
    assert done[2].finish_reason is FinishReason.ERROR


@pytest.mark.parametrize("prompt", [5, None, ["x"], {"role": "user"}])
def test_a_prompt_of_a_wrong_type_is_one_failed_row(fake: LLM, prompt: object) -> None:
    """Also with a system message to put before it."""
    done = fake.generate(["good", prompt], SHORT, system="s")  # type: ignore[list-item]

    assert done[0].error is None
    assert done[1].error is not None
    assert done[1].error.startswith(("messages", "prompt"))


def test_a_bias_for_an_unknown_token_is_one_failed_row(fake: LLM) -> None:
    """It names the token instead of doing nothing."""
    params = [SHORT, SamplingParams(logit_bias={500_000: 5})]

    done = fake.generate(["good", "bad"], params)

    assert done[0].error is None
    assert done[1].error == "logit_bias: token 500000 is not in the vocabulary"


def test_a_closed_model_says_so() -> None:
    """Using it after close is an error in words."""
    llm = LLM("fake", backend="fake")
    llm.close()

    with pytest.raises(EngineError, match="the model is closed"):
        llm.generate(["x"])


def test_one_run_at_a_time(fake: LLM) -> None:
    """A second run while one is going on is refused, in words."""
    first = fake.iter_completions(["a", "b"], SHORT)
    next(first)

    with pytest.raises(EngineError, match="another run is going on"):
        next(fake.iter_completions(["c"], SHORT))
    first.close()


def test_a_run_called_off_leaves_the_model_usable(fake: LLM) -> None:
    """Leaving an iterator drops its rows; the next run gets only its own."""
    long = SamplingParams(max_tokens=3000, ignore_eos=True)
    rows = [f"row {i}" for i in range(50)]
    running = fake.iter_completions(rows, [SHORT, *[long] * 49])
    assert next(running).index == 0
    running.close()

    done = fake.generate(["x", "y"], SHORT)

    assert [c.index for c in done] == [0, 1]
    assert [c.token_ids for c in done] == [c.token_ids for c in fake.generate(["x", "y"], SHORT)]


def test_prompts_are_read_as_there_is_room(fake: LLM) -> None:
    """An endless source is never read more than a window ahead."""
    taken = 0

    def endless() -> Iterator[str]:
        nonlocal taken
        while True:
            taken += 1
            yield "again"

    run = fake.iter_completions(endless(), SamplingParams(max_tokens=1))
    for _ in range(10_000):
        next(run)
    run.close()

    assert taken <= 10_000 + WINDOW


def test_a_killed_worker_is_replaced_at_once() -> None:
    """Nothing hangs, and no row is lost."""
    with LLM("fake", backend="fake") as llm:
        running = llm.iter_completions(
            ["a", "b"], [SHORT, SamplingParams(max_tokens=4000, ignore_eos=True)]
        )
        first = next(running)
        os.kill(llm._client.pid, signal.SIGKILL)
        started = time.monotonic()

        (second,) = running

        assert {first.index, second.index} == {0, 1}
        assert (first.error, second.error, llm.num_restarts) == (None, None, 1)
        assert time.monotonic() - started < 10


def test_a_worker_ends_with_its_parent(tmp_path: Path) -> None:
    """A parent killed outright leaves no process behind."""
    code = (
        "from localbatch import LLM; llm = LLM('fake', backend='fake');"
        "print(llm._client.pid, flush=True); import time; time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()

    deadline = time.monotonic() + 10
    while Path(f"/proc/{worker}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{worker}").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty, not a GGUF file"),
        (b"PK\x03\x04" + b"\0" * 40, "is not a GGUF file (it starts with PK"),
        (b"GGUF\x03\0\0\0", "is cut off after 8 bytes"),
        (b"GGUF\x09\0\0\0" + b"\0" * 16, "is GGUF version 9"),
        (b"GGUF\x00\x00\x00\x03" + b"\0" * 16, "is a big-endian GGUF file"),
        (b"GGUF\x03\0\0\0" + b"\xff" * 16, "llama.cpp can't load it"),
    ],
)
def test_a_file_that_is_no_model_is_refused_in_one_line(
    tmp_path: Path, content: bytes, message: str
) -> None:
    """The message names the file and what it is."""
    path = tmp_path / "model.gguf"
    path.write_bytes(content)

    with pytest.raises(ModelError) as refused:
        LLM(str(path))

    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_cut_off_model_is_refused_in_one_line(tiny_model: Path, tmp_path: Path) -> None:
    """By llama.cpp, with its reason, and no process is left."""
    path = tmp_path / "cut.gguf"
    path.write_bytes(tiny_model.read_bytes()[:-1000])
    children = psutil.Process().children()

    with pytest.raises(ModelError, match=r"cut\.gguf: llama\.cpp can't load it: ") as refused:
        LLM(str(path))

    assert "not within the file bounds" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert psutil.Process().children() == children


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("/no/such/model.gguf", r"^/no/such/model\.gguf: there is no such file$"),
        ("smollm2-135n", "did you mean smollm2-135m"),
        ("/", "is a folder"),
    ],
)
def test_a_model_that_is_not_there_is_refused_in_one_line(model: str, message: str) -> None:
    """Paths and names alike."""
    with pytest.raises(ModelError, match=message) as refused:
        LLM(model)

    assert "\n" not in str(refused.value)


def test_a_model_without_a_template_takes_raw_prompts_only(tmp_path: Path) -> None:
    """The worker's refusal reaches the caller as it is."""
    path = tmp_path / "base.gguf"
    tiny_gguf.write(path, template=None)
    with LLM(str(path), threads=1) as llm:
        assert [c.error for c in llm.generate(["x"], SHORT, raw=True)] == [None]

        with pytest.raises(ConfigError, match=r"no chat template .*--raw"):
            llm.generate(["x"], SHORT)


def test_settings_out_of_range_are_refused() -> None:
    """Before a process is started, naming the setting."""
    with pytest.raises(ConfigError, match="parallel: must be"):
        LLM("fake", backend="fake", parallel=0)
    with pytest.raises(ConfigError, match="backend: must be 'llama' or 'fake', not 'other'"):
        LLM("fake", backend="other")
    with pytest.raises(
        ConfigError, match="kv_layout: must be one of 'streams', 'unified', not 'sideways'"
    ):
        LLM("fake", backend="fake", kv_layout="sideways")
    with pytest.raises(ConfigError, match="system: goes with the chat template, not with raw"):
        LLM.generate(object.__new__(LLM), ["x"], raw=True, system="s")
    with pytest.raises(ConfigError, match="not one string"):
        LLM.iter_completions(object.__new__(LLM), "one string")


def test_leaving_the_context_ends_the_process() -> None:
    """At once, not when the object is collected."""
    with LLM("fake", backend="fake") as llm:
        worker = psutil.Process(llm._client.pid)
        assert worker.is_running()

    assert not worker.is_running()


def test_a_real_model_answers_through_the_worker(
    tiny_model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A tiny model of random weights: both layouts, and the same greedy answers in streams.

    Nothing that llama.cpp says is printed.
    """
    prompts = [f"the {word} of" for word in ("it", "on", "are", "as", "was")]
    answers = {}
    for parallel in (1, 4):
        with LLM(str(tiny_model), parallel=parallel, threads=1) as llm:
            answers[parallel] = [c.token_ids for c in llm.generate(prompts, SHORT)]
    with LLM(str(tiny_model), parallel=4, threads=1, kv_layout="unified") as llm:
        unified = llm.generate(prompts, SHORT)

    assert answers[1] == answers[4]
    assert [c.error for c in unified if isinstance(c, Completion)] == [None] * 5
    assert capfd.readouterr() == ("", "")
