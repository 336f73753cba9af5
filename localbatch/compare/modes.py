"""The ways to run rows; each is a class that makes ready, and then computes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from localbatch.compare.trace import Trace, TracedBackend
from localbatch.data.config import MAX_SLOTS, EngineConfig, Order, SchedulerConfig
from localbatch.data.errors import ConfigError, InputError
from localbatch.data.request import Completion, Request
from localbatch.engine.backend import Backend, ContextConfig, Numerics
from localbatch.engine.engine import Engine
from localbatch.engine.machine import available_memory
from localbatch.engine.prompt import PromptEncoder
from localbatch.engine.sampling import sample
from localbatch.engine.sizing import PREFIX_SLOTS, block_of, fit_context
from localbatch.scheduler.plan import StepPlan
from localbatch.scheduler.scheduler import Scheduler
from localbatch.scheduler.sequence import Sequence as TokenSequence

_MOST_STEP_TOKENS = 2048


@dataclass
class Bench:
    """A loaded model and the rows to run on it; modes leave their results here."""

    backend: TracedBackend
    trace: Trace
    config: EngineConfig
    requests: Sequence[Request]
    """Those to be run here."""
    batch: int
    instances: int = 1
    prompts: dict[int, list[int]] = field(default_factory=dict)
    """Token ids by `Request.index`, of the rows that can be run."""
    answers: dict[int, tuple[int, ...]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    padding_tokens: int = 0

    def encode(self) -> None:
        """Turn the rows into tokens; one that can't be run has its error in `errors`."""
        encoder = PromptEncoder(self.backend, self.config.chat_template)
        longest = self.config.ctx or self.backend.card.max_ctx
        for request in self.requests:
            try:
                tokens, _ = encoder.encode_fitting(request, longest, self.config.overlength)
                self.prompts[request.index] = tokens
            except InputError as error:
                self.errors[request.index] = str(error)
        self.requests = [row for row in self.requests if row.index in self.prompts]

    def sequences(self) -> list[TokenSequence]:
        """Return the rows, not begun, in their order."""
        return [TokenSequence(row, self.prompts[row.index]) for row in self.requests]

    def open(self, slots: int) -> ContextConfig:
        """Make one context for so many rows at a time; `ConfigError` if memory is too short.

        Batches are not padded: this is what llama.cpp does by itself.
        """
        if slots > MAX_SLOTS:
            raise ConfigError(f"batch: llama.cpp takes at most {MAX_SLOTS} rows in a context")
        card, longest = self.backend.card, self.config.ctx or self.backend.card.max_ctx
        cells = max(len(self.prompts[r.index]) + r.params.max_tokens for r in self.requests)
        config = replace(self.config, parallel=slots, lanes=None)
        memory = available_memory() // self.instances
        context = fit_context(config, card, slots, min(cells, longest), self.backend.on_gpu, memory)
        context = replace(context, may_pad=False)
        self.backend.open(context)
        return context

    def run(self, sequences: Sequence[TokenSequence], forward: Forward | None = None) -> None:
        """Compute rows in the opened context: a place that is free is given to the next one."""
        assert self.backend.context is not None
        scheduler = Scheduler(scheduling_of(self.backend.context), self.backend.card.end_tokens)
        for sequence in sequences:
            scheduler.add(sequence)
        forward = forward or (lambda plan: self.backend.forward(plan, sample))
        while scheduler.has_work:
            plan = scheduler.schedule()
            scheduler.update(plan, forward(plan))
        self.backend.clear()
        for sequence in sequences:
            self.answers[sequence.request.index] = tuple(sequence.generated)


Forward = Callable[[StepPlan], list[int | None]]


def scheduling_of(context: ContextConfig) -> SchedulerConfig:
    """Return the scheduler's settings for a context."""
    return SchedulerConfig(
        num_slots=context.num_slots, row_cells=context.row_cells, pool_cells=context.pool_cells,
        chunk=context.chunk, block=block_of(context.chunk),
        max_step_tokens=max(_MOST_STEP_TOKENS, context.chunk),
    )  # fmt: skip


class Mode(ABC):
    """A way to run rows. `prepare` is not timed, `run` is; answers go to `bench.answers`."""

    name: ClassVar[str]
    about: ClassVar[str]
    """What it is, in a few words."""
    instances: ClassVar[bool] = False
    """Whether several processes share the rows."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench

    @abstractmethod
    def prepare(self) -> list[Backend]:
        """Make the contexts; returns what has one."""

    @abstractmethod
    def run(self) -> None:
        """Compute all rows."""

    @property
    def batch_rows(self) -> int:
        """Most rows of which one computation may take a new token."""
        return 1

    @property
    def width(self) -> int:
        """Rows that are alive at one time."""
        return self.batch_rows

    @property
    def lanes(self) -> int:
        """Contexts that compute at the same time."""
        return 1

    @property
    def varies(self) -> bool:
        """Whether the engine says that answers may depend on the batch."""
        return False

    def close(self) -> None:
        """Free contexts and model."""
        self.bench.backend.close()


class Sequential(Mode):
    """One row after another in a context for one row."""

    name = "sequential"
    about = "one row after another"

    def prepare(self) -> list[Backend]:
        """Make a context for one row."""
        self.bench.open(1)
        return [self.bench.backend]

    def run(self) -> None:
        """Compute the rows in their order."""
        self.bench.run(self.ordered(self.bench.sequences()))

    def ordered(self, sequences: list[TokenSequence]) -> list[TokenSequence]:
        """Return the order in which rows are begun."""
        return sequences


class LengthSorted(Sequential):
    """One row after another, the shortest first."""

    name = "length-sorted"
    about = "one row after another, the shortest prompt first"

    def ordered(self, sequences: list[TokenSequence]) -> list[TokenSequence]:
        """Return the rows by the length of their prompts."""
        return by_length(sequences)


class Interleaved(Mode):
    """Many rows alive, a computation of its own for each token of each."""

    name = "interleaved"
    about = "many rows alive, one llama_decode call for each token of each"

    @property
    def width(self) -> int:
        """As many as the batch of the others."""
        return min(self.bench.batch, len(self.bench.requests))

    def prepare(self) -> list[Backend]:
        """Make one context for all rows that are alive."""
        self.bench.open(self.width)
        return [self.bench.backend]

    def run(self) -> None:
        """Compute each plan row by row."""
        self.bench.run(self.bench.sequences(), self._one_by_one)

    def _one_by_one(self, plan: StepPlan) -> list[int | None]:
        tokens: list[int | None] = []
        for number, row in enumerate(plan.rows):
            alone = StepPlan([row], [], [])
            if number == 0:
                alone = replace(plan, rows=[row])
            tokens += self.bench.backend.forward(alone, sample)
        return tokens


class MultiInstance(Sequential):
    """Several processes, each with a model of its own, share the rows."""

    name = "multi-instance"
    about = "several processes with a model each, one row after another"
    instances = True


class Static(Mode):
    """Groups of rows that begin and end together."""

    name = "static"
    about = "groups begin and end together, in the order of arrival"

    @property
    def batch_rows(self) -> int:
        """The size of a group."""
        return min(self.bench.batch, len(self.bench.requests))

    def prepare(self) -> list[Backend]:
        """Make one context for a group."""
        self.bench.open(self.batch_rows)
        return [self.bench.backend]

    def run(self) -> None:
        """Compute group after group; count what a rectangular batch would compute besides."""
        rows, size = self.ordered(self.bench.sequences()), self.batch_rows
        for first in range(0, len(rows), size):
            group = rows[first : first + size]
            self.bench.run(group)
            self.bench.padding_tokens += padding_of(group)

    def ordered(self, sequences: list[TokenSequence]) -> list[TokenSequence]:
        """Return the order in which rows are put into groups."""
        return sequences


class StaticSorted(Static):
    """Groups of rows of like length."""

    name = "static-sorted"
    about = "groups begin and end together, prompts of like length in a group"

    def ordered(self, sequences: list[TokenSequence]) -> list[TokenSequence]:
        """Return the rows by the length of their prompts."""
        return by_length(sequences)


class ContinuousAuto(Mode):
    """The engine as it is, planning for itself."""

    name = "continuous-auto"
    about = "a row that ends makes room for the next one at once; the automatic plan"

    def __init__(self, bench: Bench) -> None:
        super().__init__(bench)
        self._engine = Engine(bench.backend, self.settings())
        self._done: list[Completion] = []

    def settings(self) -> EngineConfig:
        """Return what is asked of the engine."""
        return replace(self.bench.config, parallel=None, lanes=None)

    def prepare(self) -> list[Backend]:
        """Hand over the rows, plan, and make the contexts."""
        self._done += self._engine.submit(self.bench.requests)
        self._engine.prepare()
        return [lane.backend for lane in self._engine.lanes]

    def run(self) -> None:
        """Step until all rows are done."""
        while self._engine.has_work:
            for event in self._engine.step():
                if isinstance(event, Completion):
                    self._done.append(event)
        for completion in self._done:
            if completion.error is not None:
                self.bench.errors[completion.index] = completion.error
            else:
                self.bench.answers[completion.index] = completion.token_ids

    @property
    def batch_rows(self) -> int:
        """The rows of a lane."""
        return self.width // self.lanes

    @property
    def width(self) -> int:
        """The rows of all lanes."""
        return self._engine.stats.slots

    @property
    def lanes(self) -> int:
        """As many as the plan has."""
        return self._engine.stats.lanes

    @property
    def varies(self) -> bool:
        """What the engine found."""
        return self._engine.stats.numerics is Numerics.VARIES

    def close(self) -> None:
        """Free the lanes, then the model."""
        self._engine.close()
        super().close()


class Continuous(ContinuousAuto):
    """The engine with a fixed, simple plan."""

    name = "continuous"
    about = "a row that ends makes room for the next one at once; one lane, no shared prefixes"

    def settings(self) -> EngineConfig:
        """Return as many rows as a static batch has, in one lane if it holds them."""
        lanes = -(-self.bench.batch // (MAX_SLOTS - PREFIX_SLOTS))
        return replace(
            self.bench.config, lanes=lanes, parallel=self.bench.batch, order=Order.INPUT,
            share_prefixes=False,
        )  # fmt: skip


MODES: dict[str, type[Mode]] = {
    mode.name: mode
    for mode in (
        Sequential, LengthSorted, Interleaved, MultiInstance, Static, StaticSorted, Continuous,
        ContinuousAuto,
    )
}  # fmt: skip
"""All modes, in the order of the tables."""


def by_length(sequences: Sequence[TokenSequence]) -> list[TokenSequence]:
    """Return rows by the length of their prompts, those of one length in their order."""
    return sorted(sequences, key=lambda sequence: sequence.num_prompt)


def padding_of(group: Sequence[TokenSequence]) -> int:
    """Return the tokens that fill a finished group up to a rectangle: prompts and answers."""
    longest_prompt = max(s.num_prompt for s in group)
    longest_answer = max(s.num_generated for s in group)
    return sum(longest_prompt - s.num_prompt + longest_answer - s.num_generated for s in group)
