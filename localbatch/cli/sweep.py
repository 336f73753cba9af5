"""`localbatch sweep`."""

from __future__ import annotations

import json
from typing import Any

import click

from localbatch.cli.compare import engine_config, machine_options, saver, teller
from localbatch.cli.main import complete_model, debug_option, interruptible
from localbatch.compare import sweep as sweeping
from localbatch.data.config import KVLayout
from localbatch.data.errors import ConfigError


def numbers(_ctx: click.Context, _param: click.Parameter, value: str) -> tuple[int, ...]:
    """Read a list of batch sizes."""
    sizes = []
    for part in value.split(","):
        try:
            sizes.append(int(part))
        except ValueError:
            raise ConfigError(
                sweeping.bad_size(repr(part) if part.strip() else "nothing")
            ) from None
    return tuple(sizes)


def names(_ctx: click.Context, _param: click.Parameter, value: str) -> tuple[str, ...]:
    """Read a list of names."""
    return tuple(part.strip() for part in value.split(","))


def layouts(_ctx: click.Context, _param: click.Parameter, value: str) -> tuple[KVLayout, ...]:
    """Read a choice of KV layouts."""
    return tuple(KVLayout) if value == "both" else (KVLayout(value),)


@click.command(short_help="Measure how throughput grows with the batch.")
@click.argument("model", shell_complete=complete_model)
@click.option(
    "--sizes", callback=numbers, default=",".join(map(str, sweeping.SIZES)), show_default=True,
    metavar="N,...", help=f"Batch sizes, up to {sweeping.MOST_ROWS}.",
)  # fmt: skip
@click.option(
    "--prompt-tokens", type=int, default=64, show_default=True, help="Tokens of each prompt."
)
@click.option(
    "--max-tokens", type=int, default=32, show_default=True, help="Tokens of each answer."
)
@click.option(
    "--waves", type=int, default=1, show_default=True,
    help="Rows of a measurement, in batches.",
)  # fmt: skip
@click.option(
    "--schemes", callback=names, default=",".join(sweeping.SCHEMES), show_default=True,
    metavar="NAME,...", help="Static batches, continuous ones, or both.",
)  # fmt: skip
@click.option(
    "--kv-layout", "kv_layouts", callback=layouts, default="both", show_default=True,
    type=click.Choice(["both", *(layout.value for layout in KVLayout)]),
    help="KV cells of its own for each row, one pool for all, or both in turn.",
)  # fmt: skip
@click.option(
    "--check/--no-check", default=True, show_default=True,
    help="Also run the rows one at a time, once, and compare the answers.",
)  # fmt: skip
@machine_options
@debug_option
def sweep(model: str, **options: Any) -> None:
    """Measure MODEL with more and more rows in the batch, and name the size where the gain
    flattens.

    All rows have the same size. Each batch size is measured in a process of its own. A size that
    memory is too short for says so.

    \b
    Examples:
      localbatch sweep smollm2-135m
      localbatch sweep model.gguf --sizes 1,2,4,8 --kv-layout streams --schemes continuous
    """  # noqa: D205
    from localbatch.compare.sweep_report import sweep_text

    quiet, as_json = options.pop("quiet"), options.pop("as_json")
    kv_layouts, save = options.pop("kv_layouts"), saver(options)
    engine, card = engine_config(model, options, KVLayout.STREAMS)
    config = sweeping.SweepConfig(
        engine=engine, layouts=kv_layouts, name=model, max_ctx=card.max_ctx, **options
    )
    with interruptible():
        report = sweeping.sweep(config, tell=teller(quiet))
    click.echo(json.dumps(report.as_dict(), indent=2) if as_json else sweep_text(report))
    save(report)
