"""What a file shows of its training: who uses which scaler, in which regions, and what else is in sight of a function."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

from halfstep.lint.evidence.frames import Frames
from halfstep.lint.module import Module
from halfstep.lint.syntax import FUNCTIONS, Function
from halfstep.lint.values import Autocast, Optimizer, Scaler

__all__ = ["Entry", "entries", "entries_of", "identifiers", "in_sight", "is_optimizer", "names_in", "steps", "uses"]

_METHODS = frozenset(
    ["scale", "step", "update", "unscale_", "get_scale", "state_dict", "load_state_dict", "is_enabled", "set_growth_interval"]
)
_CALLED_OPTIMIZER = re.compile(r"[oO]ptim|(^|_)opt(?=$|[_A-Z\d])")


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Entry:
    """A `with` statement that enters an autocast region.

    Attributes:
        block: The statement.
        region: The region.
    """

    block: ast.With | ast.AsyncWith
    region: Autocast


def entries(module: Module) -> Iterator[Entry]:
    """The `with` statements of a file that enter an autocast region, in order."""
    for block in module.nodes(ast.With, ast.AsyncWith):
        assert isinstance(block, ast.With | ast.AsyncWith)
        for item in block.items:
            for value in module.values(item.context_expr):
                if isinstance(value, Autocast):
                    yield Entry(block=block, region=value)


def uses(scaler: Scaler, module: Module, *methods: str) -> list[ast.Call]:
    """The calls of a scaler's methods in its file, of all or of some."""
    wanted = frozenset(methods) or _METHODS
    found: list[ast.Call] = []
    for call in module.nodes(ast.Call):
        if isinstance(call.func, ast.Attribute) and call.func.attr in wanted and scaler in module.values(call.func.value):
            found.append(call)
    return found


def entries_of(scaler: Scaler, module: Module) -> list[Entry]:
    """The regions that a scaler is used with: those of the functions that scale a loss by it; if these have none, all of the file."""
    every = list(entries(module))
    functions = {module.function(call) for call in uses(scaler, module, "scale", "step", "unscale_")}
    local = [entry for entry in every if module.function(entry.block) in functions]
    return local or every


def is_optimizer(node: ast.expr, module: Module) -> bool:
    """Whether an expression is shown to be an optimizer, or is called one."""
    if any(isinstance(value, Optimizer) for value in module.values(node)):
        return True
    return _CALLED_OPTIMIZER.search(module.key(node).rpartition(".")[2]) is not None


def steps(module: Module) -> list[ast.Call]:
    """The calls of optimizers' `step()`."""
    return [
        call
        for call in module.nodes(ast.Call)
        if isinstance(call.func, ast.Attribute) and call.func.attr == "step" and is_optimizer(call.func.value, module)
    ]


def names_in(node: ast.AST, module: Module) -> frozenset[str]:
    """The variables and attributes that are read or written in a part of a file, as they are spelled."""
    return frozenset(key for part in ast.walk(node) if isinstance(part, ast.Name | ast.Attribute) and (key := module.key(part)))


def identifiers(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Every word in some parts of a file that names something."""
    for node in nodes:
        for part in ast.walk(node):
            if isinstance(part, ast.Name):
                yield part.id
            elif isinstance(part, ast.Attribute):
                yield part.attr
            elif isinstance(part, ast.arg | ast.keyword):
                yield part.arg or ""
            elif isinstance(part, ast.ImportFrom):
                yield part.module or ""
            elif isinstance(part, ast.alias):
                yield part.asname or part.name
                yield part.name


def in_sight(function: Function | None, module: Module, frames: Frames) -> list[ast.AST]:
    """What a function can have its objects from: itself, its class, the functions around it, its callers, and the file's own statements."""
    found: dict[ast.AST, None] = {}
    pending: list[Function | None] = [function]
    while pending:
        each = pending.pop()
        if each is None or each in found:
            continue
        found[each] = None
        if (owner := module.owner(each)) is not None:
            found[owner] = None
        pending.append(module.function(each))
        pending.extend(module.function(call) for call, _bound in frames.sites(each))
    return [*found, *(each for each in module.tree.body if not isinstance(each, (*FUNCTIONS, ast.ClassDef)))]
