"""How the code of a fix is spelled in the words of the file that it goes into."""

from __future__ import annotations

import ast

from halfstep.lint.edits import AddImport, Edit
from halfstep.lint.module import Module

__all__ = ["as_float", "grouped", "part_of", "quoted", "spell_torch", "text_of"]

_ATOMS = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant, ast.Tuple, ast.List)


def spell_torch(module: Module) -> tuple[str, tuple[Edit, ...]]:
    """What a file calls torch, and the edit that imports it where the file has no name for it.

    Example:
        >>> from halfstep.lint.module import parse_module
        >>> spell_torch(parse_module("import torch as th"))
        ('th', ())
    """
    for statement in module.nodes(ast.Import):
        for alias in statement.names:
            if alias.name == "torch" or (alias.name.startswith("torch.") and alias.asname is None):
                return alias.asname or "torch", ()
    return "torch", (AddImport(module="torch"),)


def text_of(node: ast.expr, module: Module) -> str:
    """The text of an expression for an edit, whose further lines are written as if the statement around it began at the margin."""
    first, *rest = module.source(node).splitlines(keepends=True)
    outer = module.statement(node).col_offset
    return "".join([first, *(line[outer:] if not line[:outer].strip() else line for line in rest)])


def part_of(whole: ast.expr, part: ast.expr, module: Module) -> tuple[str, str]:
    """What stands before and behind a part of an expression that is written on one line.

    Example:
        >>> from halfstep.lint.module import parse_module
        >>> module = parse_module("f(a, b)")
        >>> call = module.tree.body[0].value
        >>> part_of(call, call.args[1], module)
        ('f(a, ', ')')
    """
    text = module.source(whole).encode()
    start = part.col_offset - whole.col_offset
    end = (part.end_col_offset or 0) - whole.col_offset
    return text[:start].decode(), text[end:].decode()


def grouped(node: ast.expr, module: Module) -> str:
    """The text of an expression, in parentheses where a method call or an operator behind it would bind tighter than what is in it."""
    text = text_of(node, module)
    return text if isinstance(node, _ATOMS) else f"({text})"


def as_float(node: ast.expr, module: Module) -> str:
    """The text of a tensor in fp32.

    Example:
        >>> from halfstep.lint.module import parse_module
        >>> module = parse_module("a - b")
        >>> as_float(module.tree.body[0].value, module)
        '(a - b).float()'
    """
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in {"float", "half"} and not node.args:
        return f"{grouped(node.func.value, module)}.float()"
    return f"{grouped(node, module)}.float()"


def quoted(node: ast.AST, module: Module, limit: int = 60) -> str:
    """The text of a node for a message: on one line, shortened, in backquotes."""
    text = " ".join(module.source(node).split()).replace("`", "'")
    return f"`{text if len(text) <= limit else text[: limit - 3] + '...'}`"
