"""Tables in and out: every cell and byte of the input stays, and the answers come behind."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import sqlite3
import sys
import tracemalloc
from collections.abc import Iterator
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from localbatch.cli.main import main
from localbatch.data.errors import ConfigError, InputError, OutputError
from localbatch.data.request import Completion, Request
from localbatch.data.sampling_params import SamplingParams
from localbatch.formats import delimited
from localbatch.formats.delimited import CsvReader
from localbatch.formats.inputs import InputOptions, open_input, read_requests
from localbatch.formats.parquet import ParquetReader
from localbatch.formats.tables_out import Answer, table_format, write_records, write_table
from localbatch.jobs.journal_files import journal_path
from tests.tables import csv_bytes, csv_cells, reviews

pytestmark = pytest.mark.timeout(120)


def run_fake(*args: str | Path) -> Result:
    words = ["run", "fake", "--backend", "fake", "--threads", "1", "--max-tokens", "4", "-q"]
    return CliRunner().invoke(main, [*words, *map(str, args)], catch_exceptions=False)


def export(*args: str | Path) -> Result:
    return CliRunner().invoke(main, ["export", *map(str, args)], catch_exceptions=False)


def requests(path: Path, **options: Any) -> list[Request | Completion]:
    with open_input(str(path)) as source:
        options = {"chat": False, **options}
        return list(read_requests(source, SamplingParams(), InputOptions(**options)))


def prompts(path: Path, **options: Any) -> list[tuple[object, str | None]]:
    """Return id and prompt, or id and error, of each row."""
    return [
        (row.id, row.error if isinstance(row, Completion) else row.prompt)
        for row in requests(path, **options)
    ]


def answer(path: Path, target: Path, answers: list[Answer], column: str = "answer") -> bytes:
    """Return the table that is made of a table."""
    has_errors = any(a.error is not None for a in answers)
    with open_input(str(path)) as source:
        number = write_table(
            str(target), answers, source, answer_column=column, has_errors=has_errors
        )
    assert number == len(answers)
    return target.read_bytes()


def jsonl_texts(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text().split("\n")[:-1]]


# From end to end


@pytest.mark.parametrize(
    ("dialect", "bom"),
    [
        ({}, False),
        ({"delimiter": ";", "lineterminator": "\n", "quoting": csv.QUOTE_ALL}, True),
        ({"delimiter": "\t"}, False),
    ],
)
def test_reviews_come_back_with_one_column_more(
    tmp_path: Path, dialect: dict[str, Any], bom: bool
) -> None:
    """3,000 rows in three scripts: all bytes are those that csv writes of the cells and answers."""
    rows = reviews(3000)
    source, output = tmp_path / "reviews.csv", tmp_path / "out.csv"
    source.write_bytes(csv_bytes(rows, bom=bom, **dialect))

    result = run_fake(source, "-o", output)

    assert (result.exit_code, result.output) == (0, "")
    plain = {k: v for k, v in dialect.items() if k == "delimiter"}
    found = csv_cells(output.read_bytes(), **plain)
    assert [row[:-1] for row in found] == rows
    assert found[0][-1] == "answer"
    assert export(output, "-o", tmp_path / "out.jsonl").exit_code == 0
    texts = jsonl_texts(tmp_path / "out.jsonl")
    assert len(set(texts)) > 1000
    assert [row[-1] for row in found[1:]] == texts
    assert output.read_bytes() == csv_bytes(found, bom=bom, **dialect)


def test_failed_rows_add_a_column_of_errors(tmp_path: Path) -> None:
    """Its own text stays with an unreadable row, also with too few cells or too many."""
    source, output = tmp_path / "in.csv", tmp_path / "out.csv"
    source.write_bytes(b"id,text\na,good\nb,\nc\nd,x,y\n\ne,caf\xe9\nf,fine")

    result = run_fake(source, "-o", output)

    assert result.exit_code == 3
    texts = jsonl_texts_of(output)
    lines = output.read_bytes().split(b"\n")
    assert lines[0] == b"id,text,answer,error"
    assert lines[2] == b"b,,,text: is empty"
    hint = "the header has 2; is a delimiter in a cell without quotes?"
    assert lines[3] == f'c,,,"has 1 cell, {hint}"'.encode()
    assert lines[4] == f'd,x,y,,"has 3 cells, {hint}"'.encode()
    assert lines[5] == b""
    assert lines[6] == b"e,caf\xe9,,text: is not UTF-8: byte 0xe9"
    (good, _, _, _, _, fine) = texts
    assert csv_cells(lines[1])[0] == ["a", "good", good, ""]
    assert csv_cells(lines[7])[0] == ["f", "fine", fine, ""]
    assert len(lines) == 8


def jsonl_texts_of(output: Path) -> list[str]:
    target = output.with_suffix(".jsonl")
    assert export(output, "-o", target).exit_code == 0
    return jsonl_texts(target)


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".parquet"])
def test_only_finished_rows_are_written(tmp_path: Path, suffix: str) -> None:
    """Each answer stands beside its own row."""
    source, output = tmp_path / "in.csv", tmp_path / f"out{suffix}"
    source.write_bytes(csv_bytes([["text"], *([f"prompt {i}"] for i in range(6))]))
    assert run_fake(source, "-o", output).exit_code == 0
    whole = table(output)
    with sqlite3.connect(journal_path(str(output))) as connection:
        connection.execute("DELETE FROM rows WHERE number IN (0, 3, 5)")

    assert export(output, "-o", output).exit_code == 0

    assert table(output) == [whole[0], *(whole[1 + i] for i in (1, 2, 4))]


def table(path: Path) -> list[list[Any]]:
    """Return header and cells of a table, whatever its form."""
    if path.suffix == ".parquet":
        read = pq.read_table(path)
        return [read.column_names, *map(list, zip(*read.to_pydict().values(), strict=True))]
    return csv_cells(path.read_bytes(), delimiter="\t" if path.suffix == ".tsv" else ",")


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".parquet"])
def test_other_inputs_give_a_table_of_records(tmp_path: Path, suffix: str) -> None:
    """Id, text, finish_reason, tokens and error; no input is needed for it."""
    source, output = tmp_path / "in.jsonl", tmp_path / f"out{suffix}"
    source.write_text('{"id": "a", "prompt": "x"}\n{"prompt": ""}\n')

    assert run_fake(source, "-o", output, "--ignore-eos").exit_code == 3
    source.unlink()
    assert export(output, "-o", output).exit_code == 0

    (text, _) = jsonl_texts_of(output)
    none = None if suffix == ".parquet" else ""
    tokens = [26, 4] if suffix == ".parquet" else ["26", "4"]
    zeros = [0, 0] if suffix == ".parquet" else ["0", "0"]
    assert table(output) == [
        ["id", "text", "finish_reason", "prompt_tokens", "completion_tokens", "error"],
        ["a", text, "length", *tokens, none],
        ["2", none, "error", *zeros, "prompt: is empty"],
    ]


@pytest.mark.parametrize("name", ["out.csv.gz", "out.csv.zst", "out.jsonl.gz", "out.jsonl.zst"])
def test_a_second_suffix_packs_the_output(tmp_path: Path, name: str) -> None:
    """The libraries of each format unpack what the same name without it has."""
    source = tmp_path / "in.csv"
    source.write_bytes(csv_bytes([["text"], ["a"], ["b"]]))
    output, plain = tmp_path / name, tmp_path / Path(name).stem
    assert run_fake(source, "-o", output).exit_code == 0
    assert export(output, "-o", plain).exit_code == 0

    assert unpack(output) == plain.read_bytes()


def unpack(path: Path) -> bytes:
    if path.suffix == ".gz":
        return gzip.decompress(path.read_bytes())
    return zstandard.ZstdDecompressor().decompressobj().decompress(path.read_bytes())


def test_the_journal_knows_the_input_wherever_export_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that was run with a relative path is exported from another folder."""
    (tmp_path / "in.csv").write_bytes(b"text\nx\n")
    monkeypatch.chdir(tmp_path)
    assert run_fake("in.csv", "-o", "out.csv", "--answer-column", "said").exit_code == 0
    before = Path("out.csv").read_bytes()
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")

    assert export("../out.csv", "-o", "again.csv").exit_code == 0

    assert before.startswith(b"text,said\n")
    assert Path("again.csv").read_bytes() == before


@pytest.mark.parametrize("change", ["gone", "changed"])
def test_a_changed_input_is_one_clear_error(tmp_path: Path, change: str) -> None:
    """The answers are still to be had without its columns."""
    source, output = tmp_path / "in.csv", tmp_path / "out.csv"
    source.write_bytes(b"text\nx\n")
    assert run_fake(source, "-o", output).exit_code == 0
    before = output.read_bytes()
    if change == "gone":
        source.unlink()
    else:
        source.write_bytes(b"text\ny\n")

    result = export(output, "-o", output)

    assert result.exit_code == 2
    assert result.output == (
        f"Error: {source}: is gone or was changed since the job began, so its columns can't be "
        f"had; `localbatch export {output} -o x.jsonl` writes the answers without them\n"
    )
    assert output.read_bytes() == before
    assert len(jsonl_texts_of(output)) == 1


def test_a_changed_template_is_another_job(tmp_path: Path) -> None:
    """So are other columns; the message says which option it was."""
    source, output = tmp_path / "in.csv", tmp_path / "out.csv"
    source.write_bytes(b"text,more\nx,y\n")
    assert run_fake(source, "-o", output, "--template", "{{ text }}").exit_code == 0
    for args, said in [
        (["--template", "{{ more }}"], "--template was"),
        (["--prompt-column", "more"], "--prompt-column was left out"),
        (["--template", "{{ text }}", "--id-column", "more"], "--id-column was left out"),
    ]:
        result = run_fake(source, "-o", output, *args)
        assert result.exit_code == 2
        assert said in result.output
    again = run_fake(source, "-o", output, "--template", "{{ text }}", "--answer-column", "a")
    assert again.exit_code == 0
    assert output.read_bytes().startswith(b"text,more,a\n")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["-o", "out.csv", "--answer-column", "note"],
         "in.csv: has a column 'note' already; name another with --answer-column"),
        (["-o", "out.csv", "--answer-column", "error"],
         "--answer-column: 'error' is for errors; choose another name"),
        (["-o", "out.jsonl", "--answer-column", "a"],
         "--answer-column: out.jsonl is no table; name it .csv or .parquet"),
        (["-o", "out.parquet.gz"],
         "out.parquet.gz: Parquet files are packed inside; name it out.parquet"),
        (["-o", "out.csv", "--style", "openai"],
         "--style openai goes with lines of JSON; out.csv is a table"),
        (["--prompt-column", "txt"],
         "--prompt-column: in.csv has no column 'txt'; it has 'body', 'note'"),
        (["--template", "{{ body }}", "--id-column", "nr"],
         "--id-column: in.csv has no column 'nr'; it has 'body', 'note'"),
        (["--template", "{{ body }}", "--prompt-column", "body"],
         "--template and --prompt-column: give one of them"),
        (["--template", "@no.txt"],
         "--template: no.txt can't be read (No such file or directory)"),
        (["--template", "{{ body }} {{ titel }}"],
         "--template: in.csv has no column 'titel'; it has 'body', 'note'"),
        ([], "in.csv: has the columns 'body', 'note'; say which is the prompt with "
             "--prompt-column, or write a --template"),
    ],
)  # fmt: skip
def test_a_mistake_shows_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], said: str
) -> None:
    """One line, exit code 2, and no output or journal is left."""
    monkeypatch.chdir(tmp_path)
    Path("in.csv").write_bytes(b"body,note\nx,y\n")

    result = run_fake("in.csv", *args)

    assert (result.exit_code, result.output) == (2, f"Error: {said}\n")
    assert os.listdir() == ["in.csv"]


def test_the_output_is_not_the_packed_input(tmp_path: Path) -> None:
    """A pipe can't be read twice, so that a table can't be made of it."""
    pipe = tmp_path / "in.csv"
    os.mkfifo(pipe)
    result = run_fake(pipe, "-o", tmp_path / "out.csv")
    assert result.exit_code == 2
    assert "is read once only" in result.output


# Which column is what


@pytest.mark.parametrize(
    ("header", "row", "options", "expected"),
    [
        ("id,prompt,text", "7,p,t", {}, ("7", "p")),
        ("nr,text", "7,t", {}, (1, "t")),
        ("review", "r", {}, (1, "r")),
        ("id,a,b", "7,x,y", {"prompt_column": "b", "id_column": "a"}, ("x", "y")),
        ("id,text", "7,t", {"id_column": ""}, (1, "t")),
        ("id,text", ",t", {}, (1, "t")),
        ("id,temperature,text,max_tokens", "a,9999,t,no", {}, ("a", "t")),
        ("id,odd name", "7,o", {"template": "{{ row['odd name'] }}!"}, ("7", "o!")),
        ("row,text", "7,o", {"template": "{{ row.text }}{{ row['row'] }}"}, (1, "o7")),
    ],
)
def test_columns_become_id_and_prompt(
    tmp_path: Path, header: str, row: str, options: dict[str, Any], expected: tuple[object, str]
) -> None:
    """By name, by default, or by a template; parameters' names are columns as others."""
    path = tmp_path / "in.csv"
    path.write_text(f"{header}\n{row}\n")
    assert prompts(path, **options) == [expected]
    (request,) = requests(path, **options)
    assert isinstance(request, Request)
    assert (request.params, request.line) == (SamplingParams(), 2)


def test_an_id_twice_costs_the_second_row(tmp_path: Path) -> None:
    """The message says what to do if the column holds no ids."""
    path = tmp_path / "in.csv"
    path.write_text("id,text\na,x\na,y\nb,z\n")
    assert prompts(path) == [
        ("a", "x"),
        ("a", "id: 'a' is the id of row 1 already; --id-column '' numbers the rows"),
        ("b", "z"),
    ]


def test_a_column_twice_may_only_be_passed_on(tmp_path: Path) -> None:
    """It is refused as the prompt."""
    path = tmp_path / "in.csv"
    path.write_text("text,a,a\nx,y,z\n")
    assert prompts(path) == [(1, "x")]
    with pytest.raises(ConfigError, match=r"--prompt-column: .* has the column 'a' twice"):
        requests(path, prompt_column="a")


# CSV


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_dialects(tmp_path: Path, delimiter: str, end: str) -> None:
    """The delimiter is the one that the header has most of, outside of quotes."""
    path = tmp_path / "in.csv"
    rows = [["id", "a,,,, b;;;; c||||\n|d", "text"], ["1", "x", "one\ntwo"], ["2", ";", 'a "b"']]
    path.write_bytes(csv_bytes(rows, delimiter=delimiter, lineterminator=end, bom=True, quoting=1))
    assert prompts(path) == [("1", "one\ntwo"), ("2", 'a "b"')]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is empty; its first line must name the columns"),
        (b"\xef\xbb\xbf\n\n", "is empty; its first line must name the columns"),
        ("text\nx\n".encode("utf-16"), "is UTF-16; save it as UTF-8"),
        (b"t\xe9xt\nx\n", "its header is not UTF-8: byte 0xe9; save it as UTF-8"),
        (b'"text\nx\n', "its header has a quote that is never closed"),
    ],
)
def test_a_file_without_a_header_is_refused(tmp_path: Path, data: bytes, said: str) -> None:
    """In one line, before anything runs."""
    path = tmp_path / "in.csv"
    path.write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        requests(path)
    assert str(caught.value) == f"{path}: {said}"


def test_a_quote_that_is_never_closed_is_one_bad_row(tmp_path: Path) -> None:
    """It takes the rest of the file; in the output it is closed."""
    path = tmp_path / "in.csv"
    path.write_bytes(b'id,text\na,x\nb,"y\nc,z\n')
    said = "has a quote that is never closed; all that follows it is this row"
    assert prompts(path) == [("a", "x"), (2, said)]
    out = answer(path, tmp_path / "out.csv", [Answer(0, "A"), Answer(1, "", said)])
    assert csv_cells(out) == [
        ["id", "text", "answer", "error"], ["a", "x", "A", ""], ["b", "y\nc,z\n", "", said],
    ]  # fmt: skip


def test_a_row_without_end_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quote too many does not fill the memory: reading ends with the line it began in."""
    monkeypatch.setattr(delimited, "MAX_LINE_BYTES", 1000)
    path = tmp_path / "in.csv"
    path.write_bytes(b'text\nx\n"y\n' + b"z\n" * 1000)
    with open_input(str(path)) as source:
        rows = read_requests(source, SamplingParams())
        assert isinstance(next(rows), Request)
        with pytest.raises(InputError) as caught:
            next(rows)
    assert "the row of line 3 is longer than 0 MiB; is a quote never closed?" in str(caught.value)


plain = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
cells = st.one_of(plain, st.text(st.sampled_from('",;\t|\r\n a')))
dialects = st.fixed_dictionaries(
    {
        "delimiter": st.sampled_from(",;\t|"),
        "quoting": st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
        "lineterminator": st.sampled_from(["\n", "\r\n"]),
    }
)


@given(st.data(), dialects, st.booleans())
@settings(max_examples=200)
def test_any_csv_comes_back_byte_by_byte(
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
    dialect: dict[str, Any],
    bom: bool,
) -> None:
    """Each row's bytes stay, the answers follow as csv reads them, and prompts are csv's cells."""
    names = data.draw(st.lists(plain.map(lambda n: n.replace("\ufeff", "")), max_size=3))
    header = ["text", *(f"{i}{name}" for i, name in enumerate(names))]
    if len(header) == 1:
        dialect = {**dialect, "delimiter": ","}
    width = len(header)
    rows = data.draw(st.lists(st.lists(cells, min_size=width, max_size=width), max_size=5))
    texts = data.draw(st.lists(cells, min_size=len(rows), max_size=len(rows)))
    if set("".join(names)) & set(",;\t|"):
        dialect = {**dialect, "quoting": csv.QUOTE_ALL}
    if "\\r" in repr([names, rows]):  # csv does not quote it if it is not in the line end
        dialect = {**dialect, "quoting": csv.QUOTE_ALL}
    folder = tmp_path_factory.mktemp("csv")
    suffix = ".tsv" if dialect["delimiter"] == "\t" else ".csv"
    path, target = folder / f"in{suffix}", folder / f"out{suffix}"
    path.write_bytes(csv_bytes([header, *rows], bom=bom, **dialect))

    found = requests(path, prompt_column="text")
    out = answer(path, target, [Answer(i, text) for i, text in enumerate(texts)])

    for row, request in zip(rows, found, strict=True):
        assert (request.prompt == row[0]) if isinstance(request, Request) else not row[0].strip()
    wide = list(zip([header, *rows], ["answer", *texts], strict=True))
    mark, end = dialect["delimiter"], dialect["lineterminator"].encode()
    assert csv_cells(out, delimiter=mark) == [[*row, text] for row, text in wide]
    rest = out.removeprefix(b"\xef\xbb\xbf") if bom else out
    for row, text in wide:
        own = csv_bytes([row], **dialect).removesuffix(end) + mark.encode()
        quoted = csv_bytes([[text]], quoting=csv.QUOTE_ALL, lineterminator="")
        forms = [own + form + end for form in (quoted, text.encode())]
        rest = rest[next(len(form) for form in forms if rest.startswith(form)) :]
    assert rest == b""


@given(st.lists(st.sampled_from(['"', ",", "\n", "\r\n", "a", '""', ";"]), max_size=30))
@settings(max_examples=300)
def test_any_text_is_taken_apart_as_csv_does(pieces: list[str]) -> None:
    """Also where quotes are not as they should be."""
    text = "head,er\n" + "".join(pieces)
    reader = CsvReader(io.BytesIO(text.encode()), "in")
    records = list(reader)
    expected = list(csv.reader(io.StringIO(text, newline="")))[1:]
    assert [record.cells for record in records] == expected
    assert "".join(record.raw + record.end for record in records) == "".join(pieces)


def test_csv_is_streamed() -> None:
    """Ten times the rows take no more memory."""

    def peak(number: int) -> int:
        data = b"text\n" + b'"a prompt, with quotes"\n' * number
        stream = io.BytesIO(data)
        tracemalloc.start()
        try:
            assert sum(1 for _ in CsvReader(stream, "in")) == number
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(30_000) - peak(3_000) < 100_000


# Parquet

ROWS: dict[str, pa.Array] = {
    "id": pa.array([3, 1, 2], pa.int32()),
    "text": pa.array(["ж", "b\nc", '"d"'], pa.large_string()),
    "price": pa.array([Decimal("1.50"), None, Decimal("2.25")], pa.decimal128(7, 2)),
    "when": pa.array([datetime(2024, 1, 2, 3), None, None], pa.timestamp("us")),
    "tags": pa.array([["x"], [], None], pa.list_(pa.string())),
    "kind": pa.array(["u", "v", "u"]).dictionary_encode(),
    "at": pa.array([{"x": 1.5}, None, {"x": None}], pa.struct([("x", pa.float32())])),
    "raw": pa.array([b"\0\xff", None, b""], pa.binary()),
}  # fmt: skip


def test_parquet_keeps_types_values_order_and_metadata(tmp_path: Path) -> None:
    """As pyarrow reads them; answers are a further column of strings."""
    path, out = tmp_path / "in.parquet", tmp_path / "out.parquet"
    pq.write_table(pa.table(ROWS).replace_schema_metadata({"made": "by hand"}), path)
    before = pq.read_table(path)
    assert prompts(path) == [(3, "ж"), (1, "b\nc"), (2, '"d"')]

    answer(path, out, [Answer(0, "A"), Answer(1, "B"), Answer(2, "C")])

    after = pq.read_table(out)
    assert after.drop_columns(["answer"]).equals(before, check_metadata=True)
    assert after["answer"].to_pylist() == ["A", "B", "C"]
    assert after.schema.field("answer").type == pa.string()


def test_parquet_becomes_csv(tmp_path: Path) -> None:
    """Nulls are empty, lists JSON, all else as Python writes it."""
    path, out = tmp_path / "in.parquet", tmp_path / "out.csv"
    names = ["id", "text", "price", "tags", "kind", "at"]
    pq.write_table(pa.table({name: ROWS[name] for name in names}), path)
    data = answer(path, out, [Answer(0, "A"), Answer(2, "C")])
    assert csv_cells(data) == [
        [*names, "answer"],
        ["3", "ж", "1.50", '["x"]', "u", '{"x": 1.5}', "A"],
        ["2", '"d"', "2.25", "", "u", '{"x": null}', "C"],
    ]


def test_values_that_are_no_prompt_cost_their_row(tmp_path: Path) -> None:
    """A null, and with a template what Python can't hold; a template takes numbers and nulls."""
    path = tmp_path / "in.parquet"
    far = pa.array([0, 10**17, 0], pa.int64()).cast(pa.timestamp("ms"))
    pq.write_table(pa.table({"text": ["a", "b", None], "n": [1, None, 3], "far": far}), path)
    assert prompts(path) == [(1, "a"), (2, "b"), (3, "text: is null")]
    assert prompts(path, template="<{{ n }}{{ text }}>") == [(1, "<1a>"), (2, "<b>"), (3, "<3>")]
    (_, bad, _) = prompts(path, template="{{ far }}")
    assert str(bad[1]).startswith("far: can't be read (")
    said = "n: must be text, not int; --template takes any type"
    assert [row[1] for row in prompts(path, prompt_column="n")] == [said, "n: is null", said]


def test_a_file_that_is_no_parquet_is_refused(tmp_path: Path) -> None:
    """In one line; so is one that is cut short."""
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table(ROWS), path)
    whole = path.read_bytes()
    for data in (b"", b"text\nx\n", whole[:-10], whole[: len(whole) // 2]):
        path.write_bytes(data)
        with pytest.raises(ConfigError) as caught:
            requests(path)
        assert str(caught.value).startswith(f"{path}: is no Parquet file, or is damaged (")
        assert "\n" not in str(caught.value)


def test_parquet_is_read_batch_by_batch(tmp_path: Path) -> None:
    """Only the columns that are needed, and some rows at a time."""
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"text": ["x"] * 5000, "big": ["y" * 100] * 5000}), path)
    with path.open("rb") as stream:
        batches = list(ParquetReader(stream, "in").batches(["text"]))
    assert max(batch.num_rows for batch in batches) <= 1024
    assert batches[0].schema.names == ["text"]


def test_without_the_library_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For input and output."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    path = tmp_path / "in.parquet"
    path.write_bytes(b"")
    said = r"pip install 'localbatch\[parquet\]'"
    with pytest.raises(ConfigError, match=said):
        requests(path)
    with pytest.raises(ConfigError, match=said):
        table_format("out.parquet")


values = {
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.float64(): st.floats(allow_nan=False),
    pa.string(): plain,
    pa.bool_(): st.booleans(),
    pa.list_(pa.string()): st.lists(plain, max_size=2),
    pa.date32(): st.dates(),
}


@given(st.data(), st.integers(1, 5), st.sampled_from([".parquet", ".csv", ".tsv"]))
@settings(max_examples=60)
def test_any_table_survives(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, rows: int, suffix: str
) -> None:
    """Types, values and order of a Parquet file; a CSV file's cells in every other form."""
    folder = tmp_path_factory.mktemp("table")
    kinds = data.draw(st.lists(st.sampled_from(list(values)), max_size=4))
    arrays = [
        pa.array(data.draw(st.lists(st.none() | values[kind], min_size=rows, max_size=rows)), kind)
        for kind in kinds
    ]
    names = [f"c{i}" for i in range(len(kinds))]
    before = pa.table([*arrays, pa.array(["t"] * rows)], names=[*names, "text"])
    texts = data.draw(st.lists(plain, min_size=rows, max_size=rows))
    path = folder / "in.parquet"
    pq.write_table(before, path)
    answers = [Answer(i, text) for i, text in enumerate(texts)]

    answer(path, folder / f"a{suffix}", answers)
    answer(folder / f"a{suffix}", folder / "b.parquet", answers, "again")

    after = pq.read_table(folder / "b.parquet")
    assert after.column_names == [*before.column_names, "answer", "again"]
    assert after["answer"].to_pylist() == after["again"].to_pylist() == texts
    if suffix == ".parquet":
        assert after.select(before.column_names).equals(before)
    else:
        for name, kind in zip(before.column_names, [*kinds, pa.string()], strict=True):
            if kind == pa.string():
                expected = [text or "" for text in before[name].to_pylist()]
                assert after[name].to_pylist() == expected


# What goes wrong while a table is written


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    """The new file is put in place whole or not at all."""
    path, out = tmp_path / "in.csv", tmp_path / "out.csv"
    path.write_bytes(b"text\nx\ny\n")
    out.write_bytes(b"old")

    def failing() -> Iterator[Answer]:
        yield Answer(0, "A")
        raise OutputError("no more")

    with pytest.raises(OutputError), open_input(str(path)) as source:
        write_table(str(out), failing(), source, answer_column="answer", has_errors=False)
    assert out.read_bytes() == b"old"
    assert sorted(os.listdir(tmp_path)) == ["in.csv", "out.csv"]


def test_half_a_surrogate_pair_is_escaped(tmp_path: Path) -> None:
    """An answer that is no text is written as JSON escapes it, in each form."""
    path = tmp_path / "in.csv"
    path.write_bytes(b"text\nx\n")
    for name in ("out.csv", "out.tsv", "out.parquet"):
        answer(path, tmp_path / name, [Answer(0, "a\ud800")])
        assert table(tmp_path / name)[1] == ["x", "a\\ud800"]
        record = {"id": "\ud800", "text": "\ud800", "finish_reason": "stop",
                  "usage": {"prompt_tokens": 1, "completion_tokens": 2}}  # fmt: skip
        assert write_records(str(tmp_path / name), [json.dumps(record)]) == 1
        assert table(tmp_path / name)[1][:3] == ["\\ud800", "\\ud800", "stop"]


def test_text_behind_a_closing_quote_is_a_bad_row(tmp_path: Path) -> None:
    """A quote that is not doubled may swallow the rows after it; the lines are named."""
    path = tmp_path / "in.csv"
    path.write_text(
        'id,prompt\n1,fine\n2,"6 inch" pipe\n3,"unbalanced\n4,swallowed\n5,too "ok" x\n6,fine\n'
    )
    said = "has text behind the closing quote of a cell; a quote in a cell must be doubled"

    rows = requests(path)

    assert [row.error if isinstance(row, Completion) else None for row in rows] == [
        None, said, f"{said}; lines 4 to 6 are this row", None,
    ]  # fmt: skip


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_all_answers_of_a_row_are_in_its_cell(tmp_path: Path, suffix: str) -> None:
    """As a JSON list, where there are several."""
    source, output = tmp_path / "in.csv", tmp_path / f"out{suffix}"
    source.write_text("id,prompt\n1,x\n")
    assert run_fake(source, "-o", output, "--n", "3", "--temperature", "1").exit_code == 0
    lines = tmp_path / "lines.jsonl"
    assert export(output, "-o", lines).exit_code == 0
    (row,) = [json.loads(line) for line in lines.read_text().splitlines()]

    cell = table(output)[-1][-1]

    assert json.loads(cell) == [choice["text"] for choice in row["choices"]]
    assert len(row["choices"]) == 3


def test_nanoseconds_are_written_to_csv(tmp_path: Path) -> None:
    """Python has no type for them."""
    source, output = tmp_path / "in.parquet", tmp_path / "out.csv"
    times = pa.array([1600000000123456789], pa.timestamp("ns"))
    pq.write_table(pa.table({"prompt": ["x"], "time": times}), source)
    assert run_fake(source, "-o", output).exit_code == 0
    assert table(output)[1][1] == "2020-09-13 12:26:40.123456789"


def test_a_spreadsheet_is_refused_as_an_output(tmp_path: Path) -> None:
    """JSON under that name opens nowhere."""
    source = tmp_path / "in.csv"
    source.write_text("prompt\nx\n")
    result = run_fake(source, "-o", tmp_path / "out.xlsx")
    assert result.exit_code == 2
    assert ".xlsx can't be written; name it .csv" in result.stderr


def test_a_pattern_gives_each_file_once(tmp_path: Path) -> None:
    """Also where links lead in a circle."""
    (tmp_path / "dir" / "sub").mkdir(parents=True)
    (tmp_path / "dir" / "sub" / "a.txt").write_text("x")
    (tmp_path / "dir" / "b.txt").write_text("y")
    (tmp_path / "dir" / "sub" / "up").symlink_to(tmp_path / "dir")
    found = requests(Path(f"{tmp_path}/dir/**/*.txt"))
    assert [row.id for row in found] == ["b.txt", "sub/a.txt"]
