"""What a job would run like: the plan, its reasons, its memory and its time, in words."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import psutil

from localbatch.data.request import Completion, Request
from localbatch.data.sampling_params import SamplingParams
from localbatch.engine.backend import ContextConfig, ModelCard, Numerics
from localbatch.engine.engine import EngineStats
from localbatch.engine.llm import LLM
from localbatch.engine.planner import Choice, Layout
from localbatch.formats.inputs import InputOptions, read_requests
from localbatch.jobs.preflight import look_through
from localbatch.jobs.source import open_source

_MIB = 1 << 20
_EXAMPLE_ROWS, _EXAMPLE_WORDS = 100, 150

_NUMERICS = {
    Numerics.SAME_AS_ALONE: "the same as one row at a time, to the bit",
    Numerics.SAME_IN_ANY_BATCH: "the same in any batch, to the bit",
    Numerics.VARIES: "may vary with the batch",
}


class JobPlan(NamedTuple):
    """What would be run."""

    lines: list[tuple[str, str]]
    """What it is about, and what there is to say."""
    failed: int
    """Rows that will have an error in place of an answer."""


def plan_job(
    model: str,
    source: str | None,
    params: SamplingParams,
    *,
    inputs: InputOptions,
    engine: Mapping[str, Any],
    note: Callable[[Completion], object] = lambda bad: None,
) -> JobPlan:
    """Return what would be run, how, why, in what memory and time.

    Without a source, an example job is planned. Loads the model, looks through all rows and makes
    the contexts, but computes no row; `note` is told of the rows that can't be. Raises
    `LocalbatchError` if the model, the input or the settings won't do.
    """
    with contextlib.ExitStack() as stack:
        llm = stack.enter_context(LLM(model, **engine))
        llm.check_template_args(inputs.template_args)
        rows: Iterable[Request | Completion] = _example(params)
        if source is not None:
            opened = stack.enter_context(open_source(source, has_batches=not inputs.is_free_form))
            rows = read_requests(opened.input, params, inputs)
        found = look_through(llm, rows, note)
        name = f"an example: {_EXAMPLE_ROWS} rows" if source is None else _name(source)
        llm.prepare(found.first)
        lines = [
            ("model", f"{llm.card.description}, {model}"),
            ("job", name),
            *found.lines(llm.config.overlength),
            *_engine_lines(llm, found.windows),
        ]
        return JobPlan(lines, found.failed)


def _engine_lines(llm: LLM, windows: float) -> list[tuple[str, str]]:
    """Return how it would be run; a job is planned by its first window of all `windows`."""
    stats = llm.stats
    if stats.plan is None or stats.context is None:
        return [("plan", "no row can be computed")]
    return [
        ("device", llm.card.placement),
        ("plan", _plan_line(stats.plan.layout, stats.context, stats.slots)),
        ("because", _reason_line(stats.plan)),
        ("numbers", _NUMERICS[stats.numerics or Numerics.VARIES]),
        ("memory", _memory_line(llm.card, stats)),
        ("expected", _time_line(stats.plan, windows)),
    ]


def _example(params: SamplingParams) -> list[Request]:
    """Return rows that have nothing in common."""
    return [
        Request(i, i, prompt=f"{i} " + "word " * _EXAMPLE_WORDS, params=params)
        for i in range(_EXAMPLE_ROWS)
    ]


def _name(source: str) -> str:
    return "standard input" if source == "-" else source


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number:,} {what}s"


def _layout(layout: Layout, slots: int | None = None) -> str:
    """Return a layout in words; `slots` are those of all lanes, if some have one less."""
    lanes, threads = _count(layout.lanes, "lane"), _count(layout.threads, "thread")
    rows, fused = _count(layout.slots, "row"), " with flash attention" * layout.flash_attention
    if layout.lanes == 1:
        return f"{lanes} with {threads} and {rows}{fused}"
    if slots is None or slots % layout.lanes == 0:
        return f"{lanes}, each with {threads} and {rows}{fused}"
    return f"{lanes}, each with {threads} and up to {rows}{fused}, {_count(slots, 'row')} in all"


def _plan_line(layout: Layout, context: ContextConfig, slots: int) -> str:
    cells = f"streams of {context.row_cells} cells a row"
    if context.pool_cells is not None:
        cells = f"one pool of {context.pool_cells} cells, at most {context.row_cells} for a row"
    if context.num_prefix_slots:
        cells += f", {_count(context.num_prefix_slots, 'slot')} a lane for prefixes"
    flash = "" if context.flash_attention else "; flash attention off"
    return f"{_layout(layout, slots)}; {cells}{flash}; prompts in chunks of {context.chunk}"


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
        f"{stats.free_bytes / _MIB:,.0f} MiB are left"
    )


def _time_line(choice: Choice, windows: float) -> str:
    if choice.expected_s is None:
        return "not measured"
    return f"{windows * choice.expected_s:,.0f} s if every row runs to its max_tokens"
