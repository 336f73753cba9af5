"""What one measurement is given, and what comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from localbatch.compare.trace import Step
from localbatch.data.config import EngineConfig
from localbatch.data.errors import ConfigError
from localbatch.data.request import Request
from localbatch.data.sampling_params import SamplingParams
from localbatch.engine.backend import Numerics

MOST_ROUNDS = 1000
MOST_TOKENS = 2**24
"""Of a row: the longest context that the engine takes."""


def check_range(name: str, value: int | None, low: int, high: int) -> None:
    """Raise `ConfigError`, naming the setting, for a value that is out of range."""
    if value is not None and not low <= value <= high:
        raise ConfigError(f"{name}: must be from {low} to {high}, not {value}")


@dataclass(frozen=True)
class MadeUpRows:
    """Rows of a fixed size, made by the process that has the tokenizer."""

    count: int
    prompt_tokens: int
    max_tokens: int


@dataclass(frozen=True)
class Task:
    """One run of one mode in one process."""

    mode: str
    config: EngineConfig
    rows: tuple[Request, ...] | MadeUpRows
    batch: int = 16
    """Rows that are alive at one time, in the modes that have more than one."""
    instances: int = 1
    """Processes that share the rows."""
    instance: int = 0
    """Which of them this is."""


@dataclass(frozen=True)
class CardTask:
    """What the model says of itself is asked, and whether settings fit the GPUs."""

    config: EngineConfig


@dataclass
class Outcome:
    """What one run of a mode gave; seconds since the common start of all its processes."""

    mode: str
    wall_s: float = 0.0
    load_s: float = 0.0
    """Loading the model."""
    setup_s: float = 0.0
    """Contexts, the plan and its measurements, and the first computation."""
    cpu_s: float = 0.0
    """Of all cores and processes, during the run."""
    batch_rows: int = 1
    """Most rows that one computation may take a new token of."""
    width: int = 1
    """Rows that are alive at one time, all lanes and processes together."""
    processes: int = 1
    lanes: int = 1
    threads: int = 1
    """Of all lanes and processes together."""
    layout: str = ""
    """The KV layout."""
    placement: str = "CPU"
    """Where the model was, of each process."""
    prompt_tokens: dict[int, int] = field(default_factory=dict)
    """By `Request.index`, as are the next three."""
    tokens: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Answers, without the token that ended them."""
    token_times: dict[int, list[float]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    """Why a row was not answered."""
    steps: list[Step] = field(default_factory=list)
    padding_tokens: int = 0
    """What a rectangular batch would have computed besides: shorter prompts filled up to the
    longest of their group, ended rows carried on to its end."""
    peak_bytes: int = 0
    """Most memory of all its processes together; what they map of files counts once."""
    gpu_peak_bytes: int | None = None
    gpu_use: float | None = None
    """Mean share of the time in which the GPU computed."""
    numerics: Numerics | None = None
    """What the engine found a row's last bits to depend on; `None`: it was not asked."""


def comparable(request: Request) -> Request:
    """Return the row as all modes run it: greedy, to its end or its `max_tokens`.

    Stop strings, penalties, biases, several answers and log probabilities are left out.
    """
    own = request.params
    plain = SamplingParams(max_tokens=own.max_tokens, ignore_eos=own.ignore_eos)
    return replace(request, params=plain)


def joined(parts: Sequence[Outcome]) -> Outcome:
    """Return the outcome of processes that ran side by side and shared the rows.

    Loading takes as long as the slowest; lanes are numbered through.
    """
    whole = replace(parts[0])
    whole.processes = len(parts)
    whole.wall_s, whole.load_s, whole.setup_s = (
        max(getattr(part, name) for part in parts) for name in ("wall_s", "load_s", "setup_s")
    )
    whole.cpu_s = sum(part.cpu_s for part in parts)
    whole.width = sum(part.width for part in parts)
    whole.threads = sum(part.threads for part in parts)
    whole.lanes = sum(part.lanes for part in parts)
    whole.padding_tokens = sum(part.padding_tokens for part in parts)
    for name in ("prompt_tokens", "tokens", "token_times", "errors"):
        merged = {key: value for part in parts for key, value in getattr(part, name).items()}
        setattr(whole, name, merged)
    whole.steps, first = [], 0
    for part in parts:
        whole.steps += [replace(step, lane=first + step.lane) for step in part.steps]
        first += part.lanes
    return whole
