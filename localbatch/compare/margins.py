"""How close a decision was: the logits where two ways to run a row chose different tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from localbatch.compare.bench import scheduling_of
from localbatch.compare.rows import requests_of
from localbatch.compare.task import MadeUpRows
from localbatch.data.config import EngineConfig
from localbatch.data.request import Request
from localbatch.data.sampling_params import SamplingParams
from localbatch.engine.backend import Backend, Logits
from localbatch.engine.prompt import PromptEncoder
from localbatch.engine.sizing import fit_context
from localbatch.scheduler.plan import PlanRow
from localbatch.scheduler.scheduler import Scheduler
from localbatch.scheduler.sequence import Sequence as TokenSequence


@dataclass(frozen=True)
class Fork:
    """A row of which two runs agree up to a token."""

    row: int
    """`Request.index`."""
    before: tuple[int, ...]
    """The answer as far as they agree."""
    token: int | None
    """The reference's next token; `None`: its answer ended."""
    other: int | None
    """The other run's next token."""


@dataclass(frozen=True)
class MarginTask:
    """Forks to be looked at, in one process."""

    config: EngineConfig
    rows: tuple[Request, ...] | MadeUpRows
    """Those of the forks among them."""
    forks: tuple[Fork, ...]


def margins(backend: Backend, task: MarginTask) -> list[float]:
    """Return for each fork how much higher the reference's token was than the other's, in logits.

    The prompt and the common answer are computed alone, as one prompt, so a margin is exact but for
    the last bits. An answer's end counts as the likeliest of the tokens that end one.
    """
    encoder = PromptEncoder(backend, task.config.chat_template)
    requests = {request.index: request for request in requests_of(task.rows, backend)}
    found = []
    for fork in task.forks:
        request = requests[fork.row]
        tokens = [*encoder.encode(request), *fork.before]
        logits = _last_logits(backend, task.config, request, tokens)
        ends = backend.card.end_tokens
        found.append(_value(logits, fork.token, ends) - _value(logits, fork.other, ends))
    return found


def _value(logits: Sequence[float], token: int | None, ends: frozenset[int]) -> float:
    return max(logits[t] for t in ends) if token is None else logits[token]


def _last_logits(
    backend: Backend, config: EngineConfig, request: Request, tokens: list[int]
) -> list[float]:
    """Return the logits that follow `tokens`."""
    seen: list[float] = []

    def keep(rows: Sequence[PlanRow], logits: Logits) -> list[int]:
        seen[:] = logits[0].tolist()
        return [0 for _ in rows]

    config = replace(config, parallel=1, lanes=None)
    context = fit_context(
        config, backend.card, 1, len(tokens) + 1, backend.on_gpu, backend.free_bytes()
    )
    backend.open(replace(context, may_pad=False))
    one = replace(request, params=SamplingParams(max_tokens=1, ignore_eos=True))
    scheduler = Scheduler(scheduling_of(context))
    scheduler.add(TokenSequence(one, tokens))
    while scheduler.has_work:
        plan = scheduler.schedule()
        scheduler.update(plan, backend.forward(plan, keep))
    return seen
