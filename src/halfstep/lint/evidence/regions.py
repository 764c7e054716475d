"""Which autocast region is in force at a place, by whatever way the place is reached."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import final

from halfstep.lint.evidence.frames import Frame, Frames
from halfstep.lint.module import Module
from halfstep.lint.signatures import DTYPES
from halfstep.lint.syntax import FUNCTIONS
from halfstep.lint.values import UNKNOWN, Autocast, Constant

__all__ = ["Force", "Regions"]

_SWITCHES = frozenset(("torch.set_autocast_enabled", "torch.set_autocast_gpu_enabled"))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Force:
    """An autocast region that is on.

    Attributes:
        node: What turns it on.
        device: Its device type; `None` where that is not known.
        dtypes: The types that it is shown to compute in.
        frame: The frame that it was entered in.
    """

    node: ast.Call
    device: str | None
    dtypes: frozenset[str]
    frame: Frame


@final
class Regions:
    """Finds the autocast region that is in force.

    Args:
        module: The file.
        frames: Its frames.
    """

    def __init__(self, module: Module, frames: Frames) -> None:
        self._module = module
        self._frames = frames
        self._switched = any(name.rpartition(".")[2] in module.text for name in _SWITCHES)

    def at(self, node: ast.AST, frame: Frame) -> Force | None:
        """The region that is in force at a node in a frame; `None` where none is shown to be."""
        place, seen = node, frame
        while True:
            if local := self._module.autocasts(place):
                return self.entered(local[-1], seen)
            if self._switched and (switch := self._switch(place)) is not None:
                return self._switched_on(switch, seen)
            if seen.call is None or seen.caller is None:
                return None
            place, seen = seen.call, seen.caller

    def entered(self, region: Autocast, frame: Frame) -> Force | None:
        """What a region puts in force where it is entered in a frame; `None` where it is off there."""
        enabled = region.enabled
        if enabled is None and (condition := region.arguments.get("enabled")) is not None:
            enabled = self._frames.truth(condition, frame)
            if enabled is None and (shown := self._module.values(condition)) and all(value == Constant(value=False) for value in shown):
                return None  # Off by default, and nobody is seen to turn it on.
        if enabled is False:
            return None
        device = region.device
        if device is None and (given := region.arguments.get("device_type")) is not None:
            device = self._device(given, frame)
        dtype = region.arguments.get("dtype")
        dtypes = region.shown if dtype is None else self.dtypes(dtype, frame)
        if dtype is None and not dtypes and device == "cuda" and "dtype" not in region.arguments:
            dtypes = frozenset(("fp16",))
        return Force(node=region.node, device=device, dtypes=dtypes, frame=frame)

    def _device(self, node: ast.expr, frame: Frame) -> str | None:
        atom = self._frames.atom(node, frame)
        return atom.partition(":")[0] if isinstance(atom, str) else None

    def dtypes(self, node: ast.expr, frame: Frame) -> frozenset[str]:
        """The types that an expression stands for in a frame: the one that it is there, or those that it is shown to be at times."""
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
            # `dtype or torch.bfloat16`
            for part in node.values:
                if self._frames.atom(part, frame) is not None:
                    return self.dtypes(part, frame)
        atom = self._frames.atom(node, frame)
        if isinstance(atom, str) and (name := DTYPES.get(atom.removeprefix("torch."))) is not None:
            return frozenset((name,))
        return self._module.shown_dtypes(node) if atom is UNKNOWN else frozenset()

    def _switch(self, node: ast.AST) -> ast.Call | None:
        """The last call before a node, within its function, that turns autocast on or off by hand."""
        for holder, part in self._module.syntax.ancestors(node):
            for block in ("body", "orelse", "finalbody"):
                statements = getattr(holder, block, None)
                if isinstance(statements, list) and part in statements:
                    before = reversed(statements[: statements.index(part)])
                    if (switch := next((call for each in before if (call := self._as_switch(each)) is not None), None)) is not None:
                        return switch
            if isinstance(holder, FUNCTIONS):
                return None
        return None

    def _as_switch(self, statement: ast.stmt) -> ast.Call | None:
        call = statement.value if isinstance(statement, ast.Expr) else None
        return call if isinstance(call, ast.Call) and self._module.name(call.func) in _SWITCHES else None

    def _switched_on(self, call: ast.Call, frame: Frame) -> Force | None:
        atoms = [self._frames.atom(argument, frame) for argument in call.args]
        if not atoms or atoms[-1] is not True:
            return None
        # With one argument it is about CUDA.
        device = atoms[0] if isinstance(atoms[0], str) else "cuda" if len(atoms) == 1 else None
        return Force(node=call, device=device, dtypes=frozenset(), frame=frame)
