"""Every error that localbatch raises on purpose.

    LocalbatchError
    ├── ConfigError          a setting is out of range or contradicts another one
    ├── InputError           one row of the input is unusable (carries line and field)
    ├── OutputError          the output can't be written
    ├── JournalError         a job's journal is damaged, foreign, in use or of another job
    ├── ModelError           a model file is missing, damaged, foreign or unknown
    │   └── DownloadError    a model could not be fetched or failed its checksum
    ├── BindingError         the installed llama-cpp-python does not fit
    └── EngineError          the engine failed
        ├── DecodeError      llama_decode reported a failure (carries its code)
        └── WorkerError      the worker process died or stopped answering

Messages are one line: what was wrong, where, what to do.
"""

from __future__ import annotations


class LocalbatchError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(LocalbatchError):
    """A setting is out of range or contradicts another one."""


class InputError(LocalbatchError):
    """One row of the input is unusable."""

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        line: int | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.line = line
        self.code = code

    def __str__(self) -> str:
        return self.message if self.field is None else f"{self.field}: {self.message}"


class OutputError(LocalbatchError):
    """The output can't be written."""


class JournalError(LocalbatchError):
    """A job's journal is damaged, foreign, in use, or of another job."""


class ModelError(LocalbatchError):
    """A model file is missing, damaged, foreign or unknown."""


class DownloadError(ModelError):
    """A model could not be fetched, or what came is not what the list promises."""


class BindingError(LocalbatchError):
    """The installed llama-cpp-python does not fit."""


class EngineError(LocalbatchError):
    """The engine failed."""


class DecodeError(EngineError):
    """`llama_decode` reported a failure.

    `code` is its return value; see `llama_decode` in llama.cpp's `include/llama.h`.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code

    def __reduce__(self) -> tuple[type[DecodeError], tuple[str, int]]:
        return type(self), (str(self), self.code)


class WorkerError(EngineError):
    """The worker process died or stopped answering."""
