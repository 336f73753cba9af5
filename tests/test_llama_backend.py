"""The llama.cpp backend: a row's bits do not depend on the rows beside it."""

from __future__ import annotations

import ctypes
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from llama_cpp import llama_cpp as lib

from localbatch import BindingError, ModelError
from localbatch.data.config import SchedulerConfig
from localbatch.engine import binding, library, numerics
from localbatch.engine.backend import ContextConfig, Numerics
from localbatch.engine.cache import cache_folder
from localbatch.engine.llama import LlamaBackend
from localbatch.scheduler.plan import PlanRow
from localbatch.scheduler.scheduler import Scheduler
from localbatch.scheduler.sequence import Sequence
from tests import tiny_gguf
from tests.factories import create_requests

Bits = npt.NDArray[np.uint32]
KINDS = sorted(tiny_gguf.FILE_TYPES)
CELLS = 1024


class Row(NamedTuple):
    """A row of made-up tokens; the tokens of its answer are set beforehand, too."""

    number: int
    length: int
    answer: int

    def token(self, place: int) -> int:
        """Return the token at a place of prompt and answer."""
        return 7 + (self.number * 31 + place * place * 17) % 400

    @property
    def prompt(self) -> list[int]:
        return [self.token(place) for place in range(self.length)]


SHORT = [
    Row(i, length, answer=3 + i % 4)
    for i, length in enumerate([5, 1, 2, 40, 3, 17, 64, 9, 30, 8, 4, 33])
]
LONG = [Row(50 + i, length, answer=8) for i, length in enumerate([310, 520, 300, 700])]
MORE = [Row(70 + i, 6 + i, answer=1 + i % 7) for i in range(24)]


def logits_of(
    backend: LlamaBackend, rows: list[Row], num_slots: int, threads: int = 1, chunk: int = 512
) -> dict[Row, list[Bits]]:
    """Run rows as the engine does; returns the bits of each row's logits, token by token."""
    backend.open(ContextConfig(num_slots, CELLS, pool_cells=None, chunk=chunk, threads=threads))
    scheduler = Scheduler(SchedulerConfig(num_slots, CELLS, chunk=chunk, block=512))
    by_index = dict(enumerate(rows))
    seen: dict[Row, list[Bits]] = {row: [] for row in rows}
    for index, row in by_index.items():
        request = create_requests(1, first=index, max_tokens=row.answer)[0]
        scheduler.add(Sequence(request, row.prompt))

    def choose(plan_rows: list[PlanRow], logits: npt.NDArray[np.float32]) -> list[int]:
        chosen = []
        for plan_row, values in zip(plan_rows, logits, strict=True):
            row = by_index[plan_row.sequence.request.index]
            seen[row].append(values.copy().view(np.uint32))
            chosen.append(row.token(plan_row.sequence.num_tokens))
        return chosen

    while scheduler.has_work:
        plan = scheduler.schedule()
        scheduler.update(plan, backend.forward(plan, choose))  # type: ignore[arg-type]
    return seen


def differences(expected: dict[Row, list[Bits]], actual: dict[Row, list[Bits]]) -> list[str]:
    """Return where the bits of rows that are in both differ."""
    return [
        f"row {row.number}, token {i}"
        for row in expected.keys() & actual.keys()
        for i in range(row.answer)
        if not np.array_equal(expected[row][i], actual[row][i])
    ]


@pytest.fixture(params=KINDS)
def backend(request: pytest.FixtureRequest, tiny_models: dict[str, Path]) -> Iterator[LlamaBackend]:
    made = LlamaBackend(str(tiny_models[request.param]))
    yield made
    made.close()


def promises_nothing(backend: LlamaBackend) -> bool:
    """Say whether the probe found that bits vary on this processor; the run says so, too."""
    return backend.open(ContextConfig(1, CELLS, None, 512, threads=1)) is Numerics.VARIES


def test_every_weight_type_is_promised(tiny_models: dict[str, Path]) -> None:
    """Tests of the promise are not skipped unnoticed: where none is made, this one fails."""
    without = []
    for kind, path in tiny_models.items():
        backend = LlamaBackend(str(path))
        without += [kind] if promises_nothing(backend) else []
        backend.close()

    assert without == []


class TestSameBits:
    def test_in_any_batch(self, backend: LlamaBackend) -> None:
        """Whatever the batch's size, the neighbours, the place and the number of threads.

        The neighbours are up to 700 tokens long, so that llama.cpp attends to more cells than a
        short row has; rows end apart, so that slots are left, moved and taken again.
        """
        if promises_nothing(backend):
            pytest.skip("the probe found that bits vary with the batch")
        alone = logits_of(backend, SHORT, num_slots=1)
        shuffle = random.Random(4)

        for num_slots in (2, 3, 5, 8, 9, 16, 33):
            rows = [*SHORT, *LONG[:2], *(MORE if num_slots > 16 else [])]
            shuffle.shuffle(rows)
            found = logits_of(backend, rows, num_slots, threads=2 if num_slots in (3, 16) else 1)

            assert found.keys() > alone.keys()
            assert differences(alone, found) == [], f"{num_slots} slots"

    def test_of_prompts_around_the_border_of_a_chunk(self, backend: LlamaBackend) -> None:
        """Chunks are cut at the same places whatever is beside them."""
        if promises_nothing(backend):
            pytest.skip("the probe found that bits vary with the batch")
        rows = [Row(i, n, answer=2) for i, n in enumerate([511, 512, 513, 700, 1])]
        alone = logits_of(backend, rows, num_slots=1)

        assert differences(alone, logits_of(backend, rows, num_slots=4)) == []
        assert differences(alone, logits_of(backend, rows[::-1], num_slots=5, threads=2)) == []

    @pytest.mark.parametrize("chunk", [32, 100, 128])
    def test_of_prompts_in_smaller_chunks(self, backend: LlamaBackend, chunk: int) -> None:
        """A prompt has the bits of one computed 512 tokens at a time, wherever it ends."""
        if promises_nothing(backend):
            pytest.skip("the probe found that bits vary with the batch")
        lengths = [31, 129, 135, 136, 300, 399, 511, 512, 513, 519, 520, 641, 700]
        rows = [Row(i, n, answer=1) for i, n in enumerate(lengths)]
        found = logits_of(backend, rows, num_slots=4, chunk=chunk)

        differing = [
            row.length
            for row in rows
            if not np.array_equal(raw_logits(backend, row)[0], found[row][0])
        ]
        # The 513th token of a prompt alone is computed as an answer's.
        assert differing in ([], [513])

    def test_as_a_context_with_one_sequence(self, backend: LlamaBackend) -> None:
        """Prompts have them on any processor; answers where the probe says "same as alone".

        The 513th token of a prompt, which is alone behind a chunk, is computed as an answer's.
        """
        found = backend.open(ContextConfig(8, CELLS, None, 512, threads=1))
        rows = [SHORT[0], SHORT[1], SHORT[2], Row(60, 511, 4), Row(61, 513, 4), LONG[3]]
        batched = logits_of(backend, rows, num_slots=8)

        for row in rows:
            alone = raw_logits(backend, row)
            if row.length != 513:
                assert np.array_equal(alone[0], batched[row][0]), row
            if found is Numerics.SAME_AS_ALONE:
                assert differences({row: alone}, batched) == []


def raw_logits(backend: LlamaBackend, row: Row) -> list[Bits]:
    """Return a row's logits from a plain context, made and fed as llama.cpp's examples do it."""
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = CELLS, 512, 512
    params.n_threads = params.n_threads_batch = 1
    params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = lib.llama_init_from_model(backend._model.handle, params)
    seen = []
    chunks = [row.prompt[i : i + 512] for i in range(0, row.length, 512)]
    answer = [[row.token(row.length + i)] for i in range(row.answer - 1)]
    for number, chunk in enumerate([*chunks, *answer]):
        tokens = (ctypes.c_int32 * len(chunk))(*chunk)
        assert lib.llama_decode(context, lib.llama_batch_get_one(tokens, len(chunk))) == 0
        if number >= len(chunks) - 1:
            last = lib.llama_get_logits_ith(context, -1)
            values = np.ctypeslib.as_array(last, shape=(backend.card.num_vocab,))
            seen.append(values.copy().view(np.uint32))
    lib.llama_free(context)
    return seen


class TestNumerics:
    def test_only_streams_on_the_cpu_promise_anything(self, tiny_model: Path) -> None:
        """Unified rows and flash attention sum in the order of what is beside them."""
        backend = LlamaBackend(str(tiny_model))
        unified = ContextConfig(2, 256, pool_cells=512, chunk=512, threads=1)
        flash = ContextConfig(2, 256, None, chunk=512, threads=1, flash_attention=True)

        assert backend.open(unified) is Numerics.VARIES
        assert backend.open(flash) is Numerics.VARIES
        backend.close()

    @pytest.mark.parametrize(
        ("rows", "size"), [(1, 8), (7, 8), (8, 8), (9, 12), (12, 12), (33, 36), (255, 256)]
    )
    def test_padded_sizes(self, rows: int, size: int) -> None:
        """The next multiple of 4, at least 8; never more than llama.cpp's 256 sequences."""
        assert numerics.padded(rows) == size

    def test_are_measured_once(self, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A later run reads what was found; other threads, or another file, are measured anew."""
        calls: list[int] = []

        def probe(_model: object, threads: int) -> Numerics:
            calls.append(threads)
            return Numerics.SAME_IN_ANY_BATCH

        monkeypatch.setattr(numerics, "probe", probe)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tiny_model.parent / "once"))
        model = binding.Model(str(tiny_model))

        found = [numerics.numerics_of(model, str(tiny_model), n) for n in (1, 1, 2, 1, 2)]
        os.utime(tiny_model)
        numerics.numerics_of(model, str(tiny_model), 1)

        assert found == [Numerics.SAME_IN_ANY_BATCH] * 5
        assert calls == [1, 2, 1]
        model.close()

    @pytest.mark.parametrize("kept", ["not JSON", "[1]", None])
    def test_damaged_measurements_are_measured_again(
        self, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, kept: str | None
    ) -> None:
        """A cache is never a reason to fail, nor an answer that isn't one."""
        monkeypatch.setenv("XDG_CACHE_HOME", str(tiny_model.parent / "damaged"))
        model = binding.Model(str(tiny_model))
        expected = numerics.numerics_of(model, str(tiny_model), 1)
        file = cache_folder() / "measured.json"
        key = next(iter(json.loads(file.read_text())))

        file.write_text(kept if kept is not None else json.dumps({key: "nonsense"}))

        assert numerics.numerics_of(model, str(tiny_model), 1) is expected
        assert json.loads(file.read_text()) == {key: expected.value}
        model.close()


class TestModels:
    def test_a_cut_off_file_is_refused_with_llama_cpps_reason(
        self, tiny_model: Path, tmp_path: Path
    ) -> None:
        """The message names the file and says what is wrong with it."""
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(tiny_model.read_bytes()[:-1000])

        with pytest.raises(ModelError, match=r"cut\.gguf: .*not within the file bounds"):
            LlamaBackend(str(cut))

    def test_a_model_says_what_it_is(self, tiny_model: Path) -> None:
        """The card holds what tests/tiny_gguf.py wrote.

        KV cache: 2 layers x 2 KV heads x 16 numbers x 2 (key and value) x 2 bytes = 256.
        """
        backend = LlamaBackend(str(tiny_model))
        card = backend.card

        assert (card.architecture, card.max_ctx, card.num_vocab) == ("llama", 2048, 448)
        assert (card.bos_token, card.eos_token, card.end_tokens) == (1, 2, frozenset({2}))
        assert (card.adds_bos, card.chat_template) == (True, tiny_gguf.CHAT_TEMPLATE)
        assert card.kv_bytes_per_cell == 256
        assert card.file_bytes == tiny_model.stat().st_size
        assert card.metadata["general.name"] == "tiny random model"
        backend.close()

    def test_a_token_of_any_length_has_all_its_bytes(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Longer than the first buffer."""
        monkeypatch.setattr(tiny_gguf, "WORDS", ["é" * 300, "short"])
        path = tmp_path / "long.gguf"
        tiny_gguf.write(path)
        backend = LlamaBackend(str(path))

        # Behind 6 control tokens and 256 bytes.
        assert backend.token_bytes(262).decode() == " " + "é" * 300
        assert backend.token_bytes(263) == b" short"
        backend.close()


class TestBinding:
    def test_this_one_fits(self) -> None:
        """The version that is installed is the one that is tested here."""
        assert library.check_binding().startswith("0.3.")

    def test_without_a_field_is_refused_in_words(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A structure that lacks a field would be written at the wrong place."""

        class Other(ctypes.Structure):
            _fields_ = [
                field for field in lib.llama_context_params._fields_ if field[0] != "kv_unified"
            ]

        monkeypatch.setattr(library.lib, "llama_context_params", Other)

        with pytest.raises(BindingError) as refused:
            library.check_binding()

        version = library.llama_cpp.__version__
        assert str(refused.value) == (
            f"llama-cpp-python {version} does not fit (llama_context_params lacks kv_unified); "
            f"install {library.SUPPORTED}"
        )

    @pytest.mark.parametrize("name", ["llama_batch", "llama_decode"])
    def test_without_a_name_is_refused_in_words(
        self, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        """A structure or a function that is gone."""
        monkeypatch.delattr(library.lib, name)

        with pytest.raises(BindingError, match=rf"does not fit \((no )?{name}"):
            library.check_binding()

    def test_with_shifted_fields_is_refused_in_words(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Documented defaults that are not in their places mean another layout."""
        real = lib.llama_context_default_params()
        fields = lib.llama_context_params._fields_

        class Shifted(ctypes.Structure):
            _fields_ = [("new", ctypes.c_uint32), *fields]

        memory = ctypes.create_string_buffer(bytes(real), ctypes.sizeof(Shifted))
        shifted = Shifted.from_buffer(memory)
        monkeypatch.setattr(library.lib, "llama_context_default_params", lambda: shifted)

        with pytest.raises(BindingError, match=r"llama_context_params reads as \(2048, 512, "):
            library.check_binding()
