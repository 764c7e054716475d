"""A binary cross-entropy of probabilities in an autocast region."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from halfstep.lint.edits import AddImport, Edit, ReplaceExpression, WrapStatements
from halfstep.lint.evidence.bindings import Reaching
from halfstep.lint.evidence.precision import gather
from halfstep.lint.evidence.regions import Force
from halfstep.lint.evidence.spelling import as_float, quoted, spell_torch, text_of
from halfstep.lint.module import Module
from halfstep.lint.rules.rule import AbstractRule, Bad, Finding, Fix
from halfstep.lint.values import Network

__all__ = ["BceUnderAutocast"]

_FUNCTION = "torch.nn.functional.binary_cross_entropy"
# Autocast of these devices has the operation on no list of forbidden ones.
_ALLOWING = frozenset(("cpu", "mps"))
# Calls on the way to the loss that do not care which region they run in.
_HARMLESS = frozenset(
    [
        "squeeze",
        "unsqueeze",
        "view",
        "reshape",
        "flatten",
        "float",
        "detach",
        "to",
        "sigmoid",
        "mean",
        "sum",
        "clamp",
        "t",
        "transpose",
        "permute",
        "contiguous",
    ]
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Sigmoid:
    """The sigmoid that makes the probabilities.

    Attributes:
        call: The sigmoid.
        logits: What it is taken of.
    """

    call: ast.Call
    logits: ast.expr


@final
class BceUnderAutocast(AbstractRule):
    """`F.binary_cross_entropy(p, y)` in a region of `torch.autocast("cuda")`."""

    code = "HS017"
    name = "bce_under_autocast"
    severity = "error"
    summary = "`binary_cross_entropy` and `BCELoss` raise a RuntimeError under autocast on a GPU."
    explanation = """
CUDA autocast refuses `F.binary_cross_entropy` and `nn.BCELoss`, whatever they are given: `RuntimeError: ... are unsafe to autocast`. Their
gradient divides by `p * (1 - p)`, which is zero in half precision for confident predictions. CPU autocast runs them in float32 without a
word, so that a test on a CPU does not show it.

Where the probabilities come from a sigmoid, take the logits: `F.binary_cross_entropy_with_logits` and `nn.BCEWithLogitsLoss` do both steps
at once, in float32. A model that ends in a sigmoid loses that layer, and gets it back where probabilities are wanted. Where that cannot be
done, compute the loss outside of autocast, on float32 values:

    with torch.autocast("cuda", enabled=False):
        loss = F.binary_cross_entropy(p.float(), y.float())

`.float()` alone, inside of the region, does not help.

The fix takes the logits where the sigmoid is in sight, which is unsafe only in that a loss of probabilities becomes one of logits.
Otherwise it puts the loss into a region without autocast, which is safe.
"""
    bad = (
        Bad(
            code="""import torch
import torch.nn.functional as F


def train(model, loader, optimizer, scaler):
    for images, masks in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            logits = model(images)
            loss = F.binary_cross_entropy(torch.sigmoid(logits), masks)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
            line=10,
            fixed="""import torch
import torch.nn.functional as F


def train(model, loader, optimizer, scaler):
    for images, masks in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            logits = model(images)
            loss = F.binary_cross_entropy_with_logits(logits, masks)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
        ),
        Bad(
            code="""import torch
from torch import nn

criterion = nn.BCELoss()


def train(model, loader, optimizer, scaler):
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda"):
            p = model(x)
            loss = criterion(p, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
            line=12,
            fixed="""import torch
from torch import nn

criterion = nn.BCELoss()


def train(model, loader, optimizer, scaler):
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda"):
            p = model(x)
            with torch.autocast("cuda", enabled=False):
                loss = criterion(p.float(), y.float())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
        ),
        Bad(
            code="""import torch
from torch import nn


class DiscriminatorLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.bce = nn.BCELoss()

    def forward(self, score, real):
        return self.bce(score, torch.full_like(score, float(real)))


def loss_of(discriminator, images):
    adversarial = DiscriminatorLoss()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return adversarial(discriminator(images), True)
""",
            line=11,
        ),
    )
    good = (
        """import torch
import torch.nn.functional as F


def loss_of(model, x, y):
    with torch.autocast("cuda", dtype=torch.float16):
        return F.binary_cross_entropy_with_logits(model(x), y)
""",
        """import torch
import torch.nn.functional as F


def loss_of(model, x, y):
    with torch.autocast("cuda", dtype=torch.float16):
        p = model(x)
        with torch.autocast("cuda", enabled=False):
            return F.binary_cross_entropy(p.float(), y)
""",
        """import torch
from torch import nn

criterion = nn.BCELoss()


def loss_of(model, x, y):
    with torch.autocast("cuda", dtype=torch.float16):
        p = model(x)
    return criterion(p.float(), y)
""",
        """import torch
import torch.nn.functional as F


def loss_of(model, x, y):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.binary_cross_entropy(model(x), y)
""",
    )

    def check(self, module: Module) -> Iterator[Finding]:
        """Yields the calls of the loss that run under autocast, on a device that refuses them."""
        if "autocast" not in module.text or not ("binary_cross_entropy" in module.text or "BCELoss" in module.text):
            return
        for call in module.nodes(ast.Call):
            if _is_loss(call, module) and (force := _force(call, module)) is not None:
                sigmoid = _sigmoid_of(call, module)
                yield Finding(node=call, message=_message(call, force, sigmoid, module), fix=_fix(call, force, sigmoid, module))


def _is_loss(call: ast.Call, module: Module) -> bool:
    if not call.args and not call.keywords:
        return False
    name = module.name(call.func)
    if name:
        return name == _FUNCTION
    values = module.values(call.func)
    return bool(values) and all(isinstance(value, Network) and value.name.rpartition(".")[2] == "BCELoss" for value in values)


def _force(call: ast.Call, module: Module) -> Force | None:
    evidence = gather(module)
    for frame in evidence.ways(call):
        force = evidence.regions.at(call, frame)
        if force is not None and force.device not in _ALLOWING:
            return force
    return None


def _probabilities(call: ast.Call) -> ast.expr | None:
    if call.args:
        return None if isinstance(call.args[0], ast.Starred) else call.args[0]
    return next((word.value for word in call.keywords if word.arg == "input"), None)


def _sigmoid_of(call: ast.Call, module: Module) -> _Sigmoid | None:
    """The sigmoid that a loss is given, on the spot or by way of a variable."""
    given = _probabilities(call)
    if isinstance(given, ast.Name):
        bindings = Reaching(module).bindings(given)
        given = bindings[0].value if len(bindings) == 1 and bindings[0].kind == "value" and not bindings[0].path else None
    if not isinstance(given, ast.Call):
        return None
    name = module.name(given.func)
    if name.rpartition(".")[2] == "sigmoid" and name.startswith("torch") and len(given.args) == 1:
        return _Sigmoid(call=given, logits=given.args[0])
    if not name and isinstance(given.func, ast.Attribute) and given.func.attr == "sigmoid" and not given.args:
        return _Sigmoid(call=given, logits=given.func.value)
    return None


def _last_layer(call: ast.Call, module: Module) -> ast.Call | None:
    """The sigmoid that the model, whose output a loss is given, ends in."""
    given = _probabilities(call)
    if isinstance(given, ast.Name):
        bindings = Reaching(module).bindings(given)
        given = bindings[0].value if len(bindings) == 1 and not bindings[0].path else None
    value = module.value(given.func) if isinstance(given, ast.Call) else None
    if not isinstance(value, Network):
        return None
    if value.definition is None and value.name.endswith("Sequential") and value.node.args:
        last = module.value(value.node.args[-1])
        return last.node if isinstance(last, Network) and last.name.endswith(".Sigmoid") else None
    for node in ast.walk(value.definition) if value.definition is not None else ():
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Call):
            function = node.value.func
            last_layer = module.value(function)
            named = module.name(function).rpartition(".")[2] or (function.attr if isinstance(function, ast.Attribute) else "")
            if named == "sigmoid" or (isinstance(last_layer, Network) and last_layer.name.endswith(".Sigmoid")):
                return node.value
    return None


def _message(call: ast.Call, force: Force, sigmoid: _Sigmoid | None, module: Module) -> str:
    with_logits = "`F.binary_cross_entropy_with_logits`" if module.name(call.func) else "`nn.BCEWithLogitsLoss`"
    subject = quoted(call.func, module) if module.name(call.func) else f"{quoted(call.func, module)} is `nn.BCELoss`, and"
    start = (
        f"{subject} runs under the autocast region of line {force.node.lineno}, where it raises a RuntimeError on a GPU, "
        "whatever its inputs."
    )
    if sigmoid is not None:
        logits = quoted(sigmoid.logits, module, 40)
        return f"{start} Its input is the sigmoid of {logits} (line {sigmoid.call.lineno}): give {logits} to {with_logits}."
    layer = _last_layer(call, module)
    if layer is not None:
        return f"{start} The model ends in a sigmoid (line {layer.lineno}): take that out and use {with_logits}."
    return f'{start} Use {with_logits} on the logits, or compute it in float32 under `torch.autocast("cuda", enabled=False)`.'


def _fix(call: ast.Call, force: Force, sigmoid: _Sigmoid | None, module: Module) -> Fix | None:
    given = _probabilities(call)
    if sigmoid is not None and module.name(call.func) and given is not None and _is_still(sigmoid, given, module):
        spelled = module.source(call.func)
        edits: list[Edit] = [
            ReplaceExpression(node=call.func, code=f"{spelled}_with_logits"),
            ReplaceExpression(node=given, code=text_of(sigmoid.logits, module)),
        ]
        if isinstance(call.func, ast.Name):
            edits.append(AddImport(module="torch.nn.functional", name="binary_cross_entropy_with_logits"))
            edits[0] = ReplaceExpression(node=call.func, code="binary_cross_entropy_with_logits")
        return Fix(edits=tuple(edits), safety="unsafe")
    return _island(call, force, module)


def _is_still(sigmoid: _Sigmoid, given: ast.expr, module: Module) -> bool:
    """Whether the logits are the same at the loss as at the sigmoid."""
    if given is sigmoid.call:
        return True
    if not isinstance(sigmoid.logits, ast.Name):
        return False
    function, order = module.function(given), module.syntax.order
    changes = [
        name
        for name in module.nodes(ast.Name)
        if name.id == sigmoid.logits.id and isinstance(name.ctx, ast.Store) and module.function(name) is function
    ]
    # `logits = torch.sigmoid(logits)` changes them in the sigmoid's own statement.
    own = module.statement(sigmoid.call)
    return not any(order(sigmoid.call) < order(name) < order(given) or module.statement(name) is own for name in changes)


def _island(call: ast.Call, force: Force, module: Module) -> Fix | None:
    """The statement of the loss under a region of its own that is off."""
    statement = module.statement(call)
    if module.function(call) is not module.function(statement) or not isinstance(
        statement, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Return | ast.Expr
    ):
        return None
    losses = [each for each in ast.walk(statement) if isinstance(each, ast.Call) and _is_loss(each, module)]
    arguments = [argument for each in losses for argument in each.args[:2]]
    if any(len(each.args) < 2 or any(isinstance(part, ast.Starred) for part in each.args) for each in losses):
        return None
    others = [each for each in ast.walk(statement) if isinstance(each, ast.Call) and each not in losses]
    if not all(isinstance(each.func, ast.Attribute) and each.func.attr in _HARMLESS for each in others):
        return None
    torch, imports = spell_torch(module)
    header = f"with {torch}.autocast({_device(call, force, module)}, enabled=False):"
    edits: tuple[Edit, ...] = tuple(ReplaceExpression(node=each, code=as_float(each, module)) for each in arguments)
    return Fix(edits=(*edits, WrapStatements(first=statement, last=statement, header=header), *imports), safety="safe")


def _device(call: ast.Call, force: Force, module: Module) -> str:
    """How the device of the region is spelled where the loss stands."""
    local = module.autocasts(call)
    if force.device is None and local and (spelled := local[-1].arguments.get("device_type")) is not None:
        return module.source(spelled)
    return f'"{force.device or "cuda"}"'
