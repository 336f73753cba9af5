"""The pages of reports, looked at in a real browser: narrow and wide, light and dark."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from localbatch.compare.comparison import CompareConfig, compare
from localbatch.compare.html import comparison_page, sweep_page
from localbatch.compare.sweep import SweepConfig, sweep
from localbatch.compare.task import MadeUpRows, Outcome, Task
from localbatch.data.errors import ConfigError
from tests.test_compare import FAKE, measured, rows_of

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ROWS = rows_of(*[(3 + 7 * i % 11, 1 + 5 * i % 9) for i in range(24)])

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 64, 512)

_OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"

_CLIPPED = """() => [...document.querySelectorAll('svg')].flatMap(svg => {
  const box = svg.viewBox.baseVal;
  return [...svg.querySelectorAll('text')].filter(text => {
    const b = text.getBBox();
    return b.x < -0.5 || b.x + b.width > box.width + 0.5
      || b.y < -3 || b.y + b.height > box.height + 0.5;  // letters end below their box's top
  }).map(text => svg.getAttribute('class') + ': ' + text.textContent);
})"""
"""Texts that stick out of their chart."""

_OVERLAPS = """() => [...document.querySelectorAll('svg')].flatMap(svg => {
  const boxes = [...svg.querySelectorAll('text')]
    .map(text => [text.textContent, text.getBoundingClientRect()])
    .filter(([, b]) => b.width > 0);
  return boxes.flatMap(([name, a], i) => boxes.slice(i + 1)
    .filter(([, b]) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom)
    .map(([other]) => svg.getAttribute('class') + ': ' + name + ' and ' + other));
})"""
"""Texts of a chart that lie on each other."""

_SCROLLING = """() => [...document.querySelectorAll('body *')]
  .filter(element => element.scrollWidth > element.clientWidth + 1 && element.clientWidth > 0)
  .filter(element => !element.closest('.wide') && !element.closest('svg'))
  .map(element => element.tagName)"""
"""What is wider than its place, but for tables."""

_LETTERS = """() => Math.min(...[...document.querySelectorAll('.lines text')]
  .map(text => text.getBoundingClientRect().height).filter(height => height > 0))"""
"""Height of the smallest letters of the scaling curves, in pixels of the screen."""

_CONTRASTS = """() => {
  const light = color => {
    const [r, g, b] = color.match(/[0-9.]+/g).map(Number)
      .map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const page = light(getComputedStyle(document.body).backgroundColor);
  return [...document.querySelectorAll('h1,h2,h3,p,th,td,figcaption,svg text')].map(element => {
    const style = getComputedStyle(element);
    const ink = light(element.tagName === 'text' ? style.fill : style.color);
    return (Math.max(ink, page) + 0.05) / (Math.min(ink, page) + 0.05);
  });
}"""
"""Contrast ratios by WCAG 2, of all text with the page."""


def _run(task: Task) -> Outcome:
    if task.mode == "static" and task.batch == 64:
        raise ConfigError("the KV cache would take more than the 4,096 MiB that may be used")
    rows = rows_of(*[(9, 5)] * task.rows.count) if isinstance(task.rows, MadeUpRows) else ROWS
    return measured(task.mode, rows, batch=task.batch)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    name = "a-rather-long-name-of-a-model-file-Q4_K_M.gguf"
    made = {
        "compare": comparison_page(
            compare(CompareConfig(FAKE, ROWS, rounds=2, batch=8, name=name), run=_run)
        ),
        "sweep": sweep_page(sweep(SweepConfig(FAKE, sizes=SIZES, rounds=1, name=name), run=_run)),
    }
    for kind, page in made.items():
        (folder / f"{kind}.html").write_text(page, "utf-8")
    return {kind: folder / f"{kind}.html" for kind in made}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("no Chromium or Chrome is installed")
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.mark.parametrize("kind", ["compare", "sweep"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1200])
def test_page(
    browser: Any, pages: dict[str, Path], tmp_path: Path, kind: str, scheme: str, width: int
) -> None:
    """Nothing is fetched, said on the console, wider than the page, cut off, or hard to read.

    Labels don't lie on each other, and only tables scroll.
    """
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    said: list[str] = []
    fetched: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: fetched.append(request.url))
    page.goto(pages[kind].as_uri())
    page.screenshot(path=tmp_path / "page.png", full_page=True)

    assert said == []
    assert fetched == [pages[kind].as_uri()]
    assert page.evaluate(_OVERFLOW) <= 0
    assert page.evaluate(_SCROLLING) == []
    assert page.evaluate(_CLIPPED) == []
    assert page.evaluate(_OVERLAPS) == []
    if kind == "sweep":
        assert page.evaluate(_LETTERS) >= 12
    assert min(page.evaluate(_CONTRASTS)) >= 4.5
    page.close()
