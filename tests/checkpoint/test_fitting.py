from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

from halfstep import MixedPrecision
from halfstep.checkpoint import load_checkpoint, save_checkpoint
from halfstep.checkpoint.fitting import Fitting
from halfstep.errors import CheckpointError
from tests.checkpoint.runs import noted

pytestmark = pytest.mark.usefixtures("one_thread")

# Loads what is said to fit in part.
in_part = partial(noted, strict=False)


class Model(nn.Sequential):
    first: nn.Module
    norm: nn.Module
    second: nn.Module


def net(*, width: int = 5, norm: bool = True, **names: nn.Module) -> Model:
    model = Model()
    model.add_module("first", nn.Linear(3, width))
    if norm:
        model.add_module("norm", nn.BatchNorm1d(width))
    model.add_module("second", nn.Linear(width, 1))
    for name, module in names.items():
        model.add_module(name, module)
    return model


def engine(model: nn.Module, optimizer: Any = None, precision: str = "fp32", **settings: Any) -> MixedPrecision:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01) if optimizer is None else optimizer
    return MixedPrecision(model, optimizer, precision, **settings)


def train(amp: MixedPrecision, steps: int = 3, *, seed: int = 0) -> None:
    numbers = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x, y = torch.randn(8, 3, generator=numbers), torch.randn(8, 1, generator=numbers)
        amp.train_step(lambda x, y: F.mse_loss(amp.model(x), y), x, y)


def saved(amp: MixedPrecision, folder: Path) -> Path:
    train(amp)
    return save_checkpoint(folder / "saved.pt", amp, step=3)


def refused(path: Path, amp: MixedPrecision, match: str, *, strict: bool = True) -> None:
    with pytest.raises(CheckpointError, match=match):
        load_checkpoint(path, amp, strict=strict)


def values(state: dict[str, Any], key: str) -> list[list[float]]:
    return [each[key].flatten().tolist() for each in state["state"].values()]


def test_a_model_that_lacks_something(tmp_path: Path) -> None:
    amp = engine(net(third=nn.Identity()))
    path = saved(amp, tmp_path)
    model = net(head=nn.Identity(), norm=False)
    other = engine(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    refused(path, other, r"it has norm\.weight, norm\.bias, .*, which this model has not.* Nothing was changed\. To go on all the same")
    before = amp.model.state_dict()
    in_part(path, other, r"which this model has not\. What both have is loaded, and the rest .* stays as it is", r"AdamW, .* starts afresh")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert other.optimizer.state_dict()["state"] == {}


def test_a_model_that_has_more(tmp_path: Path) -> None:
    path = saved(engine(net()), tmp_path)
    model = net(scale=nn.Linear(1, 1))
    other = engine(model)
    initial = model.state_dict()["scale.weight"].clone()
    refused(path, other, r"The model in the checkpoint is another one: it lacks scale\.weight, scale\.bias\. Nothing")
    in_part(path, other, r"it lacks scale\.weight, scale\.bias\. What both have is loaded", "over other parameters: group 0 has 6")
    assert torch.equal(model.state_dict()["scale.weight"], initial)


def test_a_name_that_is_almost_the_same(tmp_path: Path) -> None:
    path = saved(engine(net(extra_layer=nn.Linear(1, 1))), tmp_path)
    refused(path, engine(net(extra_layers=nn.Linear(1, 1))), r"has not; it is perhaps 'extra_layers\.bias' or 'extra_layers\.weight'")


def test_many_names_are_cut_short(tmp_path: Path) -> None:
    path = saved(engine(net()), tmp_path)
    refused(
        path, engine(Model(*[nn.Linear(1, 1) for _ in range(4)])), r"it lacks 0\.weight, 0\.bias, 1\.weight, 1\.bias, 2\.weight and 3 more;"
    )


def test_another_shape_is_never_loaded(tmp_path: Path) -> None:
    path = saved(engine(net()), tmp_path)
    for strict in (True, False):
        refused(path, engine(net(width=6)), r"model\.first\.weight has the shape \(5, 3\) in the checkpoint, and \(6, 3\)", strict=strict)


def test_another_type_of_a_buffer(tmp_path: Path) -> None:
    def made(dtype: torch.dtype) -> Model:
        model = net()
        model.register_buffer("table", torch.full((2,), 1 / 3, dtype=dtype))
        return model

    path = saved(engine(made(torch.float64)), tmp_path)
    other = engine(made(torch.float32))
    refused(path, other, r"model\.table is float64 in the checkpoint, and float32 in this model")
    in_part(path, other, r"It is converted to float32")
    assert torch.equal(other.model.table, torch.full((2,), 1 / 3))  # type: ignore[arg-type]


def test_a_tensor_where_something_else_was(tmp_path: Path) -> None:
    class Counted(nn.Module):
        def get_extra_state(self) -> Any:
            return self.state

        def set_extra_state(self, state: Any) -> None:
            self.state = state

        def __init__(self, state: Any) -> None:
            super().__init__()
            self.state = state

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    path = saved(engine(net(counted=Counted(3))), tmp_path)
    refused(
        path, engine(net(counted=Counted(torch.ones(1)))), r"counted\._extra_state is a tensor in this model, and a int in the checkpoint"
    )
    other = Counted(0)
    load_checkpoint(path, engine(net(counted=other)))
    assert other.state == 3


def test_a_model_that_has_no_shapes_yet(tmp_path: Path) -> None:
    def made(kind: type[nn.Module]) -> Model:
        settings: dict[str, Any] = {"affine": False, **({} if kind is nn.LazyBatchNorm1d else {"num_features": 1})}
        return net(norm=False, last=kind(**settings))

    path = saved(engine(made(nn.BatchNorm1d)), tmp_path)
    refused(
        path, engine(made(nn.LazyBatchNorm1d)), r"model\.last\.running_mean of this model has no shape yet. Run one batch through the model"
    )


def test_another_optimizer(tmp_path: Path) -> None:
    path = saved(engine(net()), tmp_path)
    model = net()
    other = engine(model, torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.9))
    refused(path, other, r"The optimizer was saved of a AdamW, and this run has a SGD\. Nothing was changed")
    in_part(path, other, r"The state of the SGD, such as its moments, starts afresh")
    assert other.optimizer.state_dict()["state"] == {}
    assert other.optimizer.param_groups[0]["lr"] == 0.25


def two(model: Model) -> list[torch.optim.Optimizer]:
    first, *rest = model.children()
    return [torch.optim.SGD(first.parameters(), lr=0.1), torch.optim.AdamW([p for each in rest for p in each.parameters()], lr=0.01)]


def test_another_number_of_optimizers(tmp_path: Path) -> None:
    model = net()
    path = saved(engine(model, two(model)), tmp_path)
    refused(path, engine(net()), r"saved with 2 optimizers, and this run has 1\. Nothing")
    in_part(path, engine(net()), r"2 optimizers, and this run has 1\. The state of the optimizers, such as their moments, starts afresh")


def test_the_second_of_two_optimizers(tmp_path: Path) -> None:
    model = net()
    path = saved(engine(model, two(model)), tmp_path)
    other = net()
    first, second = two(other)
    amp = engine(other, [first, torch.optim.SGD(second.param_groups[0]["params"], lr=0.1)])
    refused(path, amp, r"The optimizer\.1 was saved of a AdamW, and this run has a SGD")


GROUPS: dict[str, tuple[Callable[[Model], list[dict[str, Any]]], str]] = {
    "number of groups": (
        lambda model: [{"params": model.first.parameters()}, {"params": [*model.norm.parameters(), *model.second.parameters()]}],
        "it has 1 parameter groups, and this run's has 2",
    ),
    "number in a group": (lambda model: [{"params": model.first.parameters()}], "group 0 has 6 parameters there, and 2 here"),
}


@pytest.mark.parametrize("name", GROUPS)
def test_other_parameter_groups(name: str, tmp_path: Path) -> None:
    groups, match = GROUPS[name]
    path = saved(engine(net()), tmp_path)
    model = net()
    other = engine(model, torch.optim.AdamW(groups(model), lr=0.01))
    refused(path, other, f"The optimizer in the checkpoint is over other parameters: {match}")
    in_part(path, other, f"{match}. The state of the AdamW, such as its moments, starts afresh")


def test_other_parameters_in_a_group(tmp_path: Path) -> None:
    def made(names: Sequence[str]) -> MixedPrecision:
        model = net()
        return engine(model, torch.optim.AdamW([{"params": [model.get_parameter(name) for name in names]}], lr=0.01))

    path = saved(made(["first.weight", "second.weight"]), tmp_path)
    refused(path, made(["first.weight", "second.bias"]), r"group 0 has second\.weight there, which is not in it here")


def moments(amp: MixedPrecision) -> dict[str, list[float]]:
    names = {id(parameter): name for name, parameter in amp.model.named_parameters()}
    return {names[id(parameter)]: state["exp_avg"].flatten().tolist() for parameter, state in amp.optimizer.state.items()}


def test_parameters_in_another_order_are_found_by_name(tmp_path: Path) -> None:
    def made(order: Callable[[Sequence[Any]], list[Any]]) -> MixedPrecision:
        model = net()
        decayed: list[Any] = [parameter for parameter in model.parameters() if parameter.dim() > 1]
        others: list[Any] = [parameter for parameter in model.parameters() if parameter.dim() < 2]
        groups: list[dict[str, Any]] = [{"params": order(decayed), "weight_decay": 0.3}, {"params": order(others)}]
        return engine(model, torch.optim.AdamW(groups, lr=0.01))

    amp = made(list)
    path = saved(amp, tmp_path)
    other = made(lambda each: list(reversed(each)))
    info = load_checkpoint(path, other)
    assert info.notes == ()
    assert moments(other) == moments(amp)
    assert [group["weight_decay"] for group in other.optimizer.param_groups] == [0.3, 0.01]
    for each in (amp, other):
        train(each, seed=4)
    assert moments(other) == moments(amp)
    assert all(torch.equal(one, two) for one, two in zip(amp.model.parameters(), other.model.parameters(), strict=True))


def test_names_that_an_optimizer_was_given(tmp_path: Path) -> None:
    model = net()
    path = saved(engine(model, torch.optim.AdamW(model.named_parameters(), lr=0.01)), tmp_path)
    other = net()
    amp = engine(other, torch.optim.AdamW(reversed(list(other.named_parameters())), lr=0.01))
    assert load_checkpoint(path, amp).notes == ()
    assert amp.optimizer.param_groups[0]["param_names"][0] == "second.bias"


@pytest.mark.parametrize("here", ["fused", "foreach", "plain"])
@pytest.mark.parametrize("there", ["fused", "foreach", "plain"])
def test_how_the_optimizer_computes_is_up_to_this_run(there: str, here: str, tmp_path: Path) -> None:
    ways: dict[str, dict[str, Any]] = {"fused": {"fused": True}, "foreach": {"foreach": True}, "plain": {"foreach": False}}

    def made(way: str) -> MixedPrecision:
        model = net()
        return engine(model, torch.optim.AdamW(model.parameters(), lr=0.01, **ways[way]), "fp16")

    path = saved(made(there), tmp_path)
    other = made(here)
    before = {name: other.optimizer.param_groups[0][name] for name in ("fused", "foreach", "capturable", "differentiable")}
    assert load_checkpoint(path, other).notes == ()
    assert {name: other.optimizer.param_groups[0][name] for name in before} == before
    weights = [parameter.detach().clone() for parameter in other.model.parameters()]
    states = values(other.optimizer.state_dict(), "exp_avg_sq"), values(other.optimizer.state_dict(), "step")
    record = other.train_step(lambda x: other.model(x).sum() * float("inf"), torch.randn(8, 3))
    assert record.skipped
    assert all(torch.equal(one, two) for one, two in zip(weights, other.model.parameters(), strict=True))
    assert (values(other.optimizer.state_dict(), "exp_avg_sq"), values(other.optimizer.state_dict(), "step")) == states
    assert not other.train_step(lambda x: other.model(x).mean(), torch.randn(8, 3)).skipped
    assert not any(torch.equal(one, two) for one, two in zip(weights, other.model.parameters(), strict=True))


def test_settings_of_the_optimizer_that_differ(tmp_path: Path) -> None:
    path = saved(engine(net()), tmp_path)
    model = net()
    other = engine(model, torch.optim.AdamW(model.parameters(), lr=0.5, weight_decay=0.3, amsgrad=True))
    in_part(
        path,
        other,
        r"lr of the optimizer \(group 0\) is 0\.01 in the checkpoint, and 0\.5 in this run: the checkpoint's is used",
        r"weight_decay of the optimizer \(group 0\) is 0\.01 in the checkpoint, and 0\.3 in this run: the checkpoint's is used",
        r"amsgrad of the optimizer \(group 0\) is False in the checkpoint, and True in this run",
        strict=True,
    )
    group = other.optimizer.param_groups[0]
    assert (group["weight_decay"], group["amsgrad"], group["lr"]) == (0.01, False, 0.01)


def test_a_schedule_that_is_missing_or_another(tmp_path: Path) -> None:
    def made(kind: Any, rate: float = 0.01) -> MixedPrecision:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        return engine(model, optimizer, scheduler=kind and kind(optimizer, 5))

    path = saved(made(lr_scheduler.CosineAnnealingLR), tmp_path)
    course = "the learning rate would follow another course. Nothing was changed"
    refused(path, made(None), rf"saved with the scheduler CosineAnnealingLR, and this run has none: {course}")
    refused(path, made(lr_scheduler.StepLR), rf"saved with the scheduler CosineAnnealingLR, and this run has StepLR: {course}")
    other = made(lr_scheduler.StepLR, 0.5)
    first = r"initial_lr of the optimizer \(group 0\) is 0\.01 in the checkpoint, and 0\.5 in this run: the checkpoint's is used"
    in_part(path, other, first, "Schedules start as this run made them, and the learning rate is the checkpoint's")
    assert other.optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * (1 + torch.cos(torch.tensor(3 * torch.pi / 5)).item()) / 2)
    assert isinstance(other.scheduler, lr_scheduler.StepLR)
    assert other.scheduler.last_epoch == 0
    without = saved(made(None), tmp_path)
    refused(without, made(lr_scheduler.StepLR), rf"saved with the scheduler none, and this run has StepLR: {course}")


def test_schedules_of_one_kind_in_a_list_and_alone(tmp_path: Path) -> None:
    def made(as_list: bool) -> MixedPrecision:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = lr_scheduler.StepLR(optimizer, 2)
        return engine(model, optimizer, scheduler=[schedule] if as_list else schedule)

    for there, here in ((True, False), (False, True)):
        other = made(here)
        assert load_checkpoint(saved(made(there), tmp_path), other).notes == ()
        assert other.optimizer.param_groups[0]["lr"] == pytest.approx(0.001)


def test_a_schedule_that_cannot_be_saved(tmp_path: Path) -> None:
    class Steps:
        def step(self) -> None:
            pass

    model = net()
    amp = engine(model, scheduler=Steps())
    with pytest.raises(CheckpointError, match=r"The scheduler, a Steps, has no state_dict\(\) and load_state_dict\(\), so a resumed run"):
        save_checkpoint(tmp_path / "saved.pt", amp, step=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrap", ["compile", "data parallel", "inside"])
def test_wrappers_make_no_difference(wrap: str, tmp_path: Path) -> None:
    def wrapped(model: Model) -> nn.Module:
        if wrap == "inside":
            model.first = nn.DataParallel(model.first)
            return model
        made: Any = torch.compile(model, backend="eager") if wrap == "compile" else nn.DataParallel(model)
        return made  # type: ignore[no-any-return]

    for there, here in ((wrapped, lambda model: model), (lambda model: model, wrapped)):
        amp, other = engine(there(net())), engine(here(net()))
        path = saved(amp, tmp_path)
        assert load_checkpoint(path, other).notes == ()
        assert [*moments(other).values()] == [*moments(amp).values()] != []
        assert sorted(torch.load(path, weights_only=True)["model"]) == sorted(net().state_dict())
        for each in (amp, other):
            train(each, seed=4)
        assert all(torch.equal(one, two) for one, two in zip(amp.model.parameters(), other.model.parameters(), strict=True))


def test_what_does_not_fit_is_collected_where_that_is_allowed() -> None:
    fitting = Fitting(strict=False)
    fitting.object("It is green.", instead="it is painted")
    assert fitting.notes == ["It is green. It is painted."]
    with pytest.raises(
        CheckpointError, match=r"It is green\. Nothing was changed\. To go on all the same: strict=False; then it is painted\."
    ):
        Fitting(strict=True).object("It is green.", instead="it is painted")
