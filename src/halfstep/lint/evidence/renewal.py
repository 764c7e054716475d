"""What a loop makes anew in each iteration."""

from __future__ import annotations

import ast
import re
from typing import Final

from halfstep.lint.module import Module
from halfstep.lint.syntax import FUNCTIONS, Loop
from halfstep.lint.values import Optimizer

__all__ = ["makes_network", "may_begin_anew", "set_in", "targets_of"]

_BEGINS: Final = re.compile(r"(?i)reset|init|build|set_?up|make|create|new|prepare|begin|start")


def targets_of(loop: Loop, module: Module) -> set[str]:
    """The variables of a loop: the number of an epoch, say."""
    return set() if isinstance(loop, ast.While) else {module.key(part) for part in ast.walk(loop.target) if isinstance(part, ast.Name)}


def set_in(loop: Loop, module: Module) -> set[str]:
    """The places that a loop sets: its targets, all that is assigned in it, and in the methods that it calls, also by others."""
    found: set[str] = set()
    for node in ast.walk(loop):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(module.key(node))
    for method in _methods_called(loop, module):
        for node in ast.walk(method):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(module.key(node))
    return found - {""}


def may_begin_anew(loop: Loop, module: Module) -> bool:
    """Whether a loop calls a method that is not in the file and that may make a new model or optimizer, by its name."""
    known = {function.name for function in module.nodes(ast.FunctionDef)}
    return any(
        call.func.attr not in known and _BEGINS.search(call.func.attr) is not None
        for call in ast.walk(loop)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and module.key(call.func.value) in {"self", "super"}
    )


def _methods_called(loop: Loop, module: Module) -> set[ast.FunctionDef]:
    """The functions of a file that a loop may reach by calls of methods, by their names."""
    named: dict[str, list[ast.FunctionDef]] = {}
    for function in module.nodes(ast.FunctionDef):
        named.setdefault(function.name, []).append(function)
    found: set[ast.FunctionDef] = set()
    pending: list[ast.AST] = [loop]
    while pending:
        for call in ast.walk(pending.pop()):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
                fresh = set(named.get(call.func.attr, ())) - found
                found |= fresh
                pending.extend(fresh)
    return found


def makes_network(loop: Loop, module: Module) -> bool:
    """Whether a loop makes a new optimizer or model, under whatever name."""
    for node in ast.walk(loop):
        if isinstance(node, FUNCTIONS):
            continue
        if isinstance(node, ast.Call) and any(isinstance(value, Optimizer) and value.node is node for value in module.values(node)):
            return True
        if isinstance(node, ast.Assign) and any(_is_new_model(target, node.value, module) for target in node.targets):
            return True
    return False


def _is_new_model(target: ast.expr, value: ast.expr, module: Module) -> bool:
    parts = target.elts if isinstance(target, ast.Tuple) else [target]
    words = {word for part in parts for word in module.key(part).lower().rpartition(".")[2].split("_")}
    if not words & {"model", "net", "network", "trainer", "optimizer", "optim", "opt"} or not isinstance(value, ast.Call):
        return False
    # `model = model.train()` and the like give back the same one.
    return not isinstance(value.func, ast.Attribute) or module.key(value.func.value) not in {module.key(part) for part in parts}
