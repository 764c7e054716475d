from __future__ import annotations

import math
from statistics import median
from typing import Any

import pytest

from halfstep.report import Figure, Series
from halfstep.report.comparison_figures import loss_figure, memory_figure, step_time_figure
from halfstep.report.contenders import Contender, contenders
from tests import samples


def contender(label: str = "bf16", **changes: Any) -> Contender:
    return Contender(label=label, run=samples.run(label, **changes), verdict=None)


def loss(*runs: Contender, **settings: Any) -> Figure:
    (figure,) = loss_figure(runs, settings=samples.settings(**settings))
    return figure


def named(figure: Figure, name: str) -> Series:
    return next(one for one in figure.series if one.name == name)


def test_loss_curves_are_a_mean_and_the_seeds_behind_it() -> None:
    figure = loss(contender(losses=((4.0, 2.0), (2.0, 1.0)), skipped_at=((), ())), seeds=(3, 5))
    assert [(one.name, one.emphasis) for one in figure.series] == [
        ("bf16, seed 3", "faint"),
        ("bf16, seed 5", "faint"),
        ("bf16", "normal"),
    ]
    assert named(figure, "bf16").x == (1, 2)
    assert named(figure, "bf16").y == (3.0, 1.5)
    assert {one.role for one in figure.series} == {"bf16"}
    assert figure.y.scale == "linear"


def test_a_single_seed_is_its_own_line() -> None:
    figure = loss(contender(losses=((4.0, 2.0),), skipped_at=((),)), seeds=(0,))
    assert [one.name for one in figure.series] == ["bf16"]
    assert "faint" not in figure.caption


def test_a_seed_that_was_cut_short_does_not_bend_the_mean() -> None:
    figure = loss(contender(losses=((4.0, 2.0, 1.0), (100.0,), (2.0, 2.0, 2.0)), skipped_at=((), (), ())))
    assert named(figure, "bf16").y == (3.0, 2.0, 1.5)
    assert named(figure, "bf16, seed 1").x == (1,)


def test_skipped_steps_are_marked_where_they_happened() -> None:
    figure = loss(contender("fp16", losses=((4.0, 3.0, 2.0), (5.0, 4.0, 3.0)), skipped_at=((2,), (1, 3, 99, 0))))
    marks = named(figure, "fp16 skipped steps")
    assert marks.emphasis == "marks"
    assert list(zip(marks.x, marks.y, strict=True)) == [(2, 3.0), (1, 5.0), (3, 3.0)]
    assert "A cross marks a skipped step." in figure.caption
    assert "cross" not in loss(contender("bf16")).caption


@pytest.mark.parametrize(
    ("losses", "height"), [((4.0, math.nan, 1.0), 4.0), ((math.nan, math.inf, 1.0), 1.0), ((math.nan, math.nan, math.nan), math.nan)]
)
def test_a_skip_is_marked_although_its_loss_is_not_finite(losses: tuple[float, ...], height: float) -> None:
    marks = named(loss(contender("fp16", losses=(losses,), skipped_at=((2,),))), "fp16 skipped steps")
    assert marks.y == pytest.approx((height,), nan_ok=True)


def test_the_caption_says_where_a_loss_broke() -> None:
    figure = loss(contender("fp16", losses=((2.0, 1.0, 0.5), (2.0, math.nan, math.nan)), skipped_at=((), ())), seeds=(7, 8))
    assert "The loss of fp16 was NaN at step 2 of seed 8." in figure.caption
    assert math.isnan(named(figure, "fp16").y[1])


@pytest.mark.parametrize(
    ("losses", "scale"), [((100.0, 1.0), "log"), ((20.0, 1.0), "linear"), ((100.0, 0.0), "linear"), ((math.nan, math.inf), "linear")]
)
def test_losses_that_span_much_have_a_log_axis(losses: tuple[float, ...], scale: str) -> None:
    assert loss(contender(losses=(losses,), skipped_at=((),))).y.scale == scale


def test_the_loss_table_goes_from_the_first_to_the_last_step() -> None:
    short = contender("fp16", losses=((3.0, 2.0),), skipped_at=((),))
    figure = loss(contender("fp32", losses=(tuple(float(n) for n in range(1, 66)),), skipped_at=((),)), short)
    assert figure.table is not None
    assert [row[0] for row in figure.table.rows] == ["1", "10", "19", "28", "38", "47", "56", "65"]
    assert figure.table.rows[0] == ("1", "1.000", "3.000")
    assert figure.table.rows[-1] == ("65", "65.00", "–")  # noqa: RUF001


def test_a_single_step_makes_a_loss_table_too() -> None:
    figure = loss(contender(losses=((3.0,),), skipped_at=((),)))
    assert figure.table is not None
    assert figure.table.rows == (("1", "3.000"),)


def test_step_times_keep_every_finite_step_in_one_unit() -> None:
    (figure,) = step_time_figure([contender("fp32", step_times_ms=(2000.0, math.nan, 4000.0)), contender("bf16", step_times_ms=(1000.0,))])
    assert figure.x.unit == "s"
    assert [one.y for one in figure.series] == [(2.0, 4.0), (1.0,)]
    assert figure.table is not None
    assert figure.table.rows[0] == ("Fastest (s)", "2.000", "1.000")
    assert figure.table.rows[2] == ("Median (s)", "3.000", "1.000")
    assert figure.table.rows[-1] == ("Steps", "2", "1")


def test_the_median_of_the_figure_is_that_of_the_record() -> None:
    one = contender("fp32")
    (figure,) = step_time_figure([one])
    assert median(figure.series[0].y) == pytest.approx(one.run.step_time_ms.median if one.run.step_time_ms else None)


def test_an_emulated_precision_does_not_flatten_the_others() -> None:
    (figure,) = step_time_figure([contender("fp32", step_times_ms=(10.0, 11.0)), contender("fp16", step_times_ms=(900.0, 901.0))])
    assert figure.x.scale == "log"


def test_memory_is_stacked_by_part() -> None:
    runs = contenders(samples.emulated_comparison())
    (figure,) = memory_figure(runs)
    assert [one.name for one in figure.series] == ["Parameters", "Optimizer state", "Batch", "Step"]
    assert figure.series[0].x == ("fp32", "bf16")
    for place in (0, 1):
        assert sum(one.y[place] for one in figure.series) == pytest.approx(runs[place].run.peak_memory_mib)
    assert figure.table is not None
    assert figure.table.rows[3] == ("Step", "612.0", "341.5")


def test_without_values_there_are_no_figures() -> None:
    stopped = Contender(label="fp16", run=samples.stopped_run(), verdict=None)
    assert loss_figure([stopped], settings=samples.settings()) == ()
    assert step_time_figure([stopped]) == ()
    assert memory_figure([stopped]) == ()
