"""One traversal of a syntax tree: what stands where, in which function, class and loop."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import TypeAlias, TypeVar, cast, final

__all__ = ["COMPREHENSIONS", "FUNCTIONS", "LOOPS", "SCOPES", "Function", "Loop", "Scope", "Syntax"]

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

_OPENING = (ast.ClassDef, *FUNCTIONS, *COMPREHENSIONS)

Node = TypeVar("Node", bound=ast.AST)


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
        self._kinds: dict[type[ast.AST], list[ast.AST]] = {}
        self._all: list[ast.AST] = []
        self._order: dict[ast.AST, int] = {}
        self._bodies: dict[ast.AST, frozenset[ast.AST]] = {}
        # The standard library's walk() asks every field of every node by name; this is its inner loop without the detours, and in order.
        parents, kinds, everything = self._parents, self._kinds, self._all
        pending: list[ast.AST] = [tree]
        while pending:
            node = pending.pop()
            everything.append(node)
            kind = type(node)
            if kind in kinds:
                kinds[kind].append(node)
            else:
                kinds[kind] = [node]
            if kind is ast.Name or kind is ast.Constant:
                continue
            children: list[ast.AST] = []
            for value in node.__dict__.values():
                if type(value) is list:
                    children += [child for child in value if isinstance(child, ast.AST)]
                elif isinstance(value, ast.AST) and not isinstance(value, _LEAVES):
                    children.append(value)
            for child in children:
                parents[child] = node
            children.reverse()
            pending += children

    def nodes(self, *kinds: type[Node]) -> Sequence[Node]:
        """Every node of these types, in the order of the tree."""
        if len(kinds) == 1:
            return cast("list[Node]", self._kinds.get(kinds[0], []))
        found = [node for kind in kinds for node in self._kinds.get(kind, [])]
        return cast("list[Node]", sorted(found, key=self.order))

    def order(self, node: ast.AST) -> int:
        """The number of a node in the order of the tree."""
        if not self._order:
            self._order = {node: index for index, node in enumerate(self._all)}
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
        climbed: list[ast.AST] = []
        part = node
        while part not in self._scopes:
            climbed.append(part)
            holder = self._parents[part]
            if isinstance(holder, _OPENING) and self._opens(holder, part):
                self._scopes[part] = cast("Scope", holder)
            elif isinstance(part, ast.arg):
                # A parameter is a name of the function that lies around its list of parameters.
                self._scopes[part] = cast("Scope", self._parents[holder])
            else:
                part = holder
        scope = self._scopes[part]
        for each in climbed:
            self._scopes[each] = scope
        return scope

    def _opens(self, holder: ast.AST, part: ast.AST) -> bool:
        """Whether a part of a function, class or comprehension is inside of it: decorators, defaults, annotations and bases are not."""
        if isinstance(holder, COMPREHENSIONS):
            return True
        if holder not in self._bodies:
            assert isinstance(holder, (ast.ClassDef, *FUNCTIONS))
            self._bodies[holder] = frozenset([holder.body] if isinstance(holder, ast.Lambda) else holder.body)
        return part in self._bodies[holder]

    def function(self, node: ast.AST) -> Function | None:
        """The innermost function whose body a node stands in."""
        scope = self.scope(node)
        while not isinstance(scope, FUNCTIONS):
            if scope is self.tree:
                return None
            scope = self.scope(scope)
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
