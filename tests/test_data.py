"""What the data layer refuses, and in which words; what it accepts."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest

from localbatch.data.config import EngineConfig, FlashAttention, KVLayout, SchedulerConfig
from localbatch.data.errors import ConfigError, DecodeError, EngineError, InputError
from localbatch.data.request import (
    Completion,
    FinishReason,
    Request,
    Timings,
    Usage,
    failed_completion,
)
from localbatch.data.sampling_params import PARAMETER_NAMES, SamplingParams

HALF_A_PAIR = "x\ud800"
"""What JSON can say and UTF-8 can't."""

BAD_PARAMS: list[tuple[str, object, str]] = [
    ("max_tokens", 0, "must be from 1 to 2147483647, not 0"),
    ("max_tokens", -1, "must be from 1 to 2147483647, not -1"),
    ("max_tokens", 2**31, "must be from 1 to 2147483647, not 2147483648"),
    ("max_tokens", 1.0, "must be a whole number, not 1.0"),
    ("max_tokens", True, "must be a whole number, not True"),
    ("max_tokens", "5", "must be a whole number, not '5'"),
    ("max_tokens", None, "must be a whole number, not None"),
    ("temperature", -0.1, "must be from 0 to 100, not -0.1"),
    ("temperature", 100.5, "must be from 0 to 100, not 100.5"),
    ("temperature", math.nan, "must be from 0 to 100, not nan"),
    ("temperature", math.inf, "must be from 0 to 100, not inf"),
    ("temperature", "hot", "must be a number, not 'hot'"),
    ("temperature", False, "must be a number, not False"),
    ("top_k", -1, "must be from 0 to 2147483647, not -1"),
    ("top_k", 0.5, "must be a whole number, not 0.5"),
    ("top_p", 0, "must be above 0 and at most 1, not 0"),
    ("top_p", 0.0, "must be above 0 and at most 1, not 0.0"),
    ("top_p", 1.01, "must be above 0 and at most 1, not 1.01"),
    ("top_p", math.nan, "must be above 0 and at most 1, not nan"),
    ("min_p", -0.01, "must be from 0 to 1, not -0.01"),
    ("min_p", 1.5, "must be from 0 to 1, not 1.5"),
    ("min_p", [], "must be a number, not []"),
    ("seed", -1, "must be from 0 to 18446744073709551615, not -1"),
    ("seed", 2**64, "must be from 0 to 18446744073709551615, not 18446744073709551616"),
    ("seed", 1.5, "must be a whole number, not 1.5"),
    ("repeat_penalty", 0.0, "must be above 0 and at most 100, not 0.0"),
    ("repeat_penalty", 101, "must be above 0 and at most 100, not 101"),
    ("presence_penalty", -100.5, "must be from -100 to 100, not -100.5"),
    ("presence_penalty", 101, "must be from -100 to 100, not 101"),
    ("frequency_penalty", 101, "must be from -100 to 100, not 101"),
    ("frequency_penalty", None, "must be a number, not None"),
    ("penalty_last_n", -2, "must be from -1 to 2147483647, not -2"),
    ("penalty_last_n", 64.0, "must be a whole number, not 64.0"),
    ("ignore_eos", 1, "must be true or false, not 1"),
    ("ignore_eos", "yes", "must be true or false, not 'yes'"),
    ("stop", "", "must be a non-empty string or a list of them, not ('',)"),
    ("stop", ["a", ""], "must be a non-empty string or a list of them, not ['a', '']"),
    ("stop", [1], "must be a non-empty string or a list of them, not [1]"),
    ("stop", 5, "must be a non-empty string or a list of them, not 5"),
    ("stop", {"a": 1}, "must be a non-empty string or a list of them, not {'a': 1}"),
    ("logit_bias", [1, 2], "must map token ids to numbers, not [1, 2]"),
    ("logit_bias", "5", "must map token ids to numbers, not '5'"),
    ("logit_bias", {"five": 1.0}, "'five' is not a token id"),
    ("logit_bias", {"": 1.0}, "'' is not a token id"),
    ("logit_bias", {"-1": 1.0}, "'-1' is not a token id"),
    ("logit_bias", {" 5": 1.0}, "' 5' is not a token id"),
    ("logit_bias", {"1_0": 1.0}, "'1_0' is not a token id"),
    ("logit_bias", {"\u0665": 1.0}, "'\u0665' is not a token id"),
    ("logit_bias", {"1.5": 1.0}, "'1.5' is not a token id"),
    ("logit_bias", {"11111111111": 1.0}, "'11111111111' is not a token id"),
    ("logit_bias", {-1: 1.0}, "-1 is not a token id"),
    ("logit_bias", {1.5: 1.0}, "1.5 is not a token id"),
    ("logit_bias", {math.inf: 1.0}, "inf is not a token id"),
    ("logit_bias", {True: 1.0}, "True is not a token id"),
    ("logit_bias", {None: 1.0}, "None is not a token id"),
    ("logit_bias", {5: "1"}, "the bias of token 5 must be a number, not '1'"),
    ("logit_bias", {5: True}, "the bias of token 5 must be a number, not True"),
    ("logit_bias", {"5": None}, "the bias of token 5 must be a number, not None"),
    ("logit_bias", {5: math.nan}, "the bias of token 5 must be -inf or from -1e9 to 1e9, not nan"),
    ("logit_bias", {5: math.inf}, "the bias of token 5 must be -inf or from -1e9 to 1e9, not inf"),
    ("n", 0, "must be from 1 to 128, not 0"),
    ("n", 129, "must be from 1 to 128, not 129"),
    ("n", True, "must be a whole number, not True"),
    ("logprobs", 1, "must be true or false, not 1"),
    ("top_logprobs", 21, "must be from 0 to 20, not 21"),
    ("top_logprobs", 1, "goes with 'logprobs': true"),
    ("max_reasoning_tokens", -1, "must be from 0 to 2147483647, not -1"),
    ("max_reasoning_tokens", 1.5, "must be a whole number, not 1.5"),
    (
        "logit_bias",
        {5: 2e9},
        "the bias of token 5 must be -inf or from -1e9 to 1e9, not 2000000000.0",
    ),
]
"""Field, value, and the message without the field's name."""


class TestSamplingParams:
    def test_defaults_are_greedy(self) -> None:
        """Without settings, a row takes the likeliest token, 512 times at most."""
        params = SamplingParams()
        assert params.max_tokens == 512
        assert params.temperature == 0.0
        assert params.is_greedy

    @pytest.mark.parametrize(("name", "value", "message"), BAD_PARAMS)
    def test_refuses(self, name: str, value: object, message: str) -> None:
        """A value out of range is refused in one line that names the field."""
        values: dict[str, Any] = {name: value}
        with pytest.raises(ConfigError) as caught:
            SamplingParams(**values)
        assert f"{name}: {message}" == str(caught.value)

    def test_table_covers_every_field(self) -> None:
        """A field without a bad value above would not be tested."""
        assert {name for name, _, _ in BAD_PARAMS} == set(PARAMETER_NAMES)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("max_tokens", 1),
            ("max_tokens", 2**31 - 1),
            ("temperature", 0),
            ("temperature", 100),
            ("top_k", 0),
            ("top_p", 1),
            ("top_p", 1e-9),
            ("min_p", 0),
            ("min_p", 1.0),
            ("seed", 0),
            ("seed", 2**64 - 1),
            ("repeat_penalty", 100),
            ("presence_penalty", -100),
            ("frequency_penalty", 100.0),
            ("penalty_last_n", -1),
            ("penalty_last_n", 0),
            ("ignore_eos", True),
        ],
    )
    def test_accepts_the_bounds(self, name: str, value: object) -> None:
        """The ends of each range belong to it."""
        values: dict[str, Any] = {name: value}
        assert value == getattr(SamplingParams(**values), name)

    @pytest.mark.parametrize(
        ("given", "expected"),
        [
            (None, ()),
            ([], ()),
            ("END", ("END",)),
            (["a", "b"], ("a", "b")),
            (("a",), ("a",)),
        ],
    )
    def test_stop_takes_a_string_or_a_list(self, given: Any, expected: tuple[str, ...]) -> None:
        """Whatever form it is given in, `stop` is a tuple afterwards."""
        assert expected == SamplingParams(stop=given).stop

    @pytest.mark.parametrize(
        ("given", "expected"),
        [
            (None, {}),
            ({}, {}),
            ({"5": 1}, {5: 1.0}),
            ({5: -1.5}, {5: -1.5}),
            ({"0": -math.inf}, {0: -math.inf}),
            ({"007": 1e9}, {7: 1e9}),
        ],
    )
    def test_logit_bias_takes_string_keys(self, given: Any, expected: dict[int, float]) -> None:
        """JSON has string keys only; afterwards they are token ids, and biases are floats."""
        biases = SamplingParams(logit_bias=given).logit_bias
        assert expected == biases
        assert all(type(bias) is float for bias in biases.values())

    @pytest.mark.parametrize(
        ("changes", "is_greedy", "changes_logits", "penalizes"),
        [
            ({}, True, False, False),
            ({"top_k": 1, "top_p": 0.5, "min_p": 0.5}, True, False, False),
            ({"temperature": 0.1}, False, False, False),
            ({"logit_bias": {"5": 1}}, False, True, False),
            ({"repeat_penalty": 1.1}, False, True, True),
            ({"presence_penalty": -0.5}, False, True, True),
            ({"frequency_penalty": 0.5}, False, True, True),
            ({"repeat_penalty": 1.1, "penalty_last_n": 0}, True, False, False),
            ({"temperature": 1, "penalty_last_n": 0}, False, False, False),
        ],
    )
    def test_knows_what_it_changes(
        self, changes: dict[str, Any], is_greedy: bool, changes_logits: bool, penalizes: bool
    ) -> None:
        """A plain argmax is taken only if nothing touches the logits and nothing is drawn."""
        params = SamplingParams(**changes)
        assert is_greedy == params.is_greedy
        assert changes_logits == params.changes_logits
        assert penalizes == params.penalizes


class TestUpdated:
    def test_returns_a_changed_copy(self) -> None:
        """The original stays as it was."""
        params = SamplingParams(max_tokens=5, seed=3)
        assert params.updated({"max_tokens": 6}) == SamplingParams(max_tokens=6, seed=3)
        assert params == SamplingParams(max_tokens=5, seed=3)

    def test_nothing_to_change(self) -> None:
        """Without changes the copy is equal."""
        assert SamplingParams(seed=3).updated({}) == SamplingParams(seed=3)

    @pytest.mark.parametrize(
        ("name", "hint"),
        [
            ("max_token", "; did you mean 'max_tokens'?"),
            ("temprature", "; did you mean 'temperature'?"),
            ("topk", "; did you mean 'top_k'?"),
            ("logit_biases", "; did you mean 'logit_bias'?"),
            ("colour", ""),
            ("", ""),
        ],
    )
    def test_unknown_name(self, name: str, hint: str) -> None:
        """A name that isn't one is refused, with the nearest that is if any is near."""
        with pytest.raises(InputError) as caught:
            SamplingParams().updated({name: 1})
        assert f"{name}: unknown parameter{hint}" == str(caught.value)
        assert name == caught.value.field

    @pytest.mark.parametrize(("name", "value", "message"), BAD_PARAMS)
    def test_bad_value(self, name: str, value: object, message: str) -> None:
        """The words are those of the constructor; the field is apart from the message."""
        with pytest.raises(InputError) as caught:
            SamplingParams().updated({name: value})
        assert name == caught.value.field
        assert message == caught.value.message


BAD_REQUESTS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "prompt", "needs 'prompt' or 'messages'"),
    (
        {"prompt": "hi", "messages": [{"role": "user", "content": "hi"}]},
        "prompt",
        "give 'prompt' or 'messages', not both",
    ),
    ({"prompt": ""}, "prompt", "is empty"),
    ({"prompt": " \n\t"}, "prompt", "is empty"),
    ({"prompt": 5}, "prompt", "must be a string, not int"),
    ({"prompt": ["hi"]}, "prompt", "must be a string, not list"),
    ({"prompt": HALF_A_PAIR}, "prompt", "holds half a surrogate pair, not text"),
    ({"messages": []}, "messages", "is empty"),
    ({"messages": "hi"}, "messages", "must be a list of messages"),
    ({"messages": {"role": "user", "content": "hi"}}, "messages", "must be a list of messages"),
    ({"messages": ["hi"]}, "messages[0]", "must be an object with 'role' and 'content'"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role", "must be a non-empty string"),
    (
        {"messages": [{"role": "", "content": "hi"}]},
        "messages[0].role",
        "must be a non-empty string",
    ),
    (
        {"messages": [{"role": 1, "content": "hi"}]},
        "messages[0].role",
        "must be a non-empty string",
    ),
    (
        {"messages": [{"role": HALF_A_PAIR, "content": "hi"}]},
        "messages[0].role",
        "holds half a surrogate pair, not text",
    ),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "must be a string, not NoneType"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0]",
        "must be an object of type 'text'; no other is supported",
    ),
    (
        {"messages": [{"role": "user", "content": "hi"}, {"role": "user", "content": HALF_A_PAIR}]},
        "messages[1].content",
        "holds half a surrogate pair, not text",
    ),
    (
        {"messages": [{"role": "system", "content": ""}, {"role": "user", "content": " "}]},
        "messages",
        "all contents are empty",
    ),
]
"""Arguments, and the field and the message of the error."""


class TestRequest:
    @pytest.mark.parametrize(("arguments", "field", "message"), BAD_REQUESTS)
    def test_refuses(self, arguments: dict[str, Any], field: str, message: str) -> None:
        """What is no work is refused, naming the field down to the message."""
        with pytest.raises(InputError) as caught:
            Request("a", 0, **arguments)
        assert field == caught.value.field
        assert message == caught.value.message
        assert f"{field}: {message}" == str(caught.value)

    @pytest.mark.parametrize(
        "arguments",
        [
            {"prompt": "hi"},
            {"prompt": " \u00e9\U0001f600\0"},
            {"messages": [{"role": "user", "content": "hi"}]},
            {"messages": [{"role": "assistant", "content": ""}, {"role": "x", "content": "y"}]},
        ],
    )
    def test_accepts(self, arguments: dict[str, Any]) -> None:
        """Any text is a prompt; any role is left to the model's chat template."""
        request = Request("a", 0, **arguments)
        assert arguments == {name: getattr(request, name) for name in arguments}

    def test_messages_may_be_any_sequence(self) -> None:
        """And contents in parts become text, joined by line ends."""
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        request = Request("a", 0, messages=({"role": "user", "content": parts},))
        assert request.messages == [{"role": "user", "content": "a\nb"}]

    def test_survives_the_way_to_the_worker(self) -> None:
        """Requests are pickled on their way to the worker process."""
        request = Request(7, 3, "hi", params=SamplingParams(stop=("x",), logit_bias={5: 1.0}))
        assert request == pickle.loads(pickle.dumps(request))


class TestCompletion:
    def test_failed_row(self) -> None:
        """A row that could not be computed has its error and no text."""
        completion = failed_completion("a", 4, "prompt: is empty", 5)
        assert completion == Completion(
            "a", 4, "", FinishReason.ERROR, Usage(), Timings(), (), "prompt: is empty", 5
        )
        assert completion.failed

    @pytest.mark.parametrize(
        "reason", [FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORTED]
    )
    def test_other_ends_are_no_failure(self, reason: FinishReason) -> None:
        """Only an error makes a row a failed one."""
        assert not Completion("a", 0, "text", reason).failed


class TestErrors:
    def test_input_error_without_a_field(self) -> None:
        """An error of a whole line is its message alone."""
        assert str(InputError("is not JSON", line=3)) == "is not JSON"

    def test_decode_error_survives_the_way_from_the_worker(self) -> None:
        """The code of `llama_decode` is kept when the error is pickled."""
        error = pickle.loads(pickle.dumps(DecodeError("no room in the KV cache", 1)))
        assert isinstance(error, DecodeError)
        assert isinstance(error, EngineError)
        assert str(error) == "no room in the KV cache"
        assert error.code == 1


class TestEngineConfig:
    def test_leaves_sizes_open(self) -> None:
        """Only the model must be named."""
        config = EngineConfig("m.gguf")
        assert [config.ctx, config.parallel, config.threads, config.kv_cells] == [None] * 4
        assert config.kv_layout == KVLayout.STREAMS
        assert config.flash_attention == FlashAttention.AUTO

    @pytest.mark.parametrize(
        ("name", "low", "high"),
        [
            ("ctx", 8, 16777216),
            ("parallel", 1, 256 * 64),
            ("lanes", 1, 64),
            ("ubatch", 32, 2**20),
            ("threads", 1, 512),
            ("gpu_layers", -1, 10000),
            ("kv_cells", 8, 2147483647),
        ],
    )
    def test_bounds(self, name: str, low: int, high: int) -> None:
        """The ends of a range are accepted; one beyond, and what is no whole number, is not."""

        def config(value: Any) -> EngineConfig:
            changes: dict[str, Any] = {name: value}
            layout = KVLayout.UNIFIED if name == "kv_cells" else KVLayout.STREAMS
            return EngineConfig("m", kv_layout=layout, **changes)

        for value in (low, high):
            assert value == getattr(config(value), name)
        for bad in (low - 1, high + 1, True, float(high), "8"):
            with pytest.raises(ConfigError) as caught:
                config(bad)
            expected = f"{name}: must be a whole number from {low} to {high}, not {bad!r}"
            assert expected == str(caught.value)

    def test_unknown_backend(self) -> None:
        """There are two backends."""
        with pytest.raises(ConfigError) as caught:
            EngineConfig("m", backend="vllm")
        assert str(caught.value) == "backend: must be 'llama' or 'fake', not 'vllm'"

    def test_lanes_need_streams(self) -> None:
        """A pool that all rows share is in one context."""
        with pytest.raises(
            ConfigError, match=r"^lanes: more than one goes with the streams layout"
        ):
            EngineConfig("m", kv_layout=KVLayout.UNIFIED, lanes=2)

    def test_chunks_end_at_multiples_of_four(self) -> None:
        """Where prompts may be cut without a change of bits."""
        with pytest.raises(ConfigError, match=r"^ubatch: must be a multiple of 4, not 33"):
            EngineConfig("m", ubatch=33)

    def test_shared_cells_need_the_shared_layout(self) -> None:
        """`kv_cells` means nothing in streams, so it is refused there."""
        with pytest.raises(ConfigError) as caught:
            EngineConfig("m", kv_cells=1024)
        assert str(caught.value) == "kv_cells: goes with the unified layout only"


class TestSchedulerConfig:
    def test_defaults(self) -> None:
        """Streams, chunks of 512, four of them in a step."""
        config = SchedulerConfig(num_slots=2, row_cells=64)
        assert [config.pool_cells, config.chunk, config.max_step_tokens] == [None, 512, 2048]

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"num_slots": 0}, "num_slots: must be a whole number from 1 to 256, not 0"),
            ({"num_slots": 257}, "num_slots: must be a whole number from 1 to 256, not 257"),
            ({"row_cells": 0}, "row_cells: must be a whole number from 1 to 2147483647, not 0"),
            ({"row_cells": 8.0}, "row_cells: must be a whole number from 1 to 2147483647, not 8.0"),
            ({"chunk": 0}, "chunk: must be a whole number from 1 to 2147483647, not 0"),
            (
                {"chunk": 8, "max_step_tokens": 7},
                "max_step_tokens: must be a whole number from 8 to 2147483647, not 7",
            ),
            (
                {"row_cells": 64, "pool_cells": 63},
                "pool_cells: must be a whole number from 64 to 2147483647, not 63",
            ),
        ],
    )
    def test_bounds(self, changes: dict[str, Any], message: str) -> None:
        """A step must hold a chunk, and the pool a row, or the work could not end."""
        values: dict[str, Any] = {"num_slots": 2, "row_cells": 64, **changes}
        with pytest.raises(ConfigError) as caught:
            SchedulerConfig(**values)
        assert message == str(caught.value)

    def test_least_that_works(self) -> None:
        """One slot of one cell that is the whole pool, and one token a step."""
        config = SchedulerConfig(1, 1, pool_cells=1, chunk=1, max_step_tokens=1)
        assert [config.row_cells, config.pool_cells] == [1, 1]
