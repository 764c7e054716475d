from __future__ import annotations

import io
import json
import re
import subprocess
import sys

from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from halfstep.journal import Entry
from halfstep.records import StepRecord
from halfstep.report import Document, print_document, render_html
from halfstep.report.plots import plot
from halfstep.report.runs import reported_runs, runs_document
from tests.report import run_samples as samples
from tests.strategies import step_records


def document(*entries: Entry) -> Document:
    return runs_document([samples.reported(*entries)])


def several(*names: str) -> Document:
    return runs_document(reported_runs([samples.saved([*samples.complete(3), samples.alert()], name=name) for name in names]))


def titles(shown: Document, *, place: str = "everywhere") -> list[str]:
    return [section.title for section in shown.sections if section.place == place]


def printed(shown: Document, *, width: int = 80) -> str:
    out = io.StringIO()
    print_document(shown, Console(file=out, width=width, force_terminal=True, color_system=None))
    return out.getvalue()


def test_alerts_come_first_and_what_is_empty_is_left_out() -> None:
    shown = document(*samples.complete(3), samples.alert(), samples.action())
    assert [section.title for section in shown.sections] == [
        "Alerts",
        "At a glance",
        "Step by step",
        "Part by part",
        "Actions",
        "How it ran",
    ]
    assert titles(shown, place="page") == ["Step by step"]
    assert (shown.kind, shown.title, shown.notices) == ("Training run", "digits", ())
    assert shown.subtitle == "fp16 · NVIDIA H200 · torch 2.13.0 · 2026-01-31 12:00:00 UTC"


def test_epochs_are_told_by_their_numbers() -> None:
    assert "Epoch by epoch" in titles(document(*samples.steps(3, epoch=1)))


def test_actions_are_told_with_their_reason() -> None:
    (section,) = [section for section in document(samples.step(1), samples.action()).sections if section.title == "Actions"]
    assert [(item.label, item.text) for item in section.items] == [
        ("fall_back after step 2 (persistent_skips)", "The run goes on in bf16.")
    ]


def test_the_glance_shows_what_is_known() -> None:
    (card,) = document(*samples.complete(3, skipped=True)).sections[0].cards
    assert [(fact.label, fact.value, fact.detail) for fact in card.facts] == [
        ("Steps", "3", ""),
        ("Skipped", "3", "100 %"),
        ("Final loss", "1.00", "from 2.00"),
        ("Final scale", "1,024", ""),
        ("Peak memory", "3.00 GiB", ""),
    ]
    assert (card.title, card.role) == ("fp16", "fp16")
    (card,) = document(samples.start(), samples.step(1, scale=1.0, loss=float("nan"), memory_bytes=None)).sections[0].cards
    assert [fact.label for fact in card.facts] == ["Steps", "Skipped", "Step time"]


def test_several_optimizers_have_a_table() -> None:
    glance = document(samples.step(1, optimizer="a"), samples.step(2, optimizer="b")).sections[0]
    assert [column.header for column in glance.tables[0].columns] == ["Optimizer", "a", "b"]
    assert [fact.label for fact in glance.cards[0].facts] == ["Steps", "Skipped", "Step time", "Peak memory"]
    assert glance.cards[0].role == ""


def test_a_run_without_a_step_has_no_numbers() -> None:
    assert titles(document(samples.start(), samples.end())) == ["How it ran"]


class TestNotices:
    def test_a_run_that_ended_needs_none(self) -> None:
        assert document(*samples.complete(3)).notices == ()

    def test_a_run_without_an_end_is_told(self) -> None:
        assert document(samples.start(), samples.step(1)).notices == ("No end was recorded: it was killed, or is still running.",)

    def test_the_run_without_an_end_is_named_among_several(self) -> None:
        runs = [samples.saved(samples.complete(3), name="x"), samples.saved(samples.complete(3)[:-1], name="y")]
        assert runs_document(reported_runs(runs)).notices == ("No end of y was recorded: it was killed, or is still running.",)

    def test_counting_anew_is_told(self) -> None:
        (notice,) = document(*samples.complete(3), *samples.complete(2)).notices
        assert notice.startswith("A process that resumed the run counted its steps from 1 again.")

    def test_a_later_judgement_is_told_with_its_differences(self) -> None:
        saved = samples.saved([*samples.complete(3), samples.alert()])
        shown = runs_document(reported_runs([saved], judge=lambda _: ()))
        assert shown.notices == ("The alerts are those of today's rules, judged anew from the recorded steps.",)
        assert titles(shown)[0] == "Where today's rules differ"
        assert shown.conclusion.endswith("no alerts.")

    def test_what_could_not_be_read_is_told(self) -> None:
        run = samples.saved([samples.step(1)])
        changed = {name: getattr(run, name) for name in run.__dataclass_fields__} | {"notes": ("Line 7 was passed over. It is torn.",)}
        shown = runs_document(reported_runs([type(run)(**changed)]))
        assert shown.sections[-1].title == "What could not be read"
        assert "Line 7 was passed over. It is torn." in printed(shown)


class TestSeveralRuns:
    def test_they_are_compared_and_the_page_has_the_details_of_each(self) -> None:
        shown = several("x", "y")
        assert titles(shown) == ["Alerts", "Side by side"]
        assert titles(shown, place="page") == ["Step by step", "Part by part: x", "Part by part: y", "How it ran: x", "How it ran: y"]
        assert (shown.kind, shown.title, shown.roles) == ("Training runs", "x and y", ("x", "y"))

    def test_the_subtitle_says_what_they_have_in_common(self) -> None:
        other: list[Entry] = [samples.start(device="CPU"), samples.step(1), samples.end()]
        runs = reported_runs([samples.saved(samples.complete(1), name="x"), samples.saved(other, name="y")])
        assert runs_document(runs).subtitle == "fp16 · torch 2.13.0"

    def test_colours_follow_the_order_of_the_runs(self) -> None:
        saved = [samples.saved(samples.complete(3), name="x"), samples.saved([*samples.complete(3), samples.alert()], name="y")]
        page = render_html(runs_document(reported_runs(saved)))
        assert re.findall(r'background:var\((--series-\d)\)"></i>([xy])', page)[:2] == [("--series-1", "x"), ("--series-2", "y")]


def test_a_terminal_ends_with_the_conclusion_and_fits() -> None:
    shown = document(*samples.complete(200, epoch=1), samples.alert())
    output = printed(shown)
    assert " ".join(output.split()).endswith(shown.conclusion)
    assert output.index("How it ran") < output.index("At a glance") < output.index("Alerts")
    assert "warning loss_spike (step 2):" in output
    assert "Clip gradients." in output
    assert max(map(len, output.splitlines())) <= 80


def test_hostile_texts_stay_texts() -> None:
    page = render_html(document(*samples.hostile()))
    assert samples.ATTACK not in page
    assert "<img" not in page
    assert page.count("&lt;/script&gt;&lt;img src=x onerror=alert(1)&gt;") > 10


@settings(max_examples=60)
@given(st.lists(step_records(whole_numbers=st.integers(-(2**40), 2**40)), max_size=5))
def test_whatever_was_recorded_can_be_shown(records: list[StepRecord]) -> None:
    saved = samples.saved([samples.start(), *records])
    for runs in ([saved], [saved, saved]):
        shown = runs_document(reported_runs(runs))
        plots = [plot(figure, colours={}) for section in shown.sections for figure in section.figures]
        assert json.loads(json.dumps(plots, allow_nan=False)) == plots
        assert shown.conclusion in " ".join(printed(shown, width=10_000).split())


def test_a_report_loads_no_torch_and_no_plotly() -> None:
    program = (
        "import sys\n"
        "from halfstep.report.runs import reported_runs, runs_document\n"
        "from tests.report import run_samples as samples\n"
        "runs_document(reported_runs([samples.saved(samples.complete(3))]))\n"
        "print(sorted({'torch', 'plotly'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
