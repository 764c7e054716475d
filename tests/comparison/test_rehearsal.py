"""Comparisons with the numerics of another device: `compare(target=...)`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep
from halfstep.comparison.contender import Contender
from halfstep.errors import ConfigurationError, StepOrderError
from halfstep.hardware import native_precisions
from halfstep.numerics import rehearse
from halfstep.records import Comparison
from halfstep.task import TaskFactory
from tests.comparison.tasks import Clock, current_precision, make_factory, noisy_task, options, square


class Rehearsals:
    """Stands in for `rehearse`: notes what it was asked for and how deep it is."""

    def __init__(self) -> None:
        self.made: list[tuple[str, torch.dtype]] = []
        self.depth = 0

    @contextmanager
    def __call__(self, target: str = "cuda", dtype: torch.dtype = torch.float16, *, tf32: bool = False) -> Iterator[None]:
        if target not in ("cuda", "cpu"):
            raise ConfigurationError(f"no lists for {target!r}")
        assert not self.depth, "rehearsals do not nest"
        self.made.append((target, dtype))
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1


@pytest.fixture
def rehearsals(monkeypatch: pytest.MonkeyPatch) -> Rehearsals:
    made = Rehearsals()
    for module in ("contender", "measurement"):
        monkeypatch.setattr(f"halfstep.comparison.{module}.rehearse", made)
    return made


def said_by(comparison: Comparison) -> str:
    return " ".join([comparison.conclusion, *(verdict.reason for verdict in comparison.verdicts), *(run.note for run in comparison.runs)])


def compare(task: Any, **changes: Any) -> Comparison:
    values: dict[str, Any] = {"steps": 3, "warmup": 2, "seeds": 2, "target": "cuda"}
    return halfstep.compare(task, **(values | changes))


class TestSteps:
    def test_each_step_is_rehearsed_and_nothing_else_is(self, rehearsals: Rehearsals) -> None:
        seen = []

        def loss(model: nn.Module, batch: Tensor) -> Tensor:
            seen.append(("forward", rehearsals.depth))
            out: Any = square(model, batch)
            out.register_hook(lambda grad: seen.append(("backward", rehearsals.depth)))
            return out  # type: ignore[no-any-return]

        def factory(seed: int) -> Any:
            assert not rehearsals.depth
            task = make_factory(loss)(seed)
            task.optimizer.register_step_post_hook(lambda *_: seen.append(("optimizer", rehearsals.depth)))
            return task

        compare(factory, precisions=["fp32", "bf16"], seeds=1)
        assert seen == [("forward", 1), ("backward", 1), ("optimizer", 1)] * 10
        assert len(rehearsals.made) == 1 + 10, "the first one is for the check alone"
        assert not rehearsals.depth

    @pytest.mark.parametrize(
        ("what", "dtype"),
        [
            ("fp32", torch.float16),
            ("bf16", torch.bfloat16),
            ("fp16", torch.float16),
            ("fp32; 0=bf16", torch.bfloat16),
            ("bf16; 0=fp32", torch.bfloat16),
            ("bf16; 0=fp16", torch.float16),
            ("fp16; 0=bf16", torch.float16),
            ("O2", torch.float16),
            ("fp32; 0=fp32", torch.float16),
        ],
    )
    def test_in_the_dtype_of_the_precision_or_policy(self, rehearsals: Rehearsals, what: str, dtype: torch.dtype) -> None:
        factory = make_factory(model=lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
        policy = None if what in ("fp32", "bf16", "fp16") else halfstep.Policy.parse(what)
        contender = Contender(factory, precision=what, policy=policy, seed=0, options=options(target="cuda"))
        try:
            contender.step()
        finally:
            contender.close()
        assert rehearsals.made == [("cuda", dtype)]

    def test_a_step_that_fails_ends_its_rehearsal(self, rehearsals: Rehearsals) -> None:
        def loss(model: nn.Module, batch: Tensor) -> Tensor:
            if current_precision() == "fp16":
                raise NotImplementedError("no half here")
            return square(model, batch)

        comparison = compare(make_factory(loss))
        assert not rehearsals.depth
        assert [run.outcome for run in comparison.runs] == ["complete", "complete", "failed"]
        assert comparison.verdicts[1].reason.startswith(
            "fp16 did not run to the end on cuda (rehearsed on this CPU): fp16 failed in step 1: NotImplementedError: no half here"
        )
        assert comparison.conclusion.endswith("fp16 did not run to the end; time and memory were not measured.")

    def test_without_a_target_nothing_is_rehearsed(self, rehearsals: Rehearsals) -> None:
        assert compare(make_factory(), target=None, device="cpu", precisions=["bf16"]).target == ""
        assert rehearsals.made == []


class TestMeasurements:
    def test_losses_and_skips_are_the_result_and_time_and_memory_are_absent(self, rehearsals: Rehearsals) -> None:
        comparison = compare(noisy_task)
        assert comparison.target == "cuda"
        assert comparison.device.type == "cpu"
        for run in comparison.runs:
            assert (run.step_time_ms, run.samples_per_s, run.peak_memory_mib, run.memory) == (None, None, None, None)
            assert (run.step_times_ms, run.steps, run.note, run.outcome) == ((), 0, "", "complete")
            assert [len(seed) for seed in run.losses] == [5, 5]
            assert run.first_loss is not None
            assert run.final_loss is not None
        assert comparison.runs[2].final_scale is not None
        for verdict in comparison.verdicts:
            assert (verdict.speedup, verdict.memory_ratio) == (None, None)
            assert verdict.reason.endswith("time and memory were not measured.")
        assert comparison.settings.batch_size == 4
        assert Comparison.from_json(comparison.to_json()) == comparison

    def test_losses_are_those_of_steps_that_are_measured(self, rehearsals: Rehearsals) -> None:
        # The stand-in changes no numerics, so neither may the way in which the steps are run.
        rehearsed, measured = compare(noisy_task), compare(noisy_task, target=None, device="cpu")
        assert [run.losses for run in rehearsed.runs] == [run.losses for run in measured.runs]
        assert [run.final_loss for run in rehearsed.runs] == [run.final_loss for run in measured.runs]

    def test_no_step_is_profiled_watched_or_weighed(self, rehearsals: Rehearsals, monkeypatch: pytest.MonkeyPatch) -> None:
        def never(*arguments: Any, **settings: Any) -> Any:
            raise AssertionError("not in a rehearsal")

        monkeypatch.setattr(Contender, "profiled_step", never)
        monkeypatch.setattr("halfstep.comparison.contender.BeforeEachOperation", never)
        monkeypatch.setattr("halfstep.comparison.measurement.matmul_gain", never)
        assert {run.outcome for run in compare(make_factory(), steps=1, warmup=1).runs} == {"complete"}

    def test_slowness_stops_nothing(self, rehearsals: Rehearsals, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = Clock(costs={"fp32": 1.0, "bf16": 1.0, "fp16": 1e6})
        clock.install(monkeypatch)
        assert {run.outcome for run in compare(make_factory(clock.loss), max_slowdown=2.0, steps=6).runs} == {"complete"}
        assert clock.now > 1e6

    def test_nothing_is_said_of_slowness_or_emulation(self, rehearsals: Rehearsals) -> None:
        if "fp16" in native_precisions(torch.device("cpu")):
            pytest.skip("this CPU computes fp16 in hardware")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            comparison = compare(make_factory(model=lambda: nn.Sequential(nn.Linear(4, 2))), policies=["fp16; 0=fp32"])
        assert not any(word in said_by(comparison) for word in ("emulat", "slow", "fast", "speed", "in hardware"))

    def test_ctrl_c_brings_what_is_known(self, rehearsals: Rehearsals) -> None:
        calls: list[int] = []

        def loss(model: nn.Module, batch: Tensor) -> Tensor:
            calls.append(1)
            if len(calls) == 9:
                raise KeyboardInterrupt
            return square(model, batch)

        comparison = compare(make_factory(loss))
        assert comparison.interrupted
        assert [[len(seed) for seed in run.losses] for run in comparison.runs] == [[3], [3], [2]]
        assert not rehearsals.depth

    def test_ctrl_c_in_the_warm_up_brings_nothing(self, rehearsals: Rehearsals) -> None:
        calls: list[int] = []

        def loss(model: nn.Module, batch: Tensor) -> Tensor:
            calls.append(1)
            if len(calls) == 5:
                raise KeyboardInterrupt
            return square(model, batch)

        with pytest.raises(KeyboardInterrupt):
            compare(make_factory(loss))


class TestRefusals:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"target": "cdua"}, "no lists for 'cdua'"),
            ({"target": ""}, "no lists for ''"),
            ({"device": "cuda"}, r"target='cuda', device='cuda'\): the numerics of cuda are rehearsed on a CPU. Leave device out"),
            ({"device": "cuda:1"}, "or leave target out to measure cuda:1 itself"),
            ({"device": "gpu"}, "Unknown device 'gpu'"),
            ({"compile": True}, r"target='cuda', compile=True\): what is compiled cannot be rehearsed. Leave compile out"),
        ],
    )
    def test_what_cannot_be_rehearsed_is_refused_before_any_step(
        self, rehearsals: Rehearsals, arguments: dict[str, Any], message: str
    ) -> None:
        def factory(seed: int) -> Any:
            raise AssertionError("nothing should have run")

        with pytest.raises(ConfigurationError, match=message):
            compare(factory, **arguments)

    @pytest.mark.parametrize("device", ["auto", "cpu", "cpu:3"])
    def test_the_cpu_is_where_it_runs(self, rehearsals: Rehearsals, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        assert compare(make_factory(), device=device, steps=1, seeds=1).device.type == "cpu"


def attending(seen: dict[str, torch.dtype]) -> TaskFactory:
    """A task with an attention of its own, which notes the dtype of its weights in each precision."""

    def loss(model: Any, batch: Tensor) -> Tensor:
        hidden = model(batch)
        weights = (hidden @ hidden.transpose(-1, -2)).softmax(-1)
        seen[current_precision()] = weights.dtype
        out: Tensor = (weights @ hidden).float().square().mean()
        return out

    return make_factory(loss, model=lambda: nn.Linear(16, 16), batches=lambda: [torch.randn(4, 8, 16) for _ in range(2)], lr=0.01)


def overflowing(seed: int) -> Any:
    """A task whose activations are beyond fp16 and within bf16."""

    def loss(model: Any, batch: Tensor) -> Tensor:
        out: Tensor = (model(batch * 1e6) * 1e-6).square().mean()
        return out

    return make_factory(loss)(seed)


class TestNumerics:
    """With the real rehearsal."""

    def test_softmax_runs_in_fp32_as_on_the_target(self) -> None:
        seen, own = dict[str, torch.dtype](), dict[str, torch.dtype]()
        there = compare(attending(seen), precisions=["fp16", "bf16"], steps=2)
        here = compare(attending(own), precisions=["fp16", "bf16"], steps=2, target=None, device="cpu")
        assert seen == {"fp32": torch.float32, "fp16": torch.float32, "bf16": torch.float32}
        assert own == {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
        assert there.runs[0].losses == here.runs[0].losses, "fp32 is what it is"
        for one, other in zip(there.runs[1:], here.runs[1:], strict=True):
            assert one.losses != other.losses
            assert one.losses != there.runs[0].losses

    def test_an_overflow_skips_in_fp16_alone(self) -> None:
        comparison = compare(overflowing)
        assert [run.skipped_steps for run in comparison.runs] == [0, 0, 10]
        assert comparison.runs[2].final_scale == 65536.0 / 2**5
        assert "; 10 of 10 steps were skipped; time and memory were not measured." in comparison.verdicts[1].reason
        assert comparison.verdicts[1].loss_parity == "worse"
        assert "fp16 trains worse than fp32" in comparison.conclusion

    def test_what_the_target_refuses_fails(self) -> None:
        def loss(model: Any, batch: Tensor) -> Tensor:
            return nn.functional.binary_cross_entropy(model(batch).sigmoid(), torch.full((8, 2), 0.5).to(model(batch).dtype))

        comparison = compare(make_factory(loss))
        assert [run.outcome for run in comparison.runs] == ["complete", "failed", "failed"]
        assert "binary_cross_entropy" in comparison.runs[1].note
        assert comparison.conclusion == (
            "bf16 and fp16 did not run to the end on cuda (rehearsed on this CPU); time and memory were not measured."
        )

    def test_policies_hold_within_it(self) -> None:
        seen = dict[str, torch.dtype]()
        comparison = compare(attending(seen), precisions=["fp32"], policies=["fp16; op:softmax=fp16"], steps=1)
        assert seen["fp16"] is torch.float16, "which cuda alone would have run in fp32"
        assert comparison.runs[1].outcome == "complete"
        assert [effect.name for effect in comparison.policies] == ["fp16; op:softmax=fp16"]

    def test_nothing_is_left_behind(self) -> None:
        before = torch.get_autocast_dtype("cpu")
        compare(attending({}), steps=1, seeds=1)
        with torch.autocast("cpu", dtype=torch.float16):
            assert torch.ones(2, dtype=torch.float16).softmax(-1).dtype is torch.float16
        assert torch.get_autocast_dtype("cpu") is before

    def test_each_numerics_is_its_own(self) -> None:
        # Alone or beside others, a precision trains the same: a rehearsal ends before the next one's turn.
        together = {run.precision: run.losses for run in compare(noisy_task).runs}
        assert compare(noisy_task, precisions=["fp16"]).runs[1].losses == together["fp16"]
        assert compare(noisy_task, precisions=["bf16"]).runs[1].losses == together["bf16"]

    def test_a_target_that_is_unknown_and_a_rehearsal_that_is_open(self) -> None:
        def factory(seed: int) -> Any:
            raise AssertionError("nothing should have run")

        with pytest.raises(ConfigurationError, match=r"not for 'cdua'\. Did you mean 'cuda'"):
            compare(factory, target="cdua")
        with rehearse("cuda"), pytest.raises(StepOrderError, match="Another rehearsal is open"):
            compare(factory)
