"""Adam with an epsilon that is zero in float16, on float16 parameters."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final, final

from halfstep.lint.edits import AddArgument, Edit, ReplaceExpression
from halfstep.lint.evidence.frames import Frame
from halfstep.lint.evidence.halfmodels import half_models, tests_around
from halfstep.lint.evidence.kinds import vanishes_in_half
from halfstep.lint.evidence.precision import gather
from halfstep.lint.evidence.relevance import may_be_half
from halfstep.lint.evidence.spelling import quoted
from halfstep.lint.evidence.training import uses
from halfstep.lint.module import Module
from halfstep.lint.rules.rule import AbstractRule, Bad, Finding, Fix
from halfstep.lint.values import Optimizer

__all__ = ["HalfAdamEpsilon"]

_ADAMS: Final = frozenset(("Adam", "AdamW", "Adamax", "NAdam", "RAdam"))
_DEFAULT: Final = "eps=1e-8"


@final
class HalfAdamEpsilon(AbstractRule):
    """`torch.optim.Adam(model.parameters())` after `model.half()`."""

    code = "HS030"
    name = "half_adam_epsilon"
    severity = "error"
    summary = "Adam's `eps=1e-8` is zero in float16, and float16 parameters become NaN in the first step."
    explanation = """
Adam divides by the root of the squared gradient's average, plus `eps`. On float16 parameters all of that is float16: `1e-8` is zero there,
and so is the square of a gradient below 2e-4. An entry whose gradient is 0 becomes `0 / 0`, NaN, in the first step, and one with a small
gradient becomes infinite. `Adam`, `AdamW`, `NAdam` and `RAdam` gave `[nan, -inf, 0.99]` for the gradients `[0, 1e-4, 1e-2]`; `fused=True`
computes in float32 and did not. In bfloat16, `1e-8` is `1e-8`.

Keep the parameters in float32 and let `torch.autocast` run the layers in float16. Where that is not possible, pass `eps=1e-4`.

The rule fires where the parameters are shown to be float16: those of a model after `.half()`, or tensors made with `dtype=torch.float16`.

The fix passes `eps=1e-4`. It is unsafe: a larger `eps` makes smaller steps where gradients are small.
"""
    bad = (
        Bad(
            code="""import torch


def train(model, loader, criterion):
    model.half()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x.half()), y)
        loss.backward()
        optimizer.step()
""",
            line=6,
            fixed="""import torch


def train(model, loader, criterion):
    model.half()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-4)
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x.half()), y)
        loss.backward()
        optimizer.step()
""",
        ),
        Bad(
            code="""import torch
from torch.optim import AdamW

for dtype in (torch.float32, torch.float16):
    weight = torch.nn.Parameter(torch.ones(8, dtype=dtype))
    optimizer = AdamW([weight], lr=1e-3, eps=1e-8)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    print(dtype, weight)
""",
            line=6,
            fixed="""import torch
from torch.optim import AdamW

for dtype in (torch.float32, torch.float16):
    weight = torch.nn.Parameter(torch.ones(8, dtype=dtype))
    optimizer = AdamW([weight], lr=1e-3, eps=1e-4)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    print(dtype, weight)
""",
        ),
    )
    good = (
        """import torch


def train(model, loader, criterion):
    model.half()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-4)
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x.half()), y)
        loss.backward()
        optimizer.step()
""",
        """import torch


def train(model, loader, criterion):
    model.bfloat16()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x.bfloat16()), y)
        loss.backward()
        optimizer.step()
""",
        """import torch


def train(model, loader, criterion):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
    model.half()
    torch.save(model.state_dict(), "weights.pt")
""",
        """import torch


def train(model, loader, criterion):
    model.half()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x.half()), y)
        loss.backward()
        optimizer.step()
""",
    )

    def check(self, module: Module) -> Iterator[Finding]:
        """Yields the optimizers whose epsilon is zero in the type of their parameters."""
        if not may_be_half(module) or ("Ada" not in module.text and "Adam" not in module.text):
            return
        seen: set[ast.AST] = set()
        for optimizer in _of_half_tensors(module):
            seen.add(optimizer.node)
            yield _finding(optimizer, "the tensors that it is given are float16", module)
        for model in half_models(module):
            optimizer = model.optimizer
            if optimizer.node in seen or not _is_adam(optimizer) or not _vanishes(optimizer, None, module):
                continue
            if _is_scaled(optimizer, module) or _exclude_each_other(model.call, optimizer.node, module):
                continue
            seen.add(optimizer.node)
            yield _finding(optimizer, f"the parameters of `{model.place}` are float16 since line {model.call.lineno}", module)


def _finding(optimizer: Optimizer, why: str, module: Module) -> Finding:
    given = optimizer.arguments.get("eps")
    epsilon = quoted(given, module) if given is not None and module.constant(given) is not None else f"The default `{_DEFAULT}`"
    message = (
        f"{epsilon} of {quoted(optimizer.node.func, module)} is 0 in float16, and {why}: where a gradient is 0, the first step divides "
        "0 by 0 and the parameter is NaN. Keep the parameters in float32, or pass `eps=1e-4`."
    )
    edit: Edit = AddArgument(call=optimizer.node, code="eps=1e-4", where="last")
    if given is not None:
        edit = ReplaceExpression(node=given, code="1e-4")
    return Finding(node=optimizer.node, message=message, fix=Fix(edits=(edit,), safety="unsafe"))


def _is_adam(optimizer: Optimizer) -> bool:
    plain = not any(word.arg in {None, "fused"} for word in optimizer.node.keywords)
    return optimizer.name in _ADAMS and plain


def _vanishes(optimizer: Optimizer, frame: Frame | None, module: Module) -> bool:
    # Behind `lr` stand the betas, and then `eps`.
    given = optimizer.arguments.get("eps") or optimizer.arguments.get("3")
    if given is None:
        return True
    value = module.constant(given) if frame is None else gather(module).frames.atom(given, frame)
    return vanishes_in_half(value)


def _of_half_tensors(module: Module) -> Iterator[Optimizer]:
    """Optimizers that are given tensors, one of which is half precision."""
    evidence = gather(module)
    for optimizer in module.optimizers:
        given = optimizer.arguments.get("params")
        if not _is_adam(optimizer) or not isinstance(given, ast.List | ast.Tuple):
            continue
        tensors = [part for part in given.elts if isinstance(part, ast.Name | ast.Attribute)]
        for frame in evidence.ways(optimizer.node):
            if _vanishes(optimizer, frame, module) and any(evidence.precision(each, frame).kind == "half" for each in tensors):
                yield optimizer
                break


def _is_scaled(optimizer: Optimizer, module: Module) -> bool:
    """Whether a scaler steps an optimizer, and so refuses the float16 gradients before Adam sees them."""
    return any(
        call.args and optimizer in module.values(call.args[0])
        for scaler in module.scalers
        if scaler.enabled is not False
        for call in uses(scaler, module, "step", "unscale_")
    )


def _exclude_each_other(conversion: ast.AST, creation: ast.AST, module: Module) -> bool:
    first, second = tests_around(conversion, module), tests_around(creation, module)
    return any((test, not holds) in second for test, holds in first)
