"""Which assignments a variable may have its value from where it is read: the last ones before it."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import final

from halfstep.lint.module import Module
from halfstep.lint.scopes import Binding
from halfstep.lint.syntax import COMPREHENSIONS

__all__ = ["Reaching"]


@final
class Reaching:
    """Finds the assignments that reach a place.

    What a loop's earlier round has assigned is not looked at: what the first round reads is enough to show something.

    Args:
        module: The file.
    """

    def __init__(self, module: Module) -> None:
        self._module = module

    def bindings(self, node: ast.expr) -> Sequence[Binding]:
        """The bindings that a name may have its value from; empty where none is known, or where it may have another one."""
        found = self._module.bindings(node)
        if not isinstance(node, ast.Name) or not found or isinstance(self._module.syntax.scope(found[0].node), COMPREHENSIONS):
            return found  # What a comprehension binds stands behind its use.
        function = self._module.function(node)
        local = [each for each in found if self._function(each) is function]
        if len(local) != len(found) or not local:
            return found
        return self._last(node, local)

    def _function(self, binding: Binding) -> ast.AST | None:
        if isinstance(binding.node, ast.arg):
            return self._module.parent(self._module.parent(binding.node) or binding.node)
        return self._module.function(binding.node)

    def _last(self, node: ast.Name, bindings: Sequence[Binding]) -> list[Binding]:
        order = self._module.syntax.order
        use = self._module.statement(node) if not self._in_lambda(node) else None
        path = {node, *(holder for holder, _part in self._module.syntax.ancestors(node))}
        reached: list[Binding] = []
        for binding in sorted(bindings, key=lambda each: order(each.node), reverse=True):
            if isinstance(binding.node, ast.arg):
                reached.append(binding)
                return reached
            if order(binding.node) > order(node) or (use is not None and self._assigns_at(binding, use)):
                continue
            if not self._excluded(binding.node, path):
                reached.append(binding)
                if self._always(binding.node, path):
                    return reached
        return reached

    def _in_lambda(self, node: ast.AST) -> bool:
        return isinstance(self._module.function(node), ast.Lambda)

    def _assigns_at(self, binding: Binding, use: ast.stmt) -> bool:
        """Whether a binding happens only after the statement of the use has read its value, as in `x = f(x)`."""
        return isinstance(use, ast.Assign | ast.AnnAssign | ast.AugAssign) and self._module.statement(binding.node) is use

    def _excluded(self, node: ast.AST, path: set[ast.AST]) -> bool:
        """Whether a binding stands in the other branch of a condition that the use stands in a branch of."""
        for holder, part in self._module.syntax.ancestors(node):
            if holder in path:
                if isinstance(holder, ast.If):
                    inside = next((each for each in (*holder.body, *holder.orelse) if each in path), None)
                    return inside is not None and (part in holder.body) != (inside in holder.body) and part is not holder.test
                return False
        return False

    def _always(self, node: ast.AST, path: set[ast.AST]) -> bool:
        """Whether a binding has always happened where the use is reached behind it."""
        for holder, part in self._module.syntax.ancestors(node):
            if holder in path:
                return True
            if isinstance(holder, ast.If | ast.For | ast.While | ast.ExceptHandler | ast.AsyncFor | ast.Match):
                return isinstance(holder, ast.If) and part is holder.test
        return True
