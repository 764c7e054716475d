"""Training in a float16 autocast region without a gradient scaler."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, final

from halfstep.lint.edits import InsertStatement, ReplaceExpression, ReplaceStatement
from halfstep.lint.evidence.frames import Frame
from halfstep.lint.evidence.namesakes import idle_scalers, namesakes
from halfstep.lint.evidence.precision import gather
from halfstep.lint.evidence.regions import Force
from halfstep.lint.evidence.spelling import quoted, spell_torch, text_of
from halfstep.lint.evidence.training import Entry, entries, identifiers, in_sight, names_in, steps
from halfstep.lint.module import Module
from halfstep.lint.rules.rule import AbstractRule, Bad, Finding, Fix
from halfstep.lint.values import UNKNOWN

__all__ = ["Fp16WithoutScaler"]

# Names of what scales a loss itself, or hands the step over to something that does.
_SCALES: Final = re.compile(
    r"(?i)scaler|loss_?scal|scale_?loss|accelerat|fabric|deepspeed|engine|apex|lightning|amp_handle|strategy|plugin"
)
_FACTOR: Final = re.compile(r"(?i)scal")
_PROBE: Final = re.compile(r"(?i)profil|bench|probe|diagnos|debug|memory|flops|oom|speed|timing")
_PER_STEP: Final = re.compile(r"(?i)epoch|step|batch|iter|closure")
_OFF: Final = frozenset(("torch.no_grad", "torch.inference_mode", "torch.autograd.no_grad", "torch.autograd.inference_mode"))
_SMALL: Final = 8.0  # A factor up to this is a weight, not a loss scale.


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Training:
    """A region and what is trained by it.

    Attributes:
        entry: The region.
        force: What it puts in force.
        backward: The call that computes the gradients.
    """

    entry: Entry
    force: Force
    backward: ast.Call


@final
class Fp16WithoutScaler(AbstractRule):
    """`loss.backward()` after a forward pass in a float16 region, and no scaler in sight."""

    code = "HS012"
    name = "fp16_without_scaler"
    severity = "warning"
    summary = "Training in a float16 autocast region without a `GradScaler` loses small gradients."
    explanation = """
The smallest number of float16 is 6e-8: a gradient below half of that becomes zero on its way back through a float16 region. Nothing fails
and nothing warns; the loss goes down more slowly, or stops. With two layers and a loss of about 1e-7, every gradient entry was zero without
a scaler and none with one. `torch.autocast("cuda")` is float16 where no `dtype` is given.

Scale the loss: `scaler.scale(loss).backward()`, `scaler.step(optimizer)`, `scaler.update()`. Or take `dtype=torch.bfloat16`, which has the
range of float32 and needs no scaler, on hardware that has it (compute capability 8.0 and later).

The rule fires at a region whose loss is differentiated in the same function, where nothing in sight of that function could scale it: no
scaler, accelerator, Fabric, engine or loss scale in the function, its class, its callers, or the file's own statements.

The fix, for a plain loop, makes a scaler before it and uses it. It is unsafe: whether bfloat16 would be better is your decision.
"""
    bad = (
        Bad(
            code="""import torch


def train(model, loader, optimizer, criterion):
    for images, labels in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
""",
            line=7,
            fixed="""import torch


def train(model, loader, optimizer, criterion):
    scaler = torch.amp.GradScaler("cuda")
    for images, labels in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
        ),
        Bad(
            code="""import torch


class Trainer:
    def __init__(self, model, criterion):
        self.model = model
        self.criterion = criterion
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(self, batch, accumulation):
        with torch.autocast(device_type="cuda"):
            output = self.model(batch["x"])
            loss = self.criterion(output, batch["y"])
        loss = loss / accumulation
        loss.backward()
        return loss.detach()
""",
            line=11,
        ),
    )
    good = (
        """import torch


def train(model, loader, optimizer, criterion):
    for images, labels in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
""",
        """import torch


def train_step(model, batch, optimizer, scaler):
    optimizer.zero_grad()
    with torch.autocast("cuda"):
        loss = model(**batch).loss
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
        """import torch


def train(model, teacher, loader, optimizer, criterion):
    for images in loader:
        optimizer.zero_grad()
        with torch.no_grad(), torch.autocast("cuda"):
            target = teacher(images)
        loss = criterion(model(images), target)
        loss.backward()
        optimizer.step()
""",
        """import torch


def train(model, loader, optimizer, criterion, loss_scale):
    for images, labels in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(model(images), labels) * loss_scale
        loss.backward()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.div_(loss_scale)
        optimizer.step()
""",
        """import torch


def train(model, loader, optimizer, criterion, dtype):
    for images, labels in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=dtype):
            loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
""",
    )

    def check(self, module: Module) -> Iterator[Finding]:
        """Yields the float16 regions whose loss nobody scales."""
        if "backward" not in module.text or "autocast" not in module.text:
            return
        for entry in entries(module):
            training = _training(entry, module)
            if training is not None and _trains(training, module) and not _is_scaled(training, module):
                yield Finding(node=entry.region.node, message=_message(training, module), fix=_fix(training, module))


def _training(entry: Entry, module: Module) -> _Training | None:
    if entry.region.enabled is False or _is_off(entry.block, module) or not _could_be_fp16(entry):
        return None
    backwards = _backwards(entry, module)
    if not backwards:
        return None
    evidence = gather(module)
    for frame in evidence.ways(entry.block):
        force = evidence.regions.entered(entry.region, frame)
        if force is not None and "fp16" in force.dtypes:
            for backward in backwards:
                if not _is_scaled_by_hand(backward, entry, frame, module):
                    return _Training(entry=entry, force=force, backward=backward)
    return None


def _could_be_fp16(entry: Entry) -> bool:
    return "fp16" in entry.region.shown or (entry.region.device in {"cuda", None} and "dtype" not in entry.region.arguments)


def _is_off(block: ast.With | ast.AsyncWith, module: Module) -> bool:
    """Whether nothing in a block is differentiated."""
    holders = [block, *(holder for holder, part in module.syntax.ancestors(block) if isinstance(holder, ast.With) and part in holder.body)]
    for holder in holders:
        for item in holder.items:
            call = item.context_expr
            if isinstance(call, ast.Call) and module.name(call.func) in _OFF:
                return True
    function = module.function(block)
    marks = getattr(function, "decorator_list", [])
    return any(module.name(mark.func if isinstance(mark, ast.Call) else mark) in _OFF for mark in marks)


def _targets(node: ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr, module: Module) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {key for target in targets for part in ast.walk(target) if (key := module.key(part))}


def _derived(entry: Entry, module: Module) -> set[str]:
    """The places that hold what a region has computed, in its function."""
    function, order = module.function(entry.block), module.syntax.order
    inside = {node for statement in entry.block.body for node in ast.walk(statement)}
    found: set[str] = set()
    for node in module.nodes(ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr):
        if not isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr) or node.value is None:
            continue
        if module.function(node) is not function or order(node) < order(entry.block) or _is_cut(node.value):
            continue
        if node in inside or names_in(node.value, module) & found:
            found |= _targets(node, module)
    return found - {"self"}


def _is_cut(node: ast.expr) -> bool:
    """Whether gradients end at an expression."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in {"detach", "item", "no_grad"}


def _backwards(entry: Entry, module: Module) -> list[ast.Call]:
    """The calls of `backward()` that differentiate what a region has computed."""
    function, order = module.function(entry.block), module.syntax.order
    calls = [
        call
        for call in module.nodes(ast.Call)
        if isinstance(call.func, ast.Attribute)
        and call.func.attr == "backward"
        and module.function(call) is function
        and order(call) > order(entry.block)
    ]
    if not calls:
        return []
    if any(_by_scaler(call) for call in calls):
        return []  # There is one, by whatever name; a condition decides which call is reached.
    derived = _derived(entry, module)
    found: list[ast.Call] = []
    for call in calls:
        assert isinstance(call.func, ast.Attribute)
        if names_in(call.func.value, module) & derived:
            found.append(call)
    return found


def _by_scaler(backward: ast.Call) -> bool:
    inner = backward.func.value if isinstance(backward.func, ast.Attribute) else None
    return isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute) and inner.func.attr in {"scale", "scale_loss"}


def _is_scaled_by_hand(backward: ast.Call, entry: Entry, frame: Frame, module: Module) -> bool:
    """Whether a loss is multiplied by what may be a loss scale in a frame."""
    assert isinstance(backward.func, ast.Attribute)
    function = module.function(backward)
    for node in module.nodes(ast.BinOp, ast.AugAssign):
        if not isinstance(node, ast.BinOp | ast.AugAssign) or not isinstance(node.op, ast.Mult) or module.function(node) is not function:
            continue
        inside = backward.func.value in {node, *(holder for holder, _part in module.syntax.ancestors(node))}
        statement = module.statement(node)
        assigned = isinstance(statement, ast.Assign | ast.AugAssign) and module.syntax.order(statement) > module.syntax.order(entry.block)
        if not inside and not assigned:
            continue
        factors = [node.left, node.right] if isinstance(node, ast.BinOp) else [node.value]
        if any(_is_a_scale(factor, frame, module, anything=inside) for factor in factors):
            return True
    return False


def _is_a_scale(node: ast.expr, frame: Frame, module: Module, *, anything: bool) -> bool:
    """Whether a factor may be a loss scale, by its value or its name; right at `backward()`, `anything` unknown may be."""
    value = gather(module).frames.atom(node, frame)
    if isinstance(value, int | float):
        return value > _SMALL
    if value is not UNKNOWN:
        return False
    if anything and isinstance(node, ast.Name | ast.Attribute) and not _is_called_loss(node, module):
        return True
    return _FACTOR.search(module.key(node).rpartition(".")[2]) is not None


def _is_called_loss(node: ast.expr, module: Module) -> bool:
    return "loss" in module.key(node).lower()


def _trains(training: _Training, module: Module) -> bool:
    """Whether the gradients are for an optimizer: there is one in the file, or the gradients of parameters are read."""
    function = module.function(training.backward)
    name = getattr(function, "name", "")
    if _PROBE.search(name) or _is_probe(training.backward, module):
        return False
    if module.optimizers or steps(module):
        return True
    scope = function if function is not None else module.tree
    reads = any(isinstance(node, ast.Attribute) and node.attr == "grad" for node in ast.walk(scope))
    return reads and "parameters(" in module.source(scope) if function is not None else reads


def _is_probe(backward: ast.Call, module: Module) -> bool:
    """Whether a backward pass is there to see if it raises, with no step behind it."""
    function = module.function(backward)
    if any(module.function(step) is function for step in steps(module)):
        return False
    return any(
        isinstance(holder, ast.Try)
        and part in holder.body
        and any("Error" in module.source(each.type) for each in holder.handlers if each.type)
        for holder, part in module.syntax.ancestors(backward)
    )


def _is_scaled(training: _Training, module: Module) -> bool:
    """Whether something in sight may scale the loss."""
    around = in_sight(module.function(training.backward), module, gather(module).frames)
    words = {word for word in identifiers(around) if _SCALES.search(word)}
    if words and words - namesakes(module):
        return True
    for scope in around:
        if isinstance(scope, ast.ClassDef) and any("lightning" in name.lower() for name in module.evaluation.base_names(scope)):
            return True
    return any(word in module.text for word in ("set_autocast_gpu_dtype", "set_autocast_dtype", "scale_loss"))


def _message(training: _Training, module: Module) -> str:
    backward = training.backward
    line = backward.lineno
    idle = "".join(f"; `{name.id}` of line {name.lineno} is never used" for name, _scaler in idle_scalers(module)[:1])
    explicit = "dtype" in training.entry.region.arguments
    region = quoted(training.entry.region.node, module)
    computes = f"{region} computes in float16" if explicit else f"{region} computes in float16, the default of CUDA"
    return (
        f"{computes}, and {quoted(backward, module, 40)} (line {line}) has no scaler{idle}: gradients below 6e-8 become zero. "
        "Scale the loss with a `torch.amp.GradScaler`, or use `dtype=torch.bfloat16`."
    )


def _fix(training: _Training, module: Module) -> Fix | None:
    backward, block = training.backward, training.entry.block
    loops = module.loops(block)
    function = module.function(block)
    device = training.force.device
    taken = any(node.id == "scaler" for node in module.nodes(ast.Name)) or bool(idle_scalers(module))
    if taken or not loops or device not in {"cuda", "cpu"} or not isinstance(function, ast.FunctionDef):
        return None
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    attributes = [call.func.attr for call in calls if isinstance(call.func, ast.Attribute)]
    if (
        attributes.count("backward") != 1
        or attributes.count("step") != 1
        or any("clip" in each or "state_dict" in each for each in attributes)
    ):
        return None
    step = next(call for call in steps(module) if call in calls) if any(call in calls for call in steps(module)) else None
    if step is None or step.args or _PER_STEP.search(function.name) or gather(module).frames.sites(function):
        return None
    assert isinstance(step.func, ast.Attribute)
    assert isinstance(backward.func, ast.Attribute)
    statement, loss = module.statement(step), backward.func.value
    if not isinstance(statement, ast.Expr) or statement.value is not step or loops[0] not in module.loops(statement):
        return None
    torch, imports = spell_torch(module)
    edits = (
        InsertStatement(statement=loops[0], code=f'scaler = {torch}.amp.GradScaler("{device}")', where="before"),
        ReplaceExpression(node=loss, code=f"scaler.scale({text_of(loss, module)})"),
        ReplaceStatement(statement=statement, code=f"scaler.step({module.source(step.func.value)})\nscaler.update()"),
    )
    return Fix(edits=(*edits, *imports), safety="unsafe")
