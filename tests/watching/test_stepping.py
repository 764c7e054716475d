"""The numbers of each step, compared with what a loop itself computes, over many steps: some are looked at, others only measured."""

# Loops read as their users write them, and `Tensor.backward` has no types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import math
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from tests.watching.data import regression
from tests.watching.sessions import net, norm_of, records_of

pytestmark = pytest.mark.usefixtures("one_thread", "alone_in_process")

STEPS = 110
OVERFLOWS = frozenset({3, 20, 45, 46, 70, 97})


class Numbers(NamedTuple):
    loss: float
    scale: float
    norm: float
    lr: float
    skipped: bool


class Loop(NamedTuple):
    """A loop that does its own book-keeping."""

    scaled: bool = True
    fused: bool = False
    clip: float | None = None
    micro: int = 1
    divide: bool = True

    def __str__(self) -> str:
        kind = "fused " if self.fused else ""
        clip = "" if self.clip is None else f", norm {self.clip:g} clipped"
        micro = "" if self.micro == 1 else f", {self.micro} micro-batches{' divided' if self.divide else ''}"
        return f"{kind}{'scaled' if self.scaled else 'plain'}{clip}{micro}"

    def train(self) -> list[Numbers]:
        model, (x, y) = net(), regression(6, 4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=self.fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**9, growth_interval=7, enabled=self.scaled)
        seen = []
        for step in range(1, STEPS + 1):
            optimizer.param_groups[0]["lr"] = lr = 0.1 / step
            optimizer.zero_grad()
            total, scale = 0.0, scaler.get_scale()
            for _ in range(self.micro):
                with torch.autocast("cpu", dtype=torch.float16 if self.scaled else torch.bfloat16):
                    loss = F.mse_loss(model(x).float(), y)
                if self.scaled and step in OVERFLOWS:
                    loss = loss * math.inf
                if self.divide:
                    loss = loss / self.micro
                scaler.scale(loss).backward()
                total += loss.item()
            norm = norm_of(model.parameters(), scale)
            if self.clip is not None:
                scaler.unscale_(optimizer)
                clip_grad_norm_(model.parameters(), 0.1, norm_type=self.clip)
            scaler.step(optimizer)
            scaler.update()
            seen.append(Numbers(total, scale, norm, lr, scaler.get_scale() < scale))
        return seen


LOOPS = [
    *(Loop(scaled=scaled, fused=fused, clip=clip) for scaled, fused, clip in product([True, False], [True, False], [None, 2.0])),
    *(Loop(scaled=scaled, micro=3, divide=divide) for scaled, divide in product([True, False], [True, False])),
    Loop(fused=True, micro=2, clip=2.0),
]


@pytest.mark.parametrize("loop", LOOPS, ids=str)
def test_each_number_is_what_the_loop_says(loop: Loop, tmp_path: Path) -> None:
    expected: list[Numbers] = []
    records = records_of(tmp_path, lambda: expected.extend(loop.train()))
    assert [each.step for each in records] == [*range(1, STEPS + 1)]
    assert [each.skipped for each in records] == [each.skipped for each in expected]
    assert sum(each.skipped for each in records) == (len(OVERFLOWS) if loop.scaled else 0)
    assert [each.scale for each in records] == [each.scale for each in expected]
    assert [each.lr for each in records] == [each.lr for each in expected]
    assert [each.loss for each in records] == [pytest.approx(each.loss, rel=1e-6, nan_ok=True) for each in expected]
    for record, numbers in zip(records, expected, strict=True):
        is_known = not record.skipped and (loop.clip is not None or record.step <= 10 or record.step % 10 == 1)
        assert record.grad_norm == (pytest.approx(numbers.norm, rel=1e-5) if is_known else None)
    assert {(each.precision, each.scaler, each.optimizer, each.epoch) for each in records} == {
        ("fp16", "used", "", None) if loop.scaled else ("bf16", "none", "", None)
    }
    assert min(each.step_time_s for each in records) > 0
    if Path("/proc/self/statm").exists():
        assert [each.step for each in records if each.memory_bytes] == [*range(1, STEPS + 1, 10)]


def test_the_times_of_all_steps_together_are_that_of_the_loop(tmp_path: Path) -> None:
    times = [0.0, 0.0]

    def train() -> None:
        times[0] = time.perf_counter()
        Loop().train()
        times[1] = time.perf_counter()

    began = time.perf_counter()
    records = records_of(tmp_path, train)
    together = sum(each.step_time_s for each in records)
    assert times[1] - times[0] > together - records[0].step_time_s
    assert together < time.perf_counter() - began


@pytest.mark.parametrize("scaled", [True, False])
def test_the_norm_is_that_before_clipping_by_another_norm(scaled: bool, tmp_path: Path) -> None:
    expected: list[Numbers] = []
    records = records_of(tmp_path, lambda: expected.extend(Loop(scaled=scaled, clip=math.inf).train()))
    for record, numbers in zip(records, expected, strict=True):
        is_known = not record.skipped and (record.step <= 10 or record.step % 10 == 1)
        assert record.grad_norm == (pytest.approx(numbers.norm, rel=1e-5) if is_known else None)


@pytest.mark.xfail(reason="without an L2 norm of the loop's own, it is computed after clipping")
def test_the_norm_is_that_before_clipping_by_value(tmp_path: Path) -> None:
    expected = []

    def train() -> None:
        model, (x, y) = net(), regression(6, 4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            expected.append(norm_of(model.parameters()))
            clip_grad_value_(model.parameters(), 1e-3)
            optimizer.step()

    assert [each.grad_norm for each in records_of(tmp_path, train)] == pytest.approx(expected, rel=1e-5)


def test_the_norm_of_a_part_is_not_that_of_all(tmp_path: Path) -> None:
    expected = []

    def train() -> None:
        model, (x, y) = net(), regression(6, 4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(60):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            expected.append(norm_of(model.parameters()))
            clip_grad_norm_([model[0].bias], 1e-3)
            optimizer.step()

    records = records_of(tmp_path, train)
    assert [each.grad_norm for each in records if each.grad_norm is not None] == [
        pytest.approx(norm, rel=1e-5) for record, norm in zip(records, expected, strict=True) if record.grad_norm is not None
    ]


def test_a_norm_that_does_not_clip_is_still_the_norm(tmp_path: Path) -> None:
    expected = []

    def train() -> None:
        model, (x, y) = net(), regression(6, 4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(60):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            expected.append(float(clip_grad_norm_(model.parameters(), math.inf)))
            optimizer.step()

    assert [each.grad_norm for each in records_of(tmp_path, train)] == expected


def test_a_scaled_norm_is_recorded_without_its_scale(tmp_path: Path) -> None:
    expected = []

    def train() -> None:
        model, (x, y) = net(), regression(6, 4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**7, growth_interval=9)
        for _ in range(60):
            optimizer.zero_grad()
            scaler.scale(F.mse_loss(model(x), y)).backward()
            expected.append(norm_of(model.parameters(), scaler.get_scale()))
            clip_grad_norm_(model.parameters(), 1e9)  # It comes before unscaling, which is told.
            scaler.step(optimizer)
            scaler.update()

    norms = [each.grad_norm for each in records_of(tmp_path, train)]
    assert all(norm is None or norm == pytest.approx(reference, rel=1e-5) for norm, reference in zip(norms, expected, strict=True))
    assert None not in norms[:11]


class TestPrecision:
    def precisions(self, folder: Path, forward: Callable[[Any, Tensor, int], Tensor], dtype: torch.dtype | None = None) -> list[str]:
        def train() -> None:
            model, (x, y) = net().to(dtype), regression(6, 4, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
            for step in range(60):
                optimizer.zero_grad()
                F.mse_loss(forward(model, x.to(dtype), step).float(), y).backward()
                optimizer.step()

        return [each.precision for each in records_of(folder, train)]

    @pytest.mark.parametrize(
        ("dtype", "name"), [(None, "fp32"), (torch.float64, "fp32"), (torch.bfloat16, "bf16"), (torch.float16, "fp16")], ids=str
    )
    def test_without_a_region_it_is_that_of_the_model(self, dtype: torch.dtype | None, name: str, tmp_path: Path) -> None:
        assert set(self.precisions(tmp_path, lambda model, x, _: model(x), dtype)) == {name}

    def test_in_a_region_it_is_that_of_the_region(self, tmp_path: Path) -> None:
        def forward(model: Any, x: Tensor, step: int) -> Any:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return model(x)

        assert set(self.precisions(tmp_path, forward)) == {"bf16"}

    @pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
    def test_an_island_of_full_precision_is_none_of_its_own(self, first: bool, tmp_path: Path) -> None:
        def forward(model: Any, x: Tensor, step: int) -> Any:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                with torch.autocast("cpu", enabled=False):
                    x = model[0](x) if first else x
                if not first:
                    x = model[0](x)
                with torch.autocast("cpu", enabled=False):
                    x = model[1](x.float())
                return model[2](x)

        assert set(self.precisions(tmp_path, forward)) == {"bf16"}

    def test_a_region_that_is_switched_off_is_full_precision(self, tmp_path: Path) -> None:
        def forward(model: Any, x: Tensor, step: int) -> Any:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
                return model(x)

        assert set(self.precisions(tmp_path, forward)) == {"fp32"}

    @pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
    def test_an_evaluation_is_none_of_the_training(self, guard: Any, tmp_path: Path) -> None:
        def forward(model: Any, x: Tensor, step: int) -> Any:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                result = model(x)
            with guard(), torch.autocast("cpu", dtype=torch.float16):
                model(x)
            return result

        assert set(self.precisions(tmp_path, forward)) == {"bf16"}

    def test_steps_without_a_region_come_after_those_with_one(self, tmp_path: Path) -> None:
        def forward(model: Any, x: Tensor, step: int) -> Any:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=step < 20):
                return model(x)

        assert self.precisions(tmp_path, forward) == ["bf16"] * 20 + ["fp32"] * 40


class TestScalers:
    def uses(self, folder: Path, *, enabled: bool, used_from: int) -> list[str | None]:
        def train() -> None:
            model, (x, y) = net(), regression(6, 4, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=enabled)
            for step in range(60):
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y)
                if step >= used_from:
                    scaler.scale(loss).backward()
                    scaler.step(optimizer)
                    scaler.update()
                else:
                    loss.backward()
                    optimizer.step()

        return [each.scaler for each in records_of(folder, train)]

    @pytest.mark.parametrize("used_from", [0, 50, 60])
    def test_one_that_is_switched_off_is_none(self, used_from: int, tmp_path: Path) -> None:
        assert set(self.uses(tmp_path, enabled=False, used_from=used_from)) == {"none"}

    def test_one_that_is_passed_by_is_unused(self, tmp_path: Path) -> None:
        assert set(self.uses(tmp_path, enabled=True, used_from=60)) == {"unused"}

    @pytest.mark.parametrize("used_from", [5, 44])
    def test_one_that_is_used_is_used_from_then_on(self, used_from: int, tmp_path: Path) -> None:
        assert self.uses(tmp_path, enabled=True, used_from=used_from) == ["unused"] * used_from + ["used"] * (60 - used_from)


def test_a_learning_rate_may_be_a_tensor_or_missing(tmp_path: Path) -> None:
    class Plain(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})

        def step(self, closure: Any = None) -> Any: ...

    def train() -> None:
        weight = nn.Parameter(torch.ones(2))
        for kind in (lambda given: torch.optim.SGD(given, lr=torch.tensor(0.25)), Plain):
            optimizer = kind([weight])
            weight.sum().backward()
            optimizer.step()

    lrs = [each.lr for each in records_of(tmp_path, train)]
    assert lrs[0] == 0.25
    assert math.isnan(lrs[1])


def test_a_closure_is_one_step(tmp_path: Path) -> None:
    def train() -> None:
        model, (x, y) = net(), regression(6, 4, 1)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)

    assert [each.step for each in records_of(tmp_path, train)] == [1, 2, 3]
