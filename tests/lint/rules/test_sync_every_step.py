"""What is read from the device in each iteration, and what is not."""

from __future__ import annotations

from textwrap import indent

import pytest

from halfstep.lint.rules.sync_every_step import SyncEveryStep
from tests.lint.judging import findings

RULES = [SyncEveryStep()]
LOOP = """import math

import numpy as np
import torch

scaler = torch.amp.GradScaler("cuda")
off = torch.amp.GradScaler("cuda", enabled=False)
for step, (x, y) in enumerate(loader):
    x, y = x.cuda(), y.cuda()
    output = model(x)
    loss = criterion(output, y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
LINE = LOOP.count("\n") + 1


def lines(code: str, loop: str = LOOP) -> list[int]:
    return [line for line, _ in findings(loop + indent(code, "    ") + "\n", RULES)]


@pytest.mark.parametrize(
    "code",
    [
        "total += loss.item()",
        "total += float(loss)",
        "print(loss)",
        "print(f'{loss:.3f}')",
        "bar.set_postfix(loss=loss.item())",
        "bar.set_description(f'loss {loss}')",
        "outputs.append(output.detach().cpu().numpy())",
        "correct += (output.argmax(1) == y).sum().item()",
        "values = output.tolist()",
        "if loss > 10: raise ValueError",
        "if torch.isnan(loss): raise ValueError",
        "if not math.isfinite(loss): raise ValueError",
        "assert not torch.isnan(output).any()",
        "writer.add_scalar('scale', scaler.get_scale(), step)",
        "if verbose: print(loss)",
        "if rank is not None: total += loss.item()",
    ],
)
def test_reading_in_each_iteration(code: str) -> None:
    assert lines(code) == [LINE]


@pytest.mark.parametrize(
    "code",
    [
        "total += loss.detach()",
        "print(x.shape, len(y), loss.dtype, output.size(0))",
        "print(step)",
        "count = np.asarray(sizes).mean().item()",
        "if step % 100 == 0: print(loss.item())",
        "if step == 0: print(loss.item())",
        "text = f'{loss}' if step % 10 == 0 else ''",
        "step % 10 == 0 and print(loss)",
        "if loss is None: raise ValueError",
        "if best is None or step % 10 == 0: print(loss)",
        "before = scaler.get_scale()\nif scaler.get_scale() < before: skips += 1",
        "off.get_scale()",
        "def log(): print(loss.item())",
        "try:\n    pass\nexcept RuntimeError:\n    print(loss.item())",
    ],
)
def test_what_does_not_wait_or_seldom(code: str) -> None:
    assert lines(code) == []


def test_only_the_innermost_training_loop_counts() -> None:
    assert lines("", LOOP + "print(loss.item())\n") == []
    code = "for epoch in range(9):\n    for x in loader:\n        loss = model(x.cuda())\n        loss.backward()\n    print(loss.item())\n"
    assert findings(code, RULES) == []


def test_a_file_without_a_gpu_is_left_alone() -> None:
    code = "for x in loader:\n    loss = model(x)\n    loss.backward()\n    print(loss.item())\n"
    assert findings(code, RULES) == []
    assert len(findings(code.replace("(x)", "(x.cuda())"), RULES)) == 1


def test_a_library_that_does_the_backward_pass_counts() -> None:
    code = "for x in loader:\n    loss = model(x.cuda())\n    accelerator.backward(loss)\n    total += loss.item()\n"
    assert [line for line, _ in findings(code, RULES)] == [4]


@pytest.mark.parametrize(
    ("imports", "count"),
    [
        ("import chainer\n", 0),
        ("from paddle import nn\n", 0),
        ("import chainer\nimport torch\n", 1),
        ("from chainer_like import x\n", 1),
    ],
)
def test_another_library_is_left_alone(imports: str, count: int) -> None:
    code = f"{imports}for x in loader:\n    loss = model(x.cuda())\n    loss.backward()\n    total += loss.item()\n"
    assert len(findings(code, RULES)) == count


def test_a_place_in_two_training_loops_is_told_once() -> None:
    code = """import torch

for epoch in range(9):
    for x in loader:
        loss = model(x.cuda())
        scaler.scale(loss).backward()
        total += loss.item()
    loss = penalty(model)
    loss.backward()
    print(loss)
"""
    assert findings(code, RULES) == [(7, "sync_every_step"), (10, "sync_every_step")]


@pytest.mark.parametrize(("kind", "found"), [("int", []), ("(int, str)", []), ("torch.Tensor", [LINE + 2])])
def test_what_is_asked_whether_it_is_a_number_is_none_on_the_device(kind: str, found: list[int]) -> None:
    assert lines(f"index = output[1]\nif not isinstance(index, {kind}): pass\nprint(f'{{index}}')") == found
