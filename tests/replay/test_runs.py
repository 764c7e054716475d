"""A replayed step: what comes out of it is what training computes, and it leaves nothing behind."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from halfstep import LossScaler, MixedPrecision
from halfstep.batch import split_batch
from halfstep.errors import ConfigurationError, InvalidTypeError
from halfstep.policy import Policy
from halfstep.randomness import RandomState
from halfstep.records import StepRecord
from halfstep.replay.runs import Replay, Run, StepCode

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
FP16, BF16, FP32 = (Policy.parse(each) for each in ("fp16", "bf16", "fp32"))
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


class Net(nn.Module):
    """Statistics, random numbers, an operation that policies may name, and activation checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)
        self.mix = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(lambda x: torch.matmul(self.first(x), self.mix).exp().log1p(), x, use_reentrant=False)
        noisy = F.dropout(self.norm(hidden), 0.3, self.training)
        result: Tensor = self.last((noisy + torch.randn_like(noisy) / 8).softmax(-1))
        return result


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x).float(), y)


def batch(count: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(count, 3, generator=generator), torch.randn(count, 2, generator=generator)


def code_of(model: nn.Module, *, loss: Loss = loss_of, parts: int = 1, count: int = 7) -> StepCode:
    given = batch(count)
    split = [(given, 1.0)] if parts == 1 else split_batch(given, parts=parts)
    return StepCode(model=model, parts=[(partial(loss, model, *part), 1 / share) for part, share in split], batch=given)


def trained(model: nn.Module, policy: str, *, scale: float, parts: int) -> tuple[StepRecord, dict[str, Tensor]]:
    """The record of a step of the engine, and the gradients that the optimizer was given."""
    seen: dict[str, Tensor] = {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(
        lambda *_: seen.update({name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None})
    )
    scaler = LossScaler(init_scale=scale) if scale != 1 else None
    amp = MixedPrecision(model, optimizer, policy, accumulate=parts, scaler=scaler)
    return amp.train_step(lambda x, y: loss_of(model, x, y), *batch()), seen


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Asserts that a block leaves parameters, buffers, gradients, hooks and random numbers as they were."""

    def looks() -> Any:
        hooks = [(len(each._forward_hooks), len(each._forward_pre_hooks), len(each._backward_hooks)) for each in model.modules()]
        classes = [type(each) for each in model.modules()]
        return hooks, classes, {name: id(each) for name, each in (*model.named_parameters(), *model.named_buffers())}

    state, looked, gradients = copy.deepcopy(model.state_dict()), looks(), [each.grad for each in model.parameters()]
    random = RandomState.capture()
    try:
        yield
    finally:
        assert looks() == looked
        assert all(torch.equal(each, state[name]) for name, each in model.state_dict().items())
        assert [each.dtype for each in model.state_dict().values()] == [each.dtype for each in state.values()]
        assert all(each.grad is gradient for each, gradient in zip(model.parameters(), gradients, strict=True))
        assert torch.equal(RandomState.capture().cpu, random.cpu)
        assert RandomState.capture().python == random.python


def assert_equal(run: Run, other: Run) -> None:
    assert run.loss == other.loss
    assert list(run.gradients) == list(other.gradients) != []
    assert all(torch.equal(each, other.gradients[name]) for name, each in run.gradients.items())


class TestEngine:
    @pytest.mark.parametrize("parts", [1, 3])
    @pytest.mark.parametrize(
        ("policy", "scale"),
        [
            ("fp32", 1.0),
            ("bf16", 1.0),
            ("fp16", 1024.0),
            ("fp16; norm=fp32; last=bf16", 256.0),
            ("bf16; op:softmax=fp32", 1.0),
            ("fp32; first=fp16; op:linear=bf16", 1.0),
            ("fp32; op:matmul=bf16; op:linear=bf16", 1.0),  # In what is computed again, too.
            ("pure bf16", 1.0),
            ("pure bf16; last=fp32", 1.0),
            ("pure fp16; class:BatchNorm1d=fp32", 64.0),
        ],
    )
    def test_a_run_is_the_step_that_the_engine_takes(self, policy: str, scale: float, parts: int) -> None:
        model = Net()
        with untouched(model), Replay(code_of(model, parts=parts), device=CPU) as replay:
            run = replay.run(Policy.parse(policy), scale=scale)
            replay.traced(Policy.parse(policy), scale=scale)
            again = replay.repeated(Policy.parse(policy), scale=scale)
        record, gradients = trained(model, policy, scale=scale, parts=parts)
        assert not record.skipped
        assert run.is_finite
        assert run.loss == pytest.approx(record.loss, rel=1e-6)
        assert list(run.gradients) == list(gradients) != []
        for name, gradient in gradients.items():
            assert run.gradients[name].dtype is gradient.dtype
            assert torch.equal(run.gradients[name] / scale, gradient), name
        assert_equal(again, run)


class TestRuns:
    def test_each_begins_at_the_same_state(self) -> None:
        model = Net()
        with Replay(code_of(model), device=CPU) as replay:
            first = replay.run(FP16, scale=8.0)
            replay.run(BF16, scale=1.0)
            assert_equal(replay.run(FP16, scale=8.0), first)
            assert replay.count == 3

    def test_a_trace_changes_nothing(self) -> None:
        model = Net()
        with Replay(code_of(model, parts=2), device=CPU) as replay:
            run, traced = replay.run(FP16, scale=8.0), replay.traced(FP16, scale=8.0)
        assert_equal(traced, run)
        assert (run.ops, run.details) == ((), ())
        assert len(traced.ops) == len(traced.details) > 20
        assert {op.phase for op in traced.ops} == {"forward", "backward"}
        assert {"first", "norm", "last"} <= {op.site.module for op in traced.ops}

    def test_so_many_values_are_kept_as_it_says(self) -> None:
        model = Net()
        with Replay(code_of(model), device=CPU) as replay:
            replay.samples = 3
            traced = replay.traced(FP16, scale=1.0)
            widened = replay.widened(FP16)
        for run in (traced, widened):
            assert max(each.sample.numel() for each in run.details if each.sample is not None) == 3

    @pytest.mark.parametrize("policy", ["fp16", "bf16; last=fp32", "fp16; op:softmax=fp32"])
    def test_widened_it_is_the_step_in_fp32(self, policy: str) -> None:
        model = Net()
        with Replay(code_of(model, parts=2), device=CPU) as replay:
            replay.traced(FP32, scale=1.0)
            full = replay.run(FP32, scale=1.0)
            assert_equal(replay.widened(Policy.parse(policy)), full)
            assert_equal(replay.widened(FP32), full)

    def test_widened_it_has_the_random_numbers_of_the_traced_run(self) -> None:
        seen: list[Tensor] = []

        def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            seen.append(torch.randn_like(model(x)).detach())
            return loss_of(model, x, y)

        model = nn.Linear(3, 2)
        with Replay(code_of(model, loss=loss, count=40), device=CPU) as replay:
            replay.traced(FP16, scale=1.0)
            replay.widened(FP16)
            replay.repeated(FP32, scale=1.0)
        assert [each.dtype for each in seen] == [torch.float16, torch.float32, torch.float32]
        assert all(torch.equal(seen[0].float(), each) for each in seen[1:])

    def test_it_begins_with_the_random_numbers_that_it_is_given(self) -> None:
        model = Net()
        before = RandomState.capture()
        with Replay(code_of(model), device=CPU) as replay:
            first = replay.run(FP16, scale=1.0)
        torch.rand(3)
        with untouched(model), Replay(code_of(model), device=CPU, random=before) as replay:
            assert_equal(replay.run(FP16, scale=1.0), first)
        with Replay(code_of(model), device=CPU) as replay:
            assert replay.run(FP16, scale=1.0).loss != first.loss

    def test_gradients_are_those_of_all_that_may_have_some(self) -> None:
        model, other = Net(), nn.Parameter(torch.tensor(2.0))
        model.last.bias.requires_grad_(False)
        code = code_of(model, loss=lambda model, x, y: loss_of(model, x, y) * other)
        with Replay(code, device=CPU, others=[*model.parameters(), other]) as replay:
            run = replay.run(FP32, scale=1.0)
        # The bias that is not trained is known to the optimizer alone, and gets no gradient; `other` is the eighth of those.
        assert set(run.gradients) == {name for name, _ in model.named_parameters()} - {"last.bias"} | {"optimizer[7]"}
        assert float(run.gradients["optimizer[7]"]) == pytest.approx(run.loss / 2)
        assert other.grad is None

    def test_a_loss_without_gradients_has_none(self) -> None:
        model = Net()
        with Replay(code_of(model, loss=lambda model, x, y: loss_of(model, x, y).detach()), device=CPU) as replay:
            run = replay.run(FP16, scale=1024.0)
        assert run.loss > 0
        assert (dict(run.gradients), run.is_finite) == ({}, True)

    @pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
    def test_a_loss_or_a_gradient_that_is_not_finite(self, value: float) -> None:
        def in_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            return loss_of(model, x, y) + value

        def in_gradient(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            loss = loss_of(model, x, y)
            loss.register_hook(lambda gradient: gradient * value)  # type: ignore[no-untyped-call]
            return loss

        model = nn.Linear(3, 2)
        for loss in (in_loss, in_gradient):
            with Replay(code_of(model, loss=loss), device=CPU) as replay:
                assert not replay.run(FP32, scale=1.0).is_finite

    def test_a_scale_that_is_too_high_is_seen_in_gradients_alone(self) -> None:
        model = nn.Linear(3, 2)
        with Replay(code_of(model, loss=lambda model, x, y: F.mse_loss(model(x), y.half())), device=CPU) as replay:
            low, high = replay.run(FP16, scale=1.0), replay.run(FP16, scale=2.0**24)
        assert (low.is_finite, high.is_finite) == (True, False)
        assert low.loss == high.loss


class TestHalfStorage:
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).half()

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        weight = next(model.parameters())
        return F.mse_loss(model(x.to(weight.dtype)).float(), y)

    def test_widened_it_is_stored_in_fp32(self) -> None:
        model, wide = self.model(), self.model()
        wide.load_state_dict(model.state_dict())
        wide.float()
        with untouched(model), Replay(code_of(model, loss=self.loss), device=CPU) as replay:
            assert set(replay.half_buffers) == {"1.running_mean", "1.running_var"}
            low = replay.traced(FP32, scale=1.0)
            full = replay.widened(FP32)
        with Replay(code_of(wide, loss=self.loss), device=CPU) as other:
            assert_equal(full, other.run(FP32, scale=1.0))
        assert {each.dtype for each in low.gradients.values()} == {torch.float16}
        assert {each.dtype for each in full.gradients.values()} == {torch.float32}
        assert {each.dtype for run in (low, full) for each in run.buffers.values()} == {torch.float32}
        assert set(low.buffers) == set(full.buffers) == set(replay.half_buffers)
        for name, each in low.buffers.items():
            assert torch.equal(each, each.half().float()), "it is what was stored"
            assert not torch.equal(full.buffers[name], full.buffers[name].half().float())
            assert torch.allclose(each, full.buffers[name], rtol=2e-3, atol=1e-3)

    def test_it_is_stored_in_half_again_after_an_exception(self) -> None:
        def stop(replay: Replay) -> None:
            with replay.stored_wide():
                assert {each.dtype for each in replay.parameters.values()} == {torch.float32}
                raise ValueError("stop")

        model = self.model()
        with untouched(model), Replay(code_of(model), device=CPU) as replay, pytest.raises(ValueError, match="stop"):
            stop(replay)


class TestErrors:
    @pytest.mark.parametrize("policy", ["fp16", "fp16; norm=fp32; op:softmax=fp32", "pure fp16; last=fp32"])
    def test_after_an_exception_in_the_loss_the_model_is_as_before(self, policy: str) -> None:
        model = Net()
        model.first.weight.grad = torch.ones(6, 3)
        calls = []

        def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            value = loss_of(model, x, y)
            calls.append(1)
            if len(calls) % 2 == 0:
                raise RuntimeError("no more memory")
            return value

        parsed = Policy.parse(policy)
        code = code_of(model, loss=loss, parts=2)
        within: list[Callable[[Replay], Run]] = [
            lambda replay: replay.run(parsed, scale=2.0),
            lambda replay: replay.traced(parsed, scale=2.0),
            lambda replay: replay.repeated(parsed, scale=2.0),
            lambda replay: replay.widened(parsed),
        ]
        for call in within:
            with untouched(model), pytest.raises(RuntimeError, match="no more memory"), Replay(code, device=CPU) as replay:
                call(replay)
        assert torch.is_autocast_enabled("cpu") is False

    def test_a_replay_goes_on_after_an_exception(self) -> None:
        model = Net()
        errors = iter([ValueError("once")])

        def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            value = loss_of(model, x, y)
            error = next(errors, None)
            if error is not None:
                raise error
            return value

        with Replay(code_of(model, loss=loss), device=CPU) as replay:
            with pytest.raises(ValueError, match="once"):
                replay.traced(FP16, scale=1.0)
            assert_equal(replay.traced(FP16, scale=1.0), replay.run(FP16, scale=1.0))

    def test_a_loss_that_is_no_scalar(self) -> None:
        model = Net()
        message = r"must be a scalar tensor, not one of shape \(7, 2\)\. Reduce it"
        code = code_of(model, loss=lambda model, x, y: model(x))
        with Replay(code, device=CPU) as replay, pytest.raises(ConfigurationError, match=message):
            replay.run(FP16, scale=1.0)

    def test_a_loss_that_is_no_tensor(self) -> None:
        model = Net()
        code: Any = StepCode(model=model, parts=[(lambda: 3.0, 1.0)])  # type: ignore[list-item,return-value]
        with Replay(code, device=CPU) as replay, pytest.raises(InvalidTypeError, match="must be a scalar tensor, not a float"):
            replay.run(FP16, scale=1.0)

    @pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
    def test_one_element_is_a_scalar(self, shape: tuple[int, ...]) -> None:
        model = Net()
        with Replay(code_of(model, loss=lambda model, x, y: loss_of(model, x, y).reshape(shape)), device=CPU) as replay:
            assert replay.run(FP16, scale=4.0).is_finite


class TestGoingOn:
    def test_steps_follow_each_other_and_are_put_back(self) -> None:
        model = Net()
        with untouched(model), Replay(code_of(model), device=CPU) as replay:
            first = replay.run(FP32, scale=1.0)
            with replay.going_on():
                one = replay.follow(replay.code, FP32, scale=1.0)
                two = replay.follow(replay.code, FP32, scale=1.0)
                assert int(model.norm.num_batches_tracked) == 2  # type: ignore[arg-type]
                assert all(each.grad is two.gradients[name] for name, each in model.named_parameters())
            assert int(model.norm.num_batches_tracked) == 0  # type: ignore[arg-type]
            assert_equal(first, one)
            assert two.loss != one.loss, "random numbers go on"
            assert replay.count == 1
