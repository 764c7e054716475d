# ruff: noqa: RUF001
from __future__ import annotations

import io
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from halfstep.report import Axis, Card, Column, Document, Fact, Figure, Item, Section, Series, Table, comparison_document, print_document
from tests import samples


def printed(document: Document, *, width: int = 80, terminal: bool = True) -> str:
    out = io.StringIO()
    print_document(document, Console(file=out, width=width, force_terminal=terminal, color_system=None))
    return out.getvalue()


def table_document(*, columns: int, cell: str = "[41.49, 41.90]") -> Document:
    table = Table(
        columns=(Column(header="Metric"), *(Column(header=f"run {n}", alignment="right") for n in range(columns))),
        rows=(("95 % of step time", *(cell for _ in range(columns))),),
    )
    return Document(kind="Report", title="wide", conclusion="Fine.", sections=(Section(title="Summary", tables=(table,)),))


def test_a_comparison_of_three_precisions_fits_80_columns_in_one_table() -> None:
    output = printed(comparison_document(samples.comparison()))
    assert max(map(cell_len, output.splitlines())) <= 80
    assert re.search(r"Metric +fp32 +bf16 +fp16", output)
    assert re.search(r"Speed-up +baseline +1\.80× +1\.87×", output)
    assert output.count("Metric") == 1


def test_the_conclusion_the_verdicts_and_the_notes_are_printed() -> None:
    output = " ".join(printed(comparison_document(samples.emulated_comparison(interrupted=True))).split())
    for sentence in (
        "Precision comparison: examples/digits.py:task",
        "Train in bf16: it is 1.8 times as fast as fp32 in 71 % of the memory, with the same loss.",
        "The comparison was interrupted before all steps had run.",
        "bf16: Use it: 1.8 times as fast",
        "fp16: Not measured: this processor only emulates fp16.",
    ):
        assert sentence in output


def test_the_conclusion_comes_last_and_details_are_left_to_the_page() -> None:
    document = comparison_document(samples.emulated_comparison())
    output = printed(document)
    assert " ".join(output.split()).endswith(document.conclusion)
    assert output.index("Summary") < output.index("Verdicts")
    assert "Machine and settings" in [section.title for section in document.sections]
    assert "Machine and settings" not in output
    assert "Incomplete runs" not in output


def test_the_order_is_turned_round_except_within_a_group() -> None:
    groups = {"b": "letters", "c": "letters", "d": "others", "e": "others"}
    sections = tuple(Section(title=f"<{name}>", paragraphs=("Text.",), group=groups.get(name, "")) for name in "abcdefg")
    output = printed(Document(kind="Report", title="t", conclusion="c", sections=sections))
    assert re.findall("<(.)>", output) == list("gfdebca")


def test_figures_and_sections_of_nothing_else_are_left_out() -> None:
    output = printed(comparison_document(samples.comparison()))
    assert "Time of every measured step" not in output
    assert not re.search(r"^(Loss|Step time|Peak memory)$", output, flags=re.MULTILINE)


def test_a_table_that_is_too_wide_is_printed_in_parts_with_their_row_names() -> None:
    output = printed(table_document(columns=5))
    assert max(map(cell_len, output.splitlines())) <= 80
    assert output.count("95 % of step time") == 2
    assert output.count("[41.49, 41.90]") == 5


def test_parts_use_the_whole_width() -> None:
    # "95 % of step time" and three intervals, with their blanks: 17 + 3 * 14 + 4 * 3 - 1.
    assert printed(table_document(columns=3), width=70).count("95 % of step time") == 1
    assert printed(table_document(columns=3), width=69).count("95 % of step time") == 2
    assert printed(table_document(columns=5), width=70).count("95 % of step time") == 2
    assert printed(table_document(columns=5), width=69).count("95 % of step time") == 3


def test_into_a_pipe_lines_are_whole() -> None:
    output = printed(table_document(columns=20), width=40, terminal=False)
    (line,) = [line for line in output.splitlines() if line.startswith(" 95 % of step time")]
    assert line.count("[41.49, 41.90]") == 20
    output = printed(comparison_document(samples.comparison()), width=20, terminal=False)
    assert samples.comparison().conclusion in output.splitlines()
    assert f"  bf16: {samples.verdict('bf16').reason}" in output.splitlines()
    assert "\x1b" not in output


def test_a_cell_that_alone_is_too_wide_loses_nothing() -> None:
    output = printed(table_document(columns=1, cell="x" * 100), width=40)
    assert output.count("x") == 100


@pytest.mark.parametrize("name", ["[red]task[/red]", "[/]", "[link=http://x]", ":smile:", "a[0]"])
def test_nothing_is_markup(name: str) -> None:
    document = Document(
        kind="Report",
        title=name,
        subtitle=name,
        conclusion=name,
        notices=(name,),
        sections=(
            Section(
                title=name,
                paragraphs=(name,),
                cards=(Card(title=name, text=name),),
                items=(Item(label=name, text=name),),
                tables=(Table(columns=(Column(header=name),), rows=((name,),), caption=name),),
            ),
        ),
    )
    for terminal in (True, False):
        assert printed(document, terminal=terminal).count(name) == 13


def test_control_characters_do_not_reach_the_terminal() -> None:
    output = printed(Document(kind="Report", title="a\x1b[31mb\x07", conclusion="c\rd\ne"))
    assert "a [31mb" in output
    assert not set("\x1b\x07\r") & set(output)
    assert "c d e" in output


def test_a_console_without_unicode_gets_plain_letters() -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    print_document(comparison_document(samples.emulated_comparison(task="Größe µ")), Console(file=out, width=80))
    out.flush()
    output = raw.getvalue().decode("ascii")
    assert "Gr??e u" in output
    assert re.search(r"Speed-up +\| +baseline +\| +1\.80x +\| +-", output)


def test_a_card_without_a_judgement_prints_its_facts() -> None:
    facts = (Fact(label="Speed-up", value="1.8×", detail="of fp32"), Fact(label="Skipped steps", value="0"))
    section = Section(title="Facts", cards=(Card(title="bf16", facts=facts),))
    output = printed(Document(kind="Report", title="t", conclusion="c", sections=(section,)))
    assert "bf16: Speed-up 1.8× (of fp32), Skipped steps 0" in output


def test_a_figure_alone_prints_nothing() -> None:
    figure = Figure(title="Loss", kind="lines", x=Axis(label="Step"), y=Axis(label="Loss"), series=(Series(name="a", x=(1,), y=(1.0,)),))
    document = Document(kind="Report", title="t", conclusion="c", sections=(Section(title="Curves", figures=(figure,)),))
    assert "Curves" not in printed(document)


@settings(deadline=None)
@given(st.text(st.characters(codec="utf-8"), max_size=30), st.integers(20, 100), st.booleans())
def test_any_text_can_be_printed(text: str, width: int, terminal: bool) -> None:
    # Whatever letters and digits a text holds, all of them come out, however narrow the terminal is.
    output = printed(table_document(columns=2, cell=text), width=width, terminal=terminal)
    for character in filter(str.isalnum, text):
        assert output.count(character) >= 2 * text.count(character)


def test_a_card_is_told_with_its_badge_its_place_and_its_advice() -> None:
    whole = Card(title="loss_spike", badge="error", place="step 3", text="It rose.", advice="Clip.", facts=(Fact(label="a", value="1"),))
    facts = Card(title="fp16", facts=(Fact(label="Steps", value="3"), Fact(label="Skipped", value="1", detail="33 %")))
    output = printed(Document(kind="Report", title="t", conclusion="c", sections=(Section(title="s", cards=(whole, facts)),)))
    assert "  error loss_spike (step 3): It rose. Clip.\n" in output
    assert "  fp16: Steps 3, Skipped 1 (33 %)\n" in output
