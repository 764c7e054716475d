"""What a trace saw: operations, where they ran, and the range of their results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

from halfstep.records.base import AbstractRecord

__all__ = [
    "TRACE_SCHEMA",
    "UNKNOWN",
    "ModuleRange",
    "OpRecord",
    "OperationLists",
    "OperationTreatment",
    "Phase",
    "Site",
    "TraceRecord",
    "Treatment",
    "bare_name",
]

# The number of the format of a trace on disk.
TRACE_SCHEMA = 1

# What stands for a module or a file that no trace can tell.
UNKNOWN = "unknown"

Phase = Literal["forward", "backward"]

# What autocast does to an operation: runs it in the lower precision of the region, in fp32, in the widest dtype among its arguments, not at
# all, or as it is.
Treatment = Literal["lower", "fp32", "promote", "banned", "as_is"]


def bare_name(op: str) -> str:
    """The name of an operation without namespace and overload.

    Example:
        >>> bare_name("aten.mul_.Tensor"), bare_name("flex_attention")
        ('mul_', 'flex_attention')
    """
    return op.split(".")[1] if op.count(".") > 1 else op


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OperationTreatment(AbstractRecord):
    """What autocast does to one operation.

    Attributes:
        name: The overload, such as `softmax.int`.
        treatment: `lower`, `fp32`, `promote`, `banned` or `as_is`.
        other: What it does to it on the device type that is compared with; `None` where none is.

    Example:
        >>> OperationTreatment(name="softmax.int", treatment="fp32", other=None).treatment
        'fp32'
    """

    name: str
    treatment: Treatment
    other: Treatment | None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OperationLists(AbstractRecord):
    """What autocast does to operations on a device type.

    Attributes:
        schema: The number of the format.
        torch: The version of torch whose lists these are.
        target: The device type.
        against: The device type that is compared with, of which only what is treated otherwise is listed; empty where none is.
        pattern: What was looked for; empty for all that autocast has a say in.
        operations: The operations, by name.

    Example:
        >>> OperationLists(schema=1, torch="2.13.0", target="cuda", against="", pattern="relu", operations=()).target
        'cuda'
    """

    schema: int
    torch: str
    target: str
    against: str
    pattern: str
    operations: tuple[OperationTreatment, ...]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Site(AbstractRecord):
    """Where an operation was called: the module that it belongs to, and the line of the user's code.

    Attributes:
        module: The path of the module, such as `decoder.3.attn`; empty for the model itself; `unknown` where none is known.
        file: The file of the innermost line of code that belongs to neither Python, torch, halfstep nor another installed package;
            `unknown` where there is none.
        line: Its number, from 1; 0 where the file is unknown.

    Example:
        >>> str(Site(module="decoder.3.attn", file="train.py", line=12))
        'decoder.3.attn (train.py:12)'
    """

    module: str
    file: str
    line: int

    def __str__(self) -> str:
        module = self.module or "(the model)"
        return f"{module} ({self.file}:{self.line})" if self.file != UNKNOWN else module


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OpRecord(AbstractRecord):
    """One operation, as it ran.

    Attributes:
        op: Its name, such as `aten.mul.Tensor`.
        phase: `forward`, or `backward` for what the backward pass computes. What activation checkpointing computes again is `forward`.
        site: Where it was called; for an operation of the backward pass, where the forward operation that it belongs to was.
        input_dtypes: The dtypes of its tensors, in order, such as `float16`; those in lists one by one.
        output_dtypes: The same for what it returns.
        elements: How many elements its floating-point results have.
        absmax: The largest magnitude among them: inf where one is infinite; NaNs are left out. `None` where no result is floating-point,
            has an element, or was read: views and memory that nobody has written to are not.
        nonfinite: How many of them are infinite or NaN.
        nans: How many of them are NaN.
        flushed: How many values that are not zero became zero or subnormal in this result: in a cast, against what was cast; under a
            rehearsal also in every operation that rounds its result to half precision.
        exact_absmax: Under a rehearsal, the largest magnitude before it was rounded to half precision, which tells by how much a result
            overflows; `None` elsewhere.
        has_nonfinite_input: Whether a tensor or a number that it was given was not finite. Memory is judged as a whole where it lies on
            another device than the CPU: a view of a tensor that is not finite counts as not finite.
        has_nan_input: The same for NaN alone.
        node: For an operation of the backward pass, the autograd node that ran it, such as `AddmmBackward0`; empty in the forward pass.
        seconds: How long the call took on the host; `None` where that says nothing, since the device works on its own.

    Example:
        >>> op = OpRecord(
        ...     op="aten.mul.Tensor", phase="forward", site=Site(module="", file="train.py", line=12), input_dtypes=("float16", "float16"),
        ...     output_dtypes=("float16",), elements=8, absmax=3.0, nonfinite=0, nans=0, flushed=0, exact_absmax=None,
        ...     has_nonfinite_input=False, has_nan_input=False, node="", seconds=1e-5,
        ... )
        >>> op.makes_nonfinite
        False
    """

    op: str
    phase: Phase
    site: Site
    input_dtypes: tuple[str, ...]
    output_dtypes: tuple[str, ...]
    elements: int
    absmax: float | None
    nonfinite: int
    nans: int
    flushed: int
    exact_absmax: float | None
    has_nonfinite_input: bool
    has_nan_input: bool
    node: str
    seconds: float | None

    @property
    def makes_nonfinite(self) -> bool:
        """Whether it made something infinite or NaN out of finite values."""
        return self.nonfinite > 0 and not self.has_nonfinite_input

    @property
    def makes_nan(self) -> bool:
        """Whether it made NaN out of values that were not NaN, but may have been infinite."""
        return self.nans > 0 and not self.has_nan_input


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRange(AbstractRecord):
    """What one module computed, in one dtype, without the modules in it.

    Attributes:
        module: Its path; `unknown` for operations that belong to none.
        dtype: The dtype of the results, such as `float16`.
        ops: How many operations had a result of this dtype.
        absmax: The largest finite magnitude among them; `None` where none was read.
        nonfinite: How many values were infinite or NaN.
        flushed: How many values became zero or subnormal.
        headroom: How many powers of two lie between `absmax` and the largest number of the dtype; `None` where `absmax` is `None` or 0.

    Example:
        >>> part = ModuleRange(module="head", dtype="float16", ops=2, absmax=32752.0, nonfinite=0, flushed=0, headroom=1.0)
        >>> part.headroom
        1.0
    """

    module: str
    dtype: str
    ops: int
    absmax: float | None
    nonfinite: int
    flushed: int
    headroom: float | None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRecord(AbstractRecord):
    """A whole trace.

    Attributes:
        schema: The number of the format.
        torch: The version of torch that ran.
        target: The device type whose numerics were rehearsed; empty where nothing was.
        ops: The operations, in the order in which they ran.

    Example:
        >>> TraceRecord(schema=1, torch="2.13.0", target="", ops=()).origin is None
        True
    """

    schema: int
    torch: str
    target: str
    ops: tuple[OpRecord, ...]

    @property
    def origin(self) -> OpRecord | None:
        """The first operation whose inputs are finite and whose result is not; `None` where there is none.

        Where infinities are all that there is to begin with, such as the -inf of a mask or of a batch, it is the first operation that
        makes NaN of what is not NaN: the softmax of a row that is masked as a whole, for one.
        """
        makers = (op for op in self.ops if op.makes_nonfinite)
        return next(makers, None) or next((op for op in self.ops if op.makes_nan), None)
