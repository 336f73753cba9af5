"""`localbatch status`."""

from __future__ import annotations

import click

from localbatch.cli.main import debug_option
from localbatch.jobs.status import job_status


@click.command(short_help="Say how far a job is.")
@click.argument("job", type=click.Path())
@debug_option
def status(job: str) -> None:
    """Say how far JOB is, also while it runs.

    JOB is the output of `localbatch run`, or its journal; or the folder of `localbatch summarize`,
    whose rows are its chunks and merges.

    \b
    Examples:
      localbatch status answers.jsonl
      watch localbatch status answers.jsonl
    """
    for name, value in job_status(job).lines():
        click.echo(f"{name:<9} {value}")
