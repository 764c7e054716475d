"""What a diagnosis says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from halfstep.policy import Override
from halfstep.records import UNKNOWN, OpRecord
from halfstep.records.formats import LARGEST

__all__ = ["HALF_LARGEST", "amount", "island_text", "operation_name", "place_text"]

# Where each half-precision format ends.
HALF_LARGEST: Final = {dtype: LARGEST[dtype] for dtype in ("float16", "bfloat16")}


def operation_name(op: OpRecord) -> str:
    """An operation and where it is, such as `aten.mm.default in head`."""
    return f"{op.op} {place_text(op)}"


def place_text(op: OpRecord) -> str:
    """Where an operation is, as the end of a phrase: in which module, or on which line where it is in none."""
    if op.site.module != UNKNOWN:
        module = op.site.module or "the model"
        return f"in the backward pass of {module}" if op.phase == "backward" else f"in {module}"
    line = f" at {op.site.file}:{op.site.line}" if op.site.file != UNKNOWN else ""
    return f"in the backward pass{line}" if op.phase == "backward" else line.strip() or "outside of all modules"


def island_text(overrides: Sequence[Override]) -> str:
    """What to do, where overrides put parts of a model into fp32."""
    modules = [each.pattern for each in overrides if each.kind == "module"]
    operations = [each.pattern for each in overrides if each.kind == "op"]
    parts = [_listed(modules)] if modules else []
    if operations:
        parts.append(f"the operation{'s' if len(operations) > 1 else ''} {_listed(operations)}")
    return f"Run {' and '.join(parts)} in fp32."


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def amount(value: float) -> str:
    """A number with six digits at most.

    Example:
        >>> amount(65504.0), amount(0.00001234)
        ('65504', '1.234e-05')
    """
    return f"{value:.6g}" if 1 <= value < 1e6 else f"{value:.4g}"
