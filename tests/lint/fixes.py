"""Fixes for tests, each made for the tree that it is applied to, from the code that it changes."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

from halfstep.lint.editing import Edited, apply_edits
from halfstep.lint.edits import (
    AddArgument,
    AddImport,
    DeleteStatement,
    Edit,
    InsertStatement,
    MoveOutOfBlock,
    RemoveArgument,
    RemoveImport,
    ReplaceExpression,
    ReplaceStatement,
    WrapStatements,
)

# A fix, made for the tree that it is applied to.
Fix: TypeAlias = Callable[[ast.Module], Sequence[Edit]]


def apply(text: str, *fixes: Fix) -> Edited:
    tree = ast.parse(text)
    return apply_edits(text, tree, [tuple(fix(tree)) for fix in fixes])


def text_after(text: str, *fixes: Fix) -> str:
    edited = apply(text, *fixes)
    assert edited.applied == len(fixes), edited
    return edited.text


def _statement(tree: ast.Module, code: str) -> ast.stmt:
    """The first statement of a tree that says what some code says."""
    wanted = ast.dump(ast.parse(code).body[0])
    return next(node for node in ast.walk(tree) if isinstance(node, ast.stmt) and ast.dump(node) == wanted)


def _expression(tree: ast.Module, code: str, number: int = 0) -> ast.expr:
    wanted = ast.dump(ast.parse(code, mode="eval").body)
    found = [node for node in ast.walk(tree) if isinstance(node, ast.expr) and ast.dump(node) == wanted]
    return sorted(found, key=lambda node: (node.lineno, node.col_offset))[number]


def _call(tree: ast.Module, code: str) -> ast.Call:
    node = _expression(tree, code)
    assert isinstance(node, ast.Call)
    return node


def inserted(next_to: str, code: str = "m()", where: Literal["before", "after"] = "after") -> Fix:
    return lambda tree: [InsertStatement(statement=_statement(tree, next_to), code=code, where=where)]


def inserted_before(next_to: str, code: str = "m()") -> Fix:
    return inserted(next_to, code, "before")


def deleted(code: str) -> Fix:
    return lambda tree: [DeleteStatement(statement=_statement(tree, code))]


def replaced(old: str, new: str) -> Fix:
    return lambda tree: [ReplaceStatement(statement=_statement(tree, old), code=new)]


def exchanged(old: str, new: str, number: int = 0) -> Fix:
    return lambda tree: [ReplaceExpression(node=_expression(tree, old, number), code=new)]


def wrapped(first: str, last: str, header: str = "if ok:") -> Fix:
    return lambda tree: [WrapStatements(first=_statement(tree, first), last=_statement(tree, last), header=header)]


def moved(first: str) -> Fix:
    def fix(tree: ast.Module) -> Sequence[Edit]:
        statement = _statement(tree, first)
        owners = [node for node in ast.walk(tree) if isinstance(node, ast.With | ast.AsyncWith) and statement in node.body]
        return [MoveOutOfBlock(block=owners[0], first=statement)]

    return fix


def argument(call: str, code: str, where: Literal["first", "last"] = "last") -> Fix:
    return lambda tree: [AddArgument(call=_call(tree, call), code=code, where=where)]


def no_argument(call: str, *numbers: int) -> Fix:
    def fix(tree: ast.Module) -> Sequence[Edit]:
        node = _call(tree, call)
        arguments: list[ast.expr | ast.keyword] = [*node.args, *node.keywords]
        return [RemoveArgument(call=node, argument=arguments[number]) for number in numbers]

    return fix


def imported(module: str, name: str = "") -> Fix:
    return lambda _: [AddImport(module=module, name=name)]


def not_imported(*names: str) -> Fix:
    def fix(tree: ast.Module) -> Sequence[Edit]:
        aliases = [node for node in ast.walk(tree) if isinstance(node, ast.alias)]
        return [RemoveImport(alias=alias) for alias in aliases if alias.name in names]

    return fix


def together(*fixes: Fix) -> Fix:
    return lambda tree: [edit for fix in fixes for edit in fix(tree)]
