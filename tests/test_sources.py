"""Folders, patterns, packed files, and templates for rows of any form."""

from __future__ import annotations

import gzip
import os
import sys
import tracemalloc
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, cast

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from localbatch.data.errors import ConfigError, InputError
from localbatch.data.request import Completion, Request
from localbatch.data.sampling_params import SamplingParams
from localbatch.formats import folder, inputs
from localbatch.formats.archives import Compression, packer, split_name, unpacked
from localbatch.formats.folder import find_files
from localbatch.formats.inputs import InputOptions, open_input, read_requests
from localbatch.formats.template import PromptTemplate
from localbatch.jobs.manifest import input_sha256
from localbatch.jobs.source import open_source
from tests.test_tables import prompts, requests, run_fake


def pack(data: bytes, compression: Compression) -> bytes:
    """Pack with the format's own library."""
    if compression is Compression.GZIP:
        return gzip.compress(data)
    return zstandard.ZstdCompressor().compress(data)


# Packed files


@pytest.mark.parametrize("compression", Compression)
@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("a.txt", b"one\ntwo\n", [(1, "one"), (2, "two")]),
        ("a.jsonl", b'{"id": "x", "prompt": "p"}\n', [("x", "p")]),
        ("a.CSV", b"id,text\nx,p\n", [("x", "p")]),
        ("a.tsv", b"id\ttext\nx\tp\n", [("x", "p")]),
    ],
)
def test_packed_files_are_read_as_they_were(
    tmp_path: Path, compression: Compression, name: str, data: bytes, expected: list[Any]
) -> None:
    """The suffix before the last one tells the format."""
    path = tmp_path / f"{name}{compression.value}"
    path.write_bytes(pack(data, compression))
    assert prompts(path) == expected


@pytest.mark.parametrize("compression", Compression)
def test_a_packed_file_that_is_cut_is_one_clear_error(
    tmp_path: Path, compression: Compression
) -> None:
    """At every length but the whole; rows that came before are given."""
    path = tmp_path / f"a.txt{compression.value}"
    whole = pack(b"".join(b"row %d\n" % i for i in range(100)), compression)
    name = "gzip" if compression is Compression.GZIP else "Zstandard"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(InputError) as caught:
            requests(path)
        said = str(caught.value)
        assert said.startswith(f"{path}: can't be read after line ")
        assert said.endswith(f"(its {name} data is cut short)")


@pytest.mark.parametrize("compression", Compression)
def test_a_damaged_packed_file_is_one_clear_error(tmp_path: Path, compression: Compression) -> None:
    """Wherever it is damaged, in a line that names the file; so is a file of another kind."""
    path = tmp_path / f"a.csv{compression.value}"
    whole = bytearray(pack(b"text\n" + os.urandom(300).hex().encode() + b"\n", compression))
    for change in (b"not packed at all", whole[:20] + b"\xff" * 30 + whole[50:]):
        path.write_bytes(change)
        with pytest.raises(InputError) as caught:
            requests(path)
        assert str(caught.value).startswith(f"{path}: can't be read after line ")
        assert "data is damaged: " in str(caught.value)
        assert "\n" not in str(caught.value)
    result = run_fake(path, "-o", tmp_path / "out.jsonl")
    assert result.exit_code == 1
    assert result.output.count("\n") == 1
    assert os.listdir(tmp_path) == [path.name]


@given(st.lists(st.binary(max_size=50), min_size=1, max_size=4), st.sampled_from(Compression))
def test_what_is_packed_is_unpacked(parts: list[bytes], compression: Compression) -> None:
    """Ours by the libraries, theirs by ours, and several packed files after each other."""
    ours = packer(compression)
    packed = b"".join([*map(ours.compress, parts), ours.flush()])
    if compression is Compression.GZIP:
        assert gzip.decompress(packed) == b"".join(parts)
    else:
        reader = zstandard.ZstdDecompressor().stream_reader(packed)
        assert reader.read() == b"".join(parts)
    several = b"".join(pack(part, compression) for part in parts)
    with unpacked(cast(BinaryIO, BytesIO(several)), compression) as stream:
        assert stream.read() == b"".join(parts)


@pytest.mark.parametrize("compression", Compression)
def test_packed_files_are_streamed(compression: Compression) -> None:
    """100 MiB of zeros, which pack well, are never held."""
    stream = BytesIO(pack(b"\0" * 100 * 2**20, compression))
    tracemalloc.start()
    try:
        with unpacked(cast(BinaryIO, stream), compression) as opened:
            assert sum(len(part) for part in iter(lambda: opened.read(2**16), b"")) == 100 * 2**20
        assert tracemalloc.get_traced_memory()[1] < 80 * 2**20
    finally:
        tracemalloc.stop()


def test_zeros_after_a_gzip_file_are_no_damage(tmp_path: Path) -> None:
    """As gzip itself has it; tapes are filled up with them."""
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"one\n") + b"\0" * 5000)
    assert prompts(path) == [(1, "one")]


def test_without_a_library_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For input and output."""
    for name in ("compression.zstd", "zstandard"):
        monkeypatch.setitem(sys.modules, name, None)
    path = tmp_path / "a.txt.zst"
    path.write_bytes(b"")
    for call in (lambda: requests(path), lambda: packer(Compression.ZSTD)):
        with pytest.raises(ConfigError, match=r"pip install 'localbatch\[zstd\]'"):
            call()


def test_packed_parquet_is_refused(tmp_path: Path) -> None:
    """It has packing of its own."""
    with pytest.raises(ConfigError, match="Parquet files are packed inside"):
        requests(tmp_path / "a.parquet.gz")


def test_the_name_is_split() -> None:
    """Capitals count too; only the last suffix is one of packing."""
    assert split_name("a.csv.GZ") == ("a.csv", Compression.GZIP)
    assert split_name("b/a.zst.csv") == ("b/a.zst.csv", None)


# Folders


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    """Return a folder with files of all sorts."""
    root = tmp_path / "notes"
    (root / "sub").mkdir(parents=True)
    (root / "b.md").write_bytes(b"\xef\xbb\xbfsecond\n")
    (root / "a.txt").write_text("first")
    (root / "sub" / "ü.md").write_text("drittes")
    (root / ".hidden").write_text("no")
    (root / ".git").mkdir()
    (root / ".git" / "x.md").write_text("no")
    (root / "empty.md").write_bytes(b" \n")
    (root / "image.md").write_bytes(b"\x89PNG\0\xff")
    (root / "latin.md").write_bytes(b"caf\xe9")
    return root


BAD = [
    ("empty.md", "empty.md: is empty"),
    ("image.md", "image.md: is binary, not text"),
    ("latin.md", "latin.md: is not UTF-8: byte 0xe9 at offset 3"),
]


def test_each_file_of_a_folder_is_a_row(notes: Path) -> None:
    """Sorted by their paths, which are the ids; those that are no text cost only themselves."""
    expected = [("a.txt", "first"), ("b.md", "second\n"), *BAD, ("sub/ü.md", "drittes")]
    assert prompts(notes) == expected
    assert [row.line for row in requests(notes)] == [None] * 6


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.md", ["b.md", *(name for name, _ in BAD)]),
        ("**/*.md", ["b.md", *(name for name, _ in BAD), "sub/ü.md"]),
        ("sub/*", ["ü.md"]),
        ("[a].txt", ["a.txt"]),
    ],
)
def test_a_pattern_chooses_files(notes: Path, pattern: str, expected: list[str]) -> None:
    """Ids begin where the wildcards do."""
    assert [row.id for row in requests(notes / pattern)] == expected


def test_a_relative_pattern(notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts from the current folder."""
    monkeypatch.chdir(notes)
    assert prompts(Path("a.*")) == [("a.txt", "first")]


def test_no_link_leads_out(notes: Path, tmp_path: Path) -> None:
    """Neither of a file nor of a folder, in a folder or by a pattern; those that stay inside do."""
    (tmp_path / "secret.md").write_text("secret")
    (tmp_path / "notes2").mkdir()
    (tmp_path / "notes2" / "s.md").write_text("secret")
    (notes / "sub" / "out.md").symlink_to(tmp_path / "secret.md")
    (notes / "sub" / "near.md").symlink_to(tmp_path / "notes2" / "s.md")
    (notes / "sub" / "far").symlink_to(tmp_path / "notes2")
    (notes / "sub" / "gone.md").symlink_to("nowhere")
    (notes / "sub" / "in.md").symlink_to(notes / "a.txt")
    (notes / "sub" / "loop").symlink_to(notes)
    os.mkfifo(notes / "sub" / "pipe.md")

    inside = [row.id for row in requests(notes)]
    by_pattern = prompts(notes / "s*" / ".." / "sub" / "*.md")
    outside = prompts(notes / "sub" / "**" / "*")

    assert inside[-2:] == ["sub/in.md", "sub/ü.md"]
    assert len(inside) == 7
    assert "secret" not in str([by_pattern, outside])
    with pytest.raises(ConfigError, match="matches no file"):
        find_files(str(notes / "s*" / ".." / ".." / "secret.md"))


def test_a_file_that_becomes_a_link_is_not_followed(notes: Path, tmp_path: Path) -> None:
    """Also between finding and reading it; one that is gone costs only itself."""
    (tmp_path / "secret").write_text("secret")
    with open_input(str(notes)) as source:
        (notes / "a.txt").unlink()
        (notes / "a.txt").symlink_to(tmp_path / "secret")
        (notes / "b.md").unlink()
        first, second, *_ = read_requests(source, SamplingParams())
    assert isinstance(first, Completion)
    assert isinstance(second, Completion)
    assert first.error == "a.txt: leads out of the folder"
    assert second.error == "b.md: can't be opened (No such file or directory)"


def test_names_and_sizes_that_won_t_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is not UTF-8 and a file that is too large are bad rows."""
    monkeypatch.setattr(folder, "MAX_LINE_BYTES", 10)
    (tmp_path / "big").write_text("x" * 11)
    with open(os.fsencode(tmp_path) + b"/n\xe9", "w") as file:
        file.write("x")
    assert prompts(tmp_path) == [
        ("big", "big: is larger than 0 MiB"),
        ("n\\xe9", "n\\xe9: has a name that is not UTF-8"),
    ]


def test_a_folder_without_files_is_refused(tmp_path: Path) -> None:
    """So is a pattern that matches none."""
    for path, said in [(tmp_path, "holds no files"), (tmp_path / "*.md", "matches no file")]:
        with pytest.raises(ConfigError) as caught:
            requests(path)
        assert str(caught.value) == f"{path}: {said}; check the path"


def test_a_folder_s_job_goes_on_and_knows_changes(notes: Path, tmp_path: Path) -> None:
    """Its digest is that of all names and contents; a table of it has ids and texts."""
    output = tmp_path / "out.csv"
    assert run_fake(notes, "-o", output).exit_code == 3
    before = input_sha256(str(notes))
    assert run_fake(notes, "-o", output).exit_code == 3
    assert output.read_text().startswith("id,text,finish_reason,prompt_tokens")

    (notes / "a.txt").write_text("other")

    assert input_sha256(str(notes)) != before
    result = run_fake(notes, "-o", output)
    assert result.exit_code == 2
    assert "has answers of another row where the input has row 1 now" in result.output


def test_the_output_can_not_lie_in_the_input(notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be a row of the next run."""
    monkeypatch.chdir(notes)
    for source, output in [(".", "out.jsonl"), (str(notes), "sub/o.csv"), ("*.md", "o.md")]:
        result = run_fake(source, "-o", output)
        assert result.exit_code == 2
        said = f"Error: {output}: would be a row of {source}; choose another place for it\n"
        assert result.output == said
    assert run_fake("*.md", "-o", "o.jsonl").exit_code == 3


# Templates


def test_templates_take_rows_of_any_form(notes: Path, tmp_path: Path) -> None:
    """Keys of objects, lines, and text, path and name of files."""
    rows, lines = tmp_path / "a.jsonl", tmp_path / "a.txt"
    rows.write_text('{"id": 5, "max_tokens": "x", "who": {"name": "Ann"}, "n": [1]}\n{"who": 1}\n')
    lines.write_text("one\n\ntwo\n")

    assert prompts(rows, template="{{ who.name }} {{ max_tokens }} {{ row['n'][0] }}") == [
        (5, "Ann x 1"),
        (2, "--template: 'int object' has no attribute 'name'; the row has 'who', not "
            "'max_tokens', 'n'"),
    ]  # fmt: skip
    assert prompts(lines, template="<{{ line }}>") == [(1, "<one>"), (3, "<two>")]
    found = prompts(notes, template="{{ path }}|{{ name }}|{{ text }}")
    assert (found[0][1], found[-1][1]) == ("a.txt|a.txt|first", "sub/ü.md|ü.md|drittes")


def test_a_prompt_column_takes_objects_of_any_form(tmp_path: Path) -> None:
    """A row without it is a bad one, with what it has instead."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"q": "x", "nr": "a", "n": 3}\n{"p": "x"}\n{"q": 1}\nno\n')
    assert prompts(path, prompt_column="q", id_column="nr") == [
        ("a", "x"),
        (2, "q: is not there; the row has 'p'"),
        (3, "q: must be text, not int; --template takes any type"),
        (4, "is not JSON: Expecting value at column 1"),
    ]


def test_free_rows_are_no_openai_batch(tmp_path: Path) -> None:
    """With a template, `custom_id` and `body` are keys as others."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"custom_id": "a", "body": "x"}\n')
    with open_source(str(path), has_batches=False) as source:
        assert source.batch is None
    assert prompts(path, template="{{ body }}", id_column="custom_id") == [("a", "x")]
    result = run_fake(path, "-o", tmp_path / "o.jsonl", "--template", "{{ body }}")
    assert result.exit_code == 0


def test_standard_input_takes_a_template(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lines or its objects, as the first line tells."""
    for data, template in [(b"x\n", "{{ line }}"), (b'{"a": "x"}\n', "{{ a }}")]:
        source = inputs.InputSource(cast(BinaryIO, BytesIO(data)), None, "standard input")
        options = InputOptions(chat=False, template=template)
        (row,) = read_requests(source, SamplingParams(), options)
        assert isinstance(row, Request)
        assert row.prompt == "x"


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("a.txt", {"prompt_column": "x"}, "--prompt-column: {} has no columns; leave it out"),
        ("a.txt", {"id_column": "x"}, "--id-column: {} has no columns; leave it out"),
        ("a.txt", {"template": "{{ text }}"},
         "--template: {} has no column 'text'; it has 'line'"),
        ("a.jsonl", {"id_column": "x"},
         "--id-column: goes with --prompt-column or --template; without, a row of {} has its id "
         "under 'id'"),
        ("a.jsonl", {"template": "{{ x"}, "--template: is not valid Jinja: unexpected end of "
         "template, expected 'end of print statement'. (line 1)"),
        ("a.jsonl", {"template": "{% include 'x' %}{{ ''.__class__ }}"},
         "--template: '__class__' is not allowed in a template"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_are_refused(
    tmp_path: Path, name: str, options: dict[str, Any], said: str
) -> None:
    """In one line, before a row is read."""
    path = tmp_path / name
    path.write_text('{"a": "x"}\n')
    with open_input(str(path)) as source, pytest.raises(ConfigError) as caught:
        read_requests(source, SamplingParams(), InputOptions(**options))
    assert str(caught.value) == said.format(path)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''|attr('__class__') }}",
        "{{ row.items['__class__'] }}",
        "{{ row.update({'a': 1}) }}",
        "{{ a.append(1) }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ range(10**9)|list }}",
        "{% include 'x' %}",
        "{{ 1/0 }}",
        "{{ nothing }}",
        "{{ row['nothing'] }}",
        "{% for x in 5 %}{% endfor %}",
        "{{ a|int + 'x' }}",
    ],
)
def test_what_a_template_may_not_do_costs_the_row(source: str) -> None:
    """The sandbox refuses it, or Jinja does, in one line."""
    template = PromptTemplate(source)
    values = {"a": [1]}
    with pytest.raises(InputError) as caught:
        template.render(values)
    assert caught.value.field == "--template"
    assert "\n" not in str(caught.value)
    assert values == {"a": [1]}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ b|default('-') }}{{ a }}", "-1"),
        ("{% if b is defined %}{{ b }}{% endif %}{{ a }}", "1"),
        ("{{ row['b']|d('-') }}", "-"),
        ("{{ none }}|{{ row.none }}", "|"),
        ("{{ html|tojson }}{{ html }}", '"<é>"<é>'),
        ("{% for key in row %}{{ key }} {% endfor %}", "a none html "),
        ("{% set c = 5 %}{{ c }}", "5"),
        ("{{ range(2)|list }}\n", "[0, 1]"),
    ],
)
def test_what_a_template_may_do(source: str, expected: str) -> None:
    """Names that it asks for may be missing; nulls are nothing; nothing is escaped for HTML."""
    template = PromptTemplate(source)
    values = {"a": 1, "none": None, "html": "<é>"}
    assert template.missing(values) == []
    assert template.render(values) == expected


@given(
    st.dictionaries(st.text(st.characters(codec="utf-8")), st.text(st.characters(codec="utf-8")))
)
def test_row_values_are_no_template(values: dict[str, str]) -> None:
    """Every value is written as it is, under any name."""
    values = {**values, "evil": "{{ 1/0 }}{% for"}
    keys = "".join(f"{{{{ row[{name!r}] }}}}" for name in values if name.isprintable())
    expected = "".join(value for name, value in values.items() if name.isprintable())
    assert PromptTemplate(keys + ".").render(values) == expected + "."


def test_a_column_that_no_row_has_is_found_first() -> None:
    """By name and in `row`, but not what Jinja has, sets or asks for."""
    source = "{{ a }}{{ b }}{{ row['c d'] }}{{ e|d(1) }}{{ range(3) }}{% set f = 1 %}{{ f }}"
    assert PromptTemplate(source).missing(["a"]) == ["b", "c d"]
