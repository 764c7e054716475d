from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep
from halfstep.comparison import race as race_module
from halfstep.errors import ConfigurationError, InvalidTypeError, TaskError
from halfstep.hardware import profile_step
from halfstep.records import Comparison, Interval, PrecisionRun, Verdict
from halfstep.task import TaskFactory
from tests.comparison.tasks import Clock, current_precision, make_factory, noisy_task, square, vanishing_task


def compare(task: TaskFactory | str, **changes: Any) -> Comparison:
    values: dict[str, Any] = {"steps": 4, "warmup": 1, "seeds": 2, "device": "cpu"}
    return halfstep.compare(task, **(values | changes))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    made.install(monkeypatch)
    return made


def by_precision(comparison: Comparison) -> tuple[dict[str, PrecisionRun], dict[str, Verdict]]:
    return {run.precision: run for run in comparison.runs}, {verdict.precision: verdict for verdict in comparison.verdicts}


class TestMeasurements:
    def test_times_and_speedups(self, clock: Clock) -> None:
        runs, verdicts = by_precision(compare(make_factory(clock.loss)))
        assert runs["bf16"].step_time_ms == Interval(median=500.0, low=500.0, high=500.0)
        assert runs["bf16"].step_times_ms == (500.0,) * 8
        assert {name: run.samples_per_s for name, run in runs.items()} == {"fp32": 8.0, "bf16": 16.0, "fp16": 2.0}
        assert verdicts["bf16"].speedup == Interval(median=2.0, low=2.0, high=2.0)
        assert verdicts["fp16"].speedup == Interval(median=0.25, low=0.25, high=0.25)
        assert verdicts["bf16"].reason.startswith("bf16 is 2.00 times as fast as fp32 (95 % interval 2.00 to 2.00)")

    def test_the_speedup_is_taken_round_by_round(self, clock: Clock) -> None:
        calls: list[str] = []

        def loss(model: nn.Module, batch: Tensor) -> Tensor:
            precision = current_precision()
            calls.append(precision)
            # The machine gets slower all the time, for both alike.
            clock.costs[precision] = (2.0 if precision == "fp32" else 1.0) * 2.0 ** calls.count(precision)
            return clock.loss(model, batch)

        comparison = compare(make_factory(loss), precisions=["fp32", "bf16"])
        assert comparison.runs[0].step_time_ms != Interval(median=2.0, low=2.0, high=2.0)
        assert comparison.verdicts[0].speedup == Interval(median=2.0, low=2.0, high=2.0)

    def test_few_rounds_are_no_95_percent(self, clock: Clock) -> None:
        comparison = compare(make_factory(clock.loss), precisions=["bf16"], steps=1, seeds=2)
        assert "(range of only 2 pairs of steps, 2.00 to 2.00)" in comparison.verdicts[0].reason

    def test_losses(self) -> None:
        run = compare(make_factory(), precisions=["fp32"], steps=9, warmup=1, seeds=[4, 2]).runs[0]
        assert [len(seed) for seed in run.losses] == [10, 10]
        assert run.first_loss == pytest.approx((run.losses[0][0] + run.losses[1][0]) / 2)
        assert run.final_loss == pytest.approx(sum(run.losses[0][-2:] + run.losses[1][-2:]) / 4)

    def test_memory_adds_up(self) -> None:
        runs, verdicts = by_precision(compare(make_factory()))
        for run in runs.values():
            assert run.memory is not None
            assert run.peak_memory_mib == run.memory.parameters + run.memory.optimizer + run.memory.batch + run.memory.step
            assert run.memory.parameters == (4 * 2 + 2) * 4 / 2**20
            assert run.memory_source == "tracked_tensors"
        assert verdicts["bf16"].memory_ratio == (runs["bf16"].peak_memory_mib or 0) / (runs["fp32"].peak_memory_mib or 1)

    def test_memory_does_not_depend_on_who_else_runs(self) -> None:
        together, _ = by_precision(compare(make_factory(model=lambda: nn.Linear(4, 4096)), steps=1, seeds=1))
        pair, _ = by_precision(compare(make_factory(model=lambda: nn.Linear(4, 4096)), precisions=["fp16"], steps=1, seeds=1))
        assert {name: together[name].memory for name in pair} == {name: run.memory for name, run in pair.items()}

    def test_garbage_of_others_does_not_count_as_given_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        collected: list[int] = []
        monkeypatch.setattr(race_module, "gc", SimpleNamespace(collect=lambda: collected.append(1)))
        compare(make_factory(), steps=1, seeds=3)
        assert len(collected) == 3, "once for each precision, before the step whose memory counts"

    def test_skipped_steps_and_scale(self) -> None:
        def loss(model: Any, batch: Tensor) -> Tensor:
            out: Tensor = (model(batch) * 4).sum()
            return out

        runs, _ = by_precision(compare(make_factory(loss, lr=0.0)))
        assert runs["fp16"].skipped_steps == sum(map(len, runs["fp16"].skipped_at)) > 0
        assert runs["fp16"].final_scale == 65536.0 / 2 ** len(runs["fp16"].skipped_at[-1])
        assert (runs["fp32"].skipped_steps, runs["fp32"].final_scale) == (0, None)

    def test_batches_that_tell_no_samples(self) -> None:
        factory = make_factory(lambda model, batch: square(model, torch.ones(2, 4)), batches=lambda: [3])
        comparison = compare(factory, precisions=["fp32"], steps=1)
        assert (comparison.runs[0].samples_per_s, comparison.settings.batch_size) == (None, None)


class TestJudgement:
    def test_fp32_beside_itself_is_the_same(self) -> None:
        comparison = compare(noisy_task, precisions=["fp32", "fp32"], steps=6)
        (verdict,) = comparison.verdicts
        assert verdict.loss_parity == "same"
        assert "every loss is identical, bit for bit" in verdict.reason
        assert verdict.memory_ratio == 1.0
        assert comparison.conclusion == f"fp32 was compared with itself: {verdict.reason}"

    def test_fp32_beside_itself_is_as_fast(self, clock: Clock) -> None:
        (verdict,) = compare(make_factory(clock.loss), precisions=["fp32", "fp32"]).verdicts
        assert verdict.speedup == Interval(median=1.0, low=1.0, high=1.0)

    def test_vanishing_gradients_are_worse_without_loss_scaling(self) -> None:
        settings: dict[str, Any] = {"precisions": ["fp32", "fp16"], "steps": 20, "seeds": 3}
        assert compare(vanishing_task, loss_scale="none", **settings).verdicts[0].loss_parity == "worse"
        assert compare(vanishing_task, loss_scale="dynamic", **settings).verdicts[0].loss_parity == "same"

    def test_two_comparisons_give_the_same_losses_bit_for_bit(self) -> None:
        first, second = compare(noisy_task, seeds=[1, 2]), compare(noisy_task, seeds=[1, 2])
        assert [run.losses for run in first.runs] == [run.losses for run in second.runs]

    def test_a_precision_that_fails_is_judged_and_the_others_are_measured(self) -> None:
        def loss(model: Any, batch: Tensor) -> Tensor:
            if current_precision() == "fp16":
                raise NotImplementedError("no half kernel")
            return square(model, batch)

        runs, verdicts = by_precision(compare(make_factory(loss)))
        assert [(run.outcome, run.steps) for run in runs.values()] == [("complete", 8), ("complete", 8), ("failed", 0)]
        assert runs["fp16"].note.startswith("fp16 failed in step 1: NotImplementedError: no half kernel (")
        assert (runs["fp16"].first_loss, runs["fp16"].final_loss, runs["fp16"].peak_memory_mib) == (None, None, None)
        assert (verdicts["fp16"].speedup, verdicts["fp16"].memory_ratio, verdicts["fp16"].loss_parity) == (None, None, "inconclusive")
        assert verdicts["fp16"].reason.startswith(
            "fp16 did not run to the end (fp16 failed in step 1: NotImplementedError: no half kernel ("
        )

    def test_a_precision_that_fails_late_is_not_recommended_for_its_speed(self, clock: Clock) -> None:
        def loss(model: Any, batch: Tensor) -> Tensor:
            if clock.steps.count("bf16") == 4 and current_precision() == "bf16":
                raise RuntimeError("out of luck")
            return clock.loss(model, batch)

        comparison = compare(make_factory(loss), precisions=["bf16"])
        assert comparison.runs[1].steps == 3
        assert comparison.verdicts[0].speedup is None
        assert comparison.conclusion.startswith(
            "Stay with fp32: bf16 did not run to the end (bf16 failed in step 5: RuntimeError: out of luck"
        )

    def test_a_precision_that_is_stopped(self, clock: Clock) -> None:
        clock.costs["fp16"] = 10.5
        runs, verdicts = by_precision(compare(make_factory(clock.loss)))
        assert (runs["fp16"].outcome, runs["fp16"].steps) == ("stopped", 0)
        assert "was not measured (it was stopped after 10.5 s in one step; fp32 needs 1 s)" in verdicts["fp16"].reason


def interrupted_at(call: int, clock: Clock) -> TaskFactory:
    def loss(model: Any, batch: Tensor) -> Tensor:
        if len(clock.steps) == call:
            raise KeyboardInterrupt
        return clock.loss(model, batch)

    return make_factory(loss)


class TestCtrlC:
    def test_before_there_is_a_result(self, clock: Clock) -> None:
        with pytest.raises(KeyboardInterrupt):
            compare(interrupted_at(3, clock))

    def test_in_the_first_round(self, clock: Clock) -> None:
        comparison = compare(interrupted_at(4, clock))
        runs, verdicts = by_precision(comparison)
        assert comparison.interrupted
        assert [run.steps for run in runs.values()] == [1, 0, 0]
        assert verdicts["bf16"].speedup is None
        assert verdicts["bf16"].loss_parity == "inconclusive"
        assert verdicts["bf16"].reason.startswith("bf16 was not measured; peak memory is")

    def test_in_the_second_seed_the_first_one_counts(self, clock: Clock) -> None:
        # A seed has 5 steps of each precision, 15 in all. The second one's losses have only begun to fall.
        runs, verdicts = by_precision(compare(interrupted_at(20, clock), seeds=3))
        whole, _ = by_precision(compare(make_factory(clock.loss), seeds=1))
        assert [run.steps for run in runs.values()] == [4, 4, 5]
        assert {name: run.final_loss for name, run in runs.items()} == {name: run.final_loss for name, run in whole.items()}
        assert "one seed shows no spread" in verdicts["bf16"].reason

    def test_at_the_very_start_of_the_second_seed(self, clock: Clock) -> None:
        runs, _ = by_precision(compare(interrupted_at(15, clock)))
        assert all(run.final_loss is not None and run.first_loss is not None for run in runs.values())
        assert [len(run.losses) for run in runs.values()] == [1, 1, 1]

    def test_it_is_saved_and_read_back(self, clock: Clock) -> None:
        comparison = compare(interrupted_at(8, clock))
        assert Comparison.from_json(comparison.to_json()) == comparison


class TestExplanations:
    def test_without_a_measured_time_nothing_is_explained(self, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
        def blind(*arguments: Any, **settings: Any) -> Any:
            result, profile = profile_step(*arguments, **settings)
            return result, replace(profile, total_us=0.0, mean_operation_us=0.0, lowered_share=0.0)

        monkeypatch.setattr("halfstep.comparison.contender.profile_step", blind)
        clock.costs["bf16"] = 2.0
        _, verdicts = by_precision(compare(make_factory(clock.loss), precisions=["bf16"]))
        assert "because" not in verdicts["bf16"].reason.replace("this CPU does not compute bf16", "")
        assert "operations" not in verdicts["bf16"].reason

    def test_a_failing_probe_loses_no_measurement(self, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
        def fails(precision: str, *, device: torch.device) -> float:
            raise torch.OutOfMemoryError("out of memory")

        monkeypatch.setattr("halfstep.comparison.measurement.matmul_gain", fails)
        runs, _ = by_precision(compare(make_factory(clock.loss), precisions=["bf16"]))
        assert runs["bf16"].steps == 8

    def test_compiling_needs_a_step_for_itself(self) -> None:
        with pytest.raises(ConfigurationError, match=r"the first step compiles, so at least 2 steps of warm-up are needed"):
            compare(make_factory(), compile=True, warmup=1)


class TestArguments:
    @pytest.mark.parametrize(
        ("argument", "value", "kind", "message"),
        [
            (
                "precisions",
                "fp32,bf16",
                InvalidTypeError,
                r"precisions='fp32,bf16'\) takes a sequence of names, such as \['fp32', 'bf16'\]",
            ),
            ("precisions", [], ConfigurationError, "is empty. Allowed are fp32, bf16, fp16"),
            ("precisions", None, InvalidTypeError, "takes a sequence of names, .* not None"),
            ("precisions", ["fp61"], ConfigurationError, "Unknown precision 'fp61'. Allowed are fp32, bf16 and fp16. Did you mean 'fp16'"),
            ("precisions", [16], InvalidTypeError, "named by a string"),
            ("steps", 0, ConfigurationError, r"compare\(steps=0\) must be 1 or more"),
            ("steps", 2.0, InvalidTypeError, "takes a whole number, not 2.0"),
            ("steps", True, InvalidTypeError, "takes a whole number, not True"),
            ("warmup", 0, ConfigurationError, r"compare\(warmup=0\) must be 1 or more"),
            ("seeds", 0, ConfigurationError, r"compare\(seeds=0\) must be 1 or more"),
            ("seeds", [], ConfigurationError, "takes how many, or whole numbers from 0"),
            ("seeds", [-1], ConfigurationError, "takes how many, or whole numbers from 0"),
            ("seeds", [2**32], ConfigurationError, r"whole numbers from 0 to 2\*\*32 - 1"),
            ("seeds", ["1"], ConfigurationError, "takes how many, or whole numbers from 0"),
            ("seeds", [1, 2, 1], ConfigurationError, "names a seed twice"),
            ("seeds", 2.5, InvalidTypeError, "takes how many, or a sequence of whole numbers, not 2.5"),
            ("max_slowdown", 1, ConfigurationError, "must be above 1; inf never stops"),
            ("max_slowdown", float("nan"), ConfigurationError, "must be above 1"),
            ("max_slowdown", "2", InvalidTypeError, "takes a number, not '2'"),
            ("loss_scale", "dynamite", ConfigurationError, "allowed are dynamic and none. Did you mean 'dynamic'"),
            ("device", "gpu", ConfigurationError, "Unknown device 'gpu'. Allowed are auto, cpu, cuda and cuda:N"),
            ("device", "meta", ConfigurationError, "Device type 'meta' is not supported. Allowed are cpu and cuda"),
            ("task", 5, InvalidTypeError, "takes a task's name or a factory, not a int"),
            ("task", "nowhere.py:task", TaskError, "There is no file 'nowhere.py'"),
        ],
    )
    def test_what_is_not_allowed_is_refused_before_any_step(
        self, argument: str, value: object, kind: type[Exception], message: str
    ) -> None:
        def factory(seed: int) -> Any:
            raise AssertionError("nothing should have run")

        with pytest.raises(kind, match=message):
            halfstep.compare(**{"task": factory, "device": "cpu", argument: value})  # type: ignore[arg-type]

    @pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
    @pytest.mark.parametrize("name", ["cuda", "cuda:1"])
    def test_a_device_that_is_not_there(self, name: str) -> None:
        with pytest.raises(ConfigurationError, match=f"Device '{name}' was asked for, but this torch .* sees no CUDA device. Use cpu"):
            compare(make_factory(), device=name)

    @pytest.mark.parametrize(
        ("named", "line_up"),
        [(["bf16"], ["fp32", "bf16"]), (["fp16", "fp32"], ["fp32", "fp16"]), (("fp32",), ["fp32"]), (iter(["fp16"]), ["fp32", "fp16"])],
    )
    def test_the_baseline_is_put_first(self, named: Any, line_up: list[str]) -> None:
        comparison = compare(make_factory(), precisions=named, steps=1, seeds=1)
        assert [run.precision for run in comparison.runs] == line_up
        assert all(verdict.baseline == "fp32" for verdict in comparison.verdicts)

    def test_the_settings_are_recorded(self) -> None:
        comparison = compare(make_factory(), precisions=["fp32"], steps=2, warmup=3, seeds=[7, 11], channels_last=True, loss_scale="none")
        settings = comparison.settings
        assert (settings.steps, settings.warmup, settings.seeds, settings.batch_size) == (2, 3, (7, 11), 8)
        assert (settings.channels_last, settings.compile, settings.loss_scale) == (True, False, "none")
        assert comparison.device.type == "cpu"
        assert comparison.conclusion == "Nothing was compared with fp32."

    def test_a_task_by_name(self, tmp_path: Path) -> None:
        file = tmp_path / "small.py"
        file.write_text("from tests.comparison.tasks import make_factory\n\ntask = make_factory()\n")
        assert compare(f"{file}:task", precisions=["fp32"], steps=1).task == f"{file}:task"

    def test_a_factory_without_a_name(self) -> None:
        assert compare(partial(make_factory()), precisions=["fp32"], steps=1).task == "partial"


class TestTasksThatCannotRun:
    @pytest.mark.parametrize(
        ("factory", "message"),
        [
            (lambda seed: {}, r"returned \{\} \(type dict\); it must return a halfstep.Task"),
            (lambda seed: None, "returned None; it must return a halfstep.Task"),
            (lambda: None, "failed with seed 0: TypeError"),
            (make_factory(batches=list), "has no batches"),
            (make_factory(lambda model, batch: model(batch)), "must be a scalar tensor, not one of shape"),
            (make_factory(lambda model, batch: 1.0), "must be a scalar tensor, not a float"),
            (make_factory(model=nn.Identity), "failed with seed 0: ValueError: optimizer got an empty parameter list"),
        ],
    )
    def test_they_are_refused_with_a_reason(self, factory: Any, message: str) -> None:
        with pytest.raises(halfstep.HalfstepError, match=message):
            compare(factory)


def test_the_json_has_the_agreed_form() -> None:
    plain = json.loads(compare(make_factory(), steps=1, seeds=1).to_json())
    assert plain["schema"] == 1
    assert isinstance(plain["task"], str)
    assert plain["device"]["type"] == "cpu"
    for run in plain["runs"]:
        assert set(run) >= {"samples_per_s", "peak_memory_mib", "first_loss", "final_loss", "skipped_steps", "final_scale"}
        assert set(run["step_time_ms"]) == {"median", "low", "high"}
        assert (run["steps"], run["memory_source"]) == (1, "tracked_tensors")
    assert [verdict["precision"] for verdict in plain["verdicts"]] == ["bf16", "fp16"]
    for verdict in plain["verdicts"]:
        assert set(verdict) == {"precision", "baseline", "speedup", "memory_ratio", "loss_parity", "reason"}
        assert verdict["baseline"] == "fp32"
        assert set(verdict["speedup"]) == {"median", "low", "high"}


def test_the_interval_spans_what_the_seeds_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of one seed share an offset: fifty of them are no fifty independent samples."""
    clock = Clock(costs={"fp32": 1.0, "bf16": 1.0})
    clock.install(monkeypatch)

    def factory(seed: int) -> Any:
        clock.costs["bf16"] = {0: 0.5, 1: 1.0, 2: 1.0}[seed]
        return make_factory(clock.loss)(seed)

    # A third of the rounds, which an interval of 95 % over all of them as if they were independent would leave out.
    _, verdicts = by_precision(compare(factory, precisions=["bf16"], steps=12, seeds=3))
    assert verdicts["bf16"].speedup == Interval(median=1.0, low=1.0, high=2.0)
