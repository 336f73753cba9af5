"""`localbatch show-prompt`."""

from __future__ import annotations

import json
from typing import Any

import click

from localbatch.cli.main import complete_model, debug_option
from localbatch.cli.options import (
    column_options,
    engine_options,
    prompt_options,
    sampling_options,
    take_inputs,
    take_sampling,
)
from localbatch.jobs.show_prompt import show_prompt as preview_of


@click.command("show-prompt", short_help="Show a row's prompt as the model gets it.")
@click.argument("model", shell_complete=complete_model)
@click.argument("source", metavar="INPUT", type=click.Path(allow_dash=True))
@click.argument("row_id", metavar="[ID]", required=False)
@click.option("--json", "as_json", is_flag=True, help="One JSON object, for programs.")
@sampling_options
@prompt_options
@column_options
@engine_options
@debug_option
def show_prompt(model: str, source: str, row_id: str | None, as_json: bool, **options: Any) -> None:
    """Show the prompt of the row with that ID, rendered and in tokens; without ID, the first's.

    A .txt row's id is its line number, as is that of a .jsonl row without an "id". A control token
    that a row spells out itself is text to the model: its tokens show it in pieces.

    \b
    Examples:
      localbatch show-prompt smollm2-135m prompts.jsonl
      localbatch show-prompt model.gguf rows.jsonl row-17 --template-arg enable_thinking=false
    """
    params = take_sampling(options)
    row, preview = preview_of(
        model, source, row_id, params, inputs=take_inputs(options), engine=options
    )
    if as_json:
        tokens = [{"id": token, "text": text} for token, text in preview.pieces]
        shown = {"id": row.id, "text": preview.text, "tokens": tokens}
        click.echo(json.dumps({**shown, "cut_tokens": preview.cut_tokens}, ensure_ascii=False))
        return
    click.echo(preview.text)
    cut = f", {preview.cut_tokens:,} cut out" if preview.cut_tokens else ""
    click.echo(f"\n{preview.num_tokens:,} tokens{cut}:")
    click.echo(" ".join(f"{token}:{text!r}" for token, text in preview.pieces))
