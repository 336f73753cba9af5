"""`localbatch run`."""

from __future__ import annotations

from typing import Any

import click

from localbatch.cli.main import (
    EXIT_CLOSED,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_ROWS_FAILED,
    complete_model,
    debug_option,
    interruptible,
)
from localbatch.cli.options import (
    answer_column_option,
    column_options,
    engine_options,
    output_option,
    prompt_options,
    sampling_options,
    show_plan,
    style_option,
    take_inputs,
    take_sampling,
)
from localbatch.engine.backend import Numerics
from localbatch.formats.outputs import OutputClosedError
from localbatch.formats.records import OutputStyle
from localbatch.jobs.job import JobConfig
from localbatch.jobs.plan import plan_job
from localbatch.jobs.progress import reasoning_line, summary_line
from localbatch.jobs.run import run_job


def dry_run(config: JobConfig) -> None:
    """Print what would be run, and all rows that can't be; ends with the exit code for them."""
    planned = plan_job(
        config.model, config.source, config.params, inputs=config.inputs, engine=config.engine,
        note=lambda bad: click.echo(f"{config.source}:{bad.line}: {bad.error}", err=True),
    )  # fmt: skip
    show_plan(planned)
    if planned.failed:
        raise SystemExit(EXIT_ROWS_FAILED)


@click.command(short_help="Answer every prompt of a file.")
@click.argument("model", shell_complete=complete_model)
@click.argument("source", metavar="INPUT", type=click.Path(allow_dash=True))
@output_option
@answer_column_option
@style_option
@sampling_options
@prompt_options
@column_options
@engine_options
@click.option("--dry-run", "only_plan", is_flag=True, help="Check all rows and plan; run none.")
@click.option("--fresh", is_flag=True, help="Forget what an earlier run of OUTPUT finished.")
@click.option("--retry-failed", is_flag=True, help="Take the rows again that failed earlier.")
@click.option("-q", "--quiet", is_flag=True, help="No progress bar and no summary.")
@debug_option
def run(
    model: str,
    source: str,
    output: str,
    style: OutputStyle | None,
    answer_column: str | None,
    quiet: bool,
    only_plan: bool,
    fresh: bool,
    retry_failed: bool,
    **options: Any,
) -> None:
    """Answer every prompt of INPUT with MODEL.

    MODEL is the path of a GGUF file, or a name from `localbatch models list`.

    INPUT is a .txt file with a prompt a line, a .jsonl file with {"prompt": ...} or
    {"messages": [...]} a line, or - for standard input. A .jsonl row may have an "id" and sampling
    parameters of its own. A .jsonl file with a "custom_id" and a "body" a line is an OpenAI batch:
    all lines are checked first, and OUTPUT has OpenAI's form, with OUTPUT.errors.jsonl and
    OUTPUT.batch.json beside it (a.jsonl has a.errors.jsonl).

    INPUT may also be a table (.csv, .tsv, .parquet), or a folder or pattern of text files
    ('notes/*.md'), each of them a row. Files but .parquet may be packed (.gz, .zst).

    Otherwise OUTPUT has one JSON object for each row, in the order of the input, or is a table by
    its suffix: that of a table has its columns as they are and the answers. A row that can't be
    answered has an "error" and costs the others nothing.

    Finished rows are kept beside OUTPUT, in OUTPUT.journal: the same command goes on where a run
    was cut short. A job whose model, settings or finished rows changed is refused.

    \b
    Examples:
      localbatch run smollm2-135m prompts.txt -o answers.jsonl
      localbatch run model.gguf rows.jsonl --temperature 0.8 --seed 7 > answers.jsonl
      localbatch run model.gguf reviews.csv --prompt-column review -o answered.csv
      localbatch run model.gguf news.parquet -o out.parquet --template 'Summarize: {{ body }}'
      localbatch run model.gguf 'notes/*.md' -o answers.csv --template @ask.txt
      echo "Why is the sky blue?" | localbatch run smollm2-135m - | jq -r .text

    \b
    Exit codes: 0 every row was answered, 1 the run failed, 2 wrong usage,
    3 some rows failed, 130 interrupted, 141 the reader of the output went away.
    """
    params = take_sampling(options)
    config = JobConfig(
        model=model, source=source, output=output, params=params, inputs=take_inputs(options),
        style=style, answer_column=answer_column,
        quiet=quiet, fresh=fresh, retry_failed=retry_failed, engine=options,
    )  # fmt: skip
    if only_plan:
        return dry_run(config)
    with interruptible():
        result = run_job(config)
    if isinstance(result.error, OutputClosedError):
        raise SystemExit(EXIT_CLOSED)
    if not quiet:
        if result.numerics is Numerics.VARIES:
            click.echo("note: with these settings an answer may depend on its batch", err=True)
        click.echo(
            summary_line(
                rows=result.rows,
                failed=result.failed,
                prompt_tokens=result.prompt_tokens,
                completion_tokens=result.completion_tokens,
                wall_s=result.wall_s,
            ),
            err=True,
        )
        if result.ended_in_reasoning:
            click.echo(reasoning_line(result.ended_in_reasoning), err=True)
        if result.resumed:
            click.echo(f"{result.resumed:,} more were finished by earlier runs", err=True)
    if result.interrupted:
        kept = (
            "the rows finished so far are in the output"
            if result.rows + result.resumed
            else "no row was finished"
        )
        click.echo(f"interrupted; {kept}", err=True)
        raise SystemExit(EXIT_INTERRUPTED)
    if result.error is not None:
        click.echo(f"Error: {result.error}", err=True)
        raise SystemExit(EXIT_FAILED)
    if result.failed + result.resumed_failed:
        raise SystemExit(EXIT_ROWS_FAILED)
