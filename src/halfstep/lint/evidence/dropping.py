"""Whether gradients may be dropped in ways that the order of a step does not show."""

from __future__ import annotations

import ast
import re

from halfstep.lint.flow import Event
from halfstep.lint.module import Module
from halfstep.lint.values import Optimizer

__all__ = ["drops_otherwise", "goes_elsewhere"]

# What else drops or overwrites gradients: where any of it is in a file, nothing is said about gradients that are never dropped.
_DROPS = re.compile(r"^(zero_grad|set_to_none|_foreach_zero_)|(?i:reset|clear|zero|drop)_?\w*grad")

# What somebody else may have put there for that.
_OPAQUE = re.compile(r"(?i)hook|callback|(^|\.)on_|zero|(^|_|\.)h$")


def drops_otherwise(module: Module) -> bool:
    """Whether anything in the file may drop gradients, or overwrite them, in a way that no trace shows.

    Args:
        module: The file.

    Example:
        >>> from halfstep.lint.module import parse_module
        >>> drops_otherwise(parse_module("reset_gradients(model)")), drops_otherwise(parse_module("loss.backward()"))
        (True, False)
    """
    for node in module.nodes(ast.Attribute):
        if node.attr == "grad" and (isinstance(node.ctx, ast.Store) or module.key(node).endswith("autograd.grad")):
            return True
        if node.attr == "zero_" and ".grad" in module.source(node):
            return True
    names = [node.attr for node in module.nodes(ast.Attribute)]
    names.extend(node.id for node in module.nodes(ast.Name))
    names.extend(node.name for node in module.nodes(ast.FunctionDef))
    names.extend(node.arg or "" for node in module.nodes(ast.keyword))
    return any(_DROPS.search(name) for name in names) or any(_is_opaque(call, module) for call in module.nodes(ast.Call))


def _is_opaque(call: ast.Call, module: Module) -> bool:
    """Whether a call in a loop goes to code that may well drop gradients: a hook, a callback, whatever is called after zeroing."""
    if not module.loops(call) or module.routines(call) or module.name(call.func).startswith("torch."):
        return False
    return _OPAQUE.search(module.source(call.func)) is not None


def goes_elsewhere(step: Event, module: Module) -> bool:
    """Whether the optimizer is handed to code that is not in this file, or is of a class whose step may drop the gradients.

    Args:
        step: A step by a scaler.
        module: The file.
    """
    place = step.node.args[0] if isinstance(step.node, ast.Call) and step.node.args else None
    if place is None:
        return True
    known = [value for value in module.values(place) if isinstance(value, Optimizer)]
    if not known and any(binding.value is not None for binding in module.bindings(place)):
        return True
    # The optimizer, and what it is an attribute of; an object's own methods are in sight.
    text = module.source(place)
    handed = {text, *([text.rpartition(".")[0]] if "." in text and not text.startswith("self.") else [])}
    for call in module.nodes(ast.Call):
        if call is step.node or (isinstance(call.func, ast.Attribute) and call.func.attr in {"step", "unscale_"}):
            continue
        arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
        if (
            any(module.source(argument) in handed for argument in arguments)
            and not module.routines(call)
            and not _is_schedule(call, module)
        ):
            return True
    return False


def _is_schedule(call: ast.Call, module: Module) -> bool:
    return "lr_scheduler" in module.name(call.func) or "chedul" in module.source(call.func)
