"""A deterministic stand-in for a model: no file, no arithmetic, the same rules as llama.cpp.

Its logits are a hash of all earlier tokens of the sequence, so an answer depends on its row alone,
and any mistake in positions, slots or copies changes it. What llama.cpp refuses, it refuses.
"""

from __future__ import annotations

import os
import signal
import time
from hashlib import blake2b

import numpy as np

from localbatch.data.config import EngineConfig
from localbatch.data.errors import DecodeError
from localbatch.engine.backend import ContextConfig, ModelCard, Numerics, Sample
from localbatch.engine.machine import available_memory
from localbatch.engine.placement import ON_CPU, Gpu, Placement, place
from localbatch.scheduler.plan import StepPlan

BOS, EOS, FIRST_BYTE = 0, 1, 2
NUM_VOCAB = FIRST_BYTE + 256
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def fake_placement(config: EngineConfig) -> Placement:
    """Return where the fake model is: on as many GPUs as the settings say there are."""
    gpus = [Gpu(f"FAKE{i}", "no device", 1 << 40, 1 << 40) for i in range(config.fake_gpus)]
    return place(config, gpus, 1, lambda: 1)


class FakeBackend:
    """Byte tokens, and logits that are a hash of the sequence."""

    def __init__(
        self, step_s: float = 0.0, dies_on: str = "", placement: Placement = ON_CPU
    ) -> None:
        self.card = ModelCard(
            description="fake", architecture="fake", num_params=0, file_bytes=0, loaded_bytes=0,
            num_vocab=NUM_VOCAB, max_ctx=4096, kv_bytes_per_cell=1, bos_token=BOS, eos_token=EOS,
            end_tokens=frozenset({EOS}), adds_bos=True, chat_template=CHAT_TEMPLATE,
        )  # fmt: skip
        self.decode_s = 0.0
        self.on_gpu, self.placement = bool(placement.gpus), placement
        self.build = "fake"
        self.buffer_bytes = 0
        self.open_s = 0.0
        self.num_calls = 0
        self.threads = 0
        self._step_s, self._dies_on = step_s, dies_on
        self._config: ContextConfig | None = None
        self._slots: list[list[int]] = []

    def free_bytes(self) -> int:
        """Return what the machine has."""
        return available_memory()

    def set_threads(self, threads: int) -> None:
        """Note the number; it changes nothing."""
        self.threads = threads

    def sibling(self) -> FakeBackend:
        """Return another one; there is no model to share."""
        return FakeBackend(self._step_s, self._dies_on, self.placement)

    def open(self, config: ContextConfig) -> Numerics:
        """Make empty slots."""
        self._config, self.threads = config, config.threads
        self.clear()
        return Numerics.SAME_AS_ALONE

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Return a token a byte, after BOS if asked for."""
        del parse_special
        return [BOS] * add_special + [FIRST_BYTE + b for b in text.encode()]

    def token_bytes(self, token: int) -> bytes:
        """Return the byte of a token."""
        return bytes([token - FIRST_BYTE]) if token >= FIRST_BYTE else b""

    def forward(self, plan: StepPlan, sample: Sample) -> list[int | None]:
        """Extend the slots and hash them."""
        start = time.perf_counter()
        if self._step_s:
            time.sleep(self._step_s)
        self._check_own_slots(plan)
        if self._dies_on and any(self._dies_on in self._text(row.tokens) for row in plan.rows):
            os.kill(os.getpid(), signal.SIGKILL)
        for slot in plan.releases:
            self._slot(slot).clear()
        for source, target in plan.moves:
            self._slots[self._slot_number(target)] = self._slot(source)
            self._slots[source] = []
        for source, target, length in plan.copies:
            self._copy(source, target, length)
        wanting = []
        for row in plan.rows:
            self._extend(row.slot, row.start, row.tokens)
            if row.wants_logits:
                wanting.append(row)
        logits = np.stack([_logits(self._slots[r.slot]) for r in wanting]) if wanting else None
        self.decode_s += time.perf_counter() - start
        self.num_calls += 1
        tokens = iter(sample(wanting, logits) if logits is not None else [])
        return [next(tokens) if row.wants_logits else None for row in plan.rows]

    def _text(self, tokens: list[int]) -> str:
        return b"".join(map(self.token_bytes, tokens)).decode(errors="replace")

    def clear(self) -> None:
        """Empty all slots."""
        assert self._config is not None
        slots = self._config.num_slots + self._config.num_prefix_slots
        self._slots = [[] for _ in range(slots)]

    def close(self) -> None:
        """Forget everything."""
        self._config, self._slots = None, []

    def _check_own_slots(self, plan: StepPlan) -> None:
        """Raise `DecodeError` for what only copies may touch."""
        assert self._config is not None
        slots = [row.slot for row in plan.rows] + plan.releases
        slots += [slot for move in plan.moves for slot in move]
        if slots and max(slots) >= self._config.num_slots:
            raise DecodeError(f"a slot is outside of 0..{self._config.num_slots - 1}", -1)

    def _slot_number(self, slot: int) -> int:
        if not 0 <= slot < len(self._slots):
            raise DecodeError(f"slot {slot} is outside of 0..{len(self._slots) - 1}", -1)
        return slot

    def _slot(self, slot: int) -> list[int]:
        return self._slots[self._slot_number(slot)]

    def _copy(self, source: int, target: int, length: int) -> None:
        cells = self._slot(source)
        if len(cells) < length:
            raise DecodeError(f"slot {source} holds {len(cells)} tokens, not {length}", -1)
        self._slots[self._slot_number(target)] = cells[:length]

    def _extend(self, slot: int, start: int, tokens: list[int]) -> None:
        assert self._config is not None
        cells = self._slot(slot)
        if start != len(cells):
            raise DecodeError(f"slot {slot} holds {len(cells)} tokens, not {start}", -1)
        if not tokens or not all(0 <= t < NUM_VOCAB for t in tokens):
            raise DecodeError(f"slot {slot}: bad tokens", -1)
        cells += tokens
        pool = self._config.pool_cells
        used = sum(map(len, self._slots))
        if len(cells) > self._config.row_cells or (pool is not None and used > pool):
            raise DecodeError("no KV cell is free", 1)


def _logits(tokens: list[int]) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Return logits in [0, 10) from a hash of the tokens."""
    digest = blake2b(np.asarray(tokens, np.int32).tobytes(), digest_size=8).digest()
    state = np.random.Generator(np.random.Philox(int.from_bytes(digest, "little")))
    return state.random(NUM_VOCAB, dtype=np.float32) * np.float32(10)
