"""`localbatch run`."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

import click

from localbatch.cli.main import (
    EXIT_CLOSED,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_ROWS_FAILED,
    complete_model,
    debug_option,
    terminate_as_interrupt,
)
from localbatch.data.config import FlashAttention, KVLayout, Order
from localbatch.data.errors import ConfigError
from localbatch.data.sampling_params import SamplingParams
from localbatch.engine.backend import Numerics
from localbatch.formats.inputs import InputOptions
from localbatch.formats.outputs import OutputClosedError
from localbatch.jobs.job import JobConfig
from localbatch.jobs.progress import reasoning_line, summary_line
from localbatch.jobs.run import run_job

_DEFAULTS = {f.name: f.default for f in fields(SamplingParams) if f.default is not MISSING}
_SAMPLING = (  # name, type, help
    ("max_tokens", int, "Most tokens to generate for a row."),
    ("temperature", float, "0 takes the likeliest token; higher is more random."),
    ("top_k", int, "Draw from the k likeliest tokens only; 0 is off."),
    ("top_p", float, "Draw from the likeliest tokens with this share of probability; 1 is off."),
    ("min_p", float, "Drop tokens below this share of the likeliest one's probability; 0 is off."),
    ("seed", int, "Start of the random streams; each row has its own, from this and its id."),
    ("repeat_penalty", float, "Make tokens seen lately less likely; 1 is off."),
    ("presence_penalty", float, "Taken off the logits of tokens seen lately, once; 0 is off."),
    ("frequency_penalty", float, "Taken off the logits of tokens seen lately, each time."),
    ("n", int, "Answers of each row, each with a random stream of its own."),
    (
        "max_reasoning_tokens",
        int,
        "Most tokens before a reasoning model's answer; it is cut short.",
    ),
    ("top_logprobs", int, "With each token, the likeliest ones in its place; means --logprobs."),
)


def integer(value: str) -> int | None:
    """Read a whole number, or `auto`, which is the same as leaving the option out."""
    try:
        return None if value == "auto" else int(value)
    except ValueError:
        raise click.BadParameter(f"{value!r} is neither a whole number nor 'auto'") from None


def take_sampling(options: dict[str, Any]) -> SamplingParams:
    """Take what `sampling_options` added out of a command's options."""
    names = [*(name for name, _, _ in _SAMPLING), "stop", "ignore_eos", "logprobs"]
    values = {name: options.pop(name) for name in names}
    values["logprobs"] = values["logprobs"] or bool(values["top_logprobs"])
    return SamplingParams(**values)


def sampling_options(command: Any) -> Any:
    """Add an option for each sampling parameter; defaults come from `SamplingParams`."""
    command = click.option(
        "--ignore-eos", is_flag=True, help="Go on to --max-tokens whatever the model says."
    )(command)
    command = click.option(
        "--logprobs", is_flag=True, help="Report the log of each token's probability."
    )(command)
    command = click.option(
        "--stop", multiple=True, help="End an answer before this text; may be repeated."
    )(command)
    for name, kind, text in reversed(_SAMPLING):
        option = "--" + name.replace("_", "-")
        command = click.option(
            option, name, type=kind, default=_DEFAULTS[name], show_default=True, help=text
        )(command)
    return command


def prompt_options(command: Any) -> Any:
    """Add the options that say how a row's text becomes a prompt."""
    command = click.option(
        "--chat/--raw",
        default=True,
        show_default=True,
        help="Put prompts into the model's chat template, or take them as they are.",
    )(command)
    return click.option("--system", default=None, help="System message for rows that have none.")(
        command
    )


def check_prompt_options(system: str | None, *, chat: bool) -> None:
    """Raise `ConfigError` if the options of `prompt_options` contradict each other."""
    if system is not None and not chat:
        raise ConfigError("--system goes with the chat template, not with --raw")


def engine_options(command: Any) -> Any:
    """Add the options that say how much of the machine to use, and how."""
    auto: dict[str, Any] = {"type": integer, "default": None, "show_default": "auto"}
    options = [
        click.option("--ctx", **auto, help="Most tokens of a row, prompt and answer together."),
        click.option("--parallel", **auto, help="Most rows in the batch at one time."),
        click.option("--threads", **auto, help="CPU threads of all lanes, each has one at least."),
        click.option(
            "--lanes", **auto, help="Contexts on the one model, each with its own thread and rows."
        ),
        click.option("--ubatch", **auto, help="Most prompt tokens computed in one pass."),
        click.option(
            "--share-prefixes/--no-share-prefixes",
            default=True,
            show_default=True,
            help="Compute what rows begin with alike, and equal greedy rows, only once.",
        ),
        click.option(
            "--order",
            type=click.Choice([order.value for order in Order]),
            default=Order.AUTO.value,
            show_default=True,
            help="Begin with the longest rows, common beginnings together, or as in the input.",
        ),
        click.option(
            "--any-numerics",
            is_flag=True,
            help="On the CPU, allow faster settings that make answers depend on the batch.",
        ),
        click.option("--gpu-layers", **auto, help="Layers on the GPU; -1 is all, 0 none."),
        click.option(
            "--kv-layout",
            type=click.Choice([layout.value for layout in KVLayout]),
            default=KVLayout.STREAMS.value,
            show_default=True,
            help="KV cells of its own for each row (exact on the CPU), or one pool for all.",
        ),
        click.option(
            "--kv-cells", **auto, help="Cells in the pool of the unified layout, for all rows."
        ),
        click.option(
            "--flash-attention",
            type=click.Choice([choice.value for choice in FlashAttention]),
            default=FlashAttention.AUTO.value,
            show_default="on with a GPU",
            help="Fused attention; on a CPU it makes answers depend on the batch.",
        ),
        click.option(
            "--backend", type=click.Choice(["llama", "fake"]), default="llama", hidden=True
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@click.command(short_help="Answer every prompt of a file.")
@click.argument("model", shell_complete=complete_model)
@click.argument("source", metavar="INPUT", type=click.Path(allow_dash=True))
@click.option(
    "-o",
    "--output",
    default="-",
    metavar="OUTPUT",
    type=click.Path(allow_dash=True),
    help="JSONL file; - is stdout.",
)
@sampling_options
@prompt_options
@engine_options
@click.option("--fresh", is_flag=True, help="Forget what an earlier run of OUTPUT finished.")
@click.option("--retry-failed", is_flag=True, help="Take the rows again that failed earlier.")
@click.option("-q", "--quiet", is_flag=True, help="No progress bar and no summary.")
@debug_option
def run(
    model: str,
    source: str,
    output: str,
    system: str | None,
    chat: bool,
    quiet: bool,
    fresh: bool,
    retry_failed: bool,
    **options: Any,
) -> None:
    """Answer every prompt of INPUT with MODEL.

    MODEL is the path of a GGUF file, or a name from `localbatch models list`.

    INPUT is a .txt file with a prompt a line, a .jsonl file with {"prompt": ...} or
    {"messages": [...]} a line, or - for standard input. A .jsonl row may have an "id" and sampling
    parameters of its own.

    OUTPUT has one JSON object for each row, in the order of the input. A row that can't be
    answered has an "error" and costs the others nothing.

    Finished rows are kept beside OUTPUT, in OUTPUT.journal: the same command goes on where a run
    was cut short. A job whose model, settings or finished rows changed is refused.

    \b
    Examples:
      localbatch run smollm2-135m prompts.txt -o answers.jsonl
      localbatch run model.gguf rows.jsonl --temperature 0.8 --seed 7 > answers.jsonl
      echo "Why is the sky blue?" | localbatch run smollm2-135m - | jq -r .text

    \b
    Exit codes: 0 every row was answered, 1 the run failed, 2 wrong usage,
    3 some rows failed, 130 interrupted, 141 the reader of the output went away.
    """
    params = take_sampling(options)
    check_prompt_options(system, chat=chat)
    config = JobConfig(
        model=model, source=source, output=output, params=params,
        inputs=InputOptions(chat, system),
        quiet=quiet, fresh=fresh, retry_failed=retry_failed, engine=options,
    )  # fmt: skip
    with terminate_as_interrupt():
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
