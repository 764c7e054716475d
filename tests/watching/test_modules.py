"""The model of an optimizer, found among all modules; what is lost; buffers that are not finite."""

# `Tensor.backward` has no types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep.watching.modules import live_modules, model_of, nonfinite_buffers, orphans, strays

pytestmark = pytest.mark.usefixtures("one_thread", "alone_in_process")


def net() -> Any:
    return nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 3), nn.Tanh()), nn.Linear(3, 1))


class Holder(nn.Module):
    """Holds a model, as wrappers do, with or without more."""

    def __init__(self, module: nn.Module, *, more: bool = False) -> None:
        super().__init__()
        self.module = module
        self.more = nn.Linear(2, 2) if more else None


class TestModelOf:
    def test_it_is_the_smallest_that_holds_all(self) -> None:
        model = net()
        for module in (model, model[1], model[0]):
            assert model_of([*module.parameters()]) is module
        assert model_of([model[2].weight]) is model[2]

    def test_a_part_of_the_parameters_is_enough(self) -> None:
        model = net()
        assert model_of([model[0].weight, model[2].bias]) is model

    def test_of_two_that_hold_the_same_it_is_the_outer_one(self) -> None:
        model = net()
        outer = Holder(model)
        assert model_of(model.parameters()) is outer
        del outer

    def test_one_that_holds_more_is_not_it(self) -> None:
        model = net()
        outer = Holder(model, more=True)
        assert model_of(model.parameters()) is model
        assert model_of(outer.parameters()) is outer

    @pytest.mark.parametrize("wrap", [nn.DataParallel, lambda module: nn.DataParallel(nn.DataParallel(module))], ids=["once", "twice"])
    def test_wrappers_of_torch_are_seen_through(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        model = net()
        wrapper = wrap(model)
        assert model_of(wrapper.parameters()) is model

    def test_parameters_of_no_module_have_no_model(self) -> None:
        assert model_of([torch.ones(2, requires_grad=True)]) is None
        assert model_of([]) is None

    def test_a_module_that_is_half_made_is_passed_over(self) -> None:
        half = nn.Linear.__new__(nn.Linear)
        model = net()
        assert model_of(model.parameters()) is model
        assert half not in live_modules()


def test_strays_are_in_no_module() -> None:
    model, stray = net(), torch.ones(2, requires_grad=True)
    model[0].register_parameter("nothing", None)
    assert [each is stray for each in strays([*model.parameters(), stray], [*model.modules()])] == [True]
    assert [each is model[2].weight for each in strays([model[0].weight, model[2].weight], [model[0]])] == [True]


class TestOrphans:
    def test_they_have_gradients_and_no_optimizer(self) -> None:
        model = net()
        model(torch.ones(1, 2)).sum().backward()
        known = [id(each) for each in (model[0].weight, model[0].bias, model[2].weight)]
        assert [*orphans(known, model.modules())] == ["Linear.weight", "Linear.bias", "Linear.bias"]
        assert [*orphans(map(id, model.parameters()), model.modules())] == []

    def test_one_that_two_modules_share_is_told_once(self) -> None:
        model = net()
        model[1][0].weight = model[0].weight = nn.Parameter(torch.ones(3, 3))
        model[0].weight.grad = torch.ones(3, 3)
        assert [*orphans([], model.modules())] == ["Linear.weight"]

    @pytest.mark.parametrize("change", ["frozen", "without gradient"])
    def test_what_does_not_train_is_none(self, change: str) -> None:
        layer = nn.Linear(1, 1, bias=False)
        if change == "frozen":
            layer.weight.grad = torch.ones(1, 1)
            layer.weight.requires_grad_(False)
        assert [*orphans([], [layer])] == []

    def test_what_is_computed_from_others_is_none(self) -> None:
        layer: Any = nn.Module()
        weight = nn.Parameter(torch.ones(1))
        layer._parameters["doubled"] = doubled = weight * 2
        doubled.retain_grad()
        doubled.sum().backward()
        assert doubled.grad is not None
        assert [*orphans([], [layer])] == []


class TestBuffers:
    @pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
    @pytest.mark.parametrize("name", ["running_mean", "running_var"])
    def test_running_statistics_that_are_not_finite(self, name: str, value: float) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2)))
        assert [*nonfinite_buffers(model)] == []
        model.get_buffer(f"1.0.{name}")[1] = value
        assert [*nonfinite_buffers(model)] == [("1.0", name)]

    @pytest.mark.parametrize(
        ("buffer", "bad"),
        [
            (torch.full((2, 2), -torch.inf), False),
            (torch.tensor([0.0, torch.nan]), True),
            (torch.tensor([0.0, torch.nan], dtype=torch.float16), True),
            (torch.tensor([0, 1]), False),
            (torch.empty(2, device="meta"), False),
            (None, False),
            (torch.empty(0), False),
        ],
        ids=["mask", "nan", "nan in fp16", "whole numbers", "meta", "none", "empty"],
    )
    def test_other_buffers(self, buffer: Tensor | None, bad: bool) -> None:
        model = nn.Linear(1, 1)
        model.register_buffer("kept", buffer)
        assert [*nonfinite_buffers(model)] == ([("", "kept")] if bad else [])
