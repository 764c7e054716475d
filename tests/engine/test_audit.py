from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep.engine import MixedPrecision, audit
from halfstep.errors import ConfigurationError, HalfstepWarning
from halfstep.records import Precision
from halfstep.scaler import LossScaler
from tests.engine.loops import loss_of, make_batches, make_net

PRECISIONS: list[Precision] = ["fp32", "bf16", "fp16"]
REMEDY = r"make it from model\.parameters\(\) afterwards"


def sgd(*modules: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for module in modules for parameter in module.parameters()], lr=0.1)


def _rebuilt() -> tuple[nn.Module, torch.optim.Optimizer]:
    optimizer = sgd(make_net())
    return make_net(), optimizer


def _resized() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.ModuleDict({"tokens": nn.Embedding(10, 4), "head": nn.Linear(4, 10)})
    optimizer = sgd(model)
    model["tokens"] = nn.Embedding(12, 4)
    return model, optimizer


def _retied() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = sgd(model)
    model[1].weight = nn.Parameter(torch.ones(3, 3))
    return model, optimizer


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (_rebuilt, r"^6 of the optimizer's 6 parameters are not the model's; the first is parameter 0 of group 0, of shape \(8, 5\)\. "
                   r"The model's '0\.weight' and 5 more are in no group of it\."),
        (_resized, r"^1 of the optimizer's 3 parameters .* of shape \(10, 4\)\. The model's 'tokens\.weight' and 0 more are in no group"),
        (_retied, r"^1 of the optimizer's 4 .* the first is parameter 2 of group 0, of shape \(3, 3\)\. The model's '1\.weight'"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_stale_optimizer_is_refused(
    precision: Precision, make: Callable[[], tuple[nn.Module, torch.optim.Optimizer]], match: str
) -> None:
    model, optimizer = make()
    with pytest.raises(ConfigurationError, match=rf"{match}.*{REMEDY}"):
        MixedPrecision(model, optimizer, precision)


def test_a_stale_one_among_several_is_refused() -> None:
    model = make_net()
    with pytest.raises(ConfigurationError, match=r"6 of the optimizer's 8 parameters are not the model's"):
        MixedPrecision(model, [sgd(model[0]), sgd(make_net())], "fp32")  # type: ignore[index]


def test_parameters_of_a_loss_function_are_warned_of_once_where_the_engine_is_made() -> None:
    model, centers = make_net(), nn.Linear(3, 2)
    with pytest.warns(HalfstepWarning, match=r"^2 of the optimizer's 8 parameters are not the model's; .* nn\.ModuleList") as caught:
        amp = MixedPrecision(model, sgd(model, centers), "fp32")
    assert len(caught) == 1
    assert Path(caught[0].filename).name == Path(__file__).name, "the warning points elsewhere"
    assert not amp.train_step(lambda x, y: loss_of(model, x, y) + centers.weight.sum(), *make_batches(1)[0]).skipped
    both = nn.ModuleList([model, centers])
    MixedPrecision(both, sgd(both), "fp32")


def test_a_parameter_in_two_optimizers_is_refused() -> None:
    model = make_net()
    with pytest.raises(ConfigurationError, match=r"The parameter '3\.weight' is in several of the optimizers .* stepped twice"):
        MixedPrecision(model, [sgd(model[0], model[3]), sgd(model[3])], "fp32")  # type: ignore[index]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(6, 5), nn.Linear(5, 6, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.tokens(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_tied_weights_are_no_duplicates(precision: Precision) -> None:
    model = Tied()
    amp = MixedPrecision(model, sgd(model), precision, scaler=LossScaler(init_scale=64.0) if precision == "fp16" else None)
    before = model.tokens.weight.detach().clone()
    assert not amp.train_step(lambda: model(torch.tensor([1, 2])).float().square().mean()).skipped
    assert not torch.equal(model.head.weight, before)
    assert model.head.weight is model.tokens.weight


@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_optimizer_over_a_part_of_the_model_is_right(precision: Precision) -> None:
    """Frozen parts, a head alone, and the generator of a pair that is one module."""
    model = make_net()
    model[0].requires_grad_(False)  # type: ignore[index]
    pair = nn.ModuleDict({"generator": make_net(), "discriminator": nn.Linear(3, 1)})
    for whole, part in ((model, model[3]), (make_net(), None), (pair, pair["generator"])):  # type: ignore[index]
        MixedPrecision(whole, sgd(whole if part is None else part), precision)
    MixedPrecision(pair, [sgd(pair["discriminator"]), sgd(pair["generator"])], precision)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_model_that_is_made_half_later_is_named_at_the_step(precision: Precision, dtype: torch.dtype) -> None:
    model = make_net()
    amp = MixedPrecision(model, sgd(model), precision)
    model[3].to(dtype)  # type: ignore[index]

    def loss() -> Tensor:
        return model[3](torch.ones(2, 8, dtype=dtype)).float().mean()  # type: ignore[index,no-any-return]

    with pytest.raises(ConfigurationError, match=rf"The trainable parameter '3\.weight' is {dtype}\. .* Call model\.float\(\)"):
        amp.train_step(loss)
    amp.backward(loss())
    with pytest.raises(ConfigurationError, match=rf"The trainable parameter '3\.weight' is {dtype}"):
        amp.step()
    assert all(parameter.grad is None for parameter in model.parameters())
    model.float()
    assert amp.train_step(lambda x, y: loss_of(model, x, y), *make_batches(1)[0]).step == 1


@pytest.mark.parametrize(("scaler", "name"), [(LossScaler, "LossScaler"), (torch.amp.GradScaler, "GradScaler")])
def test_a_scaler_for_another_device_is_refused(scaler: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    made = scaler("cuda")
    assert made.is_enabled()
    model = make_net()
    with pytest.raises(ConfigurationError, match=rf"The scaler was made for cuda, but the model is on cpu\. Make it with {name}\('cpu'\)"):
        MixedPrecision(model, sgd(model), "fp16", scaler=made)


def test_a_scaler_of_any_device_is_accepted() -> None:
    model = make_net()
    for scaler in (LossScaler(), LossScaler("cpu"), torch.amp.GradScaler("cpu")):
        assert MixedPrecision(model, sgd(model), "fp16", scaler=scaler).scaler is scaler


@pytest.mark.parametrize("native", [("bf16", "fp32"), ("fp32",), ("fp16", "fp32")])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_emulated_fp16_is_warned_of_where_the_engine_is_made(
    precision: Precision, native: tuple[Precision, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "native_precisions", lambda _: native)
    model = make_net()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        MixedPrecision(model, sgd(model), precision)
    messages = [str(each.message) for each in caught if each.category is HalfstepWarning]
    if precision == "fp16" and "fp16" not in native:
        use = " or ".join(native)
        assert messages == [f"fp16 on this CPU is emulated, which is many times slower than fp32. To train here, use {use}."]
        assert Path(caught[0].filename).name == Path(__file__).name, "the warning points elsewhere"
    else:
        assert messages == []
