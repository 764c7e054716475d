"""Loops of training steps that run within one autocast region, whose casts of weights are made once and kept."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from halfstep.lint.flow import Event, Kind
from halfstep.lint.module import Module
from halfstep.lint.syntax import FUNCTIONS, Loop
from halfstep.lint.values import Autocast

__all__ = ["EnclosedLoop", "enclosed_loops"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EnclosedLoop:
    """A loop of training steps within an autocast region.

    Attributes:
        loop: The loop.
        region: Where the region is entered: the context of a `with`, or a decorator.
        step: The optimizer's step.
    """

    loop: Loop
    region: ast.expr
    step: Event


def enclosed_loops(module: Module) -> list[EnclosedLoop]:
    r"""The loops of training steps that stand in an autocast region with a cache, the outermost one for each region.

    Args:
        module: The file.

    Example:
        >>> from halfstep.lint.module import parse_module
        >>> text = "import torch\nwith torch.autocast('cpu'):\n    for x in xs:\n        model(x).backward()\n        optimizer.step()"
        >>> [enclosed.loop.lineno for enclosed in enclosed_loops(parse_module(text))]
        [3]
    """
    if "clear_autocast_cache" in module.text:
        return []
    found: dict[ast.expr, EnclosedLoop] = {}
    regions: dict[Loop, ast.expr | None] = {}
    for trace in module.traces:
        for event in trace.events:
            if event.kind not in (Kind.STEP, Kind.OPTIMIZER_STEP):
                continue
            for loop in event.loops:
                if loop not in regions:
                    regions[loop] = _outermost(loop, module) or _around_calls(loop, module, depth=0)
                region = regions[loop]
                if region is not None:
                    found.setdefault(region, EnclosedLoop(loop=loop, region=region, step=event))
                    break
    return list(found.values())


def _around_calls(node: ast.AST, module: Module, depth: int) -> ast.expr | None:
    """The outermost region around a call of the function that a node stands in, where all of its calls in the file stand in one."""
    function = module.function(node)
    if function is None or depth > 2:
        return None
    found = [_outermost(call, module) or _around_calls(call, module, depth + 1) for call in module.callers(function)]
    return found[0] if found and None not in found else None


def _outermost(loop: ast.AST, module: Module) -> ast.expr | None:
    """The outermost region around a loop, within its function, from which on autocast stays on."""
    found = None
    for place, region in _regions(loop, module):
        if region.enabled is False:
            break
        cache = region.arguments.get("cache_enabled")
        if cache is not None and module.constant(cache) is not True:
            return None
        found = place
    return found


def _regions(loop: ast.AST, module: Module) -> Iterator[tuple[ast.expr, Autocast]]:
    """The places within its function where regions around a loop are entered, innermost first."""
    for holder, part in module.syntax.ancestors(loop):
        if isinstance(holder, ast.With | ast.AsyncWith) and part in holder.body:
            for item in reversed(holder.items):
                yield from _entered(item.context_expr, module)
        elif isinstance(holder, FUNCTIONS):
            if not isinstance(holder, ast.Lambda):
                for mark in reversed(holder.decorator_list):
                    yield from _entered(mark, module)
            return


def _entered(place: ast.expr, module: Module) -> Iterator[tuple[ast.expr, Autocast]]:
    for value in module.values(place):
        if isinstance(value, Autocast):
            yield place, value
            return
