from __future__ import annotations

import io
import json
import sys
import tracemalloc
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localbatch.data.errors import ConfigError, InputError
from localbatch.data.request import Completion, FinishReason, Request
from localbatch.data.sampling_params import PARAMETER_NAMES, SamplingParams
from localbatch.formats import lines
from localbatch.formats.inputs import (
    BadRow,
    InputFormat,
    InputOptions,
    InputSource,
    open_input,
    read_requests,
)

DEFAULTS = SamplingParams(max_tokens=7, temperature=0.5)
MIB = 2**20


class Chunks(io.RawIOBase):
    """A file that is made up while it is read."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = iter(chunks)
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._rest = self._rest or next(self._chunks, b"")
        count = min(len(buffer), len(self._rest))
        buffer[:count], self._rest = self._rest[:count], self._rest[count:]
        return count


def source(data: bytes | Iterable[bytes], input_format: InputFormat | None) -> InputSource:
    raw = io.BytesIO(data) if isinstance(data, bytes) else io.BufferedReader(Chunks(data))
    return InputSource(cast(BinaryIO, raw), input_format, "rows")


def read(
    data: bytes,
    input_format: InputFormat | None = InputFormat.JSONL,
    *,
    chat: bool = False,
    system: str | None = None,
) -> list[Request | BadRow]:
    return list(read_requests(source(data, input_format), DEFAULTS, InputOptions(chat, system)))


def jsonl(*rows: object) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def one_request(row: object, *, chat: bool = False, system: str | None = None) -> Request:
    (item,) = read(jsonl(row), chat=chat, system=system)
    assert isinstance(item, Request), item
    return item


def errors(items: Iterable[Request | BadRow]) -> list[str | None]:
    return [item.error if isinstance(item, Completion) else None for item in items]


def is_blank(line: bytes) -> bool:
    try:
        return not line.decode().strip()
    except UnicodeDecodeError:
        return False


def num_rows(data: bytes) -> int:
    text = data.removeprefix(b"\xef\xbb\xbf")
    return sum(not is_blank(line) for line in text.split(b"\n"))


# The format


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.txt", InputFormat.TXT),
        ("a.TXT", InputFormat.TXT),
        ("a.jsonl", InputFormat.JSONL),
        ("a.ndjson", InputFormat.JSONL),
        ("a.txt.JSONL", InputFormat.JSONL),
    ],
)
def test_the_suffix_tells_the_format(tmp_path: Path, name: str, expected: InputFormat) -> None:
    """The last suffix decides, in capitals too, and the file is closed afterwards."""
    path = tmp_path / name
    path.write_bytes(b"")
    with open_input(str(path)) as opened:
        assert expected == opened.format
        assert str(path) == opened.name
    assert opened.stream.closed


@pytest.mark.parametrize("path", ["a.xls", "a", "a.gz", "a.pdf.gz", "", ".txt", "folder.txt/a"])
def test_another_suffix_is_refused(path: str) -> None:
    """The error names the suffixes that are known, whether the file is there or not."""
    with pytest.raises(ConfigError) as caught, open_input(path):
        pass
    expected = (
        f"{path}: must end in one of .txt, .jsonl, .ndjson, .csv, .tsv, .parquet (.gz and .zst may "
        "follow), be a folder or a pattern like 'notes/*.md', or be '-' for standard input"
    )
    assert expected == str(caught.value)


def test_a_file_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    """A missing file and a loop of links are errors of one line that name the path."""
    missing, loop = tmp_path / "missing.txt", tmp_path / "loop.txt"
    loop.symlink_to(loop)
    reasons = ["No such file or directory", "Too many levels of symbolic links"]
    for path, reason in zip([missing, loop], reasons, strict=True):
        with pytest.raises(ConfigError) as caught, open_input(str(path)):
            pass
        assert f"{path}: can't be opened ({reason}); check the path" == str(caught.value)


def test_an_error_of_the_caller_passes_through(tmp_path: Path) -> None:
    """An OSError raised while the file is in use is not taken for one of opening it."""
    path = tmp_path / "a.txt"
    path.write_bytes(b"x")
    with pytest.raises(FileExistsError), open_input(str(path)) as opened:
        raise FileExistsError
    assert opened.stream.closed


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b'{"prompt": "x"}\n', "x"),
        (b'\xef\xbb\xbf\r\n \n\t{"prompt": "x"}\n', "x"),
        (b'\xef\xbb\xbf{"prompt": "x"}\n', "x"),
        (b'x {"prompt": "y"}\n', 'x {"prompt": "y"}'),
        (b"\n\n[1]", "[1]"),
    ],
)
def test_standard_input_is_sniffed(
    monkeypatch: pytest.MonkeyPatch, data: bytes, expected: str
) -> None:
    """The first line that isn't blank makes it JSONL if it starts with a brace, else txt."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    with open_input("-") as opened:
        (item,) = read_requests(opened, DEFAULTS, InputOptions(chat=False))
    assert isinstance(item, Request)
    assert expected == item.prompt
    assert not sys.stdin.buffer.closed


@pytest.mark.parametrize("start", [b'{"prompt": "\xff"}', b"{" + b"x" * 100])
def test_an_unusable_first_line_is_sniffed_too(
    monkeypatch: pytest.MonkeyPatch, start: bytes
) -> None:
    """A first line that is not UTF-8, or is too long, still tells the format."""
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 90)
    bad, good = read(start + b'\n{"prompt": "y"}', None)
    assert isinstance(bad, Completion)
    assert isinstance(good, Request)
    assert good.prompt == "y"


def test_closed_standard_input_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without standard input gets an error, not a crash."""
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ConfigError, match="standard input: is closed; name an input file"):
        open_input("-").__enter__()


# txt


def test_txt_lines_are_prompts() -> None:
    """Ids are line numbers, indexes count rows, inner and outer spaces stay, line ends go."""
    data = b'\xef\xbb\xbf  one  two \r\n\n \t\r\n{"prompt": 3}\n\xe3\x80\x80\nfour\ttab\rx'
    expected = [
        Request(1, 0, prompt="  one  two ", params=DEFAULTS, line=1),
        Request(4, 1, prompt='{"prompt": 3}', params=DEFAULTS, line=4),
        Request(6, 2, prompt="four\ttab\rx", params=DEFAULTS, line=6),
    ]
    assert expected == read(data, InputFormat.TXT)


# jsonl


def test_a_jsonl_row_has_its_own_parameters() -> None:
    """Parameters at top level go before the defaults; null means not given."""
    row = {"id": "a", "prompt": "x", "temperature": 0, "stop": "\n", "seed": None}
    expected = replace(DEFAULTS, temperature=0, stop=("\n",))
    assert expected == one_request(row).params


def test_every_parameter_can_be_given() -> None:
    """Any field of SamplingParams is a key of a row."""
    for name in PARAMETER_NAMES:
        assert one_request({"prompt": "x", name: None}).params == DEFAULTS


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "x"}, 1),
        ({"id": None, "prompt": "x"}, 1),
        ({"id": 0, "prompt": "x"}, 0),
        ({"id": "", "prompt": "x"}, ""),
        ({"id": "é", "prompt": "x"}, "é"),
        ({"id": -(10**200), "prompt": "x"}, -(10**200)),
    ],
)
def test_the_id_is_kept_as_given(row: object, expected: object) -> None:
    """Strings stay strings, numbers numbers; without an id, it is the line number."""
    request = one_request(row)
    assert expected == request.id
    assert type(expected) is type(request.id)


USER = {"role": "user", "content": "x"}
SYSTEM = {"role": "system", "content": "s"}
OWN = {"role": "system", "content": "own"}


@pytest.mark.parametrize(
    ("row", "system", "expected"),
    [
        ({"prompt": "x"}, None, [USER]),
        ({"prompt": "x"}, "s", [SYSTEM, USER]),
        ({"prompt": "x", "messages": None}, None, [USER]),
        ({"messages": [USER]}, None, [USER]),
        ({"messages": [USER], "prompt": None}, "s", [SYSTEM, USER]),
        ({"messages": [OWN, USER]}, "s", [OWN, USER]),
        ({"messages": [USER, OWN]}, "s", [USER, OWN]),
        ({"messages": [USER | {"name": "n"}]}, "s", [SYSTEM, USER | {"name": "n"}]),
    ],
)
def test_chat_rows_become_messages(row: object, system: str | None, expected: object) -> None:
    """A prompt becomes a user message; the system message goes where there is none."""
    request = one_request(row, chat=True, system=system)
    assert expected == request.messages
    assert request.prompt is None


def test_raw_prompts_stay_text() -> None:
    """Without chat, a prompt is taken as it is."""
    request = one_request({"prompt": " <s>x\n"}, chat=False)
    assert request.prompt == " <s>x\n"
    assert request.messages is None


BAD_ROWS = [
    # line, error, id of the record
    (b"{", "is not JSON: Expecting property name enclosed in double quotes at column 2", 1),
    (b"x", "is not JSON: Expecting value at column 1", 1),
    (b'{"prompt": "x"} x', "is not JSON: Extra data at column 17", 1),
    (b'{"prompt": "a\tb"}', "is not JSON: Invalid control character at at column 14", 1),
    (b'["x"]', "is not a JSON object with 'prompt' or 'messages'", 1),
    (b"NaN", "is not a JSON object with 'prompt' or 'messages'", 1),
    (b"{}", "prompt: needs 'prompt' or 'messages'", 1),
    (b'{"id": "a"}', "prompt: needs 'prompt' or 'messages'", "a"),
    (b'{"id": 5, "prompt": null}', "prompt: needs 'prompt' or 'messages'", 5),
    (b'{"id": "a", "prompt": ""}', "prompt: is empty", "a"),
    (b'{"id": "a", "prompt": " \\n"}', "prompt: is empty", "a"),
    (b'{"id": "a", "prompt": 1}', "prompt: must be a string, not int", "a"),
    (b'{"prompt": ["x"]}', "prompt: must be a string, not list", 1),
    (b'{"messages": "x"}', "messages: must be a list of messages", 1),
    (b'{"messages": []}', "messages: is empty", 1),
    (
        b'{"messages": [{"role": "user"}]}',
        "messages[0].content: must be a string, not NoneType",
        1,
    ),
    (
        b'{"prompt": "x", "messages": [{"role": "user", "content": "x"}]}',
        "prompt: give 'prompt' or 'messages', not both",
        1,
    ),
    (b'{"id": true, "prompt": "x"}', "id: must be a string or a whole number, not bool", 1),
    (b'{"id": 1.0, "prompt": "x"}', "id: must be a string or a whole number, not float", 1),
    (b'{"id": ["a"], "prompt": "x"}', "id: must be a string or a whole number, not list", 1),
    (b'{"id": "\\ud800", "prompt": "x"}', "id: holds half a surrogate pair, not text", 1),
    (b'{"prompt": "\\ud800"}', "prompt: holds half a surrogate pair, not text", 1),
    (b'{"prompt": "x", "stop": ["\\udfff"]}', "stop: holds half a surrogate pair, not text", 1),
    (
        b'{"messages": [{"role": "user", "content": "x", "\\ud800": 1}]}',
        "messages: holds half a surrogate pair, not text",
        1,
    ),
    (b'{"promt": "x"}', "promt: unknown key; did you mean 'prompt'?", 1),
    (b'{"id": 3, "prompt": "x", "temprature": 1}',
     "temprature: unknown key; did you mean 'temperature'?", 3),
    (b'{"prompt": "x", "zzz": 1}', "zzz: unknown key", 1),
    (b'{"prompt": "x", "\\ud800\\n\\u001b[2J": 1}', "\\ud800\\n\\x1b[2J: unknown key", 1),
    (b'{"id": "a", "prompt": "x", "temperature": -1}',
     "temperature: must be from 0 to 100, not -1", "a"),
    (b'{"prompt": "x", "max_tokens": "9"}', "max_tokens: must be a whole number, not '9'", 1),
    (b'{"prompt": "x", "ignore_eos": 1}', "ignore_eos: must be true or false, not 1", 1),
    (b'{"prompt": "x", "prompt": "x"}', "prompt: is given more than once", 1),
    (b'{"id": "a", "id": "b", "prompt": "x"}', "id: is given more than once", 1),
    (b'{"id": "a", "prompt": "x", "seed": 1, "seed": 1}', "seed: is given more than once", "a"),
    (
        b'{"id": "a", "messages": [{"role": "user", "role": "user", "content": "x"}]}',
        "role: is given more than once",
        "a",
    ),
    (b'{"id": "a", "prompt": "x", "min_p": NaN}', "is not JSON: NaN is no number there", "a"),
    (b'{"prompt": "x", "logit_bias": {"5": -Infinity}}',
     "is not JSON: -Infinity is no number there", 1),
    (b'{"prompt": "x", "top_p": Infinity, "id": 3}', "is not JSON: Infinity is no number there", 3),
    (b'{"id": ' + b"9" * 5000 + b', "prompt": "x"}',
     "holds a number of more than 300 digits", 1),
    (b'{"id": "a", "prompt": "x", "logit_bias": {"5": ' + b"9" * 301 + b"}}",
     "holds a number of more than 300 digits", "a"),
    (b'{"id": "a", "prompt": "x", "seed": ' + b"9" * 300 + b"}",
     "seed: must be from 0 to 18446744073709551615, not " + "9" * 300, "a"),
    (b'{"id": "a", "stop": ' + b"[" * 99 + b"]" * 99 + b"}",
     "stop: is nested deeper than 64 levels", "a"),
    (b'{"id": "a", "stop": ' + b"[" * 200_000 + b"}", "is nested deeper than 64 levels", 1),
    (b'{"prompt": "\xff"}', "is not UTF-8: byte 0xff at offset 12", 1),
    (b"\xef\xbb\xbf\xc3", "is not UTF-8: byte 0xc3 at offset 3", 1),
]  # fmt: skip


@pytest.mark.parametrize(("line", "message", "row_id"), BAD_ROWS)
def test_a_bad_row_is_a_record(line: bytes, message: str, row_id: object) -> None:
    """It says what is wrong, where, under the row's own id if there is one, and costs no other."""
    after = b'\r\n{"id": "after", "prompt": "x"}'
    for ending, expected_rest in [(b"", []), (b"\n", []), (after, [Request])]:
        bad, *rest = read(line + ending)
        expected = Completion(row_id, 0, "", FinishReason.ERROR, error=message, line=1)  # type: ignore[arg-type]
        assert bad.error_field is None or message.startswith(f"{bad.error_field}: ")
        assert (bad.error_field is None) == (bad.error_code == "invalid_json_line")
        bad = replace(bad, error_field=None, error_code=None)
        assert expected == bad
        assert expected_rest == [type(item) for item in rest]


def test_bad_rows_keep_their_line_and_place() -> None:
    """Line and index of a bad row count on from the rows and blank lines before it."""
    items = read(b'{"prompt": "x"}\n\n\xff\n{"id": "a"}\n\n{"prompt": "y"}')
    expected = [(1, 0, 1, Request), (3, 1, 3, Completion), ("a", 2, 4, Completion)]
    expected.append((6, 3, 6, Request))
    assert expected == [(item.id, item.index, item.line, type(item)) for item in items]


def test_the_system_prompt_does_not_hide_an_empty_one() -> None:
    """With chat and a system prompt, an empty prompt is still an error of the prompt."""
    data = jsonl({"prompt": " "}, {"messages": [{"role": "user", "content": ""}]})
    expected = ["prompt: is empty", "messages: all contents are empty"]
    assert expected == errors(read(data, chat=True, system="s"))


def test_nesting_has_a_limit() -> None:
    """A row may have 64 levels of arrays and objects, itself included, and no more."""
    lines = [b'{"stop": ' + b"[" * levels + b"]" * levels + b"}" for levels in (63, 64)]
    allowed, refused = errors(read(b"\n".join(lines)))
    expected = "stop: must be a non-empty string or a list of them, not "
    assert allowed is not None
    assert expected == allowed.rstrip("[]")
    assert refused == "stop: is nested deeper than 64 levels"


def test_messages_need_the_template() -> None:
    """A row of messages is a bad row when prompts are raw."""
    (message,) = errors(read(jsonl({"messages": [USER]}), chat=False))
    assert message == "messages: need the model's chat template; leave out --raw"


def test_errors_are_cut() -> None:
    """An error that quotes a long value stays one line of bounded length."""
    long = "y" * 10_000
    (bad,) = errors(read(jsonl({"prompt": "x", "max_tokens": long})))
    assert bad is not None
    start = "max_tokens: must be a whole number, not 'y"
    assert (start, 501, "…") == (bad[: len(start)], len(bad), bad[-1])
    assert errors(read(jsonl({"prompt": "x", long: 1}))) == ["y" * 64 + ": unknown key"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"id": "a"}, {"id": "b"}, {"id": "a"}], "'a' is the id of line 1 already"),
        ([{"id": 1}, {"id": "1"}], "'1' is the id of line 1 already"),
        ([{"id": "x"}, {"id": "1"}, {"id": 1}], "'1' is the id of line 2 already"),
        ([{}, {"id": "1"}], "'1' is the id of line 1 already"),
        ([{"id": "b"}, {}, {"id": 2}], "'2' is the id of line 2 already"),
        (
            [{"id": 2}, {}],
            "'2' is the id of line 1 already; a row without an id has its line number",
        ),
        ([{"id": "a", "prompt": ""}, {"id": "a"}], "'a' is the id of line 1 already"),
    ],
)
def test_an_id_is_used_once(rows: list[dict[str, Any]], message: str) -> None:
    """Ids are compared as text, line numbers among them, and the error names the first line."""
    items = read(jsonl(*[{"prompt": "x"} | row for row in rows]))
    assert f"id: {message}" == errors(items)[-1]
    assert rows[-1].get("id", len(rows)) == items[-1].id


def test_the_third_use_of_an_id_names_the_first_line() -> None:
    """However often an id comes, the error names the row that used it first."""
    rows = [{"prompt": "x"}, {"id": "1", "prompt": "x"}, {"id": 1, "prompt": "x"}]
    expected = [None, *["id: '1' is the id of line 1 already"] * 2]
    assert expected == errors(read(jsonl(*rows)))


@pytest.mark.parametrize("row_id", ["01", "+1", "1.0", "٢", "²", "0", "-1", "9" * 5000])
def test_ids_that_only_look_like_a_line_number(row_id: str) -> None:
    """Only the line number as it is written is taken by a row without an id."""
    data = jsonl({"prompt": "x"}, {"prompt": "y"}, {"id": row_id, "prompt": "z"})
    expected = [1, 2, row_id]
    assert expected == [item.id for item in read(data) if isinstance(item, Request)]


def test_an_unreadable_row_takes_no_id() -> None:
    """A good row may have the number of a line that can't be read."""
    expected = ["is not JSON: Expecting value at column 1", None]
    assert expected == errors(read(b'x\n{"id": 1, "prompt": "x"}'))


# Long lines and long files


def test_a_long_line_is_a_bad_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line may have as many bytes as the limit, without its end; after more, reading goes on."""
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 100_000)
    edge, over = b"x" * 100_000, b"y" * 100_001
    for long in (over, over * 3, b" " * 100_001):
        items = read(b"\n".join([edge, long, edge, long]), InputFormat.TXT)
        expected = [None, "is longer than 0 MiB", None, "is longer than 0 MiB"]
        assert expected == errors(items)
        assert list(range(1, 5)) == [item.line for item in items]
    assert not any(errors(read(edge + b"\n" + edge, InputFormat.TXT)))


def peak_bytes(data: Iterable[bytes], input_format: InputFormat) -> tuple[int, int]:
    """Return the rows read and the most memory that reading them took."""
    tracemalloc.start()
    try:
        rows = sum(1 for _ in read_requests(source(data, input_format), DEFAULTS))
        return rows, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_the_rest_of_a_long_line_is_not_held() -> None:
    """A line of 200 MiB takes no more memory than the limit, and the next row is read."""

    def lines() -> Iterator[bytes]:
        for _ in range(200):
            yield b"x" * MIB
        yield b'\n{"prompt": "x"}\n'

    rows, peak = peak_bytes(lines(), InputFormat.JSONL)
    assert rows == 2
    assert peak < 40 * MIB  # while a line is put together, Python holds it twice


@pytest.mark.parametrize(
    ("line", "input_format"),
    [(b"a prompt\n", InputFormat.TXT), (b'{"prompt": "x", "seed": 5}\n', InputFormat.JSONL)],
)
def test_rows_are_streamed(line: bytes, input_format: InputFormat) -> None:
    """Memory stays flat over many rows without ids: ten times the rows, not ten times as much."""
    num_few, few_bytes = peak_bytes([line] * 3_000, input_format)
    num_many, many_bytes = peak_bytes([line] * 30_000, input_format)
    assert num_many == 10 * num_few
    assert many_bytes - few_bytes < 100_000


def test_rows_are_read_one_at_a_time() -> None:
    """A row is there as soon as its line is: a slow pipe is not waited for."""

    def lines() -> Iterator[bytes]:
        yield b"first\n"
        raise AssertionError("read on too early")

    first = next(read_requests(source(lines(), None), DEFAULTS, InputOptions(chat=False)))
    assert isinstance(first, Request)
    assert first.prompt == "first"


def test_a_failing_read_is_an_error_with_its_line() -> None:
    """Rows before the failure are given; then one error says where reading ended."""

    def lines() -> Iterator[bytes]:
        yield b"one\ntwo\n"
        raise OSError(5, "Input/output error")

    rows = read_requests(source(lines(), InputFormat.TXT), DEFAULTS)
    assert next(rows).id == 1
    assert next(rows).id == 2
    with pytest.raises(InputError) as caught:
        next(rows)
    expected = "rows: can't be read after line 2 (Input/output error)"
    assert (expected, 3) == (str(caught.value), caught.value.line)


# Laws

prompts = st.text(min_size=1).filter(lambda text: bool(text.strip()))
ids = st.one_of(st.text(), st.integers())


@given(
    st.lists(st.tuples(ids, prompts), unique_by=lambda row: str(row[0])),
    st.booleans(),
    st.sampled_from(["\n", "\r\n", "\n\n"]),
)
def test_jsonl_reads_back_the_same(
    rows: list[tuple[str | int, str]], ensure_ascii: bool, end: str
) -> None:
    """What json.dumps writes, a row a line, reads back as the same ids and prompts in order."""
    data = "".join(
        json.dumps({"id": row_id, "prompt": prompt}, ensure_ascii=ensure_ascii) + end
        for row_id, prompt in rows
    )
    items = read(data.encode())
    assert rows == [(item.id, item.prompt) for item in items if isinstance(item, Request)]
    assert list(range(len(rows))) == [item.index for item in items]


@given(st.lists(st.text(st.characters(exclude_characters="\r\n\ufeff", codec="utf-8"))))
def test_txt_reads_back_the_same(lines: list[str]) -> None:
    """Lines of text read back as the prompts that aren't blank, under their line numbers."""
    items = read("\r\n".join(lines).encode(), InputFormat.TXT)
    expected = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    assert expected == [(item.id, item.prompt) for item in items if isinstance(item, Request)]
    assert len(expected) == len(items)


pieces = st.sampled_from(
    [b"\n", b"\r", b"{", b"}", b'"', b'"prompt"', b'"id"', b":", b",", b"[", b"1", b"\\ud800",
     b"NaN", b"-", b"\xef\xbb\xbf", b" ", b"\xc2\xa0"]
)  # fmt: skip
LINES = [None, InputFormat.TXT, InputFormat.JSONL]
soup = st.lists(st.one_of(pieces, st.binary(max_size=3))).map(b"".join)


@given(st.one_of(st.binary(), soup), st.sampled_from(LINES), st.booleans())
def test_any_bytes_give_an_item_a_line(
    data: bytes, input_format: InputFormat | None, chat: bool
) -> None:
    """Whatever the bytes, nothing is raised, and each line that isn't blank has its item."""
    items = read(data, input_format, chat=chat)
    assert num_rows(data) == len(items)
    assert list(range(len(items))) == [item.index for item in items]
    assert all(error is None or error.isprintable() for error in errors(items))


scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(),
    st.sampled_from([10**299, 10**400, -(10**310), "\ud800", "user", "9" * 5000]),
)  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.text(), st.sampled_from(["role", "content", "5"])), inner),
    ),
    max_leaves=6,
)
members = st.dictionaries(
    st.sampled_from(["id", "prompt", "messages", "promt", *PARAMETER_NAMES]), values, max_size=4
)


@given(members, st.booleans())
def test_any_members_give_a_request_or_a_record(row: dict[str, Any], has_prompt: bool) -> None:
    """Whatever the values of a row, it is a request or a bad row whose error is one line."""
    (item,) = read(jsonl(row | {"prompt": "x"} if has_prompt else row), chat=True, system="s")
    if isinstance(item, Completion):
        assert item.failed
        assert item.error
        assert item.error.isprintable()
    str(item.id).encode()


def test_openais_other_names_are_taken() -> None:
    """`max_completion_tokens`, and a `stream` that is off."""
    row = {"prompt": "x", "max_completion_tokens": 7, "stream": False}
    assert one_request(row).params.max_tokens == 7
    assert one_request({"prompt": "x", "stream": None}).params == DEFAULTS


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"max_completion_tokens": 7, "max_tokens": 8}, "contradicts 'max_tokens'"),
        ({"stream": True}, "must be false: answers are written when they are whole"),
    ],
)
def test_openais_names_that_can_not_be_meant_are_refused(row: dict[str, Any], message: str) -> None:
    """They are not dropped silently."""
    (error,) = errors(read(jsonl({"prompt": "x", **row})))
    assert message in (error or "")
