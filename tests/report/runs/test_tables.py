# ruff: noqa: RUF001
from __future__ import annotations

import math

import pytest

from halfstep.report import Table
from halfstep.report.runs import reported_runs
from halfstep.report.runs.tables import comparison_table, epoch_table, optimizer_table, scale_text
from tests.report import run_samples as samples


def rows(table: Table) -> dict[str, tuple[str, ...]]:
    return {row[0]: row[1:] for row in table.rows}


class TestEpochTable:
    def test_each_epoch_has_a_row(self) -> None:
        records = [samples.step(number, epoch=1 + number // 1001, skipped=number in {1, 2}, loss=1.0) for number in range(1, 2001)]
        table = epoch_table(samples.reported(*records))
        headers = ["Epoch", "Steps", "Skipped", "Share", "Median loss", "Scale at its end", "Step time (ms)"]
        assert [column.header for column in table.columns] == headers
        assert table.rows == (
            ("1", "1,000", "2", "0.2 %", "1.000", "1,024", "40.0"),
            ("2", "1,000", "0", "0 %", "1.000", "1,024", "40.0"),
        )
        assert table.caption == ""

    def test_without_epochs_parts_are_told_and_the_caption_says_so(self) -> None:
        table = epoch_table(samples.reported(*samples.steps(20)))
        assert [column.header for column in table.columns][:2] == ["Steps", "Skipped"]
        assert table.rows[0][0] == "1 to 2"
        assert len(table.rows) == 10
        assert "No epochs were recorded" in table.caption

    def test_of_many_epochs_several_share_a_row(self) -> None:
        records = [samples.step(n, epoch=n, loss=float(n), skipped=n == 3, scale=float(n)) for n in range(1, 46)]
        table = epoch_table(samples.reported(*records))
        assert table.rows[0] == ("1 to 3", "3", "1", "33 %", "2.000", "3", "40.0")
        assert table.rows[-1][0] == "43 to 45"
        assert len(table.rows) == 15
        assert "Of 3 epochs together" in table.caption

    def test_steps_before_the_first_epoch_and_unknown_values_are_dashes(self) -> None:
        table = epoch_table(samples.reported(samples.step(1, epoch=None, loss=math.nan, step_time_s=math.nan), samples.step(2, epoch=1)))
        assert table.rows[0] == ("–", "1", "0", "0 %", "–", "1,024", "–")
        assert table.rows[1][0] == "1"


def test_optimizers_stand_side_by_side() -> None:
    run = samples.reported(samples.step(1, optimizer="a", loss=2.0), samples.step(2, optimizer="", skipped=True, scale=1.0))
    table = optimizer_table(run)
    assert [column.header for column in table.columns] == ["Optimizer", "a", "main"]
    assert [column.role for column in table.columns] == ["", "a", "main"]
    assert rows(table)["Skipped steps"] == ("0", "1")
    assert rows(table)["Final scale"] == ("1,024", "–")
    assert rows(table)["Final loss"] == ("2.000", "1.000")


def test_runs_stand_side_by_side() -> None:
    long = samples.saved([samples.start(), *samples.steps(1000, loss=0.5), samples.alert(), samples.end()], name="x")
    killed = samples.saved(
        [samples.start(), samples.step(1, optimizer="a", skipped=True), samples.step(2, optimizer="b", memory_bytes=None)], name="y"
    )
    table = comparison_table(reported_runs([long, killed]))
    assert [(column.header, column.role) for column in table.columns] == [("Metric", ""), ("x", "x"), ("y", "y")]
    found = rows(table)
    assert found["Alerts"] == ("1", "0")
    assert found["Steps"] == ("1,000", "2")
    assert found["Skipped steps"] == ("0", "1")
    assert found["Share skipped"] == ("0 %", "50 %")
    assert found["Final loss"] == ("0.5000", "2.000, 1.000")
    assert found["Final scale"] == ("1,024", "1,024, 1,024")
    assert found["Step time (ms)"] == ("40.00", "40.00")
    assert found["Peak memory (GiB)"] == ("3.000", "3.000")
    assert found["Lasted"] == ("90 min", "–")
    assert found["Ended"] == ("finished", "not recorded")


def test_a_run_that_was_resumed_and_killed_has_no_duration() -> None:
    killed = samples.saved([*samples.complete(3), samples.start(), samples.step(4)], name="x")
    found = rows(comparison_table(reported_runs([killed, samples.saved([samples.start()], name="y")])))
    assert found["Lasted"] == ("–", "–")
    assert found["Ended"] == ("not recorded", "not recorded")
    assert found["Precision"] == ("fp16", "–")
    assert found["Share skipped"] == ("0 %", "–")


@pytest.mark.parametrize(
    ("scale", "text"), [(65536.0, "65,536"), (2.0**24, "16,777,216"), (0.25, "0.25"), (2.0**40, "1.1e+12"), (math.inf, "inf"), (None, "–")]
)
def test_scales_have_all_their_digits(scale: float | None, text: str) -> None:
    assert scale_text(scale) == text
