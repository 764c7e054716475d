from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep.engine import MixedPrecision
from tests.engine.loops import loss_of, make_batches, make_net, same_state

PRECISIONS = ["fp32", "bf16", "fp16"]


@pytest.mark.parametrize("schedule", [True, False])
@pytest.mark.parametrize("clip", [None, 1.0, math.inf])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_optimizer_without_any_gradient_is_no_error(precision: str, clip: float | None, schedule: bool) -> None:
    trained, other = nn.Linear(3, 1), nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5) if schedule else None
    amp = MixedPrecision(trained, optimizer, precision, max_grad_norm=clip, scheduler=scheduler)
    before = [parameter.clone() for parameter in trained.parameters()]
    first = amp.train_step(lambda: other(torch.ones(2, 3)).float().mean())
    assert not first.skipped
    assert first.scale == (2.0**16 if precision == "fp16" else 1.0)
    assert first.grad_norm == (None if clip is None else 0.0)
    assert all(torch.equal(now, then) for now, then in zip(trained.parameters(), before, strict=True))
    assert optimizer.param_groups[0]["lr"] == 0.1, "the schedule moved, and the optimizer did not"
    second = amp.train_step(lambda: trained(torch.ones(2, 3)).float().mean() * 1e-3)
    assert not second.skipped
    assert not any(torch.equal(now, then) for now, then in zip(trained.parameters(), before, strict=True))
    assert optimizer.param_groups[0]["lr"] == (0.05 if schedule else 0.1)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_frozen_parameters_stay_as_they_are(precision: str) -> None:
    model = make_net()
    model[0].requires_grad_(False)  # type: ignore[index]
    amp = MixedPrecision(model, torch.optim.AdamW(model.parameters(), lr=0.1), precision, max_grad_norm=1.0)
    before = [parameter.clone() for parameter in model.parameters()]
    for x, y in make_batches(2):
        assert not amp.train_step(lambda x, y: loss_of(model, x, y), x, y).skipped
    changed = [not torch.equal(now, then) for now, then in zip(model.parameters(), before, strict=True)]
    assert changed == [False, False, True, True, True, True]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_group_that_is_added_later_is_unscaled_clipped_and_cleared(precision: str) -> None:
    def run(by_hand: bool) -> tuple[dict[str, Any], list[float]]:
        model = make_net()
        optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)  # type: ignore[index]
        scaler = torch.amp.GradScaler("cpu", init_scale=512.0) if precision == "fp16" else None
        amp = None if by_hand else MixedPrecision(model, optimizer, precision, max_grad_norm=0.1, scaler=scaler)
        norms = []
        for step, (x, y) in enumerate(make_batches(3)):
            if step == 1:
                optimizer.add_param_group({"params": model[3].parameters(), "lr": 0.2})  # type: ignore[index]
            if amp is not None:
                record = amp.train_step(lambda x, y: loss_of(model, x, y), x, y)
                assert record.grad_norm is not None
                norms.append(record.grad_norm)
                if step >= 1:
                    assert all(parameter.grad is None for parameter in model[3].parameters())  # type: ignore[index]
                continue
            model.zero_grad()
            dtype = torch.float16 if precision == "fp16" else torch.bfloat16
            with torch.autocast("cpu", dtype=dtype, enabled=precision != "fp32"):
                loss = loss_of(model, x, y)
            (loss if scaler is None else scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]
            if scaler is not None:
                scaler.unscale_(optimizer)
            mine = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            norms.append(nn.utils.clip_grad_norm_(mine, 0.1).item())
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
        return model.state_dict(), norms

    hand, engine = run(by_hand=True), run(by_hand=False)
    assert engine[1] == hand[1]
    assert same_state(engine[0], hand[0])
    assert engine[1][1] > 0.1, "nothing was clipped"


@pytest.mark.parametrize("precision", PRECISIONS)
def test_shared_parameters_count_once(precision: str) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(3, 3), nn.Linear(3, 3)
            self.outer.weight = self.inner.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.outer(self.inner(x))  # type: ignore[no-any-return]

    model = Tied()
    amp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.0), precision, max_grad_norm=math.inf)
    x = torch.randn(4, 3)
    record = amp.train_step(lambda: model(x).float().square().mean())
    model(x).square().mean().backward()
    total = torch.stack([parameter.grad.square().sum() for parameter in model.parameters() if parameter.grad is not None]).sum().sqrt()
    assert record.grad_norm == pytest.approx(total.item(), rel={"fp32": 1e-6, "bf16": 0.03, "fp16": 4e-3}[precision])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_another_loss_left_in_the_gradients_is_not_stepped_with(precision: str) -> None:
    first, second = make_net(), make_net()
    first.eval()
    for parameter in first.parameters():
        parameter.grad = torch.full_like(parameter, 100.0)
    for model in (first, second):
        amp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), precision, accumulate=2)
        x, y = make_batches(1)[0]
        amp.train_step(lambda x, y, model=model: loss_of(model, x, y), x, y)
    assert same_state(first.state_dict(), second.state_dict())


def test_a_norm_without_a_bound_is_measured_and_clips_nothing() -> None:
    results = []
    for clip in (None, math.inf):
        model = make_net()
        amp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), max_grad_norm=clip, precision="fp32")
        x, y = make_batches(1)[0]
        record = amp.train_step(lambda x, y, model=model: loss_of(model, x, y), x, y)
        results.append((model.state_dict(), record.grad_norm))
    assert same_state(results[0][0], results[1][0])
    assert results[0][1] is None
    assert results[1][1] is not None
    assert results[1][1] > 0


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_norm_that_overflows_does_not_destroy_the_weights(precision: str) -> None:
    weight = nn.Linear(2, 1, bias=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0) if precision == "fp16" else None
    amp = MixedPrecision(weight, torch.optim.SGD(weight.parameters(), lr=0.0), precision, max_grad_norm=math.inf, scaler=scaler)
    record = amp.train_step(lambda factor: (weight.weight * factor).sum(), 1e30)
    assert not record.skipped
    assert record.grad_norm == math.inf
    assert weight.weight.isfinite().all()


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_a_learning_rate_in_a_tensor_is_recorded_as_it_was_in_the_step(optimizer: Any) -> None:
    model = make_net()
    made = optimizer(model.parameters(), lr=torch.tensor(0.5))
    amp = MixedPrecision(model, made, "bf16", scheduler=torch.optim.lr_scheduler.StepLR(made, 1, gamma=0.5))
    lrs = [amp.train_step(lambda x, y: loss_of(model, x, y), x, y).lr for x, y in make_batches(3)]
    assert lrs == [0.5, 0.25, 0.125]
    assert all(type(lr) is float for lr in lrs)


def test_the_learning_rate_of_the_first_group_is_recorded() -> None:
    model = make_net()
    made = torch.optim.SGD([{"params": model[0].parameters(), "lr": 0.3}, {"params": model[3].parameters()}], lr=0.1)  # type: ignore[index]
    amp = MixedPrecision(model, made, "fp32")
    assert amp.train_step(lambda x, y: loss_of(model, x, y), *make_batches(1)[0]).lr == 0.3


def test_an_optimizer_without_a_learning_rate_is_no_error() -> None:
    class Sign(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            assert closure is None
            with torch.no_grad():
                for parameter in self.param_groups[0]["params"]:
                    parameter.sub_(0.01 * parameter.grad.sign())

    model = make_net()
    amp = MixedPrecision(model, Sign(model.parameters()), "fp16")
    assert math.isnan(amp.train_step(lambda x, y: loss_of(model, x, y), *make_batches(1)[0]).lr)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_sparse_gradients_are_unscaled(precision: str) -> None:
    ends = []
    for sparse in (True, False):
        torch.manual_seed(0)
        model = nn.Embedding(7, 3, sparse=sparse)
        amp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), precision)
        amp.train_step(lambda ids, model=model: model(ids).square().mean(), torch.tensor([1, 1, 4]))
        ends.append(model.weight.detach())
    torch.testing.assert_close(ends[0], ends[1])
    assert not torch.equal(ends[0][1], nn.Embedding(7, 3).weight[1])
