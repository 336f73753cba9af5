"""What a job would run like: the plan, its reasons, its memory and its time, in words."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import psutil

from localbatch.data.errors import ConfigError
from localbatch.data.request import Completion, Request
from localbatch.data.sampling_params import SamplingParams
from localbatch.engine.backend import ContextConfig, ModelCard, Numerics
from localbatch.engine.client import WINDOW
from localbatch.engine.engine import EngineStats
from localbatch.engine.llm import LLM
from localbatch.engine.machine import available_memory
from localbatch.engine.planner import Choice, Layout
from localbatch.formats.inputs import InputOptions, open_input, read_requests

_MIB = 1 << 20
_EXAMPLE_ROWS, _EXAMPLE_WORDS = 100, 150

_NUMERICS = {
    Numerics.SAME_AS_ALONE: "the same as one row at a time, to the bit",
    Numerics.SAME_IN_ANY_BATCH: "the same in any batch, to the bit",
    Numerics.VARIES: "may vary with the batch",
}


def plan_job(
    model: str,
    source: str | None,
    params: SamplingParams,
    *,
    inputs: InputOptions,
    engine: Mapping[str, Any],
) -> list[tuple[str, str]]:
    """Return lines of (what, value): what would be run, how, why, in what memory and time.

    Without a source, an example job is planned. Loads the model and makes the contexts, but
    computes no row. Raises `LocalbatchError` if the model, the input or the settings won't do.
    """
    with LLM(model, **engine) as llm:
        requests, job = _example(params), f"an example: {_EXAMPLE_ROWS} rows"
        if source is not None:
            with open_input(source) as opened:
                rows = read_requests(opened, params, inputs)
                requests, job = _requests(rows, source)
        failed = llm.prepare(requests)
        stats = llm.stats
        if stats.plan is None or stats.context is None:
            reason = f": {failed[0].error}" if failed else ""
            raise ConfigError(f"{source}: no row can be computed{reason}")
        return [
            ("model", f"{llm.card.description}, {model}"),
            ("job", job + (f"; {len(failed)} can't be computed" if failed else "")),
            ("plan", _plan_line(stats.plan.layout, stats.context)),
            ("because", _reason_line(stats.plan)),
            ("answers", _NUMERICS[stats.numerics or Numerics.VARIES]),
            ("memory", _memory_line(llm.card, stats)),
            ("expected", _time_line(stats.plan)),
        ]


def _example(params: SamplingParams) -> list[Request]:
    """Return rows that have nothing in common."""
    return [
        Request(i, i, prompt=f"{i} " + "word " * _EXAMPLE_WORDS, params=params)
        for i in range(_EXAMPLE_ROWS)
    ]


def _requests(rows: Iterable[Request | Completion], source: str) -> tuple[list[Request], str]:
    """Return the rows of the first window, which the plan is made for, and a line on them."""
    first = list(itertools.islice(rows, WINDOW))
    requests = [row for row in first if isinstance(row, Request)]
    bad = len(first) - len(requests)
    more = ", the first of the file" if len(first) == WINDOW else ""
    name = "standard input" if source == "-" else source
    job = f"{_count(len(requests), 'row')} of {name}{more}" + (
        f"; {bad} can't be read" if bad else ""
    )
    return requests, job


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number:,} {what}s"


def _layout(layout: Layout) -> str:
    lanes, threads = _count(layout.lanes, "lane"), _count(layout.threads, "thread")
    fused = " with flash attention" if layout.flash_attention else ""
    return f"{lanes}, each with {threads} and {_count(layout.slots, 'row')}{fused}"


def _plan_line(layout: Layout, context: ContextConfig) -> str:
    cells = f"streams of {context.row_cells} cells a row"
    if context.pool_cells is not None:
        cells = f"one pool of {context.pool_cells} cells, at most {context.row_cells} for a row"
    if context.num_prefix_slots:
        cells += f", {_count(context.num_prefix_slots, 'slot')} a lane for prefixes"
    flash = "" if context.flash_attention else "; flash attention off"
    return f"{_layout(layout)}; {cells}{flash}; prompts in chunks of {context.chunk}"


def _reason_line(choice: Choice) -> str:
    others = [f"{_layout(layout)} would take {seconds:.0f} s" for layout, seconds in choice.others]
    return "; ".join([choice.reason, *others])


def _memory_line(card: ModelCard, stats: EngineStats) -> str:
    weights, cache, buffers = card.loaded_bytes, stats.kv_bytes, stats.buffer_bytes
    programs = 2 * psutil.Process().memory_info().rss  # this process, and one like it for the model
    return (
        f"{(weights + cache + buffers + programs) / _MIB:,.0f} MiB: {weights / _MIB:,.0f} of "
        f"weights, {cache / _MIB:,.0f} of KV cache, {buffers / _MIB:,.0f} of buffers, "
        f"{programs / _MIB:,.0f} of the programs themselves; "
        f"{available_memory() / _MIB:,.0f} MiB are left"
    )


def _time_line(choice: Choice) -> str:
    if choice.expected_s is None:
        return "not measured"
    return f"{choice.expected_s:.0f} s if every row runs to its max_tokens"
