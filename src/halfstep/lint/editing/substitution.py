"""Another expression in the place of one, in parentheses where it would say something else without them."""

from __future__ import annotations

import ast
from typing import cast, final

import libcst as cst

from halfstep.lint.editing.outline import EditError
from halfstep.lint.editing.pairing import Statement, parsed, same_meaning

__all__ = ["substitute"]

_PLACEHOLDER = "_halfstep_placeholder"


@final
class _Substitution(cst.CSTTransformer):
    """Puts an expression in the place of another and leaves out the blocks of the statement, which cost time only."""

    def __init__(self, old: cst.BaseExpression, new: cst.BaseExpression) -> None:
        self._old = old
        self._new = new

    def on_visit(self, node: cst.CSTNode) -> bool:
        return not isinstance(node, cst.BaseSuite) and node is not self._old

    def on_leave(self, original_node: cst.CSTNodeT, updated_node: cst.CSTNodeT) -> cst.CSTNodeT:
        if original_node is self._old:
            return cast("cst.CSTNodeT", self._new)
        if isinstance(original_node, cst.BaseSuite):
            return cast("cst.CSTNodeT", cst.SimpleStatementSuite([cst.Pass()]))
        return updated_node


def _expression(code: str) -> cst.BaseExpression:
    try:
        return cst.parse_expression(code.strip())
    except cst.ParserSyntaxError:
        return cst.parse_expression(f"({code.strip()}\n)")


def _head(statement: Statement, old: cst.BaseExpression, new: cst.BaseExpression) -> str:
    """The text of a statement, without its blocks, with another expression in the place of one; empty where that cannot be."""
    if isinstance(statement, cst.If) and isinstance(statement.orelse, cst.If):
        statement = statement.with_changes(orelse=None)
    try:
        changed = statement.visit(_Substitution(old, new))
    except cst.CSTValidationError:
        return ""
    assert isinstance(changed, cst.BaseSmallStatement | cst.BaseCompoundStatement)
    row = cst.SimpleStatementLine([changed]) if isinstance(changed, cst.BaseSmallStatement) else changed
    return cst.Module([row]).code


def substitute(statement: Statement, old: cst.BaseExpression, code: str) -> cst.BaseExpression:
    """What takes the place of an expression.

    Args:
        statement: The innermost statement around it.
        old: The expression.
        code: The text of the new one.

    Raises:
        EditError: It cannot stand there.
    """
    new = _expression(code)
    before, after = list(old.lpar), list(old.rpar)
    if isinstance(old, cst.Tuple | cst.GeneratorExp):
        # Their own parentheses are a part of them, as they are for `ast`.
        before, after = before[:-1], after[1:]
    wanted = _wanted(statement, old, code)
    for extra in range(3):
        left, right = [cst.LeftParen()] * extra, [cst.RightParen()] * extra
        candidate = new.with_changes(lpar=[*before, *left, *new.lpar], rpar=[*new.rpar, *right, *after])
        tree = parsed(_head(statement, old, candidate))
        if tree is not None and same_meaning(tree, wanted):
            return candidate
    raise EditError(f"{code!r} cannot stand in the place of {cst.Module([]).code_for_node(old)!r}")


def _wanted(statement: Statement, old: cst.BaseExpression, code: str) -> ast.Module:
    """What the statement, without its blocks, is to say."""
    tree = parsed(_head(statement, old, cst.Name(_PLACEHOLDER, lpar=[cst.LeftParen()], rpar=[cst.RightParen()])))
    new = parsed(f"({code.strip()}\n)")
    if tree is None or new is None or len(new.body) != 1 or not isinstance(new.body[0], ast.Expr):
        raise EditError(f"{code!r} cannot stand in the place of {cst.Module([]).code_for_node(old)!r}")
    _Filling(new.body[0].value).visit(tree)
    return tree


@final
class _Filling(ast.NodeTransformer):
    """Puts an expression in the place that was kept for it."""

    def __init__(self, new: ast.expr) -> None:
        self._new = new

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._new if node.id == _PLACEHOLDER else node
