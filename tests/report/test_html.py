from __future__ import annotations

import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep.errors import ConfigurationError
from halfstep.report import (
    Axis,
    Card,
    Column,
    Document,
    Figure,
    Section,
    Series,
    Table,
    comparison_document,
    render_html,
    write_html,
)
from tests import samples

ATTACK = "</script><img src=x onerror=alert(1)>"


class Page(HTMLParser):
    """The elements of a page, with the text that stands directly in each."""

    VOID = frozenset({"meta", "img", "br", "link", "input"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self._open: list[list[str]] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        text: list[str] = []
        self.elements.append((tag, dict(attrs), text))
        if tag not in self.VOID:
            self._open.append(text)

    def handle_endtag(self, tag: str) -> None:
        self._open.pop()

    def handle_data(self, data: str) -> None:
        if self._open:
            self._open[-1].append(data)

    def texts(self, tag: str) -> list[str]:
        return ["".join(text) for name, _, text in self.elements if name == tag]

    def attributes(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes, _ in self.elements if name == tag]


def small_document(**changes: Any) -> Document:
    values: dict[str, Any] = {"kind": "Report", "title": "digits", "conclusion": "Train in bf16."}
    return Document(**(values | changes))


@pytest.fixture(scope="module")
def page() -> str:
    return render_html(comparison_document(samples.comparison()))


def test_what_a_task_is_called_cannot_become_code() -> None:
    runs = (samples.run("fp32"), samples.run("bf16", precision=ATTACK, note=ATTACK))
    comparison = samples.comparison(
        task=ATTACK, runs=runs, verdicts=(samples.verdict("bf16", precision=ATTACK, reason=ATTACK),), conclusion=ATTACK
    )
    text = render_html(comparison_document(comparison))
    parsed = Page(text)
    assert parsed.texts("h1") == [ATTACK]
    assert parsed.attributes("img") == []
    assert len(parsed.texts("script")) == 3
    assert "<img src=x" not in text
    assert not [name for _, attributes, _ in parsed.elements for name in attributes if name.startswith("on")]


def test_embedded_data_holds_no_character_that_could_end_its_script(page: str) -> None:
    comparison = samples.comparison(runs=(samples.run("fp32", precision=f"{ATTACK}&<!--"),))
    for text in (page, render_html(comparison_document(comparison))):
        data = Page(text).texts("script")[0]
        assert not set("<>&") & set(data)
        assert len(json.loads(data)) == 3


def test_embedded_data_is_what_the_figures_hold(page: str) -> None:
    loss, times, memory = json.loads(Page(page).texts("script")[0])
    assert [trace["name"] for trace in loss["data"][-4:]] == ["fp32", "bf16", "fp16", "fp16 skipped steps"]
    assert times["data"][1]["x"] == pytest.approx(samples.run("bf16").step_times_ms, rel=1e-5)
    assert memory["data"][3]["x"] == [612.0, 341.5, 338.0]


def test_nothing_is_loaded_from_anywhere(page: str) -> None:
    parsed = Page(page)
    for _, attributes, _ in parsed.elements:
        for name in ("src", "href", "srcset", "data", "poster", "action", "background", "xlink:href"):
            assert name not in attributes
    styles = parsed.texts("style") + [str(attributes.get("style", "")) for _, attributes, _ in parsed.elements]
    assert not re.search(r"url\(|@import|https?:", " ".join(styles))
    without_plotly = page.replace(parsed.texts("script")[1], "")
    assert not re.search(r"https?://", without_plotly)


def test_the_browser_is_told_to_load_nothing(page: str) -> None:
    def policy_of(text: str) -> str:
        (policy,) = [meta["content"] for meta in Page(text).attributes("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
        return str(policy)

    policy = policy_of(page)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert policy.count("'sha256-") == 2
    assert "http" not in policy
    assert "script-src 'none'" in policy_of(render_html(small_document()))


def test_plotly_has_no_button_that_uploads(page: str) -> None:
    script = Page(page).texts("script")[2]
    assert 'plotlyServerURL: ""' in script
    assert "showSendToCloud: false" in script


def test_a_page_without_figures_carries_no_scripts() -> None:
    assert len(render_html(small_document())) < 20_000


def test_the_page_is_accessible(page: str) -> None:
    parsed = Page(page)
    assert parsed.attributes("html") == [{"lang": "en"}]
    assert parsed.texts("title") == ["examples/digits.py:task: precision comparison"]
    assert len(parsed.texts("h1")) == 1
    assert parsed.texts("h2") == ["Verdicts", "Summary", "Loss", "Step time", "Peak memory", "Machine and settings"]
    assert {attributes.get("scope") for attributes in parsed.attributes("th")} == {"row", "col"}
    assert any(meta.get("content") == "width=device-width, initial-scale=1" for meta in parsed.attributes("meta"))
    ids = [attributes["id"] for _, attributes, _ in parsed.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes, _ in parsed.elements:
        for name in ("aria-labelledby", "aria-describedby"):
            assert attributes.get(name, ids[0]) in ids


def test_everything_that_a_comparison_says_is_on_the_page() -> None:
    document = comparison_document(samples.emulated_comparison(interrupted=True))
    paragraphs = [text.strip() for text in Page(render_html(document)).texts("p")]
    assert {document.subtitle, document.conclusion, *document.notices} <= set(paragraphs)
    assert {samples.verdict("bf16").reason, "Not measured: this processor only emulates fp16."} <= set(paragraphs)
    assert {table.caption for section in document.sections for table in section.tables if table.caption} <= set(paragraphs)
    assert samples.stopped_run().note in Page(render_html(document)).texts("dd")


def test_without_javascript_the_numbers_are_still_there(page: str) -> None:
    parsed = Page(page)
    assert len(parsed.texts("noscript")) == 3
    assert len(parsed.attributes("table")) == 5
    cells = [text.strip() for text in parsed.texts("td")]
    assert "1.80×" in cells  # noqa: RUF001
    assert "612.0" in cells


def test_every_colour_that_a_figure_uses_is_defined_light_and_dark(page: str) -> None:
    style = Page(page).texts("style")[0]
    for variable in set(re.findall(r"var\((--[\w-]+)\)", page)) - {"--clear"}:
        assert style.count(f"{variable}: #") == 2, variable


def _luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize(
    ("text", "back"),
    [
        (text, back)
        for text in ("ink", "ink-soft", "accent", "good", "warn", "bad")
        for back in ("page", "surface")
    ]
    + [("ink", "warn-back")],
)  # fmt: skip
def test_text_is_readable(page: str, scheme: int, text: str, back: str) -> None:
    style = Page(page).texts("style")[0]
    one, other = (_luminance(re.findall(rf"--{name}: (#[0-9a-f]{{6}});", style)[scheme]) for name in (text, back))
    assert (max(one, other) + 0.05) / (min(one, other) + 0.05) >= 4.5


@settings(max_examples=50, deadline=None)
@given(st.text(st.characters(codec="utf-8", exclude_characters="\r\x00")))
def test_any_text_comes_back_as_it_was(text: str) -> None:
    table = Table(columns=(Column(header=text),), rows=((text,),), caption=text)
    parsed = Page(render_html(small_document(title=text, sections=(Section(title=text, tables=(table,)),))))
    assert parsed.texts("h1") == parsed.texts("h2") == [text]
    assert parsed.texts("th") == [text, text]


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    target.write_text("old")
    assert write_html(small_document(title="größer"), str(target)) == target
    assert target.read_text(encoding="utf-8") == render_html(small_document(title="größer"))
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_a_new_file_can_be_read_by_whom_the_folder_lets(tmp_path: Path) -> None:
    target = write_html(small_document(), tmp_path / "report.html")
    (tmp_path / "other").touch()
    assert target.stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "report.html"
    target.write_text("old")

    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ConfigurationError, match="No space left"):
        write_html(small_document(), target)
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"Cannot write .*: there is no folder .*missing\. Make it first"):
        write_html(small_document(), tmp_path / "missing" / "report.html")


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"it is a folder\. Name a file in it"):
        write_html(small_document(), tmp_path)


def test_half_a_surrogate_pair_does_not_stop_a_report(tmp_path: Path) -> None:
    assert "a?b" in write_html(small_document(title="a\ud800b"), tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_card_shows_its_badge_its_place_and_its_advice() -> None:
    card = Card(title="loss_spike", badge="error", tone="bad", place="step 3 · train.py:57", text="It rose.", advice="<b>Clip.</b>")
    shown = render_html(Document(kind="Report", title="t", conclusion="c", sections=(Section(title="s", cards=(card,)),)))
    assert '<span class="badge bad">error</span>' in shown
    assert '<p class="place">step 3 · train.py:57</p>' in shown
    assert "<p>&lt;b&gt;Clip.&lt;/b&gt;</p>" in shown
    assert shown.index("It rose.") < shown.index("Clip.")


def test_timelines_are_linked_and_other_figures_are_not() -> None:
    line = Series(name="a", x=(1, 2), y=(1.0, 2.0))
    axes: dict[str, Any] = {"x": Axis(label="step"), "y": Axis(label="Loss")}
    figures = (Figure(title="t", kind="timeline", series=(line,), **axes), Figure(title="t", kind="lines", series=(line,), **axes))
    shown = render_html(Document(kind="Report", title="t", conclusion="c", sections=(Section(title="s", figures=figures),)))
    assert [one["linked"] for one in json.loads(Page(shown).texts("script")[0])] == [True, False]
