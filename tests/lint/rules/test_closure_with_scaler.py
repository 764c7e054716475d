"""What counts as a closure."""

from __future__ import annotations

import pytest

from halfstep.lint.rules.closure_with_scaler import ClosureWithScaler
from tests.lint.judging import findings

RULE = ClosureWithScaler()
CODE = """\
import torch


def fit(model, optimizer, known, {}):
    scaler = torch.amp.GradScaler("cuda")
    own = torch.optim.SGD(model.parameters(), lr=0.1)

    def again():
        return model().backward()

    {}
    scaler.update()
"""


@pytest.mark.parametrize(
    "call",
    [
        "scaler.step(optimizer, closure)",
        "scaler.step(optimizer, closure=known)",
        "scaler.step(optimizer, closure=again)",
        "scaler.step(optimizer, again)",
        "scaler.step(optimizer, lambda: again())",
        "scaler.step(own, known)",
        "loss = scaler.step(optimizer, make_closure(model))",
    ],
)
def test_a_closure_is_found(call: str) -> None:
    assert findings(CODE.format("closure", call), [RULE]) == [(11, RULE.name)]


@pytest.mark.parametrize(
    ("parameter", "call"),
    [
        ("closure", "scaler.step(optimizer)"),
        ("closure", "scaler.step(optimizer, None)"),
        ("closure", "scaler.step(optimizer, closure=None)"),
        ("closure", "scaler.step(optimizer, known)"),
        ("closure", "scaler.step(optimizer, *closure)"),
        ("closure", "optimizer.step(closure)"),
        ("closure", "known.step(optimizer, closure)"),
        ("closure=None", "scaler.step(optimizer, closure)"),
        ("closure=None", "scaler.step(optimizer, closure=closure)"),
        ("*, closure=None", "scaler.step(optimizer, closure=closure)"),
    ],
)
def test_what_is_none_or_unknown_is_not(parameter: str, call: str) -> None:
    assert findings(CODE.format(parameter, call), [RULE]) == []
