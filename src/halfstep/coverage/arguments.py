"""Policies as people name them: a file, or a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, final

import torch

from halfstep.errors import ConfigurationError, InvalidTypeError
from halfstep.hardware import parse_device
from halfstep.numerics import check_target, rehearse
from halfstep.policy import Policy
from halfstep.precision import rehearsed_dtype

__all__ = ["NamedPolicy", "check_policy_first", "rehearsal_of", "settle_device", "told_apart"]

_LEVELS: Final = ("O0", "O1", "O2", "O3")

# A column of a table must hold it.
_LONGEST: Final = 28


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NamedPolicy:
    """A policy and what it is called.

    Attributes:
        name: The stem of its file, or its text, shortened where it is long.
        policy: The policy.

    Example:
        >>> NamedPolicy.of("fp16; decoder.*.attn=fp32; op:softmax=fp32").name
        'fp16; decoder.*.attn=fp32...'
    """

    name: str
    policy: Policy

    @classmethod
    def of(cls, given: Policy | str | Path) -> NamedPolicy:
        """The policy that was passed, or that a path or a text stands for, with its name.

        Raises:
            InvalidTypeError: It is none of these.
            ConfigurationError: The file cannot be read, or it is no policy.
        """
        value: Any = given
        if isinstance(value, Policy):
            return cls(name=_shortened(str(value)), policy=value)
        if isinstance(value, Path):
            return cls(name=value.stem, policy=Policy.load(value))
        if isinstance(value, str):
            file = _policy_file(value)
            if file is not None:
                return cls.of(file)
            policy, text = Policy.parse(value), value.strip()
            return cls(name=text if text in _LEVELS else _shortened(str(policy)), policy=policy)
        raise InvalidTypeError(
            f"A policy is a halfstep.Policy, the path of a TOML file, or a text such as 'fp16; head=fp32', not {value!r}."
        )

    @property
    def is_shortened(self) -> bool:
        """Whether its name is the beginning of its text."""
        text = str(self.policy)
        return self.name != text and self.name == _shortened(text)


def settle_device(device: str, *, target: str | None) -> torch.device:
    """Where a task runs: on the CPU where a target is rehearsed, and where it was asked to elsewhere.

    Args:
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        target: The device type whose numerics are rehearsed; `None` for those of the device itself.

    Raises:
        ConfigurationError: The target or the device is not allowed, or they do not go together.

    Example:
        >>> settle_device("auto", target="cuda")
        device(type='cpu')
    """
    if target is None:
        return parse_device(device)
    check_target(target)
    if device not in ("auto", "cpu"):
        raise ConfigurationError(f"A target is rehearsed on the CPU, so device={device!r} does not go with it. Leave one out.")
    return torch.device("cpu")


def rehearsal_of(policy: Policy, *, target: str | None) -> AbstractContextManager[Any]:
    """The rehearsal of a target in which a policy is looked at; nothing where there is no target."""
    return nullcontext() if target is None else rehearse(target, rehearsed_dtype(policy.precisions))


def told_apart(policies: Sequence[NamedPolicy]) -> list[NamedPolicy]:
    """The same policies, with other names for texts that begin alike: with their ends, where those differ, or else with their places.

    Example:
        >>> texts = ("bf16; decoder.attention_block_0=fp32", "bf16; decoder.attention_block_1=fp32")
        >>> [each.name for each in told_apart([NamedPolicy.of(text) for text in texts])]
        ['bf16; deco...on_block_0=fp32', 'bf16; deco...on_block_1=fp32']
    """
    told = list(policies)
    first = {each.policy: place for place, each in reversed(list(enumerate(policies, start=1)))}
    renamed: tuple[Callable[[Policy], str], ...] = (
        lambda policy: _without_its_middle(str(policy)),
        lambda policy: f"{_shortened(str(policy), longest=_LONGEST - 5)} ({first[policy]})",
    )
    for rename in renamed:
        # Each as often as there are different policies that go by it.
        names = [name for name, _ in {(each.name, each.policy) for each in told}]
        told = [
            replace(now, name=rename(now.policy)) if given.is_shortened and names.count(now.name) > 1 else now
            for given, now in zip(policies, told, strict=True)
        ]
    return told


def check_policy_first(policy: str, task: str) -> None:
    """Accepts the two words of a command line in their order. Where neither is a policy, that is told by whoever reads them.

    Raises:
        ConfigurationError: The policy is none, but the task is.

    Example:
        >>> check_policy_first("train.py:task", "bf16")
        Traceback (most recent call last):
        ...
        halfstep.errors.ConfigurationError: 'train.py:task' is no policy, but 'bf16' is one: the policy comes first, then the task.
    """
    if not _is_policy(policy) and _is_policy(task):
        raise ConfigurationError(f"{policy!r} is no policy, but {task!r} is one: the policy comes first, then the task.")


def _policy_file(text: str) -> Path | None:
    """The file that a text names; `None` where it names none."""
    if text.strip().endswith(".toml"):
        return Path(text.strip())
    try:
        return Path(text) if Path(text).is_file() else None
    except (OSError, ValueError):  # Longer than a name may be, or with a character that no name has.
        return None


def _is_policy(text: str) -> bool:
    try:
        NamedPolicy.of(text)
    except ConfigurationError:
        return False
    return True


def _shortened(text: str, *, longest: int = _LONGEST) -> str:
    return text if len(text) <= longest else f"{text[: longest - 3].rstrip('; ')}..."


def _without_its_middle(text: str) -> str:
    return f"{text[:10].rstrip('; ')}...{text[10 + 3 - _LONGEST :].lstrip('; ')}"
