"""A closure is handed to `scaler.step`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import ClassVar, final

from halfstep.lint.evidence.spelling import quoted
from halfstep.lint.module import Module
from halfstep.lint.rules.rule import AbstractRule, Bad, Finding
from halfstep.lint.values import Optimizer, Routine, Scaler

__all__ = ["ClosureWithScaler"]

_CLOSURE = re.compile(r"(?i)closure")


@final
class ClosureWithScaler(AbstractRule):
    """A closure is handed to `scaler.step`."""

    code = "HS016"
    name = "closure_with_scaler"
    severity = "error"
    summary = "A closure is handed to `scaler.step`, which cannot unscale or check what it computes."
    explanation = """\
An optimizer such as LBFGS calls its closure inside `step()`, several times. The scaler unscales and checks gradients once, before that:
what the closure computes during the step it never sees. As a keyword, `scaler.step(optimizer, closure=closure)` raises a RuntimeError.
By position, `scaler.step(optimizer, closure)` is accepted, and the optimizer works with gradients that are multiplied by the scale: with
a scale of 4096, LBFGS saw norms of 2620 in place of 0.64. Its tolerances and the constants of its line search are wrong then, and an
infinity goes straight into the weights.

Use bf16 (which needs no scaler) or fp32 for such an optimizer: `optimizer.step(closure)` with a closure that calls `loss.backward()`.

There is no automatic fix: it is a choice of precision."""
    bad: ClassVar[tuple[Bad, ...]] = (
        Bad(
            code="""\
import torch


def fit(model, x, y):
    optimizer = torch.optim.LBFGS(model.parameters())
    scaler = torch.amp.GradScaler("cuda")

    def closure():
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = (model(x) - y).square().mean()
        scaler.scale(loss).backward()
        return loss

    for _ in range(20):
        scaler.step(optimizer, closure)
        scaler.update()
""",
            line=16,
        ),
        Bad(
            code="""\
import torch


class Trainer:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.scaler = torch.amp.GradScaler("cuda")

    def step(self, x, optimizer_closure):
        self.optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = self.model(x).mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer, closure=optimizer_closure)
        self.scaler.update()
""",
            line=14,
        ),
    )
    good: ClassVar[tuple[str, ...]] = (
        """\
import torch


def fit(model, x, y):
    optimizer = torch.optim.LBFGS(model.parameters())

    def closure():
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = (model(x) - y).square().mean()
        loss.backward()
        return loss

    for _ in range(20):
        optimizer.step(closure)
""",
        """\
import torch


def step(model, x, optimizer, scaler: torch.amp.GradScaler):
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
        """\
import torch


def step(optimizer, closure):
    scaler = torch.amp.GradScaler("cuda", enabled=False)
    scaler.step(optimizer, closure)
""",
        """\
import torch


def step(model, x, optimizer, scaler: torch.amp.GradScaler, closure=None):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer, closure)
    scaler.update()
    optimizer.zero_grad()
""",
    )

    def check(self, module: Module) -> Iterator[Finding]:
        """Yields a finding for each step by a scaler that is given a closure."""
        for call in module.nodes(ast.Call):
            function = call.func
            if not isinstance(function, ast.Attribute) or function.attr != "step" or not (call.args or call.keywords):
                continue
            closure = _closure(call, module)
            if closure is None:
                continue
            scalers = [value for value in module.values(function.value) if isinstance(value, Scaler)]
            if not scalers or any(scaler.enabled is False for scaler in scalers):
                continue
            yield Finding(node=call, message=_message(call, closure, module))


def _closure(call: ast.Call, module: Module) -> ast.expr | None:
    """The closure among the arguments; by position, it must be shown to be one."""
    given = next((keyword.value for keyword in call.keywords if keyword.arg == "closure"), None)
    if given is not None:
        return None if isinstance(given, ast.Constant) or _may_be_none(given, module) else given
    if len(call.args) < 2 or any(isinstance(argument, ast.Starred) for argument in call.args):
        return None
    optimizer, second = call.args[0], call.args[1]
    if isinstance(second, ast.Constant) or _may_be_none(second, module):
        return None
    values = module.values(second)
    if isinstance(second, ast.Lambda) or any(isinstance(value, Routine) for value in values) or _CLOSURE.search(module.source(second)):
        return second
    return second if any(isinstance(value, Optimizer) for value in module.values(optimizer)) else None


def _may_be_none(closure: ast.expr, module: Module) -> bool:
    """Whether a closure is a parameter that is None unless somebody gives one, as in a wrapper that passes it on."""
    function = module.function(closure)
    if not isinstance(closure, ast.Name) or function is None:
        return False
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [*zip(positional[len(positional) - len(arguments.defaults) :], arguments.defaults, strict=True)]
    named = [*zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    return any(
        parameter.arg == closure.id and isinstance(default, ast.Constant) and default.value is None
        for parameter, default in (*defaults, *named)
    )


def _message(call: ast.Call, closure: ast.expr, module: Module) -> str:
    name = quoted(closure, module)
    if any(keyword.arg == "closure" for keyword in call.keywords):
        what = f"{quoted(call, module)} raises a RuntimeError while the scaler is enabled: it cannot unscale what {name} computes"
    else:
        what = (
            f"{quoted(call, module)} calls {name} inside the step, with gradients that are multiplied by the scale (65536 at first) and "
            "not checked for infinities"
        )
    return f"{what}. Use bf16 or fp32 without a scaler for an optimizer that needs a closure."
