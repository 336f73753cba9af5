"""`localbatch export`."""

from __future__ import annotations

import click

from localbatch.cli.main import EXIT_CLOSED, debug_option
from localbatch.cli.options import answer_column_option, output_option, style_option
from localbatch.formats.outputs import OutputClosedError
from localbatch.formats.records import OutputStyle
from localbatch.jobs.run import export_job


@click.command(short_help="Write the answers of a job from its journal.")
@click.argument("job", type=click.Path())
@output_option
@answer_column_option
@style_option
@debug_option
def export(job: str, output: str, style: OutputStyle | None, answer_column: str | None) -> None:
    """Write the rows of JOB that are finished, also while it runs.

    JOB is the output of `localbatch run`, or its journal. Rows are in the order of the input; those
    that are not finished are left out. JOB may also be the folder of `localbatch summarize`, whose
    rows are its chunks and merges.

    \b
    Examples:
      localbatch export answers.jsonl | jq -r .text
      localbatch export answers.jsonl.journal -o answers.jsonl
      localbatch export answers.jsonl -o answers.csv
      localbatch export answers.jsonl --style vllm -o vllm.jsonl
    """
    try:
        number = export_job(job, output, style, answer_column)
    except OutputClosedError:
        raise SystemExit(EXIT_CLOSED) from None
    click.echo(f"{number:,} row{'' if number == 1 else 's'} written", err=True)
