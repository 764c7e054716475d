# ruff: noqa: RUF001
from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.records import Interval
from halfstep.report.quantities import interval_texts, memory_unit, number_text, ratio_text, time_unit


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (math.nan, "NaN"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        (0.0, "0"),
        (1234.56, "1235"),
        (-0.04321, "-0.04321"),
        (0.0001, "0.0001000"),
        (0.00009, "9.000e-05"),
        (9_999_999.0, "9999999"),
        (1e7, "1.000e+07"),
    ],
)
def test_numbers(value: float | None, text: str) -> None:
    assert number_text(value) == text


@given(st.floats(-1e300, 1e300))
def test_a_number_survives_to_its_digits(value: float) -> None:
    assert float(number_text(value)) == pytest.approx(value, rel=6e-4, abs=0)


@pytest.mark.parametrize(
    ("interval", "texts"),
    [
        (Interval(median=41.616, low=41.49, high=41.9), ("41.62", "[41.49, 41.90]")),
        (Interval(median=0.0, low=0.0, high=0.0), ("0", "[0, 0]")),
        (Interval(median=math.nan, low=math.nan, high=math.inf), ("NaN", "[NaN, inf]")),
        (Interval(median=2.0, low=-math.inf, high=3.0), ("2.000", "[-inf, 3.000]")),
    ],
)
def test_intervals(interval: Interval, texts: tuple[str, str]) -> None:
    assert interval_texts(interval) == texts


def test_an_interval_is_scaled_as_a_whole() -> None:
    assert interval_texts(Interval(median=1500.0, low=1400.0, high=1600.0), factor=0.001) == ("1.500", "[1.400, 1.600]")


@pytest.mark.parametrize(("ratio", "text"), [(None, "–"), (math.nan, "NaN"), (math.inf, "inf"), (0.0354, "0.0354×"), (1.0, "1.00×")])
def test_ratios(ratio: float | None, text: str) -> None:
    assert ratio_text(ratio) == text


@pytest.mark.parametrize(
    ("times", "name"),
    [([0.999], "µs"), ([1.0], "ms"), ([999.0], "ms"), ([1001.0], "s"), ([10.0, 20000.0], "ms"), ([None, math.nan, 0], "ms")],
)
def test_time_units(times: list[float | None], name: str) -> None:
    assert time_unit(times).name == name


@pytest.mark.parametrize(("sizes", "name"), [([0.5], "KiB"), ([1.0], "MiB"), ([1023.0], "MiB"), ([1024.0], "GiB"), ([], "MiB")])
def test_memory_units(sizes: list[float | None], name: str) -> None:
    assert memory_unit(sizes).name == name


def test_units_convert() -> None:
    assert time_unit([0.5]).factor * 0.5 == 500
    assert time_unit([2500.0]).factor * 2500 == 2.5
    assert memory_unit([2048.0]).factor * 2048 == 2
    assert memory_unit([0.5]).factor * 0.5 == 512
