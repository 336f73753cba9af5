"""`localbatch models`."""

from __future__ import annotations

import click
from tqdm import tqdm

from localbatch.cli.main import debug_option, interruptible
from localbatch.engine.inspect import describe
from localbatch.models.catalog import is_present, known_entry, load_catalog, resolve_model
from localbatch.models.download import pull as pull_model


@click.group(short_help="List, fetch and look into models.")
def models() -> None:
    """List, fetch and look into models.

    \b
    Examples:
      localbatch models list
      localbatch models pull smollm2-135m
      localbatch models info smollm2-135m
      localbatch models path smollm2-135m
    """


@models.command("list")
def list_models() -> None:
    """List the models that can be fetched by name.

    \b
    Examples:
      localbatch models list
    """
    catalog = load_catalog()
    width = max(map(len, catalog))
    for name, entry in catalog.items():
        have = "here" if is_present(entry) else "    "
        size = f"{entry.size / 1e6:,.0f} MB"
        click.echo(f"{name:<{width}}  {have}  {size:>9}  {entry.licence:<12}  {entry.description}")


@models.command()
@click.argument("name")
@click.option("--force", is_flag=True, help="Fetch it again even if it is here.")
@debug_option
def pull(name: str, force: bool) -> None:
    """Fetch the model NAME, check it, and print where it is.

    \b
    Examples:
      localbatch models pull smollm2-135m
      localbatch models pull smollm2-135m --force
    """
    entry = known_entry(name)
    with (
        interruptible(),
        tqdm(
            total=entry.size, unit="B", unit_scale=True, desc=name, leave=False, disable=None
        ) as bar,
    ):

        def report(done: int, _total: int) -> None:
            bar.update(done - bar.n)

        found = pull_model(entry, report, force=force)
    click.echo(found)


@models.command()
@click.argument("model")
@click.option(
    "--rows",
    type=click.IntRange(1),
    default=32,
    show_default=True,
    help="Rows in the batch, for the memory.",
)
@click.option(
    "--ctx",
    type=click.IntRange(1),
    default=1024,
    show_default=True,
    help="Tokens of a row, for the memory.",
)
@debug_option
def info(model: str, rows: int, ctx: int) -> None:
    """Print what the GGUF file of MODEL says of itself, and what a batch needs in memory.

    \b
    Examples:
      localbatch models info smollm2-135m
      localbatch models info ./model.gguf --rows 64 --ctx 4096
    """
    for key, value in describe(str(resolve_model(model)), rows=rows, ctx=ctx):
        click.echo(f"{key:<14} {value}")


@models.command()
@click.argument("name")
def path(name: str) -> None:
    """Print the path of the model NAME, which must be here.

    \b
    Examples:
      localbatch models path smollm2-135m
    """
    click.echo(resolve_model(name))
