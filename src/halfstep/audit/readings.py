"""What the operations of a step say, taken together."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final

from halfstep.numerics import kind_of_pass, list_treatments
from halfstep.records import KeptOperation, KeptReason, ModuleRange, OpRecord, Treatment, UnderflowSite, bare_name

__all__ = ["computing", "is_cast", "is_lowered", "kept_operations", "tightest_ranges", "total_seconds", "underflow_sites"]

_HALVES: Final = frozenset({"float16", "bfloat16"})
_FLOATS: Final = _HALVES | {"float32"}
_CASTS: Final = frozenset({"aten._to_copy.default", "aten.copy_.default"})
_MOST_SITES: Final = 10


def is_cast(op: OpRecord) -> bool:
    """Whether an operation converts between fp32, bf16 and fp16.

    `Tensor.to`, autocast and the backward pass convert by `aten._to_copy`; an assignment does by `aten.copy_`, from its second tensor.
    """
    if op.op not in _CASTS or not op.input_dtypes or not op.output_dtypes:
        return False
    source, result = op.input_dtypes[-1], op.output_dtypes[0]
    return source != result and source in _FLOATS and result in _FLOATS


def computing(ops: Iterable[OpRecord]) -> list[OpRecord]:
    """The operations that compute floating-point results: no views, no casts, nothing that only makes, moves or draws values."""
    return [op for op in ops if op.absmax is not None and kind_of_pass(bare_name(op.op)) not in _NO_COMPUTATION]


_NO_COMPUTATION: Final = frozenset({"converts", "makes", "moves", "draws"})


def is_lowered(op: OpRecord) -> bool:
    """Whether what an operation computes is in half precision."""
    floats = [dtype for dtype in op.output_dtypes if dtype in _FLOATS]
    return bool(floats) and floats[0] in _HALVES


def total_seconds(ops: Sequence[OpRecord]) -> float | None:
    """How long operations took together; `None` where one was not measured."""
    seconds = [op.seconds for op in ops if op.seconds is not None]
    return sum(seconds) if len(seconds) == len(ops) else None


def kept_operations(ops: Sequence[OpRecord], *, target: str | None) -> tuple[KeptOperation, ...]:
    """The operations that computed in fp32, with the reason, the most costly first.

    Args:
        ops: Those of a step, in the order in which they ran.
        target: The device type whose lists of autocast applied; `None` where none did.
    """
    treatments = {} if target is None else _by_packet(target)
    widened = {id(op) for before, op in pairwise(ops) if _widens(before)}
    groups: dict[tuple[str, str, KeptReason], list[OpRecord]] = defaultdict(list)
    for op in computing(ops):
        if "float32" in op.output_dtypes[:1]:
            groups[op.op, op.phase, _reason(op, treatments, widened=id(op) in widened)].append(op)
    kept = [
        KeptOperation(
            op=name,
            phase=members[0].phase,
            reason=reason,
            count=len(members),
            seconds=total_seconds(members),
            modules=tuple(module for module, _ in Counter(op.site.module for op in members).most_common()),
        )
        for (name, _, reason), members in groups.items()
    ]
    return tuple(sorted(kept, key=lambda each: (-(each.seconds or 0.0), -each.count, each.op)))


def _reason(op: OpRecord, treatments: dict[str, Treatment], *, widened: bool) -> KeptReason:
    treatment = treatments.get(_forward_name(op.op), "as_is")
    # Autocast is off in the backward pass: what is on its list there, such as the sum of a bias's gradients, is in fp32 because its values
    # are. The backward pass of an operation on the list is another matter.
    if treatment == "fp32" and (op.phase == "forward" or "backward" in op.op):
        return "listed"
    # Before autocast runs an operation in the widest dtype among its arguments, it casts the others.
    if any(dtype in _HALVES for dtype in op.input_dtypes) or (treatment == "promote" and widened):
        return "promoted"
    return "not_autocast" if treatment == "lower" else "given_fp32"


def _widens(op: OpRecord) -> bool:
    return is_cast(op) and op.input_dtypes[-1] in _HALVES and op.output_dtypes[0] not in _HALVES


def _by_packet(target: str) -> dict[str, Treatment]:
    return {name.partition(".")[0].lstrip("_"): treatment for name, treatment in list_treatments(target).items()}


# What kernels are called that do the work of an operation that autocast knows by another name.
_PREFIXES: Final = ("_fused_", "_", "native_", "cudnn_", "miopen_", "linalg_")
_SUFFIXES: Final = ("_backward_data", "_backward", "_forward", "_input", "_overrideable")


def _forward_name(op: str) -> str:
    """The name that autocast knows an operation by, as far as it can be told: `aten._softmax_backward_data.default` is `softmax`."""
    name = bare_name(op).rstrip("_")
    for suffix in _SUFFIXES:
        name = name.removesuffix(suffix)
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def underflow_sites(ops: Iterable[OpRecord]) -> tuple[UnderflowSite, ...]:
    """The places where most values became zero or subnormal, at most ten."""
    found: dict[tuple[str, str, str], list[OpRecord]] = defaultdict(list)
    for op in ops:
        if op.flushed and any(dtype in _HALVES for dtype in op.output_dtypes):
            found[op.op, op.phase, str(op.site)].append(op)
    sites = [
        UnderflowSite(
            op=members[0].op,
            phase=members[0].phase,
            site=members[0].site,
            flushed=sum(op.flushed for op in members),
            elements=sum(op.elements for op in members),
        )
        for members in found.values()
    ]
    return tuple(sorted(sites, key=lambda site: -site.flushed)[:_MOST_SITES])


def tightest_ranges(ranges: Iterable[ModuleRange]) -> tuple[ModuleRange, ...]:
    """What modules computed in half precision, the one with the least headroom first; what is not finite comes before all."""
    halves = [part for part in ranges if part.dtype in _HALVES and (part.absmax is not None or part.nonfinite)]
    return tuple(sorted(halves, key=lambda part: (not part.nonfinite, part.headroom if part.headroom is not None else float("inf"))))
