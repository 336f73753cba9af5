"""Run many prompts through a local GGUF model by true batching on llama.cpp."""

from localbatch._version import __version__
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

__all__ = [
    "LLM",
    "BindingError",
    "Completion",
    "ConfigError",
    "DecodeError",
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
    "TextPiece",
    "Timings",
    "Usage",
    "WorkerError",
    "__version__",
]
