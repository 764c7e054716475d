"""Where the functions of a file are called, and what is passed to them."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Protocol, final

from halfstep.lint.scopes import Binding
from halfstep.lint.syntax import Function, Syntax
from halfstep.lint.values import Routine

__all__ = ["CallSites", "KnowsNames", "callable_names", "default_of", "elements_of", "is_method", "passed"]

_DEFINING = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_WITH_TARGET = (ast.AnnAssign, ast.NamedExpr, ast.For, ast.AsyncFor, ast.comprehension)
_NO_FUNCTIONS = (ast.Constant, ast.BinOp, ast.Compare, ast.JoinedStr, ast.Dict, ast.List)


class KnowsNames(Protocol):
    """Who can tell what names stand for."""

    def bindings(self, node: ast.AST) -> Sequence[Binding]:
        """What the name or dotted place that an expression spells is bound to."""

    def routines(self, call: ast.Call) -> list[Routine]:
        """The functions, methods, lambdas and classes of this file that a call may reach."""


@final
class CallSites:
    """Where the functions of a file are called.

    Args:
        syntax: The file.
        names: Who tells what is called.
    """

    def __init__(self, syntax: Syntax, names: KnowsNames) -> None:
        self._syntax = syntax
        self._names = names
        self._calls: dict[ast.AST, list[tuple[ast.Call, bool]]] | None = None

    def of(self, function: ast.AST) -> Sequence[tuple[ast.Call, bool]]:
        """The calls of a function, each with whether an object fills its first parameter."""
        if self._calls is None:
            self._calls = {}
            # What a parameter is, is asked in the end: that answer takes the other calls.
            for passing in (False, True):
                for call in self._syntax.nodes(ast.Call):
                    self._enter(call, passing=passing)
        return self._calls.get(function, ())

    def _enter(self, call: ast.Call, *, passing: bool) -> None:
        assert self._calls is not None
        for binding in self._names.bindings(call.func):
            if (binding.kind == "parameter") is passing:
                for called, bound in self._called(binding, call):
                    self._calls.setdefault(called, []).append((call, bound))

    def _called(self, binding: Binding, call: ast.Call) -> Iterator[tuple[ast.AST, bool]]:
        if binding.kind == "element":
            yield from ((part, False) for part in _lambdas(binding))
        elif binding.kind == "value" and isinstance(binding.value, ast.Lambda):
            yield binding.value, False
        elif binding.kind == "parameter":
            yield from ((routine.node, routine.bound) for routine in self._names.routines(call))
        elif isinstance(binding.node, ast.ClassDef):
            yield from ((method, True) for method in binding.node.body if isinstance(method, ast.FunctionDef) and method.name == "__init__")
        elif binding.kind == "definition":
            yield binding.node, isinstance(call.func, ast.Attribute) and is_method(self._syntax, binding.node)


def _lambdas(binding: Binding) -> Iterator[ast.Lambda]:
    """The lambdas that a loop takes from a literal, at the position of its target."""
    for element in elements_of(binding):
        inner = element
        for index in binding.path:
            inner = inner.elts[index] if isinstance(inner, (ast.Tuple, ast.List)) and index < len(inner.elts) else inner
        if isinstance(inner, ast.Lambda):
            yield inner


def is_method(syntax: Syntax, node: ast.AST) -> bool:
    """Whether a definition is a method whose first parameter an object fills.

    Args:
        syntax: The file.
        node: The definition.
    """
    if not isinstance(syntax.parent(node), ast.ClassDef) or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return False
    return not any(isinstance(mark, ast.Name) and mark.id == "staticmethod" for mark in node.decorator_list)


def passed(call: ast.Call, function: Function, name: str, *, bound: bool) -> ast.expr | None:
    """The expression that a call passes for a parameter; `None` where it leaves it to its default, or unpacks its arguments.

    Args:
        call: The call.
        function: What it calls.
        name: The name of the parameter.
        bound: Whether the first parameter is filled by an object already.
    """
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    names = [parameter.arg for parameter in (*function.args.posonlyargs, *function.args.args)][1 if bound else 0 :]
    if name not in names or (index := names.index(name)) >= len(call.args):
        return None
    return None if any(isinstance(argument, ast.Starred) for argument in call.args[: index + 1]) else call.args[index]


def default_of(function: Function, parameter: ast.arg) -> ast.expr | None:
    """The default of a parameter; `None` where it has none.

    Args:
        function: The function.
        parameter: One of its parameters.
    """
    positional = [*function.args.posonlyargs, *function.args.args]
    if parameter in positional:
        index = positional.index(parameter) - len(positional) + len(function.args.defaults)
        return function.args.defaults[index] if index >= 0 else None
    if parameter in function.args.kwonlyargs:
        return function.args.kw_defaults[function.args.kwonlyargs.index(parameter)]
    return None


def elements_of(binding: Binding) -> Sequence[ast.expr]:
    """What a loop takes from an iterable that is written on the spot; empty where it is not.

    Args:
        binding: The binding of the loop's target.
    """
    return binding.value.elts if isinstance(binding.value, (ast.Tuple, ast.List, ast.Set)) else ()


def callable_names(syntax: Syntax) -> frozenset[str]:
    """The names that may stand for a function of a file: definitions, parameters, variables of loops, and other names for them.

    Args:
        syntax: The file.
    """
    found: set[str] = set()
    targets: list[ast.expr] = []
    for node in syntax.nodes(ast.arg, ast.Assign, *_DEFINING, *_WITH_TARGET):
        if isinstance(node, _DEFINING):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Assign):
            targets.extend(node.targets if not isinstance(node.value, _NO_FUNCTIONS) else ())
        elif isinstance(node, _WITH_TARGET):
            targets.append(node.target)
    for target in targets:
        for part in ast.walk(target) if isinstance(target, (ast.Tuple, ast.List)) else (target,):
            if isinstance(part, (ast.Name, ast.Attribute)):
                found.add(part.id if isinstance(part, ast.Name) else part.attr)
    return frozenset(found)
