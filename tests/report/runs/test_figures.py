from __future__ import annotations

import math
from typing import Any

import pytest

from halfstep.journal import Entry
from halfstep.report import Figure
from halfstep.report.runs import ReportedRun, reported_runs
from halfstep.report.runs.figures import run_figures
from tests.report import run_samples as samples


def figures(*entries: Entry) -> dict[str, Figure]:
    return {figure.title: figure for figure in run_figures([samples.reported(*entries)])}


def pair(**changes: Any) -> tuple[ReportedRun, ...]:
    return reported_runs([samples.saved(samples.complete(3, **changes), name=name) for name in "xy"])


def test_each_quantity_has_a_figure_in_its_unit_over_the_same_steps() -> None:
    found = figures(*samples.steps(3))
    assert list(found) == ["Loss", "Loss scale", "Gradient norm", "Step time (ms)", "Memory (GiB)", "Learning rate"]
    assert {figure.kind for figure in found.values()} == {"timeline"}
    assert {figure.x.limits for figure in found.values()} == {(1, 3)}
    assert found["Step time (ms)"].series[0].y == (40.0, 40.0, 40.0)
    assert found["Memory (GiB)"].series[0].y == (3.0, 3.0, 3.0)


def test_what_nobody_knows_has_no_figure() -> None:
    unknown = samples.steps(3, loss=math.nan, scale=1.0, grad_norm=None, memory_bytes=None)
    assert list(figures(*unknown)) == ["Step time (ms)", "Learning rate"]
    assert run_figures([samples.reported(samples.start())]) == ()


@pytest.mark.parametrize(
    ("losses", "scale"),
    [((1.0, 30.0), "linear"), ((1.0, 30.1), "log"), ((0.0, 99.0), "linear"), ((-1.0, 99.0), "linear"), ((math.inf, 1.0), "linear")],
)
def test_a_loss_that_spans_much_has_a_logarithmic_axis(losses: tuple[float, ...], scale: str) -> None:
    found = figures(*(samples.step(number, loss=loss) for number, loss in enumerate(losses, start=1)))
    assert found["Loss"].y.scale == scale


def test_axes_fit_what_they_show() -> None:
    scales = {title: figure.y.scale for title, figure in figures(*samples.steps(3)).items()}
    assert scales == {
        "Loss": "linear",
        "Loss scale": "log2",
        "Gradient norm": "log",
        "Step time (ms)": "from_zero",
        "Memory (GiB)": "from_zero",
        "Learning rate": "from_zero",
    }
    slow = figures(samples.step(1, step_time_s=30.0), *samples.steps(9, first=2))
    assert slow["Step time (ms)"].y.scale == "log"


class TestMarks:
    def test_skipped_steps_and_alerts_are_marked_where_they_were(self) -> None:
        steps = [samples.step(1, skipped=True), *samples.steps(3, first=2)]
        found = figures(*steps, samples.alert(at=3), samples.alert("x", 4, severity="info"))
        for title in ("Loss", "Loss scale"):
            alerts = {marks.tone: marks for marks in found[title].marks if marks.place == "throughout"}
            assert list(alerts["warning"].x) == [3]
            assert alerts["warning"].texts == ("loss_spike (warning), step 3",)
            assert alerts["neutral"].texts == ("x (info), step 4",)
        (skips,) = [marks for marks in found["Loss scale"].marks if marks.place == "below"]
        assert (skips.x, skips.texts) == ((1,), ("step 1 skipped",))
        assert "Ticks below: skipped steps." in found["Loss scale"].caption
        assert "skipped" not in found["Loss"].caption
        assert not any(marks.place == "below" for marks in found["Loss"].marks)
        assert found["Step time (ms)"].marks == ()

    def test_without_a_scale_the_loss_shows_the_skipped_steps(self) -> None:
        found = figures(samples.step(1, scale=1.0, skipped=True), samples.step(2, scale=1.0), samples.alert(at=2))
        assert {marks.place for marks in found["Loss"].marks} == {"throughout", "below"}
        assert found["Gradient norm"].marks == ()

    def test_without_loss_and_scale_the_first_figure_shows_them(self) -> None:
        found = figures(samples.step(1, loss=math.nan, scale=1.0, skipped=True), samples.alert(at=1))
        assert {marks.place for marks in found["Gradient norm"].marks} == {"throughout", "below"}
        assert found["Step time (ms)"].marks == ()

    def test_with_a_scale_and_no_loss_only_the_scale_shows_them(self) -> None:
        found = figures(samples.step(1, loss=math.nan, skipped=True), samples.alert(at=1))
        assert {marks.place for marks in found["Loss scale"].marks} == {"throughout", "below"}
        assert found["Gradient norm"].marks == ()

    def test_losses_that_are_not_finite_are_marked_above(self) -> None:
        losses = (math.nan, 1.0, math.inf, math.nan, 1.0)
        entries = [samples.step(number, loss=loss, grad_norm=None) for number, loss in enumerate(losses, start=1)]
        figure = figures(*entries)["Loss"]
        (broken,) = figure.marks
        assert (broken.place, broken.x, broken.tone) == ("above", (3, 4), "bad")
        assert broken.texts[0] == "step 3 with a loss that is not finite"
        assert "infinite or NaN" in figure.caption

    def test_gradient_norms_that_are_not_finite_or_zero_are_marked(self) -> None:
        norms = (math.inf, None, 0.0, math.nan, 2.0)
        entries = [samples.step(number, grad_norm=norm) for number, norm in enumerate(norms, start=1)]
        figure = figures(*entries)["Gradient norm"]
        assert [(marks.place, marks.x) for marks in figure.marks] == [("above", (1, 4)), ("below", (3,))]
        assert figure.series[0].y == (2.0,)

    def test_the_place_where_another_process_went_on_is_marked(self) -> None:
        found = figures(*samples.complete(3), samples.start(), *samples.steps(2, first=4), samples.start())
        (marks,) = found["Loss"].marks
        assert (marks.place, marks.x) == ("between", (4,))
        assert "another process went on" in found["Loss"].caption

    def test_a_lone_skip_among_many_steps_is_marked(self) -> None:
        entries = [samples.step(number, skipped=number == 4321) for number in range(1, 9001)]
        (skips,) = figures(*entries)["Loss scale"].marks
        assert (skips.x, skips.texts) == ((4321,), ("step 4,321 skipped",))


class TestSeveralRuns:
    def test_they_are_drawn_over_each_other_in_their_colours(self) -> None:
        for figure in run_figures(pair()):
            assert [(series.name, series.role) for series in figure.series] == [("x", "x"), ("y", "y")]

    def test_their_events_have_their_names_and_colours(self) -> None:
        saved = [samples.saved([*samples.steps(3, skipped=True), samples.alert()], name=name) for name in "xy"]
        figure = run_figures(reported_runs(saved))[1]
        assert [(marks.place, marks.role) for marks in figure.marks] == [(p, role) for p in ("throughout", "below") for role in "xy"]
        assert figure.marks[1].texts == ("y: loss_spike (warning), step 2",)
        assert figure.marks[3].texts[0] == "y: step 1 skipped"

    def test_they_share_the_axis_of_the_longest(self) -> None:
        saved = [samples.saved(samples.steps(count, first=first), name=name) for name, first, count in (("x", 1, 3), ("y", 5, 6))]
        assert {figure.x.limits for figure in run_figures(reported_runs(saved))} == {(1, 10)}


class TestNumbers:
    def test_of_one_line_the_lowest_the_median_and_the_highest_are_told(self) -> None:
        records = [samples.step(number, loss=float(number)) for number in range(1, 101)]
        table = figures(*records)["Loss"].table
        assert table is not None
        assert [column.header for column in table.columns] == ["Steps", "Lowest", "Median", "Highest"]
        assert len(table.rows) == 10
        assert table.rows[0] == ("1 to 10", "1.000", "5.500", "10.00")
        assert table.rows[-1] == ("91 to 100", "91.00", "95.50", "100.0")

    def test_of_several_lines_the_medians_are_told(self) -> None:
        table = run_figures(pair(loss=0.5))[0].table
        assert table is not None
        assert [(column.header, column.role) for column in table.columns] == [("Steps", ""), ("x", "x"), ("y", "y")]
        assert table.rows == tuple((str(step), "0.5000", "0.5000") for step in (1, 2, 3))
        assert table.caption == "Medians."

    def test_where_nothing_is_known_a_dash_stands(self) -> None:
        records = [samples.step(1), samples.step(2, loss=math.nan)]
        table = figures(*records)["Loss"].table
        assert table is not None
        assert table.rows[1] == ("2", *"–––")  # noqa: RUF001
