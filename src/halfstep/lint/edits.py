"""What a fix does to a file, as values: each names a node of the syntax tree that was checked, and what becomes of it."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

__all__ = [
    "AddArgument",
    "AddImport",
    "DeleteStatement",
    "Edit",
    "InsertStatement",
    "MoveOutOfBlock",
    "RemoveArgument",
    "RemoveImport",
    "ReplaceExpression",
    "ReplaceStatement",
    "WrapStatements",
]


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplaceExpression:
    """Another expression takes the place of one.

    Attributes:
        node: What is replaced.
        code: The text of the new expression.
    """

    node: ast.expr
    code: str


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplaceStatement:
    """Other statements take the place of one.

    Attributes:
        statement: What is replaced.
        code: The text of one or more statements, without indentation.
    """

    statement: ast.stmt
    code: str


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InsertStatement:
    """New statements stand before or behind one.

    Attributes:
        statement: The one that they stand next to.
        code: The text of one or more statements, without indentation.
        where: On which side of it.
    """

    statement: ast.stmt
    code: str
    where: Literal["before", "after"]


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeleteStatement:
    """A statement goes; a block that it leaves empty gets a `pass`.

    Attributes:
        statement: What goes.
    """

    statement: ast.stmt


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AddArgument:
    """A call gets one more argument.

    Attributes:
        call: The call.
        code: The argument's text, such as `"cuda"` in quotes or `enabled=True`.
        where: Before all others, or behind all but `**keywords`.
    """

    call: ast.Call
    code: str
    where: Literal["first", "last"]


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RemoveArgument:
    """A call loses an argument.

    Attributes:
        call: The call.
        argument: One of its arguments.
    """

    call: ast.Call
    argument: ast.expr | ast.keyword


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MoveOutOfBlock:
    """The last statements of a `with` block are moved behind it.

    Attributes:
        block: The block.
        first: The first of its statements that is moved; all that follow it in the block go along.
    """

    block: ast.With | ast.AsyncWith
    first: ast.stmt


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WrapStatements:
    """Neighbouring statements become the body of a new block.

    Attributes:
        first: The first of them.
        last: The last of them, in the same block.
        header: The new block's first line with its colon, such as `if stepped:`.
    """

    first: ast.stmt
    last: ast.stmt
    header: str


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AddImport:
    """A file imports one more name, unless it does already.

    Attributes:
        module: The module.
        name: The name to take from it; empty to import the module itself.
    """

    module: str
    name: str = ""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RemoveImport:
    """An import statement loses a name, and goes when that was its last one.

    Attributes:
        alias: The name, a part of the import statement.
    """

    alias: ast.alias


Edit: TypeAlias = (
    ReplaceExpression
    | ReplaceStatement
    | InsertStatement
    | DeleteStatement
    | AddArgument
    | RemoveArgument
    | MoveOutOfBlock
    | WrapStatements
    | AddImport
    | RemoveImport
)
