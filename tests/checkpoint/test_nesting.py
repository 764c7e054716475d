"""Optimizers that hold another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from halfstep import MixedPrecision
from halfstep.checkpoint import load_checkpoint, save_checkpoint
from halfstep.checkpoint.nesting import inner_states, shared_groups
from halfstep.errors import CheckpointError, HalfstepWarning
from tests.checkpoint.cases import engine, mlp
from tests.checkpoint.runs import Facts, Run, batch, facts, sweep

pytestmark = pytest.mark.usefixtures("one_thread")


class Sharp(torch.optim.Optimizer):
    """As SAM is commonly written: its `state_dict()` shows nothing of the optimizer that it steps with."""

    def __init__(self, parameters: Any, *, name: str = "base", shares: bool = True, **settings: Any) -> None:
        super().__init__(parameters, {"rho": 0.05, **settings})
        base = torch.optim.AdamW(self.param_groups if shares else [dict(group) for group in self.param_groups], **settings)
        setattr(self, name, base)
        self.name = name
        if shares:
            self.param_groups = base.param_groups

    def step(self, closure: Any = None) -> Any:
        return getattr(self, self.name).step(closure)


def run(**settings: Any) -> Run:
    model = mlp()
    amp = engine(model, Sharp(model.parameters(), lr=0.01, **settings), "fp16", accumulate=2)

    def step(number: int) -> Facts:
        x, y = batch(number, large=(0, 1, 7))
        with amp.autocast():
            loss = F.mse_loss(model(x), y)
        amp.backward(loss)
        return facts(loss, amp.step())

    return Run(engines=amp, step=step)


@pytest.mark.parametrize("shares", [True, False], ids=["shared groups", "own groups"])
def test_the_inner_one_goes_on_as_well(shares: bool, tmp_path: Path) -> None:
    sweep(lambda: run(shares=shares), at=(0, 4, 5, 9), folder=tmp_path, steps=12)


def test_the_groups_stay_shared(tmp_path: Path) -> None:
    made = run()
    made.step(0)
    path = save_checkpoint(tmp_path / "a.pt", made.engines, step=1)
    other = run()
    load_checkpoint(path, other.engines)
    assert isinstance(other.engines, MixedPrecision)
    optimizer: Any = other.engines.optimizer
    assert shared_groups(optimizer) == {"base": True}
    assert shared_groups(Sharp([nn.Parameter(torch.ones(1))], lr=0.1, shares=False)) == {"base": False}


def test_it_holds_another_one(tmp_path: Path) -> None:
    made = run()
    made.step(0)
    made.step(1)
    path = save_checkpoint(tmp_path / "a.pt", made.engines, step=2)
    other = run(name="inner")
    match = r"The optimizer held other optimizers in the checkpoint, by the names base, than in this run: inner\. Nothing was changed"
    with pytest.raises(CheckpointError, match=match):
        load_checkpoint(path, other.engines)
    with pytest.warns(HalfstepWarning, match="The state of those that only one of the two has is left out"):
        load_checkpoint(path, other.engines, strict=False)
    assert isinstance(other.engines, MixedPrecision)
    assert inner_states(other.engines.optimizer) == {"inner": {}}
