"""What a file saves of its training, and what it loads again."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, final

from halfstep.lint.evidence.bindings import Reaching
from halfstep.lint.evidence.training import is_optimizer
from halfstep.lint.module import Module
from halfstep.lint.scopes import last_name
from halfstep.lint.syntax import FUNCTIONS, Function
from halfstep.lint.values import Scaler

__all__ = [
    "Checkpoint",
    "Owned",
    "checkpoints",
    "is_handed_on",
    "lone_states",
    "mentions_scaler_state",
    "owned_scalers",
    "saved_key",
    "state_calls",
    "uses_of",
]

_STREAM: Final = re.compile(r"(?i)buf|io$|stream")
_SAVER: Final = re.compile(r"(?i)save|checkpoint|ckpt|state|dump|persist")
_SCALER: Final = re.compile(r"(?i)scaler|grad_?scal|(^|_)amp(_|$)")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A dictionary with an optimizer's state that is saved.

    Attributes:
        save: The call that saves it.
        table: The dictionary where it is written.
        names: The variables that hold it on its way to the call; none where it is written in the call.
        optimizer: The call of the optimizer's `state_dict()`.
        key: What the optimizer's state is called in it.
        entry: The assignment that puts the optimizer's state into it; `None` where the dictionary is written with it.
    """

    save: ast.Call
    table: ast.Dict | ast.Call
    names: tuple[ast.Name, ...]
    optimizer: ast.Call
    key: str
    entry: ast.Assign | None


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
            table, names = _table(argument, module)
            if table is None:
                continue
            for key, value, entry in (*((*item, None) for item in _items(table)), *_entries(names, module)):
                optimizer = next((each for each, owner in state_calls(value, module) if is_optimizer(owner, module)), None)
                if optimizer is not None:
                    yield Checkpoint(save=call, table=table, names=names, optimizer=optimizer, key=key, entry=entry)
                    break


def lone_states(module: Module) -> Iterator[tuple[ast.Call, ast.Call]]:
    """The calls that save an optimizer's state in a file of its own, each with the state."""
    for call in module.nodes(ast.Call):
        if len(call.args) != 2 or module.name(call.func) != "torch.save" or _STREAM.search(module.key(call.args[1])):
            continue
        state = call.args[0]
        if isinstance(state, ast.Call) and any(each is state and is_optimizer(owner, module) for each, owner in state_calls(state, module)):
            yield call, state


def _is_save(call: ast.Call, module: Module) -> bool:
    last = last_name(call.func)
    return last in {"save", "save_checkpoint", "save_on_master", "_save"} and module.name(call.func) not in {"numpy.save"}


def _table(node: ast.expr, module: Module, limit: int = 3) -> tuple[ast.Dict | ast.Call | None, tuple[ast.Name, ...]]:
    """The dictionary that an expression is, and the variables on the way: written on the spot, given to a variable, or returned."""
    if _is_table(node, module):
        assert isinstance(node, ast.Dict | ast.Call)
        return node, ()
    given: list[ast.expr | None] = []
    if isinstance(node, ast.Name):
        bindings = Reaching(module).bindings(node)
        known = all(each.kind == "value" and not each.path and module.function(each.node) is module.function(node) for each in bindings)
        given = [each.value for each in bindings] if known else []
    elif isinstance(node, ast.Call):
        given = [*module.evaluation.returned(node)]
    if len(given) != 1 or given[0] is None or limit == 0:
        return None, ()
    table, names = _table(given[0], module, limit - 1)
    return table, (node, *names) if isinstance(node, ast.Name) else names


def _is_table(node: ast.expr, module: Module) -> bool:
    if isinstance(node, ast.Dict):
        return all(key is not None for key in node.keys)
    if isinstance(node, ast.Call) and module.name(node.func) == "builtins.dict":
        return not node.args and all(word.arg is not None for word in node.keywords)
    return False


def _entries(names: Sequence[ast.Name], module: Module) -> Iterator[tuple[str, ast.expr, ast.Assign]]:
    """What is put into a dictionary after it was made, as in `state["optimizer"] = optimizer.state_dict()`."""
    for name in names:
        for use in uses_of(name, module):
            target = module.parent(use)
            statement = module.statement(use)
            if isinstance(target, ast.Subscript) and isinstance(statement, ast.Assign) and statement.targets == [target]:
                key = target.slice.value if isinstance(target.slice, ast.Constant) else ""
                yield str(key), statement.value, statement


def uses_of(name: ast.Name, module: Module) -> list[ast.Name]:
    """Where a function reads the variable that a name reads: all places, or those since it got its value if it gets several."""
    order, function = module.syntax.order, module.function(name)
    bindings = Reaching(module).bindings(name)
    first = order(bindings[0].node) if bindings and len(module.bindings(name)) > 1 else None
    return [
        each
        for each in module.nodes(ast.Name)
        if each.id == name.id
        and each is not name
        and isinstance(each.ctx, ast.Load)
        and module.function(each) is function
        and (first is None or first < order(each) < order(name))
    ]


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


def is_handed_on(scaler: Scaler, module: Module) -> bool:
    """Whether a scaler, or an object that holds it, goes to code of another file that may save it, by its name."""
    place = "" if scaler.node is None else _held_by(scaler, module)
    holder = place.rpartition(".")[0]
    owner = None if scaler.node is None else module.owner(scaler.node)
    for call in module.nodes(ast.Call):
        if not _SAVER.search(module.source(call.func)) or module.routines(call) or module.name(call.func).startswith("torch."):
            continue
        for given in (*call.args, *(word.value for word in call.keywords)):
            parts = [part for part in ast.walk(given) if not isinstance(module.parent(part), ast.Attribute)]
            if any(scaler in module.values(part) for part in parts) or (
                holder and module.key(given) == holder and (holder != "self" or module.owner(call) is owner)
            ):
                return True
    return False


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
    """Whether an expression is a scaler, or a parameter that nothing else is known of and that is called as one of the file's scalers."""
    values = module.values(node)
    if values or [each.kind for each in module.bindings(node)] != ["parameter"]:
        return any(isinstance(value, Scaler) for value in values)
    made = (_held_by(scaler, module) for scaler in module.scalers if scaler.node is not None)
    return module.key(node) in {place.rpartition(".")[2] for place in made}


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
            maker = module.owner(scaler.node)
            if maker is not None and (maker is owner or maker in map(module.owner, filter(None, callers))):
                found.append(Owned(scaler=scaler, place=place if maker is owner else ""))
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
