"""`localbatch plan`."""

from __future__ import annotations

from typing import Any

import click

from localbatch.cli.main import EXIT_ROWS_FAILED, complete_model, debug_option
from localbatch.cli.options import (
    column_options,
    engine_options,
    prompt_options,
    sampling_options,
    show_plan,
    take_inputs,
    take_sampling,
)
from localbatch.jobs.plan import plan_job


@click.command(short_help="Say how a job would be run, and why.")
@click.argument("model", shell_complete=complete_model)
@click.argument("source", metavar="[INPUT]", required=False, type=click.Path(allow_dash=True))
@sampling_options
@prompt_options
@column_options
@engine_options
@debug_option
def plan(model: str, source: str | None, **options: Any) -> None:
    """Say how `run` would work on INPUT with MODEL: lanes, threads, batch, memory and time.

    The model is loaded and, if the job is long enough, measured for some seconds; what was measured
    is kept for later runs. No row is answered. Without INPUT an example job is planned.

    Exit codes: 0 every row can be computed, 1 there is no plan, 2 wrong usage, 3 some rows can't be
    computed (`localbatch run --dry-run` names them).

    \b
    Examples:
      localbatch plan smollm2-135m
      localbatch plan model.gguf prompts.jsonl --max-tokens 200
      localbatch plan model.gguf prompts.jsonl --lanes 1 --parallel 16
    """
    params = take_sampling(options)
    planned = plan_job(model, source, params, inputs=take_inputs(options), engine=options)
    show_plan(planned)
    if planned.failed:
        raise SystemExit(EXIT_ROWS_FAILED)
