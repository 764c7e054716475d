"""The page in a real browser: it draws, it fits, it follows the colour scheme, and nothing in it runs that should not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.common.exceptions import NoAlertPresentException
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from halfstep.records import Comparison, SourceLine
from halfstep.report import Document, Excerpt, Section, comparison_document, write_html
from tests import samples
from tests.report.browsers import opened_browser

pytestmark = pytest.mark.browser

ATTACK = "</script><img src=x onerror=alert(1)>"

Browser = webdriver.Chrome


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    yield from opened_browser()


def show(browser: Browser, path: Path, *, width: int = 1200, scheme: str = "light") -> None:
    command = {"width": width, "height": 850, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", command)
    prefer(browser, scheme)
    browser.get(path.as_uri())
    WebDriverWait(browser, 20).until(lambda driver: len(driver.find_elements(By.CSS_SELECTOR, ".plot .main-svg")) >= 3)


def prefer(browser: Browser, scheme: str) -> None:
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})


def script(browser: Browser, source: str) -> Any:
    return browser.execute_script(f"return {source}")


def count(browser: Browser, selector: str) -> int:
    return len(browser.find_elements(By.CSS_SELECTOR, selector))


def names_downwards(browser: Browser, figure: int) -> list[str]:
    """What stands beside the rows of a figure, from the top down."""
    source = (
        f"[...document.querySelectorAll('#figure-{figure} .ytick text')].map(text => [text.getBoundingClientRect().top, text.textContent])"
    )
    return [text for _, text in sorted(script(browser, source))]


def errors(browser: Browser) -> list[Any]:
    entries: list[Any] = browser.get_log("browser")  # type: ignore[no-untyped-call]
    return entries


def written(comparison: Comparison, folder: Path) -> Path:
    return write_html(comparison_document(comparison), folder / "report.html")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(samples.comparison(), tmp_path_factory.mktemp("report"))


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(samples.emulated_comparison(interrupted=True), tmp_path_factory.mktemp("emulated"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 390])
def test_the_console_stays_silent_and_nothing_is_loaded(browser: Browser, report: Path, width: int, scheme: str) -> None:
    show(browser, report, width=width, scheme=scheme)
    assert errors(browser) == []
    assert script(browser, "performance.getEntriesByType('resource').map(entry => entry.name)") == []


@pytest.mark.parametrize(("fixture", "runs", "skips"), [("report", 3, 7), ("emulated", 2, 0)])
def test_every_trace_of_every_figure_is_drawn(
    browser: Browser, request: pytest.FixtureRequest, fixture: str, runs: int, skips: int
) -> None:
    show(browser, request.getfixturevalue(fixture))
    # For each precision three seeds and their mean, and the skipped steps of fp16.
    assert count(browser, "#figure-0 .scatterlayer .trace") == 4 * runs + bool(skips)
    assert count(browser, "#figure-0 .scatterlayer .points path") == skips
    assert count(browser, "#figure-1 .boxlayer .trace path.box") == runs
    assert count(browser, "#figure-1 .boxlayer .points path") == 180 * runs
    assert count(browser, "#figure-2 .barlayer .point") == 4 * runs
    for figure in (1, 2):
        assert names_downwards(browser, figure) == ["fp32", "bf16", "fp16"][:runs]


def test_the_table_shows_the_numbers_of_the_comparison(browser: Browser, report: Path) -> None:
    show(browser, report)
    source = (
        "[...document.querySelectorAll('section:nth-of-type(2) tbody tr')].map(row => [...row.cells].map(cell => cell.textContent.trim()))"
    )
    rows = {row[0]: row[1:] for row in script(browser, source)}
    for place, run in enumerate(samples.comparison().runs):
        assert run.step_time_ms is not None
        assert float(rows["Step time (ms)"][place]) == pytest.approx(run.step_time_ms.median, rel=1e-3)
        assert float(rows["Peak memory (MiB)"][place]) == pytest.approx(run.peak_memory_mib, rel=1e-3)
        assert float(rows["Final loss"][place]) == pytest.approx(run.final_loss, rel=1e-3)
        assert int(rows["Skipped steps"][place]) == run.skipped_steps
    for place, verdict in enumerate(samples.comparison().verdicts, start=1):
        assert verdict.speedup is not None
        assert float(rows["Speed-up"][place][:-1]) == pytest.approx(verdict.speedup.median, rel=5e-3)


@pytest.mark.parametrize("fixture", ["report", "emulated"])
def test_a_phone_scrolls_only_down(browser: Browser, request: pytest.FixtureRequest, fixture: str) -> None:
    show(browser, request.getfixturevalue(fixture), width=390)
    script(browser, "document.querySelectorAll('details').forEach(one => { one.open = true })")
    assert script(browser, "document.documentElement.scrollWidth") <= 390
    assert script(browser, "[...document.querySelectorAll('.plot .main-svg')].every(one => one.getBoundingClientRect().right <= 390)")


def test_on_a_phone_a_wide_table_scrolls_in_its_own_box(browser: Browser, report: Path) -> None:
    show(browser, report, width=390)
    summary = "document.querySelector('.scroll')"
    assert script(browser, f"{summary}.scrollWidth - {summary}.clientWidth") > 0
    script(browser, f"{summary}.scrollTo(9999, 0)")
    assert script(browser, f"{summary}.querySelector('tbody tr').lastElementChild.getBoundingClientRect().right") <= 390
    # The names of the rows stay in sight.
    assert script(browser, f"{summary}.querySelector('tbody th').getBoundingClientRect().left") >= 0
    assert script(browser, f"getComputedStyle({summary}).overflowX") == "auto"


def test_a_long_name_does_not_widen_a_phone(browser: Browser, tmp_path: Path) -> None:
    show(browser, written(samples.comparison(task="very/long/" * 30, conclusion="x" * 300), tmp_path), width=390)
    assert script(browser, "document.documentElement.scrollWidth") <= 390


def test_on_a_phone_source_code_scrolls_in_its_own_box(browser: Browser, tmp_path: Path) -> None:
    lines = tuple(SourceLine(number=number, text="x" * 300 * (number - 8), is_marked=number == 9) for number in (8, 9))
    sections = (Section(title="Where", excerpts=(Excerpt(lines=lines),)),)
    page = write_html(Document(kind="Report", title="t", conclusion="c", sections=sections), tmp_path / "report.html")
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {"width": 390, "height": 850, "deviceScaleFactor": 1, "mobile": True})
    browser.get(page.as_uri())
    assert script(browser, "document.documentElement.scrollWidth") <= 390
    box = "document.querySelector('pre')"
    assert script(browser, f"{box}.scrollWidth - {box}.clientWidth") > 1000
    assert script(browser, f"getComputedStyle({box}).overflowX") == "auto"
    # No line is folded, the empty one is as high as the other, and the mark reaches as far as the text.
    short, wide = script(browser, "[...document.querySelectorAll('pre code > *')].map(one => [one.offsetHeight, one.offsetWidth])")
    assert short == wide
    assert wide[0] > 0
    assert wide[1] == script(browser, f"{box}.scrollWidth")


def test_page_and_plots_follow_the_colour_scheme_while_open(browser: Browser, report: Path) -> None:
    show(browser, report, scheme="light")
    colours = (
        "[getComputedStyle(document.body).backgroundColor, document.querySelector('#figure-0 .xtick text').style.fill,"
        " document.querySelector('#figure-0 .scatterlayer .trace:nth-child(12) .js-line').style.stroke,"
        " document.querySelector('#figure-2 .barlayer path').style.fill]"
    )
    light = script(browser, colours)
    prefer(browser, "dark")
    WebDriverWait(browser, 10).until(lambda driver: script(driver, colours)[3] != light[3])
    dark = script(browser, colours)
    assert all(one != other for one, other in zip(light, dark, strict=True))
    assert light[0] == "rgb(246, 247, 249)"
    assert dark[0] == "rgb(16, 21, 28)"
    assert errors(browser) == []


def test_the_plots_offer_no_upload(browser: Browser, report: Path) -> None:
    show(browser, report)
    titles = script(browser, "[...document.querySelectorAll('#figure-0 .modebar-btn')].map(button => button.dataset.title)")
    assert len(titles) == 4
    assert not [title for title in titles if "share" in title.lower() or "cloud" in title.lower() or "edit" in title.lower()]


def test_a_hostile_name_is_shown_and_does_nothing(browser: Browser, tmp_path: Path) -> None:
    runs = (samples.run("fp32"), samples.run("bf16", precision=ATTACK), samples.run("fp16", precision="<b>fp16</b>"))
    show(browser, written(samples.comparison(task=ATTACK, runs=runs), tmp_path))
    assert browser.find_element(By.TAG_NAME, "h1").text == ATTACK
    assert names_downwards(browser, 1) == ["fp32", ATTACK, "<b>fp16</b>"]
    assert count(browser, "img") == 0
    with pytest.raises(NoAlertPresentException):
        _ = browser.switch_to.alert.text
    assert errors(browser) == []
