"""Options that several commands share, and what becomes of them."""

from __future__ import annotations

import contextlib
import json
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import click

from localbatch.data.config import FlashAttention, KVLayout, Order, Overlength, SplitMode
from localbatch.data.errors import ConfigError
from localbatch.data.sampling_params import SamplingParams
from localbatch.formats.inputs import InputOptions
from localbatch.formats.records import OutputStyle
from localbatch.jobs.plan import JobPlan

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


def template_arg(value: str) -> tuple[str, Any]:
    """Read `NAME=VALUE`; a value that is JSON is what it says there, any other is text."""
    name, equals, text = value.partition("=")
    if not equals or not name.isidentifier():
        raise click.BadParameter(f"{value!r} is not NAME=VALUE")
    with contextlib.suppress(ValueError):
        return name, json.loads(text)
    return name, text


def template_text(_ctx: click.Context, _param: click.Parameter, value: str | None) -> str | None:
    """Return a template, that of a file for `@FILE`."""
    if value is None or not value.startswith("@"):
        return value
    try:
        return Path(value[1:]).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"--template: {value[1:]} is no text in UTF-8") from None
    except OSError as error:
        reason = error.strerror or "no file"
        raise ConfigError(f"--template: {value[1:]} can't be read ({reason})") from None


def prompt_options(command: Any) -> Any:
    """Add the options that say how a row's text becomes a prompt."""
    options = [
        click.option("--system", default=None, help="System message for rows that have none."),
        click.option(
            "--chat/--raw",
            default=True,
            show_default=True,
            help="Put prompts into the model's chat template, or take them as they are.",
        ),
        click.option(
            "--template-arg",
            "template_args",
            multiple=True,
            metavar="NAME=VALUE",
            type=template_arg,
            help="Variable of the chat template, as enable_thinking=false; may be repeated.",
        ),
        click.option(
            "--chat-template",
            "chat_template",
            metavar="FILE",
            type=click.File(encoding="utf-8"),
            help="Jinja template to use in place of the model's own.",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def column_options(command: Any) -> Any:
    """Add the options that say what of a row is its prompt."""
    options = [
        click.option(
            "--prompt-column",
            metavar="NAME",
            help="Column of a table with the prompts. [default: prompt, text, or the only one]",
        ),
        click.option(
            "--id-column",
            metavar="NAME",
            help="Column with the ids; '' numbers the rows. [default: id, if it is there]",
        ),
        click.option(
            "--template",
            metavar="TEXT|@FILE",
            callback=template_text,
            help="Jinja template that makes a prompt of each row's columns.",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def take_inputs(options: dict[str, Any]) -> InputOptions:
    """Take what `prompt_options` and `column_options` added out of a command's options.

    What the engine has to know of it stays. Raises `ConfigError` if options contradict each other.
    """
    system, chat = options.pop("system"), options.pop("chat")
    template_args, file = dict(options.pop("template_args")), options.pop("chat_template")
    for option, value in [
        ("--system", system), ("--template-arg", template_args), ("--chat-template", file),
    ]:  # fmt: skip
        if value and not chat:
            raise ConfigError(f"{option} goes with the chat template, not with --raw")
    if file is not None:
        try:
            options["chat_template"] = file.read()
        except UnicodeDecodeError:
            raise ConfigError(f"{file.name}: is no text in UTF-8") from None
    names = ("prompt_column", "id_column", "template")
    own = {name: options.pop(name) for name in names if name in options}
    return InputOptions(chat, system, template_args, **own)


def output_style(_ctx: click.Context, _param: click.Parameter, value: str) -> OutputStyle | None:
    """Read the form of the output; `auto` leaves it to the input."""
    return None if value == "auto" else OutputStyle(value)


output_option = click.option(
    "-o",
    "--output",
    default="-",
    metavar="OUTPUT",
    type=click.Path(allow_dash=True),
    help="File: .jsonl, .csv, .tsv, .parquet; .gz and .zst pack it. - is JSONL on stdout.",
)
answer_column_option = click.option(
    "--answer-column",
    metavar="NAME",
    help="Column of a table that the answers are in. [default: answer]",
)
style_option = click.option(
    "--style",
    type=click.Choice(["auto", *(style.value for style in OutputStyle)]),
    default="auto",
    show_default=True,
    callback=output_style,
    help="Form of the output; auto: OpenAI's for an OpenAI batch, otherwise localbatch's own.",
)


def gpu_options() -> list[Any]:
    """Return the options that say which GPUs do what."""
    return [
        click.option(
            "--gpu-layers",
            type=integer,
            default=None,
            show_default="auto",
            help="Layers on GPUs; -1 is all, 0 none.",
        ),
        click.option(
            "--devices",
            "--device",
            metavar="NAME,...",
            callback=names_of,
            show_default="all",
            help="GPUs to use, by the names that `localbatch doctor` lists, or all.",
        ),
        click.option(
            "--split-mode",
            type=click.Choice([mode.value for mode in SplitMode]),
            default=SplitMode.AUTO.value,
            show_default="none if the model fits each GPU, else layer",
            help="With several GPUs: the whole model on each (none), or its layers or rows spread.",
        ),
        click.option(
            "--tensor-split",
            metavar="N,...",
            callback=numbers_of,
            help="Shares of the model for each GPU, as 3,1.",
        ),
    ]


def names_of(
    _ctx: click.Context, _param: click.Parameter, value: str | None
) -> tuple[str, ...] | None:
    """Read names with commas; `all` is `None`."""
    if value is None or value == "all":
        return None
    return tuple(name.strip() for name in value.split(","))


def numbers_of(
    _ctx: click.Context, _param: click.Parameter, value: str | None
) -> tuple[float, ...] | None:
    """Read numbers with commas."""
    if value is None:
        return None
    try:
        return tuple(float(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter(f"{value!r} is no list of numbers") from None


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
        click.option(
            "--ubatch",
            **auto,
            help="Most prompt tokens computed in one pass, a multiple of 4 from 32.",
        ),
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
        click.option(
            "--overlength",
            type=click.Choice([choice.value for choice in Overlength]),
            default=Overlength.ERROR.value,
            show_default=True,
            help="What becomes of prompts too long for the context: an error, or what is cut out.",
        ),
        *gpu_options(),
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


def show_plan(planned: JobPlan) -> None:
    """Print a plan, a line for each thing."""
    width = max(len(what) for what, _ in planned.lines)
    for what, value in planned.lines:
        click.echo(f"{what:<{width}}  {value}")
