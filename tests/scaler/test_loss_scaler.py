from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from halfstep.errors import ConfigurationError, HalfstepWarning, InvalidTypeError, StepOrderError
from halfstep.scaler import LossScaler
from tests.scaler.loops import INF, NAN, OPTIMIZERS, backward, iterate, same, snapshot, weights


class Wrapper:
    """What libraries put round an optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return list(self.optimizer.param_groups)

    def step(self) -> None:
        self.optimizer.step()


def make(optimizer: str = "sgd", **settings: Any) -> tuple[LossScaler, Optimizer, nn.Parameter]:
    (weight,) = weights()
    return LossScaler("cpu", **{"init_scale": 8.0, **settings}), OPTIMIZERS[optimizer]([weight]), weight


def test_it_is_a_scaler_of_torch() -> None:
    assert issubclass(LossScaler, torch.amp.GradScaler)
    for name, value in vars(torch.amp.GradScaler).items():
        if not name.startswith("_") and callable(value):
            assert name in vars(LossScaler), f"{name} would act on the state of a disabled scaler"


class TestScale:
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("shape", [(), (1,), (2, 3)])
    def test_half_precision_comes_out_in_fp32(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        scaled = LossScaler("cpu").scale(torch.full(shape, 3.0, dtype=dtype))
        assert scaled.dtype is torch.float32
        assert (scaled == 3 * 65536).all()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
    def test_other_numbers_keep_their_dtype(self, dtype: torch.dtype) -> None:
        scaled = LossScaler("cpu", init_scale=8.0).scale(torch.ones(2, dtype=dtype))
        assert scaled.dtype is dtype
        assert (scaled == 8).all()

    def test_nests_keep_their_shape(self) -> None:
        one = torch.ones(())
        scaled = LossScaler("cpu", init_scale=8.0).scale([one, (one, [one]), (each for each in [one])])
        assert scaled == [8.0, (8.0, [8.0]), [8.0]]

    @pytest.mark.parametrize("outputs", [3.0, None, "loss", {"loss": 1}, {}, [torch.ones(()), "loss"]], ids=str)
    def test_anything_else_is_refused(self, outputs: Any) -> None:
        with pytest.raises(InvalidTypeError, match="takes a tensor or an iterable of tensors, not a "):
            LossScaler("cpu").scale(outputs)

    def test_gradients_flow_back_in_the_dtype_of_the_loss(self) -> None:
        weight = torch.ones((), dtype=torch.float16, requires_grad=True)
        LossScaler("cpu", init_scale=8.0).scale(weight * 2).backward()
        assert weight.grad is not None
        assert (weight.grad.item(), weight.grad.dtype) == (16.0, torch.float16)

    def test_the_scale_is_made_once_where_it_is_first_needed(self) -> None:
        scaler = LossScaler(init_scale=8.0)
        scale = scaler.scale_on(torch.device("cpu"))
        assert scaler.scale_on(torch.device("meta")) is scale
        scaler.update(2)
        assert scale.item() == 2.0


class TestOrder:
    @pytest.mark.parametrize("optimizer", ["sgd", "sgd-fused", "adamw-fused"])
    def test_unscaling_twice_is_an_error(self, optimizer: str) -> None:
        scaler, made, weight = make(optimizer)
        backward(scaler, [weight], 1.0)
        scaler.unscale_(made)
        for again in (made, Wrapper(made)):
            with pytest.raises(StepOrderError, match=r"unscale_\(\) was called twice .* unscaled already"):
                scaler.unscale_(again)  # type: ignore[arg-type]
        assert weight.grad is not None
        assert weight.grad.tolist() == [1.0] * 3

    @pytest.mark.parametrize("optimizer", ["sgd", "sgd-fused"])
    def test_nothing_follows_a_step_but_an_update(self, optimizer: str) -> None:
        scaler, made, weight = make(optimizer)
        backward(scaler, [weight], 1.0)
        scaler.step(made)
        with pytest.raises(StepOrderError, match=r"step\(\) was called twice for one optimizer since the last update\(\)"):
            scaler.step(made)
        with pytest.raises(StepOrderError, match=r"unscale_\(\) was called after step\(\): call update\(\) first"):
            scaler.unscale_(Wrapper(made))  # type: ignore[arg-type]
        assert weight.tolist() == [0.5] * 3
        scaler.update()
        iterate(scaler, made, 1.0)

    @pytest.mark.parametrize(
        "call", [lambda scaler, optimizer: scaler.step(optimizer), lambda scaler, optimizer: scaler.unscale_(optimizer)]
    )
    @pytest.mark.parametrize("optimizer", ["sgd", "sgd-fused"])
    def test_gradients_that_were_never_scaled_are_not_divided(self, optimizer: str, call: Callable[[LossScaler, Optimizer], Any]) -> None:
        scaler, made, weight = make(optimizer)
        weight.sum().backward()  # type: ignore[no-untyped-call]
        with pytest.raises(StepOrderError, match=r"No loss was scaled yet: call scaler\.scale\(loss\)\.backward\(\)"):
            call(scaler, made)
        assert weight.tolist() == [1.0] * 3
        iterate(scaler, made, 1.0)
        assert weight.tolist() == [0.5] * 3

    @pytest.mark.parametrize("optimizer", ["sgd", "sgd-fused"])
    def test_a_wrapper_and_its_optimizer_are_one(self, optimizer: str) -> None:
        scaler, made, weight = make(optimizer)
        backward(scaler, [weight], 1.0)
        scaler.unscale_(Wrapper(made))  # type: ignore[arg-type]
        assert scaler.found_inf(made) is scaler.found_inf(Wrapper(made))  # type: ignore[arg-type]
        scaler.step(made)
        scaler.update()
        assert weight.tolist() == [0.5] * 3
        assert scaler.stats().steps == 1

    def test_a_group_that_is_added_in_between_is_checked_at_the_step(self) -> None:
        scaler, made, weight = make()
        (late,) = weights(2)
        backward(scaler, [weight], 1.0)
        scaler.unscale_(made)
        made.add_param_group({"params": [late]})
        late.grad = torch.full((2,), NAN)
        scaler.step(made)
        scaler.update()
        assert weight.tolist() == [1.0] * 3
        assert scaler.stats().skips == 1

    @pytest.mark.parametrize("optimizer", ["momentum", "adamw-fused"])
    def test_a_state_of_the_optimizer_may_be_loaded_between_steps(self, optimizer: str) -> None:
        scaler, made, _ = make(optimizer)
        for factor in (1.0, INF, 1.0, INF):
            iterate(scaler, made, factor, unscale=True)
            made.load_state_dict(made.state_dict())
        assert (scaler.stats().steps, scaler.stats().skips) == (4, 2)

    @pytest.mark.parametrize("optimizer", ["sgd", "sgd-fused", "adamw-fused"])
    def test_a_step_that_broke_off_can_be_tried_again(self, optimizer: str) -> None:
        scaler, made, weight = make(optimizer)
        inner = made.step

        def run_out_of_memory() -> None:
            made.step = inner  # type: ignore[method-assign]
            raise MemoryError

        made.step = run_out_of_memory  # type: ignore[method-assign, assignment]
        backward(scaler, [weight], 1.0)
        with pytest.raises(MemoryError):
            scaler.step(made)
        scaler.step(made)
        scaler.update()
        assert torch.allclose(weight, torch.full((3,), 0.5), rtol=0.02)
        assert scaler.stats().steps == 1

    @pytest.mark.parametrize("until", ["unscale", "step"])
    def test_an_iteration_can_be_discarded(self, until: str) -> None:
        scaler, made, weight = make()
        backward(scaler, [weight], INF)
        scaler.unscale_(made)
        if until == "step":
            scaler.step(made)
        scaler.record_step(torch.ones(()), skipped=None)
        scaler.discard()
        scaler.update()
        assert (scaler.get_scale(), scaler.stats().steps, scaler.stats().consecutive_skips) == (8.0, 0, 0)
        iterate(scaler, made, 1.0, unscale=True)
        assert weight.tolist() == [0.5] * 3

    def test_arguments_and_the_answer_are_those_of_the_optimizer(self) -> None:
        class Chatty(torch.optim.SGD):
            def step(self, closure: Any = None, *, word: str = "") -> Any:
                super().step()
                return closure, word

        (weight,) = weights()
        scaler, made = LossScaler("cpu"), Chatty([weight], lr=0.5)
        backward(scaler, [weight], 1.0)
        assert scaler.step(made, None, word="hello") == (None, "hello")
        scaler.update()
        backward(scaler, [weight], INF)
        assert scaler.step(made, word="hello") is None

    @pytest.mark.parametrize("optimizer", ["sgd", "sgd-fused"])
    def test_closures_are_refused_before_anything_happens(self, optimizer: str) -> None:
        scaler, made, weight = make(optimizer)
        backward(scaler, [weight], 1.0)
        for arguments, named in (((lambda: 1.0,), {}), ((), {"closure": lambda: 1.0})):
            with pytest.raises(ConfigurationError, match="a closure computes gradients that nobody unscales"):
                scaler.step(made, *arguments, **named)
        assert weight.grad is not None
        assert weight.grad.tolist() == [8.0] * 3
        scaler.step(made, closure=None)
        assert weight.tolist() == [0.5] * 3


class TestVerdict:
    @pytest.mark.parametrize("optimizer", ["sgd", "sgd-fused", "adamw-fused"])
    @pytest.mark.parametrize("before", [False, True])
    def test_whoever_knows_better_writes_into_it(self, optimizer: str, before: bool) -> None:
        scaler, made, weight = make(optimizer)
        iterate(scaler, made, 1.0)
        kept = snapshot(made)
        backward(scaler, [weight], 1.0)
        if not before:
            scaler.unscale_(made)
        scaler.found_inf(made).fill_(1.0)
        scaler.step(made)
        scaler.update()
        assert same(snapshot(made), kept)
        assert (scaler.stats().skips, scaler.get_scale()) == (1, 4.0)

    @pytest.mark.parametrize("optimizer", ["sgd", "sgd-fused"])
    def test_asking_for_it_is_not_unscaling(self, optimizer: str) -> None:
        scaler, made, weight = make(optimizer)
        backward(scaler, [weight], 1.0)
        verdict = scaler.found_inf(made)
        assert (verdict.item(), verdict.dtype, verdict.shape) == (0.0, torch.float32, ())
        scaler.step(made)
        assert weight.tolist() == [0.5] * 3
        scaler.update()
        backward(scaler, [weight], INF)
        verdict = scaler.found_inf(made)
        scaler.unscale_(made)
        assert verdict.item() == 1.0
        assert scaler.found_inf(made) is verdict

    def test_it_is_there_without_gradients_and_decides(self) -> None:
        scaler, made, _ = make()
        scaler.found_inf(made).fill_(1.0)
        scaler.step(made)
        scaler.update()
        assert (scaler.stats().skips, scaler.get_scale()) == (1, 4.0)

    def test_a_recorded_step_counts_and_moves_the_scale(self) -> None:
        scaler, made, weight = make()
        scaler.record_step(torch.ones(()), skipped=None)
        scaler.record_step(None, skipped=False)
        backward(scaler, [weight], 1.0)
        scaler.step(made)
        scaler.update()
        assert (scaler.stats().steps, scaler.stats().skips, scaler.get_scale()) == (3, 1, 4.0)
        scaler.update()
        assert scaler.get_scale() == 4.0


class TestUpdate:
    def test_without_a_verdict_nothing_changes(self) -> None:
        scaler, made, _ = make(growth_interval=1)
        scaler.update()
        scaler.step(made)
        scaler.update()
        assert (scaler.get_scale(), scaler.stats().steps) == (8.0, 1)

    @pytest.mark.parametrize("started", [False, True])
    @pytest.mark.parametrize("new_scale", [32, 32.0, torch.tensor(32), torch.tensor([32.0])])
    def test_a_scale_can_be_set(self, started: bool, new_scale: Any) -> None:
        scaler, made, weight = make(growth_interval=1)
        if started:
            backward(scaler, [weight], INF)
            scaler.step(made)
        scaler.update(new_scale)
        assert scaler.get_scale() == scaler.scale(torch.ones(())).item() == 32.0
        assert scaler.stats().skips == int(started), "the skip is not counted"
        scaler.update()
        assert scaler.get_scale() == 32.0

    @pytest.mark.parametrize("started", [False, True])
    @pytest.mark.parametrize(("new_scale", "expected"), [(0.25, 2.0), (1e6, 64.0), (torch.tensor(1e6), 64.0), (7, 7.0)])
    def test_it_is_brought_within_the_bounds(self, started: bool, new_scale: Any, expected: float) -> None:
        scaler, made, _ = make(min_scale=2.0, max_scale=64.0)
        if started:
            iterate(scaler, made, 1.0)
        scaler.update(new_scale)
        assert scaler.get_scale() == expected

    @pytest.mark.parametrize("new_scale", [0, -1, NAN, INF, -INF, 0.0, torch.tensor(NAN), torch.tensor(0)])
    def test_a_scale_that_cannot_be_one_changes_nothing(self, new_scale: Any) -> None:
        scaler, made, weight = make()
        backward(scaler, [weight], INF)
        scaler.step(made)
        with pytest.raises(ConfigurationError, match="cannot be a loss scale"):
            scaler.update(new_scale)
        assert scaler.get_scale() == 8.0
        scaler.update()
        assert (scaler.get_scale(), scaler.stats().skips) == (4.0, 1)

    def test_a_static_scale_cannot_be_set(self) -> None:
        scaler, made, weight = make(static=True)
        with pytest.raises(ConfigurationError, match="this scaler is static"):
            scaler.update(4.0)
        for factor in (1.0, INF, INF):
            iterate(scaler, made, factor)
        assert scaler.get_scale() == 8.0
        assert scaler.stats().skips == 2
        assert weight.tolist() == [0.5] * 3

    def test_a_scale_that_moves_before_backward_is_an_error_of_autograd(self) -> None:
        scaler, _, weight = make()
        scaled = scaler.scale(weight.sum())
        scaler.update(2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            scaled.backward()


class TestSetters:
    def test_settings_can_be_changed(self) -> None:
        scaler, made, _ = make()
        scaler.set_growth_factor(4)
        scaler.set_backoff_factor(0.125)
        scaler.set_growth_interval(1)
        assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (4.0, 0.125, 1)
        iterate(scaler, made, 1.0)
        assert scaler.get_scale() == 32.0
        iterate(scaler, made, INF)
        assert scaler.get_scale() == 4.0

    @pytest.mark.parametrize(
        ("name", "value"),
        [("growth_factor", 1.0), ("growth_factor", "2"), ("backoff_factor", 1.0), ("growth_interval", 0), ("growth_interval", 2.0)],
    )
    def test_they_are_checked(self, name: str, value: Any) -> None:
        scaler, *_ = make()
        before = scaler.settings
        with pytest.raises((ConfigurationError, InvalidTypeError), match=rf"LossScaler\({name}="):
            getattr(scaler, f"set_{name}")(value)
        assert scaler.settings is before

    @pytest.mark.parametrize("started", [False, True])
    def test_a_shorter_interval_cannot_be_missed(self, started: bool) -> None:
        scaler, made, weight = make(growth_interval=10)
        for _ in range(5):
            iterate(scaler, made, 1.0)
        if not started:
            saved = scaler.state_dict()
            scaler = LossScaler("cpu", init_scale=8.0, growth_interval=10)
            scaler.load_state_dict(saved)
        scaler.set_growth_interval(3)
        assert scaler.state_dict()["_growth_tracker"] == 2
        iterate(scaler, made, 1.0)
        assert scaler.get_scale() == 16.0
        assert weight.isfinite().all()


class TestDisabled:
    def test_losses_and_gradients_stay_as_they_are(self) -> None:
        scaler, made, weight = make(enabled=False)
        loss = weight.sum()
        assert scaler.scale(loss) is loss
        assert scaler.scale("anything") == "anything"
        loss.backward()
        for _ in range(2):
            scaler.unscale_(made)
        scaler.step(made)
        scaler.update()
        scaler.update(0.0)
        assert weight.tolist() == [0.5] * 3
        assert not scaler.is_enabled()

    def test_it_answers_every_question(self) -> None:
        scaler, *_ = make(enabled=False, growth_factor=3.0, backoff_factor=0.25, growth_interval=7)
        assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (3.0, 0.25, 7)
        assert scaler.get_scale() == scaler.stats().scale == 1.0
        assert scaler.state_dict() == {}

    def test_closures_are_the_optimizers_business(self) -> None:
        (weight,) = weights()
        scaler, optimizer = LossScaler("cpu", enabled=False), torch.optim.LBFGS([weight])

        def closure() -> float:
            optimizer.zero_grad()
            loss = (weight**2).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.item()

        assert scaler.step(optimizer, closure) == 3.0
        assert weight.abs().max() < 1.0

    def test_a_state_is_set_aside_with_a_warning(self) -> None:
        scaler, *_ = make(enabled=False)
        scaler.load_state_dict({})
        with pytest.warns(HalfstepWarning, match="loaded into a disabled scaler") as caught:
            scaler.load_state_dict(LossScaler("cpu").state_dict())
        assert caught[0].filename == __file__
        assert scaler.state_dict() == {}
