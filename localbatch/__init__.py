"""Run many prompts through a local GGUF model by true batching on llama.cpp."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from localbatch._version import __version__

if TYPE_CHECKING:
    from localbatch.data.errors import (
        BindingError,
        ConfigError,
        DecodeError,
        DownloadError,
        EngineError,
        InputError,
        LocalbatchError,
        ModelError,
        OutputError,
        WorkerError,
    )
    from localbatch.data.request import Completion, FinishReason, Message, Request, Timings, Usage
    from localbatch.data.sampling_params import SamplingParams
    from localbatch.engine.engine import TextPiece
    from localbatch.engine.llm import LLM
    from localbatch.summaries.job import SummaryConfig, SummaryResult, summarize
    from localbatch.summaries.plan import SummaryPlan, plan_summaries
    from localbatch.summaries.prompts import SummaryOptions, SummaryStyle
    from localbatch.summaries.work import DocumentResult

__all__ = [
    "LLM",
    "BindingError",
    "Completion",
    "ConfigError",
    "DecodeError",
    "DocumentResult",
    "DownloadError",
    "EngineError",
    "FinishReason",
    "InputError",
    "LocalbatchError",
    "Message",
    "ModelError",
    "OutputError",
    "Request",
    "SamplingParams",
    "SummaryConfig",
    "SummaryOptions",
    "SummaryPlan",
    "SummaryResult",
    "SummaryStyle",
    "TextPiece",
    "Timings",
    "Usage",
    "WorkerError",
    "__version__",
    "plan_summaries",
    "summarize",
]

_PLACES = {
    "LLM": "engine.llm",
    "TextPiece": "engine.engine",
    "SamplingParams": "data.sampling_params",
    **dict.fromkeys(
        ("Completion", "FinishReason", "Message", "Request", "Timings", "Usage"), "data.request"
    ),
    **dict.fromkeys(("SummaryConfig", "SummaryResult", "summarize"), "summaries.job"),
    **dict.fromkeys(("SummaryPlan", "plan_summaries"), "summaries.plan"),
    **dict.fromkeys(("SummaryOptions", "SummaryStyle"), "summaries.prompts"),
    "DocumentResult": "summaries.work",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is asked for, so that the commands start at once."""
    if name not in __all__:
        raise AttributeError(f"module 'localbatch' has no attribute {name!r}")
    return getattr(import_module(f"localbatch.{_PLACES.get(name, 'data.errors')}"), name)
