from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from halfstep.report.runs.lines import RunLine, drawn_line, event_texts, run_lines
from halfstep.report.runs.reported import reported_runs
from tests.report import run_samples as samples


def line(count: int, **changes: Any) -> RunLine:
    (one,) = run_lines([samples.reported(*samples.steps(count, **changes))])
    return one


class TestRunLines:
    def test_a_run_with_one_optimizer_is_one_line_without_a_name(self) -> None:
        one = line(3)
        assert (one.name, one.role, one.steps.tolist()) == ("", "fp16", [1, 2, 3])

    def test_each_optimizer_is_a_line_of_its_own_colour(self) -> None:
        records = [samples.step(number, optimizer="ab"[number % 2]) for number in range(1, 6)]
        lines = run_lines([samples.reported(*records)])
        assert [(one.name, one.role, one.steps.tolist()) for one in lines] == [("b", "b", [1, 3, 5]), ("a", "a", [2, 4])]

    def test_an_optimizer_without_a_name_beside_another_one_is_the_main_one(self) -> None:
        lines = run_lines([samples.reported(samples.step(1), samples.step(2, optimizer="critic"))])
        assert [one.name for one in lines] == ["main", "critic"]

    def test_all_lines_of_one_of_several_runs_have_its_colour(self) -> None:
        both = [samples.step(1, optimizer="a"), samples.step(2, optimizer="b")]
        runs = reported_runs([samples.saved(both, name="x"), samples.saved(samples.steps(1), name="y")])
        assert [(one.name, one.role) for one in run_lines(runs)] == [("x, a", "x"), ("x, b", "x"), ("y", "y")]

    def test_values_that_are_not_known_are_nan(self) -> None:
        records = [samples.step(1, memory_bytes=None), samples.step(2, memory_bytes=7), samples.step(3, grad_norm=None)]
        (one,) = run_lines([samples.reported(*records)])
        assert one.values("memory_bytes").tolist()[:2] == pytest.approx([math.nan, 7.0], nan_ok=True)
        assert np.isnan(one.values("grad_norm")).tolist() == [False, False, True]


class TestDrawnLine:
    def test_few_steps_are_drawn_as_they_are(self) -> None:
        one = line(3)
        (series,) = drawn_line(one, np.array([3.0, 1.0, 2.0]), is_noisy=True)
        assert (series.x, series.y, series.name, series.emphasis) == ((1, 2, 3), (3.0, 1.0, 2.0), "single step", "normal")

    def test_of_many_noisy_steps_the_medians_are_drawn_too(self) -> None:
        one = line(1001)
        values = np.arange(1001.0)
        single, middles = drawn_line(one, values, is_noisy=True)
        assert (single.emphasis, middles.emphasis) == ("faint", "normal")
        assert middles.name == "median of 5 steps"
        assert middles.y[0] == 2.0
        assert len(drawn_line(one, values, is_noisy=False)) == 1

    def test_the_names_of_several_lines_tell_them_apart(self) -> None:
        runs = reported_runs([samples.saved(samples.steps(1001), name=name) for name in "xy"])
        series = [one for each in run_lines(runs) for one in drawn_line(each, each.values("loss"), is_noisy=True)]
        assert [one.name for one in series] == ["x, single step", "x", "y, single step", "y"]
        assert [one.name for one in drawn_line(run_lines(runs)[0], np.ones(1001), is_noisy=False)] == ["x"]

    def test_nothing_finite_is_nothing_to_draw(self) -> None:
        assert drawn_line(line(3), np.array([math.nan, math.inf, -math.inf]), is_noisy=True) == ()

    @pytest.mark.parametrize(("missing", "gaps"), [(10, 0), (11, 1)])
    def test_a_few_missing_values_are_bridged_and_more_are_a_gap(self, missing: int, gaps: int) -> None:
        values = np.ones(40)
        values[5 : 5 + missing] = math.nan
        (series,) = drawn_line(line(40), values, is_noisy=False)
        assert len(series.y) == 40 - missing + gaps
        assert [math.isnan(y) for y in series.y].count(True) == gaps

    def test_a_share_of_a_long_run_is_bridged(self) -> None:
        values = np.ones(2000)
        values[100:120] = math.nan
        assert not any(math.isnan(y) for y in drawn_line(line(2000), values, is_noisy=False)[0].y)
        values[100:121] = math.nan
        assert any(math.isnan(y) for y in drawn_line(line(2000), values, is_noisy=False)[0].y)

    def test_steps_that_were_done_twice_are_two_pieces(self) -> None:
        records = [*samples.steps(5), *samples.steps(4, first=3)]
        (one,) = run_lines([samples.reported(*records)])
        (series,) = drawn_line(one, np.arange(9.0), is_noisy=False)
        assert list(series.x) == [1, 2, 3, 4, 5, 3, 3, 4, 5, 6]
        assert math.isnan(series.y[5])

    def test_steps_in_no_order_are_one_piece(self) -> None:
        records = [samples.step(1) for _ in range(202)]
        (one,) = run_lines([samples.reported(*records)])
        (series,) = drawn_line(one, np.ones(202), is_noisy=False)
        assert len(series.x) == 202

    def test_a_long_line_is_thin_and_has_its_spikes(self) -> None:
        values = np.sin(np.arange(30_000.0))
        values[12_345] = 50.0
        single, middles = drawn_line(line(30_000), values, is_noisy=True)
        assert 50.0 in single.y
        assert single.x[single.y.index(50.0)] == 12_346
        assert len(single.x) <= 2002
        assert len(middles.x) == 250


class TestEventTexts:
    def test_each_event_is_named_by_its_step(self) -> None:
        x, texts = event_texts(line(4), np.array([False, True, False, True]), what="skipped")
        assert x == (2, 4)
        assert texts == ("step 2 skipped", "step 4 skipped")

    def test_neighbours_of_a_long_run_are_told_together(self) -> None:
        is_marked = np.zeros(10_005, dtype=np.bool_)
        is_marked[[11, 15, 10_003]] = True
        x, texts = event_texts(line(10_005), is_marked, what="skipped")
        assert x == (12, 10_004)
        assert texts == ("2 of the steps 12 to 22 skipped", "step 10,004 skipped")

    def test_one_of_several_lines_is_named(self) -> None:
        records = [samples.step(1, optimizer="a"), samples.step(2, optimizer="b")]
        lines = run_lines([samples.reported(*records)])
        assert event_texts(lines[1], np.array([True]), what="skipped")[1] == ("b: step 2 skipped",)
