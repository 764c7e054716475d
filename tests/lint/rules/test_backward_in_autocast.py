"""Which backward passes stand in a region, and what can be moved out of it."""

from __future__ import annotations

import pytest

from halfstep.lint.rules.backward_in_autocast import BackwardInAutocast
from halfstep.lint.rules.loop_inside_autocast import LoopInsideAutocast
from tests.lint.judging import findings, fixed

RULE = BackwardInAutocast()
STEP = """\
import torch


def step(model, x, optimizer, scaler, log):
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x).mean()
        {}
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.mark.parametrize(
    "tail",
    [
        "scaler.scale(loss).backward()",
        "scaler.scale(loss).backward(retain_graph=True)",
        "loss.backward()",
        "torch.autograd.backward(loss)",
        "scaler.scale(loss).backward(); log.append(loss.item())",
        "scaler.scale(loss).backward(); total = float(loss.detach())",
    ],
)
def test_the_tail_is_moved(tail: str) -> None:
    code = STEP.format(tail)
    assert findings(code, [RULE]) == [(8, RULE.name)]
    moved = fixed(code, [RULE])
    assert findings(moved, [RULE]) == []
    assert moved.replace("    ", "") == code.replace("    ", "")
    assert "\n        loss = model(x).mean()\n    " in moved


@pytest.mark.parametrize(
    "tail",
    [
        "loss.backward(); other = model(x)",
        "loss.backward(); other = x @ x",
        "loss.backward(); self.finish()",
        "loss.backward(); call = lambda: 1",
    ],
)
def test_a_tail_that_computes_stays(tail: str) -> None:
    code = STEP.format(tail)
    assert findings(code, [RULE]) == [(8, RULE.name)]
    assert fixed(code, [RULE]) == code


@pytest.mark.parametrize("place", ["dtype=torch.float16), model.no_sync(", "dtype=torch.float16), torch.enable_grad("])
def test_what_else_the_block_does_would_be_lost(place: str) -> None:
    code = STEP.format("loss.backward()").replace("dtype=torch.float16", place)
    assert findings(code, [RULE]) == [(8, RULE.name)]
    assert fixed(code, [RULE]) == code


def test_a_region_around_the_block_stays_in_force() -> None:
    code = (
        STEP.format("loss.backward()")
        .replace("    optimizer.zero_grad()\n", "")
        .replace("    with", "    with torch.autocast('cuda'):\n        with")
    )
    code = code.replace("        loss", "            loss")
    assert findings(code, [RULE]) == [(8, RULE.name)]
    assert fixed(code, [RULE]) == code


@pytest.mark.parametrize(
    "tail",
    [
        "accelerator.backward(loss)",
        "self.manual_backward(loss)",
        "grads = torch.autograd.grad(loss, x)",
        "engine.backward(loss)",
        "closure = lambda: loss.backward()",
    ],
)
def test_other_calls_are_no_backward_pass(tail: str) -> None:
    assert findings(STEP.format(tail), [RULE]) == []


def test_a_method_that_is_also_called_outside_is_left_alone() -> None:
    code = """\
import torch


def step(model, x):
    model(x).mean().backward()


def train(model, xs, flag):
    if flag:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            step(model, xs[0])
    step(model, xs[1])
"""
    assert findings(code, [RULE]) == []


def test_a_loop_in_the_region_is_the_fault_of_the_loop() -> None:
    code = """\
import torch


def train(model, loader, optimizer):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        for x in loader:
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
"""
    assert findings(code, [RULE, LoopInsideAutocast()]) == [(5, "loop_inside_autocast")]
    # Without a step in it, the copies of the weights are not stale.
    assert findings(code.replace("            optimizer.step()\n", "    optimizer.step()\n"), [RULE, LoopInsideAutocast()]) == [
        (8, RULE.name)
    ]


@pytest.mark.parametrize(
    "change",
    [
        ("bfloat16)", "bfloat16, cache_enabled=False)"),
        ("bfloat16)", "bfloat16, enabled=False)"),
        ("optimizer.step()", "optimizer.step(); torch.clear_autocast_cache()"),
    ],
)
def test_a_loop_without_stale_copies_is_right(change: tuple[str, str]) -> None:
    code = """\
import torch


def train(model, loader, optimizer):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        for x in loader:
            optimizer.zero_grad()
            optimizer.step()
"""
    assert findings(code, [LoopInsideAutocast()]) == [(5, "loop_inside_autocast")]
    assert findings(code.replace(*change), [LoopInsideAutocast()]) == []
