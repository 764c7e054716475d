"""What a policy does to a task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

from halfstep.records.base import AbstractRecord

__all__ = ["EffectivePrecision", "ModulePrecision", "OverrideEffect", "OverrideStatus", "PolicyEffect"]

EffectivePrecision = Literal["fp32", "bf16", "fp16", "caller"]
OverrideStatus = Literal["effective", "absent", "unmatched", "overruled", "uncalled"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ModulePrecision(AbstractRecord):
    """Which precision one module runs in under a policy, and why.

    Attributes:
        path: Such as `decoder.3.attn`; empty for the model itself. Of a module that is shared, the first of its paths.
        kind: The name of its class.
        precision: `fp32`, `bf16` or `fp16`; `caller` for a shared module whose places do not agree: it runs as what calls it.
        reason: The override that decides, as text; `default` where none does.
        direct: Whether that override is about the module itself, and not about one that it is in.
        parameters: The number of elements in its own parameters, without those of the modules in it. A tensor that several modules share
            counts for the first of them.
        calls: How often it was called in one training step, and again to compute it anew under activation checkpointing; `None` where no
            step was run.

    Example:
        >>> ModulePrecision(
        ...     path="head", kind="Linear", precision="fp32", reason="head=fp32", direct=True, parameters=650, calls=1
        ... ).precision
        'fp32'
    """

    path: str
    kind: str
    precision: EffectivePrecision
    reason: str
    direct: bool
    parameters: int
    calls: int | None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OverrideEffect(AbstractRecord):
    """What one override of a policy does.

    Attributes:
        override: The override, as text.
        modules: How many modules it decides about; none for an override of an operation.
        parameters: How many parameters those have.
        ran: How many of those modules were called in one training step; for an override of an operation, how many calls of the operation
            it decided about: those where autocast is on, and not in modules that later overrides are about. `None` where no step was run.
        casts: How many casts it adds to a training step: those of the step with the whole policy, less those of the step without this
            override. Negative where it saves casts, such as those of weights. `None` where no step was run.
        status: `effective`; `absent`, where the model has no module of the class that it names; `unmatched`, where it matches nothing and
            is refused when the policy is applied; `overruled`, where later overrides decide about all that it matches; `uncalled`, where
            nothing of what it decides about was called.
        note: What is wrong with it, as a sentence; empty when nothing is.

    Example:
        >>> effect = OverrideEffect(
        ...     override="head=fp32", modules=1, parameters=650, ran=1, casts=2, status="effective", note=""
        ... )
        >>> effect.is_finding
        False
    """

    override: str
    modules: int
    parameters: int
    ran: int | None
    casts: int | None
    status: OverrideStatus
    note: str

    @property
    def is_finding(self) -> bool:
        """Whether it does nothing, and was hardly meant to: a class that the model does not have is no finding."""
        return self.status in ("unmatched", "overruled", "uncalled")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyEffect(AbstractRecord):
    """What a policy does to a task.

    Attributes:
        schema: The number of the format.
        name: What the policy is called: the stem of its file, or its text.
        policy: The policy, as text.
        default: Its default precision, `auto` resolved.
        pure: Whether everything runs in the default precision, and not only what autocast would lower.
        task: The name of the task; empty where it has none.
        overrides: One for each override, in the order of the policy.
        modules: One for each module of the model, the model itself first.
        casts: Casts between fp32, bf16 and fp16 in one training step, forward and backward; `None` where no step was run.
        cast_elements: The elements that those casts write.
        casts_without: The casts of the same step without any override.

    Example:
        >>> effect = PolicyEffect(
        ...     schema=1, name="islands", policy="bf16; head=fp32", default="bf16", pure=False, task="digits", overrides=(), modules=(),
        ...     casts=14, cast_elements=900, casts_without=12,
        ... )
        >>> effect.findings
        ()
    """

    schema: int
    name: str
    policy: str
    default: str
    pure: bool
    task: str
    overrides: tuple[OverrideEffect, ...]
    modules: tuple[ModulePrecision, ...]
    casts: int | None
    cast_elements: int | None
    casts_without: int | None

    @property
    def findings(self) -> tuple[OverrideEffect, ...]:
        """The overrides that do nothing, and were hardly meant to."""
        return tuple(each for each in self.overrides if each.is_finding)
