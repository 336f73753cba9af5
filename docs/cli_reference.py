"""Prints docs/cli.md from the commands' own help: python docs/cli_reference.py > docs/cli.md."""

from __future__ import annotations

from collections.abc import Iterator

import click

from localbatch.cli import main


def walk(command: click.Command, path: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the help page of a command and all below it."""
    context = click.Context(command, info_name=path, terminal_width=96)
    yield path, command.get_help(context)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from walk(child, f"{path} {name}")


def reference() -> str:
    """Return the whole page."""
    parts = ["# Command line\n\nMade by `make docs` from the commands' own help.\n"]
    for path, text in walk(main, "localbatch"):
        parts.append(f"## {path}\n\n```\n{text.rstrip()}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    print(reference(), end="")
