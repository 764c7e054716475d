"""Which calls and assignments are parts of a training step."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from halfstep.lint.flow.events import Kind, Target
from halfstep.lint.scopes import Binding, dotted, last_name
from halfstep.lint.syntax import FUNCTIONS
from halfstep.lint.values import Optimizer, Scaler, Scheduler

if TYPE_CHECKING:
    from halfstep.lint.module import Module

__all__ = ["CANDIDATES", "Part", "Recognition"]

_CLIPS = frozenset(("clip_grad_norm_", "clip_grad_value_", "clip_grad_norm", "clip_grad_value", "dispatch_clip_grad", "adaptive_clip_grad"))
_CLAMPS = frozenset(("clamp_", "clip_"))
_NORMS = frozenset(
    ("norm", "vector_norm", "matrix_norm", "get_total_norm", "_get_total_norm", "max", "abs", "sum", "mean", "square", "pow")
)
_AVERAGERS = frozenset(
    (
        "update_ema",
        "ema_update",
        "soft_update",
        "polyak_update",
        "update_target",
        "update_target_network",
        "momentum_update",
        "update_average",
        "update_moving_average",
    )
)
_CLEANERS = frozenset(("nan_to_num_", "nan_to_num"))

# The last names of calls that can be a part of a step at all.
CANDIDATES = (
    frozenset(("backward", "unscale_", "step", "update", "update_parameters", "zero_grad", "get_scale", "zero_", "add_", "lerp_"))
    | _AVERAGERS
    | _CLIPS
    | _CLAMPS
    | _NORMS
    | _CLEANERS
)

_CALLED_OPTIMIZER = re.compile(r"(?i)(^|_)(optim(izer)?s?|opts?|optimizer|optim)(_|\d|$)|^(optimizer|optim)|(optimizer|optim)$")
_CALLED_SCHEDULER = re.compile(r"(?i)sched|(^|_)warmup|lr_policy")
_CALLED_AVERAGE = re.compile(r"(?i)(^|_)(ema|swa|averaged?_?model|model_ema|averager|ema_model|target_(net|network|model))\w*$")
# Methods that a base class elsewhere may bring, and that may well touch the scaler.
_SUSPECT = re.compile(r"(?i)clip|unscale|optim|step|backward|hook|callback|grad|amp|scaler")
_FINITE = re.compile(r"isfinite|isnan|isinf")
_WEIGHTS = re.compile(r"\.(named_)?(parameters|buffers)\(\)|\.state_dict\(\)")
_HARMLESS = frozenset(
    ("print", "isinstance", "len", "type", "id", "repr", "str", "hasattr", "getattr", "vars", "bool", "append", "debug", "info")
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a call or assignment is.

    Attributes:
        kind: Which part of a step.
        scaler: The scaler that takes part.
        optimizer: The optimizer, or the object that a method is called on.
        operand: The loss, the parameters or the new scale.
    """

    kind: Kind
    scaler: Scaler | None = None
    optimizer: Target | None = None
    operand: ast.expr | None = None


@final
class Recognition:
    """Tells what a call is in a training step.

    Args:
        module: The file.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        self._known: dict[ast.AST, Part | None] = {}
        self._aliases = {
            alias.asname: alias.name for statement in module.nodes(ast.ImportFrom) for alias in statement.names if alias.asname is not None
        }
        self._methods: Mapping[str, Callable[[ast.Call, ast.expr], Part | None]] = {
            "backward": self._backward,
            "unscale_": self._unscale,
            "step": self._step,
            "update": self._update,
            "update_parameters": self._average,
            "zero_grad": self._zero_grad,
            "get_scale": self._get_scale,
        }

    def last_name(self, call: ast.Call) -> str:
        """The last part of the name of what is called; that from before an import gave it another one."""
        function = call.func
        if isinstance(function, ast.Attribute):
            return function.attr
        return self._aliases.get(function.id, function.id) if isinstance(function, ast.Name) else ""

    def part(self, node: ast.AST) -> Part | None:
        """What a call, or an assignment, is; `None` where it is no part of a step."""
        if node not in self._known:
            self._known[node] = self._recognize(node)
        return self._known[node]

    def scaler(self, node: ast.AST) -> Scaler | None:
        """The scaler that an expression is."""
        return next((value for value in self._module.values(node) if isinstance(value, Scaler)), None)

    def target(self, node: ast.expr) -> Target:
        """An object by where it is kept: the same for all spellings that lead to one value or place."""
        root: ast.expr = node
        while isinstance(root, (ast.Attribute, ast.Subscript)):
            root = root.value
        names = [root, *(part for part in ast.walk(node) if isinstance(part, ast.Name))] if root is not node else [root]
        varies = any(binding.kind == "element" for name in names for binding in self._module.bindings(name))
        return Target(self._identity(node, 0), self._module.source(node), varies)

    def _identity(self, node: ast.expr, depth: int) -> Hashable:
        values = [value for value in self._module.values(node) if isinstance(value, Optimizer | Scheduler)]
        if len(values) == 1:
            return values[0]
        bindings = self._module.bindings(node)
        if len(bindings) == 1 and depth < 8 and not bindings[0].path and bindings[0].kind == "value":
            value = bindings[0].value
            if isinstance(value, (ast.Name, ast.Attribute, ast.Subscript)):
                return self._identity(value, depth + 1)
        return dotted(node) or self._module.source(node)

    def _recognize(self, node: ast.AST) -> Part | None:
        if isinstance(node, ast.Assign):
            return self._assignment(node)
        if not isinstance(node, ast.Call):
            return None
        last = self.last_name(node)
        part = self._by_receiver(node, node.func, last) if isinstance(node.func, ast.Attribute) else None
        return part or self._by_name(node, last) or self._escape(node, last)

    def _by_receiver(self, call: ast.Call, function: ast.Attribute, last: str) -> Part | None:
        """What a method is, by what it is called on."""
        if last in self._methods:
            return self._methods[last](call, function.value)
        if last in _CLAMPS and self._of_gradients(function):
            return Part(kind=Kind.CLIP)
        if last == "zero_" and self._of_gradients(function):
            return Part(kind=Kind.CLEAN if self._asks_for_finite(call) else Kind.ZERO_GRAD)
        if last in {"add_", "lerp_"}:
            return self._moved_weight(call, function)
        if last.endswith("_step") and _CALLED_OPTIMIZER.search(_last(function.value)):
            return Part(kind=Kind.ESCAPE)  # A step of somebody's own, such as that of SAM.
        return None

    def _by_name(self, call: ast.Call, last: str) -> Part | None:
        """What a function or method is, by its own name."""
        if last in _CLIPS:
            return self._clip(call)
        if last in _CLEANERS and any(self._of_gradients(inner) for inner in (call.func, *call.args)):
            return Part(kind=Kind.CLEAN)
        if last in _NORMS:
            return self._norm(call, call.func)
        if last in _AVERAGERS:
            return Part(kind=Kind.AVERAGE, optimizer=self.target(call.func))
        return None

    def _asks_for_finite(self, node: ast.AST) -> bool:
        """Whether something happens only to what is, or is not, finite."""
        for holder, part in self._module.syntax.ancestors(node):
            if isinstance(holder, ast.If) and part in holder.body and _FINITE.search(self._module.source(holder.test)):
                return True
            if isinstance(holder, FUNCTIONS):
                return False
        return False

    def _moved_weight(self, call: ast.Call, function: ast.Attribute) -> Part | None:
        """An average of weights that is moved by hand: `a.lerp_(w, r)` or `a.mul_(m).add_(w)` in a loop over two models' weights."""
        inner = function.value
        if function.attr == "add_":
            if not (isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute) and inner.func.attr == "mul_"):
                return None
            inner = inner.func.value
        for loop in self._module.loops(call):
            pairs = loop.iter if isinstance(loop, ast.For) and isinstance(loop.iter, ast.Call) else None
            if pairs is None or self._module.name(pairs.func) != "builtins.zip":
                continue
            if sum(_WEIGHTS.search(self._module.source(part)) is not None for part in pairs.args) > 1:
                return Part(kind=Kind.AVERAGE, optimizer=self.target(inner))
        return None

    def _assignment(self, node: ast.Assign) -> Part | None:
        for target in node.targets:
            inner = target.value if isinstance(target, ast.Subscript) else target
            if not isinstance(inner, ast.Attribute) or inner.attr != "grad":
                continue
            if isinstance(node.value, ast.Constant) and node.value.value is None and inner is target:
                return Part(kind=Kind.ZERO_GRAD, optimizer=self.target(inner.value))
            text = self._module.source(node)
            if "nan_to_num" in text or ((inner is not target or "where(" in text) and _FINITE.search(text)):
                return Part(kind=Kind.CLEAN)
        return None

    def _backward(self, call: ast.Call, loss: ast.expr) -> Part | None:
        name = self._module.name(call.func)
        if name == "torch.autograd.backward" and call.args:
            loss = call.args[0]
        elif name or call.args:
            # accelerator.backward(loss), fabric.backward(loss), engine.backward(loss): what becomes of it is theirs.
            return Part(kind=Kind.UNKNOWN_BACKWARD)
        scaled = self._scaled(loss, 0)
        if scaled is None:
            return Part(kind=Kind.UNKNOWN_BACKWARD, operand=loss)
        scaler, operand = scaled
        return Part(kind=Kind.BACKWARD if scaler is None else Kind.SCALED_BACKWARD, scaler=scaler, operand=operand)

    def _scaled(self, loss: ast.expr, depth: int) -> tuple[Scaler | None, ast.expr] | None:
        """The scaler that scales a loss, if any, and the loss before that; `None` where that is not known."""
        if isinstance(loss, ast.Call) and isinstance(loss.func, ast.Attribute) and loss.func.attr == "scale":
            scaler = self.scaler(loss.func.value)
            return None if scaler is None or not loss.args else (scaler, loss.args[0])
        text = self._module.source(loss).lower()
        if depth > 8 or ("scale" in text and not isinstance(loss, ast.Name)):
            return None
        found: list[tuple[Scaler | None, ast.expr] | None] = []
        for binding in self._reaching(loss):
            if binding.kind == "entered":
                return None
            value = binding.value
            passed_on = [given for given in self._module.evaluation.given(binding.node) if given is not None]
            if value is not None and binding.kind == "value" and not binding.path:
                found.append(self._scaled(value, depth + 1))
            elif passed_on:
                found.extend(self._scaled(given, depth + 1) for given in passed_on)
            else:
                found.append(None if "scale" in text else (None, loss))
        scalers = {part[0] for part in found if part is not None}
        if None in found or len(scalers) > 1:
            return None
        scaler = scalers.pop() if scalers else None
        return (None, loss) if scaler is None else found[0]

    def _reaching(self, node: ast.expr) -> list[Binding]:
        """The bindings of a variable that its value at a place may come from: the last ones before it."""
        bindings = self._module.bindings(node)
        order = self._module.syntax.order
        earlier = [binding for binding in bindings if binding.kind != "parameter" and order(binding.node) < order(node)]
        found: list[Binding] = []
        for binding in sorted(earlier, key=lambda each: order(each.node), reverse=True):
            if isinstance(self._module.parent(binding.node), ast.AugAssign):
                continue  # `loss += other` is scaled if it was before.
            found.append(binding)
            if self._always_before(binding.node, node):
                return found
        return [*found, *(binding for binding in bindings if binding not in earlier)]

    def _always_before(self, binding: ast.AST, use: ast.AST) -> bool:
        """Whether a binding stands in one of the blocks around its use, so that it cannot be passed by."""
        statement = self._module.statement(binding)
        holder = self._module.parent(statement)
        for around, part in self._module.syntax.ancestors(use):
            if around is holder:
                blocks = [block for block in vars(around).values() if isinstance(block, list) and statement in block]
                return any(part in block for block in blocks)
        return False

    def _unscale(self, call: ast.Call, receiver: ast.expr) -> Part | None:
        scaler = self.scaler(receiver)
        if scaler is None or not (optimizer := _argument(call, "optimizer")):
            return None
        return Part(kind=Kind.UNSCALE, scaler=scaler, optimizer=self.target(optimizer))

    def _step(self, call: ast.Call, receiver: ast.expr) -> Part | None:
        scaler = self.scaler(receiver)
        if scaler is not None:
            optimizer = _argument(call, "optimizer")
            return Part(kind=Kind.STEP, scaler=scaler, optimizer=self.target(optimizer)) if optimizer is not None else None
        values = self._module.values(receiver)
        called = _last(receiver)
        if any(isinstance(value, Scheduler) for value in values) or (not values and _CALLED_SCHEDULER.search(called)):
            return Part(kind=Kind.SCHEDULER_STEP, optimizer=self.target(receiver))
        if any(isinstance(value, Optimizer) for value in values) or (not values and _CALLED_OPTIMIZER.search(called)):
            return Part(kind=Kind.OPTIMIZER_STEP, optimizer=self.target(receiver))
        return None

    def _update(self, call: ast.Call, receiver: ast.expr) -> Part | None:
        scaler = self.scaler(receiver)
        if scaler is not None:
            return Part(kind=Kind.UPDATE, scaler=scaler, operand=_argument(call, "new_scale"))
        return self._average(call, receiver) if _CALLED_AVERAGE.search(_last(receiver)) else None

    def _average(self, call: ast.Call, receiver: ast.expr) -> Part | None:
        return Part(kind=Kind.AVERAGE, optimizer=self.target(receiver), operand=call.args[0] if call.args else None)

    def _zero_grad(self, call: ast.Call, receiver: ast.expr) -> Part | None:
        return Part(kind=Kind.ZERO_GRAD, optimizer=self.target(receiver))

    def _get_scale(self, call: ast.Call, receiver: ast.expr) -> Part | None:
        scaler = self.scaler(receiver)
        return Part(kind=Kind.SCALE_READ, scaler=scaler) if scaler is not None else None

    def _clip(self, call: ast.Call) -> Part | None:
        names = self._module.names(call.func)
        if isinstance(call.func, ast.Name) and not names:
            return None  # A function of this file, whose body tells.
        operand = call.args[0] if call.args else None
        return Part(kind=Kind.CLIP, operand=operand)

    def _norm(self, call: ast.Call, function: ast.expr) -> Part | None:
        if isinstance(function, ast.Attribute) and self._of_gradients(function.value):
            return Part(kind=Kind.NORM, operand=function.value)
        if call.args and self._of_gradients(call.args[0]) and self._module.name(function).startswith("torch."):
            return Part(kind=Kind.NORM, operand=call.args[0])
        return None

    def _of_gradients(self, node: ast.AST) -> bool:
        """Whether an expression is made of gradients: `p.grad`, `p.grad.detach()`, `[p.grad for p in parameters]`."""
        while True:
            if isinstance(node, ast.Attribute):
                if node.attr == "grad":
                    return True
                node = node.value
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                node = node.args[0] if node.args and self._module.name(node.func).startswith("torch.") else node.func
            elif isinstance(node, (ast.ListComp, ast.GeneratorExp)):
                node = node.elt
            elif isinstance(node, ast.Subscript):
                node = node.value
            else:
                return False

    def _escape(self, call: ast.Call, last: str) -> Part | None:
        """Whether a call hands a scaler to code that is not in this file."""
        if last in _HARMLESS or self._module.routines(call):
            return None
        for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
            if isinstance(argument, (ast.Name, ast.Attribute)) and (scaler := self.scaler(argument)) is not None:
                return Part(kind=Kind.ESCAPE, scaler=scaler)
            if isinstance(argument, ast.Name) and argument.id == "self":
                return Part(kind=Kind.ESCAPE)
        function = call.func
        own = isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id == "self"
        return Part(kind=Kind.ESCAPE) if own and _SUSPECT.search(last) and not self._module.bindings(function) else None


def _argument(call: ast.Call, name: str) -> ast.expr | None:
    if call.args:
        return None if isinstance(call.args[0], ast.Starred) else call.args[0]
    return next((keyword.value for keyword in call.keywords if keyword.arg == name), None)


def _last(node: ast.expr) -> str:
    """The name that an expression goes by: `optimizer` for `self.optimizer`, `optimizers` for `self.optimizers[0]`."""
    while isinstance(node, (ast.Subscript, ast.Call)):
        node = node.value if isinstance(node, ast.Subscript) else node.func
    return last_name(node)
