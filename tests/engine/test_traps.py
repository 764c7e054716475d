"""Traps of a step in one process: first what torch's own loop does, then that the engine does not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from halfstep import LossScaler, MixedPrecision, UnscaledBackwardError

SCALE = 65536.0


def weight_of_one() -> tuple[nn.Linear, torch.optim.Optimizer]:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


class TestClippingWhileScaled:
    def test_torch(self) -> None:
        model, optimizer = weight_of_one()
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        scaler.scale(model.weight.sum()).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        assert 1 - model.weight.item() == pytest.approx(1 / SCALE, rel=0.02), "the gradient was 1, and so was what it is clipped to"

    @pytest.mark.parametrize("manual", [False, True])
    def test_ours(self, manual: bool) -> None:
        model, optimizer = weight_of_one()
        amp = MixedPrecision(model, optimizer, "fp16", scaler=LossScaler(init_scale=SCALE), max_grad_norm=None if manual else 1.0)
        amp.backward(model.weight.sum())
        if manual:
            amp.unscale_gradients()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        record = amp.step()
        assert record is not None
        assert model.weight.item() == pytest.approx(0.0, abs=2e-6)
        assert manual or record.grad_norm == pytest.approx(1.0)

    def test_by_hand_it_raises(self) -> None:
        model, optimizer = weight_of_one()
        amp = MixedPrecision(model, optimizer, "fp16", scaler=LossScaler(init_scale=SCALE))
        amp.backward(model.weight.sum())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with pytest.raises(UnscaledBackwardError, match="unscale_gradients"):
            amp.step()
        assert model.weight.item() == 1.0


class TestOneScalerForTwoOptimizers:
    """One update for each optimizer, as Accelerate makes it: the scale moves twice, and the second gradient is unscaled by the new one."""

    def test_torch(self) -> None:
        (first, one), (second, two) = weight_of_one(), weight_of_one()
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
        for model in (first, second):
            scaler.scale(model.weight.sum()).backward()  # type: ignore[no-untyped-call]
        for optimizer in (one, two):
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 16.0, "it moved twice in one iteration"
        assert (1 - first.weight.item(), 1 - second.weight.item()) == (1.0, 0.5)

    def test_ours(self) -> None:
        (first, one), (second, two) = weight_of_one(), weight_of_one()
        scaler = LossScaler(init_scale=4.0, growth_interval=1)
        amps = [MixedPrecision(model, optimizer, "fp16", scaler=scaler) for model, optimizer in ((first, one), (second, two))]
        for amp, model in zip(amps, (first, second), strict=True):
            amp.backward(model.weight.sum())
        for amp in amps:
            amp.step()
        assert scaler.get_scale() == 8.0
        assert (1 - first.weight.item(), 1 - second.weight.item()) == (1.0, 1.0)


class TestGradientsThatAreNotCleared:
    """A skip without zero_grad leaves infinity in the gradients, and every later step is skipped, too."""

    def test_torch(self) -> None:
        model, optimizer = weight_of_one()
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for factor in (float("inf"), 1.0, 1.0):
            scaler.scale(model.weight.sum() * factor).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            scaler.update()
        assert (model.weight.item(), scaler.get_scale()) == (1.0, 0.5)

    def test_ours(self) -> None:
        model, optimizer = weight_of_one()
        amp = MixedPrecision(model, optimizer, "fp16", scaler=LossScaler(init_scale=4.0))
        records = [amp.train_step(lambda factor: model.weight.sum() * factor, factor) for factor in (float("inf"), 1.0, 1.0)]
        assert [record.skipped for record in records] == [True, False, False]
        assert (model.weight.item(), amp.stats().scale) == (-1.0, 2.0)


class TestStatisticsOfABadForward:
    """One bad forward pass leaves NaN in batch normalization; training goes on as if nothing were, evaluation is NaN for ever."""

    def test_torch(self) -> None:
        model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for value in (torch.inf, 1.0, 1.0):
            optimizer.zero_grad()
            scaler.scale(model(torch.randn(4, 2) * value).mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        assert bool(model(torch.randn(4, 2)).isfinite().all())
        assert bool(model.eval()(torch.randn(4, 2)).isnan().all())

    @pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
    def test_ours(self, precision: str) -> None:
        model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
        amp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), precision)
        skips = [amp.train_step(lambda x: model(x).float().mean(), torch.randn(4, 2) * value).skipped for value in (torch.inf, 1.0, 1.0)]
        assert skips == [True, False, False]
        assert bool(model.eval()(torch.randn(4, 2)).isfinite().all())


class TestOneBigRegion:
    """A loop inside one autocast region goes on with the lowered copies of the first weights: the loss does not move."""

    def test_torch(self) -> None:
        torch.manual_seed(0)
        model, x = nn.Linear(4, 1), torch.randn(8, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for _ in range(3):
                optimizer.zero_grad()
                loss = model(x).float().pow(2).mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        assert losses[0] == losses[1] == losses[2]

    def test_ours(self) -> None:
        model, x = nn.Linear(4, 1), torch.randn(8, 4)
        amp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with pytest.raises(RuntimeError, match="inside an autocast region"):
                amp.train_step(lambda x: model(x).float().pow(2).mean(), x)
            with amp.autocast():
                loss = model(x).float().pow(2).mean()
            amp.backward(loss)
            with pytest.raises(RuntimeError, match="inside an autocast region"):
                amp.step()
