"""Words that look like a loss scaler and are none: what scales features, and a scaler that nobody calls."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.lint.module import Module
from halfstep.lint.scopes import last_name
from halfstep.lint.values import Scaler

__all__ = ["idle_scalers", "namesakes"]


def namesakes(module: Module) -> frozenset[str]:
    r"""The words of a file that always name what scikit-learn gives, or a gradient scaler that is made and never used.

    Args:
        module: The file.

    Example:
        >>> from halfstep.lint.module import parse_module
        >>> module = parse_module("from sklearn.preprocessing import StandardScaler\nscaler = StandardScaler()")
        >>> sorted(namesakes(module))
        ['StandardScaler', 'scaler']
    """
    mentions = _mentions(module)
    found = {word for word, nodes in mentions.items() if nodes and all(_is_of_sklearn(node, module) for node in nodes)}
    for alias in module.nodes(ast.alias):
        statement = module.parent(alias)
        if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith("sklearn"):
            found.update({alias.name, alias.asname or alias.name})
    idle = idle_scalers(module)
    makers = [scaler.node.func for _name, scaler in idle if scaler.node is not None]
    for name, _scaler in idle:
        found.add(name.id)
    for maker in makers:
        word = last_name(maker)
        if all(node in makers for node in mentions.get(word, ())):
            found.update({word, module.name(maker).rpartition(".")[2]})
    return frozenset(found - {node.arg for node in module.nodes(ast.arg)})


def idle_scalers(module: Module) -> list[tuple[ast.Name, Scaler]]:
    """The gradient scalers that are given to a variable that nothing reads, each with where it is set."""
    found: list[tuple[ast.Name, Scaler]] = []
    mentions: dict[str, list[ast.expr]] | None = None
    for scaler in module.scalers:
        statement = None if scaler.node is None else module.parent(scaler.node)
        if not isinstance(statement, ast.Assign) or len(statement.targets) != 1 or not isinstance(statement.targets[0], ast.Name):
            continue
        mentions = _mentions(module) if mentions is None else mentions
        name = statement.targets[0]
        if all(isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) for node in mentions[name.id]):
            found.append((name, scaler))
    return found


def _mentions(module: Module) -> dict[str, list[ast.expr]]:
    """Where each word of a file is used as a variable or as an attribute."""
    found: dict[str, list[ast.expr]] = {}
    for node in _places(module):
        found.setdefault(last_name(node), []).append(node)
    return found


def _places(module: Module) -> Iterator[ast.expr]:
    for node in module.nodes(ast.Name, ast.Attribute):
        assert isinstance(node, ast.Name | ast.Attribute)
        yield node


def _is_of_sklearn(node: ast.expr, module: Module) -> bool:
    if module.name(node).startswith("sklearn."):
        return True
    given = [each.value if each.kind == "value" else None for each in module.bindings(node)]
    return bool(given) and all(isinstance(each, ast.Call) and module.name(each.func).startswith("sklearn.") for each in given)
