"""The ways to run rows; each is a class that makes ready, and then computes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from localbatch.compare.bench import Bench, too_many
from localbatch.data.config import MAX_SLOTS, EngineConfig, KVLayout, Order
from localbatch.data.errors import ConfigError
from localbatch.data.request import Completion
from localbatch.engine.backend import Backend, Numerics
from localbatch.engine.engine import Engine
from localbatch.engine.sampling import sample
from localbatch.engine.sizing import PREFIX_SLOTS
from localbatch.scheduler.plan import StepPlan
from localbatch.scheduler.sequence import Sequence as TokenSequence


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
    def numerics(self) -> Numerics | None:
        """What the engine found a row's last bits to depend on, in the modes that are its own."""
        return None

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
    def numerics(self) -> Numerics | None:
        """What the engine found."""
        return self._engine.stats.numerics

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
        batch = min(self.bench.batch, len(self.bench.requests))
        lanes = -(-batch // (MAX_SLOTS - PREFIX_SLOTS))
        if self.bench.config.kv_layout is KVLayout.UNIFIED:
            lanes = 1
            if batch > MAX_SLOTS:
                raise ConfigError(f"batch: {too_many(batch)}")
        return replace(
            self.bench.config, lanes=lanes, parallel=batch, order=Order.INPUT, share_prefixes=False
        )


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
