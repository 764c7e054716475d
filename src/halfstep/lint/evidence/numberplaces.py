"""Where a number can stand in the place of a tensor of one element."""

from __future__ import annotations

import ast
from typing import Final

from halfstep.lint.module import Module

__all__ = ["item_call", "takes_number"]

# Methods of loggers, of lists and of progress bars: they take what they are given.
_TAKERS: Final = frozenset(
    [
        *("debug", "info", "warning", "error", "log", "print", "write", "format"),
        *("append", "update", "add_scalar", "log_metric", "log_scalar", "set_postfix"),
    ]
)


def takes_number(node: ast.expr, module: Module) -> bool:
    r"""Whether code goes on to work if an expression is a number and no longer a tensor; false where that is not known.

    Args:
        node: The expression.
        module: The file.

    Example:
        >>> from halfstep.lint.module import parse_module
        >>> module = parse_module("print(scale)\ntorch.log2(scale)\nscale.clone()")
        >>> [takes_number(name, module) for name in module.nodes(ast.Name) if name.id == "scale"]
        [True, False, False]
    """
    parent = module.parent(node)
    if isinstance(parent, ast.keyword):
        parent = module.parent(parent)
    if isinstance(parent, ast.Attribute | ast.Subscript):
        return isinstance(parent, ast.Subscript) and parent.slice is node
    if isinstance(parent, ast.Call):
        return _is_taken(parent, module)
    if isinstance(parent, ast.Compare):
        return not any(isinstance(operation, ast.Is | ast.IsNot) for operation in parent.ops)
    if isinstance(parent, ast.Assign) and parent.value is node:
        places = {module.key(target) for target in parent.targets}
        return all(
            takes_number(use, module)
            for use in module.nodes(ast.Name, ast.Attribute)
            if isinstance(use, ast.Name | ast.Attribute) and isinstance(use.ctx, ast.Load) and module.key(use) in places
        )
    return True


def _is_taken(call: ast.Call, module: Module) -> bool:
    """Whether a call takes a number as it takes a tensor: one of a built-in function or of a logger."""
    name = module.name(call.func)
    if name:
        return name.startswith("builtins.")
    return isinstance(call.func, ast.Attribute) and call.func.attr in _TAKERS


def item_call(attribute: ast.Attribute, module: Module) -> ast.Call | None:
    """The call of `item()` on an attribute."""
    method = module.parent(attribute)
    if not isinstance(method, ast.Attribute) or method.attr != "item":
        return None
    call = module.parent(method)
    return call if isinstance(call, ast.Call) and call.func is method else None
