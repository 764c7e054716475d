"""A task's first training step, traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, final

import torch

from halfstep.audit.readings import computing, is_cast, is_lowered, kept_operations, tightest_ranges, total_seconds, underflow_sites
from halfstep.coverage import NamedPolicy, rehearsal_of, run_step, settle_device
from halfstep.errors import ConfigurationError
from halfstep.numerics import Trace, trace
from halfstep.policy import Policy
from halfstep.records import AUDIT_SCHEMA, Audit
from halfstep.scaler import LossScaler
from halfstep.task import TaskFactory, fresh_task, load_task, task_name

__all__ = ["audit_task"]

# A loss scale that overflows is lowered as training would lower it, in larger steps: each costs a traced step.
_BACKOFF: Final = 1 / 16
_SMALLEST_SCALE: Final = 1.0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """A traced step."""

    seen: Trace
    loss: float
    scale: float


def audit_task(
    task: str | TaskFactory,
    *,
    precision: str | Policy = "auto",
    target: str | None = None,
    seed: int = 0,
    device: str = "auto",
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> Audit:
    """Looks at a task's first training step, op by op: what runs lowered, what stays in fp32 and why, and how much range is left.

    The forward and the backward pass run under a trace, with the loss scaling that training begins with; no weight changes. Where the
    gradients overflow, the scale is lowered until they do not, as training would lower it.

    Args:
        task: A factory, or its name, such as `train.py:task`.
        precision: `bf16`, `fp16` or `auto`, or a policy: as a value, as text or as the path of a TOML file.
        target: The device type whose numerics are rehearsed on this CPU, such as `cuda`; `None` for what this device computes itself.
        seed: What the task is made from.
        device: `auto`, `cpu`, `cuda` or `cuda:N`; with a target it is the CPU.
        progress: Called as `progress(done, total, what)`.

    Raises:
        ConfigurationError: The precision, the target or the device is not allowed.
        TaskError: The task cannot be made, or its step fails.

    Example:
        >>> from halfstep import Task
        >>> def task(seed: int) -> Task:
        ...     model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
        ...     return Task(
        ...         model=model,
        ...         optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        ...         loss=lambda model, batch: model(batch).square().mean(),
        ...         batches=[torch.ones(2, 4)],
        ...     )
        >>> audit = audit_task(task, precision="fp16", target="cuda")
        >>> {kept.op: kept.reason for kept in audit.kept}["aten.native_layer_norm.default"]
        'listed'
    """
    place = settle_device(device, target=target)
    policy = NamedPolicy.of(precision).policy.resolve(place)
    if all(each == "fp32" for each in policy.precisions):
        raise ConfigurationError(f"{str(policy)!r} lowers nothing: there is nothing to audit. Name bf16, fp16, or a policy that uses one.")
    factory = load_task(task) if isinstance(task, str) else task
    first: _Step | None = None
    scale = LossScaler("cpu").get_scale()
    while True:
        progress(0 if first is None else 1, 2, "a traced step" if first is None else f"again with scale {scale:g}")
        step = _run(factory, policy, target=target, seed=seed, device=place, scale=scale)
        first = first or step
        origin = step.seen.origin
        if origin is None or origin.phase == "forward" or step.scale <= _SMALLEST_SCALE:
            break
        scale = max(step.scale * _BACKOFF, _SMALLEST_SCALE)
    return _audit(step, first, name=task_name(task), policy=policy, target=target, device=place)


def _run(factory: TaskFactory, policy: Policy, *, target: str | None, seed: int, device: torch.device, scale: float) -> _Step:
    rehearsal = rehearsal_of(policy, target=target)
    scaler = LossScaler(device.type, init_scale=scale) if "fp16" in policy.precisions else None
    with fresh_task(factory, seed=seed, device=device) as made:
        seen = trace(made.model)

        @contextmanager
        def within() -> Iterator[None]:
            with rehearsal, seen:
                yield

        loss, used = run_step(made, policy, device=device, within=within(), scaler=scaler, what=f"The step in {policy} failed")
        return _Step(seen=seen, loss=float(loss), scale=used)


def _audit(step: _Step, first: _Step, *, name: str, policy: Policy, target: str | None, device: torch.device) -> Audit:
    ops = step.seen.ops
    counted, casts = computing(ops), [op for op in ops if is_cast(op)]
    lowered = [op for op in counted if is_lowered(op)]
    return Audit(
        schema=AUDIT_SCHEMA,
        torch=torch.__version__,
        task=name,
        precision=str(policy),
        target=target or "",
        device=str(device),
        scale=step.scale,
        initial_scale=first.scale,
        loss=step.loss,
        operations=len(counted),
        lowered=len(lowered),
        seconds=total_seconds(counted),
        lowered_seconds=total_seconds(lowered),
        cast_seconds=total_seconds(casts),
        casts=len(casts),
        cast_elements=sum(op.elements for op in casts),
        elements=sum(op.elements for op in (*counted, *casts)),
        kept=kept_operations(ops, target=None if policy.pure else target or device.type),  # Autocast is off in a pure policy.
        underflow=underflow_sites(ops),
        ranges=tightest_ranges(step.seen.by_module()),
        origin=step.seen.origin,
        scaled_origin=first.seen.origin if step is not first and step.seen.origin is None else None,
    )
