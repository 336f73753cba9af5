"""Reports as one self-contained page: no script, no font and no picture from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from localbatch.compare.figures import gaps
from localbatch.compare.report import (
    Column,
    Comparison,
    ModeReport,
    difference_lines,
    groups,
    rounds_text,
)
from localbatch.compare.svg import Bar, Line, bars, lines, ranges, timeline
from localbatch.compare.sweep import Sweep
from localbatch.compare.sweep_report import columns_of, differing_lines, knee_line
from localbatch.compare.trace import spans

_BREAKS = 400
"""Breaks shorter than one part in so many of the time can't be seen in a timeline."""

_STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1c1d1f; --soft: #6a6d73; --grid: #e3e4e8;
  --s0: #2a78d6; --s1: #d9652b; --s2: #14966a; --s3: #8a57d1; --d1: #7db1ea; --idle: #eef0f3; }
@media (prefers-color-scheme: dark) { :root { --page: #17181b; --ink: #e8e9ec; --soft: #a0a4ac;
  --grid: #34363c; --s0: #5b9fee; --s1: #ee8450; --s2: #35b98a; --s3: #ab83ea; --d1: #2f5f99;
  --idle: #26282d; } }
body { margin: 2rem auto; max-width: 1000px; padding: 0 1rem; background: var(--page);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; } h3 { font-size: 1rem; }
p, figcaption { color: var(--soft); } figure { margin: 1rem 0; }
svg { width: 100%; height: auto; }
svg text { fill: var(--ink); font: 12px system-ui, sans-serif; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; margin: 1.2rem 0; }
th, td { padding: .25rem .6rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--grid); } th:first-child, td:first-child { text-align: left;
  position: sticky; left: 0; background: var(--page); }
.series-0 { fill: var(--s0); } .series-1 { fill: var(--s1); } .series-2 { fill: var(--s2); }
.series-3 { fill: var(--s3); } .line { fill: none; stroke-width: 2; }
.line, .lines .grid { vector-effect: non-scaling-stroke; }
.stroke-0 { stroke: var(--s0); } .stroke-1 { stroke: var(--s1); } .stroke-2 { stroke: var(--s2); }
.stroke-3 { stroke: var(--s3); } .grid { stroke: var(--grid); fill: none; }
@media (max-width: 640px) { .bars text, .ranges text, .timeline text { font-size: 17px; }
  .lines text { font-size: 24px; } .lines .extra { display: none; } }
.axis { stroke: var(--ink); fill: none; } .mark { stroke: var(--ink); stroke-width: 2.5; }
.prefill { fill: var(--s1); } .decode-0 { fill: var(--s0); } .decode-1 { fill: var(--d1); }
.idle { fill: var(--idle); } .key { display: inline-block; width: .8em; height: .8em;
  vertical-align: -.05em; margin: 0 .3em 0 .8em; }
.key.k0 { background: var(--s0); } .key.k1 { background: var(--s1); }
.key.k2 { background: var(--s2); } .key.k3 { background: var(--s3); }
.key.idle { background: var(--idle); border: 1px solid var(--grid); }
.name { display: inline-block; margin-right: 1.2em; } .name .key { margin-left: 0; }
"""

_KEY = (
    "<figcaption>From left to right: time. Each line is a place in the batch; prompts may be "
    "computed one after another while the other rows wait."
    '<span class="key k1"></span>prompt<span class="key k0"></span>answer (two shades: one row '
    'after another)<span class="key idle"></span>idle</figcaption>'
)


def comparison_page(report: Comparison) -> str:
    """Return the page of a comparison."""
    modes = report.modes
    parts = [
        *_chapter("Throughput", "Output tokens per second; thin lines: range of the rounds.",
                  bars([_throughput(mode) for mode in modes])),
        *_tables(modes),
        *_chapter("Time to a row's last token",
                  "From the common start. Bars: the middle half of all rows; thin lines: the "
                  "middle 90 %; mark: the median. Logarithmic.",
                  ranges([(m.mode, _latencies(m)) for m in modes], "s")),
        *_chapter("Time to a row's first token", "Waiting for a place included.",
                  ranges([(m.mode, _first_tokens(m)) for m in modes], "s")),
        *_chapter("Time from one token of a row to its next", "",
                  ranges([(m.mode, gaps(m.sample.token_times.values())) for m in modes],
                         "ms", 1000)),
        "<h2>Which row ran when</h2>", _KEY,
        *(part for mode in modes for part in _timeline(mode)),
        *_left_out(report),
    ]  # fmt: skip
    facts = f"{report.rows:,} rows, {rounds_text(report.rounds)}"
    return _page(f"{report.model}: ways to run rows", facts, report.machine, parts,
                 report.as_dict())  # fmt: skip


def sweep_page(report: Sweep) -> str:
    """Return the page of a scaling sweep."""
    curves = [
        Line(f"{c.scheme}, {c.layout}", [(p.batch, p.output_tokens_per_s) for p in c.points],
             c.knee)
        for c in report.curves
    ]  # fmt: skip
    gains = [
        Line(f"{c.scheme}, {c.layout}",
             [(p.batch, p.efficiency) for p in c.points if p.efficiency is not None], c.knee)
        for c in report.curves
    ]  # fmt: skip
    parts = [
        *_chapter("Throughput by batch size", "The large dot is the knee.",
                  _curves(curves, "output tokens per second")),
        *_chapter("Efficiency", "Speed-up over one row at a time, for each row of the batch.",
                  _curves(gains, "speed-up / rows")),
    ]  # fmt: skip
    columns = columns_of(report)
    head = [column.title for column in columns]
    for curve in report.curves:
        parts += [
            f"<h2>{escape(curve.scheme)}, {escape(curve.layout)}</h2>",
            f"<p>{escape(knee_line(curve))}</p>",
            html_table(head, [[column.show(p) for column in columns] for p in curve.points]),
            *(f"<p>{escape(line)}</p>" for line in differing_lines(curve)),
            *(f"<p>{size} rows: not run: {escape(why)}</p>" for size, why in curve.failed.items()),
        ]
    parts += [f"<p>{escape(note)}</p>" for note in report.notes]
    facts = (
        f"{report.prompt_tokens} prompt + {report.max_tokens} output tokens a row, "
        f"{rounds_text(report.rounds)}"
    )
    return _page(f"{report.model}: scaling with the batch", facts, report.machine, parts,
                 report.as_dict())  # fmt: skip


def _page(
    title: str, facts: str, machine: Mapping[str, Any], parts: Sequence[str], data: dict[str, Any]
) -> str:
    gpus = "".join(f", {name}" for name in machine.get("gpus", []))
    where = f"{machine.get('cpu', '')}, {machine.get('cores', '?')} cores{gpus}; {facts}"
    # In a script element only `</` could end it early.
    held = json.dumps(data).replace("</", "<\\/")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{escape(title)}</h1><p>{escape(where)}</p>{''.join(parts)}"
        f'<script type="application/json" id="report">{held}</script></body></html>\n'
    )


def _chapter(title: str, about: str, chart: str) -> list[str]:
    if not chart:
        return []
    return [f"<h2>{escape(title)}</h2><p>{escape(about)}</p><figure>{chart}</figure>"]


def _curves(values: Sequence[Line], unit: str) -> str:
    """Return curves, and below them which is which."""
    chart = lines(values, unit)
    if not chart:
        return ""
    names = [
        f'<span class="name"><span class="key k{number % 4}"></span>{escape(line.label)}</span>'
        for number, line in enumerate(values)
    ]
    return f"{chart}<figcaption>{' '.join(names)}</figcaption>"


def _tables(modes: Sequence[ModeReport]) -> list[str]:
    return [_mode_table(modes, columns) for columns in groups(modes).values()]


def _mode_table(modes: Sequence[ModeReport], columns: Sequence[Column]) -> str:
    head = ["mode", *(column.title for column in columns)]
    return html_table(head, [[mode.mode, *(c.show(mode) for c in columns)] for mode in modes])


def html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table that scrolls by itself where it is too wide."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f'<div class="wide"><table><tr>{top}</tr>{body}</table></div>'


def _throughput(mode: ModeReport) -> Bar:
    found = mode.of("output_tokens_per_s")
    assert found is not None
    note = f"{found.median:,.0f} ({mode.speedup.median:.2f}x)"
    return Bar(mode.mode, found.median, found.low, found.high, note)


def _latencies(mode: ModeReport) -> list[float]:
    return [times[-1] for times in mode.sample.token_times.values()]


def _first_tokens(mode: ModeReport) -> list[float]:
    return [times[0] for times in mode.sample.token_times.values()]


def _timeline(mode: ModeReport) -> list[str]:
    outcome = mode.sample
    found = spans(outcome.steps, outcome.wall_s / _BREAKS)
    slots = [1] * outcome.lanes
    for span in found:
        slots[span.lane] = max(slots[span.lane], span.slot + 1)
    chart = timeline(found, outcome.wall_s, slots)
    return [f"<h3>{escape(mode.mode)}</h3><p>{escape(mode.about)}</p><figure>{chart}</figure>"]


def _left_out(report: Comparison) -> list[str]:
    failed = [f"{name}: not run: {reason}" for name, reason in report.failed.items()]
    return [
        f"<p>{escape(line)}</p>" for line in [*failed, *difference_lines(report), *report.notes]
    ]
