"""After a watch, torch is what it was before it, whatever the loop did."""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import halfstep

pytestmark = pytest.mark.usefixtures("one_thread")

# Whatever a watcher may replace: each attribute of these must be what it was, and so must the code of each function.
OWNERS: dict[str, Any] = {
    "torch": torch,
    "torch.Tensor": Tensor,
    "torch.amp": torch.amp,
    "torch.amp.GradScaler": torch.amp.GradScaler,
    "torch.autocast": torch.autocast,
    "torch.autograd": torch.autograd,
    "torch.cpu.amp": torch.cpu.amp,
    "torch.cuda.amp": torch.cuda.amp,
    "torch.cuda.amp.GradScaler": torch.cuda.amp.GradScaler,
    "torch.cuda.amp.autocast": torch.cuda.amp.autocast,
    "torch.linalg": torch.linalg,
    "torch.nn.Module": nn.Module,
    "torch.nn.Parameter": nn.Parameter,
    "torch.nn.utils": nn.utils,
    "torch.nn.utils.clip_grad": nn.utils.clip_grad,
    "torch.optim": torch.optim,
    "torch.optim.AdamW": torch.optim.AdamW,
    "torch.optim.LBFGS": torch.optim.LBFGS,
    "torch.optim.Optimizer": torch.optim.Optimizer,
    "torch.optim.SGD": torch.optim.SGD,
    "torch.optim.lr_scheduler": lr_scheduler,
    "torch.optim.lr_scheduler.LRScheduler": lr_scheduler.LRScheduler,
    "torch.optim.lr_scheduler.LinearLR": lr_scheduler.LinearLR,
    "torch.optim.lr_scheduler.ReduceLROnPlateau": lr_scheduler.ReduceLROnPlateau,
    "torch.optim.lr_scheduler.SequentialLR": lr_scheduler.SequentialLR,
    "halfstep.LossScaler": halfstep.LossScaler,
    "halfstep.MixedPrecision": halfstep.MixedPrecision,
}

Attributes = dict[str, dict[str, Any]]


def attributes_of(owner: Any) -> Iterator[tuple[str, Any]]:
    for name, value in list(vars(owner).items()):
        yield name, value
        function = getattr(value, "__func__", value)
        if isinstance(function, types.FunctionType):
            yield f"{name}.__code__", function.__code__


def everything() -> Attributes:
    return {name: dict(attributes_of(owner)) for name, owner in OWNERS.items()}


def differences(before: Attributes, after: Attributes) -> set[str]:
    return {
        f"{owner}.{name}"
        for owner, values in before.items()
        for name in values.keys() | after[owner].keys()
        if values.get(name) is not after[owner].get(name)
    }


def hooks() -> dict[str, int]:
    """How many hooks there are on all modules and on all optimizers, and how many modes are on."""
    tables = {**vars(nn.modules.module), **vars(import_module("torch.optim.optimizer"))}
    counts = {name: len(value) for name, value in tables.items() if name.startswith("_global_") and hasattr(value, "keys")}
    return {**counts, "dispatch": torch._C._len_torch_dispatch_stack(), "function": torch._C._len_torch_function_stack()}


def train(*, fails: bool = False) -> None:
    """Touches what is watched, and may leave in the middle."""
    net = nn.Linear(3, 1)
    for kind in (torch.optim.AdamW, torch.optim.LBFGS):
        kind(net.parameters(), lr=0.1)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    schedule = lr_scheduler.LinearLR(opt)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = net(torch.ones(2, 3)).float().mean()
            if fails:
                raise KeyError("batch")
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        schedule.step()


@pytest.mark.parametrize("fails", [False, True], ids=["finished", "failed"])
def test_everything_is_put_back(fails: bool, tmp_path: Path) -> None:
    train()  # torch wraps the step of a class of optimizers by itself when the first one is made
    before, waiting = everything(), hooks()
    with pytest.raises(KeyError, match="batch") if fails else nullcontext(), halfstep.watch(tmp_path, sinks=()):
        train(fails=fails)
    assert differences(before, everything()) == set()
    assert hooks() == waiting
    assert not torch.is_autocast_enabled("cpu")


def test_everything_is_put_back_after_each_of_two_watches(tmp_path: Path) -> None:
    train()
    before, waiting = everything(), hooks()
    for name in ("first", "second"):
        with halfstep.watch(tmp_path / name, sinks=()):
            train()
        assert differences(before, everything()) == set()
    assert hooks() == waiting


def test_a_watch_is_seen_by_these_tests(tmp_path: Path) -> None:
    """Were nothing replaced or hooked in among what they compare, they would prove nothing."""
    train()
    before, waiting = everything(), hooks()
    with halfstep.watch(tmp_path, sinks=()):
        changed = differences(before, everything()) or hooks() != waiting
    assert changed


def test_what_was_made_during_a_watch_works_on_after_it(tmp_path: Path) -> None:
    x, net = torch.ones(4, 3), nn.Linear(3, 1)
    with halfstep.watch(tmp_path, sinks=()):
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        schedule = lr_scheduler.ExponentialLR(opt, 0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        region = torch.autocast("cpu", dtype=torch.float16)
    weight = net.weight.detach().clone()
    with region:
        loss = net(x).float().mean()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    schedule.step()
    assert not torch.equal(net.weight, weight)
    assert opt.param_groups[0]["lr"] == 0.05


def test_what_was_made_before_a_watch_works_on_after_it(tmp_path: Path) -> None:
    x, net = torch.ones(4, 3), nn.Linear(3, 1)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    attributes = [set(vars(made)) for made in (net, opt, scaler)]
    weights = []
    for watching in (True, False):
        with halfstep.watch(tmp_path, sinks=()) if watching else nullcontext():
            with torch.autocast("cpu", dtype=torch.float16):
                loss = net(x).float().mean()
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        weights.append(net.weight.detach().clone())
    assert not torch.equal(weights[0], weights[1])
    assert [set(vars(made)) for made in (net, opt, scaler)] == attributes
