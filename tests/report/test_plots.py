from __future__ import annotations

import json
import math
from typing import Any

import pytest

from halfstep.report import Axis, Document, Figure, Marks, Section, Series, comparison_document
from halfstep.report.plots import plot, role_colours
from tests import samples


def figure(*series: Series, **changes: Any) -> Figure:
    values: dict[str, Any] = {"title": "t", "kind": "lines", "x": Axis(label="Step"), "y": Axis(label="Loss"), "series": series}
    return Figure(**(values | changes))


def traces(one: Figure) -> list[dict[str, Any]]:
    data: list[dict[str, Any]] = plot(one, colours={"fp16": "--fp16"})["data"]
    return data


def test_precisions_keep_their_colours_and_others_take_the_next_free_one() -> None:
    comparison = samples.comparison(runs=(samples.run("fp32"), samples.run("fp32"), samples.run("fp16")))
    colours = role_colours(comparison_document(comparison))
    assert colours["fp32"] == "--fp32"
    assert colours["fp16"] == "--fp16"
    assert colours["fp32 (2)"] == "--series-1"
    assert len(set(colours.values())) == len(colours)


def test_colours_start_over_when_there_are_more_roles_than_colours() -> None:
    lines = tuple(Series(name=str(n), x=(1,), y=(1.0,), role=f"role {n}") for n in range(8))
    section = Section(title="s", figures=(figure(*lines),))
    assert len(role_colours(Document(kind="Report", title="t", conclusion="c", sections=(section,)))) == 8


def test_faint_lines_lie_below_and_marks_above() -> None:
    data = traces(
        figure(
            Series(name="skips", x=(2,), y=(0.4,), role="fp16", emphasis="marks"),
            Series(name="mean", x=(1, 2), y=(0.5, 0.4), role="fp16"),
            Series(name="seed", x=(1, 2), y=(0.5, 0.4), role="fp16", emphasis="faint"),
        )
    )
    assert [(one["name"], one["mode"]) for one in data] == [("seed", "lines"), ("mean", "lines"), ("skips", "markers")]
    assert [one.get("showlegend", True) for one in data] == [False, True, True]
    assert data[0]["legendgroup"] == data[1]["legendgroup"] == "fp16"
    assert data[1]["line"]["color"] == "var(--fp16)"


def test_lines_that_lie_on_each_other_differ_in_their_dashes() -> None:
    data = traces(figure(*(Series(name=name, x=(1, 2), y=(1.0, 0.5)) for name in ("fp32", "bf16", "fp16"))))
    assert len({one["line"]["dash"] for one in data}) == 3


def test_values_that_are_not_finite_leave_a_gap_and_numbers_are_short() -> None:
    (trace,) = traces(figure(Series(name="a", x=(1, 2, 3, 4), y=(math.nan, math.inf, -math.inf, 1.23456789))))
    assert trace["y"] == [None, None, None, 1.23457]


@pytest.mark.parametrize(
    ("x", "expected"), [((3, 4, 5), {"x0": 3, "dx": 1}), ((3, 5), {"x": [3, 5]}), ((1,), {"x": [1]}), ((0.5, 1.5), {"x": [0.5, 1.5]})]
)
def test_consecutive_steps_take_no_room(x: tuple[float, ...], expected: dict[str, Any]) -> None:
    (trace,) = traces(figure(Series(name="a", x=x, y=(1.0,) * len(x))))
    assert {key: trace[key] for key in ("x", "x0", "dx") if key in trace} == expected


def test_distributions_are_horizontal_boxes_with_their_points() -> None:
    few, many = Series(name="few", y=(1.0, 2.0)), Series(name="many", y=(1.0,) * 401)
    data = traces(figure(few, many, kind="distribution"))
    assert [one["type"] for one in data] == ["box", "box"]
    assert [one["boxpoints"] for one in data] == ["all", "outliers"]
    assert data[0]["x"] == [1.0, 2.0]
    assert plot(figure(few, many, kind="distribution"), colours={})["layout"]["yaxis"]["autorange"] == "reversed"


def test_bars_are_stacked_and_have_a_legend() -> None:
    drawn = plot(figure(Series(name="Batch", x=("fp32", "bf16"), y=(1.0, 2.0)), kind="stacked_bars"), colours={})
    assert drawn["data"][0]["y"] == ["fp32", "bf16"]
    assert drawn["data"][0]["x"] == [1.0, 2.0]
    assert drawn["layout"]["barmode"] == "stack"
    assert drawn["layout"]["showlegend"] is True


def test_a_figure_grows_with_its_rows() -> None:
    two = plot(figure(*(Series(name=n, y=(1.0,)) for n in "ab"), kind="distribution"), colours={})
    three = plot(figure(*(Series(name=n, y=(1.0,)) for n in "abc"), kind="distribution"), colours={})
    assert two["height"] < three["height"] == three["layout"]["height"]
    assert plot(figure(kind="stacked_bars"), colours={})["height"] > 0


def test_axes_carry_unit_and_scale() -> None:
    layout = plot(figure(x=Axis(label="Time", unit="ms"), y=Axis(label="Loss", scale="log")), colours={})["layout"]
    assert layout["xaxis"]["title"]["text"] == "Time (ms)"
    assert (layout["xaxis"]["type"], layout["yaxis"]["type"]) == ("linear", "log")
    assert "range" not in layout["xaxis"]


def test_the_step_axis_ends_where_the_steps_end() -> None:
    layout = plot(figure(Series(name="a", x=(1, 101), y=(1.0, 2.0))), colours={})["layout"]
    assert layout["xaxis"]["range"] == pytest.approx([-0.2, 102.2])


def test_plotly_reads_no_tags_in_texts() -> None:
    name = "<a href='https://example.org'>&amp;</a>"
    literal = "&lt;a href='https://example.org'&gt;&amp;amp;&lt;/a&gt;"
    drawn = json.dumps([plot(figure(Series(name=name, x=(name,), y=(1.0,)), kind="stacked_bars", x=Axis(label=name)), colours={})])
    assert "<" not in drawn
    assert drawn.count(literal) == 3


def test_roles_that_a_document_names_take_their_colours_first() -> None:
    section = Section(title="s", figures=(figure(Series(name="b", x=(1,), y=(1.0,), role="b")),))
    document = Document(kind="Report", title="t", conclusion="c", sections=(section,), roles=("a", "b"))
    assert role_colours(document) == {"a": "--series-1", "b": "--series-2"}


def test_marks_have_roles_too() -> None:
    marks = Marks(name="m", x=(1,), texts=("a",), place="above", role="run")
    section = Section(title="s", figures=(figure(marks=(marks,), kind="timeline"),))
    assert role_colours(Document(kind="Report", title="t", conclusion="c", sections=(section,))) == {"run": "--series-1"}


def test_an_axis_from_zero_begins_there() -> None:
    axis = plot(figure(y=Axis(label="Memory", scale="from_zero")), colours={})["layout"]["yaxis"]
    assert (axis["type"], axis["rangemode"]) == ("linear", "tozero")


def test_the_largest_float_is_no_infinity() -> None:
    (trace,) = traces(figure(Series(name="a", x=(1,), y=(1.7976999e308,)), kind="timeline"))
    assert trace["y"] == [None]
