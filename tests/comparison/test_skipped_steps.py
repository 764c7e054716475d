"""What a skipped step must not do to the measurements: no optimizer runs in it, so it is quicker and lighter than a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep
from halfstep.records import Comparison, PrecisionRun
from halfstep.task import Task
from tests.comparison.tasks import Clock, current_precision, make_factory


def overflowing(skips: int) -> Any:
    """A task of AdamW whose first steps in fp16 overflow."""

    def task(seed: int) -> Task:
        torch.manual_seed(seed)
        model = nn.Linear(64, 64)
        calls: list[int] = []

        def loss(model: Any, batch: Tensor) -> Tensor:
            calls.append(1)
            out: Tensor = model(batch).square().mean()
            return out * torch.inf if current_precision() == "fp16" and len(calls) <= skips else out

        optimizer = torch.optim.AdamW(model.parameters())
        return Task(model=model, optimizer=optimizer, loss=loss, batches=[torch.randn(8, 64)])

    return task


def compare(factory: Any, **changes: Any) -> Comparison:
    values: dict[str, Any] = {"precisions": ["fp16"], "steps": 4, "warmup": 2, "seeds": 2, "device": "cpu"}
    return halfstep.compare(factory, **(values | changes))


def runs(factory: Any, **changes: Any) -> tuple[PrecisionRun, PrecisionRun]:
    fp32, fp16 = compare(factory, **changes).runs
    return fp32, fp16


@pytest.mark.parametrize("skips", [1, 2, 3])
def test_memory_is_that_of_a_step_with_an_optimizer(skips: int) -> None:
    fp32, fp16 = runs(overflowing(skips))
    assert fp16.skipped_steps == 2 * skips
    for run in (fp32, fp16):
        assert run.memory is not None
        assert run.peak_memory_mib is not None
        # The parameters and two moments for each, in fp32, whatever the precision; the first step that is taken makes the moments.
        assert run.peak_memory_mib > 3 * run.memory.parameters


def test_a_late_profile_is_no_step_of_the_run() -> None:
    fp32, fp16 = runs(overflowing(2))
    assert [len(seed) for seed in fp16.losses] == [len(seed) for seed in fp32.losses] == [6, 6]
    assert fp16.final_scale == 65536.0 / 4


def test_without_a_step_that_was_taken_there_is_no_memory_and_no_time() -> None:
    comparison = compare(overflowing(100))
    fp16 = comparison.runs[1]
    assert (fp16.steps, fp16.step_time_ms, fp16.peak_memory_mib, fp16.skipped_steps) == (0, None, None, 12)
    assert "fp16 was not measured (every measured step was skipped)" in comparison.verdicts[0].reason
    assert fp16.final_scale == 65536.0 / 2**6


def test_times_of_skipped_steps_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    clock.install(monkeypatch)
    calls: dict[str, int] = {}

    def loss(model: Any, batch: Tensor) -> Tensor:
        out = clock.loss(model, batch) / 1e4
        precision = current_precision()
        calls[precision] = calls.get(precision, 0) + 1
        if precision == "fp16" and calls[precision] in {4, 5}:  # The second and third measured step.
            clock.now -= 3.9
            return out * torch.inf
        return out

    comparison = compare(make_factory(loss), seeds=1)
    fp16 = comparison.runs[1]
    assert fp16.skipped_at == ((1, 4, 5),)  # The first one by itself: the scale begins too high.
    assert list(fp16.step_times_ms) == pytest.approx([4000.0, 4000.0])
    assert fp16.steps == 2
    assert comparison.verdicts[0].speedup is not None
    assert comparison.verdicts[0].speedup.high == pytest.approx(0.25)
