"""Hand-made requests, sequences and schedulers: no model, no tokenizer.

Token ids are chosen to tell where they come from: prompt token `p` of row `r` is `1000 * (r + 1) +
p`, so a cell that holds another row's token can't pass for its own.
"""

from __future__ import annotations

from typing import Any

from localbatch.data.config import SchedulerConfig
from localbatch.data.request import Request
from localbatch.data.sampling_params import SamplingParams
from localbatch.scheduler.plan import StepPlan
from localbatch.scheduler.scheduler import Scheduler
from localbatch.scheduler.sequence import Sequence

END = 2
"""The token that ends an answer, in schedulers made here."""
ANSWER = 7
"""The token that every answer consists of, unless a test wants another."""


def create_scheduler(
    *,
    num_slots: int = 4,
    row_cells: int = 64,
    pool_cells: int | None = None,
    chunk: int = 16,
    max_step_tokens: int | None = None,
    closes_gaps_first: bool = False,
) -> Scheduler:
    """Return an empty scheduler that ends on `END`; its step holds four chunks if left open."""
    config = SchedulerConfig(
        num_slots=num_slots,
        row_cells=row_cells,
        pool_cells=pool_cells,
        chunk=chunk,
        max_step_tokens=4 * chunk if max_step_tokens is None else max_step_tokens,
        closes_gaps_first=closes_gaps_first,
    )
    return Scheduler(config, end_tokens={END})


def create_requests(
    n: int, num_tokens: int = 10, *, first: int = 0, max_tokens: int = 16, **params: Any
) -> list[Request]:
    """Return `n` requests with prompts of `num_tokens` words, numbered from `first`.

    `params` are further `SamplingParams`.
    """
    sampling = SamplingParams(max_tokens=max_tokens, **params)
    return [
        Request(id=f"row-{i}", index=i, prompt=" ".join(["word"] * num_tokens), params=sampling)
        for i in range(first, first + n)
    ]


def create_sequences(
    n: int, num_tokens: int = 10, *, first: int = 0, max_tokens: int = 16, **params: Any
) -> list[Sequence]:
    """Return the sequences of `create_requests`, with prompts of `num_tokens` tokens."""
    requests = create_requests(n, num_tokens, first=first, max_tokens=max_tokens, **params)
    return [
        Sequence(request, [1000 * (request.index + 1) + p for p in range(num_tokens)])
        for request in requests
    ]


def compute(plan: StepPlan, token: int = ANSWER) -> list[int | None]:
    """Return what a backend would for `plan`, were `token` always the likeliest."""
    return [token if row.wants_logits else None for row in plan.rows]


def run_step(scheduler: Scheduler, token: int = ANSWER) -> StepPlan:
    """Plan a step, take in its tokens, and return the plan."""
    plan = scheduler.schedule()
    scheduler.update(plan, compute(plan, token))
    scheduler.check_integrity()
    return plan


def shape(plan: StepPlan) -> list[tuple[int, int, int, int]]:
    """Return a plan's rows as (request index, slot, start, end)."""
    return [(r.sequence.request.index, r.slot, r.start, r.end) for r in plan.rows]
