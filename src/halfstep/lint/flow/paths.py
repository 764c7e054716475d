"""Goes through functions on all ways that differ in the parts of a training step, and notes these."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast, final

from halfstep.lint.calls import passed
from halfstep.lint.flow.assumptions import Conditions, forget, repeatable
from halfstep.lint.flow.events import Event, Guard, Kind, Trace
from halfstep.lint.flow.relevance import Relevance
from halfstep.lint.flow.ways import Ending, Frame, Way, chosen, merged, resumed
from halfstep.lint.syntax import FUNCTIONS, Function, Loop
from halfstep.lint.values import Autocast

if TYPE_CHECKING:
    from halfstep.lint.module import Module

__all__ = ["Walk"]

# How many of the ways through a loop's first iteration go on to a second one.
_REPEATED = 24
# How deep calls of the file's own functions are followed.
_DEPTH = 4


@final
class Walk:
    """Goes through the functions of a file.

    Args:
        module: The file.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        self._relevance = Relevance(module)
        self._conditions = Conditions(module)
        self._events: dict[tuple[object, ...], Event] = {}
        self._stored: dict[ast.stmt, frozenset[str]] = {}

    def traces(self) -> list[Trace]:
        """What happens on each way through each function that no other one of this file calls."""
        found: list[Trace] = []
        for entry in self._relevance.entries:
            ways = self._function(entry, Frame(), [Way()])
            whole = dict.fromkeys((way.events, way.ending != "raise") for way in ways if way.events)
            found.extend(Trace(function=entry, events=events, whole=ended) for events, ended in whole)
        return found

    def _function(self, function: Function | None, frame: Frame, ways: list[Way]) -> list[Way]:
        if function is None:
            return self._block(self._module.tree.body, frame, ways)
        regions = frame.regions
        if not isinstance(function, ast.Lambda):
            for mark in function.decorator_list:
                regions = (*regions, *self._regions(mark))
        inner = replace(frame, function=function, calls=(*frame.calls, function), regions=regions)
        if isinstance(function, ast.Lambda):
            return self._expression(function.body, inner, ways)
        return self._block(function.body, inner, ways)

    def _regions(self, node: ast.expr) -> tuple[Autocast, ...]:
        return tuple(value for value in self._module.values(node) if isinstance(value, Autocast))

    def _block(self, statements: Sequence[ast.stmt], frame: Frame, ways: list[Way]) -> list[Way]:
        for statement in statements:
            if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                continue
            marked = self._relevance.marked(statement)
            changed = self._changed(statement, marked=marked)
            if not marked and not changed:
                continue
            going = [way for way in ways if not way.ending]
            if not going:
                break
            ended = [way for way in ways if way.ending]
            if marked:
                going = self._statement(statement, frame, going)
            if changed:
                going = [replace(way, assumptions=forget(way.assumptions, changed)) for way in going]
                going = self._learned(statement, going)
            ways = merged([*ended, *going])
        return ways

    def _changed(self, statement: ast.stmt, *, marked: bool) -> frozenset[str]:
        """The names that a statement gives other values, besides those that its own branches deal with."""
        if isinstance(statement, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            return frozenset(name for target in targets for name in _stored(target))
        # The branches of a block that holds no part of a step are passed over.
        return self._all_stored(statement) if not marked and not isinstance(statement, ast.Expr) else frozenset()

    def _learned(self, statement: ast.stmt, ways: list[Way]) -> list[Way]:
        """What an assignment says about its target: that it is None, or true, or what clipping gives back."""
        if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
            return ways
        target, value = statement.targets[0], statement.value
        if not isinstance(target, (ast.Name, ast.Attribute)):
            return ways
        if isinstance(value, ast.Constant) and (value.value is None or isinstance(value.value, bool)):
            holds = bool(value.value)
        elif (part := self._relevance.parts.get(value)) is not None and part.kind in (Kind.CLIP, Kind.NORM):
            holds = True
        else:
            return ways
        return [replace(way, assumptions=self._conditions.assume(target, way.assumptions, holds=holds)) for way in ways]

    def _statement(self, statement: ast.stmt, frame: Frame, ways: list[Way]) -> list[Way]:
        if isinstance(statement, ast.If):
            return self._if(statement, frame, ways)
        if isinstance(statement, (ast.For, ast.AsyncFor, ast.While)):
            return self._loop(statement, frame, ways)
        if isinstance(statement, (ast.With, ast.AsyncWith)):
            return self._with(statement, frame, ways)
        if isinstance(statement, ast.Try) or type(statement).__name__ == "TryStar":
            return self._try(cast("ast.Try", statement), frame, ways)
        if isinstance(statement, ast.Match):
            return self._match(statement, frame, ways)
        for part in _parts_of(statement):
            ways = self._expression(part, frame, ways)
        if statement in self._relevance.parts:
            ways = self._note(statement, frame, ways)
        if isinstance(statement, ast.Continue):
            event = self._event(Kind.LEAVE, statement, frame)
            ways = [replace(way, events=(*way.events, event)) for way in ways]
        return self._leave(statement, ways)

    def _leave(self, statement: ast.stmt, ways: list[Way]) -> list[Way]:
        ending: Ending
        if isinstance(statement, ast.Return):
            ending = "return"
        elif isinstance(statement, ast.Raise):
            ending = "raise"
        elif isinstance(statement, ast.Break):
            ending = "break"
        elif isinstance(statement, ast.Continue):
            ending = "continue"
        else:
            return ways
        return [replace(way, ending=way.ending or ending) for way in ways]

    def _split(self, test: ast.expr, ways: list[Way]) -> tuple[list[Way], list[Way]]:
        """The ways on which a condition holds, and those on which it does not."""
        holds, fails = [], []
        for way in ways:
            known = self._conditions.answer(test, way.assumptions)
            if known is not False:
                holds.append(way if known else replace(way, assumptions=self._conditions.assume(test, way.assumptions, holds=True)))
            if known is not True:
                fails.append(
                    way if known is False else replace(way, assumptions=self._conditions.assume(test, way.assumptions, holds=False))
                )
        return holds, fails

    def _if(self, statement: ast.If, frame: Frame, ways: list[Way]) -> list[Way]:
        ways = self._expression(statement.test, frame, ways)
        holds, fails = self._split(statement.test, ways)
        taken = self._block(statement.body, replace(frame, guards=(*frame.guards, Guard(statement.test, True))), holds)
        other = self._block(statement.orelse, replace(frame, guards=(*frame.guards, Guard(statement.test, False))), fails)
        return merged([*taken, *other])

    def _loop(self, loop: Loop, frame: Frame, ways: list[Way]) -> list[Way]:
        if not isinstance(loop, ast.While):
            ways = self._expression(loop.iter, frame, ways)
        inner = replace(frame, loops=(*frame.loops, loop))
        changed = self._all_stored(loop)
        done: list[Way] = []
        for iteration in range(2):
            ways = [replace(way, assumptions=repeatable(forget(way.assumptions, changed))) for way in ways]
            ways = self._note_loop(loop, Kind.ITERATION, inner, ways)
            if isinstance(loop, ast.While):
                ways = self._expression(loop.test, inner, ways)
            ways = resumed(self._block(loop.body, inner, ways), "continue")
            done.extend(way for way in ways if way.ending)
            ways = merged(way for way in ways if not way.ending)
            if iteration == 0:
                repeated = chosen(ways, _REPEATED)
                # What happened only on the ways that are not repeated must not be lost.
                done.extend(replace(way, ending="break") for way in ways if way not in repeated)
                ways = repeated
        left = self._note_loop(loop, Kind.LOOP_END, frame, self._block(loop.orelse, frame, ways))
        broken = self._note_loop(loop, Kind.LOOP_END, frame, [way for way in done if way.ending == "break"])
        return merged([*left, *resumed(broken, "break"), *(way for way in done if way.ending != "break")])

    def _all_stored(self, statement: ast.stmt) -> frozenset[str]:
        """The names that a statement and all that it holds give other values."""
        if statement not in self._stored:
            self._stored[statement] = frozenset(
                name for node in ast.walk(statement) if isinstance(node, (ast.Name, ast.Attribute)) for name in _stored(node)
            )
        return self._stored[statement]

    def _note_loop(self, loop: Loop, kind: Kind, frame: Frame, ways: list[Way]) -> list[Way]:
        event = self._event(kind, loop, frame)
        return [replace(way, events=(*way.events, event)) for way in ways]

    def _with(self, statement: ast.With | ast.AsyncWith, frame: Frame, ways: list[Way]) -> list[Way]:
        for item in statement.items:
            ways = self._expression(item.context_expr, frame, ways)
            frame = replace(frame, regions=(*frame.regions, *self._regions(item.context_expr)))
        return self._block(statement.body, frame, ways)

    def _try(self, statement: ast.Try, frame: Frame, ways: list[Way]) -> list[Way]:
        tried = self._block(statement.body, frame, ways)
        raised = [way for way in tried if way.ending == "raise"]
        fine = self._block(statement.orelse, frame, [way for way in tried if way.ending != "raise"])
        found = [*fine] if statement.handlers else [*fine, *raised]
        for handler in statement.handlers:
            # An exception may come at any time: the handler goes on from before the body, or from what raised in it.
            found.extend(self._block(handler.body, frame, merged([*ways, *resumed(raised, "raise")])))
        if not statement.finalbody:
            return merged(found)
        endings = {way.ending for way in found}
        last: list[Way] = []
        for ending in endings:
            ended = self._block(statement.finalbody, frame, resumed([way for way in found if way.ending == ending], ending))
            last.extend(replace(way, ending=way.ending or ending) for way in ended)
        return merged(last)

    def _match(self, statement: ast.Match, frame: Frame, ways: list[Way]) -> list[Way]:
        ways = self._expression(statement.subject, frame, ways)
        found = list(ways)
        for case in statement.cases:
            found.extend(self._block(case.body, frame, ways))
        return merged(found)

    def _expression(self, node: ast.AST, frame: Frame, ways: list[Way]) -> list[Way]:
        """Goes through an expression in the order in which Python does."""
        if not self._relevance.marked(node) or isinstance(node, ast.Lambda):
            return ways
        if isinstance(node, ast.IfExp):
            ways = self._expression(node.test, frame, ways)
            holds, fails = self._split(node.test, ways)
            return merged([*self._expression(node.body, frame, holds), *self._expression(node.orelse, frame, fails)])
        for child in ast.iter_child_nodes(node):
            ways = self._expression(child, frame, ways)
        if isinstance(node, ast.Call):
            if node in self._relevance.parts:
                return self._note(node, frame, ways)
            return self._called(node, frame, ways)
        return ways

    def _called(self, call: ast.Call, frame: Frame, ways: list[Way]) -> list[Way]:
        """Goes through a function of this file where it is called."""
        functions = [routine.node for routine in self._module.routines(call) if self._relevance.leads_on(routine.node)]
        inner = [
            function
            for function in functions
            if isinstance(function, FUNCTIONS) and function not in frame.calls and not self._relevance.self_contained(function)
        ]
        if not inner or len(frame.calls) >= _DEPTH:
            return ways
        found: list[Way] = []
        for function in inner:
            # Its parameters are others than those of the call before, and than names of the caller that are spelled alike.
            own = _renamed(call, function)
            entered = [replace(way, assumptions=forget(way.assumptions, own)) for way in ways]
            left = resumed(self._function(function, frame, entered), "return")
            found.extend(replace(way, assumptions=forget(way.assumptions, own)) for way in left)
        return merged(found)

    def _note(self, node: ast.AST, frame: Frame, ways: list[Way]) -> list[Way]:
        part = self._relevance.parts[node]
        event = self._event(part.kind, node, frame)
        if part.scaler is None or not isinstance(node, ast.Call):
            return [replace(way, events=(*way.events, event)) for way in ways]
        # Who uses a scaler has one: a later `if scaler is not None` is answered.
        place = _receiver(node, part.kind)
        if place is None:
            return [replace(way, events=(*way.events, event)) for way in ways]
        return [
            replace(way, events=(*way.events, event), assumptions=self._conditions.assume(place, way.assumptions, holds=True))
            for way in ways
        ]

    def _event(self, kind: Kind, node: ast.AST, frame: Frame) -> Event:
        """The event of a place in a context; the same object each time, so that equal ways are found equal."""
        key = (kind, node, frame.calls, frame.loops, frame.guards, frame.regions)
        if key not in self._events:
            part = self._relevance.parts.get(node)
            self._events[key] = Event(
                kind=kind,
                node=node,
                scaler=part.scaler if part else None,
                optimizer=part.optimizer if part else None,
                operand=part.operand if part else None,
                autocast=frame.autocast,
                guards=frame.guards,
                loops=frame.loops,
                function=frame.function,
            )
        return self._events[key]


def _receiver(call: ast.Call, kind: Kind) -> ast.expr | None:
    """The expression of the scaler that a call is made on."""
    function = call.func
    if not isinstance(function, ast.Attribute):
        return None
    if kind is Kind.SCALED_BACKWARD:
        inner = function.value
        return inner.func.value if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute) else None
    return function.value if kind in (Kind.UNSCALE, Kind.STEP, Kind.UPDATE) else None


def _renamed(call: ast.Call, function: Function) -> frozenset[str]:
    """The parameters that stand for something else than what the caller calls by the same name."""
    names = {parameter.arg for parameter in ast.walk(function.args) if isinstance(parameter, ast.arg)} - {"self"}
    return frozenset(
        name for name in names if not any(isinstance(given, ast.Name) and given.id == name for given in _given(call, function, name))
    )


def _given(call: ast.Call, function: Function, name: str) -> Iterable[ast.expr]:
    for bound in (False, True):
        value = passed(call, function, name, bound=bound)
        if value is not None:
            yield value


def _stored(target: ast.AST) -> Iterable[str]:
    """The names that a target writes: `x`, and `scaler` of `self.scaler`."""
    if isinstance(target, (ast.Tuple, ast.List)):
        for part in target.elts:
            yield from _stored(part)
    elif isinstance(target, ast.Starred):
        yield from _stored(target.value)
    elif isinstance(target, ast.Name):
        if isinstance(target.ctx, ast.Store):
            yield target.id
    elif isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store):
        yield target.attr


def _parts_of(statement: ast.stmt) -> list[ast.expr]:
    """The expressions of a simple statement, in the order in which Python goes through them."""
    if isinstance(statement, ast.Assign):
        return [statement.value, *statement.targets]
    return [child for child in ast.iter_child_nodes(statement) if isinstance(child, ast.expr)]
