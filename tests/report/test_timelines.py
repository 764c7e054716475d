from __future__ import annotations

import math
from typing import Any

import pytest

from halfstep.report import Axis, Figure, Marks, Series
from halfstep.report.plots import plot

SKIPS = Marks(name="skipped", x=(2,), texts=("step 2 skipped",), place="below", tone="bad")
ALERTS = Marks(name="warning", x=(3, 5), texts=("<b>a</b>", "b"), place="throughout", tone="warning")
BROKEN = Marks(name="broken", x=(4,), texts=("step 4",), place="above", role="fp16")
RESUMED = Marks(name="resumed", x=(4,), texts=("resumed",), place="between", tone="good")


def timeline(*series: Series, scale: Any = "linear", limits: tuple[float, float] | None = None, marks: tuple[Marks, ...] = ()) -> Any:
    x, y = Axis(label="step", limits=limits), Axis(label="Loss", scale=scale)
    figure = Figure(title="t", kind="timeline", x=x, y=y, series=series, marks=marks)
    return plot(figure, colours={"fp16": "--fp16", "a": "--series-1"})


def line(*y: float, name: str = "fp16", **changes: Any) -> Series:
    return Series(**({"name": name, "x": tuple(range(1, len(y) + 1)), "y": y, "role": "fp16"} | changes))


def test_events_have_lanes_and_the_lines_have_the_rest() -> None:
    drawn = timeline(line(1, 2, 3, 4, 5), marks=(SKIPS, ALERTS, BROKEN))
    layout = drawn["layout"]
    assert [trace["yaxis"] for trace in drawn["data"]] == ["y", "y2", "y3", "y3"]
    below, lines, above = (layout[axis]["domain"] for axis in ("yaxis2", "yaxis", "yaxis3"))
    assert below[0] == 0
    assert below[1] == lines[0] < lines[1] == above[0]
    assert above[1] == 1
    assert layout["xaxis"]["anchor"] == "y2"
    assert [trace["y"] for trace in drawn["data"][1:]] == [[0.5], [0.5, 0.5], [1.5]]
    assert drawn["height"] == layout["height"] > timeline(line(1, 2))["height"]


def test_without_events_there_are_no_lanes() -> None:
    layout = timeline(line(1, 2))["layout"]
    assert "yaxis2" not in layout
    assert "yaxis3" not in layout
    assert layout["yaxis"]["domain"] == [0, 1]
    assert layout["xaxis"]["anchor"] == "y"


def test_alerts_and_the_places_of_a_resumption_share_a_lane() -> None:
    drawn = timeline(line(1, 2), marks=(ALERTS, RESUMED))
    assert [trace["y"] for trace in drawn["data"][1:]] == [[0.5, 0.5], [0.5]]
    assert [trace["marker"]["symbol"] for trace in drawn["data"][1:]] == ["circle", "square"]


def test_marks_say_their_texts_and_have_the_colour_of_their_role_or_tone() -> None:
    drawn = timeline(line(1, 2), marks=(SKIPS, ALERTS, BROKEN, RESUMED))
    # The lanes from the bottom up; what shares one stands together.
    skips, alerts, resumed, broken = drawn["data"][1:]
    assert alerts["text"] == ["&lt;b&gt;a&lt;/b&gt;", "b"]
    assert alerts["hovertemplate"] == "%{text}<extra></extra>"
    colours = [one["marker"]["color"] for one in (skips, alerts, broken, resumed)]
    assert colours == ["var(--bad)", "var(--warn-line)", "var(--fp16)", "var(--good)"]


def test_a_line_from_top_to_bottom_stands_at_each_alert_and_at_nothing_else() -> None:
    shapes = timeline(line(1, 2), marks=(SKIPS, ALERTS, BROKEN))["layout"]["shapes"]
    assert [(shape["x0"], shape["x1"], shape["y0"], shape["y1"], shape["yref"]) for shape in shapes] == [
        (3, 3, 0, 1, "paper"),
        (5, 5, 0, 1, "paper"),
    ]


def test_faint_lines_lie_below_and_have_no_entry_in_the_legend() -> None:
    drawn = timeline(line(1, 2, name="median"), line(1, 2, name="each", emphasis="faint"), line(1, 2, name="b", role="a"))
    assert [trace["name"] for trace in drawn["data"]] == ["each", "median", "b"]
    assert [trace.get("showlegend", True) for trace in drawn["data"]] == [False, True, True]
    assert drawn["data"][0]["legendgroup"] == drawn["data"][1]["legendgroup"] != drawn["data"][2]["legendgroup"]
    assert drawn["layout"]["showlegend"] is True


def test_a_single_line_needs_no_legend() -> None:
    assert timeline(line(1, 2), line(1, 2, emphasis="faint"), marks=(SKIPS,))["layout"]["showlegend"] is False


def test_lines_of_one_colour_differ_in_their_dashes_and_the_first_is_seen_below_others() -> None:
    first, second, third = timeline(line(1, 2), line(1, 2, name="b"), line(1, 2, name="c", role="a"))["data"]
    assert [one["line"]["dash"] for one in (first, second, third)] == ["solid", "6px,4px", "solid"]
    assert first["line"]["width"] > second["line"]["width"] == third["line"]["width"]
    assert timeline(line(1, 2))["data"][0]["line"]["width"] == second["line"]["width"]


def test_all_timelines_begin_and_end_at_the_same_places() -> None:
    layouts = [timeline(line(*values), limits=(1, 101))["layout"] for values in ((1, 2), (1e9, 2e9, 3e9))]
    assert layouts[0]["margin"]["l"] == layouts[1]["margin"]["l"]
    assert layouts[0]["xaxis"]["range"] == layouts[1]["xaxis"]["range"] == pytest.approx([-0.2, 102.2])


def test_without_limits_the_steps_of_the_lines_are_shown() -> None:
    assert timeline(line(*range(101)))["layout"]["xaxis"]["range"] == pytest.approx([-0.2, 102.2])


@pytest.mark.parametrize(("last", "form"), [(9_999, ",d"), (10_000, "~s")])
def test_large_steps_are_written_short(last: float, form: str) -> None:
    axis = timeline(line(1, 2), limits=(1, last))["layout"]["xaxis"]
    assert axis["tickformat"] == form
    assert axis["hoverformat"] == ",d"


class TestValueAxis:
    def test_an_axis_from_zero_begins_there(self) -> None:
        axis = timeline(line(1, 2), scale="from_zero")["layout"]["yaxis"]
        assert (axis["type"], axis["rangemode"]) == ("linear", "tozero")

    @pytest.mark.parametrize(
        ("values", "expected"),
        [
            ((0.2, 20.0), {"dtick": "D2", "tickformat": ",.1~r"}),
            ((0.2, 20.01), {"dtick": 1}),
            ((1e-6, 1e5), {"dtick": 3}),
            ((1e-7, 2e-7), {"dtick": "D2", "tickformat": ".0e"}),
            ((5e4, 1e5), {"dtick": "D2", "tickformat": ".0e"}),
        ],
    )
    def test_a_log_axis_has_few_labels_that_can_be_read(self, values: tuple[float, ...], expected: dict[str, Any]) -> None:
        axis = timeline(line(*values, math.nan), scale="log")["layout"]["yaxis"]
        assert axis["type"] == "log"
        assert {key: axis[key] for key in ("dtick", "tickformat") if key in axis} == expected

    def test_a_scale_has_labels_at_powers_of_two(self) -> None:
        axis = timeline(line(1024.0, 65536.0), scale="log2")["layout"]["yaxis"]
        assert axis["tickvals"] == [1024.0, 4096.0, 16384.0, 65536.0]
        assert axis["ticktext"] == ["1,024", "4,096", "16,384", "65,536"]
        assert axis["range"][0] < math.log10(1024) < math.log10(65536) < axis["range"][1]

    @pytest.mark.parametrize(("values", "texts"), [((2.0**17,), ["2<sup>17</sup>"]), ((0.5, 1.0), ["2<sup>-1</sup>", "2<sup>0</sup>"])])
    def test_long_scales_are_written_as_powers(self, values: tuple[float, ...], texts: list[str]) -> None:
        assert timeline(line(*values), scale="log2")["layout"]["yaxis"]["ticktext"] == texts

    def test_scales_keep_all_their_digits(self) -> None:
        assert timeline(line(16777216.0, math.inf), scale="log2")["data"][0]["y"] == [16777216.0, None]
        assert timeline(line(16777216.0))["data"][0]["y"] == [16777200.0]

    @pytest.mark.parametrize("scale", ["log", "log2"])
    def test_an_axis_without_a_positive_value_is_left_to_plotly(self, scale: str) -> None:
        axis = timeline(line(0.0, math.nan), scale=scale)["layout"]["yaxis"]
        assert axis["type"] == "log"
        assert "tickvals" not in axis
