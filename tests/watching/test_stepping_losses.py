"""The losses of each step, of one optimizer and of several, compared with what a loop itself computes."""

# Loops read as their users write them, and `Tensor.backward` has no types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from halfstep.journal import read_run
from halfstep.records import StepRecord
from tests.watching.data import regression
from tests.watching.sessions import net, records_of

pytestmark = pytest.mark.usefixtures("one_thread", "alone_in_process")

# Some of these steps are looked at, and others only measured.
STEPS = 110


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

    @pytest.mark.parametrize("scaled", [True, False])
    @pytest.mark.parametrize(
        "order",
        [
            "trunk, heads",
            "heads, trunk",
            "heads",
            "heads in turn",
        ],
    )
    def test_those_of_a_model_of_which_each_step_uses_a_part(self, order: str, scaled: bool, tmp_path: Path) -> None:
        """Such as one head for each task, or experts."""
        heads, trunk, expected = [nn.Linear(4, 1) for _ in range(2)], nn.Linear(4, 4), []

        def train() -> None:
            parts = {"trunk": [trunk], "heads": heads, "heads in turn": heads}
            modules = [module for name in order.split(", ") for module in parts[name]]
            optimizer = torch.optim.SGD([each for module in modules for each in module.parameters()], lr=0.01)
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=scaled)
            x, y = regression(6, 4, 1)
            for step in range(STEPS):
                optimizer.zero_grad()
                head = heads[step >= 60 if order == "heads in turn" else step % 2]
                loss = F.mse_loss(head(trunk(x) if "trunk" in order else x), y)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                expected.append(loss.item())

        records = records_of(tmp_path, train)
        assert read_run(tmp_path).alerts == ()
        assert [each.loss for each in records] == pytest.approx(expected, rel=1e-5)

    def test_those_of_passes_before_and_after_clipping_are_added_up(self, tmp_path: Path) -> None:
        def run(model: Any, x: Tensor, y: Tensor, step: int) -> list[float]:
            first, second = F.mse_loss(model(x), y), model(x).square().mean() * 0.1
            first.backward()
            clip_grad_norm_(model.parameters(), 1e-2)
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
