"""`policy_effect`: what a policy does to a task, measured in single steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch

from halfstep.coverage.arguments import NamedPolicy
from halfstep.coverage.readings import Reading, read
from halfstep.coverage.steps import OperationCalls, StepCounts, count_operations, watch_step
from halfstep.errors import ConfigurationError, InvalidTypeError
from halfstep.hardware import parse_device
from halfstep.policy import Policy
from halfstep.records import SCHEMA, OverrideEffect, PolicyEffect
from halfstep.task import TaskFactory, fresh_task, load_task, task_name

__all__ = ["Progress", "describe_policy", "policy_effect"]

Progress: TypeAlias = Callable[[int, int, str], None]


def _quiet(done: int, total: int, what: str) -> None:
    """Tells nobody."""


def policy_effect(
    policy: Policy | str | Path, task: str | TaskFactory, *, seed: int = 0, device: str = "cpu", progress: Progress = _quiet
) -> PolicyEffect:
    """What a policy does to a task: which precision each module runs in and why, what each override is about, and the casts it adds.

    One training step, forward and backward, runs under the policy; then the same step without each of its overrides in turn, and without
    any. Each is made anew from the same seed. The casts that an override adds are those of the step with it, less those without it. Islands
    that touch each other share casts, so these numbers need not add up to what all overrides together add.

    An override that matches nothing is no error here: it is left out, and what it says is that it matches nothing.

    Args:
        policy: The policy; or the path of its file, or its text.
        task: A task's name, `path/to/file.py:factory` or `package.module:factory`, or the factory itself.
        seed: What the task is made from.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        progress: Called as `progress(done, total, what)` before each step.

    Raises:
        TaskError: The task cannot be found, made or run.
        ConfigurationError: An argument has a value that is not allowed, or the policy cannot be read.
        InvalidTypeError: An argument is of the wrong type.

    Example:
        >>> import halfstep
        >>> def task(seed: int) -> "halfstep.Task":
        ...     model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     return halfstep.Task(model=model, optimizer=optimizer, loss=lambda m, x: m(x).square().mean(), batches=[torch.randn(4, 8)])
        >>> effect = policy_effect("bf16; 1=fp32", task)
        >>> [module.precision for module in effect.modules], effect.overrides[0].casts
        (['bf16', 'bf16', 'fp32', 'bf16'], 4)
    """
    named, factory, place = NamedPolicy.of(policy), _factory(task), parse_device(device)
    _check_seed(seed)
    progress(0, 1, "the whole policy")
    with fresh_task(factory, seed=seed, device=place) as made:
        reading = read(named.policy, made.model, device=place)
        known = {reading.policy: watch_step(made, reading.policy, device=place)}
    missing = {smaller: what for what, smaller in _reduced(reading) if smaller not in known}
    has_operations = any(each.kind == "op" for each in reading.policy.overrides)
    total = 1 + len(missing) + has_operations
    for done, (smaller, what) in enumerate(missing.items(), start=1):
        progress(done, total, what)
        with fresh_task(factory, seed=seed, device=place) as made:
            known[smaller] = watch_step(made, smaller, device=place)
    operations: dict[int, OperationCalls] = {}
    if has_operations:
        progress(total - 1, total, "calls of operations")
        with fresh_task(factory, seed=seed, device=place) as made:
            operations = count_operations(made, reading.policy, device=place)
    whole = known[reading.policy]
    effect = _unmeasured(named, reading, task=task_name(task))
    overrides = (_measured(each, index, reading=reading, known=known, operations=operations) for index, each in enumerate(effect.overrides))
    return replace(
        effect,
        overrides=tuple(overrides),
        modules=tuple(replace(module, calls=calls) for module, calls in zip(effect.modules, whole.calls, strict=True)),
        casts=whole.casts,
        cast_elements=whole.elements,
        casts_without=known[_bare(reading.policy)].casts,
    )


def describe_policy(policy: NamedPolicy, task: str | TaskFactory, *, seed: int = 0, device: str = "cpu") -> PolicyEffect:
    """What a policy says of a task's model, without a step: nothing is known of calls and casts.

    Raises:
        TaskError: The task cannot be found or made.
        ConfigurationError: An argument has a value that is not allowed.
        InvalidTypeError: An argument is of the wrong type.

    Example:
        >>> import halfstep
        >>> def task(seed: int) -> "halfstep.Task":
        ...     model = torch.nn.Linear(8, 1)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     return halfstep.Task(model=model, optimizer=optimizer, loss=lambda m, x: m(x).mean(), batches=[torch.randn(4, 8)])
        >>> effect = describe_policy(NamedPolicy.of("bf16"), task)
        >>> effect.modules[0].precision, effect.casts is None
        ('bf16', True)
    """
    factory, place = _factory(task), parse_device(device)
    with fresh_task(factory, seed=seed, device=torch.device("cpu")) as made:
        return _unmeasured(policy, read(policy.policy, made.model, device=place), task=task_name(task))


def _factory(task: str | TaskFactory) -> TaskFactory:
    factory = load_task(task) if isinstance(task, str) else task
    if not callable(factory):
        raise InvalidTypeError(f"A task is named by a string, or is a factory that makes one from a seed, not a {type(task).__name__}.")
    return factory


def _check_seed(seed: int) -> None:
    given: Any = seed
    if isinstance(given, bool) or not isinstance(given, int):
        raise InvalidTypeError(f"A seed is a whole number, not {given!r}.")
    if not 0 <= given < 2**32:
        raise ConfigurationError(f"A seed is a whole number from 0 to 2**32 - 1, not {given}.")


def _unmeasured(named: NamedPolicy, reading: Reading, *, task: str) -> PolicyEffect:
    return PolicyEffect(
        schema=SCHEMA,
        name=named.name,
        policy=str(named.policy),
        default=reading.policy.resolved,
        pure=named.policy.pure,
        task=task,
        overrides=reading.overrides,
        modules=reading.modules,
        casts=None,
        cast_elements=None,
        casts_without=None,
    )


def _bare(policy: Policy) -> Policy:
    return replace(policy, overrides=())


def _without(reading: Reading, index: int) -> Policy:
    """The policy that is applied, without the override of an index in the policy that was given."""
    kept = zip(reading.kept, reading.policy.overrides, strict=True)
    return replace(reading.policy, overrides=tuple(each for place, each in kept if place != index))


def _decides(effect: OverrideEffect) -> bool:
    return effect.status == "effective"


def _reduced(reading: Reading) -> list[tuple[str, Policy]]:
    """The policies whose steps are compared with that of the whole one, each with what is said of it while it runs."""
    smaller = [(f"without {each.override}", _without(reading, index)) for index, each in enumerate(reading.overrides) if _decides(each)]
    return [*smaller, ("without any override", _bare(reading.policy))]


def _measured(
    effect: OverrideEffect, index: int, *, reading: Reading, known: dict[Policy, StepCounts], operations: dict[int, OperationCalls]
) -> OverrideEffect:
    if not _decides(effect):
        return replace(effect, ran=0, casts=0)
    whole = known[reading.policy]
    added = whole.casts - known[_without(reading, index)].casts
    applied = reading.kept.index(index)
    if reading.policy.overrides[applied].kind == "op":
        ran, note = operations[applied].decided, _never_decided(operations[applied])
    else:
        decided = [place for place, decider in enumerate(reading.deciders) if decider == index]
        ran = sum(whole.calls[place] > 0 for place in decided)
        note = _never_called(reading, whole, decided=decided)
    return replace(effect, ran=ran, casts=added, status="effective" if ran else "uncalled", note="" if ran else note)


def _never_decided(calls: OperationCalls) -> str:
    """Why an override of an operation without an effect has none."""
    if calls.met:
        return "The operation was called only in modules that later overrides are about. Put it after those to override it there, too."
    return "The operation was not called where autocast is on."


def _never_called(reading: Reading, whole: StepCounts, *, decided: list[int]) -> str:
    """Why an override without an effect has none, with what to override instead."""
    called = {module.path for module, calls in zip(reading.modules, whole.calls, strict=True) if calls}
    paths = [reading.modules[place].path for place in decided if reading.modules[place].direct]
    around = next((parent for parent in (path.rpartition(".")[0] for path in paths) if parent in called and parent), None)
    plural = len(decided) > 1
    said = "None of its modules was called in the step" if plural else "Its module was not called in the step"
    if around is None:
        return f"{said}."
    using = f"; {around}, which {'they are' if plural else 'it is'} in, was, and may use {'their' if plural else 'its'} weights by itself"
    return f"{said}{using}. Override that one."
