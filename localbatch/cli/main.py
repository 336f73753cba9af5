"""The `localbatch` command and what its subcommands share."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import click
from click.shell_completion import CompletionItem

from localbatch._version import __version__
from localbatch.data.errors import ConfigError, JournalError, LocalbatchError, OutputError

EXIT_FAILED, EXIT_USAGE, EXIT_ROWS_FAILED, EXIT_INTERRUPTED = 1, 2, 3, 130
EXIT_CLOSED = 141
"""The reader of the output went away: what a shell reports of a program that SIGPIPE ended."""


class Commands(click.Group):
    """Loads a subcommand when it is asked for, and turns errors into one line and an exit code."""

    modules = (
        "run", "summarize", "status", "export", "plan", "show-prompt", "compare", "sweep", "models",
        "doctor",
    )  # fmt: skip

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the subcommands in the order of the help page."""
        del ctx
        return list(self.modules)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one subcommand; the others cost nothing."""
        del ctx
        if cmd_name not in self.modules:
            return None
        name = cmd_name.replace("-", "_")
        module = __import__(f"localbatch.cli.{name}", fromlist=[name])
        command: click.Command = getattr(module, name)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run a subcommand."""
        try:
            return super().invoke(ctx)
        except LocalbatchError as error:
            if os.environ.get("LOCALBATCH_DEBUG"):
                raise
            fail(error, _options_of(ctx))
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            raise SystemExit(EXIT_INTERRUPTED) from None


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C, a request to end, and the end of the terminal interrupt, to keep what is done.

    Another one ends the process at once, whatever it is in: an exception in the middle of
    another's cleanup would be a traceback from some lock. Raises `KeyboardInterrupt` as well for
    what an interruption at a bad moment made of some library's cleanup.
    """
    interrupted = False

    def interrupt(_number: int, _frame: Any) -> None:
        nonlocal interrupted
        interrupted = True
        for number in handled:
            signal.signal(number, signal.SIG_DFL)
        raise KeyboardInterrupt

    names = [name for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in (getattr(signal, n) for n in names)}
    # Under nohup, and in the background of a script, the run goes on.
    handled = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    for number in handled:
        signal.signal(number, interrupt)
    try:
        yield
    except LocalbatchError:
        raise
    except Exception as error:
        if interrupted:
            raise KeyboardInterrupt from error
        raise
    finally:
        for number in handled:
            signal.signal(number, before[number])


def complete_model(
    _context: click.Context, _parameter: click.Parameter, begun: str
) -> list[CompletionItem]:
    """Offer the names of the list, and files."""
    from localbatch.models.catalog import load_catalog

    names = [CompletionItem(name) for name in load_catalog() if name.startswith(begun)]
    return [*names, CompletionItem(begun, type="file")]


def _options_of(ctx: click.Context) -> dict[str, str]:
    """Return the options of the command that was asked for, by the names of their values."""
    command = ctx.command
    if isinstance(command, click.Group) and ctx.invoked_subcommand:
        command = command.get_command(ctx, ctx.invoked_subcommand) or command
    return {p.name: p.opts[0] for p in command.params if isinstance(p, click.Option) and p.name}


def fail(error: LocalbatchError, options: Mapping[str, str] | None = None) -> NoReturn:
    """End with an error's message; a setting that it begins with is named as the option it is."""
    name, colon, rest = str(error).partition(": ")
    option = (options or {}).get(name)
    is_setting = option is not None and colon and isinstance(error, ConfigError)
    click.echo(f"Error: {option}: {rest}" if is_setting else f"Error: {error}", err=True)
    raise SystemExit(
        EXIT_USAGE if isinstance(error, (ConfigError, OutputError, JournalError)) else EXIT_FAILED
    )


def set_debug(_ctx: click.Context, _param: click.Parameter, value: bool) -> bool:
    """Make this process and its workers talkative."""
    if value:
        os.environ["LOCALBATCH_DEBUG"] = "1"
    return value


debug_option = click.option(
    "--debug",
    is_flag=True,
    callback=set_debug,
    expose_value=False,
    help="Show tracebacks and what llama.cpp prints.",
)


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="localbatch")
def main() -> None:
    """Run a file of prompts through a local GGUF model.

    All prompts are worked on together, in one batch that is kept full, on this machine, without a
    network.

    \b
    Examples:
      localbatch models pull smollm2-135m
      localbatch run smollm2-135m prompts.jsonl -o answers.jsonl
      localbatch run ./model.gguf prompts.txt --max-tokens 100 > answers.jsonl
      localbatch doctor
    """
