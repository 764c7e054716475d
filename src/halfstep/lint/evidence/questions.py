"""Branches that a file takes by the type of a tensor."""

from __future__ import annotations

import ast
import re
from typing import Final

from halfstep.lint.module import Module
from halfstep.lint.syntax import FUNCTIONS

__all__ = ["depends_on_dtype"]

_HALF: Final = re.compile(r"(?i)fp16|half|float16")


def depends_on_dtype(node: ast.AST, module: Module) -> bool:
    r"""Whether a node runs for some types of numbers only, so that float16 may take another branch.

    That is under a condition about a `dtype`, and in the other branch of one about float16.

    Args:
        node: The node.
        module: The file.

    Example:
        >>> from halfstep.lint.module import parse_module
        >>> module = parse_module("if x.dtype == torch.float16:\n    a()\nif fp16:\n    b()\nelse:\n    c()")
        >>> [depends_on_dtype(call, module) for call in module.nodes(ast.Call)]
        [True, False, True]
    """
    for holder, part in module.syntax.ancestors(node):
        if isinstance(holder, FUNCTIONS):
            return False
        if not isinstance(holder, ast.If | ast.IfExp) or part is holder.test:
            continue
        otherwise = part is holder.orelse if isinstance(holder, ast.IfExp) else part in holder.orelse
        words = [module.key(each) for each in ast.walk(holder.test) if isinstance(each, ast.Name | ast.Attribute)]
        attributes = {each.attr for each in ast.walk(holder.test) if isinstance(each, ast.Attribute)}
        if "dtype" in attributes | set(words) or (otherwise and any(_HALF.search(word) for word in words)):
            return True
    return False
