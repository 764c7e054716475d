"""What cleans gradients, and when it comes too late."""

from __future__ import annotations

import pytest

from halfstep.lint.rules.cleaning_after_unscale import CleaningAfterUnscale
from tests.lint.judging import findings, fixed

RULE = CleaningAfterUnscale()
STEP = """\
import torch


def step(model, x, optimizer, other, scaler, flag):
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x).mean()
    scaler.scale(loss).backward()
    {}
    for p in model.parameters():
        {}
    scaler.step(optimizer)
    scaler.update()
"""
UNSCALE = "scaler.unscale_(optimizer)"


@pytest.mark.parametrize(
    "cleaning",
    [
        "p.grad.nan_to_num_(0.0)",
        "p.grad.data.nan_to_num_(0.0)",
        "p.grad = torch.nan_to_num(p.grad)",
        "torch.nan_to_num(p.grad, out=p.grad)",
        "p.grad[torch.isnan(p.grad)] = 0",
        "p.grad[~p.grad.isfinite()] = 0.0",
    ],
)
def test_each_way_to_clean_is_found_once(cleaning: str) -> None:
    code = STEP.format(UNSCALE, cleaning)
    assert findings(code, [RULE]) == [(11, RULE.name)]
    assert fixed(code, [RULE]) == code.replace(f"    for p in model.parameters():\n        {cleaning}\n", "")


@pytest.mark.parametrize("unscale", ["pass", "if flag:\n        scaler.unscale_(optimizer)", "scaler.unscale_(other)"])
def test_before_the_check_nothing_is_said(unscale: str) -> None:
    assert findings(STEP.format(unscale, "p.grad.nan_to_num_(0.0)"), [RULE]) == []


@pytest.mark.parametrize(
    "line", ["print(torch.isfinite(p.grad).all())", "x = x.nan_to_num(0.0)", "p.nan_to_num_(0.0)", "p.grad.clamp_(-1, 1)"]
)
def test_other_things_clean_no_gradients(line: str) -> None:
    assert findings(STEP.format(UNSCALE, line), [RULE]) == []


def test_only_what_cleans_is_deleted() -> None:
    code = STEP.format(UNSCALE, "p.grad.nan_to_num_(0.0)\n        print(p.shape)")
    assert fixed(code, [RULE]) == code.replace("        p.grad.nan_to_num_(0.0)\n", "")
