"""A task's first training step, traced."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import torch

from halfstep.audit.readings import computing, is_cast, is_lowered, kept_operations, tightest_ranges, total_seconds, underflow_sites
from halfstep.batch import move_batch
from halfstep.engine import MixedPrecision
from halfstep.errors import ConfigurationError, HalfstepWarning
from halfstep.hardware import parse_device
from halfstep.numerics import Trace, check_target, rehearse, trace
from halfstep.policy import Policy
from halfstep.records import AUDIT_SCHEMA, Audit
from halfstep.scaler import LossScaler
from halfstep.task import BatchStream, TaskFactory, blamed, fresh_task, load_task, task_name

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
    if target is not None:
        check_target(target)
        if device not in ("auto", "cpu"):
            raise ConfigurationError(f"A target is rehearsed on the CPU, so device={device!r} does not go with it. Leave one out.")
    place = torch.device("cpu") if target is not None else parse_device(device)
    policy = _policy(precision).resolve(place)
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


def _policy(given: str | Policy) -> Policy:
    if isinstance(given, Policy):
        return given
    return Policy.load(Path(given)) if given.strip().endswith(".toml") else Policy.parse(given)


def _run(factory: TaskFactory, policy: Policy, *, target: str | None, seed: int, device: torch.device, scale: float) -> _Step:
    dtype = torch.bfloat16 if "bf16" in policy.precisions and "fp16" not in policy.precisions else torch.float16
    with fresh_task(factory, seed=seed, device=device) as made, blamed(f"The step in {policy} failed"), ExitStack() as stack:
        batch = move_batch(next(BatchStream(made.batches)), device=device)
        # The task's own optimizer may be one that only a closure can drive, such as LBFGS. None takes a step here, so any will do.
        trained = [parameter for group in made.optimizer.param_groups for parameter in group["params"]]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HalfstepWarning)  # That fp16 is emulated is no news to who audits it.
            scaler = LossScaler(device.type, init_scale=scale) if "fp16" in policy.precisions else None
            engine = MixedPrecision(made.model, torch.optim.SGD(trained, lr=0.0), policy, scaler=scaler)
        if engine.policy_handle is not None:
            stack.callback(engine.policy_handle.remove)
        rehearsal: AbstractContextManager[Any] = nullcontext() if target is None else rehearse(target, dtype)
        with rehearsal, trace(made.model) as seen:
            with engine.autocast():
                loss = made.loss(made.model, batch)
            engine.backward(loss)
        engine.discard()
        used = 1.0 if engine.scaler is None else engine.scaler.get_scale()
        return _Step(seen=seen, loss=float(loss.detach()), scale=used)


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
