from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import Optimizer

from halfstep.errors import ConfigurationError, PersistentSkipsError
from halfstep.scaler import LossScaler, Scaling
from tests.scaler.loops import INF, NAN, OPTIMIZERS, HostReads, same, snapshot, weights

CPU = torch.device("cpu")


def own(**changes: Any) -> LossScaler:
    return LossScaler("cpu", **{"init_scale": 8.0, **changes})


def torchs(**changes: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", **{"init_scale": 8.0, **changes})


BOTH = pytest.mark.parametrize("scaler", [own, torchs])


def backward(scaling: Scaling, parameters: list[nn.Parameter], *factors: float) -> None:
    for parameter in parameters:
        parameter.grad = None
    loss = sum(((each * factor).sum() for each, factor in zip(parameters, factors, strict=True)), torch.zeros(()))
    scaling.scale(loss).backward()  # type: ignore[no-untyped-call]


def unscale(scaling: Scaling) -> torch.Tensor | None:
    parameters = [parameter for group in scaling.param_groups for parameter in group["params"]]
    return scaling.unscale([parameter.grad for parameter in parameters if parameter.grad is not None])


def run(scaling: Scaling, parameters: list[nn.Parameter], *factors: float, on_host: bool = True) -> bool | None:
    """One whole iteration; whether the step was skipped."""
    backward(scaling, parameters, *factors)
    unscale(scaling)
    skipped = scaling.step(on_host=on_host)
    scaling.update()
    return skipped


def make(kinds: list[str]) -> tuple[list[nn.Parameter], list[Optimizer]]:
    parameters = weights(*range(2, 2 + len(kinds)))
    return parameters, [OPTIMIZERS[kind]([parameter]) for kind, parameter in zip(kinds, parameters, strict=True)]


@BOTH
@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("kinds", [["sgd"], ["adamw-fused"], ["sgd-fused", "momentum"], ["adamw-fused", "sgd-fused"]], ids=str)
def test_all_optimizers_step_or_none(kinds: list[str], on_host: bool, scaler: Any) -> None:
    parameters, optimizers = make(kinds)
    used = scaler()
    scaling = Scaling(used, optimizers)
    for position in range(len(kinds)):
        for bad in (1.0, INF, NAN, 0.5):
            factors = [1.0] * len(kinds)
            factors[position] = bad
            before = [snapshot(each) for each in optimizers]
            skipped = run(scaling, parameters, *factors, on_host=on_host)
            expected = bad not in (1.0, 0.5)
            assert skipped in ({expected} if on_host else {expected, None})
            for optimizer, earlier in zip(optimizers, before, strict=True):
                assert same(snapshot(optimizer), earlier) is expected
    assert used.get_scale() == max(8.0 / 4 ** len(kinds), 1.0 if scaler is own else 0.0)
    if isinstance(used, LossScaler):
        assert (used.stats().steps, used.stats().skips) == (4 * len(kinds), 2 * len(kinds)), "a joint step counts once"


@settings(max_examples=30)
@given(flags=st.lists(st.booleans(), max_size=30), on_host=st.booleans(), kind=st.sampled_from(["sgd", "sgd-fused"]))
def test_the_scale_moves_as_in_a_loop_by_hand(flags: list[bool], on_host: bool, kind: str) -> None:
    makers = (lambda: own(growth_interval=2, min_scale=0), lambda: torchs(growth_interval=2))
    scalers = [make_one() for make_one in makers]  # type: ignore[no-untyped-call]
    made = [make([kind]) for _ in scalers]
    scalings = [Scaling(scaler, optimizers) for scaler, (_, optimizers) in zip(scalers, made, strict=True)]
    reference, (weight,) = torchs(growth_interval=2), weights(2)
    optimizer = OPTIMIZERS["sgd"]([weight])
    for finite in flags:
        factor = 1.0 if finite else INF
        for scaling, (parameters, _) in zip(scalings, made, strict=True):
            run(scaling, parameters, factor, on_host=on_host)
        weight.grad = None
        reference.scale((weight * factor).sum()).backward()  # type: ignore[no-untyped-call]
        reference.step(optimizer)
        reference.update()
        assert [scaler.get_scale() for scaler in scalers] == [reference.get_scale()] * 2
        for parameters, _ in made:
            torch.testing.assert_close(parameters[0], weight)


@BOTH
def test_what_it_unscaled_is_for_others_to_judge(scaler: Any) -> None:
    parameters, optimizers = make(["sgd"])
    used = scaler()
    scaling = Scaling(used, optimizers)
    backward(scaling, parameters, 1.0)
    verdict = unscale(scaling)
    assert verdict is not None
    assert scaling.verdict(CPU) is verdict
    assert verdict.item() == 0.0
    verdict.fill_(1.0)
    scaling.check_again()
    assert scaling.step(on_host=True) is True
    scaling.update()
    assert parameters[0].tolist() == [1.0, 1.0]
    assert used.get_scale() == 4.0


@BOTH
def test_gradients_that_changed_are_checked_again(scaler: Any) -> None:
    parameters, optimizers = make(["sgd"])
    scaling = Scaling(scaler(), optimizers)
    scaling.check_again()
    backward(scaling, parameters, 1.0)
    unscale(scaling)
    assert parameters[0].grad is not None
    parameters[0].grad[0] = NAN
    scaling.check_again()
    assert scaling.step(on_host=True) is True


@BOTH
def test_without_gradients_there_is_a_verdict_when_it_is_asked_for(scaler: Any) -> None:
    _, optimizers = make(["sgd"])
    used = scaler()
    scaling = Scaling(used, optimizers)
    assert unscale(scaling) is None
    assert scaling.step(on_host=False) is False
    scaling.update()
    assert used.get_scale() == 8.0
    unscale(scaling)
    scaling.verdict(CPU).fill_(1.0)
    assert scaling.step(on_host=True) is True
    scaling.update()
    assert used.get_scale() == 4.0


@BOTH
def test_the_scale_is_one_tensor_that_is_written_to_in_place(scaler: Any) -> None:
    parameters, optimizers = make(["sgd"])
    scaling = Scaling(scaler(), optimizers)
    scale = scaling.scale_on(CPU)
    assert (scale.item(), scale.dtype, scale.shape) == (8.0, torch.float32, ())
    run(scaling, parameters, INF)
    assert scaling.scale_on(CPU) is scale
    assert scale.item() == 4.0


@BOTH
def test_a_step_that_breaks_off_leaves_no_trace(scaler: Any) -> None:
    parameters, optimizers = make(["sgd"])
    used = scaler()
    scaling = Scaling(used, optimizers)
    backward(scaling, parameters, INF)
    unscale(scaling)
    scaling.update()
    assert used.get_scale() == 8.0
    assert run(scaling, parameters, 1.0) is False
    assert parameters[0].tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    "settings", [{"min_scale": 0, "init_scale": 2.0**-20}, {"min_scale": 0, "init_scale": 2.0**-20, "static": True}, None]
)
def test_a_gradient_that_becomes_infinite_when_it_is_divided_is_noticed(settings: dict[str, Any] | None) -> None:
    parameters, optimizers = make(["sgd"])
    scaling = Scaling(torchs(init_scale=2.0**-20) if settings is None else own(**settings), optimizers)
    parameters[0].grad = torch.full((2,), 1e35)
    unscale(scaling)
    assert scaling.step(on_host=True) is True
    assert parameters[0].tolist() == [1.0, 1.0]


def test_it_is_noticed_among_gradients_of_several_kinds() -> None:
    parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, dtype=torch.float64))]
    for parameter, value in zip(parameters, (1e35, 1.0), strict=True):
        parameter.grad = torch.full_like(parameter, value)
    scaling = Scaling(own(min_scale=0, init_scale=2.0**-20), [torch.optim.SGD(parameters, lr=0.5)])
    unscale(scaling)
    assert scaling.step(on_host=True) is True


def test_a_verdict_that_the_host_knows_is_read_once() -> None:
    parameters, optimizers = make(["sgd"])
    scaling = Scaling(own(max_consecutive_skips=2), optimizers)
    with HostReads() as reads:
        for factor in (1.0, INF, 1.0, INF):
            run(scaling, parameters, factor)
    assert reads.total == 4


def test_a_static_scale_of_one_only_checks() -> None:
    parameters, optimizers = make(["sgd"])
    scaling = Scaling(own(init_scale=1.0, static=True), optimizers)
    gradient = torch.tensor([1e-45, 0.1])
    parameters[0].grad = gradient.clone()
    unscale(scaling)
    assert torch.equal(parameters[0].grad, gradient)
    assert scaling.step(on_host=True) is False
    parameters[0].grad = gradient * NAN
    unscale(scaling)
    assert scaling.step(on_host=True) is True


def test_settings_that_came_with_a_state_count() -> None:
    (parameters, optimizers), scaler = make(["sgd"]), own(init_scale=1.0, static=True)
    scaling = Scaling(scaler, optimizers)
    scaler.load_state_dict(own(min_scale=0).state_dict(), adopt_settings=True)
    run(scaling, parameters, 1.0)
    assert parameters[0].tolist() == [0.5, 0.5], "the loss was scaled, and the gradients were not divided"
    scaler.update(2.0**-20)
    parameters[0].grad = torch.full((2,), 1e35)
    unscale(scaling)
    assert scaling.step(on_host=True) is True


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
@pytest.mark.parametrize("bad", [False, True])
def test_gradients_of_several_kinds_are_unscaled_together(dtype: torch.dtype, bad: bool) -> None:
    parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, dtype=dtype)), nn.Parameter(torch.ones(2))]
    scaling = Scaling(own(), [torch.optim.SGD(parameters, lr=0.5)])
    for parameter in parameters[:2]:
        parameter.grad = torch.full_like(parameter, 8.0)
    if bad:
        parameters[1].grad = parameters[1].grad * NAN  # type: ignore[operator, assignment]
    unscale(scaling)
    assert scaling.step(on_host=True) is bad
    assert [parameter[0].item() for parameter in parameters] == ([1.0] * 3 if bad else [0.5, 0.5, 1.0])


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("norm", [1.0, INF, NAN])
def test_a_norm_counts_as_a_gradient(scaler: Any, norm: float, dtype: torch.dtype) -> None:
    parameters, optimizers = make(["sgd"])
    scaling = Scaling(scaler(), optimizers)
    scaling.check_norm(torch.tensor(norm, dtype=dtype))  # Without gradients there is nothing to judge.
    assert scaling.found_inf is None
    backward(scaling, parameters, 1.0)
    unscale(scaling)
    value = torch.tensor(norm, dtype=dtype)
    scaling.check_norm(value)
    torch.testing.assert_close(value, torch.tensor(norm, dtype=dtype), rtol=0, atol=0, equal_nan=True)
    assert scaling.step(on_host=True) is (norm != 1.0)


@BOTH
def test_its_state_can_be_compared_between_processes(scaler: Any) -> None:
    parameters, optimizers = make(["sgd"])
    scaling = Scaling(scaler(), optimizers)
    run(scaling, parameters, INF)
    run(scaling, parameters, 1.0)
    assert scaling.state_on(CPU).tolist() == ([4.0, 1.0] if scaler is own else [4.0])


def test_a_static_scale_of_another_value_divides() -> None:
    parameters, optimizers = make(["sgd"])
    run(Scaling(own(static=True), optimizers), parameters, 1.0)
    assert parameters[0].tolist() == [0.5, 0.5]


@BOTH
@pytest.mark.parametrize("kinds", [["sgd-fused"], ["adamw-fused", "sgd-fused"]], ids=str)
def test_fused_optimizers_wait_for_nothing(kinds: list[str], scaler: Any) -> None:
    parameters, optimizers = make(kinds)
    scaling = Scaling(scaler(), optimizers)
    run(scaling, parameters, *[1.0] * len(kinds), on_host=False)
    with HostReads() as reads:
        for factor in (1.0, INF, 1.0):
            assert run(scaling, parameters, *[factor] * len(kinds), on_host=False) is None
    assert reads.total == 0


@BOTH
def test_one_that_is_not_fused_has_all_decided_on_the_host(scaler: Any) -> None:
    parameters, optimizers = make(["sgd-fused", "sgd"])
    scaling = Scaling(scaler(), optimizers)
    assert run(scaling, parameters, 1.0, 1.0, on_host=False) is False
    assert run(scaling, parameters, INF, 1.0, on_host=False) is True


@pytest.mark.parametrize("on_host", [True, False])
def test_persistent_skips_end_the_run(on_host: bool) -> None:
    parameters, optimizers = make(["sgd-fused"])
    scaling = Scaling(own(max_consecutive_skips=3), optimizers)
    for factor in (INF, INF, 1.0, NAN, INF):
        run(scaling, parameters, factor, on_host=on_host)
    with pytest.raises(PersistentSkipsError, match=r"^3 steps in a row"):
        run(scaling, parameters, INF, on_host=on_host)
    assert run(scaling, parameters, 1.0) is False


@BOTH
def test_several_that_share_a_scaler_are_judged_together(scaler: Any) -> None:
    used = scaler(growth_interval=1)
    made = [make(["sgd"]) for _ in range(2)]
    scalings = [Scaling(used, optimizers) for _, optimizers in made]
    for (parameters, _), scaling, factor in zip(made, scalings, (1.0, INF), strict=True):
        backward(scaling, parameters, factor)
        unscale(scaling)
        scaling.step(on_host=True)
    scalings[0].update()
    scalings[1].update()
    assert used.get_scale() == 4.0
    assert [parameters[0].tolist() for parameters, _ in made] == [[0.5, 0.5], [1.0, 1.0]]


@BOTH
def test_half_precision_gradients_are_refused(scaler: Any) -> None:
    weight = nn.Parameter(torch.ones(2, dtype=torch.float16))
    weight.grad = torch.ones(2, dtype=torch.float16)
    scaling = Scaling(scaler(), [torch.optim.SGD([weight], lr=1.0)])
    with pytest.raises(ConfigurationError, match=r"parameter 0 of group 0.*torch\.float16"):
        unscale(scaling)
    assert [list(group["params"]) for group in scaling.param_groups] == [[weight]]
