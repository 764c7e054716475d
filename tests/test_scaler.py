from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from halfstep.scaler import StepProbe

INF = float("inf")
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9),
    "sgd-fused": lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9, fused=True),
    "adamw-fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.5, fused=True),
    "adagrad-fused": lambda parameters: torch.optim.Adagrad(parameters, lr=0.5, fused=True),
}


def make(optimizer: str, **settings: Any) -> tuple[nn.Parameter, torch.optim.Optimizer, torch.amp.GradScaler, StepProbe]:
    weight = nn.Parameter(torch.ones(3))
    made = OPTIMIZERS[optimizer]([weight])
    return weight, made, torch.amp.GradScaler("cpu", init_scale=8.0, **settings), StepProbe(made)


def backward(scaler: torch.amp.GradScaler, weight: nn.Parameter, factor: float) -> None:
    weight.grad = None
    scaler.scale((weight * factor).sum()).backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("unscale", [True, False])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_is_taken_exactly_when_the_gradients_are_finite(optimizer: str, unscale: bool) -> None:
    weight, made, scaler, probe = make(optimizer)
    hooked: list[int] = []
    made.register_step_post_hook(lambda *_: hooked.append(1))
    flags = []
    for factor in [1.0, INF, 1.0, float("nan"), -INF, 1.0]:
        backward(scaler, weight, factor)
        before = weight.detach().clone()
        if unscale:
            probe.unscale_with(scaler)
            assert weight.grad is not None
            if factor == 1.0:
                assert weight.grad.tolist() == [1.0] * 3
        flags.append(probe.step_with(scaler))
        scaler.update()
        assert torch.equal(weight, before) != flags[-1]
    assert flags == [True, False, True, False, False, True]
    assert len(hooked) == 3, "a fused optimizer's step() was called for a step that was not taken"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_scaled_steps_are_those_of_the_unscaled_loop(optimizer: str) -> None:
    weight, _, scaler, probe = make(optimizer, growth_interval=1)
    plain = nn.Parameter(torch.ones(3))
    plain_optimizer = OPTIMIZERS[optimizer]([plain])
    for factor in (1.0, 0.25, 3.0):
        backward(scaler, weight, factor)
        assert probe.step_with(scaler)
        scaler.update()
        plain.grad = None
        (plain * factor).sum().backward()  # type: ignore[no-untyped-call]
        plain_optimizer.step()
        assert torch.equal(weight, plain)


@given(factors=st.lists(st.sampled_from([1.0, 0.5, INF, -INF, float("nan")]), max_size=20), fused=st.booleans())
def test_the_scale_is_that_of_a_loop_without_the_probe(factors: list[float], fused: bool) -> None:
    weight, _, scaler, probe = make("sgd-fused" if fused else "sgd", growth_interval=2)
    plain, optimizer, plain_scaler, _ = make("sgd", growth_interval=2)
    for factor in factors:
        backward(scaler, weight, factor)
        taken = probe.step_with(scaler)
        scaler.update()
        backward(plain_scaler, plain, factor)
        before = plain.detach().clone()
        plain_scaler.step(optimizer)
        plain_scaler.update()
        assert scaler.get_scale() == plain_scaler.get_scale()
        assert taken == (factor in (1.0, 0.5))
        torch.testing.assert_close(weight, plain)
        assert fused or torch.equal(weight, plain)
        assert taken or torch.equal(before, plain)


def test_groups_that_are_added_later_are_seen() -> None:
    weight, optimizer, scaler, probe = make("sgd")
    later = nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [later]})
    assert len(probe.param_groups) == 2
    assert probe.param_groups is optimizer.param_groups
    backward(scaler, weight, 1.0)
    scaler.scale((later * INF).sum()).backward()  # type: ignore[no-untyped-call]
    assert not probe.step_with(scaler)


def test_a_probe_does_not_say_that_it_scales_for_itself() -> None:
    _, optimizer, _, probe = make("adamw-fused")
    assert getattr(optimizer, "_step_supports_amp_scaling", False), "this torch marks fused optimizers differently: see TORCH_TRAPS.md"
    assert not hasattr(probe, "_step_supports_amp_scaling")


def test_an_answer_is_not_left_over_from_the_step_before() -> None:
    weight, _, scaler, probe = make("sgd")
    backward(scaler, weight, 1.0)
    assert probe.step_with(scaler)
    scaler.update()

    backward(scaler, weight, INF)
    assert not probe.step_with(scaler)


def test_a_disabled_scaler_always_steps() -> None:
    weight, optimizer, _, probe = make("sgd")
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    backward(scaler, weight, 1.0)
    probe.unscale_with(scaler)
    assert probe.step_with(scaler)
    assert optimizer.param_groups[0]["params"][0] is weight
