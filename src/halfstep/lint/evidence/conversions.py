"""Which modules of a file are converted to half precision as a whole, and stay so."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import final

from halfstep.lint.module import Module
from halfstep.lint.values import Network

__all__ = ["Conversion", "Conversions"]

_NAMED = re.compile(r"(?<!b)float16|\bhalf\b|fp16")
_WIDENING = frozenset(("float", "double", "bfloat16"))


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Conversion:
    """A call that converts a module to half precision.

    Attributes:
        call: The call, such as `model.half()`.
        module: What is converted.
        dtype: The argument that says so; `None` for `half()`.
    """

    call: ast.Call
    module: ast.expr
    dtype: ast.expr | None = None


@final
class Conversions:
    """Finds the modules that are converted to half precision.

    Args:
        module: The file.
    """

    def __init__(self, module: Module) -> None:
        self._module = module

    @cached_property
    def calls(self) -> tuple[Conversion, ...]:
        """The calls that convert something to half precision, whatever it is, in the order of the file."""
        return tuple(self._find())

    def _find(self) -> Iterator[Conversion]:
        if _NAMED.search(self._module.text) is None:
            return
        for call in self._module.nodes(ast.Call):
            if not isinstance(call.func, ast.Attribute):
                continue
            if call.func.attr == "half" and not call.args and not call.keywords:
                yield Conversion(call=call, module=call.func.value)
            elif call.func.attr == "to":
                given = [*call.args, *(word.value for word in call.keywords if word.arg == "dtype")]
                dtype = next((each for each in given if self._module.dtypes(each) == {"fp16"}), None)
                if dtype is not None:
                    yield Conversion(call=call, module=call.func.value, dtype=dtype)

    @cached_property
    def _networks(self) -> dict[ast.AST, str]:
        """What makes the modules that are half, and where they become so."""
        found: dict[ast.AST, str] = {}
        for conversion in self.calls:
            for value in self._module.values(conversion.module):
                if isinstance(value, Network):
                    found[value.node] = f"line {conversion.call.lineno}"
        if not found:
            return found
        for call in self._module.nodes(ast.Call):
            if isinstance(call.func, ast.Attribute) and self._widens(call, call.func):
                for value in self._module.values(call.func.value):
                    if isinstance(value, Network):
                        found.pop(value.node, None)
        return found

    def _widens(self, call: ast.Call, function: ast.Attribute) -> bool:
        if function.attr in _WIDENING:
            return True
        given = [*call.args, *(word.value for word in call.keywords if word.arg == "dtype")]
        return function.attr == "to" and any(self._module.shown_dtypes(each) - {"fp16"} for each in given)

    @cached_property
    def _classes(self) -> dict[ast.ClassDef, str]:
        """The classes of this file that a half module is made of."""
        found: dict[ast.ClassDef, str] = {}
        pending: list[tuple[ast.AST, str]] = list(self._networks.items())
        while pending:
            node, where = pending.pop()
            for call in (each for each in ast.walk(node) if isinstance(each, ast.Call)):
                for value in self._module.values(call):
                    definition = value.definition if isinstance(value, Network) and value.node is call else None
                    if definition is not None and definition not in found:
                        found[definition] = where
                        pending.append((definition, where))
        return found

    def half(self, node: ast.Call) -> str:
        """Where the module that a call makes becomes half precision, such as `line 12`; empty where it does not."""
        if not self._networks:
            return ""
        if node in self._networks:
            return self._networks[node]
        for holder, _part in self._module.syntax.ancestors(node):
            if holder in self._networks:
                return self._networks[holder]
        owner = self._module.owner(node)
        return self._classes.get(owner, "") if owner is not None else ""
