"""The ways in which a place of a file is reached: by which calls, and with which elements of the literals that loops go over."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from halfstep.lint.calls import passed
from halfstep.lint.evidence.bindings import Reaching
from halfstep.lint.module import Module
from halfstep.lint.scopes import Binding
from halfstep.lint.syntax import FUNCTIONS, Function
from halfstep.lint.values import UNKNOWN, Network, Routine

__all__ = ["Frame", "Frames", "Located"]

_DEPTH = 4  # Calls that are followed back to their callers.
_WIDTH = 24  # Ways to one place that are looked at.
_ROWS = 12  # Elements of a literal that are told apart.


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Frame:
    """One way in which a function runs.

    Attributes:
        function: The function; `None` for the file's own statements.
        call: The call that enters it; `None` where its caller is not known.
        bound: Whether the first parameter is filled by an object already.
        caller: The frame of that call.
        chosen: For each literal that a loop around goes over, the element that it has taken.
    """

    function: Function | None
    call: ast.Call | None = None
    bound: bool = False
    caller: Frame | None = None
    chosen: Mapping[ast.expr, ast.expr] = field(default_factory=dict)


@final
@dataclass(frozen=True, slots=True)
class Located:
    """An expression and the frame that it is to be read in."""

    node: ast.expr
    frame: Frame


@final
class Frames:
    """Finds the frames of a file.

    Args:
        module: The file.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        self._reaching = Reaching(module)
        self._sites: dict[ast.AST, list[tuple[ast.Call, bool]]] | None = None
        self._entries: dict[tuple[ast.AST | None, int], tuple[Frame, ...]] = {}

    def of(self, node: ast.AST, depth: int = _DEPTH) -> tuple[Frame, ...]:
        """The ways in which a node is reached; the first is the one that assumes no caller."""
        function = self._module.function(node)
        frames = self._entering(function, depth)
        for literal in self._literals(node):
            frames = tuple(
                Frame(function=function, call=frame.call, bound=frame.bound, caller=frame.caller, chosen={**frame.chosen, literal: element})
                for frame in frames
                for element in literal.elts
            )[:_WIDTH]
        return frames

    def _literals(self, node: ast.AST) -> Iterator[ast.Tuple | ast.List | ast.Set]:
        """The literals that the loops and comprehensions around a node, within its function, go over."""
        for holder, part in self._module.syntax.ancestors(node):
            if isinstance(holder, (*FUNCTIONS, ast.ClassDef)):
                return
            sources: list[ast.expr] = []
            if isinstance(holder, ast.For) and part in holder.body:
                sources = [holder.iter]
            elif isinstance(holder, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
                sources = [each.iter for each in holder.generators]
            for source in sources:
                if isinstance(source, ast.Tuple | ast.List | ast.Set) and 0 < len(source.elts) <= _ROWS:
                    yield source

    def _entering(self, function: Function | None, depth: int) -> tuple[Frame, ...]:
        key = (function, depth)
        if key not in self._entries:
            self._entries[key] = (Frame(function=function),)  # What a recursion sees.
            found = [Frame(function=function)]
            if function is not None and depth > 0:
                found.extend(self._called(function, depth))
            self._entries[key] = tuple(found[:_WIDTH])
        return self._entries[key]

    def _called(self, function: Function, depth: int) -> Iterator[Frame]:
        for call, bound in self.sites(function):
            for caller in self.of(call, depth - 1):
                reached = self.resolve(call.func, caller)
                if reached is None and isinstance(function, ast.Lambda) and self._is_a_guess(caller):
                    continue  # The calls of its caller tell which function is passed.
                if reached is not None and isinstance(reached.node, ast.Lambda) and reached.node is not function:
                    continue  # In this frame the variable holds another function.
                yield Frame(function=function, call=call, bound=bound, caller=caller)

    def _is_a_guess(self, frame: Frame) -> bool:
        """Whether a frame assumes no caller, though there are calls."""
        return frame.call is None and frame.function is not None and bool(self.sites(frame.function))

    def sites(self, function: Function) -> Sequence[tuple[ast.Call, bool]]:
        """The calls in this file that run a function; for a module's `forward()`, those of the module."""
        if self._sites is None:
            self._sites = {}
            for call in self._module.nodes(ast.Call):
                for callee, bound in self.callees(call):
                    self._sites.setdefault(callee, []).append((call, bound))
        return self._sites.get(function, ())

    def callees(self, call: ast.Call) -> Iterator[tuple[Function, bool]]:
        """The functions of this file that a call runs."""
        if not isinstance(call.func, ast.Name | ast.Attribute | ast.Call | ast.Lambda):
            return
        values = self._module.values(call.func)
        for value in values:
            if isinstance(value, Routine) and not isinstance(value.node, ast.ClassDef):
                yield value.node, value.bound
            elif isinstance(value, Network):
                yield from ((forward, True) for forward in self._forwards(value))
        if not values and isinstance(call.func, ast.Name):
            yield from self._from_containers(call.func)

    def _forwards(self, network: Network) -> Iterator[Function]:
        if network.definition is not None:
            if (forward := self.forward(network.definition)) is not None:
                yield forward
        elif network.name.endswith(("Sequential", "ModuleList", "ModuleDict")):
            for part in ast.walk(network.node):
                if isinstance(part, ast.Call) and part is not network.node:
                    for value in self._module.values(part):
                        if isinstance(value, Network) and value.node is part and value.definition is not None:
                            yield from self._forwards(value)

    def forward(self, definition: ast.ClassDef) -> ast.FunctionDef | None:
        """The method of a class that its objects' call runs, if the class has one itself."""
        return next((each for each in definition.body if isinstance(each, ast.FunctionDef) and each.name == "forward"), None)

    def _from_containers(self, name: ast.Name) -> Iterator[tuple[Function, bool]]:
        """What a loop takes from a list of modules, or from a table of functions."""
        for binding in self._module.bindings(name):
            if binding.kind != "element" or binding.value is None:
                continue
            source, path = binding.value, binding.path
            if isinstance(source, ast.Call) and self._module.name(source.func) == "builtins.enumerate" and source.args:
                source, path = source.args[0], path[1:]
            for value in self._module.values(source):
                if isinstance(value, Network):
                    yield from ((forward, True) for forward in self._forwards(value))
            if isinstance(source, ast.Call) and isinstance(source.func, ast.Attribute) and source.func.attr in {"items", "values"}:
                yield from ((each, False) for each in self._functions_of_table(source.func.value))

    def _functions_of_table(self, node: ast.expr) -> Iterator[Function]:
        tables: list[ast.expr] = [node]
        if isinstance(node, ast.Call):
            tables = self._module.evaluation.returned(node)
        elif isinstance(node, ast.Name | ast.Attribute):
            tables = [each.value for each in self._module.bindings(node) if each.value is not None and not each.path]
        for table in tables:
            if isinstance(table, ast.Dict):
                yield from (value for value in table.values if isinstance(value, ast.Lambda))

    def resolve(self, node: ast.expr, frame: Frame, limit: int = 8) -> Located | None:
        """The expression that a name stands for in a frame, as far as there is only one; the expression itself if it is no name."""
        if not isinstance(node, ast.Name | ast.Attribute) or self._module.name(node):
            return Located(node, frame)
        bindings = self._reaching.bindings(node)
        if len(bindings) > 1:
            # Of several loops with a variable of that name, the one that the frame is in.
            bindings = [binding for binding in bindings if binding.kind == "element" and binding.value in frame.chosen]
        if len(bindings) != 1 or limit == 0:
            return None
        return self.follow(bindings[0], frame, limit)

    def follow(self, binding: Binding, frame: Frame, limit: int = 8) -> Located | None:
        """The expression that a binding gives its name in a frame."""
        located: Located | None = None
        path = binding.path
        if binding.kind == "parameter":
            located, path = self.argument(binding.node, frame), ()
        elif binding.kind == "element" and binding.value is not None:
            located = self._element(binding.value, frame)
        elif binding.kind == "value" and binding.value is not None:
            located = Located(binding.value, frame)
        for index in path:
            if located is None or not isinstance(located.node, ast.Tuple | ast.List) or index >= len(located.node.elts):
                return None
            located = Located(located.node.elts[index], located.frame)
        return None if located is None else self.resolve(located.node, located.frame, limit - 1)

    def _element(self, source: ast.expr, frame: Frame) -> Located | None:
        seen: Frame | None = frame
        while seen is not None:
            if source in seen.chosen:
                return Located(seen.chosen[source], seen)
            # A function that is defined inside of a loop sees its variable.
            seen = seen.caller
        return None

    def argument(self, parameter: ast.AST, frame: Frame) -> Located | None:
        """What is passed for a parameter in a frame."""
        function = self._module.parent(self._module.parent(parameter) or parameter)
        seen: Frame | None = frame
        while seen is not None and seen.function is not function:
            seen = seen.caller
        if seen is None or seen.call is None or seen.caller is None or not isinstance(parameter, ast.arg):
            return None
        assert isinstance(function, FUNCTIONS)
        value = passed(seen.call, function, parameter.arg, bound=seen.bound)
        return None if value is None else Located(value, seen.caller)

    def truth(self, node: ast.expr, frame: Frame) -> bool | None:
        """Whether a condition holds in a frame; `None` where that is not known."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            inner = self.truth(node.operand, frame)
            return None if inner is None else not inner
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            return self._compared(node.left, node.ops[0], node.comparators[0], frame)
        if isinstance(node, ast.BoolOp):
            states = [self.truth(part, frame) for part in node.values]
            stops = isinstance(node.op, ast.Or)
            return stops if stops in states else None if None in states else not stops
        atom = self.atom(node, frame)
        return None if atom is UNKNOWN else bool(atom)

    def _compared(self, left: ast.expr, operation: ast.cmpop, right: ast.expr, frame: Frame) -> bool | None:
        first, second = self.atom(left, frame), self.atom(right, frame)
        if first is UNKNOWN or second is UNKNOWN:
            return None
        if isinstance(operation, ast.Is | ast.Eq):
            return first == second
        if isinstance(operation, ast.IsNot | ast.NotEq):
            return first != second
        return None

    def atom(self, node: ast.expr, frame: Frame) -> object:
        """The literal, or the full name of torch's dtype, that an expression is in a frame; `UNKNOWN` otherwise."""
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
            for part in node.values:
                atom = self.atom(part, frame)
                if atom is UNKNOWN or atom:
                    return atom
            return atom
        if isinstance(node, ast.IfExp) and (state := self.truth(node.test, frame)) is not None:
            return self.atom(node.body if state else node.orelse, frame)
        if name := self._module.name(node):
            return name
        located = self.resolve(node, frame)
        if located is None:
            return UNKNOWN
        if located.node is not node:
            return self.atom(located.node, located.frame)
        return self._module.constant(node)
