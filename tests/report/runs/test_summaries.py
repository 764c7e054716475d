from __future__ import annotations

import math

import pytest

from halfstep.report.runs.summaries import run_summary
from tests.report import run_samples as samples


def test_a_run_is_told_by_its_numbers() -> None:
    records = [
        samples.step(1, skipped=True, scale=2048.0, loss=4.0, step_time_s=0.9),
        samples.step(2, loss=2.0, step_time_s=0.010),
        samples.step(3, loss=math.inf, step_time_s=0.030, memory_bytes=5 * 2**30),
        samples.step(4, loss=3.0, step_time_s=0.020, memory_bytes=None, lr=0.5),
    ]
    saved = samples.saved([samples.start(), *records, samples.alert(), samples.action(), samples.end()])
    summary = run_summary(saved)
    assert (summary.name, summary.folder) == ("digits", str(saved.folder))
    assert (summary.starts, summary.ends) == ((samples.start(),), (samples.end(),))
    assert (summary.steps, summary.skips, summary.nonfinite_losses) == (4, 1, 1)
    assert (summary.median_step_time_ms, summary.peak_memory_mib) == (20.0, 5 * 1024)
    assert (summary.precisions, summary.alerts, summary.actions) == (("fp16",), (samples.alert(),), (samples.action(),))
    assert (summary.recorded_alerts, summary.notes) == (None, ())
    (one,) = summary.optimizers
    assert (one.optimizer, one.steps, one.skips) == ("", 4, 1)
    assert (one.first_loss, one.last_loss, one.best_loss, one.best_step, one.settled_loss) == (4.0, 3.0, 2.0, 2, 3.0)
    assert (one.final_scale, one.final_lr) == (1024.0, 0.5)


def test_each_optimizer_is_told_by_itself() -> None:
    records = [
        samples.step(number, optimizer=name, loss=loss, scale=scale, skipped=skipped)
        for number, name, loss, scale, skipped in ((1, "a", 2.0, 8.0, False), (2, "b", 9.0, 1.0, True), (3, "a", 1.0, 4.0, False))
    ]
    first, second = run_summary(samples.saved(records)).optimizers
    assert (first.optimizer, first.steps, first.skips, first.best_step, first.final_scale) == ("a", 2, 0, 3, 4.0)
    assert (second.optimizer, second.steps, second.skips, second.best_step, second.final_scale) == ("b", 1, 1, 2, None)


def test_the_settled_loss_is_the_median_of_the_last_hundred() -> None:
    summary = run_summary(samples.saved([*samples.steps(50, loss=9.0), *samples.steps(100, first=51, loss=1.0)]))
    assert summary.optimizers[0].settled_loss == 1.0


def test_what_nobody_knows_is_none() -> None:
    summary = run_summary(samples.saved([samples.step(1, loss=math.nan, scale=1.0, memory_bytes=None, step_time_s=math.nan)]))
    (one,) = summary.optimizers
    assert (summary.median_step_time_ms, summary.peak_memory_mib, summary.nonfinite_losses) == (None, None, 0)
    assert (one.first_loss, one.last_loss, one.best_loss, one.best_step, one.settled_loss, one.final_scale) == (None,) * 6


def test_a_run_without_a_step_has_a_summary() -> None:
    summary = run_summary(samples.saved([samples.start()]))
    assert (summary.steps, summary.optimizers, summary.epochs, summary.precisions) == (0, (), (), ())
    assert not summary.has_findings


def test_precisions_are_in_the_order_of_their_steps() -> None:
    assert run_summary(samples.saved([samples.step(1), samples.step(2, precision="bf16")])).precisions == ("fp16", "bf16")


def test_a_later_judgement_keeps_what_was_recorded() -> None:
    saved = samples.saved([samples.step(1), samples.alert()])
    now = samples.alert("skip_rate")
    summary = run_summary(saved, name="other", judged=[now])
    assert (summary.name, summary.alerts, summary.recorded_alerts) == ("other", (now,), (samples.alert(),))
    assert run_summary(saved, judged=[]).recorded_alerts == (samples.alert(),)


class TestEpochs:
    def test_the_steps_of_an_epoch_are_told_together_wherever_they_stand(self) -> None:
        records = [
            samples.step(1, epoch=1, loss=1.0, scale=8.0, step_time_s=0.01),
            samples.step(2, epoch=1, loss=3.0, scale=4.0, step_time_s=0.03, skipped=True),
            samples.step(3, epoch=2, loss=math.nan),
            samples.step(1, epoch=1, loss=8.0, scale=2.0, step_time_s=0.02),
            samples.step(5, epoch=None),
        ]
        unknown, first, second = run_summary(samples.saved(records)).epochs
        assert (first.epoch, first.first_step, first.last_step, first.steps, first.skips) == (1, 1, 2, 3, 1)
        assert (first.loss, first.scale) == (3.0, 2.0)
        assert first.step_time_ms == pytest.approx(15.0)
        assert (second.epoch, second.loss) == (2, None)
        assert (unknown.epoch, unknown.first_step) == (None, 5)

    @pytest.mark.parametrize(("steps", "parts"), [(3, 3), (10, 10), (95, 10)])
    def test_without_epochs_there_are_ten_parts_at_most(self, steps: int, parts: int) -> None:
        epochs = run_summary(samples.saved(samples.steps(steps))).epochs
        assert len(epochs) == parts
        assert {epoch.epoch for epoch in epochs} == {None}
        assert sum(epoch.steps for epoch in epochs) == steps
        assert (epochs[0].first_step, epochs[-1].last_step) == (1, steps)
        assert max(epoch.steps for epoch in epochs) - min(epoch.steps for epoch in epochs) <= 1
