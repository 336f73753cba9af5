"""Run many prompts through a local GGUF model by true batching on llama.cpp."""

from localbatch._version import __version__

__all__ = ["__version__"]
