"""What of a file the traces have to go through: the rest is passed over."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import TYPE_CHECKING, final

from halfstep.lint.flow.events import Kind
from halfstep.lint.flow.recognition import CANDIDATES, Part, Recognition
from halfstep.lint.syntax import FUNCTIONS, Function

if TYPE_CHECKING:
    from halfstep.lint.module import Module

__all__ = ["Relevance"]

_EXITS = (ast.Return, ast.Break, ast.Continue, ast.Raise)
# What makes a function worth going through. The others are of interest only next to these.
_CORE = frozenset(
    (
        Kind.SCALED_BACKWARD,
        Kind.BACKWARD,
        Kind.UNKNOWN_BACKWARD,
        Kind.UNSCALE,
        Kind.STEP,
        Kind.UPDATE,
        Kind.CLIP,
        Kind.OPTIMIZER_STEP,
        Kind.SCHEDULER_STEP,
        Kind.AVERAGE,
        Kind.CLEAN,
        Kind.NORM,
        Kind.ZERO_GRAD,
    )
)


@final
class Relevance:
    """The parts of training steps in a file, and what leads to them.

    Args:
        module: The file.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        self._recognition = Recognition(module)
        self.parts: dict[ast.AST, Part] = {}
        self._marked: set[ast.AST] = set()
        self._functions: set[ast.AST] = set()
        self._called: set[ast.AST] = set()
        self._contained: set[ast.AST] = set()
        self._find_parts()
        self._follow_calls()

    def marked(self, node: ast.AST) -> bool:
        """Whether a node holds a part of a step, a call that leads to one, or a way out of a function that has one."""
        return node in self._marked

    def leads_on(self, function: ast.AST) -> bool:
        """Whether a function has a part of a step, or calls one that has."""
        return function in self._functions

    def self_contained(self, function: ast.AST) -> bool:
        """Whether a function makes the scaler that it uses: each call of it has another one."""
        return function in self._contained

    @property
    def entries(self) -> Sequence[Function | None]:
        """The functions that the traces begin in: those that no other one of this file calls. `None` is the module."""
        found: list[Function | None] = [None] if self._module.tree in self._functions else []
        for function in self._module.nodes(ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda):
            assert isinstance(function, FUNCTIONS)
            if function in self._functions and (function not in self._called or function in self._contained):
                found.append(function)
        return found

    def _find_parts(self) -> None:
        candidates = [node for node in self._module.nodes(ast.Call, ast.Assign) if self._may_be_part(node)]
        for node in candidates:
            part = self._recognition.part(node)
            if part is not None:
                self.parts[node] = part
        if not any(part.scaler is not None for part in self.parts.values()) and not self._module.regions:
            self.parts.clear()
            return
        for node, part in self.parts.items():
            self._mark(node)
            if part.kind in _CORE:
                self._functions.add(self._home(node))
            if part.scaler is not None and part.scaler.node is not None:
                self._contained.add(self._home(part.scaler.node))

    def _may_be_part(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Assign):
            return any(isinstance(target, (ast.Attribute, ast.Subscript)) for target in node.targets)
        if not isinstance(node, ast.Call):
            return False
        last = self._recognition.last_name(node)
        return last in CANDIDATES or last.endswith("_step")

    def _home(self, node: ast.AST) -> ast.AST:
        return self._module.function(node) or self._module.tree

    def _mark(self, node: ast.AST) -> None:
        part: ast.AST | None = node
        while part is not None and part not in self._marked:
            self._marked.add(part)
            part = None if isinstance(part, FUNCTIONS) else self._module.parent(part)

    def _follow_calls(self) -> None:
        """Finds the functions that reach a part by calling others, then marks calls and ways out in all of these."""
        if not self._functions:
            return
        calls = [(call, self._home(call), self._module.routines(call)) for call in self._module.nodes(ast.Call)]
        calls = [(call, home, routines) for call, home, routines in calls if routines]
        grown = True
        while grown:
            grown = False
            for call, home, routines in calls:
                if any(routine.node in self._functions for routine in routines) and call not in self._marked:
                    self._mark(call)
                    self._called.update(routine.node for routine in routines if routine.node is not home)
                    grown = grown or home not in self._functions
                    self._functions.add(home)
        for exit_ in self._module.nodes(*_EXITS):
            if self._home(exit_) in self._functions:
                self._mark(exit_)
        self._find_escapes()

    def _find_escapes(self) -> None:
        for call in self._module.nodes(ast.Call):
            if call in self.parts or call in self._marked or self._home(call) not in self._functions:
                continue
            part = self._recognition.part(call)
            if part is not None:
                self.parts[call] = part
                self._mark(call)
