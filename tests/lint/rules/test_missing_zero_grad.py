"""Where gradients may be dropped after all, and where a skip keeps them."""

from __future__ import annotations

import pytest

from halfstep.lint.rules.missing_zero_grad import MissingZeroGrad
from halfstep.lint.rules.zero_grad_per_microbatch import ZeroGradPerMicrobatch
from tests.lint.judging import findings, fixed

RULE = MissingZeroGrad()
LOOP = """\
import torch


def train(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for index, x in enumerate(loader):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""
FOUND = [(10, RULE.name)]


def test_without_any_drop_it_is_found() -> None:
    assert findings(LOOP, [RULE]) == FOUND
    assert findings(LOOP.replace("GradScaler(", "GradScaler(enabled=False, device="), [RULE]) == []


@pytest.mark.parametrize(
    "line",
    [
        "optimizer.zero_grad()",
        "model.zero_grad(set_to_none=True)",
        "for p in model.parameters(): p.grad = None",
        "for p in model.parameters(): p.grad.zero_()",
        "for p, g in zip(ps, gs): p.grad = g",
        "reset_gradients(model)",
        "clear_grads(optimizer)",
        "helper(optimizer)",
        "getattr(optimizer, name)(set_to_none=True)",
        "torch._foreach_zero_(grads)",
    ],
)
def test_gradients_that_may_be_dropped_are_not_spoken_of(line: str) -> None:
    assert findings(f"{LOOP}        {line}\n", [RULE]) == []
    assert findings(LOOP.replace("        with", f"        {line}\n        with"), [RULE]) == []


@pytest.mark.parametrize(
    "line", ["print('zero_grad', index)  # zero_grad", "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)", "log(loss)"]
)
def test_words_and_schedules_drop_nothing(line: str) -> None:
    assert findings(f"{LOOP}        {line}\n", [RULE]) == FOUND


def test_an_optimizer_of_an_unknown_class_may_drop_them_itself() -> None:
    code = LOOP.replace("    scaler =", "    optimizer = Wrapped(model)\n    scaler =")
    assert findings(code, [RULE]) == []
    assert findings(code.replace("Wrapped(model)", "torch.optim.SGD(model.parameters(), lr=0.1)"), [RULE]) == [(11, RULE.name)]


def test_one_step_alone_says_nothing() -> None:
    code = LOOP.replace("    for index, x in enumerate(loader):\n", "    if True:\n")
    assert findings(code, [RULE]) == []


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (["if scaler.get_scale() >= old:", "    optimizer.zero_grad()"], [(14, RULE.name)]),
        (["taken = scaler.get_scale() >= old", "if taken:", "    optimizer.zero_grad()"], [(15, RULE.name)]),
        (["if scaler.get_scale() >= old:", "    optimizer.zero_grad()", "else:", "    optimizer.zero_grad()"], []),
        (["if scaler.get_scale() < old:", "    continue", "optimizer.zero_grad()"], [(14, RULE.name)]),
        (["if scaler.get_scale() < old:", "    optimizer.zero_grad()", "    continue", "optimizer.zero_grad()"], []),
        (["if flag:", "    optimizer.zero_grad()"], []),
        (["if index % 10 == 0:", "    print(index)", "    continue", "optimizer.zero_grad()"], []),
    ],
)
def test_what_happens_after_a_skip(lines: list[str], found: list[tuple[int, str]]) -> None:
    code = LOOP.replace("        scaler.step", "        old = scaler.get_scale()\n        scaler.step").replace(
        "loader, optimizer", "loader, optimizer, flag"
    )
    code += "".join(f"        {line}\n" for line in lines)
    assert findings(code, [RULE]) == found
    mended = fixed(code, [RULE])
    assert findings(mended, [RULE]) == []
    assert (mended == code) == (not found)


@pytest.mark.parametrize(
    ("condition", "count"),
    [
        ("(index + 1) % 4 == 0", 1),
        ("index % accumulate == accumulate - 1", 1),
        ("is_boundary", 1),
        ("sync_gradients", 1),
        ("flag", 0),
        ("torch.isfinite(loss)", 0),
        ("scaler is not None", 0),
        ("phase == 'train'", 0),
    ],
)
def test_only_a_condition_that_counts_makes_a_window(condition: str, count: int) -> None:
    code = LOOP.replace("        with", "        optimizer.zero_grad()\n        with")
    code = code.replace(
        "        scaler.step(optimizer)\n        scaler.update()\n",
        f"        if {condition}:\n            scaler.step(optimizer)\n            scaler.update()\n",
    )
    rule = ZeroGradPerMicrobatch()
    assert findings(code, [rule]) == [(7, rule.name)] * count
    assert findings(fixed(code, [rule]), [rule]) == []
