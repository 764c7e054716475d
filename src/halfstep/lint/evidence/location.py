"""Where something stands, in the words of a message."""

from __future__ import annotations

import ast

from halfstep.lint.evidence.spelling import quoted
from halfstep.lint.module import Module

__all__ = ["line_of", "located"]


def line_of(node: ast.AST) -> int:
    """The line of a node, from 1; 0 for the module.

    Example:
        >>> line_of(ast.parse("x = 1").body[0])
        1
    """
    return int(getattr(node, "lineno", 0))


def located(node: ast.AST, module: Module) -> str:
    """The text of a node with its line.

    Example:
        >>> from halfstep.lint.module import parse_module
        >>> module = parse_module("scaler.step(optimizer)")
        >>> located(module.tree.body[0], module)
        '`scaler.step(optimizer)` in line 1'
    """
    return f"{quoted(node, module)} in line {line_of(node)}"
