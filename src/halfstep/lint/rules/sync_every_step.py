"""Values that are read from the GPU in each step."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import final

from halfstep.lint.module import Module
from halfstep.lint.rules.rule import AbstractRule, Bad, Finding
from halfstep.lint.syntax import FUNCTIONS, Loop
from halfstep.lint.tensors import Tensors
from halfstep.lint.values import Scaler

__all__ = ["SyncEveryStep"]

_READING = frozenset(("item", "tolist", "cpu", "numpy"))
_BUILTINS = frozenset(
    ("builtins.float", "builtins.int", "builtins.bool", "builtins.print", "builtins.str", "builtins.format", "builtins.round")
)
_OTHERS = frozenset(("chainer", "cupy", "jittor", "mindspore", "mxnet", "oneflow", "paddle"))


@final
class SyncEveryStep(AbstractRule):
    """`.item()`, `float(loss)`, `print(loss)` or `get_scale()` in each iteration of a training loop."""

    code = "HS018"
    name = "sync_every_step"
    severity = "info"
    summary = "A value is read from the GPU in each step, and the CPU waits for it."
    explanation = """
A CPU hands work to a GPU and runs ahead. To read a value, by `loss.item()`, `float(loss)`, `print(loss)`, `.cpu()`, `if loss > limit:` or
`scaler.get_scale()`, it waits until all that was handed over is done, and while it then prepares the next step the GPU is idle. Mixed
precision makes it worse: the faster the GPU is done, the larger the part of the step that it stands still. Small models lose most.

Keep sums on the device and read them every hundredth step:

```python
total += loss.detach()
if step % 100 == 0:
    print(total.item() / 100)
```

A `GradScaler` waits once in each step by itself, in `step()`, to learn whether gradients were finite. A second wait right behind it costs
little, one before it a lot.

This rule is off unless it is selected, since it is a matter of speed, and in most scripts a small one. No fix is offered: what to log, and
how often, is a decision. Nothing is said where a test with `%` or a comparison stands in between, about values on the CPU, or where
`get_scale()` is compared in order to step a schedule.
"""
    bad = (
        Bad(
            code="""import torch


def train(model, optimizer, loader, criterion):
    total = 0.0
    for images, labels in loader:
        optimizer.zero_grad()
        loss = criterion(model(images.cuda()), labels.cuda())
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total
""",
            line=11,
        ),
        Bad(
            code="""import torch

scaler = torch.amp.GradScaler("cuda")


def train(model, optimizer, loader, criterion, log):
    for images, labels in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        log.add_scalar("scale", scaler.get_scale())
""",
            line=14,
        ),
        Bad(
            code="""import torch


def train(model, optimizer, loader, criterion):
    model.cuda()
    for images, labels in loader:
        optimizer.zero_grad()
        loss = criterion(model(images.cuda()), labels.cuda())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(f"norm {norm:.3f}")
""",
            line=12,
        ),
    )
    good = (
        """import torch


def train(model, optimizer, loader, criterion):
    total = torch.zeros((), device="cuda")
    for step, (images, labels) in enumerate(loader):
        optimizer.zero_grad()
        loss = criterion(model(images.cuda()), labels.cuda())
        loss.backward()
        optimizer.step()
        total += loss.detach()
        if step % 100 == 0:
            print(step, total.item())
    return total.item()
""",
        """import torch

scaler = torch.amp.GradScaler("cuda")


def train(model, optimizer, scheduler, loader, criterion):
    for images, labels in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        if scaler.get_scale() >= before:
            scheduler.step()
""",
        """import numpy as np
import torch


def train(model, optimizer, batches, criterion):
    model.cuda()
    for batch in batches:
        weight = np.asarray(batch["weight"]).mean().item()
        optimizer.zero_grad()
        loss = weight * criterion(model(batch["images"].cuda()), batch["labels"].cuda())
        loss.backward()
        optimizer.step()
        print(weight, len(batch["labels"]))
""",
        """import torch


def train(model, optimizer, loader, criterion):
    for images, labels in loader:
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        print(loss.item())
""",
    )

    def check(self, module: Module) -> Iterator[Finding]:
        """Yields the places in the innermost training loops where a value of the loss, or of its own making, is read."""
        if "backward" not in module.text or "cuda" not in module.text or _is_of_another_library(module):
            return
        told: set[ast.AST] = set()
        # The innermost loop first: a place is told once.
        for loop, losses in sorted(_training_loops(module).items(), key=lambda each: -len(module.loops(each[0]))):
            tensors = Tensors(loop, losses, module)
            for node in _parts(loop):
                what = _read(node, tensors, module)
                if what is not None and node not in told and not _is_seldom(node, loop):
                    told.add(node)
                    yield Finding(
                        node=node,
                        message=(
                            f"`{_short(node, module)}` reads {what} in each iteration of the loop of line {loop.lineno}: the CPU waits for "
                            "the GPU, which is idle afterwards. Read it every n-th step."
                        ),
                    )


def _is_of_another_library(module: Module) -> bool:
    """Whether a file trains with another library than torch, whose losses have the same methods."""
    paths = [alias.name for statement in module.nodes(ast.Import) for alias in statement.names]
    paths += [statement.module or "" for statement in module.nodes(ast.ImportFrom)]
    return any(path.partition(".")[0] in _OTHERS for path in paths) and not any("torch" in path for path in paths)


def _training_loops(module: Module) -> dict[Loop, list[ast.expr]]:
    """The innermost loops around backward passes, with the losses of those."""
    found: dict[Loop, list[ast.expr]] = {}
    for call in module.nodes(ast.Call):
        if isinstance(call.func, ast.Attribute) and call.func.attr == "backward" and (loops := module.loops(call)):
            receiver = call.func.value
            if isinstance(receiver, ast.Call) and isinstance(receiver.func, ast.Attribute) and receiver.func.attr == "scale":
                losses = receiver.args
            else:
                # `accelerator.backward(loss)`, too.
                losses = [receiver, *call.args]
            found.setdefault(loops[-1], []).extend(losses)
    return found


def _parts(loop: Loop) -> Iterator[ast.AST]:
    """The nodes that run with each iteration, in order."""
    pending: list[ast.AST] = list(reversed(loop.body))
    while pending:
        node = pending.pop()
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            yield node
            pending.extend(reversed(list(ast.iter_child_nodes(node))))


def _read(node: ast.AST, tensors: Tensors, module: Module) -> str | None:
    """What a node reads from the device; `None` where it reads nothing."""
    if isinstance(node, ast.Call) and (what := _read_by_call(node, tensors, module)) is not None:
        return what
    if isinstance(node, ast.JoinedStr):
        shown = [part.value for part in node.values if isinstance(part, ast.FormattedValue)]
        return next((f"`{module.source(part)}`" for part in shown if tensors.holds(part)), None)
    if isinstance(node, ast.expr):
        holder = module.parent(node)
        if isinstance(holder, ast.If | ast.While | ast.IfExp | ast.Assert) and holder.test is node and tensors.holds(node):
            return "a condition"
    return None


def _read_by_call(call: ast.Call, tensors: Tensors, module: Module) -> str | None:
    if isinstance(call.func, ast.Attribute):
        if call.func.attr in _READING and not call.args and tensors.holds(call.func.value):
            return f"`{_short(call.func.value, module)}`"
        if call.func.attr == "get_scale" and _is_scaler(call.func.value, module):
            return None if _is_compared(call, module) else "the scale"
    name = module.name(call.func)
    if name in _BUILTINS or name.startswith("math."):
        return next((f"`{_short(part, module)}`" for part in call.args if tensors.holds(part)), None)
    return None


def _is_scaler(node: ast.expr, module: Module) -> bool:
    return any(isinstance(value, Scaler) and value.enabled is not False for value in module.values(node))


def _is_compared(call: ast.Call, module: Module) -> bool:
    """Whether a scale is compared, at once or later by the variable that keeps it: that tells a skipped step."""
    holder = module.parent(call)
    if isinstance(holder, ast.Compare):
        return True
    if not isinstance(holder, ast.Assign):
        return False
    kept = {module.key(target) for target in holder.targets}
    compared = {
        module.key(part)
        for comparison in module.nodes(ast.Compare)
        if module.function(comparison) is module.function(call)
        for part in ast.walk(comparison)
    }
    return bool((kept & compared) - {""})


def _is_seldom(node: ast.AST, loop: Loop) -> bool:
    """Whether a node runs in some iterations only: behind anything but a plain flag."""
    return any(_gates(part, node) for part in ast.walk(loop) if isinstance(part, ast.If | ast.IfExp | ast.BoolOp | ast.ExceptHandler))


def _gates(holder: ast.AST, node: ast.AST) -> bool:
    if isinstance(holder, ast.If):
        inside = any(node is part for statement in (*holder.body, *holder.orelse) for part in ast.walk(statement))
        return inside and not _is_flag(holder.test)
    if isinstance(holder, ast.IfExp):
        inside = any(node is part for branch in (holder.body, holder.orelse) for part in ast.walk(branch))
        return inside and not _is_flag(holder.test)
    if isinstance(holder, ast.BoolOp):
        return any(node is part for value in holder.values[1:] for part in ast.walk(value)) and not _is_flag(holder.values[0])
    return any(node is part for part in ast.walk(holder))


def _is_flag(test: ast.expr) -> bool:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _is_flag(test.operand)
    if isinstance(test, ast.Compare):
        # `x is not None`
        return all(isinstance(op, ast.Is | ast.IsNot) for op in test.ops)
    if isinstance(test, ast.BoolOp):
        return all(_is_flag(value) for value in test.values)
    return isinstance(test, ast.Name | ast.Attribute)


def _short(node: ast.AST, module: Module) -> str:
    text = " ".join(module.source(node).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
