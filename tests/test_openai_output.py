"""OpenAI's output form, held against the official library's own types, and vLLM's."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Batch, ErrorObject
from openai.types import Completion as TextCompletion
from openai.types.chat import ChatCompletion
from pydantic import BaseModel

from localbatch.data.errors import ConfigError, InputError
from localbatch.data.request import (
    Choice,
    Completion,
    FinishReason,
    TokenLogprob,
    Usage,
    failed_completion,
)
from localbatch.formats.openai_batch import CHAT, COMPLETIONS, LineError
from localbatch.formats.openai_output import (
    BatchCounts,
    BatchFiles,
    BatchJob,
    batch_object,
    failed_batch_object,
    openai_line,
    vllm_line,
)
from localbatch.formats.openai_results import Result, read_results
from localbatch.formats.records import json_line, record

JOB = BatchJob("j" * 32, 1711471533, CHAT, "gpt-4o-mini")
TEXT_JOB = BatchJob("j" * 32, 1711471533, COMPLETIONS, "m")
LOGPROBS = (
    TokenLogprob(1, b"H", -0.25, (TokenLogprob(1, b"H", -0.25), TokenLogprob(2, b"h", -2.0))),
    TokenLogprob(3, "é".encode()[:1], -0.5, (TokenLogprob(4, b" ", -0.4),)),
    TokenLogprob(5, "é".encode()[1:], -math.inf),
)


def strict(kind: type[BaseModel], value: object, *, more: frozenset[str] = frozenset()) -> Any:
    """Parse as the library does, but refuse other types, and members that it does not know."""
    parsed = kind.model_validate(value, strict=True)
    assert set(unknown(parsed)) <= more
    return parsed


def unknown(value: object) -> Iterator[str]:
    if isinstance(value, BaseModel):
        yield from value.model_extra or {}
        value = [getattr(value, name) for name in type(value).model_fields]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for member in value:
            yield from unknown(member)


def answer(text: str = "Hello!", **more: Any) -> Completion:
    usage = more.pop("usage", Usage(22, 2))
    return Completion("request-1", 0, text, FinishReason.STOP, usage=usage, **more)


def through_json(completion: Completion) -> dict[str, Any]:
    """Return the record as the journal gives it back."""
    row: dict[str, Any] = json.loads(json_line(record(completion)))
    return row


def line(completion: Completion, job: BatchJob = JOB) -> dict[str, Any]:
    return openai_line(through_json(completion), job)


def body(completion: Completion, job: BatchJob = JOB) -> Any:
    return line(completion, job)["response"]["body"]


# Records


def test_the_record_of_a_full_answer() -> None:
    """Reasoning, log probabilities, further answers and counts are there if the row has them."""
    usage = Usage(5, 4, reasoning_tokens=3, cut_tokens=2)
    more = (Choice("b", FinishReason.LENGTH, reasoning="why"),)
    row = through_json(answer("a", logprobs=LOGPROBS[2:], more=more, usage=usage))
    token = {"token": "\ufffd", "bytes": [0xA9], "logprob": -9999.0, "top": []}
    assert row["logprobs"] == [token]
    assert "reasoning" not in row
    assert row["choices"] == [
        {"text": "a", "finish_reason": "stop", "logprobs": [token]},
        {"text": "b", "finish_reason": "length", "reasoning": "why"},
    ]
    assert row["usage"] == {
        "prompt_tokens": 5, "completion_tokens": 4, "reasoning_tokens": 3, "cut_tokens": 2
    }  # fmt: skip


def test_the_record_of_an_error_has_field_and_code() -> None:
    """If it has them; the text of an error is the same without."""
    bad = failed_completion("a", 0, "n: is bad", 3, field="n", code="invalid_value")
    expected = {"message": "n: is bad", "line": 3, "field": "n", "code": "invalid_value"}
    assert through_json(bad)["error"] == expected


# Answers


def test_a_chat_has_the_form_of_openai_s_guide() -> None:
    """All members of the guide's example are there, in the library's types."""
    # https://platform.openai.com/docs/guides/batch, "Retrieve the results"
    guide = {
        "id": "batch_req_123", "custom_id": "request-1", "response": {
            "status_code": 200, "request_id": "req_123", "body": {
                "id": "chatcmpl-123", "object": "chat.completion", "created": 1711471533,
                "model": "gpt-4o-mini", "choices": [{"index": 0, "message": {
                    "role": "assistant", "content": "Hello!"}, "logprobs": None,
                    "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 22, "completion_tokens": 2, "total_tokens": 24},
                "system_fingerprint": None}},
        "error": None,
    }  # fmt: skip
    found = line(answer())
    strict(ChatCompletion, guide["response"]["body"])  # type: ignore[index]
    strict(ChatCompletion, found["response"]["body"])
    assert without_ids(found, like=guide) == without_ids(guide, like=guide)


def without_ids(value: Any, *, like: Any) -> Any:
    """Return the members that `like` has; of ids the part before the number."""
    if isinstance(like, dict):
        return {
            k: str(value[k]).rstrip("0123456789abcdef").removesuffix("req_")
            if k in ("id", "request_id") else without_ids(value[k], like=v)
            for k, v in like.items()
        }  # fmt: skip
    if isinstance(like, list):
        return [without_ids(v, like=like[0]) for v in value]
    return value


def test_a_completion_is_a_text_completion() -> None:
    """The other endpoint has its own object."""
    found = strict(TextCompletion, body(answer("Hi"), TEXT_JOB))
    assert (found.object, found.model, found.created) == ("text_completion", "m", 1711471533)
    assert found.id.startswith("cmpl-")
    assert [(c.index, c.text, c.finish_reason) for c in found.choices] == [(0, "Hi", "stop")]


def test_answers_reasoning_and_counts() -> None:
    """All of a row's answers are choices; reasoning is beside the content, as vLLM has it."""
    usage = Usage(5, 9, reasoning_tokens=3, cut_tokens=2)
    more = (Choice("b", FinishReason.LENGTH),)
    full = answer("a", reasoning="why", more=more, usage=usage)
    found = body(full)
    parsed = strict(ChatCompletion, found, more=frozenset({"reasoning_content", "localbatch"}))
    assert [(c.index, c.message.content, c.finish_reason) for c in parsed.choices] == [
        (0, "a", "stop"), (1, "b", "length")
    ]  # fmt: skip
    assert found["choices"][0]["message"]["reasoning_content"] == "why"
    assert "reasoning_content" not in found["choices"][1]["message"]
    assert found["localbatch"] == {"cut_tokens": 2}
    assert parsed.usage.total_tokens == 14
    assert parsed.usage.completion_tokens_details.reasoning_tokens == 3
    extras = frozenset({"reasoning_content", "localbatch"})
    strict(TextCompletion, body(full, TEXT_JOB), more=extras)


def test_logprobs_of_a_chat() -> None:
    """A token has its bytes, its logarithm and the likeliest ones; -9999 is for none at all."""
    parsed = strict(ChatCompletion, body(answer("Hé", logprobs=LOGPROBS)))
    first, second, third = parsed.choices[0].logprobs.content
    assert (first.token, first.bytes, first.logprob) == ("H", [72], -0.25)
    assert [(t.token, t.logprob) for t in first.top_logprobs] == [("H", -0.25), ("h", -2.0)]
    assert (second.bytes, third.bytes) == ([0xC3], [0xA9])
    assert (third.logprob, third.top_logprobs) == (-9999.0, [])


def test_logprobs_of_a_completion() -> None:
    """Lists, with offsets in characters; the token itself is among the likeliest ones."""
    parsed = strict(TextCompletion, body(answer("Hé", logprobs=LOGPROBS), TEXT_JOB))
    found = parsed.choices[0].logprobs
    assert found.tokens == ["H", "bytes:\\xc3", "bytes:\\xa9"]
    assert found.token_logprobs == [-0.25, -0.5, -9999.0]
    assert found.text_offset == [0, 1, 1]
    assert found.top_logprobs == [
        {"H": -0.25, "h": -2.0}, {" ": -0.4, "bytes:\\xc3": -0.5}, {"bytes:\\xa9": -9999.0}
    ]  # fmt: skip


@given(st.lists(st.text(min_size=1, max_size=3), max_size=6), st.integers(1, 4))
def test_offsets_are_places_in_the_text(parts: list[str], size: int) -> None:
    """However a text is cut into tokens, a token that starts with a character starts there."""
    data = "".join(parts).encode()
    tokens = [data[i : i + size] for i in range(0, len(data), size)]
    logprobs = tuple(TokenLogprob(0, token, -1.0) for token in tokens)
    found = body(answer("".join(parts), logprobs=logprobs), TEXT_JOB)["choices"][0]["logprobs"]
    starts = range(0, len(data), size)
    expected = [len(data[:start].decode(errors="ignore")) for start in starts]
    assert found["text_offset"] == expected


def test_bytes_that_are_no_character_have_a_place_in_the_text() -> None:
    """The text has a replacement character for them, so what follows starts after it."""
    logprobs = tuple(TokenLogprob(0, token, -1.0) for token in (b"\xff", b"a"))
    found = body(answer("\ufffda", logprobs=logprobs), TEXT_JOB)["choices"][0]["logprobs"]
    assert found["tokens"] == ["bytes:\\xff", "a"]
    assert found["text_offset"] == [0, 1]


# Errors


@pytest.mark.parametrize(
    ("bad", "status", "kind"),
    [
        (failed_completion("a", 0, "n: is bad", 3, field="n", code="invalid_value"),
         400, "invalid_request_error"),
        (failed_completion("a", 0, "prompt: is too long", 3, field="prompt",
                           code="context_length_exceeded"), 400, "invalid_request_error"),
        (failed_completion("a", 0, "is not JSON", 3, code="invalid_json_line"),
         400, "invalid_request_error"),
        (failed_completion("a", 0, "the worker died", 3), 500, "server_error"),
    ],
)  # fmt: skip
def test_an_error_is_a_response(bad: Completion, status: int, kind: str) -> None:
    """An HTTP error is in the body, and the member `error` of the line stays null."""
    found = line(bad)
    assert found["error"] is None
    assert found["response"]["status_code"] == status
    error = strict(ErrorObject, found["response"]["body"]["error"])
    assert (error.message, error.type) == (bad.error, kind)
    assert (error.param, error.code) == (bad.error_field, bad.error_code)


def test_a_row_that_was_called_off_has_no_response() -> None:
    """It has the other form of an error, with code and message."""
    off = line(Completion("a", 0, "so far", FinishReason.ABORTED))
    assert off["response"] is None
    assert set(off["error"]) == {"code", "message"}
    assert off["error"]["code"] == "batch_cancelled"


def test_ids_depend_on_job_and_row_alone() -> None:
    """The same row has the same ids, another row or job others; a stolen id takes none away."""
    stolen = failed_completion("request-1", 5, "id: is taken", 6, field="id")
    other_job = BatchJob("k" * 32, 1711471533, CHAT, "gpt-4o-mini")
    lines = [
        line(answer()), line(Completion("request-2", 1, "x", FinishReason.STOP)), line(stolen),
        line(answer(), other_job),
    ]  # fmt: skip
    assert len({found["id"] for found in lines}) == 4
    assert len({found["response"]["request_id"] for found in lines}) == 4
    assert line(answer("another text"))["id"] == lines[0]["id"]
    assert line(Completion(7, 0, "x", FinishReason.STOP))["custom_id"] == "7"


# vLLM


def test_vllm_s_form() -> None:
    """An answer is as OpenAI's but for its ids; an error is beside a response without body."""
    good = vllm_line(through_json(answer()), JOB)
    assert good["id"].startswith("vllm-")
    assert good["response"]["request_id"].startswith("vllm-batch-")
    assert good["error"] is None
    strict(ChatCompletion, good["response"]["body"])
    bad = vllm_line(record(failed_completion("a", 0, "n: is bad", 3, field="n")), JOB)
    assert bad["response"]["body"] is None
    assert bad["response"]["status_code"] == 400
    assert bad["error"] == {
        "error": {
            "message": "n: is bad", "type": "invalid_request_error", "param": "n", "code": 400
        }
    }  # fmt: skip


# The batch object

FILES = BatchFiles("in.jsonl", "out.jsonl", "out.errors.jsonl")


def test_the_batch_object_of_a_job() -> None:
    """It has every member of the official type, and counts rows and tokens."""
    counts = BatchCounts()
    counts.add(record(answer(usage=Usage(22, 2, reasoning_tokens=1))))
    counts.add(record(failed_completion("b", 1, "is bad", 2)))
    made = batch_object(JOB, FILES, counts, 2, 1711471600)
    batch = strict(Batch, made)
    assert set(made) == set(Batch.model_fields)
    assert (batch.status, batch.completed_at, batch.created_at) == (
        "completed", 1711471600, 1711471533
    )  # fmt: skip
    assert (batch.input_file_id, batch.output_file_id, batch.error_file_id) == (
        "in.jsonl", "out.jsonl", "out.errors.jsonl"
    )  # fmt: skip
    assert made["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
    assert made["usage"] == {
        "input_tokens": 22, "input_tokens_details": {"cached_tokens": 0}, "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 1}, "total_tokens": 24,
    }  # fmt: skip


def test_the_batch_object_names_only_files_that_hold_rows() -> None:
    """No answer, no output file; no error, no error file; no end, in progress."""
    batch = strict(Batch, batch_object(JOB, FILES, BatchCounts(failed=1), 2, None))
    assert (batch.output_file_id, batch.error_file_id) == (None, "out.errors.jsonl")
    assert (batch.status, batch.completed_at) == ("in_progress", None)
    batch = strict(Batch, batch_object(JOB, FILES, BatchCounts(completed=1), 1, 9))
    assert (batch.output_file_id, batch.error_file_id) == ("out.jsonl", None)


def test_the_batch_object_of_a_refused_file() -> None:
    """It has failed, and lists the errors."""
    errors = [
        LineError("duplicate_custom_id", "custom_id: 'a' is that of line 1 already", "custom_id", 2)
    ]
    made = failed_batch_object(JOB, "in.jsonl", errors, 1711471600)
    batch = strict(Batch, made)
    assert set(made) == set(Batch.model_fields)
    assert (batch.status, batch.failed_at) == ("failed", 1711471600)
    (error,) = batch.errors.data
    assert (error.code, error.param, error.line) == ("duplicate_custom_id", "custom_id", 2)


# Reading

CHAT_BODY = '{"choices": [{"index": 0, "message": {"role": "assistant", "content": "Hi"}}]}'
ERROR = '{"message": "too long", "type": "BadRequestError", "param": null, "code": 400}'


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        # OpenAI: an answer, an HTTP error, a row that was never run, a call of a tool
        (f'"response": {{"status_code": 200, "request_id": "r", "body": {CHAT_BODY}}}, '
         '"error": null', ("Hi", None)),
        (f'"response": {{"status_code": 400, "request_id": "r", "body": {{"error": {ERROR}}}}}, '
         '"error": null', (None, "too long")),
        ('"response": null, "error": {"code": "batch_expired", "message": "expired"}',
         (None, "expired")),
        ('"response": {"status_code": 200, "body": {"choices": [{"message": {"content": null}}]}}',
         (None, None)),
        ('"response": {"status_code": 200, "body": {"choices": [{"text": "Hi"}]}}, "error": null',
         ("Hi", None)),
        # vLLM: error as text, in an error response, and as the flat one of older versions
        ('"response": {"status_code": 400, "request_id": "r", "body": null}, "error": "bad"',
         (None, "bad")),
        (f'"response": {{"status_code": 400, "request_id": "r", "body": null}}, '
         f'"error": {{"error": {ERROR}}}', (None, "too long")),
        (f'"response": {{"status_code": 400, "request_id": "r", "body": null}}, "error": {ERROR}',
         (None, "too long")),
        # vLLM's first form
        (f'"response": {CHAT_BODY}, "error": null', ("Hi", None)),
    ],
)  # fmt: skip
def test_known_forms_are_read(
    tmp_path: Path, members: str, expected: tuple[str | None, str | None]
) -> None:
    """OpenAI's two, vLLM's errors of either shape, and its flat form of before."""
    path = tmp_path / "out.jsonl"
    path.write_text(f'{{"id": "x", "custom_id": "a", {members}}}\n')
    assert list(read_results(str(path))) == [Result("a", *expected)]


def test_vllm_s_published_example_is_read(tmp_path: Path) -> None:
    """The result that vLLM's guide to batch files shows."""
    # examples/offline_inference/openai_batch/README.md in vllm-project/vllm
    shown = (
        '{"id":"vllm-42e3d09b14b04568afa3f1797751a267","custom_id":"request-2","response":{"id":'
        '"cmpl-f44d049f6b3a42d4b2d7850bb1e31bcc","object":"chat.completion","created":1715633336,'
        '"model":"meta-llama/Meta-Llama-3-8B-Instruct","choices":[{"index":0,"message":{"role":'
        '"assistant","content":"*silence*"},"logprobs":null,"finish_reason":"stop","stop_reason":'
        'null}],"usage":{"prompt_tokens":27,"total_tokens":32,"completion_tokens":5}},"error":null}'
    )
    path = tmp_path / "results.jsonl"
    path.write_text(shown)
    assert list(read_results(str(path))) == [Result("request-2", "*silence*", None)]


@given(st.lists(st.tuples(st.text(min_size=1), st.text(), st.booleans()), max_size=5))
def test_what_is_written_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str, bool]]
) -> None:
    """Ids, texts and errors come back from both forms, for both endpoints."""
    path = tmp_path_factory.mktemp("read") / "out.jsonl"
    records = [
        record(Completion(name, i, text, FinishReason.STOP) if is_good
               else failed_completion(name, i, text, None))
        for i, (name, text, is_good) in enumerate(rows)
    ]  # fmt: skip
    expected = [Result(n, t, None) if is_good else Result(n, None, t) for n, t, is_good in rows]
    for form in (openai_line, vllm_line):
        for job in (JOB, TEXT_JOB):
            path.write_text("".join(json_line(form(row, job)) + "\n" for row in records), "utf-8")
            assert list(read_results(str(path))) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON: "),
        ('{"id": 1}', "custom_id: must be a string"),
        ('{"custom_id": "a", "response": null}', "response: has neither an answer nor an error"),
        ('{"custom_id": "a", "response": {"choices": []}}', "response: has no choices with a text"),
        ('{"custom_id": "a", "response": {"status_code": 200, "body": null}}', "response: has no"),
    ],
)  # fmt: skip
def test_other_lines_are_errors(tmp_path: Path, text: str, message: str) -> None:
    """One line names file and line, after the results before it."""
    path = tmp_path / "out.jsonl"
    path.write_text('{"custom_id": "a", "error": "bad"}\n' + text)
    results = read_results(str(path))
    assert next(results) == Result("a", None, "bad")
    with pytest.raises(InputError) as caught:
        next(results)
    assert str(caught.value).startswith(f"{path}:2: is no line of a batch output: {message}")
    with pytest.raises(ConfigError, match="can't be opened"):
        next(read_results(str(tmp_path / "missing")))
