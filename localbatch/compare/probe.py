"""What single computations cost: decode steps of some rows, and pieces of a prompt."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from localbatch.compare.bench import too_many
from localbatch.data.config import MAX_SLOTS, EngineConfig
from localbatch.data.errors import ConfigError
from localbatch.data.request import Request
from localbatch.engine.backend import Backend
from localbatch.engine.sampling import sample
from localbatch.engine.sizing import fit_context
from localbatch.scheduler.plan import PlanRow, StepPlan
from localbatch.scheduler.sequence import Sequence as TokenSequence

_FIRST_TOKEN = 64
"""Above what most vocabularies have for control tokens."""


@dataclass(frozen=True)
class ProbeTask:
    """Computations to be timed in one process. Raises `ConfigError` for sizes that won't do."""

    config: EngineConfig
    rows: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Rows of the decode steps."""
    cells: int = 32
    """Tokens that each row has in the KV cache before the first step."""
    prompts: tuple[int, ...] = (1, 8, 32, 128)
    """Lengths of the prompts."""
    repeats: int = 8

    def __post_init__(self) -> None:
        for name in ("rows", "prompts"):
            if not all(size >= 1 for size in getattr(self, name)):
                raise ConfigError(f"{name}: must be at least 1")
        for name in ("cells", "repeats"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: must be at least 1, not {getattr(self, name)}")
        if max(self.rows, default=0) > MAX_SLOTS:
            raise ConfigError(f"rows: {too_many(max(self.rows))}")


@dataclass(frozen=True)
class Cost:
    """What one computation takes."""

    tokens: int
    """One of each row of a decode step, or all of one row's prompt."""
    seconds: float
    """Median of the repeats."""

    @property
    def per_token_s(self) -> float:
        """Seconds for one token."""
        return self.seconds / self.tokens


@dataclass(frozen=True)
class Costs:
    """What a probe found."""

    decode: tuple[Cost, ...]
    prompt: tuple[Cost, ...]


def probe(
    backend: Backend, task: ProbeTask, clock: Callable[[], float] = time.perf_counter
) -> Costs:
    """Time the computations of a task; `ConfigError` if memory is too short for them."""
    most, steps = max(task.rows, default=1), 1 + task.repeats * len(task.rows)
    cells = max(task.cells + steps, *task.prompts, 1)
    config = replace(task.config, parallel=most, lanes=None)
    context = fit_context(config, backend.card, most, cells, backend.on_gpu)
    backend.open(replace(context, may_pad=False))
    prompt = []
    for length in task.prompts:
        seconds = _prompt_seconds(backend, length, context.chunk, task.repeats, clock)
        prompt.append(Cost(length, statistics.median(seconds)))
    if not task.rows:
        return Costs((), tuple(prompt))
    rows = [_row(backend, number, task.cells) for number in range(most)]
    for number, row in enumerate(rows):
        _compute_prompt(backend, row, number, context.chunk)
    _step(backend, rows)  # the first one is slow
    decode = []
    for count in task.rows:
        seconds = []
        for _ in range(task.repeats):
            began = clock()
            _step(backend, rows[:count])
            seconds.append(clock() - began)
        decode.append(Cost(count, statistics.median(seconds)))
    return Costs(tuple(decode), tuple(prompt))


def _prompt_seconds(
    backend: Backend, length: int, chunk: int, repeats: int, clock: Callable[[], float]
) -> list[float]:
    seconds = []
    for _ in range(repeats + 1):
        backend.clear()
        row = _row(backend, 0, length)
        began = clock()
        _compute_prompt(backend, row, 0, chunk)
        seconds.append(clock() - began)
    backend.clear()
    return seconds[1:]  # the first one is slow


def _row(backend: Backend, number: int, length: int) -> TokenSequence:
    most = backend.card.num_vocab - _FIRST_TOKEN
    tokens = [_FIRST_TOKEN + (number * 31 + place * 7) % most for place in range(length)]
    return TokenSequence(Request(number, number, prompt="-"), tokens)


def _compute_prompt(backend: Backend, row: TokenSequence, slot: int, chunk: int) -> None:
    """Compute a prompt, in pieces if it is long; its row gets its first token."""
    length = row.num_tokens
    for start in range(0, length, chunk):
        end = min(start + chunk, length)
        _compute(backend, [PlanRow(row, slot, start, end, end == length, True)])


def _compute(backend: Backend, rows: Sequence[PlanRow]) -> None:
    """Compute rows; those that want logits get their next token."""
    tokens = backend.forward(StepPlan(list(rows), [], []), sample)
    for row, token in zip(rows, tokens, strict=True):
        if token is not None:
            row.sequence.tokens.append(token)


def _step(backend: Backend, rows: Sequence[TokenSequence]) -> None:
    places = enumerate(rows)
    _compute(
        backend, [PlanRow(r, i, r.num_tokens - 1, r.num_tokens, True, False) for i, r in places]
    )
