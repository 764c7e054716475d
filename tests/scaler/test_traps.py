"""What goes wrong with torch's scaler, each shown on it first, and what `LossScaler` does instead."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from halfstep.errors import ConfigurationError, InvalidTypeError, StepOrderError
from halfstep.scaler import LossScaler
from tests.scaler.loops import INF, NAN, OPTIMIZERS, backward, iterate, weights

GradScaler = torch.amp.GradScaler


def torch_scaler(**settings: Any) -> GradScaler:
    return GradScaler("cpu", **{"init_scale": 8.0, **settings})


def own_scaler(**settings: Any) -> LossScaler:
    return LossScaler("cpu", **{"init_scale": 8.0, **settings})


class TestSilentDestruction:
    """A scale so small that its reciprocal is infinite turns good gradients into infinities after the check."""

    @staticmethod
    def collapse(scaler: GradScaler, name: str) -> nn.Parameter:
        (weight,) = weights()
        optimizer = OPTIMIZERS[name]([weight])
        for _ in range(132):
            iterate(scaler, optimizer, INF)
        iterate(scaler, optimizer, 1.0)
        return weight

    def test_torch(self) -> None:
        assert not self.collapse(torch_scaler(), "sgd").isfinite().all()

    @pytest.mark.parametrize("name", ["sgd", "sgd-fused"])
    @pytest.mark.parametrize("min_scale", [1.0, 0.0])
    def test_ours(self, name: str, min_scale: float) -> None:
        scaler = own_scaler(min_scale=min_scale)
        weight = self.collapse(scaler, name)
        assert weight.tolist() == ([0.5] * 3 if min_scale else [1.0] * 3)
        assert scaler.stats().skips == (132 if min_scale else 133)

    @pytest.mark.parametrize("name", ["sgd", "sgd-fused"])
    def test_large_gradients_at_a_scale_below_one(self, name: str) -> None:
        for scaler, finite in ((torch_scaler(init_scale=2.0**-20), False), (own_scaler(init_scale=2.0**-20, min_scale=0), True)):
            (weight,) = weights()
            weight.grad = torch.full((3,), 1e35)  # As from a loss that overflows once it is divided.
            scaler.scale(torch.ones(()))
            scaler.step(OPTIMIZERS[name if finite else "sgd"]([weight]))
            assert bool(weight.isfinite().all()) is finite


class TestFusedStepsThatDidNotHappen:
    @staticmethod
    def hooked(scaler: GradScaler) -> int:
        seen: list[int] = []
        optimizer = OPTIMIZERS["adamw-fused"](weights())
        optimizer.register_step_post_hook(lambda *_: seen.append(1))
        for factor in (INF, 1.0, INF):
            iterate(scaler, optimizer, factor)
        return len(seen)

    def test_torch(self) -> None:
        assert self.hooked(torch_scaler()) == 3

    def test_ours(self) -> None:
        assert self.hooked(own_scaler()) == 1

    def test_a_fused_first_step_leaves_state_behind(self) -> None:
        sizes = []
        for scaler in (torch_scaler(), own_scaler()):
            optimizer = OPTIMIZERS["adamw-fused"](weights())
            iterate(scaler, optimizer, INF)
            sizes.append(len(optimizer.state))
        assert sizes == [1, 0]

    def test_fused_optimizers_take_half_precision_gradients(self) -> None:
        for scaler in (torch_scaler(), own_scaler()):
            weight = nn.Parameter(torch.ones(3, dtype=torch.float16))
            optimizer = OPTIMIZERS["sgd-fused"]([weight])
            backward(scaler, [weight], 1.0)
            if isinstance(scaler, LossScaler):
                with pytest.raises(ConfigurationError, match=r"parameter 0 of group 0, of shape \(3,\), is torch\.float16"):
                    scaler.step(optimizer)
            else:
                scaler.step(optimizer)
                assert weight.tolist() == [0.5] * 3


class TestSkipsToldByTheScale:
    """ "The scale went down, so the step was skipped" is wrong whenever it cannot go down, or goes down for another reason."""

    def test_torch(self) -> None:
        scaler, optimizer = torch_scaler(init_scale=0.0), OPTIMIZERS["sgd"](weights())
        iterate(scaler, optimizer, NAN)
        assert scaler.get_scale() == 0.0
        scaler, optimizer = torch_scaler(), OPTIMIZERS["sgd"](weights())
        backward(scaler, optimizer.param_groups[0]["params"], 1.0)
        scaler.step(optimizer)
        scaler.update(2.0)
        assert scaler.get_scale() < 8.0, "lower, though the step was taken"

    @pytest.mark.parametrize("name", ["sgd", "sgd-fused", "adamw-fused"])
    @pytest.mark.parametrize(
        "settings", [{"min_scale": 8.0}, {"hysteresis": 3}, {"static": True}, {"backoff_factor": 1 - 2.0**-40}], ids=str
    )
    def test_ours(self, name: str, settings: dict[str, Any]) -> None:
        scaler, optimizer = own_scaler(**settings), OPTIMIZERS[name](weights())
        told = []
        for factor in (INF, 1.0, NAN, 1.0):
            before = scaler.stats().skips
            iterate(scaler, optimizer, factor)
            told.append(scaler.stats().skips - before)
            assert scaler.get_scale() == 8.0
        assert told == [1, 0, 1, 0]
        backward(scaler, optimizer.param_groups[0]["params"], 1.0)
        scaler.step(optimizer)
        if "static" not in settings:
            scaler.update(2.0)
        assert scaler.stats().skips == 2


class TestClosures:
    @staticmethod
    def run(scaler: GradScaler) -> list[float]:
        (weight,) = weights()
        optimizer = torch.optim.LBFGS([weight], max_iter=1)
        seen: list[float] = []

        def closure() -> float:
            backward(scaler, [weight], 1.0)
            assert weight.grad is not None
            seen.append(weight.grad[0].item())
            return 1.0

        closure()
        scaler.step(optimizer, closure)
        return seen

    def test_torch(self) -> None:
        assert self.run(torch_scaler())[-1] == 8.0, "LBFGS works on gradients that are still scaled"

    def test_ours(self) -> None:
        with pytest.raises(ConfigurationError, match="a closure computes gradients that nobody unscales or checks"):
            self.run(own_scaler())


class TestNoGradients:
    def test_torch(self) -> None:
        scaler, optimizer = torch_scaler(), OPTIMIZERS["sgd"](weights())
        scaler.scale(torch.ones(()))
        with pytest.raises(AssertionError, match="No inf checks were recorded for this optimizer"):
            scaler.step(optimizer)
        with pytest.raises(AssertionError, match="No inf checks were recorded prior to update"):
            scaler.update()

    @pytest.mark.parametrize("name", ["sgd", "adamw-fused"])
    def test_ours(self, name: str) -> None:
        scaler, (weight,) = own_scaler(growth_interval=1), weights()
        idle, busy = OPTIMIZERS[name](weights()), OPTIMIZERS[name]([weight])
        scaler.step(idle)
        scaler.update()
        scaler.update()
        assert (scaler.get_scale(), scaler.stats().steps, scaler.stats().skips) == (8.0, 1, 0)
        backward(scaler, [weight], 1.0)
        scaler.step(idle)
        scaler.step(busy)
        scaler.update()
        assert scaler.get_scale() == 16.0
        assert (weight < 1).all()


class TestWrappers:
    class Wrapper:
        def __init__(self, optimizer: Optimizer) -> None:
            self.param_groups = optimizer.param_groups

    @pytest.mark.parametrize("scaler", [torch_scaler(), own_scaler()], ids=["torch", "ours"])
    def test_unscaling_by_the_wrapper_and_stepping_the_optimizer(self, scaler: GradScaler) -> None:
        (weight,) = weights()
        optimizer = OPTIMIZERS["sgd"]([weight])
        backward(scaler, [weight], 1.0)
        scaler.unscale_(self.Wrapper(optimizer))  # type: ignore[arg-type]
        scaler.step(optimizer)
        assert weight.grad is not None
        assert weight.grad[0].item() == (1.0 if isinstance(scaler, LossScaler) else 1 / 8)


class TestScaleThatChangesInTheMiddle:
    """Of this a scaler sees only that `update` comes without a step; the engine does the rest."""

    def test_torch(self) -> None:
        scaler, (weight,) = torch_scaler(growth_interval=1), weights()
        optimizer = OPTIMIZERS["sgd"]([weight])
        backward(scaler, [weight], 1.0)
        with pytest.raises(AssertionError, match="No inf checks"):
            scaler.update()
        scaler.unscale_(optimizer)
        scaler.update()
        backward(scaler, [weight], 1.0, clear=False)
        scaler.unscale_(optimizer)
        assert weight.grad is not None
        assert weight.grad[0].item() != 2.0

    def test_ours(self) -> None:
        scaler, (weight,) = own_scaler(growth_interval=1), weights()
        optimizer = OPTIMIZERS["sgd"]([weight])
        for _ in range(2):
            backward(scaler, [weight], 1.0, clear=False)
            scaler.update()  # After each micro-batch.
        scaler.unscale_(optimizer)
        assert weight.grad is not None
        assert weight.grad[0].item() == 2.0


class TestInfinitiesThatStay:
    """A skipped step without `zero_grad` leaves infinities in the gradients, and every later step is skipped."""

    @pytest.mark.parametrize("name", ["sgd", "sgd-fused"])
    @pytest.mark.parametrize("ours", [False, True])
    def test_it_is_found_out(self, name: str, ours: bool) -> None:
        scaler = own_scaler(max_consecutive_skips=5) if ours else torch_scaler()
        (weight,) = weights()
        optimizer = OPTIMIZERS[name]([weight])
        for _ in range(4):
            backward(scaler, [weight], INF, clear=False)
            scaler.step(optimizer)
            scaler.update()
        backward(scaler, [weight], 1.0, clear=False)
        scaler.step(optimizer)
        assert weight.tolist() == [1.0] * 3
        if ours:
            with pytest.raises(RuntimeError, match="5 steps in a row were skipped"):
                scaler.update()
        else:
            scaler.update()  # And so on for ever.


class TestInfinitiesThatComeLate:
    @staticmethod
    def run(scaler: GradScaler, name: str, bad: float = INF) -> nn.Parameter:
        (weight,) = weights()
        optimizer = OPTIMIZERS[name]([weight])
        iterate(scaler, optimizer, 0.0)
        backward(scaler, [weight], 1.0)
        scaler.unscale_(optimizer)
        assert weight.grad is not None
        weight.grad[1] = bad
        scaler.step(optimizer)
        scaler.update()
        return weight

    @pytest.mark.parametrize("name", ["sgd", "sgd-fused"])
    def test_torch(self, name: str) -> None:
        assert not self.run(torch_scaler(), name).isfinite().all()

    @pytest.mark.parametrize("name", ["sgd", "sgd-fused", "momentum", "adamw-fused"])
    @pytest.mark.parametrize("bad", [INF, NAN])
    def test_ours(self, name: str, bad: float) -> None:
        scaler = own_scaler()
        weight = self.run(scaler, name, bad)
        assert weight.isfinite().all()
        assert scaler.stats().skips == 1
        assert scaler.get_scale() == 4.0


class TestScheduler:
    """torch warns of a scheduler before the optimizer's first step when that is skipped, but never with a fused one."""

    @staticmethod
    def run(scaler: GradScaler, name: str) -> tuple[float, int]:
        optimizer = OPTIMIZERS[name](weights())
        scheduler = LambdaLR(optimizer, lambda epoch: 0.5**epoch)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for factor in (INF, 1.0):
                taken = not isinstance(scaler, LossScaler)
                if isinstance(scaler, LossScaler):
                    before = scaler.stats()
                    iterate(scaler, optimizer, factor)
                    after = scaler.stats()
                    taken = after.steps - after.skips > before.steps - before.skips
                else:
                    iterate(scaler, optimizer, factor)
                if taken:
                    scheduler.step()
        return optimizer.param_groups[0]["lr"], sum("lr_scheduler.step()" in str(each.message) for each in caught)

    def test_torch(self) -> None:
        assert self.run(torch_scaler(), "adam") == (0.125, 1)
        assert self.run(torch_scaler(), "adam-fused") == (0.125, 0), "ahead of the training, without a word"

    @pytest.mark.parametrize("name", ["adam", "adam-fused", "sgd-fused", "momentum-fused"])
    def test_ours(self, name: str) -> None:
        assert self.run(own_scaler(), name) == (0.25, 0)


class TestComplexGradients:
    @pytest.mark.parametrize("ours", [False, True])
    def test_they_are_unscaled(self, ours: bool) -> None:
        scaler = own_scaler() if ours else torch_scaler()
        weight = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        optimizer = OPTIMIZERS["sgd"]([weight])
        scaler.scale(weight.real.sum()).backward()  # type: ignore[no-untyped-call]
        if not ours:
            with pytest.raises(RuntimeError, match="not implemented for 'ComplexFloat'"):
                scaler.step(optimizer)
            return
        scaler.step(optimizer)
        assert weight.tolist() == [0.5, 0.5]

    @pytest.mark.parametrize("name", ["sgd", "sgd-fused"])
    def test_bfloat16_gradients_are_refused_on_any_device(self, name: str) -> None:
        for scaler in (torch_scaler(), own_scaler()):
            weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
            backward(scaler, [weight], 1.0)
            if isinstance(scaler, LossScaler):
                with pytest.raises(ConfigurationError, match=r"is torch\.bfloat16"):
                    scaler.step(OPTIMIZERS[name]([weight]))
            else:
                scaler.step(OPTIMIZERS[name]([weight]))  # On a CPU; CUDA has no such kernel.


class TestHalfPrecisionLosses:
    def test_torch(self) -> None:
        scaler = GradScaler("cpu")
        assert scaler.scale(torch.ones((), dtype=torch.float16)).item() == 65536.0
        assert scaler.scale(torch.ones(1, dtype=torch.float16)).item() == INF

    def test_ours(self) -> None:
        scaler = LossScaler("cpu")
        for shape in ((), (1,), (2, 2)):
            assert (scaler.scale(torch.ones(shape, dtype=torch.float16)) == 65536.0).all()


def test_unscaling_twice_is_an_error_of_the_same_kind_as_in_torch() -> None:
    for scaler in (torch_scaler(), own_scaler()):
        (weight,) = weights()
        optimizer = OPTIMIZERS["sgd"]([weight])
        backward(scaler, [weight], 1.0)
        scaler.unscale_(optimizer)
        with pytest.raises(RuntimeError) as caught:
            scaler.unscale_(optimizer)
        assert isinstance(caught.value, StepOrderError) is isinstance(scaler, LossScaler)


def test_what_is_no_loss_is_an_error_of_another_kind_than_in_torch() -> None:
    with pytest.raises(ValueError, match="outputs must be a Tensor"):
        torch_scaler().scale(3.0)  # type: ignore[call-overload]
    with pytest.raises(InvalidTypeError, match="takes a tensor"):
        own_scaler().scale(3.0)
