"""What is compared: precisions, and policies by their names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from halfstep.coverage import NamedPolicy, describe_policy, told_apart
from halfstep.errors import ConfigurationError, InvalidTypeError
from halfstep.hardware import native_precisions, resolve_precision
from halfstep.policy import Policy
from halfstep.precision import PRECISIONS, parse_precision
from halfstep.records import PolicyEffect, Precision
from halfstep.task import TaskFactory

__all__ = ["line_up", "lowest_precision", "name_policies", "policy_effects"]


def line_up(names: Sequence[str]) -> tuple[Precision, ...]:
    """The precisions that are compared, the baseline first.

    Raises:
        InvalidTypeError: It is no sequence of names.
        ConfigurationError: It is empty, or a name is unknown.

    Example:
        >>> line_up(["bf16"])
        ('fp32', 'bf16')
    """
    if isinstance(names, str):
        raise InvalidTypeError(f"compare(precisions={names!r}) takes a sequence of names, such as {names.split(',')!r}.")
    if not isinstance(cast("object", names), Iterable):
        raise InvalidTypeError(f"compare(precisions=...) takes a sequence of names, such as {list(PRECISIONS)!r}, not {names!r}.")
    names = list(names)
    if not names:
        raise ConfigurationError(f"compare(precisions=...) is empty. Allowed are {', '.join(PRECISIONS)}.")
    parsed = [parse_precision(name) for name in names]
    if "fp32" in parsed:
        parsed.remove("fp32")
    return ("fp32", *parsed)


def name_policies(policies: Sequence[Policy | str | Path], *, besides: Sequence[str]) -> dict[str, Policy]:
    """The policies that are compared, by the names of their columns.

    Args:
        policies: Each as a value, as the path of its file, or as text.
        besides: The names of other columns.

    Raises:
        InvalidTypeError: It is no sequence of policies.
        ConfigurationError: A policy cannot be read, or is called like another column.

    Example:
        >>> list(name_policies(["bf16; head=fp32", "O2"], besides=["fp32"]))
        ['bf16; head=fp32', 'O2']
    """
    given: Any = policies
    if isinstance(given, str | Path | Policy) or not isinstance(given, Iterable):
        raise InvalidTypeError(f"compare(policies=...) takes a sequence of policies, such as ['fp16; head=fp32'], not {given!r}.")
    named: dict[str, Policy] = {}
    for each in told_apart([NamedPolicy.of(each) for each in given]):
        if each.name in named or each.name in besides:
            other = "another policy" if each.name in named else "the precision"
            raise ConfigurationError(
                f"The policy '{each.policy}' would be the column {each.name!r}, like {other}. Columns are named by the stem of a policy's "
                "file, or by its text: leave one out, or save the policy in a file with a name of its own."
            )
        named[each.name] = each.policy
    return named


def policy_effects(policies: dict[str, Policy], factory: TaskFactory, *, seed: int, device: torch.device) -> tuple[PolicyEffect, ...]:
    """What each policy says of a task's model, before anything runs.

    Raises:
        TaskError: The task cannot be made.
        ConfigurationError: An override matches nothing.
    """
    effects = []
    for name, policy in policies.items():
        effect = describe_policy(NamedPolicy(name=name, policy=policy), factory, seed=seed, device=str(device))
        unmatched = next((each for each in effect.overrides if each.status == "unmatched"), None)
        if unmatched is not None:
            raise ConfigurationError(f"The policy {name!r} does not fit the task: {unmatched.override}. {unmatched.note}")
        effects.append(effect)
    return tuple(effects)


def lowest_precision(policy: Policy, *, device: torch.device) -> Precision:
    """The precision that tells how fast a policy can be: one that is below fp32, and if there are two, one that is emulated.

    Example:
        >>> lowest_precision(Policy.parse("fp32; head=bf16"), device=torch.device("cpu"))
        'bf16'
    """
    named = {resolve_precision(each, device=device) for each in policy.precisions}
    lower = [each for each in PRECISIONS if each in named and each != "fp32"]
    native = native_precisions(device)
    return next((each for each in lower if each not in native), lower[0] if lower else "fp32")
