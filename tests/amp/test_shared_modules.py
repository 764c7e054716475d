"""Models of one call that share modules, or are parts of each other, beside the same written by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from halfstep import Policy, amp
from halfstep.errors import ConfigurationError
from tests.amp.nets import make_batches, tensors_of

LEVELS = ("O0", "O1", "O2", "O3")
SCALE = 128.0


class Tower(nn.Module):
    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.encoder(x))
        return result


def towers() -> list[Tower]:
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU())
    return [Tower(encoder), Tower(encoder)]


def listed(kind: str) -> list[Any]:
    first, second = towers()
    if kind == "shared":
        return [first, second]
    return [first, first.encoder] if kind == "outer and inner" else [first.encoder, first]


def optimizer_of(models: list[nn.Module]) -> SGD:
    return SGD(nn.ModuleList(models).parameters(), lr=0.125, momentum=0.5)


def loss_of(outputs: list[Tensor], y: Tensor) -> Tensor:
    losses = [F.cross_entropy(each, y) if each.shape[1] == 3 else each.square().mean() for each in outputs]
    return torch.stack(losses).sum()


def by_hand(kind: str, level: str) -> tuple[list[Tensor], list[Tensor]]:
    """As Apex computes it: a half model beside fp32 parameters at O2, norms in fp32; a half model at O3."""
    masters = nn.ModuleList(listed(kind))
    used = copy.deepcopy(masters) if level == "O2" else masters
    if level in ("O2", "O3"):
        for module in used.modules():
            if isinstance(module, nn.Linear) or level == "O3":
                module.half()
    if level == "O2":
        norm = next(module for module in used.modules() if isinstance(module, nn.LayerNorm))
        norm.register_forward_pre_hook(lambda _, args: (args[0].float(),))
        norm.register_forward_hook(lambda _, args, output: output.half())
    optimizer, losses = optimizer_of(list(masters)), []
    for x, y in make_batches(3):
        used.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16, enabled=level == "O1"):
            outputs = [model(x.half() if level in ("O2", "O3") else x).float() for model in used]
        loss = loss_of(outputs, y)
        (loss * SCALE).backward()  # type: ignore[no-untyped-call]
        for master, parameter in zip(masters.parameters(), used.parameters(), strict=True):
            assert parameter.grad is not None
            master.grad = (parameter.grad.float() / SCALE).to(master.dtype)
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters.parameters(), used.parameters(), strict=True):
                parameter.copy_(master)
        losses.append(loss.detach())
    return losses, tensors_of(masters)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", ["shared", "outer and inner", "inner and outer"])
def test_they_train_as_by_hand(kind: str, level: str) -> None:
    given = listed(kind)
    models, optimizer = amp.initialize(list(given), optimizer_of(given), opt_level=level, loss_scale=SCALE)
    assert all(model is before for model, before in zip(models, given, strict=True))
    losses = []
    for x, y in make_batches(3):
        optimizer.zero_grad()
        loss = loss_of([model(x) for model in models], y)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    expected, parameters = by_hand(kind, level)
    assert torch.equal(losses[0], expected[0])
    torch.testing.assert_close(losses, expected, rtol=2e-3, atol=0)
    torch.testing.assert_close(tensors_of(nn.ModuleList(models)), parameters, rtol=5e-3, atol=5e-3 if level == "O3" else 1e-3)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", ["shared", "outer and inner", "inner and outer"])
def test_the_hooks_of_each_are_around_its_forward(kind: str, level: str) -> None:
    seen: list[tuple[torch.dtype, torch.dtype]] = []

    def watch(_: nn.Module, args: Any, output: Tensor) -> None:
        seen.append((args[0].dtype, output.dtype))

    for model in amp.initialize(listed(kind), opt_level=level):
        handle = model.register_forward_hook(watch)
        model(torch.ones(2, 6))
        handle.remove()
    assert seen == [(torch.float32, torch.float32)] * 2


@pytest.mark.parametrize("level", LEVELS)
def test_what_they_share_is_not_touched_again(level: str) -> None:
    class Sealed(nn.Sequential):
        def __setattr__(self, name: str, value: Any) -> None:
            assert name != "0", "The layer is not to be replaced."
            super().__setattr__(name, value)

    encoder = Sealed(nn.Linear(6, 8))
    for model in amp.initialize([Tower(encoder), Tower(encoder)], opt_level=level):
        assert model(torch.ones(2, 6)).dtype is torch.float32


@pytest.mark.parametrize("level", LEVELS)
def test_their_outputs_are_cast(level: str) -> None:
    first, second = towers()
    # At O0, as in Apex, the head cannot take what the encoder would return as a model.
    listed = [first, second] if level == "O0" else [first, second, first.encoder]
    models = amp.initialize(listed, opt_level=level, cast_model_outputs=torch.float16)
    assert [model(torch.ones(2, 6, dtype=torch.float64)).dtype for model in models] == [torch.float16] * len(listed)


def test_a_parameter_that_is_a_norms_in_one_of_them_stays_in_fp32() -> None:
    class Borrower(nn.Module):
        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.scale = weight
            self.layer = nn.Linear(8, 8)

    first, _ = towers()
    norm = first.encoder.get_submodule("1")
    borrower = Borrower(norm.get_parameter("weight"))
    amp.initialize([borrower, first], opt_level="O3", keep_batchnorm_fp32=True)
    assert borrower.scale.dtype is torch.float32
    assert first.head.weight.dtype is borrower.layer.weight.dtype is torch.float16


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_where_one_cannot_be_changed_none_is(level: str) -> None:
    first, second = towers()
    encoder = first.encoder
    with Policy.O1.apply(second.head), pytest.raises(ConfigurationError, match="A policy is applied to this Linear already"):
        amp.initialize([first, second], opt_level=level)
    assert second.encoder is first.encoder is encoder
    assert list(dict(second.named_children())) == ["encoder", "head"]
    assert type(encoder) is nn.Sequential
    assert first.head.weight.dtype is torch.float32
    amp.initialize([first, second], opt_level=level)
    assert second(torch.ones(2, 6)).dtype is torch.float32


def test_the_state_dict_of_what_they_share() -> None:
    models = amp.initialize(towers(), opt_level="O3")
    assert {value.dtype for model in models for value in model.state_dict().values()} == {torch.float32}
