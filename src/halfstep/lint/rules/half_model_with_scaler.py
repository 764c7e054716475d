"""A model in float16 that is trained with a gradient scaler."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import final

from halfstep.lint.edits import DeleteStatement, Edit, RemoveArgument, ReplaceExpression
from halfstep.lint.evidence.halfmodels import HalfModel, half_models, tests_around
from halfstep.lint.evidence.relevance import may_be_half
from halfstep.lint.evidence.spelling import quoted, text_of
from halfstep.lint.evidence.training import uses
from halfstep.lint.module import Module
from halfstep.lint.rules.rule import AbstractRule, Bad, Finding, Fix
from halfstep.lint.values import Scaler

__all__ = ["HalfModelWithScaler"]


@final
class HalfModelWithScaler(AbstractRule):
    """`model.half()` before `scaler.step(optimizer)`."""

    code = "HS014"
    name = "half_model_with_scaler"
    severity = "error"
    summary = "A `GradScaler` refuses to unscale the gradients of a model that is float16 itself."
    explanation = """
The gradient of a float16 parameter is float16, and `scaler.unscale_()` and `scaler.step()` refuse those: `ValueError: Attempting to unscale
FP16 gradients.` Unscaling would take them below 6e-8, where float16 has nothing left, and so undo what the scale was for.

Keep the parameters in float32. `torch.autocast` runs the layers in float16 all the same, and casts each weight once per pass. Parts that
are not trained may stay in half; an adapter on top of them has to be float32.

The rule fires where the parameters of a model that is converted by `.half()` or `.to(torch.float16)`, or loaded with
`torch_dtype=torch.float16`, go to an optimizer that a scaler steps. It stays silent where the file freezes parameters, keeps a float32
copy of them, or converts them back, as in `model.half().float()`, and about half-precision copies for a checkpoint.

The fix takes the conversion out. It is unsafe: the model takes twice the memory, and code around it may hand it float16 inputs.
"""
    bad = (
        Bad(
            code="""import torch
from torch import nn


def train(loader, criterion):
    model = nn.Linear(64, 10).cuda().half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
            line=6,
            fixed="""import torch
from torch import nn


def train(loader, criterion):
    model = nn.Linear(64, 10).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
        ),
        Bad(
            code="""import torch


def train(model, loader, criterion, device):
    model.to(device, torch.float16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
""",
            line=5,
            fixed="""import torch


def train(model, loader, criterion, device):
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
""",
        ),
        Bad(
            code="""import torch
from transformers import AutoModelForCausalLM


def train(loader, name):
    model = AutoModelForCausalLM.from_pretrained(name, torch_dtype=torch.float16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    for batch in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(**batch).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
            line=6,
            fixed="""import torch
from transformers import AutoModelForCausalLM


def train(loader, name):
    model = AutoModelForCausalLM.from_pretrained(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    for batch in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(**batch).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
        ),
    )
    good = (
        """import torch
from torch import nn


def train(loader, criterion):
    model = nn.Linear(64, 10).half().float()  # rounded once, on purpose
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
        """import copy

import torch


def train(model, loader, criterion):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    torch.save({"model": copy.deepcopy(model).half()}, "weights.pt")
""",
        """import torch


def train(model, teacher, loader, criterion):
    teacher = teacher.half().eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        with torch.no_grad():
            target = teacher(x.half())
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(model(x), target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
        """import torch


def train(model, loader, criterion, full_half):
    if full_half:
        model.half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda", enabled=not full_half)
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16, enabled=not full_half):
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
    )

    def check(self, module: Module) -> Iterator[Finding]:
        """Yields the conversions to float16 of models that a scaler steps."""
        if not may_be_half(module) or "caler" not in module.text:
            return
        seen: set[ast.AST] = set()
        for model in half_models(module):
            if model.call in seen:
                continue
            step = _step(model, module)
            if step is not None:
                seen.add(model.call)
                yield Finding(node=model.call, message=_message(model, step, module), fix=_fix(model, module))


def _step(model: HalfModel, module: Module) -> ast.Call | None:
    """The call by which a scaler that is on, at least where the model is half, steps its optimizer."""
    for scaler in module.scalers:
        if scaler.enabled is False:
            continue
        for call in uses(scaler, module, "step", "unscale_"):
            if call.args and model.optimizer in module.values(call.args[0]) and _go_together(model, scaler, call, module):
                return call
    return None


def _go_together(model: HalfModel, scaler: Scaler, step: ast.Call, module: Module) -> bool:
    """Whether the conversion and the step happen in one run, as far as their conditions tell."""
    conditions = tests_around(model.call, module)
    if not conditions:
        return scaler.enabled is not None or not isinstance(scaler.arguments.get("enabled"), ast.UnaryOp | ast.Compare)
    if len(conditions) > 1 or not conditions[0][1]:
        return False
    others = [each for each in tests_around(step, module) if each != conditions[0]]
    flag = scaler.arguments.get("enabled")
    return not others and (scaler.enabled is True or (flag is not None and module.source(flag) == conditions[0][0]))


def _message(model: HalfModel, step: ast.Call, module: Module) -> str:
    refused = f"{quoted(step, module)} (line {step.lineno})"
    return (
        f"{quoted(model.call, module)} makes the parameters of `{model.place}` float16, and {refused} raises "
        "`ValueError: Attempting to unscale FP16 gradients.` Keep them in float32: autocast runs the layers in float16 all the same."
    )


def _fix(model: HalfModel, module: Module) -> Fix | None:
    edit: Edit
    if model.dtype is not None and (model.model is None or len(model.call.args) + len(model.call.keywords) > 1):
        edit = RemoveArgument(call=model.call, argument=_argument(model))
    elif model.model is None:
        return None
    elif isinstance(statement := module.parent(model.call), ast.Expr):
        edit = DeleteStatement(statement=statement)
    else:
        edit = ReplaceExpression(node=model.call, code=text_of(model.model, module))
    return Fix(edits=(edit,), safety="unsafe")


def _argument(model: HalfModel) -> ast.expr | ast.keyword:
    assert model.dtype is not None
    return next((word for word in model.call.keywords if word.value is model.dtype), model.dtype)
