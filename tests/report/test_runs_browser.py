"""The page of runs in a real browser: it draws, it fits, its figures move together, and nothing in it runs that should not."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.common.exceptions import NoAlertPresentException
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from halfstep.journal import Entry
from halfstep.report import write_html
from halfstep.report.runs import reported_runs, runs_document
from tests.report import run_samples as samples
from tests.report.browsers import opened_browser

pytestmark = pytest.mark.browser

Browser = webdriver.Chrome

STEPS, FIGURES = 2500, 6


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    yield from opened_browser()


def show(browser: Browser, page: Path, *, width: int = 1200, scheme: str = "light") -> None:
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": width, "height": 850, "deviceScaleFactor": 1, "mobile": width < 500}
    )
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
    browser.get(page.as_uri())
    WebDriverWait(browser, 20).until(lambda driver: len(driver.find_elements(By.CSS_SELECTOR, ".plot .xaxislayer-above")) >= FIGURES)


def script(browser: Browser, source: str) -> Any:
    return browser.execute_script(f"return {source}")


def count(browser: Browser, selector: str) -> int:
    return len(browser.find_elements(By.CSS_SELECTOR, selector))


def errors(browser: Browser) -> list[Any]:
    entries: list[Any] = browser.get_log("browser")  # type: ignore[no-untyped-call]
    return entries


def entries(*, factor: float = 1.0) -> list[Entry]:
    """A run with three skipped steps, one of them far from the others, a spike, an infinite loss and two alerts."""
    losses = {1200: 40.0, 1700: float("inf")}
    skipped = {1, 2, 1999}
    records = [
        samples.step(number, epoch=1 + number // 1000, loss=losses.get(number, factor + (number % 7) / 10), skipped=number in skipped)
        for number in range(1, STEPS + 1)
    ]
    misuse = samples.alert("clip_before_unscale", 1, site=samples.site(), severity="error")
    return [samples.start(), *records, samples.alert(at=1200), misuse, samples.end()]


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = reported_runs([samples.saved(entries())])
    return write_html(runs_document(runs), tmp_path_factory.mktemp("single") / "report.html")


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = ("first", "second" * 12, "third")
    runs = reported_runs([samples.saved(entries(factor=place), name=name) for place, name in enumerate(names, start=1)])
    return write_html(runs_document(runs), tmp_path_factory.mktemp("several") / "report.html")


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (390, "dark")])
@pytest.mark.parametrize("fixture", ["single", "several"])
def test_the_page_draws_fits_and_loads_nothing(
    browser: Browser, request: pytest.FixtureRequest, fixture: str, width: int, scheme: str
) -> None:
    show(browser, request.getfixturevalue(fixture), width=width, scheme=scheme)
    assert errors(browser) == []
    assert script(browser, "performance.getEntriesByType('resource').map(entry => entry.name)") == []
    script(browser, "document.querySelectorAll('details').forEach(one => { one.open = true })")
    assert script(browser, "document.documentElement.scrollWidth") <= width
    assert script(browser, f"[...document.querySelectorAll('.plot .main-svg')].every(one => one.getBoundingClientRect().right <= {width})")
    # Nothing is too small to be read, and the labels of no axis run into each other.
    sizes = "[...document.querySelectorAll('main *')].map(one => parseFloat(getComputedStyle(one).fontSize))"
    assert min(script(browser, sizes)) >= 9
    for figure in range(FIGURES):
        boxes = f"[...document.querySelectorAll('#figure-{figure} .xtick text')].map(text => text.getBoundingClientRect())"
        edges = sorted(script(browser, f"{boxes}.map(box => [box.left, box.right])"))
        assert len(edges) >= 3
        assert all(one[1] < other[0] for one, other in pairwise(edges))
        # Numbers beside the axis are whole.
        left = script(browser, f"document.getElementById('figure-{figure}').getBoundingClientRect().left")
        sides = f"[...document.querySelectorAll('#figure-{figure} .ytick text')].map(text => text.getBoundingClientRect().left)"
        assert min(script(browser, sides)) >= left


def test_every_event_is_drawn_where_it_was(browser: Browser, single: Path) -> None:
    show(browser, single)
    # In the figure of the loss: the faint line and the median, two alerts and the loss that is infinite.
    assert count(browser, "#figure-0 .scatterlayer .js-line") == 2
    assert count(browser, "#figure-0 .scatterlayer .points path") == 3
    assert count(browser, "#figure-0 .shapelayer path") == 2
    # In that of the scale: two alerts, and a mark for the two first steps, which are neighbours, and one for the other that was skipped.
    assert count(browser, "#figure-1 .scatterlayer .points path") == 4
    texts = set(script(browser, "[...document.getElementById('figure-1').data].flatMap(trace => trace.text ?? [])"))
    skips = {"2 of the steps 1 to 3 skipped", "step 1,999 skipped"}
    assert texts == {"loss_spike (warning), step 1,200", "clip_before_unscale (error), step 1", *skips}


def test_the_spike_is_in_the_line(browser: Browser, single: Path) -> None:
    show(browser, single)
    assert script(browser, "Math.max(...document.getElementById('figure-0').data[0].y)") == 40


def test_the_same_step_stands_in_the_same_column_of_all_figures(browser: Browser, single: Path) -> None:
    show(browser, single)
    ticks = [
        script(
            browser,
            f"[...document.querySelectorAll('#figure-{figure} .xtick text')].map(text => [text.textContent, "
            "Math.round(text.getBoundingClientRect().left)])",
        )
        for figure in range(FIGURES)
    ]
    assert all(one == ticks[0] for one in ticks)
    assert [text for text, _ in ticks[0] if text == "1,000"] == ["1,000"]


def test_zooming_in_on_one_figure_zooms_all(browser: Browser, single: Path) -> None:
    show(browser, single)
    ranges = f"[...Array({FIGURES}).keys()].map(figure => document.getElementById(`figure-${{figure}}`).layout.xaxis.range.map(Number))"
    whole = script(browser, ranges)
    assert all(one == whole[0] for one in whole)
    script(browser, "Plotly.relayout('figure-3', { 'xaxis.range': [1000, 1400] })")
    WebDriverWait(browser, 10).until(lambda driver: script(driver, ranges) == [[1000, 1400]] * FIGURES)
    script(browser, f"Plotly.relayout('figure-0', {{ 'xaxis.range': {whole[0]} }})")
    WebDriverWait(browser, 10).until(lambda driver: script(driver, ranges) == whole)
    assert errors(browser) == []


def test_runs_have_their_colours_in_tables_and_figures(browser: Browser, several: Path) -> None:
    show(browser, several)
    swatches = script(
        browser, "[...document.querySelectorAll('section:nth-of-type(2) thead .swatch')].map(one => getComputedStyle(one).backgroundColor)"
    )
    lines = script(
        browser,
        "[...document.querySelectorAll('#figure-1 .scatterlayer .js-line')].map(one => getComputedStyle(one).stroke)",
    )
    assert len(set(swatches)) == 3
    assert lines == swatches


def test_without_javascript_the_numbers_are_there(browser: Browser, single: Path) -> None:
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.get(single.as_uri())
        text = browser.find_element(By.TAG_NAME, "main").text
        assert "clip_before_unscale" in text
        assert "Epoch by epoch" in text
        assert count(browser, "details table") == FIGURES
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_a_hostile_run_is_shown_and_does_nothing(browser: Browser, tmp_path: Path) -> None:
    runs = reported_runs([samples.saved(samples.hostile(), name="<img src=x onerror=alert(1)>"), samples.saved(samples.hostile())])
    show(browser, write_html(runs_document(runs), tmp_path / "report.html"))
    assert browser.find_element(By.CSS_SELECTOR, ".card h3").text.endswith(samples.ATTACK)
    assert count(browser, "img") == 0
    with pytest.raises(NoAlertPresentException):
        _ = browser.switch_to.alert.text
    assert errors(browser) == []
