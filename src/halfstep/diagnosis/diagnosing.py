"""`diagnose`: why a task's training breaks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Literal, cast

import torch
from torch import Tensor, nn

from halfstep.coverage import NamedPolicy, rehearsal_of, settle_device
from halfstep.diagnosis.session import TaskSession
from halfstep.diagnosis.trainers import trainer_for
from halfstep.errors import ConfigurationError, InvalidTypeError
from halfstep.policy import Policy
from halfstep.records import Diagnosis
from halfstep.replay import FURTHER, Circumstances, Course, Outcome, StepCode, diagnosis_of, examine_step
from halfstep.scaler import LossScaler
from halfstep.task import TaskFactory, blamed, fresh_task, load_task, task_name

__all__ = ["diagnose"]

_FIRST_SCALE: Final = 65536.0


def diagnose(
    task: str | TaskFactory | Callable[[], Tensor],
    *,
    model: nn.Module | None = None,
    precision: str | Policy = "fp16",
    target: str | None = None,
    max_steps: int = 100,
    loss_scale: Literal["dynamic", "none"] | float = "dynamic",
    seed: int = 0,
    device: str = "auto",
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> Diagnosis:
    """Finds out why training in low precision breaks: which operation, on which line, why, and what helps.

    The task is trained until a step is skipped or is not finite. That step is replayed from the same state: under a trace, in fp32, with
    other loss scales and with parts of the model in fp32. Each cause is told from the others by such an experiment, and a remedy is
    verified when the failing step and three further steps are clean with it. The first step and the last one are looked into although
    they are finite: infinities that later operations hide, lost accuracy, gradients that vanish and updates without an effect show there.

    Args:
        task: A factory, or its name, such as `train.py:task`; with `model`, a function of no arguments that computes the loss of one batch,
            always the same, without an autocast region of its own. The optimizer does not step then.
        model: The model that the function trains.
        precision: `bf16`, `fp16`, `auto` or `fp32`, or a policy: as a value, as text or as the path of a TOML file.
        target: The device type whose numerics are rehearsed on this CPU, such as `cuda`; `None` for what this device computes itself.
        max_steps: So many steps are trained at most.
        loss_scale: The loss scaling of fp16: `dynamic`, `none`, or the first scale.
        seed: What the task is made from.
        device: `auto`, `cpu`, `cuda` or `cuda:N`; with a target it is the CPU. Of a function it is the model's.
        progress: Called as `progress(done, total, what)`.

    Returns:
        What is wrong. After Ctrl-C it is what was known by then.

    Raises:
        InvalidTypeError: An argument is of the wrong type.
        ConfigurationError: An argument has a value that is not allowed.
        TaskError: The task cannot be made, or its step raises.

    Example:
        >>> layer = nn.Linear(4, 4)
        >>> batch = torch.full((2, 4), 1e5)
        >>> diagnosis = diagnose(lambda: layer(batch).square().mean().log(), model=layer, precision="fp16", target="cuda")
        >>> diagnosis.cause, diagnosis.origin.op, diagnosis.verified
        ('forward', 'aten._to_copy.default', True)
    """
    place = _place(target=target, device=device, model=model)
    policy = NamedPolicy.of(precision).policy.resolve(place)
    scale = _first_scale(loss_scale)
    _check_whole("max_steps", max_steps, range(1, 2**63), "at least one step has to be looked at")
    _check_whole("seed", seed, range(2**32), "seeds are 0 to 2**32 - 1")
    given: Any = task
    if model is None:
        factory = load_task(given) if isinstance(given, str) else given
        if not callable(factory):
            raise InvalidTypeError(f"diagnose(task) takes a factory of tasks or the name of one, not a {type(factory).__name__}.")
        if not isinstance(given, str) and not _takes_an_argument(factory):
            raise ConfigurationError(
                "diagnose(fn) was given a function of no arguments. A factory of tasks takes a seed; for a function that computes a loss, "
                "name the model as well: diagnose(fn, model=model)."
            )
        return _diagnose_task(
            factory,
            name=task_name(given),
            policy=policy,
            target=target,
            max_steps=max_steps,
            scale=scale,
            seed=seed,
            device=place,
            progress=progress,
        )
    if not callable(given):
        raise InvalidTypeError(f"diagnose(fn, model=...) takes a function of no arguments that computes a loss, not {given!r}.")
    return _diagnose_function(
        given, model=model, policy=policy, target=target, scale=scale, device=place, progress=lambda what: progress(0, 1, what)
    )


def _diagnose_task(
    factory: TaskFactory,
    *,
    name: str,
    policy: Policy,
    target: str | None,
    max_steps: int,
    scale: float | None,
    seed: int,
    device: torch.device,
    progress: Callable[[int, int, str], None],
) -> Diagnosis:
    interrupted = False
    with fresh_task(factory, seed=seed, device=device) as made, rehearsal_of(policy, target=target):
        with blamed("The task could not be trained"):
            trainer = trainer_for(made, policy, loss_scale=scale)
        session = TaskSession(
            made, trainer, policy=policy, device=device, progress=lambda step, what: progress(step - 1, max_steps, f"step {step}: {what}")
        )
        try:
            session.train(max_steps)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            trainer.close()
        return diagnosis_of(
            session.outcome or Outcome.nothing(step=session.steps, scale=trainer.scale),
            task=name,
            policy=policy,
            target=target or "",
            device=device,
            steps=session.steps,
            skips=session.skips,
            interrupted=interrupted,
        )


def _diagnose_function(
    fn: Callable[[], Tensor],
    *,
    model: nn.Module,
    policy: Policy,
    target: str | None,
    scale: float | None,
    device: torch.device,
    progress: Callable[[str], None],
) -> Diagnosis:
    code = StepCode(model=model, parts=[(fn, 1.0)])
    course = Course(following=[code] * FURTHER, optimizers=())
    first = 1.0 if scale is None or "fp16" not in policy.precisions else scale
    found: Outcome | None = None
    interrupted = False
    with rehearsal_of(policy, target=target), blamed("The function failed"), suppress(KeyboardInterrupt):
        interrupted = True
        while True:
            circumstances = Circumstances(policy=policy, scale=first, floor=min(first, 1.0), has_failed=None, course=course)
            outcome = examine_step(code, device=device, circumstances=circumstances, progress=progress)
            passing = outcome.finding.passing_scale
            if found is None or outcome.finding.is_fault:
                found = outcome
            if outcome.finding.cause != "scale" or passing is None or passing >= first:
                interrupted = False
                break
            first = passing
    return diagnosis_of(
        found or Outcome.nothing(step=1, scale=first),
        task=task_name(cast("Any", fn)),
        policy=policy,
        target=target or "",
        device=device,
        steps=1,
        skips=0 if found is None else int(not found.evidence[0].is_clean),
        interrupted=interrupted,
    )


def _takes_an_argument(function: Any) -> bool:
    try:
        inspect.signature(function).bind(0)
    except TypeError:
        return False
    except ValueError:  # Some built-in functions do not tell.
        return True
    return True


def _place(*, target: str | None, device: str, model: nn.Module | None) -> torch.device:
    settled = settle_device(device, target=target)
    if model is None:
        return settled
    given: Any = model
    if not isinstance(given, nn.Module):
        raise InvalidTypeError(f"diagnose(model=...) takes a torch.nn.Module, not a {type(given).__name__}.")
    place = next((each.device for each in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    if target is not None and place.type != "cpu":
        raise ConfigurationError(f"A target is rehearsed on the CPU, but the model is on {place}. Leave the target out, or move the model.")
    return place


def _first_scale(loss_scale: object) -> float | None:
    """The first loss scale; `None` for no loss scaling."""
    if loss_scale == "none":
        return None
    if loss_scale == "dynamic":
        return _FIRST_SCALE
    if isinstance(loss_scale, bool) or not isinstance(loss_scale, int | float):
        raise InvalidTypeError(f"diagnose(loss_scale=...) takes 'dynamic', 'none' or the first scale, not {loss_scale!r}.")
    return LossScaler("cpu", init_scale=float(loss_scale), min_scale=0.0).get_scale()


def _check_whole(name: str, value: object, allowed: range, rule: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidTypeError(f"diagnose({name}=...) takes a whole number, not {value!r}.")
    if value not in allowed:
        raise ConfigurationError(f"diagnose({name}={value}): {rule}.")
