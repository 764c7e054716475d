"""A guard against division by zero that is zero itself in float16."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from halfstep.lint.edits import ReplaceExpression
from halfstep.lint.evidence.kinds import vanishes_in_half
from halfstep.lint.evidence.precision import Evidence, gather
from halfstep.lint.evidence.questions import depends_on_dtype
from halfstep.lint.evidence.relevance import may_be_half
from halfstep.lint.evidence.spelling import as_float, quoted
from halfstep.lint.module import Module
from halfstep.lint.rules.rule import AbstractRule, Bad, Finding, Fix
from halfstep.lint.scopes import last_name
from halfstep.lint.values import Constant

__all__ = ["EpsilonVanishesInHalf"]

_CLAMPS = frozenset(("clamp", "clamp_", "clip", "clip_", "clamp_min", "clamp_min_"))
# Functions with a small default that they use in the type of their input.
_DEFAULTS = {"torch.nn.functional.normalize": 1e-12, "torch.nn.functional.cosine_similarity": 1e-8, "torch.cosine_similarity": 1e-8}
# Their positional parameters before `eps`.
_POSITION = {"torch.nn.functional.normalize": 3, "torch.nn.functional.cosine_similarity": 3, "torch.cosine_similarity": 3}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Guard:
    """A small constant that is to keep a tensor away from zero.

    Attributes:
        node: The whole expression.
        tensor: The tensor.
        epsilon: How the constant is written, for the message.
    """

    node: ast.expr
    tensor: ast.expr
    epsilon: str


@final
class EpsilonVanishesInHalf(AbstractRule):
    """`x / (norm + 1e-8)` on float16 values."""

    code = "HS024"
    name = "epsilon_vanishes_in_half"
    severity = "warning"
    summary = "A guard such as `+ 1e-8` is zero in float16, and the division by zero comes back."
    explanation = """
The smallest positive number of float16 is 6e-8, and everything up to 3e-8 is rounded to zero. So `x + 1e-8` is `x`, and
`x.clamp(min=1e-8)` lets zeros through: what should be guarded is divided by zero, and a `log` gives `-inf`. `F.normalize` guards with
1e-12 and `F.cosine_similarity` with 1e-8, by default: rows of zeros, such as padding, come out as NaN, in the forward pass and as
gradients. bfloat16 has the range of float32 and is not affected.

Compute the ratio in float32 (`x.float() + 1e-8`), or take a guard that float16 has: `clamp(min=torch.finfo(x.dtype).tiny)`, which is 6.1e-5
there.

The rule fires where the guarded value is shown to be float16. Under CUDA autocast many operations give float32 whatever they get, among
them `softmax`, `sum`, `norm`, `exp`, `pow` and `rsqrt`: their results are left alone there. CPU autocast leaves all of these in float16.

The fix computes the guarded value in float32. It is unsafe, since the result is float32 then, too.
"""
    bad = (
        Bad(
            code="""import torch
from torch import nn


class Gate(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weights = nn.Linear(dim, 8)

    @torch.autocast("cuda", dtype=torch.float16)
    def forward(self, x):
        weights = torch.sigmoid(self.weights(x))
        return weights / (weights.amax(dim=-1, keepdim=True) + 1e-8)
""",
            line=13,
            fixed="""import torch
from torch import nn


class Gate(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weights = nn.Linear(dim, 8)

    @torch.autocast("cuda", dtype=torch.float16)
    def forward(self, x):
        weights = torch.sigmoid(self.weights(x))
        return weights / (weights.amax(dim=-1, keepdim=True).float() + 1e-8)
""",
        ),
        Bad(
            code="""import torch.nn.functional as F


def unit(features):
    return F.normalize(features.half(), dim=-1)
""",
            line=5,
            fixed="""import torch.nn.functional as F


def unit(features):
    return F.normalize(features.float(), dim=-1)
""",
        ),
        Bad(
            code="""import torch
from torch import nn

head = nn.Linear(16, 4)


def entropy(x):
    with torch.autocast("cpu", dtype=torch.float16):
        p = head(x).softmax(dim=-1)
        return -(p * p.clamp(min=1e-9).log()).sum(dim=-1)
""",
            line=10,
            fixed="""import torch
from torch import nn

head = nn.Linear(16, 4)


def entropy(x):
    with torch.autocast("cpu", dtype=torch.float16):
        p = head(x).softmax(dim=-1)
        return -(p * p.float().clamp(min=1e-9).log()).sum(dim=-1)
""",
        ),
    )
    good = (
        """import torch
from torch import nn


class Gate(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weights = nn.Linear(dim, 8)

    @torch.autocast("cuda", dtype=torch.float16)
    def forward(self, x):
        weights = torch.sigmoid(self.weights(x)).float()
        return weights / (weights.amax(dim=-1, keepdim=True) + 1e-8)
""",
        """import torch
from torch import nn

head = nn.Linear(16, 4)


def entropy(x):
    with torch.autocast("cuda", dtype=torch.float16):
        p = head(x).softmax(dim=-1)  # in float32 there
        return -(p * p.clamp(min=1e-9).log()).sum(dim=-1)
""",
        """import torch
from torch import nn

head = nn.Linear(16, 4)


def unit(x):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y = head(x)
        return y / (y.abs().amax(dim=-1, keepdim=True) + 1e-8)
""",
        """import torch


def unit(x):
    y = x.half()
    return y / y.abs().amax(dim=-1, keepdim=True).clamp(min=torch.finfo(y.dtype).tiny)
""",
        """def unit(x):
    return x / (x.norm(dim=-1, keepdim=True) + 1e-8)
""",
    )

    def check(self, module: Module) -> Iterator[Finding]:
        """Yields the guards that are zero in the type of what they guard."""
        if not may_be_half(module):
            return
        for guard in _guards(module):
            reason = gather(module).half(guard.tensor)
            if reason and not depends_on_dtype(guard.node, module):
                yield Finding(node=guard.node, message=_message(guard, reason, module), fix=_fix(guard, module))
        for guard in _defaults(module):
            reason = _reason_of_default(guard, gather(module))
            if reason:
                yield Finding(node=guard.node, message=_message(guard, reason, module), fix=_fix(guard, module))


def _guards(module: Module) -> Iterator[_Guard]:
    for node in module.nodes(ast.BinOp, ast.Call):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            for tensor, epsilon in ((node.left, node.right), (node.right, node.left)):
                if _vanishes(epsilon, module):
                    yield _Guard(node=node, tensor=tensor, epsilon=quoted(epsilon, module))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CLAMPS:
            tensor, *bounds = node.args if module.name(node.func).startswith("torch") else [node.func.value, *node.args]
            bounds += [word.value for word in node.keywords if word.arg == "min"]
            if bounds and _vanishes(bounds[0], module):
                yield _Guard(node=node, tensor=tensor, epsilon=quoted(bounds[0], module))


def _vanishes(node: ast.expr, module: Module) -> bool:
    if isinstance(node, ast.Constant | ast.UnaryOp | ast.BinOp):
        return vanishes_in_half(module.constant(node))
    if not isinstance(node, ast.Name | ast.Attribute):
        return False
    if vanishes_in_half(module.constant(node)):
        return True
    values = module.values(node)
    # Of a parameter: what it is by default or is given in this file.
    return bool(values) and all(isinstance(value, Constant) and vanishes_in_half(value.value) for value in values)


def _defaults(module: Module) -> Iterator[_Guard]:
    """Calls of torch's own functions with a guard that is too small."""
    for node in module.nodes(ast.Call):
        last = last_name(node.func)
        if last not in {"normalize", "cosine_similarity"} or not node.args or (name := module.name(node.func)) not in _DEFAULTS:
            continue
        position = _POSITION[name]
        given = next(
            (word.value for word in node.keywords if word.arg == "eps"), node.args[position] if len(node.args) > position else None
        )
        if given is None and not any(word.arg is None for word in node.keywords):
            yield _Guard(node=node, tensor=node.args[0], epsilon=f"the default {_DEFAULTS[name]:g} of {quoted(node.func, module)}")
        elif given is not None and _vanishes(given, module):
            yield _Guard(node=node, tensor=node.args[0], epsilon=quoted(given, module))


def _reason_of_default(guard: _Guard, evidence: Evidence) -> str:
    """Why a function's input is float16 where the function does not compute in float32 all the same."""
    for frame in evidence.ways(guard.node):
        found = evidence.precision(guard.tensor, frame)
        if found.kind == "half":
            force = evidence.regions.at(guard.node, frame)
            if force is None or force.device == "cpu":
                return found.reason
    return ""


def _message(guard: _Guard, reason: str, module: Module) -> str:
    tensor = quoted(guard.tensor, module, 40)
    epsilon = f"{guard.epsilon[:1].upper()}{guard.epsilon[1:]}"
    return (
        f"{epsilon} is 0 in float16, whose smallest number is 6e-8, and {tensor} is float16 ({reason}): "
        f"it guards nothing there. Compute {tensor} in float32, or use `torch.finfo({_name(guard, module)}.dtype).tiny` as the guard."
    )


def _name(guard: _Guard, module: Module) -> str:
    return module.key(guard.tensor) or "x"


def _fix(guard: _Guard, module: Module) -> Fix:
    tensors = [guard.tensor]
    if isinstance(guard.node, ast.Call) and module.name(guard.node.func).endswith("cosine_similarity"):
        tensors = guard.node.args[:2]
    edits = tuple(ReplaceExpression(node=tensor, code=as_float(tensor, module)) for tensor in tensors)
    return Fix(edits=edits, safety="unsafe")
