"""Which node of libcst is which node of `ast`: statements by their order, expressions by what they say.

Positions are not used: libcst's are costly to compute, and those of `ast` are wrong inside of f-strings before Python 3.12.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias, final

import libcst as cst

from halfstep.lint.editing.outline import EditError, blocks

__all__ = ["Expressions", "Statement", "flat", "parsed", "same_meaning", "statement_pairs"]

Statement: TypeAlias = cst.BaseSmallStatement | cst.BaseCompoundStatement

_KINDS: dict[type[ast.expr], tuple[type[cst.BaseExpression], ...]] = {
    ast.Attribute: (cst.Attribute,),
    ast.Await: (cst.Await,),
    ast.BinOp: (cst.BinaryOperation,),
    ast.BoolOp: (cst.BooleanOperation,),
    ast.Call: (cst.Call,),
    ast.Compare: (cst.Comparison,),
    ast.Constant: (
        *(cst.SimpleString, cst.ConcatenatedString, cst.Integer, cst.Float, cst.Imaginary),
        *(cst.Ellipsis, cst.Name),
    ),
    ast.Dict: (cst.Dict,),
    ast.DictComp: (cst.DictComp,),
    ast.GeneratorExp: (cst.GeneratorExp,),
    ast.IfExp: (cst.IfExp,),
    ast.JoinedStr: (cst.FormattedString, cst.ConcatenatedString),
    ast.Lambda: (cst.Lambda,),
    ast.List: (cst.List,),
    ast.ListComp: (cst.ListComp,),
    ast.Name: (cst.Name,),
    ast.NamedExpr: (cst.NamedExpr,),
    ast.Set: (cst.Set,),
    ast.SetComp: (cst.SetComp,),
    ast.Subscript: (cst.Subscript,),
    ast.Tuple: (cst.Tuple,),
    ast.UnaryOp: (cst.UnaryOperation,),
    ast.Yield: (cst.Yield,),
    ast.YieldFrom: (cst.Yield,),
}
# Names that are no expressions for `ast`.
_LABELS: dict[type[cst.CSTNode], str] = {
    cst.Arg: "keyword",
    cst.Attribute: "attr",
    cst.ClassDef: "name",
    cst.FunctionDef: "name",
    cst.MatchAs: "name",
    cst.MatchKeywordElement: "key",
    cst.MatchMapping: "rest",
    cst.MatchSingleton: "value",
    cst.MatchStar: "name",
    cst.NameItem: "name",
    cst.Param: "name",
    cst.ParamSpec: "name",
    cst.TypeVar: "name",
    cst.TypeVarTuple: "name",
}
_CONTEXT = re.compile(r"ctx=(?:Store|Del)\(\)")


def parsed(code: str) -> ast.Module | None:
    """The tree of some code; `None` where it does not parse.

    Args:
        code: The code.

    Example:
        >>> parsed("x =") is None
        True
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ast.parse(code)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


def same_meaning(first: ast.AST, second: ast.AST) -> bool:
    """Whether two trees say the same, read or written.

    Args:
        first: A tree.
        second: Another one.

    Example:
        >>> same_meaning(ast.parse("(a)"), ast.parse("a"))
        True
    """
    return _meaning(first) == _meaning(second)


def _meaning(node: ast.AST) -> str:
    return _CONTEXT.sub("ctx=Load()", ast.dump(node))


def flat(body: Iterable[cst.BaseStatement | cst.BaseSmallStatement]) -> Iterator[Statement]:
    """The statements of a block, also those that share a line.

    Args:
        body: The block, as libcst has it.
    """
    for row in body:
        if isinstance(row, cst.SimpleStatementLine):
            yield from row.body
        elif isinstance(row, cst.BaseCompoundStatement | cst.BaseSmallStatement):
            yield row


def _suites(node: Statement) -> Iterator[Iterable[Statement]]:
    """The blocks of a statement, in the order of `outline.blocks`."""
    if isinstance(node, cst.Match):
        yield from (flat(case.body.body) for case in node.cases)
        return
    body = getattr(node, "body", None)
    if isinstance(body, cst.BaseSuite):
        yield flat(body.body)
    if isinstance(node, cst.Try | cst.TryStar):
        yield from (flat(handler.body.body) for handler in node.handlers)
    for field in ("orelse", "finalbody"):
        branch = getattr(node, field, None)
        if isinstance(branch, cst.If):
            yield [branch]
        elif isinstance(branch, cst.Else | cst.Finally):
            yield flat(branch.body.body)
        elif hasattr(node, field):
            yield []


def statement_pairs(statements: Sequence[ast.stmt], body: Iterable[Statement]) -> dict[ast.stmt, Statement]:
    """Which statement of libcst is which of `ast`, with all that are inside of them.

    Args:
        statements: Neighbouring statements.
        body: The same ones.

    Raises:
        EditError: They are not the same.
    """
    pairs: dict[ast.stmt, Statement] = {}
    waiting: list[tuple[Sequence[ast.stmt], Iterable[Statement]]] = [(statements, body)]
    while waiting:
        old, new = waiting.pop()
        found = list(new)
        if len(old) != len(found):
            raise EditError(f"libcst sees {len(found)} statements where Python sees {len(old)}")
        for statement, other in zip(old, found, strict=True):
            pairs[statement] = other
            if isinstance(other, cst.BaseCompoundStatement):
                waiting.extend(zip(blocks(statement), _suites(other), strict=True))
    return pairs


@final
class _Collection(cst.CSTVisitor):
    """Gathers the expressions of a statement without those of the statements inside of it."""

    def __init__(self) -> None:
        self.found: list[cst.BaseExpression] = []
        self._skipped: set[int] = set()

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.BaseSuite | cst.ImportFrom | cst.Import | cst.BaseParenthesizableWhitespace):
            return False
        self._skip_labels(node)
        if isinstance(node, cst.BaseExpression) and id(node) not in self._skipped:
            self.found.append(node)
        return True

    def _skip_labels(self, node: cst.CSTNode) -> None:
        label = _LABELS.get(type(node))
        if label is not None:
            self._skipped.add(id(getattr(node, label)))
        if isinstance(node, cst.ConcatenatedString):
            self._skipped.update((id(node.left), id(node.right)))
        if isinstance(node, cst.ExceptHandler | cst.ExceptStarHandler) and node.name is not None:
            self._skipped.add(id(node.name.name))


@final
class Expressions:
    """The expressions of a statement as libcst has them.

    Attributes:
        statement: The statement.
    """

    def __init__(self, statement: ast.stmt, other: Statement) -> None:
        self.statement = statement
        collection = _Collection()
        # What is behind `elif` is a statement of its own.
        other = other.with_changes(orelse=None) if isinstance(other, cst.If) and isinstance(other.orelse, cst.If) else other
        other.visit(collection)
        self._found = collection.found

    def find(self, node: ast.expr) -> cst.BaseExpression:
        """Which expression of libcst is one of `ast`.

        Args:
            node: A part of the statement.

        Raises:
            EditError: libcst has nothing that can be told to be this one.
        """
        meaning = _meaning(node)
        kinds = _KINDS.get(type(node), (cst.BaseExpression,))
        alike = [found for found in self._found if isinstance(found, kinds) and _says(found, meaning)]
        twins = _in_order(self.statement, type(node), meaning)
        if len(alike) != len(twins):
            raise EditError(f"{ast.dump(node)} is {len(alike)} times in libcst's tree of the statement and {len(twins)} times in Python's")
        return alike[[twin is node for twin in twins].index(True)]


def _says(node: cst.BaseExpression, meaning: str) -> bool:
    tree = parsed(f"({cst.Module([]).code_for_node(node)}\n)")
    if tree is None or len(tree.body) != 1 or not isinstance(tree.body[0], ast.Expr):
        return False
    return _meaning(tree.body[0].value) == meaning


def _in_order(statement: ast.stmt, kind: type[ast.expr], meaning: str) -> list[ast.AST]:
    """The parts of a statement that say the same, in the order of the source."""
    found: list[tuple[tuple[int, int], int, ast.AST]] = []
    # Each with the position of the f-string around it, whose own parts may have wrong ones.
    waiting: list[tuple[ast.AST, tuple[int, int] | None]] = [(statement, None)]
    while waiting:
        node, place = waiting.pop()
        if isinstance(node, ast.expr) and type(node) is kind and _meaning(node) == meaning:
            found.append((place or (node.lineno, node.col_offset), len(found), node))
        if isinstance(node, ast.JoinedStr):
            place = place or (node.lineno, node.col_offset)
        waiting.extend((child, place) for child in reversed(_parts(node)))
    return [node for _, _, node in sorted(found, key=lambda entry: entry[:2])]


def _parts(node: ast.AST) -> list[ast.AST]:
    """The parts of a node that are expressions for libcst too, or hold some."""
    children = [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.stmt | ast.expr_context)]
    if isinstance(node, ast.JoinedStr):
        return [child for child in children if isinstance(child, ast.FormattedValue)]
    if isinstance(node, ast.FormattedValue) and node.format_spec is not None:
        return [node.value, *_parts(node.format_spec)]
    return children
