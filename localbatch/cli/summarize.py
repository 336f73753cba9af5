"""`localbatch summarize`."""

from __future__ import annotations

import os
import sys
import time
from typing import Any, NoReturn

import click
from tqdm import tqdm

from localbatch.cli.main import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_ROWS_FAILED,
    complete_model,
    debug_option,
    interruptible,
)
from localbatch.cli.options import engine_options, prompt_options, take_inputs
from localbatch.data.sampling_params import SamplingParams
from localbatch.engine.backend import Numerics
from localbatch.summaries.cutter import CHUNK_TOKENS
from localbatch.summaries.job import SummaryConfig, SummaryResult
from localbatch.summaries.job import summarize as run_summarize
from localbatch.summaries.plan import SummaryPlan, plan_summaries
from localbatch.summaries.prompts import SummaryOptions, SummaryStyle
from localbatch.summaries.stream import Counts
from localbatch.summaries.work import DocumentResult

_MOST_NOTES = 20
_NAME_CHARS = 40
_BAR = "{percentage:3.0f}%|{bar}| {postfix}"


def style_options(command: Any) -> Any:
    """Add the options that say how summaries are to be."""
    options = [
        click.option(
            "--style",
            type=click.Choice([style.value for style in SummaryStyle]),
            default=SummaryStyle.PARAGRAPH.value,
            show_default=True,
            help="Form of a summary.",
        ),
        click.option("--length", type=int, default=None, help="Words of a summary, roughly."),
        click.option("--language", default=None, help="Language to write in, as French."),
        click.option(
            "--instruction",
            type=click.File(encoding="utf-8"),
            default=None,
            metavar="FILE",
            help="Your own words to the model, in place of all of the above.",
        ),
        click.option("--focus", default=None, help="What matters most to you."),
        click.option(
            "--chunk-tokens",
            type=int,
            default=CHUNK_TOKENS,
            show_default=True,
            help="Most tokens of a document in one prompt.",
        ),
        click.option(
            "--encoding",
            default="utf-8",
            show_default=True,
            help="Of plain text and Markdown; auto guesses where it is not UTF-8.",
        ),
        click.option("--temperature", type=float, default=0.0, show_default=True),
        click.option("--seed", type=int, default=0, show_default=True),
        click.option("--repeat-penalty", type=float, default=1.0, show_default=True),
        click.option(
            "--max-reasoning-tokens",
            type=int,
            default=None,
            help="Most tokens before a reasoning model's summary; left out: 512.",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def take_style(options: dict[str, Any]) -> dict[str, Any]:
    """Take what `style_options` added out of a command's options, as `SummaryConfig` wants it."""
    file = options.pop("instruction")
    try:
        instruction = None if file is None else file.read()
    except UnicodeDecodeError:
        raise click.BadParameter(f"{file.name}: is no text in UTF-8") from None
    names = ("temperature", "seed", "repeat_penalty", "max_reasoning_tokens")
    sampling = {name: options.pop(name) for name in names}
    return {
        "options": SummaryOptions(
            SummaryStyle(options.pop("style")), options.pop("length"), options.pop("language"),
            instruction, options.pop("focus"),
        ),
        "params": SamplingParams(**sampling),
        "chunk_tokens": options.pop("chunk_tokens"),
        "encoding": options.pop("encoding"),
    }  # fmt: skip


class SummaryProgress:
    """A bar on standard error: documents, chunks and merges done, and the time left by tokens."""

    def __init__(self, *, quiet: bool) -> None:
        self._started = time.perf_counter()
        self._quiet = quiet
        self._notes = 0
        self._bar: tqdm[NoReturn] | None = None
        if not quiet and sys.stderr is not None and sys.stderr.isatty():
            colour = None if os.environ.get("NO_COLOR") else "green"
            self._bar = tqdm(
                total=1, file=sys.stderr, leave=False, dynamic_ncols=True, colour=colour,
                bar_format=_BAR, miniters=0,
            )  # fmt: skip

    def update(self, counts: Counts, done: DocumentResult | None) -> None:
        """Show how far the job is, and say so if a document failed."""
        if done is not None and not self._quiet:
            self._note(done)
        if self._bar is None:
            return
        if counts.reading is not None and not counts.nodes:
            return self.show_reading(counts)
        left = counts.time_left(time.perf_counter() - self._started)
        eta = "?" if left is None else tqdm.format_interval(left)
        more = "" if counts.opened_bytes >= counts.all_bytes else "+"
        self._bar.total = max(1, int(counts.tokens * (1 + counts.unopened)))
        self._bar.n = min(counts.finished_tokens, self._bar.total)
        self._bar.set_postfix_str(
            f"{counts.finished_documents:,}/{counts.documents:,} documents, "
            f"{counts.finished_nodes:,}/{counts.nodes:,}{more} chunks and merges, ETA {eta}"
            + ("" if counts.reading is None else f", reading {_short(counts.reading)}")
        )

    def show_reading(self, counts: Counts) -> None:
        """Show which document is being read, while there is nothing else to show."""
        if self._bar is None:
            return
        self._bar.total, self._bar.n = max(1, counts.all_bytes), counts.opened_bytes
        number = min(counts.finished_documents + 1, counts.documents)
        name = _short(counts.reading or "")
        self._bar.set_postfix_str(f"reading {number:,}/{counts.documents:,}: {name}")

    def _note(self, done: DocumentResult) -> None:
        """Print what is wrong with a document above the bar; after the first 20 only say so."""
        line = done.error
        if line is None and done.warnings:
            line = f"warning: the summary {'; '.join(done.warnings)}"
        if line is None or sys.stderr is None or self._notes > _MOST_NOTES:
            return
        self._notes += 1
        more = "(more warnings and errors are only in the index)"
        tqdm.write(
            more if self._notes > _MOST_NOTES else f"{_one_line(done.path)}: {line}",
            file=sys.stderr,
        )

    def close(self) -> None:
        """Take the bar off the terminal."""
        if self._bar is not None:
            self._bar.close()


@click.command(short_help="Summarize documents.")
@click.argument("model", shell_complete=complete_model)
@click.argument("paths", nargs=-1, required=True, metavar="PATHS...")
@click.option("-o", "--output", required=True, metavar="OUTDIR", help="Folder for the summaries.")
@style_options
@click.option("--with-sources", is_flag=True, help="List the parts of a document in its summary.")
@prompt_options
@engine_options
@click.option("--dry-run", "only_plan", is_flag=True, help="Read, cut and plan; compute nothing.")
@click.option("--fresh", is_flag=True, help="Forget what an earlier run of OUTDIR finished.")
@click.option("--retry-failed", is_flag=True, help="Compute again what failed earlier.")
@click.option("-q", "--quiet", is_flag=True, help="No progress bar and no notes.")
@debug_option
def summarize(
    model: str,
    paths: tuple[str, ...],
    output: str,
    with_sources: bool,
    only_plan: bool,
    fresh: bool,
    retry_failed: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Summarize documents with MODEL.

    PATHS are files, folders and patterns. Plain text, Markdown and e-mail are read as they are;
    HTML, PDF, DOCX and EPUB take `pip install 'localbatch[docs]'`.

    OUTDIR gets NAME.md for each document, and index.csv and index.jsonl with a row for each: title,
    words, tokens, chunks, summary, times, warnings, errors. A document that can't be summarized has
    an error there and costs the others nothing.

    Long documents are cut at paragraphs and sentences; the summaries of the parts are merged. What
    is finished is kept in OUTDIR/index.journal: the same command goes on where a run was cut short,
    and later does only documents that are new or changed.

    \b
    Examples:
      localbatch summarize smollm2-135m reports/ -o summaries
      localbatch summarize model.gguf notes/*.md talk.pdf -o out --style bullets --language German

    \b
    Exit codes: 0 every document was summarized, 1 the run failed, 2 wrong usage,
    3 some documents failed, 130 interrupted.
    """
    style = take_style(options)
    config = SummaryConfig(
        model, paths, output, inputs=take_inputs(options), with_sources=with_sources,
        fresh=fresh, retry_failed=retry_failed, engine=options, **style,
    )  # fmt: skip
    progress = SummaryProgress(quiet=quiet)
    try:
        if only_plan:
            plan = plan_summaries(config, progress.show_reading)
            progress.close()
            return _show_plan(plan, quiet)
        with interruptible():
            result = run_summarize(config, progress.update)
    finally:
        progress.close()
    _end(result, output, quiet)


def _short(name: str) -> str:
    return _one_line(name)[-_NAME_CHARS:]


def _one_line(path: str) -> str:
    """Return a path that may have line ends, and bytes that are no text, for people."""
    return path.encode("utf-8", "backslashreplace").decode().replace("\n", "\\n")


def _show_plan(plan: SummaryPlan, quiet: bool) -> None:
    """Print a plan; ends with the exit code for documents that can't be summarized."""
    for bad in plan.documents:
        if bad.error is not None and not quiet:
            click.echo(f"{_one_line(bad.path)}: {bad.error}", err=True)
    for what, value in plan.lines:
        click.echo(f"{what:<9}  {value}")
    if plan.failed:
        raise SystemExit(EXIT_ROWS_FAILED)


def _end(result: SummaryResult, output: str, quiet: bool) -> None:
    """Say what a job did, and end with its exit code."""
    if not quiet:
        if result.numerics is Numerics.VARIES:
            click.echo("note: with these settings an answer may depend on its batch", err=True)
        if gone := len(result.removed):
            what = "summary" if gone == 1 else "summaries"
            click.echo(f"{gone:,} {what} removed whose documents have none any more", err=True)
        click.echo(_summary_line(result, output), err=True)
    if result.interrupted:
        click.echo("interrupted; the same command goes on from here", err=True)
        raise SystemExit(EXIT_INTERRUPTED)
    if result.error is not None:
        click.echo(f"Error: {result.error}", err=True)
        raise SystemExit(EXIT_FAILED)
    if result.failed:
        raise SystemExit(EXIT_ROWS_FAILED)


def _summary_line(result: SummaryResult, output: str) -> str:
    done, counts = len(result.documents), result.counts
    warned = sum(bool(document.warnings) for document in result.documents)
    resumed = f" ({counts.resumed_nodes:,} by earlier runs)" if counts.resumed_nodes else ""
    return (
        f"{done:,} document{'' if done == 1 else 's'} in {result.wall_s:,.1f} s: "
        f"{done - result.failed:,} summarized, {result.failed:,} failed, {warned:,} with warnings; "
        f"{counts.finished_nodes:,} chunks and merges{resumed}, {result.prompt_tokens:,} prompt + "
        f"{result.completion_tokens:,} output tokens; {output}"
    )
