"""What parent and worker say to each other, pickled over the worker's pipes."""

from __future__ import annotations

from dataclasses import dataclass

from localbatch.data.config import EngineConfig
from localbatch.data.errors import LocalbatchError
from localbatch.data.request import Completion, Request
from localbatch.engine.backend import ModelCard
from localbatch.engine.engine import EngineStats, TextPiece
from localbatch.engine.preview import Preview


@dataclass(frozen=True)
class Start:
    """First message to the worker: load this."""

    config: EngineConfig


@dataclass(frozen=True)
class Submit:
    """Rows of run number `run`; `streams_text` asks for text pieces on the way."""

    run: int
    requests: list[Request]
    streams_text: bool


@dataclass(frozen=True)
class Prepare:
    """Make ready for these rows, compute none, and report once."""

    run: int
    requests: list[Request]


@dataclass(frozen=True)
class Look:
    """Say what would become of these rows; with `whole`, their text and tokens, too."""

    requests: list[Request]
    whole: bool


@dataclass(frozen=True)
class Seen:
    """What would become of rows."""

    previews: list[Preview]


@dataclass(frozen=True)
class Abort:
    """End all rows."""


@dataclass(frozen=True)
class Ready:
    """The model is loaded."""

    card: ModelCard
    gpus: tuple[str, ...] = ()
    """Those it is on."""
    other_gpus: tuple[str, ...] = ()
    """Those that further workers may use."""


@dataclass(frozen=True)
class Report:
    """What came of the last steps of run number `run`."""

    run: int
    events: list[Completion | TextPiece]
    stats: EngineStats


@dataclass(frozen=True)
class Heartbeat:
    """Sent every second; `calls` to the backend have come back so far."""

    calls: int


@dataclass(frozen=True)
class Failed:
    """The worker can't go on."""

    error: LocalbatchError
