"""Models that are trained while their parameters are half precision."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, final

from halfstep.lint.evidence.precision import gather
from halfstep.lint.module import Module
from halfstep.lint.syntax import FUNCTIONS
from halfstep.lint.values import Network, Optimizer

__all__ = ["HalfModel", "half_models", "tests_around"]

_PARAMETERS: Final = frozenset(("parameters", "named_parameters"))
_SAME: Final = frozenset(("train", "eval", "cuda", "cpu", "to", "half"))
_WIDENING: Final = frozenset(("float", "bfloat16", "double"))
# Frozen or adapted parts, and ways to keep a float32 copy of the parameters.
_TREATED: Final = re.compile(r"(?i)requires_grad|peft|lora|master|FP16_?Optimizer|deepspeed|amp\.initialize|kbit")


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HalfModel:
    """A model that is converted to half precision, and its optimizer.

    Attributes:
        call: What converts it.
        dtype: The argument that says so, if there is one: an expression, or the keyword of it.
        model: What is converted; `None` where the model is loaded as such.
        place: The variable that holds the model.
        optimizer: The optimizer of its parameters.
    """

    call: ast.Call
    dtype: ast.expr | ast.keyword | None
    model: ast.expr | None
    place: str
    optimizer: Optimizer


def half_models(module: Module) -> Iterator[HalfModel]:
    """The models of a file that are half precision where they are trained.

    Silent where anything converts them back, in whole or in part, where parts of them are frozen or adapted, and where something keeps a
    float32 copy of the parameters.
    """
    conversions = list(_conversions(module))
    if not conversions or not module.optimizers:
        return
    for call, dtype, model in conversions:
        place = _place(call, model, module)
        if not place:
            continue
        for optimizer in module.optimizers:
            if _is_over(optimizer, place, call, module) and _stays(call, place, optimizer, module):
                yield HalfModel(call=call, dtype=dtype, model=model, place=place, optimizer=optimizer)
    yield from _parts(module)


def _conversions(module: Module) -> Iterator[tuple[ast.Call, ast.expr | ast.keyword | None, ast.expr | None]]:
    for conversion in gather(module).conversions.calls:
        yield conversion.call, conversion.dtype, conversion.module
    if "from_pretrained" not in module.text:
        return
    for call in module.nodes(ast.Call):
        if isinstance(call.func, ast.Attribute) and call.func.attr == "from_pretrained":
            for word in call.keywords:
                if word.arg in {"torch_dtype", "dtype"} and module.dtypes(word.value) == {"fp16"}:
                    yield call, word, None


def _place(call: ast.Call, model: ast.expr | None, module: Module) -> str:
    """The variable that holds the converted model: what it is assigned to, or itself where it is converted in place."""
    for holder, part in module.syntax.ancestors(call):
        if isinstance(holder, ast.Attribute) and holder.attr in _WIDENING:
            return ""
        if isinstance(holder, ast.Attribute) and holder.attr in _PARAMETERS:
            return _root(model, module) if model is not None else ""
        if isinstance(holder, ast.Call) and _widens_by_to(holder, module):
            return ""
        if isinstance(holder, ast.Attribute | ast.Call) and part is not call and isinstance(part, ast.keyword):
            return ""
        if isinstance(holder, ast.Assign):
            return module.key(holder.targets[0]) if len(holder.targets) == 1 else ""
        if isinstance(holder, ast.Expr):
            return _root(model, module) if model is not None else ""
        if not isinstance(holder, ast.Attribute | ast.Call) or (isinstance(holder, ast.Call) and part is not holder.func):
            return ""
    return ""


def _root(model: ast.expr, module: Module) -> str:
    """The variable of a model, behind methods that give it back."""
    while isinstance(model, ast.Call) and isinstance(model.func, ast.Attribute) and model.func.attr in _SAME:
        model = model.func.value
    return module.key(model)


def _is_over(optimizer: Optimizer, place: str, call: ast.Call, module: Module) -> bool:
    """Whether an optimizer, made in the same function, holds the parameters of the model in a variable."""
    if module.function(optimizer.node) is not module.function(call):
        return False
    return any(_is_parameters(part, module) == place for part in ast.walk(optimizer.node))


def _is_parameters(node: ast.AST, module: Module) -> str:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _PARAMETERS:
        return _root(node.func.value, module)
    return ""


def _stays(call: ast.Call, place: str, optimizer: Optimizer, module: Module) -> bool:
    """Whether a model is half precision when its optimizer is used."""
    function = module.function(call)
    scope: ast.AST = function if function is not None else module.tree
    if _TREATED.search(module.text):
        return False
    order = module.syntax.order
    holder = module.key(statement.targets[0]) if isinstance(statement := module.statement(optimizer.node), ast.Assign) else ""
    for node in ast.walk(scope):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in {"float", "bfloat16", "double"} and module.key(node.func.value) == place:
                return False
            if node.func.attr == "to" and module.key(node.func.value) == place and _widens(node, module):
                return False
            if holder and node.func.attr == "step" and order(node) < order(call) and holder in _mentioned(node, module):
                return False  # Converted after it has been trained.
        if isinstance(node, ast.For) and _converts_each(node, place, module):
            return False
        if isinstance(node, ast.Assign) and _replaces(node, place, call, optimizer, module):
            return False
    return order(call) < order(optimizer.node) or not _used_between(holder, optimizer.node, call, module)


def _converts_each(loop: ast.For, place: str, module: Module) -> bool:
    """Whether a loop over the parameters of a model changes their type."""
    over = any(_is_parameters(part, module) == place for part in ast.walk(loop.iter))
    return over and any(isinstance(part, ast.Attribute) and part.attr in {"float", "data", "to"} for part in ast.walk(loop))


def _widens_by_to(call: ast.Call, module: Module) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr == "to" and _widens(call, module)


def _widens(node: ast.Call, module: Module) -> bool:
    return any(module.shown_dtypes(part) - {"fp16"} for part in (*node.args, *(word.value for word in node.keywords)))


def _mentioned(call: ast.Call, module: Module) -> set[str]:
    assert isinstance(call.func, ast.Attribute)
    return {module.key(call.func.value), *(module.key(argument) for argument in call.args)}


def _replaces(node: ast.Assign, place: str, call: ast.Call, optimizer: Optimizer, module: Module) -> bool:
    """Whether a variable is given another model between the conversion and the optimizer."""
    order = module.syntax.order
    if not order(call) < order(node) < order(optimizer.node) or place not in {module.key(target) for target in node.targets}:
        return False
    return not any(module.key(part) == place for part in ast.walk(node.value))


def _used_between(holder: str, first: ast.AST, last: ast.AST, module: Module) -> bool:
    order, function = module.syntax.order, module.function(first)
    return any(
        module.key(node) == holder and module.function(node) is function and order(first) < order(node) < order(last)
        for node in module.nodes(ast.Name, ast.Attribute)
        if not isinstance(getattr(node, "ctx", None), ast.Store)
    )


def _parts(module: Module) -> Iterator[HalfModel]:
    """Modules of this file of which a part is made half precision, with the optimizers of all their parameters."""
    if _TREATED.search(module.text):
        return
    for conversion in gather(module).conversions.calls:
        owner = module.owner(conversion.call)
        statement = module.statement(conversion.call)
        if owner is None or not isinstance(statement, ast.Assign) or not module.values(conversion.module):
            continue
        place = _place(conversion.call, conversion.module, module)
        if not place.startswith("self.") and "." not in place:
            continue
        for optimizer in module.optimizers:
            held = _holder_of(optimizer, owner, module)
            if held and _stays_in(held, optimizer, module):
                yield HalfModel(call=conversion.call, dtype=conversion.dtype, model=conversion.module, place=place, optimizer=optimizer)


def _holder_of(optimizer: Optimizer, owner: ast.ClassDef, module: Module) -> str:
    """The variable with an object of a class whose parameters an optimizer holds."""
    for part in ast.walk(optimizer.node):
        place = _is_parameters(part, module)
        if place and isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute):
            for value in module.values(part.func.value):
                if isinstance(value, Network) and value.definition is owner:
                    return place
    return ""


def _stays_in(place: str, optimizer: Optimizer, module: Module) -> bool:
    scope = module.function(optimizer.node) or module.tree
    for node in ast.walk(scope):
        if isinstance(node, ast.Attribute) and node.attr in {"float", "to", "bfloat16"} and module.key(node.value) == place:
            return False
        if isinstance(node, ast.For) and any(_is_parameters(part, module) == place for part in ast.walk(node.iter)):
            return False
    return True


def tests_around(node: ast.AST, module: Module) -> list[tuple[str, bool]]:
    """The conditions that a node stands under in its function, and whether in the branch where they hold."""
    found: list[tuple[str, bool]] = []
    for holder, part in module.syntax.ancestors(node):
        if isinstance(holder, FUNCTIONS):
            break
        if isinstance(holder, ast.If) and part is not holder.test:
            found.append((module.source(holder.test), part in holder.body))
    return found
