"""`localbatch compare`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import click

from localbatch.cli.main import complete_model, debug_option, interruptible
from localbatch.cli.options import (
    column_options,
    gpu_options,
    integer,
    prompt_options,
    take_inputs,
)
from localbatch.compare import html, plot
from localbatch.compare.comparison import CompareConfig
from localbatch.compare.modes import MODES
from localbatch.compare.report import Comparison
from localbatch.compare.sweep import Sweep
from localbatch.compare.task import MOST_TOKENS, check_range
from localbatch.data.config import EngineConfig, FlashAttention, KVLayout, SplitMode
from localbatch.data.errors import OutputError
from localbatch.data.request import Request
from localbatch.data.sampling_params import SamplingParams
from localbatch.engine.backend import ModelCard
from localbatch.formats.inputs import InputOptions, open_input, read_requests

DEFAULT_TOKENS = 64
MOST_INPUT_ROWS = 1_000_000
_AUTO: dict[str, Any] = {"type": integer, "default": None, "show_default": "auto"}


def names(_ctx: click.Context, _param: click.Parameter, value: str | None) -> tuple[str, ...]:
    """Read a list of names."""
    return tuple(MODES) if value is None else tuple(part.strip() for part in value.split(","))


def machine_options(command: Any) -> Any:
    """Add the options that say on what to measure, and how often."""
    options = [
        click.option(
            "--rounds", type=int, default=3, show_default=True,
            help="Measure everything so often, taking turns; medians are shown.",
        ),
        click.option("--ctx", **_AUTO, help="Most tokens of a row, prompt and answer together."),
        click.option("--threads", **_AUTO, help="CPU threads, all processes together."),
        *gpu_options(),
        click.option(
            "--flash-attention",
            type=click.Choice([choice.value for choice in FlashAttention]),
            default=FlashAttention.AUTO.value, show_default="on with a GPU",
            help="Fused attention; on a CPU it makes answers depend on the batch.",
        ),
        click.option(
            "--backend", type=click.Choice(["llama", "fake"]), default="llama", hidden=True
        ),
        click.option("-q", "--quiet", is_flag=True, help="Don't tell of each measurement."),
        click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables."),
        click.option(
            "--html", "html_path", metavar="FILE", type=click.Path(dir_okay=False),
            help="Write a page with plots, complete in one file.",
        ),
        click.option(
            "--plot", "plot_path", metavar="FILE", type=click.Path(dir_okay=False),
            help="Write the first plot as a picture, .png or .svg.",
        ),
    ]  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def teller(quiet: bool) -> Callable[[str], None]:
    """Return what tells of each measurement, on standard error."""
    return lambda line: None if quiet else click.echo(line, err=True)


def saver(options: dict[str, Any]) -> Callable[[Comparison | Sweep], None]:
    """Take the files to be written out of a command's options; returns what writes them.

    Raises `OutputError` at once for a folder that isn't there, `ConfigError` for a missing library.
    """
    html_path, plot_path = options.pop("html_path"), options.pop("plot_path")
    for path in (html_path, plot_path):
        if path is not None and not Path(path).resolve().parent.is_dir():
            raise OutputError(f"{path}: its folder is not there; make it, or check the path")
    if plot_path is not None:
        plot.check(plot_path)

    def save(report: Comparison | Sweep) -> None:
        if html_path is not None:
            if isinstance(report, Sweep):
                page = html.sweep_page(report)
            else:
                page = html.comparison_page(report)
            try:
                Path(html_path).write_text(page, "utf-8")
            except OSError as error:
                raise OutputError(f"{html_path}: can't be written: {error.strerror}") from None
        if plot_path is not None:
            plot.write(report, plot_path)

    return save


def engine_config(
    model: str, options: dict[str, Any], layout: KVLayout
) -> tuple[EngineConfig, ModelCard]:
    """Take the engine's settings out of a command's options, and find model and GPUs."""
    from localbatch.compare.process import read_card
    from localbatch.models.catalog import resolve_model
    from localbatch.models.gguf import check_gguf

    path, backend = model, options.pop("backend")
    if backend == "llama":
        path = str(resolve_model(model))
        check_gguf(path)
    config = EngineConfig(
        model=path, backend=backend, ctx=options.pop("ctx"), threads=options.pop("threads"),
        gpu_layers=options.pop("gpu_layers"), devices=options.pop("devices"),
        split_mode=SplitMode(options.pop("split_mode")), tensor_split=options.pop("tensor_split"),
        kv_layout=layout,
        flash_attention=FlashAttention(options.pop("flash_attention")),
        chat_template=options.pop("chat_template", None),
    )  # fmt: skip
    return config, read_card(config)


@click.command(short_help="Run the same rows in several ways, and say what each is worth.")
@click.argument("model", shell_complete=complete_model)
@click.argument("source", metavar="INPUT", type=click.Path(allow_dash=True))
@click.option(
    "--modes", callback=names, metavar="NAME,...", show_default="all",
    help=f"Some of {', '.join(MODES)}; sequential is always run.",
)  # fmt: skip
@click.option("--batch", type=int, default=16, show_default=True, help="Rows alive at one time.")
@click.option("--instances", **_AUTO, help="Processes of multi-instance.")
@click.option("--rows", "most_rows", **_AUTO, help="Only the first so many rows.")
@click.option(
    "--max-tokens", type=int, default=None, show_default="each row's own, or 64",
    help="Most tokens to generate for any row.",
)  # fmt: skip
@click.option("--ignore-eos", is_flag=True, help="Go on to --max-tokens whatever the model says.")
@click.option(
    "--kv-layout", type=click.Choice([layout.value for layout in KVLayout]),
    default=KVLayout.STREAMS.value, show_default=True,
    help="KV cells of its own for each row (exact on the CPU), or one pool for all.",
)  # fmt: skip
@prompt_options
@column_options
@machine_options
@debug_option
def compare(model: str, source: str, **options: Any) -> None:
    """Run the rows of INPUT through MODEL one by one, in static batches, in continuous ones, and
    more, and show what each way takes.

    All modes get the same rows and generate greedily; stop strings and other sampling parameters of
    rows are left out. Each runs in processes of its own, all that need not be repeated (loading,
    contexts, the plan) comes before the clock starts, and the answers are compared token by token
    with those of one row after another. A mode that memory is too short for says so.

    \b
    Examples:
      localbatch compare smollm2-135m prompts.jsonl
      localbatch compare smollm2-135m prompts.jsonl --modes static,continuous --batch 32
      localbatch compare model.gguf prompts.txt --rows 16 --html report.html
    """  # noqa: D205
    from localbatch.compare import comparison
    from localbatch.compare.report import text_of

    quiet, as_json = options.pop("quiet"), options.pop("as_json")
    save = saver(options)
    inputs = take_inputs(options)
    engine, _ = engine_config(model, options, KVLayout(options.pop("kv_layout")))
    rows, num_bad = read_rows(
        source, inputs, options.pop("max_tokens"), options.pop("ignore_eos"),
        options.pop("most_rows"),
    )  # fmt: skip
    config = CompareConfig(engine=engine, requests=rows, name=model, **options)
    with interruptible():
        report = comparison.compare(config, tell=teller(quiet))
    if num_bad:
        left_out = f"{num_bad} rows of the input can't be used and are left out"
        report = replace(report, notes=(left_out, *report.notes))
    click.echo(json.dumps(report.as_dict(), indent=2) if as_json else text_of(report))
    save(report)


def read_rows(
    source: str, inputs: InputOptions, max_tokens: int | None, ignore_eos: bool, most: int | None
) -> tuple[tuple[Request, ...], int]:
    """Return the rows that can be used, and how many can't; these are named on standard error."""
    check_range("most_rows", most, 1, MOST_INPUT_ROWS)
    check_range("max_tokens", max_tokens, 1, MOST_TOKENS)
    params = SamplingParams(max_tokens=max_tokens or DEFAULT_TOKENS, ignore_eos=ignore_eos)
    rows, num_bad = [], 0
    with open_input(source) as opened:
        for row in islice(read_requests(opened, params, inputs), most):
            if isinstance(row, Request):
                own = min(row.params.max_tokens, max_tokens or row.params.max_tokens)
                rows.append(replace(row, params=replace(row.params, max_tokens=own)))
            else:
                num_bad += 1
                click.echo(f"left out: {source}:{row.line}: {row.error}", err=True)
    return tuple(rows), num_bad
