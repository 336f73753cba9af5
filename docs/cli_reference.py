"""Prints docs/cli.md from the commands' own help: python docs/cli_reference.py > docs/cli.md."""

from __future__ import annotations

from collections.abc import Iterator

import click

from localbatch.cli import main


def walk(
    command: click.Command, name: str, parent: click.Context | None = None
) -> Iterator[tuple[str, str]]:
    """Yield the name and the help page of a command and all below it."""
    settings = command.context_settings | {"terminal_width": 96}
    context = click.Context(command, info_name=name, parent=parent, **settings)
    yield context.command_path, command.get_help(context)
    if isinstance(command, click.Group):
        for child_name in command.list_commands(context):
            child = command.get_command(context, child_name)
            assert child is not None
            yield from walk(child, child_name, context)


def reference() -> str:
    """Return the whole page."""
    parts = ["# Command line\n\nMade by `make docs` from the commands' own help.\n"]
    for path, text in walk(main, "localbatch"):
        parts.append(f"## {path}\n\n```\n{text.rstrip()}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    print(reference(), end="")
