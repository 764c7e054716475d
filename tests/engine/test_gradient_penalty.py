from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep.engine import MixedPrecision
from halfstep.records import Precision
from halfstep.scaler import LossScaler
from tests.engine.loops import same_state

PRECISIONS: list[Precision] = ["fp32", "bf16", "fp16"]
REAL, FAKE = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(2))
INF = float("inf")
Scale = Callable[[Any], Any]
MIXED = 0.3 * REAL + 0.7 * FAKE


def critic() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))


def same(tensor: Any) -> Any:
    return tensor


def wasserstein(
    model: nn.Module, *, scale: Callable[[Any], Any] = same, unscale: Callable[[Any], Any] = same, factor: float = 1.0
) -> Tensor:
    """The loss of a critic with the penalty of WGAN-GP."""
    inputs = MIXED.clone().requires_grad_()
    out = model(inputs).float().sum() * factor
    (gradient,) = unscale(torch.autograd.grad(scale(out), inputs, create_graph=True))
    loss: Tensor = model(FAKE).float().mean() - model(REAL).float().mean() + 10 * ((gradient.norm(dim=1) - 1) ** 2).mean()
    return loss


def gradients_by_hand(model: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [*model.parameters()]))


def gradients(amp: MixedPrecision) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in amp.model.parameters() if parameter.grad is not None]


def engine(precision: Precision, **settings: Any) -> MixedPrecision:
    model = critic()
    return MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.05), precision, **settings)


def scalers() -> list[Any]:
    return [LossScaler(init_scale=2.0**12), torch.amp.GradScaler("cpu", init_scale=2.0**12)]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("lowered", [True, False])
def test_the_gradients_are_those_of_the_loss_without_scaling(precision: Precision, lowered: bool) -> None:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    for scaler in scalers() if precision == "fp16" else [None]:
        amp = engine(precision, scaler=scaler)
        with amp.autocast(), torch.autocast("cpu", enabled=lowered and precision != "fp32", dtype=dtype if lowered else torch.bfloat16):
            loss = wasserstein(amp.model, scale=amp.scale, unscale=amp.unscale)
            plain = wasserstein(amp.model)
        wanted = gradients_by_hand(amp.model, wasserstein(amp.model))
        amp.backward(loss)
        amp.unscale_gradients()
        seen = gradients(amp)
        if precision == "fp32" or not lowered:
            assert loss.item() == plain.item()
            assert same_state(seen, gradients_by_hand(amp.model, wasserstein(amp.model)))
        eps = torch.finfo(dtype if lowered else torch.float32).eps
        for mine, reference in zip(seen, wanted, strict=True):
            assert (mine - reference).norm() <= 30 * eps * reference.norm() + 30 * eps
        assert amp.step() is not None


def test_small_derivatives_that_fp16_alone_loses_are_kept() -> None:
    """The derivative by the inputs passes through fp16, where without a scale it is zero."""
    derivatives: list[Tensor] = []
    for scale in (1.0, 2.0**14):
        amp = engine("fp16", scaler=LossScaler(init_scale=scale, static=True))
        inputs = MIXED.clone().requires_grad_()
        with amp.autocast():
            out = amp.model(inputs).float().sum() * 1e-8
            derivatives += amp.unscale(torch.autograd.grad(amp.scale(out), inputs))
    (exact,) = torch.autograd.grad(critic()(inputs).sum() * 1e-8, inputs)
    lost, kept = derivatives
    assert not bool(lost.any())
    assert (kept - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_overflow_in_the_inner_derivative_skips_the_step(precision: Precision) -> None:
    amp = engine(precision, scaler=LossScaler(init_scale=2.0**10) if precision == "fp16" else None)
    before = {name: value.clone() for name, value in amp.model.state_dict().items()}
    factor = 1e4 if precision == "fp16" else INF
    record = amp.train_step(lambda: wasserstein(amp.model, scale=amp.scale, unscale=amp.unscale, factor=factor))
    assert record.skipped
    assert same_state(amp.model.state_dict(), before)
    if amp.scaler is not None:
        assert amp.scaler.get_scale() == 2.0**9
    assert not amp.train_step(lambda: wasserstein(amp.model, scale=amp.scale, unscale=amp.unscale)).skipped


def test_a_scale_that_moves_between_two_steps_of_a_critic_changes_no_gradient() -> None:
    """The critic steps several times for each step of its generator, and the scale that they share moves in its backward()."""
    scaler = LossScaler(init_scale=64.0, growth_interval=1)
    amp = engine("fp16", scaler=scaler)
    other = nn.Linear(1, 1)
    generator = MixedPrecision(other, torch.optim.SGD(other.parameters()), "fp16", scaler=scaler)
    reference = engine("fp16", scaler=LossScaler(init_scale=1.0, static=True))
    for number in range(4):
        for each in (amp, reference):
            with each.autocast(), torch.autocast("cpu", enabled=False):
                loss = wasserstein(each.model, scale=each.scale, unscale=each.unscale)
            each.backward(loss)
            each.step()
        assert scaler.get_scale() == 64.0 * 2**number
    assert same_state(amp.model.state_dict(), reference.model.state_dict())
    del generator


@pytest.mark.parametrize("precision", PRECISIONS)
def test_nests_are_unscaled_and_what_is_no_tensor_stays(precision: Precision) -> None:
    amp = engine(precision)
    half = amp.scale(torch.tensor(3.0, dtype=torch.float16))
    assert half.item() == 3.0 * (2.0**16 if precision == "fp16" else 1.0)
    nest = amp.unscale([amp.scale(torch.ones(2)), None, {"a": (amp.scale(torch.tensor(2.0)), "text")}])
    assert nest[1] is None
    assert nest[2]["a"][1] == "text"
    assert torch.equal(nest[0], torch.ones(2))
    assert nest[2]["a"][0].item() == 2.0


def test_gradients_pass_through() -> None:
    amp = engine("fp16")
    x = torch.tensor(3.0, requires_grad=True)
    amp.unscale(amp.scale(x * x)).backward()
    assert x.grad is not None
    assert x.grad.item() == 6.0
