"""What is known about the numbers of an expression, and how operands combine."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, final

from halfstep.lint.scopes import last_name

__all__ = [
    "NUMBER",
    "SCALARS",
    "UNKNOWN_NUMBERS",
    "WIDE",
    "Precision",
    "is_root_below",
    "is_size",
    "spells_device",
    "vanishes_in_half",
    "widest",
]

Kind: TypeAlias = Literal["half", "wide", "number", "unknown"]


@final
@dataclass(frozen=True, slots=True)
class Precision:
    """What is known about the numbers of an expression.

    Attributes:
        kind: `half`: shown to be fp16. `wide`: another floating-point type. `number`: a Python number, or integers and truth values, which
            leave the type of a tensor that they meet as it is. `unknown`: anything else.
        reason: Why they are half, for a message.
    """

    kind: Kind
    reason: str = ""


UNKNOWN_NUMBERS: Final = Precision("unknown")
WIDE: Final = Precision("wide")
NUMBER: Final = Precision("number")

# Parameters with these names are numbers, or tensors of no dimension, which leave the type of what they meet as it is.
SCALARS: Final = frozenset(
    [
        "scale",
        "scaling",
        "temperature",
        "temp",
        "tau",
        "norm_factor",
        "scale_factor",
        "softmax_scale",
        "inv_scale",
        "head_dim",
        "dim_head",
        "d_k",
        "dim",
        "d_model",
        "hidden_size",
        "embed_dim",
        "eps",
        "epsilon",
        "alpha",
        "beta",
        "num_heads",
        "attention_head_size",
    ]
)


def widest(operands: Sequence[Precision]) -> Precision:
    """The widest of several operands."""
    kinds = [each.kind for each in operands]
    if "unknown" in kinds or not kinds:
        return UNKNOWN_NUMBERS
    for kind in ("wide", "half"):
        if kind in kinds:
            return operands[kinds.index(kind)]
    return NUMBER


def spells_device(node: ast.expr) -> bool:
    """Whether an argument of `to()` is a device by its text or its name."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str | int)
    last = last_name(node)
    return "device" in last or last in {"dev", "rank", "local_rank", "gpu"}


def is_root_below(node: ast.expr) -> bool:
    """Whether an exponent is that of a root in a denominator, as in `dim ** -0.5`."""
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant)


def is_size(node: ast.expr) -> bool:
    """Whether a variable is a number of channels or the like by its name."""
    last = last_name(node)
    return "dim" in last or "size" in last or last in {"d", "d_k", "dk", "n", "c", "C", "channels"}


def vanishes_in_half(value: object) -> bool:
    """Whether a positive number rounds to zero in float16: at most half of its smallest one, 2**-24.

    Example:
        >>> vanishes_in_half(1e-8), vanishes_in_half(1e-7)
        (True, False)
    """
    return isinstance(value, float) and 0.0 < value <= 2.0**-25
