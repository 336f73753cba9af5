"""How far a job is, on a terminal, and what it did, in a line."""

from __future__ import annotations

import os
import sys
from types import TracebackType
from typing import NoReturn

from tqdm import tqdm

from localbatch.data.request import Completion

_KNOWN_TOTAL = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} rows{postfix}, ETA {remaining}"
_MOST_NOTES = 20
_UNKNOWN_TOTAL = "rows: {n_fmt}{postfix}, {elapsed}"


class Progress:
    """A bar on standard error: rows done, output tokens per second, failed rows, time left.

    Speed and time left are over the time since construction. Where standard error is no terminal,
    or with `quiet`, nothing is shown. Without color if `NO_COLOR` is set (https://no-color.org).
    `total` is the number of rows, if known. The bar is gone after `close`.
    """

    def __init__(self, total: int | None = None, *, quiet: bool = False) -> None:
        self._failed = 0
        self._notes = 0
        self._tokens = 0
        self._bar: tqdm[NoReturn] | None = None
        if quiet or sys.stderr is None or not sys.stderr.isatty():
            return
        self._bar = tqdm(
            total=total,
            file=sys.stderr,
            leave=False,
            dynamic_ncols=True,
            colour=None if os.environ.get("NO_COLOR") else "green",
            bar_format=_UNKNOWN_TOTAL if total is None else _KNOWN_TOTAL,
            smoothing=0,  # rows end in bursts; only the average over the run says when it ends
            miniters=1,
        )

    def update(self, completion: Completion) -> None:
        """Count a row that ended."""
        if self._bar is None:
            return
        self._failed += completion.failed
        self._tokens += completion.usage.completion_tokens
        speed = _per_second(self._tokens, self._bar.format_dict["elapsed"])
        self._bar.set_postfix_str(f"{speed} tok/s, {self._failed:,} failed", refresh=False)
        self._bar.update()

    def set_total(self, total: int) -> None:
        """Say how many rows there are, once that is known."""
        if self._bar is not None:
            self._bar.total = total
            self._bar.bar_format = _KNOWN_TOTAL
            self._bar.refresh()

    def note(self, line: str) -> None:
        """Print a line on standard error, above the bar; after the first 20 only say so."""
        self._notes += 1
        if sys.stderr is None or self._notes > _MOST_NOTES + 1:
            return
        if self._notes == _MOST_NOTES + 1:
            line = "(more failed rows are only in the output)"
        tqdm.write(line, file=sys.stderr)

    def close(self) -> None:
        """Take the bar off the terminal; again, it does nothing."""
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def summary_line(
    *, rows: int, failed: int, prompt_tokens: int, completion_tokens: int, wall_s: float
) -> str:
    """Return what a job did in `wall_s` seconds, as one line for people; `failed` are of `rows`."""
    return (
        f"{rows:,} row{'' if rows == 1 else 's'} in {wall_s:,.1f} s: "
        f"{rows - failed:,} answered, {failed:,} failed; "
        f"{prompt_tokens:,} prompt + {completion_tokens:,} output tokens, "
        f"{_per_second(completion_tokens, wall_s)} output tok/s"
    )


def reasoning_line(answers: int) -> str:
    """Return the warning that so many answers were cut off before they began."""
    one = answers == 1
    return (
        f"warning: {answers:,} answer{'' if one else 's'} ended while the model was still "
        "reasoning; raise --max-tokens, or limit it with --max-reasoning-tokens"
    )


def _per_second(count: int, seconds: float) -> str:
    """Format a speed, with a decimal where it is slow."""
    speed = count / seconds if seconds > 0 else 0.0
    return f"{speed:,.1f}" if 0 < speed < 9.95 else f"{speed:,.0f}"
