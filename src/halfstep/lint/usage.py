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

    That is one whose `unscale_()` is called; one on whose scaled loss `backward()` is called, and whose `step()` is given something; and
    one that is called a scaler and has a loss scaled by it, or `step()` and `update()` called on it. Normalisers of features, too, have a
    `scale()`, and engines a `step()` that takes nothing.

    Args:
        syntax: The file.
    """
    methods: dict[str, set[str]] = {}
    for call in syntax.nodes(ast.Call):
        function = call.func
        if not isinstance(function, ast.Attribute):
            continue
        if function.attr == "backward" and isinstance(inner := function.value, ast.Call) and isinstance(inner.func, ast.Attribute):
            if inner.func.attr == "scale":
                methods.setdefault(dotted(inner.func.value), set()).add("scaled backward")
        elif function.attr == "step":
            methods.setdefault(dotted(function.value), set()).add("step" if call.args or call.keywords else "bare step")
        elif function.attr in {"unscale_", "scale", "update", "get_scale"}:
            methods.setdefault(dotted(function.value), set()).add(function.attr)
    return frozenset(place for place, used in methods.items() if place and _is_scaler(place, used))


def _is_scaler(place: str, used: set[str]) -> bool:
    if "bare step" in used:
        return False
    if "unscale_" in used or used >= {"scaled backward", "step"}:
        return True
    named = _CALLED_SCALER.search(place.rpartition(".")[2]) is not None
    return named and (bool(used & {"scale", "get_scale", "scaled backward"}) or used >= {"step", "update"})


def annotates_scaler(parameter: ast.AST) -> bool:
    """Whether a parameter is annotated as a gradient scaler, as in `scaler: torch.amp.GradScaler | None`."""
    annotation = parameter.annotation if isinstance(parameter, ast.arg) else None
    return annotation is not None and re.search(r"\bGradScaler\b", ast.unparse(annotation)) is not None
