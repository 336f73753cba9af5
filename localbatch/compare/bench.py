"""A loaded model and the rows to run on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from localbatch.compare.trace import Trace, TracedBackend
from localbatch.data.config import MAX_SLOTS, EngineConfig, SchedulerConfig
from localbatch.data.errors import ConfigError, InputError
from localbatch.data.request import Request
from localbatch.engine.backend import ContextConfig
from localbatch.engine.prompt import PromptEncoder
from localbatch.engine.sampling import sample
from localbatch.engine.sizing import block_of, fit_context
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
            raise ConfigError(f"batch: {too_many(slots)}")
        card, longest = self.backend.card, self.config.ctx or self.backend.card.max_ctx
        cells = max(len(self.prompts[r.index]) + r.params.max_tokens for r in self.requests)
        config = replace(self.config, parallel=slots, lanes=None)
        memory = self.backend.free_bytes() // self.instances
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


def too_many(rows: int) -> str:
    """Say that one context does not take so many rows."""
    return (
        f"{rows} rows at one time would need one llama.cpp context, which takes at most "
        f"{MAX_SLOTS} rows; only continuous batches in streams go on in several"
    )


Forward: TypeAlias = Callable[[StepPlan], list[int | None]]


def scheduling_of(context: ContextConfig) -> SchedulerConfig:
    """Return the scheduler's settings for a context."""
    return SchedulerConfig(
        num_slots=context.num_slots, row_cells=context.row_cells, pool_cells=context.pool_cells,
        chunk=context.chunk, block=block_of(context.chunk),
        max_step_tokens=max(_MOST_STEP_TOKENS, context.chunk),
    )  # fmt: skip
