"""One autocast object that is entered again while it is active."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import TypeAlias, final

from halfstep.lint.edits import ReplaceExpression
from halfstep.lint.module import Module
from halfstep.lint.rules.rule import AbstractRule, Bad, Finding, Fix
from halfstep.lint.syntax import FUNCTIONS
from halfstep.lint.values import Autocast, Routine

__all__ = ["AutocastReused"]

_DEPTH = 4
# The places at which a variable gets its value: the same ones for the same variable.
Variable: TypeAlias = frozenset[ast.AST]


@final
class AutocastReused(AbstractRule):
    """An autocast object that is entered inside of itself."""

    code = "HS027"
    name = "autocast_reused"
    severity = "error"
    summary = "An autocast object entered inside itself leaves autocast switched on."
    explanation = """
An autocast object remembers what was in force before it in its own attributes. Entered a second time while it is active, it overwrites them
with its own state, and puts that back at the end: after the outer block, **autocast stays on**, for the rest of the program. The
optimizer's step, the loss and the evaluation then run in half, and nothing is raised.

It happens in three ways:

- a `with` on the same variable inside of a `with` on it;
- a function that is called inside of the block and enters, or is decorated by, the same object;
- a function that is decorated by `@torch.autocast(...)` and calls itself: the decorator makes one object for all calls.

Make a new object each time, `with torch.autocast("cuda", dtype=torch.bfloat16):`; it costs microseconds. In a function that calls itself,
write the `with` inside of it instead of the decorator, or leave it to the caller.

The fix writes a new object in the place of the inner one. It is safe, and offered where the object is made of constants alone.

Using one object several times one after the other is harmless.
"""
    bad = (
        Bad(
            code="""import torch

half = torch.autocast("cuda", dtype=torch.bfloat16)


def evaluate(model, head, images):
    with half:
        features = model(images)
        with half:
            return head(features)
""",
            line=9,
            fixed="""import torch

half = torch.autocast("cuda", dtype=torch.bfloat16)


def evaluate(model, head, images):
    with half:
        features = model(images)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return head(features)
""",
        ),
        Bad(
            code="""import torch


class Evaluation:
    def __init__(self, model, head):
        self.model, self.head = model, head
        self.half = torch.autocast("cuda", dtype=torch.bfloat16)

    def classify(self, features):
        with self.half:
            return self.head(features)

    def run(self, images):
        with self.half:
            return self.classify(self.model(images))
""",
            line=15,
        ),
        Bad(
            code="""import torch


@torch.autocast("cuda", dtype=torch.bfloat16)
def encode(tree, cell):
    if tree.is_leaf:
        return cell(tree.value)
    return cell(encode(tree.left, cell), encode(tree.right, cell))
""",
            line=8,
        ),
        Bad(
            code="""import torch

half = torch.autocast("cuda", dtype=torch.bfloat16)


@half
def features(model, images):
    return model(images)


def evaluate(model, head, images):
    with torch.no_grad(), half:
        return head(features(model, images))
""",
            line=13,
        ),
    )
    good = (
        """import torch

half = torch.autocast("cuda", dtype=torch.bfloat16)


def evaluate(model, head, images):
    with half:
        features = model(images)
    with half:
        return head(features)
""",
        """import torch


def evaluate(model, head, images):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        features = model(images)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return head(features)
""",
        """import torch


@torch.autocast("cuda", dtype=torch.bfloat16)
def evaluate(model, images):
    return model(images)


def evaluate_all(model, batches):
    return [evaluate(model, images) for images in batches]
""",
        """import torch


def encode(tree, cell):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        if tree.is_leaf:
            return cell(tree.value)
        return cell(encode(tree.left, cell), encode(tree.right, cell))
""",
        """import torch

half = torch.autocast("cuda", dtype=torch.bfloat16)
full = torch.autocast("cuda", enabled=False)


def evaluate(model, head, images):
    with half:
        features = model(images)
        with full:
            return head(features.float())
""",
    )

    def check(self, module: Module) -> Iterator[Finding]:
        """Yields the inner entries of an object, and the calls inside of it that enter it again."""
        if "autocast" not in module.text:
            return
        for block in module.nodes(ast.With, ast.AsyncWith):
            assert isinstance(block, ast.With | ast.AsyncWith)
            for index, item in enumerate(block.items):
                variable = _variable(item.context_expr, module)
                if variable:
                    yield from _check_nested(item.context_expr, [other.context_expr for other in block.items[:index]], block, module)
                    yield from _check_calls(block, item.context_expr, variable, module)
        for function in module.nodes(ast.FunctionDef):
            if any(isinstance(mark, ast.Call | ast.Name | ast.Attribute) and _is_object(mark, module) for mark in function.decorator_list):
                yield from _check_recursion(function, module)


def _is_object(node: ast.AST, module: Module) -> bool:
    """Whether an expression is an autocast object that does something, at least at times."""
    regions = [value for value in module.values(node) if isinstance(value, Autocast)]
    return any(region.enabled is not False for region in regions)


def _variable(node: ast.expr, module: Module) -> Variable:
    """What tells one variable that holds an autocast object from another; empty for anything else, a call above all."""
    if not isinstance(node, ast.Name | ast.Attribute) or not _is_object(node, module):
        return frozenset()
    bindings = module.bindings(node)
    return frozenset(binding.node for binding in bindings) if all(binding.kind == "value" for binding in bindings) else frozenset()


def _check_nested(entered: ast.expr, before: Sequence[ast.expr], block: ast.With | ast.AsyncWith, module: Module) -> Iterator[Finding]:
    variable = _variable(entered, module)
    active: list[tuple[ast.expr, ast.AST]] = [(expression, block) for expression in before]
    for holder, part in module.syntax.ancestors(block):
        if isinstance(holder, (*FUNCTIONS, ast.ClassDef)):
            break
        if isinstance(holder, ast.With | ast.AsyncWith) and part in holder.body:
            active += [(item.context_expr, holder) for item in holder.items]
    for expression, outer in active:
        if _variable(expression, module) == variable and not _binds(outer, variable):
            name = module.source(entered)
            message = (
                f"`{name}` is active since line {expression.lineno} and is entered again: it forgets what was before, and autocast stays "
                f"on behind both blocks. Make a new object here."
            )
            yield Finding(node=entered, message=message, fix=_fix(entered, module))
            return


def _binds(block: ast.AST, variable: Variable) -> bool:
    return any(node in variable for node in ast.walk(block))


def _fix(entered: ast.expr, module: Module) -> Fix | None:
    value = module.value(entered)
    if not isinstance(value, Autocast):
        return None
    names = [part for part in ast.walk(value.node) if isinstance(part, ast.Name)]
    if not module.source(value.node) or not all(module.name(part) for part in names):
        return None
    return Fix(edits=(ReplaceExpression(node=entered, code=module.source(value.node)),), safety="safe")


def _check_calls(block: ast.With | ast.AsyncWith, entered: ast.expr, variable: Variable, module: Module) -> Iterator[Finding]:
    """The calls in a block of functions of this file that enter the block's object again."""
    for call in _calls(block.body):
        inner = _entry(call, variable, module, _DEPTH)
        if inner is not None:
            name = module.source(entered)
            message = (
                f"`{module.source(call.func)}` enters `{name}` in line {getattr(inner, 'lineno', 0)} while it is active since line "
                f"{entered.lineno}: it forgets what was before, and autocast stays on behind both. Make a new object for each block."
            )
            yield Finding(node=call, message=message)


def _calls(body: Sequence[ast.AST]) -> Iterator[ast.Call]:
    """The calls that run with some statements; not those in functions that are only defined there."""
    pending = list(reversed(body))
    while pending:
        node = pending.pop()
        if isinstance(node, FUNCTIONS):
            continue
        if isinstance(node, ast.Call):
            yield node
        pending.extend(reversed(list(ast.iter_child_nodes(node))))


def _entry(call: ast.Call, variable: Variable, module: Module, depth: int) -> ast.AST | None:
    """Where a call comes to enter a variable's object; `None` where it does not."""
    for routine in module.routines(call):
        function = routine.node
        if not isinstance(function, ast.FunctionDef) or not depth or _runs_later(function):
            continue
        for mark in function.decorator_list:
            if _variable(mark, module) == variable:
                return mark
        for node in ast.walk(function):
            if not isinstance(node, ast.withitem) or module.function(node.context_expr) is not function:
                continue
            if _variable(node.context_expr, module) == variable:
                return node.context_expr
        for inner in _calls(function.body):
            if (found := _entry(inner, variable, module, depth - 1)) is not None:
                return found
    return None


def _runs_later(function: ast.FunctionDef) -> bool:
    return any(isinstance(node, ast.Yield | ast.YieldFrom) for node in ast.walk(function))


def _check_recursion(function: ast.FunctionDef, module: Module) -> Iterator[Finding]:
    """The first call by which a decorated function comes to call itself."""
    if _runs_later(function):
        return
    for call in _calls(function.body):
        if _reaches(call, function, module, _DEPTH):
            name, mark = function.name, next(mark for mark in function.decorator_list if _is_object(mark, module))
            message = (
                f"`{name}` comes to call itself, and `@{module.source(mark)}` of line {mark.lineno} is one object for all calls: entered "
                f"again while active, it leaves autocast on for good. Write `with {_written(mark, module)}:` inside of `{name}` instead."
            )
            yield Finding(node=call, message=message)
            return


def _written(mark: ast.expr, module: Module) -> str:
    value = module.value(mark)
    return module.source(value.node) if isinstance(value, Autocast) and module.source(value.node) else module.source(mark)


def _reaches(call: ast.Call, function: ast.FunctionDef, module: Module, depth: int) -> bool:
    routines: list[Routine] = module.routines(call)
    if any(routine.node is function for routine in routines):
        return True
    if not depth:
        return False
    return any(
        _reaches(inner, function, module, depth - 1)
        for routine in routines
        if isinstance(routine.node, ast.FunctionDef) and not _runs_later(routine.node)
        for inner in _calls(routine.node.body)
    )
