"""What a file saves of its training, and what it loads again."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, final

from halfstep.lint.evidence.training import is_optimizer
from halfstep.lint.module import Module
from halfstep.lint.syntax import FUNCTIONS, Function
from halfstep.lint.values import Scaler

__all__ = ["Checkpoint", "Owned", "checkpoints", "mentions_scaler_state", "owned_scalers", "saved_key", "state_calls"]

_SCALER: Final = re.compile(r"(?i)scaler|grad_?scal|(^|_)amp(_|$)")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A dictionary with an optimizer's state that is saved.

    Attributes:
        save: The call that saves it.
        table: The dictionary where it is written.
        name: The variable that holds it; `None` where it is written in the call.
        optimizer: The call of the optimizer's `state_dict()`.
        key: What the optimizer's state is called in it.
    """

    save: ast.Call
    table: ast.Dict | ast.Call
    name: ast.Name | None
    optimizer: ast.Call
    key: str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Owned:
    """A scaler that a function can use, and how.

    Attributes:
        scaler: The scaler.
        place: How the function writes it; empty where it belongs to a function that calls this one.
    """

    scaler: Scaler
    place: str


def state_calls(node: ast.AST, module: Module, method: str = "state_dict") -> Iterator[tuple[ast.Call, ast.expr]]:
    """The calls of a method that takes or gives a state in a part of a file, and of what."""
    for call in module.nodes(ast.Call) if node is module.tree else ast.walk(node):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == method:
            yield call, call.func.value


def checkpoints(module: Module) -> Iterator[Checkpoint]:
    """The checkpoints that a file saves with an optimizer's state, as far as all that is in them is known."""
    for call in module.nodes(ast.Call):
        if not _is_save(call, module):
            continue
        for argument in call.args[:2]:
            table, name = _table(argument, module)
            if table is not None:
                for key, value in _items(table):
                    optimizer = next((each for each, owner in state_calls(value, module) if is_optimizer(owner, module)), None)
                    if optimizer is not None:
                        yield Checkpoint(save=call, table=table, name=name, optimizer=optimizer, key=key)
                        break


def _is_save(call: ast.Call, module: Module) -> bool:
    last = call.func.attr if isinstance(call.func, ast.Attribute) else call.func.id if isinstance(call.func, ast.Name) else ""
    return last in {"save", "save_checkpoint", "save_on_master", "_save"} and module.name(call.func) not in {"numpy.save"}


def _table(node: ast.expr, module: Module) -> tuple[ast.Dict | ast.Call | None, ast.Name | None]:
    """The dictionary that an expression is: written on the spot, or given to a variable once."""
    if _is_table(node, module):
        assert isinstance(node, ast.Dict | ast.Call)
        return node, None
    if not isinstance(node, ast.Name):
        return None, None
    bindings = module.bindings(node)
    bound = bindings[0].value if len(bindings) == 1 and bindings[0].kind == "value" and not bindings[0].path else None
    if bound is None or not _is_table(bound, module) or module.function(bindings[0].node) is not module.function(node):
        return None, None
    assert isinstance(bound, ast.Dict | ast.Call)
    return bound, node


def _is_table(node: ast.expr, module: Module) -> bool:
    if isinstance(node, ast.Dict):
        return all(key is not None for key in node.keys)
    if isinstance(node, ast.Call) and module.name(node.func) == "builtins.dict":
        return not node.args and bool(node.keywords) and all(word.arg is not None for word in node.keywords)
    return False


def _items(table: ast.Dict | ast.Call) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(table, ast.Call):
        yield from ((word.arg or "", word.value) for word in table.keywords)
        return
    for key, value in zip(table.keys, table.values, strict=True):
        yield (str(key.value) if isinstance(key, ast.Constant) else ""), value


def mentions_scaler_state(module: Module) -> bool:
    """Whether a file saves the state of any scaler, or a scaler itself, under whatever name."""
    for _call, owner in state_calls(module.tree, module):
        if _SCALER.search(module.key(owner)) or any(isinstance(value, Scaler) for value in module.values(owner)):
            return True
    for constant in module.nodes(ast.Constant):
        if isinstance(constant.value, str) and len(constant.value) < 40 and _SCALER.search(constant.value) and _is_key(constant, module):
            return True
    return False


def _is_key(node: ast.Constant, module: Module) -> bool:
    parent = module.parent(node)
    return isinstance(parent, ast.Subscript) or (isinstance(parent, ast.Dict) and node in parent.keys)


def saved_key(module: Module) -> str:
    """What a file calls its scaler's state in a checkpoint; empty where that is not known."""
    for table in module.nodes(ast.Dict, ast.Call):
        if isinstance(table, ast.Call) and not (module.name(table.func) == "builtins.dict" and table.keywords):
            continue
        assert isinstance(table, ast.Dict | ast.Call)
        for key, value in _items(table):
            if key and any(_is_scaler(owner, module) for _call, owner in state_calls(value, module)):
                return key
    for statement in module.nodes(ast.Assign):
        target = statement.targets[0]
        entry = target.slice.value if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant) else None
        if isinstance(entry, str) and any(_is_scaler(owner, module) for _call, owner in state_calls(statement.value, module)):
            return entry
    return ""


def _is_scaler(node: ast.expr, module: Module) -> bool:
    return any(isinstance(value, Scaler) for value in module.values(node))


def owned_scalers(function: Function | None, node: ast.AST, module: Module, callers: Sequence[ast.AST | None] = ()) -> list[Owned]:
    """The scalers that are on and that a function has at a node: its own, its class's, the file's, and those of its callers.

    Args:
        function: The function; `None` for the file's own statements.
        node: The place in it.
        module: The file.
        callers: The functions that call it.
    """
    found: list[Owned] = []
    owner = module.owner(node)
    for scaler in module.scalers:
        if scaler.node is None or scaler.enabled is False:
            continue
        home = module.function(scaler.node)
        place = _held_by(scaler, module)
        if place.startswith("self."):
            if owner is not None and module.owner(scaler.node) is owner:
                found.append(Owned(scaler=scaler, place=place))
        elif place and (home is function or home is None or home in _around(function, module)):
            found.append(Owned(scaler=scaler, place=place))
        elif place and home in callers:
            found.append(Owned(scaler=scaler, place=""))
    return found or _assigned(function, node, module) or _parameters(function, module)


def _assigned(function: Function | None, node: ast.AST, module: Module) -> list[Owned]:
    """The last scaler before a node that a function has got from another function."""
    found: list[Owned] = []
    for name in module.nodes(ast.Name):
        if isinstance(name.ctx, ast.Store) and module.function(name) is function and module.syntax.order(name) < module.syntax.order(node):
            for value in module.values(name):
                if isinstance(value, Scaler) and value.enabled is not False:
                    found = [Owned(scaler=value, place=name.id)]
    return found


def _held_by(scaler: Scaler, module: Module) -> str:
    assert scaler.node is not None
    statement = module.statement(scaler.node)
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return ""
    target, value = statement.targets[0], statement.value
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        return next((module.key(each) for each, given in zip(target.elts, value.elts, strict=True) if given is scaler.node), "")
    return module.key(target)


def _around(function: Function | None, module: Module) -> list[Function]:
    found: list[Function] = []
    while function is not None and (function := module.function(function)) is not None:
        found.append(function)
    return found


def _parameters(function: Function | None, module: Module) -> list[Owned]:
    """The scalers that a function is given."""
    if not isinstance(function, FUNCTIONS):
        return []
    found: list[Owned] = []
    for parameter in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs):
        uses = [node for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == parameter.arg]
        for value in module.values(uses[0]) if uses else ():
            if isinstance(value, Scaler) and value.enabled is not False:
                found.append(Owned(scaler=value, place=parameter.arg))
                break
    return found
