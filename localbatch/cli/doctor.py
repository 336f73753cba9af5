"""`localbatch doctor`."""

from __future__ import annotations

import platform

import click

from localbatch.cli.main import EXIT_FAILED, debug_option
from localbatch.data.errors import LocalbatchError
from localbatch.engine.selftest import Check, run_checks


@click.command(short_help="Test what works on this machine.")
@click.argument("model", required=False)
@debug_option
def doctor(model: str | None) -> None:
    """Test what works on this machine.

    Decodes a few tokens in a process of its own, with a tiny built-in model or with MODEL, and
    reports llama.cpp's build, the processor features it uses, and devices. If that process dies,
    says of what, and what to do.

    \b
    Examples:
      localbatch doctor
      localbatch doctor smollm2-135m
    """
    click.echo(f"python      {platform.python_version()} on {platform.platform()}")
    try:
        checks = run_checks(model)
    except LocalbatchError as error:
        checks = [Check("model", False, str(error))]
    for check in checks:
        click.echo(f"{check.name:<11} {'' if check.passed else 'FAILED: '}{check.said}")
        if check.advice:
            click.echo(f"{'':<11} {check.advice}")
    if not all(check.passed for check in checks):
        raise SystemExit(EXIT_FAILED)
    click.echo("All is well.")
