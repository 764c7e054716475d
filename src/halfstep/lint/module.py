"""A parsed file as the rules see it."""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TypeVar, final

from halfstep.lint.construction import dtypes_of, may_construct
from halfstep.lint.evaluation import Evaluation
from halfstep.lint.flow import Trace, trace_module
from halfstep.lint.lines import lines_of
from halfstep.lint.scopes import Binding, Scopes, dotted
from halfstep.lint.syntax import Function, Loop, Syntax
from halfstep.lint.values import UNKNOWN, Autocast, Optimizer, Routine, Scaler, Scheduler, Value

__all__ = ["Module", "parse_module"]

Node = TypeVar("Node", bound=ast.AST)

Kind = TypeVar("Kind", Scaler, Autocast, Optimizer, Scheduler)

# A sum of hundreds of terms is no number that anybody means, and would exhaust Python's own stack.
_DEEP = 100

_ARITHMETIC: Mapping[type[ast.operator], Callable[[float, float], object]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}


def parse_module(text: str) -> Module:
    r"""Parses a file.

    Args:
        text: The whole file.

    Raises:
        SyntaxError: It is not Python.
        ValueError: It holds null bytes.
        RecursionError: It is nested too deeply for Python.

    Example:
        >>> module = parse_module("from torch.cuda.amp import GradScaler as GS\nscaler = GS()")
        >>> [scaler.name for scaler in module.scalers]
        ['torch.cuda.amp.GradScaler']
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # About the checked file's own escapes and comparisons.
        return Module(ast.parse(text), text)


@final
class Module:
    """One file: its syntax tree, and what is known about the names and values in it.

    What is not known is empty or `None`. Nothing is executed.

    Args:
        tree: The syntax tree.
        text: The whole file.

    Attributes:
        tree: The syntax tree.
        text: The whole file.
    """

    def __init__(self, tree: ast.Module, text: str) -> None:
        self.tree = tree
        self.text = text
        self._syntax = Syntax(tree)
        self._lines: list[str] | None = None
        self._resolving: set[Binding] = set()
        self._depth = 0

    @cached_property
    def evaluation(self) -> Evaluation:
        """What the expressions of the file may be."""
        return Evaluation(self._syntax, Scopes(self._syntax))

    @property
    def syntax(self) -> Syntax:
        """The tree with the way back up."""
        return self._syntax

    def nodes(self, *kinds: type[Node]) -> Sequence[Node]:
        """Every node of these types, in the order of the file."""
        return self._syntax.nodes(*kinds)

    def parent(self, node: ast.AST) -> ast.AST | None:
        """The node that holds this one; `None` for the module."""
        return self._syntax.parent(node)

    def statement(self, node: ast.AST) -> ast.stmt:
        """The innermost statement around a node, or the node itself."""
        return self._syntax.statement(node)

    def function(self, node: ast.AST) -> Function | None:
        """The innermost function whose body a node stands in."""
        return self._syntax.function(node)

    def owner(self, node: ast.AST) -> ast.ClassDef | None:
        """The class that a node stands in: in its body, or in a method of it."""
        return self._syntax.owner(node)

    def loops(self, node: ast.AST) -> tuple[Loop, ...]:
        """The `for` and `while` loops that repeat a node within its function, outermost first."""
        return self._syntax.loops(node)

    def source(self, node: ast.AST) -> str:
        """The text of a node, as it is written."""
        if self._lines is None:
            self._lines = lines_of(self.text)
        first, last = getattr(node, "lineno", 0), getattr(node, "end_lineno", 0)
        lines = self._lines[first - 1 : last] if first else []
        if lines:
            lines[-1] = lines[-1].encode()[: getattr(node, "end_col_offset", 0)].decode()
            lines[0] = lines[0].encode()[getattr(node, "col_offset", 0) :].decode()
        return "".join(lines)

    def names(self, node: ast.AST) -> tuple[str, ...]:
        """The full names that an expression may stand for: several where an import has a fallback."""
        return self.evaluation.names(node)

    def name(self, node: ast.AST) -> str:
        """The full name that an expression stands for, such as `torch.cuda.amp.GradScaler`; that of the first import of several.

        A builtin function is `builtins.float`. Empty for names of this file and for anything else.
        """
        names = self.evaluation.names(node)
        return names[0] if names else ""

    def key(self, node: ast.AST) -> str:
        """How a place is written, such as `scaler` or `self.scaler`; empty for what is no name or chain of attributes."""
        return dotted(node)

    def bindings(self, node: ast.AST) -> Sequence[Binding]:
        """All that gives a value to the name or place that an expression spells."""
        return self.evaluation.bindings(node)

    def values(self, node: ast.AST) -> tuple[Value, ...]:
        """What an expression is shown to be at times, by whatever way."""
        return self.evaluation.evaluate(node).values

    def value(self, node: ast.AST) -> Value | None:
        """What an expression always is, if it is not None; `None` where there are several possibilities, or unknown ones."""
        found = self.evaluation.evaluate(node)
        return found.values[0] if found.complete and len(found.values) == 1 else None

    def constant(self, node: ast.AST) -> object:
        """The literal that an expression is, also by way of arithmetic and of a name that is bound once; `UNKNOWN` otherwise."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            inner = self.constant(node.operand)
            return -inner if isinstance(inner, int | float) else UNKNOWN
        if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            return self._computed(node)
        if isinstance(node, ast.Call) and self.name(node.func) == "builtins.float" and len(node.args) == 1:
            return self._as_float(node.args[0])
        if isinstance(node, (ast.Name, ast.Attribute)):
            return self._bound_once(node)
        return UNKNOWN

    def _bound_once(self, node: ast.Name | ast.Attribute) -> object:
        bindings = self.bindings(node)
        if len(bindings) != 1 or bindings[0].kind != "value" or bindings[0].path:
            return UNKNOWN
        binding, value = bindings[0], bindings[0].value
        if value is None or binding in self._resolving:
            return UNKNOWN  # `n = n - 1`
        self._resolving.add(binding)
        try:
            return self.constant(value)
        finally:
            self._resolving.discard(binding)

    def _computed(self, node: ast.BinOp) -> object:
        if self._depth > _DEEP:
            return UNKNOWN
        self._depth += 1
        left, right = self.constant(node.left), self.constant(node.right)
        self._depth -= 1
        if not isinstance(left, int | float) or not isinstance(right, int | float):
            return UNKNOWN
        if isinstance(node.op, ast.Pow) and abs(right) > 1024:
            return UNKNOWN
        try:
            return _ARITHMETIC[type(node.op)](left, right)
        except (ArithmeticError, ValueError):
            return UNKNOWN

    def _as_float(self, node: ast.expr) -> object:
        value = self.constant(node)
        try:
            return float(value) if isinstance(value, int | float | str) else UNKNOWN
        except (ValueError, OverflowError):
            return UNKNOWN

    def dtypes(self, node: ast.AST) -> frozenset[str]:
        """All the types that an expression may stand for, such as `{"fp16"}`; empty where they are not all known."""
        return dtypes_of(node, self.evaluation.evaluate)[0]

    def shown_dtypes(self, node: ast.AST) -> frozenset[str]:
        """The types that an expression stands for at times; there may be others."""
        return dtypes_of(node, self.evaluation.evaluate)[1]

    def autocasts(self, node: ast.AST) -> tuple[Autocast, ...]:
        """The autocast regions that a node stands in within its function, the function's decorators included; outermost first."""
        found: list[Autocast] = []
        for holder, part in self._syntax.ancestors(node):
            if isinstance(holder, (ast.With, ast.AsyncWith)):
                items = holder.items if part in holder.body else holder.items[: holder.items.index(part)] if part in holder.items else []
                for item in reversed(items):
                    found.extend(value for value in self.values(item.context_expr) if isinstance(value, Autocast))
            elif isinstance(holder, ast.Lambda):
                break
            elif isinstance(holder, (ast.FunctionDef, ast.AsyncFunctionDef)) and part in holder.body:
                for mark in reversed(holder.decorator_list):
                    found.extend(value for value in self.values(mark) if isinstance(value, Autocast))
                break
        return tuple(reversed(found))

    def in_autocast(self, node: ast.AST) -> Autocast | None:
        """The innermost autocast region that a node stands in; `None` where there is none, or where that one is off."""
        regions = self.autocasts(node)
        return regions[-1] if regions and regions[-1].enabled is not False else None

    @cached_property
    def traces(self) -> Sequence[Trace]:
        """The orders in which the parts of a training step happen, function by function."""
        return trace_module(self)

    @cached_property
    def scalers(self) -> Sequence[Scaler]:
        """The scalers that are made in the file."""
        return self._made(Scaler) if "caler" in self.text else ()

    @cached_property
    def regions(self) -> Sequence[Autocast]:
        """The autocast objects that are made in the file."""
        return self._made(Autocast) if "autocast" in self.text else ()

    @cached_property
    def optimizers(self) -> Sequence[Optimizer]:
        """The optimizers that are made in the file."""
        return self._made(Optimizer)

    @cached_property
    def schedulers(self) -> Sequence[Scheduler]:
        """The learning-rate schedules that are made in the file."""
        return self._made(Scheduler)

    def _made(self, kind: type[Kind]) -> list[Kind]:
        return [value for value in self._all_made if isinstance(value, kind)]

    @cached_property
    def _all_made(self) -> Sequence[Value]:
        """What the calls of the file make. Most calls are of functions that make nothing, which their names tell."""
        found: list[Value] = []
        for call in self.nodes(ast.Call):
            names = self.names(call.func)
            if any(may_construct(name) for name in names) or (not names and self._may_make(call.func)):
                found.extend(value for value in self.values(call) if getattr(value, "node", None) is call)
        return found

    def _may_make(self, function: ast.expr) -> bool:
        """Whether a name of this file stands for a class that derives from a scaler, or for what functools.partial() has made."""
        for binding in self.bindings(function):
            if isinstance(binding.node, ast.ClassDef):
                return any(name.endswith("GradScaler") for name in self.evaluation.base_names(binding.node))
            if isinstance(binding.value, ast.Call) and "functools.partial" in self.names(binding.value.func):
                return True
        return False

    def callers(self, function: Function) -> Sequence[ast.Call]:
        """The calls in this file that may reach a function of it."""
        return self._callers.get(function, ())

    @cached_property
    def _callers(self) -> Mapping[ast.AST, Sequence[ast.Call]]:
        found: dict[ast.AST, list[ast.Call]] = {}
        for call in self.nodes(ast.Call):
            for routine in self.routines(call):
                found.setdefault(routine.node, []).append(call)
        return found

    def routines(self, call: ast.Call) -> list[Routine]:
        """The functions, methods, lambdas and classes of this file that a call may reach."""
        return self.evaluation.routines(call)
