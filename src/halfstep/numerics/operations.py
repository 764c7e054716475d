"""What a trace has to know of an operation and its arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, final

from torch import Tensor
from torch.nn import Parameter

from halfstep._torch.dispatching import schema_of
from halfstep._torch.tracing import has_schema
from halfstep.numerics.passing import kind_of_pass
from halfstep.records import bare_name

__all__ = ["INFINITE", "NAN", "Traits", "collect_tensors", "traits_of", "written_tensors"]

# What a number among the arguments of an operation may be.
INFINITE: Final = 1
NAN: Final = 2

# They return memory that nobody has written to.
_UNWRITTEN: Final = frozenset(
    {
        "aten::empty",
        "aten::empty_like",
        "aten::empty_permuted",
        "aten::empty_strided",
        "aten::new_empty",
        "aten::new_empty_strided",
        "aten::_efficientzerotensor",
    }
)

# They return the memory that they are given, although their schemas do not say so.
_HIDDEN_VIEWS: Final = frozenset({"aten::_unsafe_view", "aten::_reshape_alias", "aten::lift_fresh"})

# They convert, each with the place of what it converts.
_CASTS: Final = {"aten::_to_copy": 0, "aten::copy_": 1, "aten::_foreach_copy_": 1}

# What they return beside their result is for their backward pass: sums of exponentials, which are -inf for a row that is masked, and
# which some kernels leave partly unwritten.
_ATTENTION: Final = ("aten::_scaled_dot_product_", "aten::_flash_attention_forward", "aten::_efficient_attention_forward")

# They return before the other processes have done their part.
_COLLECTIVES: Final = ("c10d::", "_c10d_functional::", "c10d_functional::")


@final
@dataclass(frozen=True, slots=True)
class Traits:
    """What a trace has to know of an operation.

    Attributes:
        name: Such as `aten.mul.Tensor`.
        is_view: Whether it returns views of what it is given, which were read before.
        is_unwritten: Whether it returns memory that nobody has written to.
        is_collective: Whether it returns before its results are there.
        returns_backward_parts: Whether only the first of its results is one.
        written: The arguments that it writes to, by place and name.
        cast_place: The place of the argument that it converts; `None` for one that does not convert.
        is_read: Whether its results are read: those that are new, and that are there when it returns.
        is_in_place: Whether it writes to its first argument alone and returns it.
        is_note: Whether it computes nothing, but tells a profiler something.
        takes_no_values: Whether it looks at the shapes of its tensors alone, as `ones_like` does.
    """

    name: str
    is_view: bool
    is_unwritten: bool
    is_collective: bool
    returns_backward_parts: bool
    written: tuple[tuple[int, str], ...]
    cast_place: int | None
    is_read: bool
    is_in_place: bool
    is_note: bool
    takes_no_values: bool


def traits_of(operation: Any) -> Traits:
    """The traits of an operation such as `torch.ops.aten.mul.Tensor`.

    Example:
        >>> import torch
        >>> traits_of(torch.ops.aten.mul_.Tensor).written
        ((0, 'self'),)
    """
    if not has_schema(operation):
        return _traits(str(operation))
    schema = schema_of(operation)
    return _traits(
        str(operation),
        is_view=schema.is_view or schema.name in _HIDDEN_VIEWS,
        is_unwritten=schema.name in _UNWRITTEN,
        is_collective=schema.name.startswith(_COLLECTIVES),
        returns_backward_parts=schema.name.startswith(_ATTENTION) and "backward" not in schema.name,
        written=schema.written,
        returned=schema.returned,
        cast_place=_CASTS.get(schema.name),
    )


def _traits(
    name: str,
    *,
    is_view: bool = False,
    is_unwritten: bool = False,
    is_collective: bool = False,
    returns_backward_parts: bool = False,
    written: tuple[tuple[int, str], ...] = (),
    returned: tuple[str | None, ...] = (),
    cast_place: int | None = None,
) -> Traits:
    is_read = not (is_view or is_unwritten or is_collective)
    is_in_place = is_read and written == ((0, "self"),) and returned == ("self",)
    is_note = name.startswith("profiler.")
    makes = kind_of_pass(bare_name(name)) == "makes"
    return Traits(
        name, is_view, is_unwritten, is_collective, returns_backward_parts, written, cast_place, is_read, is_in_place, is_note, makes
    )


def collect_tensors(values: Any, into: list[Tensor]) -> int:
    """Adds the tensors among some arguments or results to a list, those in lists, too.

    Returns:
        Whether a number among them is not finite: `INFINITE`, `NAN`, both or 0.

    Example:
        >>> collect_tensors([1, [2.0, float("inf")]], [])
        1
    """
    faults = 0
    for value in values:
        kind = type(value)
        if kind is Tensor or kind is Parameter:
            into.append(value)
        elif kind is int or kind is bool or value is None:
            continue
        elif kind is float or kind is complex:
            if value - value != 0:
                faults |= NAN if value != value else INFINITE  # noqa: PLR0124
        elif isinstance(value, list | tuple):
            faults |= collect_tensors(value, into)
        elif isinstance(value, Tensor):
            into.append(value)
    return faults


def written_tensors(traits: Traits, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an operation writes to."""
    found: list[Tensor] = []
    for place, name in traits.written:
        collect_tensors((args[place] if place < len(args) else kwargs.get(name),), found)
    return found
