"""OpenAI batch files: which are refused, and what a body asks for."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import completion_create_params as completions_params
from openai.types.chat import completion_create_params as chat_params

from localbatch.data.request import Completion, Request
from localbatch.data.sampling_params import SamplingParams
from localbatch.formats import openai_batch
from localbatch.formats.inputs import InputFormat, InputOptions, InputSource, read_requests
from localbatch.formats.openai_batch import (
    CHAT,
    COMPLETIONS,
    BatchFile,
    BatchFileError,
    LineError,
    check_batch,
)

DEFAULTS = SamplingParams(max_tokens=7, temperature=0.5)
USER = {"role": "user", "content": "x"}

# https://platform.openai.com/docs/guides/batch, "Prepare your batch file"
GUIDE = b"""\
{"custom_id": "request-1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": \
"gpt-3.5-turbo-0125", "messages": [{"role": "system", "content": "You are a helpful assistant."},\
{"role": "user", "content": "Hello world!"}],"max_tokens": 1000}}
{"custom_id": "request-2", "method": "POST", "url": "/v1/chat/completions", "body": {"model": \
"gpt-3.5-turbo-0125", "messages": [{"role": "system", "content": "You are an unhelpful assistant."\
},{"role": "user", "content": "Hello world!"}],"max_tokens": 1000}}
"""


def line(body: object, custom_id: object = "a", url: object = CHAT, **more: object) -> bytes:
    row = {"custom_id": custom_id, "method": "POST", "url": url, "body": body, **more}
    return json.dumps(row).encode() + b"\n"


def chat(custom_id: object = "a", **body: object) -> bytes:
    return line({"messages": [USER], **body}, custom_id)


def text(custom_id: object = "a", **body: object) -> bytes:
    return line({"prompt": "x", **body}, custom_id, COMPLETIONS)


def check(data: bytes, **options: bool) -> BatchFile | None:
    return check_batch(io.BytesIO(data), "in.jsonl", **options)


def bad_lines(data: bytes) -> list[LineError]:
    with pytest.raises(BatchFileError) as caught:
        check(data)
    return caught.value.errors


def read(data: bytes, **options: Any) -> list[Request | Completion]:
    source = InputSource(io.BytesIO(data), InputFormat.JSONL, "in.jsonl")
    return list(read_requests(source, DEFAULTS, InputOptions(**options)))


def request(data: bytes, **options: Any) -> Request:
    (item,) = read(data, **options)
    assert isinstance(item, Request), item
    return item


def failure(data: bytes) -> tuple[str | None, str | None, str | None]:
    (item,) = read(data)
    assert isinstance(item, Completion), item
    return item.error_field, item.error_code, item.error


# The lines


def test_the_guide_s_example_is_a_batch() -> None:
    """OpenAI's own example is known for what it is, and its rows are requests."""
    assert check(GUIDE) == BatchFile(CHAT, "gpt-3.5-turbo-0125", 2)
    first, second = read(GUIDE)
    assert isinstance(first, Request)
    assert (first.id, second.id) == ("request-1", "request-2")
    assert first.messages == [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Hello world!"},
    ]
    assert first.params == replace(DEFAULTS, max_tokens=1000)


@pytest.mark.parametrize(
    "data",
    [b"", b"\n \n", b'{"prompt": "x"}\n{', b'{"custom_id": "a", "prompt": "x"}', b"x\n[1]\n",
     b'{"id": 1, "body": {}}\n' + chat()],
)  # fmt: skip
def test_other_files_are_no_batch(data: bytes) -> None:
    """The first object decides; a file without one is native."""
    assert check(data) is None


def test_a_text_is_not_searched_for_objects() -> None:
    """A stream that may be text, and starts like it, is read no further than its first line."""
    stream = io.BytesIO(b"prompt\n" + chat())
    assert check_batch(stream, "-", may_be_text=True) is None
    assert stream.readline() == chat()


def test_a_batch_without_rows_is_an_error_if_it_has_to_be_one() -> None:
    """Where a batch is asked for, an empty file is refused with OpenAI's code."""
    with pytest.raises(BatchFileError) as caught:
        check(b"\n", is_batch=True)
    assert [error.code for error in caught.value.errors] == ["empty_file"]


BAD_LINES = [
    (b"{\n", "invalid_json_line", None),
    (b"[1]\n", "invalid_json_line", None),
    (b"\xff\n", "invalid_json_line", None),
    (chat(7, top_p=1.0).replace(b"1.0", b"NaN"), "invalid_json_line", None),
    (chat("first"), "duplicate_custom_id", "custom_id"),
    (chat(""), "invalid_request", "custom_id"),
    (chat(None), "invalid_request", "custom_id"),
    (chat(7), "invalid_request", "custom_id"),
    (chat("\ud800"), "invalid_request", "custom_id"),
    (b'{"method": "POST", "url": "/v1/chat/completions", "body": {}}\n',
     "invalid_request", "custom_id"),
    (line({}, "b1", method="GET"), "invalid_request", "method"),
    (line({}, "b2", url="/v1/embeddings"), "invalid_request", "url"),
    (line({}, "b3", url=None), "invalid_request", "url"),
    (line({}, "b4", url=[]), "invalid_request", "url"),
    (text("b5"), "url_mismatch", "url"),
    (line("x", "b6"), "invalid_request", "body"),
    (line(None, "b7"), "invalid_request", "body"),
    (chat("b8", model="other"), "model_mismatch", "body.model"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "code", "param"), BAD_LINES)
def test_a_bad_line_refuses_the_file(data: bytes, code: str, param: str | None) -> None:
    """It has OpenAI's code, its line and the field, wherever it is."""
    (error,) = bad_lines(chat("first", model="m") + b"\n" + data + chat("last"))
    assert (error.code, error.param, error.line) == (code, param, 3)
    assert param is None or error.message.startswith(f"{param}: ")


def test_all_bad_lines_are_listed() -> None:
    """In their order, also those before the first object, and in the message, too."""
    bad = b"".join(data for data, _, _ in BAD_LINES)
    with pytest.raises(BatchFileError) as caught:
        check(b"{\n" + chat("first", model="m") + bad)
    expected = [("invalid_json_line", 1)]
    expected += [(code, number) for number, (_, code, _) in enumerate(BAD_LINES, 3)]
    assert expected == [(error.code, error.line) for error in caught.value.errors]
    intro, first, *rest = str(caught.value).splitlines()
    assert intro == "in.jsonl: is no valid OpenAI batch file: 19 errors; nothing was run"
    assert first.startswith("in.jsonl:1: is not JSON: ")
    assert first.endswith("(invalid_json_line)")
    assert len(rest) == 18


def test_a_message_does_not_list_thousands() -> None:
    """A hundred are shown, the number of the others is told, the error has them all."""
    with pytest.raises(BatchFileError) as caught:
        check(chat() * 1501)
    assert len(caught.value.errors) == 1500
    assert len(str(caught.value).splitlines()) == 102
    assert str(caught.value).endswith("(and 1,400 more)")


def test_a_model_may_be_left_out() -> None:
    """Lines without a model go with lines of any one."""
    assert check(chat("a") + chat("b", model="m") + chat("c", model=None)) == BatchFile(
        CHAT, "m", 3
    )
    assert check(text()) == BatchFile(COMPLETIONS, None, 1)


# The bodies


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"max_tokens": 5}, {"max_tokens": 5}),
        ({"max_completion_tokens": 5}, {"max_tokens": 5}),
        ({"max_tokens": 5, "max_completion_tokens": 5}, {"max_tokens": 5}),
        ({"temperature": 1}, {"temperature": 1}),
        ({"temperature": None, "max_tokens": None, "audio": None}, {}),
        ({"n": 3, "top_p": 0.5}, {"n": 3, "top_p": 0.5}),
        ({"stop": "\n"}, {"stop": ("\n",)}),
        ({"stop": ["a", "b"]}, {"stop": ("a", "b")}),
        ({"seed": 9}, {"seed": 9}),
        ({"seed": -1}, {"seed": 2**64 - 1}),
        ({"seed": -(2**63)}, {"seed": 2**63}),
        ({"logit_bias": {"5": -100}}, {"logit_bias": {5: -100.0}}),
        ({"presence_penalty": 1, "frequency_penalty": -1},
         {"presence_penalty": 1, "frequency_penalty": -1}),
        ({"logprobs": True, "top_logprobs": 20}, {"logprobs": True, "top_logprobs": 20}),
        ({"logprobs": False}, {}),
        ({"top_k": -1, "min_p": 0.1}, {"top_k": 0, "min_p": 0.1}),
        ({"repetition_penalty": 1.1}, {"repeat_penalty": 1.1}),
        ({"repeat_penalty": 1.1, "repetition_penalty": 1.1}, {"repeat_penalty": 1.1}),
        ({"ignore_eos": True, "max_reasoning_tokens": 3},
         {"ignore_eos": True, "max_reasoning_tokens": 3}),
        ({"stream": False, "stream_options": None, "response_format": {"type": "text"},
          "user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto",
          "safety_identifier": "s", "prompt_cache_key": "k", "parallel_tool_calls": True,
          "tool_choice": "auto", "model": "m"}, {}),
    ],
)  # fmt: skip
def test_parameters_of_a_chat(body: dict[str, Any], expected: dict[str, Any]) -> None:
    """Each becomes the parameter it means; the run's own stand where nothing is said."""
    assert request(chat(**body)).params == replace(DEFAULTS, **expected)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"logprobs": 0}, {"logprobs": True}),
        ({"logprobs": 5}, {"logprobs": True, "top_logprobs": 5}),
        ({"echo": False, "suffix": None, "best_of": 1}, {}),
        ({"n": 2, "best_of": 2}, {"n": 2}),
    ],
)
def test_parameters_of_a_completion(body: dict[str, Any], expected: dict[str, Any]) -> None:
    """Here `logprobs` is the number of tokens, and there may be no further candidates."""
    assert request(text(**body)).params == replace(DEFAULTS, **expected)


def test_prompts_of_completions_are_raw() -> None:
    """A string, or the only one of a list, is taken as it is, with or without --raw."""
    for prompt in ("<s> x\n", ["<s> x\n"]):
        for is_chat in (True, False):
            found = request(text(prompt=prompt), chat=is_chat)
            assert (found.prompt, found.messages) == ("<s> x\n", None)


def test_messages_of_a_chat() -> None:
    """Text parts are joined, a developer is the system, and what else a message has is kept."""
    messages = [
        {"role": "developer", "content": "d"},
        {"role": "user", "name": "n", "content": [{"type": "text", "text": t} for t in "ab"]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
        {"role": "tool", "tool_call_id": "1", "content": "r"},
    ]
    found = request(line({"messages": messages}), system="s")
    expected = [
        {"role": "system", "content": "d"}, {"role": "user", "name": "n", "content": "a\nb"},
        *messages[2:],
    ]  # fmt: skip
    assert found.messages == expected


def test_a_system_message_of_the_run_goes_before_a_chat() -> None:
    """As for any row of messages that has none."""
    assert request(chat(), system="s").messages == [{"role": "system", "content": "s"}, USER]


def test_tools_and_template_variables() -> None:
    """Both are for the template; `tool_choice` "none" takes the tools away."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"tools": tools, "chat_template_kwargs": {"enable_thinking": False}}
    found = request(chat(**body))
    assert (found.tools, found.template_args) == (tools, {"enable_thinking": False})
    assert request(chat(**body, tool_choice="none")).tools is None


BAD_BODIES = [
    (line({}), "messages", "missing_required_parameter"),
    (line({"messages": "x"}), "messages", "invalid_value"),
    (line({"messages": []}), "messages", "invalid_value"),
    (line({"messages": ["x"]}), "messages[0]", "invalid_value"),
    (line({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
     "messages[0].content[0]", "invalid_value"),
    (chat(prompt="x"), "prompt", "unsupported_parameter"),
    (chat(max_tokens=0), "max_tokens", "invalid_value"),
    (chat(max_completion_tokens=0), "max_completion_tokens", "invalid_value"),
    (chat(max_tokens=1, max_completion_tokens=2), "max_completion_tokens", "invalid_value"),
    (chat(repetition_penalty=-1), "repetition_penalty", "invalid_value"),
    (chat(temperature="1"), "temperature", "invalid_value"),
    (chat(n=129), "n", "invalid_value"),
    (chat(seed=-(2**63) - 1), "seed", "invalid_value"),
    (chat(seed=2**64), "seed", "invalid_value"),
    (chat(logprobs=2), "logprobs", "invalid_value"),
    (chat(logprobs=True, top_logprobs=21), "top_logprobs", "invalid_value"),
    (chat(top_logprobs=1), "top_logprobs", "invalid_value"),
    (chat(model=7), "model", "invalid_value"),
    (chat(stream=True), "stream", "unsupported_parameter"),
    (chat(stream_options={}), "stream_options", "unsupported_parameter"),
    (chat(response_format={"type": "json_object"}), "response_format", "unsupported_parameter"),
    (chat(tool_choice="required"), "tool_choice", "unsupported_parameter"),
    (chat(tools="x"), "tools", "invalid_value"),
    (chat(chat_template_kwargs=[]), "chat_template_kwargs", "invalid_value"),
    (chat(echo=False), "echo", "unsupported_parameter"),
    (chat(reasoning_effort="low"), "reasoning_effort", "unsupported_parameter"),
    (chat(temprature=1), "temprature", "unknown_parameter"),
    (chat(temprature=None), "temprature", "unknown_parameter"),
    (chat(stop="\ud800"), "stop", "invalid_value"),
    (line({"messages": [USER]}, priority=1), "priority", "unknown_parameter"),
    (line({}, url=COMPLETIONS), "prompt", "missing_required_parameter"),
    (text(prompt=""), "prompt", "invalid_value"),
    (text(prompt=["a", "b"]), "prompt", "invalid_value"),
    (text(prompt=[1, 2]), "prompt", "invalid_value"),
    (text(prompt=[[1, 2]]), "prompt", "invalid_value"),
    (text(prompt=7), "prompt", "invalid_value"),
    (text(messages=[USER]), "messages", "unsupported_parameter"),
    (text(logprobs=6), "logprobs", "invalid_value"),
    (text(logprobs=True), "logprobs", "invalid_value"),
    (text(echo=True), "echo", "unsupported_parameter"),
    (text(suffix="x"), "suffix", "unsupported_parameter"),
    (text(best_of=2), "best_of", "unsupported_parameter"),
    (text(best_of=True), "best_of", "unsupported_parameter"),
    (text(tools=[]), "tools", "unsupported_parameter"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "field", "code"), BAD_BODIES)
def test_a_bad_body_costs_its_row(data: bytes, field: str, code: str) -> None:
    """The file is accepted; the row is an error that names the field as the body has it."""
    assert check(data) is not None
    found_field, found_code, message = failure(data)
    assert (found_field, found_code) == (field, code)
    assert message is not None
    assert message.startswith(f"{field}: ")
    assert message.isprintable()


@pytest.mark.parametrize("data", [line({}, url=[]), line({}, url="/v1/embeddings"), line("x")])
def test_rows_of_a_file_that_was_not_checked_are_errors(data: bytes) -> None:
    """What is to be refused as a line is an error where rows are read all the same."""
    assert failure(data)[:2] == ("body", "invalid_request")


def test_an_unknown_parameter_has_a_hint() -> None:
    """A misspelt name is told the one that is like it."""
    expected = "max_completion_token: unknown parameter; did you mean 'max_completion_tokens'?"
    assert failure(chat(max_completion_token=1))[2] == expected


def test_a_member_given_twice_is_an_error_of_its_row() -> None:
    """It is JSON all the same, so the file is accepted."""
    data = chat(top_p=1).replace(b'"top_p": 1', b'"top_p": 1, "top_p": 1')
    assert check(data) is not None
    assert failure(data)[2] == "top_p: is given more than once"


def test_chats_need_the_template() -> None:
    """With --raw, messages are an error of the row."""
    (item,) = read(chat(), chat=False)
    assert isinstance(item, Completion)
    assert item.error == "messages: need the model's chat template; leave out --raw"


@pytest.mark.parametrize(
    ("url", "module", "name"),
    [(CHAT, chat_params, "CompletionCreateParamsBase"),
     (COMPLETIONS, completions_params, "CompletionCreateParamsBase")],
)  # fmt: skip
def test_every_official_field_is_known(url: str, module: Any, name: str) -> None:
    """Null is accepted for each field that the official library has, whatever it means."""
    names = set(get_type_hints(getattr(module, name))) | {"stream"}
    assert len(names) > 15
    body = dict.fromkeys(names - {"messages", "prompt"})
    full = chat(**body) if url == CHAT else text(**body)
    assert isinstance(read(full)[0], Request)


# Laws

sampling = {
    "temperature": st.floats(0, 2), "top_p": st.floats(0.01, 1), "n": st.integers(1, 128),
    "max_tokens": st.integers(1, 2**31 - 1), "seed": st.integers(-(2**63), 2**64 - 1),
    "stop": st.one_of(st.text(min_size=1), st.lists(st.text(min_size=1), max_size=4)),
    "presence_penalty": st.floats(-2, 2), "frequency_penalty": st.floats(-2, 2),
    "logit_bias": st.dictionaries(st.integers(0, 10**6).map(str), st.integers(-100, 100)),
    "user": st.text(), "stream": st.just(False), "model": st.just("m"), "stream_options": st.none(),
    "top_k": st.integers(-1, 1000), "min_p": st.floats(0, 1), "ignore_eos": st.booleans(),
    "max_reasoning_tokens": st.integers(0, 1000), "repetition_penalty": st.floats(0.01, 2),
}  # fmt: skip
for_chat = {
    "logprobs": st.just(True), "response_format": st.just({"type": "text"}),
    "metadata": st.dictionaries(st.text(), st.text()), "store": st.booleans(),
    "service_tier": st.sampled_from(["auto", "default", "flex"]),
    "prompt_cache_key": st.text(), "safety_identifier": st.text(),
    "tool_choice": st.sampled_from(["auto", "none"]), "parallel_tool_calls": st.booleans(),
    "tools": st.lists(st.just({"type": "function", "function": {"name": "f"}})),
    "chat_template_kwargs": st.dictionaries(st.text(), st.booleans()),
}  # fmt: skip
for_text = {"logprobs": st.integers(0, 5), "echo": st.just(False), "suffix": st.none()}


def bodies(more: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    fields = {name: st.none() | values for name, values in {**sampling, **more}.items()}
    return st.fixed_dictionaries({}, optional=fields)


@given(bodies(for_chat), bodies(for_text))
def test_any_body_of_valid_fields_is_accepted(
    chat_body: dict[str, Any], text_body: dict[str, Any]
) -> None:
    """Whatever fields come together, each in OpenAI's range or null, it is a request."""
    for body, make in ((chat_body, chat), (text_body, text)):
        data = make(**body)
        assert check(data) is not None
        found = request(data)
        seed = body.get("seed")
        assert found.params.seed == (DEFAULTS.seed if seed is None else seed % 2**64)


known = openai_batch._FIELDS[CHAT] | openai_batch._FIELDS[COMPLETIONS] | openai_batch._UNSUPPORTED


@given(
    bodies(for_chat),
    st.text(st.characters(min_codepoint=33, codec="utf-8"), min_size=1, max_size=60)
    .filter(str.isprintable).filter(lambda name: name not in known),
    st.none() | st.integers() | st.text(),
)  # fmt: skip
def test_each_unknown_field_is_named(body: dict[str, Any], name: str, value: object) -> None:
    """A field that is not known is an error of its row, also if it is null."""
    body = {**body, name: value}
    assert failure(line({"messages": [USER], **body}))[:2] == (name, "unknown_parameter")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=4,
)


@given(
    st.lists(
        st.fixed_dictionaries(
            {},
            optional={
                "custom_id": st.sampled_from(["a", "b", "", 1, None]),
                "method": st.sampled_from(["POST", "GET", 1]),
                "url": st.sampled_from([CHAT, COMPLETIONS, "x", None, []]),
                "body": json_values
                | st.dictionaries(st.sampled_from(sorted(known)), json_values, max_size=3),
            },
        ),
        min_size=1,
        max_size=4,
    )
)
def test_any_lines_are_refused_or_become_rows(rows: list[dict[str, Any]]) -> None:
    """Nothing but `BatchFileError` is raised, and each line of an accepted file has its item."""
    data = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    try:
        batch, bad = check(data), []
    except BatchFileError as error:
        batch, bad = None, error.errors
    assert all(error.message.isprintable() for error in bad)
    assert {error.line for error in bad} <= set(range(1, len(rows) + 1))
    items = read(data)
    assert len(items) == len(rows)
    if batch is not None:
        assert [item.id for item in items] == [row["custom_id"] for row in rows]
