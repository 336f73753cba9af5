"""The command line: options, messages and exit codes; no logic."""

from localbatch.cli.main import main

__all__ = ["main"]
