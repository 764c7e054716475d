"""What moves on behind an optimizer step that may have been skipped, whether it asks for that, and how to make it ask."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

from halfstep.lint.edits import Edit, InsertStatement, WrapStatements
from halfstep.lint.flow import Event, Guard, Kind, Verdicts, depends, receiver_of, written_scaler
from halfstep.lint.module import Module
from halfstep.lint.syntax import Loop
from halfstep.lint.values import Scaler

__all__ = ["Follower", "asks_for_skips", "followers", "gate"]

_ABOUT_SKIPS = re.compile(
    r"(?i)skip|scale|found_inf|overflow|is_?finite|is_?nan|\bnan\b|\binf\b|_step_count|stepped|was_run|_taken|took_step|did_step|success|retval"
    r"|\.step\("
)
_SETTINGS = re.compile(r"(?i)^(args?|cfg|conf|config|opts?|options|settings|hparams|params|hp|flags)$")
_UNRELATED_NAME = re.compile(
    r"(?i)sched|warm|ema|averag|target|accum|boundary|epoch|train|per_(step|iter|batch)|(^|_)(lr|iter|step|i|idx|index|rank|amp|fp16)s?$"
)
_UNRELATED_CALLS = frozenset(("isinstance", "hasattr", "len", "callable", "bool", "int", "getattr"))
_NAMES = ("scale", "scale_before", "scale_before_update")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Follower:
    """What happens behind a step in the same iteration, whether the step was skipped or not.

    Attributes:
        event: What happens.
        step: The step.
        update: The scaler's update between the two, if there is one.
        read: The place where the scale is read before that update, if it is.
    """

    event: Event
    step: Event
    update: Event | None
    read: Event | None


def followers(module: Module, kind: Kind) -> Iterator[Follower]:
    r"""Yields what of one kind follows a step by a scaler in the same iteration, and never asks whether that was skipped.

    Args:
        module: The file.
        kind: `SCHEDULER_STEP` or `AVERAGE`.

    Example:
        >>> from halfstep.lint.module import parse_module
        >>> module = parse_module("scaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()\nscheduler.step()")
        >>> [follower.event for follower in followers(module, Kind.SCHEDULER_STEP)]
        [SCHEDULER_STEP:4(scheduler)]
    """
    verdicts: Verdicts[Follower] = Verdicts()
    for trace in module.traces:
        for follower in _in_trace(trace.events, kind):
            if _is_gated(follower, module):
                verdicts.right(follower.event.node)
            else:
                verdicts.wrong(follower.event.node, follower)
    for _place, follower in verdicts.shown():
        yield follower


def _in_trace(events: Sequence[Event], kind: Kind) -> Iterator[Follower]:
    steps: dict[Scaler, Event] = {}
    updates: dict[Scaler, Event] = {}
    reads: dict[Scaler, Event] = {}
    for event in events:
        scaler = event.scaler
        if event.kind in (Kind.ITERATION, Kind.LOOP_END):
            steps = {each: step for each, step in steps.items() if event.node not in _loops(step)}
        elif event.kind is Kind.ESCAPE:
            steps.clear()
        elif event.kind is Kind.STEP and scaler is not None and scaler.enabled is not False:
            steps[scaler] = event
            updates.pop(scaler, None)
        elif event.kind is Kind.SCALE_READ and scaler is not None and scaler not in updates:
            reads[scaler] = event
        elif event.kind is Kind.UPDATE and scaler is not None:
            updates[scaler] = event
        elif event.kind is Kind.SCALED_BACKWARD and scaler is not None:
            reads.pop(scaler, None)
            updates.pop(scaler, None)
        elif event.kind is kind:
            for each, step in _followed(event, steps):
                yield Follower(event=event, step=step, update=updates.get(each), read=reads.get(each))


def _loops(step: Event) -> tuple[Loop, ...]:
    """The loops around a step, but for one that goes through the optimizers."""
    loops = step.loops
    optimizer = step.optimizer.text if step.optimizer is not None else ""
    while loops and not isinstance(loops[-1], ast.While) and getattr(loops[-1].target, "id", "") == optimizer:
        loops = loops[:-1]
    return loops


def _followed(event: Event, steps: dict[Scaler, Event]) -> list[tuple[Scaler, Event]]:
    """The step that something belongs to: the last one in the same loops."""
    fitting = [(scaler, step) for scaler, step in steps.items() if event.loops[: len(_loops(step))] == _loops(step)]
    return fitting[-1:]


def _is_gated(follower: Follower, module: Module) -> bool:
    event, step = follower.event, follower.step
    statement = module.statement(event.node)
    if not isinstance(statement, ast.Expr) or statement.value is not event.node:
        return True  # `stepped and scheduler.step()`
    common = 0
    while common < min(len(event.guards), len(step.guards)) and event.guards[common] == step.guards[common]:
        common += 1
    same = {ast.unparse(guard.test) for guard in step.guards}
    place = receiver_of(event)
    own = ast.unparse(place) if place is not None else ""
    if any(not _is_unrelated(guard, module, same, own) for guard in event.guards[common:]):
        return True
    return any(_leaves(branch) and asks_for_skips(branch.test, module) for branch in _between(step, event, module))


def _is_unrelated(guard: Guard, module: Module, same: set[str], own: str) -> bool:
    if ast.unparse(guard.test) in same:
        return True
    return not asks_for_skips(guard.test, module) and _says_nothing(guard.test, module, own, 0)


def asks_for_skips(test: ast.expr, module: Module) -> bool:
    r"""Whether a condition, or a value in it, has to do with whether a step was skipped.

    Args:
        test: The condition.
        module: The file.

    Example:
        >>> from halfstep.lint.module import parse_module
        >>> module = parse_module("taken = scaler.get_scale() >= old\nif taken:\n    scheduler.step()")
        >>> [asks_for_skips(branch.test, module) for branch in module.nodes(ast.If)]
        [True]
    """
    return _mentions_skips(test, module, 0)


def _mentions_skips(node: ast.expr, module: Module, depth: int) -> bool:
    if _ABOUT_SKIPS.search(module.source(node)):
        return True
    if depth > 2:
        return False
    for part in ast.walk(node):
        if isinstance(part, ast.Name | ast.Attribute):
            for binding in module.bindings(part):
                if binding.value is not None and binding.value is not node and _mentions_skips(binding.value, module, depth + 1):
                    return True
    return False


def _says_nothing(test: ast.expr, module: Module, own: str, depth: int) -> bool:
    """Whether a condition certainly has nothing to do with the step before."""
    if isinstance(test, ast.BoolOp):
        return all(_says_nothing(part, module, own, depth) for part in test.values)
    if isinstance(test, ast.UnaryOp):
        return _says_nothing(test.operand, module, own, depth)
    if isinstance(test, ast.Compare | ast.Constant | ast.BinOp):
        return True
    if isinstance(test, ast.Call):
        return isinstance(test.func, ast.Name) and test.func.id in _UNRELATED_CALLS
    if isinstance(test, ast.Subscript):
        return _says_nothing(test.value, module, own, depth)
    if isinstance(test, ast.Name | ast.Attribute):
        return _is_setting(test, own) or _bound_to_nothing(test, module, own, depth)
    return False


def _is_setting(test: ast.Name | ast.Attribute, own: str) -> bool:
    """Whether a name is the thing's own, a setting, or one that speaks of other things."""
    if ast.unparse(test) == own or _UNRELATED_NAME.search(test.id if isinstance(test, ast.Name) else test.attr):
        return True
    return any(_SETTINGS.match(part.id if isinstance(part, ast.Name) else part.attr) for part in _chain(test))


def _chain(node: ast.expr) -> Iterator[ast.Name | ast.Attribute]:
    while isinstance(node, ast.Name | ast.Attribute):
        yield node
        if isinstance(node, ast.Name):
            return
        node = node.value


def _bound_to_nothing(test: ast.Name | ast.Attribute, module: Module, own: str, depth: int) -> bool:
    bindings = module.bindings(test)
    if not bindings or depth > 2:
        return False
    return all(
        binding.kind == "value" and not binding.path and binding.value is not None and _says_nothing(binding.value, module, own, depth + 1)
        for binding in bindings
    )


def _between(step: Event, event: Event, module: Module) -> Iterator[ast.If]:
    order = module.syntax.order
    function = module.function(event.node)
    first = order(step.node) if module.function(step.node) is function else 0
    for branch in module.nodes(ast.If):
        if first < order(branch) < order(event.node) and module.function(branch) is function:
            yield branch


def _leaves(branch: ast.If) -> bool:
    return any(isinstance(part, ast.Continue | ast.Return | ast.Break | ast.Raise) for part in ast.walk(branch))


def gate(module: Module, follower: Follower) -> tuple[Edit, ...] | None:
    r"""The edits that let something happen only where the scale was not lowered, which is how a scaler shows that it skipped a step.

    Args:
        module: The file.
        follower: What happens regardless.

    Returns:
        `None` where the scale before the update cannot be had, or where both are not next to each other.

    Example:
        >>> from halfstep.lint.module import parse_module
        >>> module = parse_module("scaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()\nscheduler.step()")
        >>> (follower,) = followers(module, Kind.SCHEDULER_STEP)
        >>> [type(edit).__name__ for edit in gate(module, follower)]
        ['InsertStatement', 'WrapStatements']
    """
    event, update = follower.event, follower.update
    if update is None or update.function is not event.function or update.loops != event.loops or depends(event, update) is None:
        return None
    if update.operand is not None or not isinstance(update.node, ast.Call) or update.node.keywords:
        return None
    moved, statement = module.statement(event.node), module.statement(update.node)
    if not isinstance(statement, ast.Expr):
        return None
    scaler = written_scaler(update)
    edits: list[Edit] = []
    name = _read_name(follower, module)
    if name is None:
        name = next((each for each in _NAMES if not _is_used(each, event, module)), None)
        if name is None:
            return None
        edits.append(InsertStatement(statement=statement, code=f"{name} = {scaler}.get_scale()", where="before"))
    edits.append(WrapStatements(first=moved, last=moved, header=f"if {scaler}.get_scale() >= {name}:"))
    return tuple(edits)


def _read_name(follower: Follower, module: Module) -> str | None:
    """The variable that the scale before the update is in already."""
    read, update = follower.read, follower.update
    if read is None or update is None or read.function is not update.function or depends(update, read) is None:
        return None
    statement = module.statement(read.node)
    if not isinstance(statement, ast.Assign) or statement.value is not read.node or len(statement.targets) != 1:
        return None
    target = statement.targets[0]
    if not isinstance(target, ast.Name) or sum(binding.node is not None for binding in module.bindings(target)) != 1:
        return None
    return target.id


def _is_used(name: str, event: Event, module: Module) -> bool:
    where: ast.AST = event.function if event.function is not None else module.tree
    return any(
        (isinstance(node, ast.Name) and node.id == name) or (isinstance(node, ast.arg) and node.arg == name) for node in ast.walk(where)
    )
