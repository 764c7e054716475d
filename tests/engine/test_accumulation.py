from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor, nn

from halfstep.engine import MixedPrecision
from halfstep.errors import ConfigurationError
from tests.engine.loops import make_net


def gradients(model: nn.Module, accumulate: int, x: Tensor, y: Tensor) -> tuple[float, list[Tensor]]:
    """The loss of one step and, by a step of plain gradient descent, the gradients that it was taken with."""
    amp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=1.0), "fp32", accumulate=accumulate)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    record = amp.train_step(lambda x, y: nn.functional.mse_loss(model(x), y), x, y)
    return record.loss, [then - now.detach() for now, then in zip(model.parameters(), before, strict=True)]


@given(samples=st.integers(1, 9), data=st.data())
@hypothesis_settings(max_examples=25)
def test_any_split_of_a_mean_loss_has_the_gradients_of_the_whole_batch(samples: int, data: st.DataObject) -> None:
    accumulate = data.draw(st.integers(1, samples))
    generator = torch.Generator().manual_seed(samples)
    x, y = torch.randn(samples, 5, generator=generator), torch.randn(samples, 3, generator=generator)
    reference = make_net().double()
    loss = nn.functional.mse_loss(reference(x.double()), y.double())
    loss.backward()  # type: ignore[no-untyped-call]
    seen, grads = gradients(make_net(), accumulate, x, y)
    assert seen == pytest.approx(loss.item(), rel=1e-5)
    for mine, parameter in zip(grads, reference.parameters(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(mine.double(), parameter.grad, rtol=1e-4, atol=3e-6)


def test_five_samples_in_two_parts_weigh_two_and_three_fifths() -> None:
    model = nn.Linear(1, 1, bias=False)
    seen = []
    amp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=1.0), "fp32", accumulate=2)
    before = model.weight.item()

    def mean(x: Tensor) -> Tensor:
        seen.append(x.flatten().tolist())
        return model(x).mean()  # type: ignore[no-any-return]

    amp.train_step(mean, torch.tensor([[1.0], [2.0], [3.0], [4.0], [10.0]]))
    assert seen == [[1.0, 2.0], [3.0, 4.0, 10.0]]
    assert before - model.weight.item() == pytest.approx(4.0, rel=1e-6)


def train(batch: Any, *, accumulate: int = 2) -> list[Any]:
    """The parts that a function was called with."""
    model = nn.Linear(2, 1)
    seen = []

    def loss(*part: Any) -> Tensor:
        seen.append(part)
        return model(torch.ones(1, 2)).sum()  # type: ignore[no-any-return]

    MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", accumulate=accumulate).train_step(loss, *batch)
    return seen


def test_nested_batches_are_split_and_what_is_no_tensor_goes_to_each_part() -> None:
    seen = train([{"x": torch.arange(4), "deep": [torch.arange(8).reshape(4, 2), None]}, "name", None, torch.tensor(7.0), 3])
    assert len(seen) == 2
    for part, (start, stop) in zip(seen, [(0, 2), (2, 4)], strict=True):
        nest, name, nothing, scalar, number = part
        assert nest["x"].tolist() == list(range(start, stop))
        assert nest["deep"][0].tolist() == torch.arange(8).reshape(4, 2)[start:stop].tolist()
        assert nest["deep"][1] is None
        assert (name, nothing, scalar.item(), number) == ("name", None, 7.0, 3)


def test_with_one_micro_batch_the_batch_is_passed_as_it_is() -> None:
    x, odd = torch.ones(2), object()
    assert train([x, torch.ones(3), odd], accumulate=1) == [(x, pytest.approx(torch.ones(3)), odd)]


@pytest.mark.parametrize(
    ("batch", "match"),
    [
        ([torch.ones(2)], r"A batch of 2 samples cannot be split into accumulate=3 micro-batches\. Use a larger batch"),
        ([torch.ones(1)], r"A batch of 1 sample cannot"),
        ([torch.ones(0)], r"A batch of 0 samples cannot"),
        ([torch.ones(4), torch.ones(6)], r"differ in their first dimension \(4, 6\)\. Split it yourself: call autocast\(\), backward\(\)"),
        ([{"a": torch.ones(6)}, [torch.ones(3, 6)]], r"differ in their first dimension \(3, 6\)"),
        ([], r"has no tensor to split into 3 micro-batches"),
        (["text", None, torch.tensor(1.0)], r"has no tensor to split into 3 micro-batches\. Split it yourself"),
    ],
)
def test_a_batch_that_cannot_be_split_is_refused(batch: list[Any], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        train(batch, accumulate=3)


def test_a_batch_that_cannot_be_split_leaves_nothing_behind() -> None:
    model = nn.Linear(2, 1)
    amp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp16", accumulate=3)
    with pytest.raises(ConfigurationError, match="cannot be split"):
        amp.train_step(lambda x: model(x).float().mean(), torch.ones(2, 2))
    assert amp.train_step(lambda x: model(x).float().mean(), torch.ones(3, 2)).step == 1


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_recorded_loss_is_the_mean_over_the_micro_batches(precision: str) -> None:
    model = nn.Linear(1, 1)
    amp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.0), precision, accumulate=4)
    values = iter([1.0, 2.0, 3.0, 6.0])
    record = amp.train_step(lambda x: model(x).float().mean() * 0.0 + next(values), torch.ones(4, 1))
    assert record.loss == 3.0
