"""Which expressions of a training loop are tensors on the device: those that the loss is made of, and what is computed from them."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import final

from halfstep.lint.module import Module
from halfstep.lint.syntax import Loop

__all__ = ["Tensors"]

# Attributes and methods of a tensor that are known on the CPU without waiting, or that have been read already.
_KNOWN = frozenset(
    (
        "shape",
        "dtype",
        "device",
        "grad_fn",
        "requires_grad",
        "ndim",
        "is_cuda",
        "size",
        "dim",
        "numel",
        "nelement",
        "item",
        "tolist",
        "cpu",
        "numpy",
        "backward",
        "is_floating_point",
    )
)
_FROM_TENSORS = ("torch.", "torch.nn.functional.")
_PLAIN = frozenset(("torch.is_tensor", "torch.numel", "torch.device", "torch.Size", "torch.is_floating_point"))


@final
class Tensors:
    """The places in a loop that are shown to hold tensors of the training step.

    Args:
        loop: A training loop.
        losses: The expressions that its backward passes start from.
        module: The file.
    """

    def __init__(self, loop: Loop, losses: Sequence[ast.expr], module: Module) -> None:
        self._module = module
        assigned = list(_assignments(loop, module))
        self._places = {module.key(part) for loss in losses for part in ast.walk(loss)} & {place for place, _ in assigned}
        # What the loss was computed from is a tensor where it comes out of a call, such as that of the model.
        for place, value in reversed(assigned):
            if place in self._places:
                parts = {module.key(part) for part in ast.walk(value)}
                self._places |= {other for other, made in assigned if other in parts and _is_output(made, module)}
        plain = _asked_for_numbers(loop, module)
        self._places -= plain
        for _ in range(2):
            self._places |= {place for place, value in assigned if place not in plain and self.holds(value)}

    def holds(self, node: ast.expr) -> bool:
        """Whether an expression is such a tensor."""
        if self._module.key(node) in self._places:
            return True
        if isinstance(node, ast.Attribute):
            return node.attr not in _KNOWN and self.holds(node.value)
        if isinstance(node, ast.Call):
            return self._is_made(node)
        if isinstance(node, ast.BinOp):
            return self.holds(node.left) or self.holds(node.right)
        if isinstance(node, ast.UnaryOp):
            return self.holds(node.operand)
        if isinstance(node, ast.Subscript):
            return self.holds(node.value)
        if isinstance(node, ast.Compare):
            return not any(isinstance(op, ast.Is | ast.IsNot | ast.In | ast.NotIn) for op in node.ops) and any(
                self.holds(part) for part in (node.left, *node.comparators)
            )
        return False

    def _is_made(self, call: ast.Call) -> bool:
        """Whether a call gives a tensor: a method of one, or a function of torch on one."""
        name = self._module.name(call.func)
        if name in _PLAIN:
            return False
        if name == "torch.nn.utils.clip_grad_norm_":
            return True
        if name.startswith(_FROM_TENSORS):
            return any(self.holds(argument) for argument in call.args)
        return isinstance(call.func, ast.Attribute) and call.func.attr not in _KNOWN and self.holds(call.func.value)


def _assignments(loop: Loop, module: Module) -> Iterator[tuple[str, ast.expr]]:
    """The places that a loop assigns, with what they get, in order; parts of a tuple get the whole value."""
    for node in ast.walk(loop):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                for part in target.elts if isinstance(target, ast.Tuple | ast.List) else [target]:
                    if place := module.key(part):
                        yield place, node.value
        elif isinstance(node, ast.AugAssign) and (place := module.key(node.target)):
            yield place, node.value


def _asked_for_numbers(loop: Loop, module: Module) -> set[str]:
    """The places that a loop asks whether they are numbers or texts, as in `isinstance(index, int)`."""
    found: set[str] = set()
    for call in ast.walk(loop):
        if isinstance(call, ast.Call) and module.name(call.func) == "builtins.isinstance" and len(call.args) == 2:
            kinds = {module.name(part) for part in ast.walk(call.args[1]) if isinstance(part, ast.Name)}
            if kinds & {"builtins.int", "builtins.float", "builtins.str", "builtins.bool"}:
                found.add(module.key(call.args[0]))
    return found


def _is_output(value: ast.expr, module: Module) -> bool:
    """Whether a value comes out of a model or of a loss function, and of nothing that is known on the CPU."""
    if not isinstance(value, ast.Call):
        return False
    name = module.name(value.func)
    if name.startswith(("builtins.", "math.", "numpy.", "random.", "time.")):
        return False
    return not (isinstance(value.func, ast.Attribute) and value.func.attr in _KNOWN)
