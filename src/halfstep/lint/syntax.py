"""One traversal of a syntax tree: what stands where, in which function, class and loop."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import TypeAlias, TypeVar, cast, final

__all__ = ["FUNCTIONS", "LOOPS", "SCOPES", "Function", "Loop", "Scope", "Syntax"]

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Comprehension: TypeAlias = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
Scope: TypeAlias = ast.Module | ast.ClassDef | Function | Comprehension
Loop: TypeAlias = ast.For | ast.AsyncFor | ast.While

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
SCOPES = (ast.Module, ast.ClassDef, *FUNCTIONS, *COMPREHENSIONS)
LOOPS = (ast.For, ast.AsyncFor, ast.While)

# Whether a name is read or written, and which operator it is, is told by the node above.
_LEAVES = (ast.expr_context, ast.operator, ast.boolop, ast.unaryop, ast.cmpop)

_OPENING = frozenset(SCOPES[1:])

Node = TypeVar("Node", bound=ast.AST)


def _inside(scope: ast.AST) -> Sequence[ast.AST]:
    """The parts of a function, class or comprehension that are inside of it: decorators, defaults, annotations and bases are not."""
    if isinstance(scope, ast.ClassDef):
        return scope.body
    if isinstance(scope, FUNCTIONS):
        return scope.body if isinstance(scope.body, list) else [scope.body]
    return list(ast.iter_child_nodes(scope))


@final
class Syntax:
    r"""A syntax tree with the way back up.

    Args:
        tree: The tree of a whole file.

    Example:
        >>> tree = ast.parse("for x in xs:\n    f(x)")
        >>> syntax = Syntax(tree)
        >>> call, = syntax.nodes(ast.Call)
        >>> [type(loop).__name__ for loop in syntax.loops(call)]
        ['For']
    """

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self._parents: dict[ast.AST, ast.AST] = {}
        self._scopes: dict[ast.AST, Scope] = {tree: tree}
        self._order: dict[ast.AST, int] = {}
        self._kinds: dict[type[ast.AST], list[ast.AST]] = {}
        # The standard library's walk() asks every field of every node by name; this is its inner loop without the detours, and in order.
        parents, order, kinds, scopes = self._parents, self._order, self._kinds, self._scopes
        pending: list[ast.AST] = [tree]
        while pending:
            node = pending.pop()
            order[node] = len(order)
            kind = type(node)
            if kind in kinds:
                kinds[kind].append(node)
            else:
                kinds[kind] = [node]
            children: list[ast.AST] = []
            for value in node.__dict__.values():
                if isinstance(value, list):
                    children.extend(child for child in value if isinstance(child, ast.AST))
                elif isinstance(value, ast.AST) and not isinstance(value, _LEAVES):
                    children.append(value)
            children.reverse()
            pending.extend(children)
            parents.update(dict.fromkeys(children, node))
            scopes.update(dict.fromkeys(children, scopes[node]))
            if kind is ast.arguments:
                scopes.update(dict.fromkeys((part for part in children if isinstance(part, ast.arg)), cast("Scope", parents[node])))
            elif kind in _OPENING:
                scopes.update(dict.fromkeys(_inside(node), cast("Scope", node)))

    def nodes(self, *kinds: type[Node]) -> Sequence[Node]:
        """Every node of these types, in the order of the tree."""
        if len(kinds) == 1:
            return cast("list[Node]", self._kinds.get(kinds[0], []))
        found = [node for kind in kinds for node in self._kinds.get(kind, [])]
        return cast("list[Node]", sorted(found, key=self._order.__getitem__))

    def order(self, node: ast.AST) -> int:
        """The number of a node in the order of the tree."""
        return self._order[node]

    def parent(self, node: ast.AST) -> ast.AST | None:
        """The node that holds this one; `None` for the module."""
        return self._parents.get(node)

    def ancestors(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """Goes up from a node: yields each holder with the part of it that holds the node."""
        part = node
        while (holder := self._parents.get(part)) is not None:
            yield holder, part
            part = holder

    def statement(self, node: ast.AST) -> ast.stmt:
        """The innermost statement around a node, or the node itself.

        Raises:
            ValueError: The node is the module.
        """
        part: ast.AST | None = node
        while part is not None and not isinstance(part, ast.stmt):
            part = self._parents.get(part)
        if part is None:
            raise ValueError("A module stands in no statement.")
        return part

    def scope(self, node: ast.AST) -> Scope:
        """The scope that the names in a node belong to; for a function or class, the one that it is defined in."""
        return self._scopes[node]

    def function(self, node: ast.AST) -> Function | None:
        """The innermost function whose body a node stands in."""
        scope = self._scopes[node]
        while not isinstance(scope, FUNCTIONS):
            if scope is self.tree:
                return None
            scope = self._scopes[scope]
        return scope

    def owner(self, node: ast.AST) -> ast.ClassDef | None:
        """The class that one of the functions around a node is a method of, or whose body it stands in."""
        for holder, part in self.ancestors(node):
            if isinstance(holder, ast.ClassDef) and part in holder.body:
                return holder
        return None

    def loops(self, node: ast.AST) -> tuple[Loop, ...]:
        """The loops that repeat a node within its function, outermost first."""
        found: list[Loop] = []
        for holder, part in self.ancestors(node):
            if isinstance(holder, (*FUNCTIONS, ast.ClassDef)):
                break
            if isinstance(holder, LOOPS) and (part in holder.body or (isinstance(holder, ast.While) and part is holder.test)):
                found.append(holder)
        return tuple(reversed(found))
