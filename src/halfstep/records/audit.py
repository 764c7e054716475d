"""One training step, looked at op by op."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, final

from halfstep.records.base import AbstractRecord
from halfstep.records.trace import ModuleRange, OpRecord, Phase, Site

__all__ = ["AUDIT_SCHEMA", "Audit", "KeptOperation", "KeptReason", "UnderflowSite"]

# The number of the format of an audit on disk.
AUDIT_SCHEMA = 1

KeptReason = Literal["listed", "promoted", "not_autocast", "given_fp32"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class KeptOperation(AbstractRecord):
    """An operation that a step computed in fp32, and why.

    Attributes:
        op: Its name, such as `aten._softmax.default`.
        phase: `forward` or `backward`.
        reason: `listed`, it is on autocast's fp32 list, or the backward pass of one that is; `promoted`, one of the tensors that it was
            given is fp32 and others are in half; `not_autocast`, autocast would lower it, but is off where it was called, or a policy
            says otherwise; `given_fp32`, all that it was given is fp32, and no list is about it.
        count: How often it ran so.
        seconds: How long that took, on the host; `None` where it was not measured.
        modules: The modules that it ran for, the ones with the most calls first.

    Example:
        >>> KeptOperation(op="aten._softmax.default", phase="forward", reason="listed", count=4, seconds=0.01, modules=("attn",)).reason
        'listed'
    """

    op: str
    phase: Phase
    reason: KeptReason
    count: int
    seconds: float | None
    modules: tuple[str, ...]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class UnderflowSite(AbstractRecord):
    """A place where values that are not zero became zero or subnormal.

    Attributes:
        op: The operation.
        phase: `forward` or `backward`.
        site: Where it was called.
        flushed: How many values.
        elements: Of how many.

    Example:
        >>> site = Site(module="head", file="train.py", line=3)
        >>> UnderflowSite(op="aten.mm.default", phase="backward", site=site, flushed=5, elements=20).share
        0.25
    """

    op: str
    phase: Phase
    site: Site
    flushed: int
    elements: int

    @property
    def share(self) -> float:
        """The share of its values."""
        return self.flushed / self.elements if self.elements else 0.0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Audit(AbstractRecord):
    """What one training step did, forward and backward, without the optimizer.

    An operation counts when it computes: views, and what only makes, moves or draws values, do not, and neither do casts, which are counted
    apart. It runs lowered when what it computes is in half precision.

    Attributes:
        schema: The number of the format.
        torch: The version of torch that ran.
        task: The name of the task.
        precision: The precision or policy, as text.
        target: The device type whose numerics were rehearsed; empty where none were.
        device: Where it ran.
        scale: The loss scale of the step; 1 without loss scaling.
        initial_scale: The loss scale that training begins with.
        loss: The loss.
        operations: How many operations computed floating-point results.
        lowered: How many of them ran lowered.
        seconds: How long all of them took on the host; `None` where it was not measured, and so for the two that follow.
        lowered_seconds: How long those that ran lowered took.
        cast_seconds: How long casts took.
        casts: How many casts between fp32, bf16 and fp16 there were.
        cast_elements: How many elements they wrote.
        elements: How many elements the operations and casts wrote.
        kept: The operations that were computed in fp32, the most costly first.
        underflow: The places where most values became zero or subnormal, at most ten.
        ranges: What modules computed in half precision, the one with the least headroom first.
        origin: The first operation that made something non-finite; `None` where none did.
        scaled_origin: The same for the step at the initial scale, where that overflowed and the step at `scale` did not.

    Example:
        >>> audit = Audit(
        ...     schema=1, torch="2.13.0", task="digits", precision="fp16", target="cuda", device="cpu", scale=1024.0, initial_scale=65536.0,
        ...     loss=2.3, operations=10, lowered=8, seconds=0.02, lowered_seconds=0.015, cast_seconds=0.001, casts=4, cast_elements=100,
        ...     elements=1000, kept=(), underflow=(), ranges=(), origin=None, scaled_origin=None,
        ... )
        >>> audit.has_findings
        False
    """

    schema: int
    torch: str
    task: str
    precision: str
    target: str
    device: str
    scale: float
    initial_scale: float
    loss: float
    operations: int
    lowered: int
    seconds: float | None
    lowered_seconds: float | None
    cast_seconds: float | None
    casts: int
    cast_elements: int
    elements: int
    kept: tuple[KeptOperation, ...]
    underflow: tuple[UnderflowSite, ...]
    ranges: tuple[ModuleRange, ...]
    origin: OpRecord | None
    scaled_origin: OpRecord | None

    @property
    def has_findings(self) -> bool:
        """Whether something is not finite that no loss scale would mend: what an operation computed, or what the step was given."""
        return self.origin is not None or not math.isfinite(self.loss)
