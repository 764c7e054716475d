"""Scalers that come from elsewhere, such as a parameter: known by what is done with them."""

from __future__ import annotations

import ast
import re

from halfstep.lint.scopes import dotted
from halfstep.lint.syntax import Syntax

__all__ = ["annotates_scaler", "used_scalers"]

_CALLED_SCALER = re.compile(r"(?i)(^|_)(grad_?)?scaler$")


def used_scalers(syntax: Syntax) -> frozenset[str]:
    """The places of a file, such as `scaler` or `self.scaler`, that are used as only a gradient scaler is.

    That is one whose `unscale_()` is called, or on whose scaled loss `backward()` is called; and one that is called a scaler and has a loss
    scaled by it, or `step()` and `update()` called on it.

    Args:
        syntax: The file.
    """
    found: set[str] = set()
    methods: dict[str, set[str]] = {}
    for call in syntax.nodes(ast.Call):
        function = call.func
        if not isinstance(function, ast.Attribute):
            continue
        if function.attr == "backward" and isinstance(inner := function.value, ast.Call) and isinstance(inner.func, ast.Attribute):
            if inner.func.attr == "scale":
                found.add(dotted(inner.func.value))
        elif function.attr in {"unscale_", "scale", "step", "update", "get_scale"} and (place := dotted(function.value)):
            methods.setdefault(place, set()).add(function.attr)
    for place, used in methods.items():
        named = _CALLED_SCALER.search(place.rpartition(".")[2]) is not None
        if "unscale_" in used or (named and (used & {"scale", "get_scale"} or used >= {"step", "update"})):
            found.add(place)
    found.discard("")
    return frozenset(found)


def annotates_scaler(parameter: ast.AST) -> bool:
    """Whether a parameter is annotated as a gradient scaler, as in `scaler: torch.amp.GradScaler | None`."""
    annotation = parameter.annotation if isinstance(parameter, ast.arg) else None
    return annotation is not None and re.search(r"\bGradScaler\b", ast.unparse(annotation)) is not None
