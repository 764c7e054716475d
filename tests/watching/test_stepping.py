"""The numbers of each step, compared with what a loop itself computes, over many steps: some are looked at, others only measured."""

# Loops read as their users write them, and `Tensor.backward` has no types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import halfstep
from halfstep.journal import read_run
from halfstep.records import StepRecord
from tests.watching.data import regression

pytestmark = pytest.mark.usefixtures("one_thread", "alone_in_process")

STEPS = 110
OVERFLOWS = frozenset({3, 20, 45, 46, 70, 97})


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))


def records_of(folder: Path, train: Callable[[], object]) -> list[StepRecord]:
    with halfstep.watch(folder, sinks=["jsonl"]):
        train()
    return [*read_run(folder).records()]


def norm_of(parameters: Iterable[Tensor], scale: float = 1.0) -> float:
    """The reference, in float64."""
    return math.sqrt(sum(float((each.grad.double() / scale).square().sum()) for each in parameters if each.grad is not None))


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


def with_losses(run: Callable[[Any, Tensor, Tensor, int], list[float]]) -> tuple[Callable[[], None], list[float]]:
    """A loop that calls `run` for each step, and the losses that it has to have."""
    expected: list[float] = []

    def train() -> None:
        model, (x, y) = net(), regression(6, 4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(STEPS):
            optimizer.zero_grad()
            expected.append(sum(run(model, x, y, step)))
            optimizer.step()

    return train, expected


class TestLosses:
    def check(self, folder: Path, run: Callable[[Any, Tensor, Tensor, int], list[float]]) -> None:
        train, expected = with_losses(run)
        records = records_of(folder, train)
        assert [each.loss for each in records] == pytest.approx(expected, rel=1e-5)

    def test_those_of_several_passes_are_added_up(self, tmp_path: Path) -> None:
        def run(model: Any, x: Tensor, y: Tensor, step: int) -> list[float]:
            first, second = F.mse_loss(model(x), y), model(x).square().mean() * 0.1
            first.backward()
            second.backward()
            return [first.item(), second.item()]

        self.check(tmp_path, run)

    def test_those_of_a_list_are_added_up(self, tmp_path: Path) -> None:
        def run(model: Any, x: Tensor, y: Tensor, step: int) -> list[float]:
            losses = [F.mse_loss(model(x), y), model(x).square().mean() * 0.1]
            torch.autograd.backward(losses)
            return [each.item() for each in losses]

        self.check(tmp_path, run)

    def test_those_of_passes_whose_gradients_are_thrown_away_are_not(self, tmp_path: Path) -> None:
        """An adversarial example is made by a backward pass of its own."""

        def run(model: Any, x: Tensor, y: Tensor, step: int) -> list[float]:
            probe = x.clone().requires_grad_()
            F.mse_loss(model(probe), y).backward()
            assert probe.grad is not None
            model.zero_grad()
            loss = F.mse_loss(model(x + 0.1 * probe.grad.sign()), y)
            loss.backward()
            return [loss.item()]

        self.check(tmp_path, run)

    def test_those_of_other_models_are_not(self, tmp_path: Path) -> None:
        other = nn.Linear(4, 1)

        def run(model: Any, x: Tensor, y: Tensor, step: int) -> list[float]:
            loss = F.mse_loss(model(x), y)
            loss.backward()
            other(x).square().mean().backward()
            return [loss.item()]

        self.check(tmp_path, run)

    def test_those_of_an_iteration_that_is_left_out_are_not(self, tmp_path: Path) -> None:
        def run(model: Any, x: Tensor, y: Tensor, step: int) -> list[float]:
            if step % 4 == 3:
                (F.mse_loss(model(x), y) * 100).backward()
                model.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return [loss.item()]

        self.check(tmp_path, run)

    def test_one_that_is_no_number_is_not_known(self, tmp_path: Path) -> None:
        def run(model: Any, x: Tensor, y: Tensor, step: int) -> list[float]:
            each = (model(x) - y).square()
            each.backward(torch.ones_like(each))
            return [math.nan]

        train, _ = with_losses(run)
        assert all(math.isnan(each.loss) for each in records_of(tmp_path, train))

    @pytest.mark.parametrize("use", ["list", "factor", "divided", "summed"])
    def test_scaled_ones_are_recorded_without_their_scale(self, use: str, tmp_path: Path) -> None:
        expected = []

        def train() -> None:
            model, (x, y) = net(), regression(6, 4, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**7, growth_interval=9)
            for _ in range(STEPS):
                optimizer.zero_grad()
                losses = [F.mse_loss(model(x), y), model(x).square().mean() * 0.1]
                if use == "list":
                    for each in scaler.scale(losses):
                        each.backward()
                elif use == "factor":
                    (sum(losses) * scaler.scale(torch.ones(()))).backward()
                elif use == "divided":
                    (scaler.scale(torch.stack(losses).sum()) / 4).backward()
                else:
                    torch.stack(scaler.scale(losses)).sum().backward()
                scaler.step(optimizer)
                scaler.update()
                expected.append(sum(each.item() for each in losses) / (4 if use == "divided" else 1))

        records = records_of(tmp_path, train)
        assert [each.loss for each in records] == pytest.approx(expected, rel=1e-5)
        assert {each.scaler for each in records} == {"used"}


class TestSeveralOptimizers:
    def gan(self, *, scaled: bool, kinds: tuple[Any, Any]) -> dict[str, list[float]]:
        (x, y), maker, judge = regression(6, 4, 1), nn.Linear(4, 1), nn.Linear(1, 1)
        first, second = kinds[0](maker.parameters(), lr=0.01), kinds[1](judge.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**7, growth_interval=9, enabled=scaled)
        losses: dict[str, list[float]] = {"judge": [], "maker": []}
        for _ in range(60):
            made = maker(x)
            second.zero_grad()
            real, fake = F.softplus(-judge(y)).mean(), F.softplus(judge(made.detach())).mean()
            for each in (real, fake):
                scaler.scale(each).backward()
            scaler.step(second)
            losses["judge"].append(real.item() + fake.item())
            first.zero_grad()
            fooled = F.softplus(-judge(made)).mean()
            scaler.scale(fooled).backward()
            scaler.step(first)
            scaler.update()
            losses["maker"].append(fooled.item())
        return losses

    @pytest.mark.parametrize("scaled", [True, False])
    @pytest.mark.parametrize(
        ("kinds", "names"),
        [((torch.optim.SGD, torch.optim.AdamW), ("SGD", "AdamW")), ((torch.optim.SGD, torch.optim.SGD), ("SGD 2", "SGD"))],
        ids=["of two classes", "of one class"],
    )
    def test_each_has_its_name_its_numbers_and_its_losses(
        self, kinds: tuple[Any, Any], names: tuple[str, str], scaled: bool, tmp_path: Path
    ) -> None:
        losses: dict[str, list[float]] = {}
        records = records_of(tmp_path, lambda: losses.update(self.gan(scaled=scaled, kinds=kinds)))
        for name, party in zip(names, ("maker", "judge"), strict=True):
            own = [each for each in records if each.optimizer == name]
            assert [each.step for each in own] == [*range(1, 61)]
            assert [each.loss for each in own] == pytest.approx(losses[party], rel=1e-5)
        assert len(records) == 120

    def test_one_that_comes_later_is_told_from_the_first(self, tmp_path: Path) -> None:
        def train() -> None:
            model, (x, y) = net(), regression(6, 4, 1)
            for kind, steps in ((torch.optim.SGD, 60), (torch.optim.SGD, 3), (torch.optim.AdamW, 2)):
                optimizer = kind(model.parameters(), lr=0.01)
                for _ in range(steps):
                    optimizer.zero_grad()
                    F.mse_loss(model(x), y).backward()
                    optimizer.step()

        records = records_of(tmp_path, train)
        assert [(each.optimizer, each.step) for each in records] == [
            *(("", step) for step in range(1, 61)),
            *(("SGD 2", step) for step in range(1, 4)),
            *(("AdamW", step) for step in range(1, 3)),
        ]

    def taking_turns(self, folder: Path, *, scaled: bool) -> tuple[list[StepRecord], list[float]]:
        """Two optimizers of the same model, of which the second takes over."""
        expected: list[float] = []

        def train() -> None:
            model, (x, y) = net(), regression(6, 4, 1)
            optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for _ in range(2)]
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=scaled)
            for step in range(120):
                optimizer = optimizers[step >= 50]
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                expected.append(loss.item())

        return records_of(folder, train), expected

    @pytest.mark.parametrize("scaled", [True, False])
    def test_nothing_is_said_where_one_takes_over(self, scaled: bool, tmp_path: Path) -> None:
        records, _ = self.taking_turns(tmp_path, scaled=scaled)
        assert [(each.optimizer, each.step) for each in records] == [("SGD", step) for step in range(1, 51)] + [
            ("SGD 2", step) for step in range(1, 71)
        ]
        assert {each.scaler for each in records} == {"used" if scaled else "none"}
        assert read_run(tmp_path).alerts == ()

    @pytest.mark.parametrize("scaled", [True, False])
    def test_one_that_takes_over_has_all_its_losses(self, scaled: bool, tmp_path: Path) -> None:
        records, expected = self.taking_turns(tmp_path, scaled=scaled)
        assert [each.loss for each in records] == expected

    def test_one_for_all_losses_of_two_models(self, tmp_path: Path) -> None:
        """A loss reaches those optimizers alone whose parameters it comes from."""
        expected: dict[str, list[float]] = {"SGD": [], "AdamW": []}

        def train() -> None:
            one, two, (x, y) = net(), nn.Linear(4, 1), regression(6, 4, 1)
            optimizers = [torch.optim.SGD(one.parameters(), lr=0.01), torch.optim.AdamW(two.parameters(), lr=0.01)]
            for _ in range(50):
                losses = [F.mse_loss(model(x), y) for model in (one, two)]
                for optimizer in optimizers:
                    optimizer.zero_grad()
                for loss in losses:
                    loss.backward()
                for optimizer in optimizers:
                    optimizer.step()
                for values, loss in zip(expected.values(), losses, strict=True):
                    values.append(loss.item())

        records = records_of(tmp_path, train)
        for name, losses in expected.items():
            assert [each.loss for each in records if each.optimizer == name] == losses


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
