"""What each name of a file is bound to, scope by scope: imports, assignments, parameters, definitions."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

from halfstep.lint.syntax import Scope, Syntax

__all__ = ["Binding", "Scopes", "dotted", "last_name", "receiver"]

BindingKind: TypeAlias = Literal["import", "value", "element", "entered", "definition", "parameter", "unknown"]


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Binding:
    """One way in which a name gets its value.

    Attributes:
        kind: `import`; `value`, an expression; `element`, what a loop takes from an iterable; `entered`, what a `with` gives;
            `definition`, a function or class; `parameter`; `unknown`, anything else.
        node: Where it happens: an import's alias, the target, the definition, the parameter.
        value: The expression on the other side.
        path: Which element of that value it is, where targets are unpacked: `(1,)` for `b` of `a, b = value`.
        qualified: The full name that an import stands for.
    """

    kind: BindingKind
    node: ast.AST
    value: ast.expr | None = None
    path: tuple[int, ...] = ()
    qualified: str = ""


def dotted(node: ast.AST) -> str:
    """How a name or a chain of attributes of a name is written, such as `self.scaler`; empty for anything else.

    Example:
        >>> dotted(ast.parse("self.scaler", mode="eval").body)
        'self.scaler'
    """
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    parts.append(node.id)
    return ".".join(reversed(parts))


def last_name(node: ast.AST) -> str:
    """The name itself, or the last attribute of a chain, whatever it begins with; empty for anything else.

    Example:
        >>> last_name(ast.parse("f(x)[0].scaler", mode="eval").body)
        'scaler'
    """
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def receiver(function: ast.AST) -> str:
    """What a method calls its object, usually `self`; empty for a static method."""
    if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return ""
    if any(isinstance(mark, ast.Name) and mark.id == "staticmethod" for mark in function.decorator_list):
        return ""
    parameters = [*function.args.posonlyargs, *function.args.args]
    return parameters[0].arg if parameters else ""


def _global_names(syntax: Syntax) -> dict[ast.AST, set[str]]:
    found: dict[ast.AST, set[str]] = {}
    for statement in syntax.nodes(ast.Global):
        found.setdefault(syntax.scope(statement), set()).update(statement.names)
    return found


@final
class Scopes:
    """The bindings of a file.

    Args:
        syntax: The file.

    Attributes:
        stars: The modules that everything is imported from by `from module import *`.
    """

    def __init__(self, syntax: Syntax) -> None:
        self._syntax = syntax
        self._bindings: dict[Scope, dict[str, list[Binding]]] = {}
        self._attributes: dict[ast.ClassDef, dict[str, list[Binding]]] = {}
        self.stars: list[str] = []
        self._globals = _global_names(syntax)
        self._collect_imports()
        self._collect_definitions()
        self._collect_assignments()
        self._collect_other_targets()

    def bindings(self, name: str, at: ast.AST) -> Sequence[Binding]:
        """What a name, or a dotted place such as `args.scaler`, is bound to where a node stands; empty where that is not known."""
        scope: Scope | None = self._syntax.scope(at)
        innermost = True
        while scope is not None:
            # A class's own names are not seen in its methods.
            if (innermost or not isinstance(scope, ast.ClassDef)) and (found := self._bindings.get(scope, {}).get(name)):
                return found
            innermost = False
            scope = None if isinstance(scope, ast.Module) else self._syntax.scope(scope)
        return ()

    def attributes(self, owner: ast.ClassDef, name: str) -> Sequence[Binding]:
        """What an attribute of a class's objects is bound to, in the class's body and by `self.name = ...` in its methods."""
        found = self._attributes.get(owner, {}).get(name, [])
        return [*found, *self._bindings.get(owner, {}).get(name, [])]

    def _bind(self, target: ast.AST, name: str, binding: Binding) -> None:
        scope = self._syntax.scope(target)
        if name in self._globals.get(scope, ()):
            scope = self._syntax.tree
        self._bindings.setdefault(scope, {}).setdefault(name, []).append(binding)

    def _collect_imports(self) -> None:
        for statement in self._syntax.nodes(ast.Import):
            for alias in statement.names:
                name = alias.asname or alias.name.partition(".")[0]
                qualified = alias.name if alias.asname else name
                self._bind(statement, name, Binding(kind="import", node=alias, qualified=qualified))
        for source in self._syntax.nodes(ast.ImportFrom):
            module = "." * source.level + (source.module or "")
            for alias in source.names:
                if alias.name == "*":
                    self.stars.append(module)
                    continue
                qualified = f"{module}.{alias.name}" if source.module else f"{module}{alias.name}"
                self._bind(source, alias.asname or alias.name, Binding(kind="import", node=alias, qualified=qualified))

    def _collect_definitions(self) -> None:
        for node in self._syntax.nodes(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef):
            assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            self._bind(node, node.name, Binding(kind="definition", node=node))
        for parameter in self._syntax.nodes(ast.arg):
            self._bind(parameter, parameter.arg, Binding(kind="parameter", node=parameter))

    def _collect_assignments(self) -> None:
        for node in self._syntax.nodes(ast.Assign):
            for target in node.targets:
                self._targets(target, "value", node.value, ())
        for annotated in self._syntax.nodes(ast.AnnAssign):
            if annotated.value is not None:
                self._targets(annotated.target, "value", annotated.value, ())
        for walrus in self._syntax.nodes(ast.NamedExpr):
            self._targets(walrus.target, "value", walrus.value, ())

    def _collect_other_targets(self) -> None:
        for changed in self._syntax.nodes(ast.AugAssign):
            self._targets(changed.target, "unknown", None, ())
        for loop in (*self._syntax.nodes(ast.For, ast.AsyncFor), *self._syntax.nodes(ast.comprehension)):
            assert isinstance(loop, (ast.For, ast.AsyncFor, ast.comprehension))
            self._targets(loop.target, "element", loop.iter, ())
        for item in self._syntax.nodes(ast.withitem):
            if item.optional_vars is not None:
                self._targets(item.optional_vars, "entered", item.context_expr, ())
        for handler in self._syntax.nodes(ast.ExceptHandler):
            if handler.name:
                self._bind(handler.body[0], handler.name, Binding(kind="unknown", node=handler))
        for capture in self._syntax.nodes(ast.MatchAs, ast.MatchStar):
            assert isinstance(capture, (ast.MatchAs, ast.MatchStar))
            if capture.name:
                self._bind(capture, capture.name, Binding(kind="unknown", node=capture))

    def _targets(self, target: ast.expr, kind: BindingKind, value: ast.expr | None, path: tuple[int, ...]) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            rest = False
            for index, part in enumerate(target.elts):
                rest = rest or isinstance(part, ast.Starred)
                # Behind a starred target nothing is known about the position.
                if rest:
                    self._targets(part.value if isinstance(part, ast.Starred) else part, "unknown", None, ())
                else:
                    self._targets(part, kind, value, (*path, index))
            return
        name = dotted(target)
        if not name:
            return
        binding = Binding(kind=kind, node=target, value=value, path=path)
        owner = self._owner_of(target, name)
        if owner is not None:
            self._attributes.setdefault(owner, {}).setdefault(name.partition(".")[2], []).append(binding)
        else:
            self._bind(target, name, binding)

    def _owner_of(self, target: ast.expr, name: str) -> ast.ClassDef | None:
        """The class whose object a target such as `self.scaler` is an attribute of."""
        head, dot, _rest = name.partition(".")
        return self.owner_of(target, head) if dot else None

    def owner_of(self, node: ast.AST, name: str) -> ast.ClassDef | None:
        """The class whose object a name such as `self` stands for at a node; also inside of functions that a method holds."""
        for function in self._functions(node):
            parent = self._syntax.parent(function)
            if isinstance(parent, ast.ClassDef) and receiver(function) == name:
                return parent
        return None

    def _functions(self, node: ast.AST) -> Iterator[ast.AST]:
        function: ast.AST | None = node
        while function is not None and (function := self._syntax.function(function)) is not None:
            yield function
