"""The pages and pictures of comparisons and sweeps."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from localbatch.cli import main
from localbatch.compare import plot
from localbatch.compare.comparison import CompareConfig, compare
from localbatch.compare.html import comparison_page, sweep_page
from localbatch.compare.report import Comparison
from localbatch.compare.svg import Bar, Line, bars, lines, ranges, timeline
from localbatch.compare.sweep import Sweep, SweepConfig, sweep
from localbatch.compare.task import Outcome, Task
from localbatch.compare.trace import Span
from localbatch.data.errors import ConfigError
from tests.test_compare import FAKE, ROWS, measured


def run(task: Task) -> Outcome:
    return measured(task.mode, ROWS, batch=task.batch)


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    return compare(CompareConfig(FAKE, ROWS, rounds=2, batch=2, name="a <b> & c"), run=run)


@pytest.fixture(scope="module")
def scaling() -> Sweep:
    return sweep(SweepConfig(FAKE, sizes=(1, 2), rounds=1, name="a <b> & c"), run=run)


def numbers(svg: str, element: str, kind: str, *names: str) -> list[tuple[float, ...]]:
    """Return attributes of the SVG's elements of a class."""
    root = ElementTree.fromstring(svg)
    found = root.iter("{http://www.w3.org/2000/svg}" + element)
    return [tuple(float(e.attrib[n]) for n in names) for e in found if e.get("class") == kind]


def texts(svg: str, anchor: str, kind: str | None = None) -> list[str]:
    """Return the texts of the SVG that are aligned so, all or those of a class."""
    found = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    return [
        each.text or ""
        for each in found
        if each.get("text-anchor") == anchor and kind in (None, each.get("class"))
    ]


class TestCharts:
    def test_bars_are_as_long_as_their_values(self) -> None:
        """The largest end of a range is the width of the plot; half the value is half as long."""
        svg = bars([Bar("a", 5, 5, 5, "five"), Bar("b", 10, 9, 10, "ten")])

        (short,), (long,) = numbers(svg, "rect", "series-0", "width")
        assert long == pytest.approx(2 * short)

    def test_lines_are_placed_by_doublings(self) -> None:
        """Batch sizes 1, 2 and 4 are evenly apart; 0 is at the bottom."""
        svg = lines([Line("a", [(1, 0.0), (2, 5.0), (4, 10.0)], marked=2)], "tok/s")

        points = numbers(svg, "circle", "series-0", "cx", "cy", "r")[:3]
        (x1, y1, r1), (x2, y2, r2), (x4, y4, _) = points
        assert x2 - x1 == pytest.approx(x4 - x2)
        assert y1 - y2 == pytest.approx(y2 - y4)
        assert r2 > r1

    @pytest.mark.parametrize(
        ("most", "ticks"),
        [(6338.0, ["0", "2,000", "4,000", "6,000", "8,000"]), (1.0, ["0", "0.2", "0.4", "0.6",
         "0.8", "1"]), (250.0, ["0", "50", "100", "150", "200", "250"]),
         (0.0, ["0", "0.2", "0.4", "0.6", "0.8", "1"])],
    )  # fmt: skip
    def test_ticks_of_lines_are_round(self, most: float, ticks: list[str]) -> None:
        """The last one is not below the largest value."""
        assert texts(lines([Line("a", [(1, most)])], "u"), "end") == ticks

    def test_labels_of_lines_have_room(self) -> None:
        """The largest and doublings come first; what fits only in small letters is marked so.

        A doubling is 616 / 9 = 68.4 wide, so 5 is 22.0 from 4, 6 is 18.0 from 5, 9 is 11.6 from 8
        and 11 is 31.4 from it; one digit takes 11.2 or 20.8, two beside one 14.7 or 27.3.
        """
        svg = lines([Line("a", [(x, 1.0) for x in (*range(1, 17), 500, 512)])], "u")

        assert texts(svg, "middle")[:-1] == [
            "512", "1", "2", "4", "8", "16", "3", "5", "6", "7", "9", "11",
        ]  # fmt: skip
        assert texts(svg, "middle", "extra") == ["6", "7", "9"]

    def test_timeline_leaves_idle_places_empty(self) -> None:
        """A row in lane 1 lies below the two places of lane 0, for its share of the time."""
        spans = [Span(0, 0, 0, 0.0, 5.0, False), Span(2, 1, 0, 5.0, 10.0, False)]
        svg = timeline(spans, 10.0, [2, 1])

        (x0, y0, width0), (x1, y1, _) = numbers(svg, "rect", "decode-0", "x", "y", "width")
        assert x1 == pytest.approx(x0 + width0)
        assert (y0, y1) == (0.0, 2 * 14)

    def test_of_nothing(self) -> None:
        """There is no chart of no values."""
        assert (lines([], "x"), ranges([], "s"), ranges([("a", [])], "s")) == ("", "", "")

    def test_ranges_are_logarithmic(self) -> None:
        """Medians 0.1 s, 1 s and 10 s are evenly apart."""
        svg = ranges([("a", [0.1]), ("b", [1.0]), ("c", [10.0])], "s")

        xs = [x for (x,) in numbers(svg, "rect", "series-0", "x")]
        assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.2)


class _Links(HTMLParser):
    """Collects what a page would fetch, and what is not closed."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [v or "" for k, v in attrs if k in ("src", "href", "data")]
        assert tag not in ("link", "img", "iframe")


def check_page(page: str, data: dict[str, Any]) -> None:
    """Check what holds for every page."""
    links = _Links()
    links.feed(page)
    assert links.links == []
    assert "url(" not in page
    assert "@import" not in page
    assert "prefers-color-scheme: dark" in page
    assert "a &lt;b&gt; &amp; c" in page
    held = re.search(r'<script type="application/json" id="report">(.*?)</script>', page)
    assert held is not None
    assert json.loads(held[1]) == json.loads(json.dumps(data))
    for svg in re.findall(r"<svg.*?</svg>", page):
        ElementTree.fromstring(svg)


class TestPages:
    def test_comparison(self, comparison: Comparison) -> None:
        """It needs nothing from elsewhere, escapes names, and has a timeline for each mode."""
        page = comparison_page(comparison)

        check_page(page, comparison.as_dict())
        assert page.count('class="timeline"') == len(comparison.modes) == 8

    def test_sweep(self, scaling: Sweep) -> None:
        """It has both plots and a table for each curve."""
        page = sweep_page(scaling)

        check_page(page, scaling.as_dict())
        assert page.count('class="lines"') == 2
        assert page.count("<table>") == 4


class TestPictures:
    @pytest.mark.parametrize("suffix", ["png", "svg"])
    def test_written(
        self, comparison: Comparison, scaling: Sweep, tmp_path: Path, suffix: str
    ) -> None:
        """Of both reports, in the format of the suffix."""
        pytest.importorskip("matplotlib")
        for number, report in enumerate((comparison, scaling)):
            path = tmp_path / f"{number}.{suffix}"
            plot.write(report, str(path))
            head = path.read_bytes()[:400]
            assert head.startswith(b"\x89PNG") if suffix == "png" else b"<svg" in head

    def test_other_formats_are_refused(self) -> None:
        """Before anything is measured."""
        with pytest.raises(ConfigError, match=r"x.gif: must end in .png or .svg"):
            plot.check("x.gif")

    def test_without_the_library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The extra is named."""
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(ConfigError, match=r"pip install 'localbatch\[compare\]'"):
            plot.check("x.png")


class TestCommand:
    def test_files(self, tmp_path: Path) -> None:
        """`--html` writes the page beside what is printed."""
        path = tmp_path / "report.html"
        command = ["sweep", "fake", "--backend", "fake", "--rounds", "1", "--sizes", "1", "-q"]
        result = CliRunner().invoke(main, [*command, "--html", str(path)], catch_exceptions=False)

        assert result.exit_code == 0
        assert path.read_text("utf-8").startswith("<!doctype html>")

    def test_a_folder_that_is_not_there(self, tmp_path: Path) -> None:
        """It is an error before anything is measured, with exit code 2."""
        path = tmp_path / "no" / "report.html"
        command = ["sweep", "fake", "--backend", "fake", "--html", str(path)]
        result = CliRunner().invoke(main, command, catch_exceptions=False)

        assert result.exit_code == 2
        assert "its folder is not there" in result.stderr
        assert "round" not in result.stderr
