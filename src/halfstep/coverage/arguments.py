"""Policies as people name them: a file, or a text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from halfstep.errors import InvalidTypeError
from halfstep.policy import Policy

__all__ = ["NamedPolicy", "read_policy_argument"]

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


def read_policy_argument(text: str) -> Policy:
    """The policy that a word of a command line stands for.

    Args:
        text: The path of a TOML file; or a policy as text, such as `fp16; head=fp32`, or `O0` to `O3`.

    Raises:
        InvalidTypeError: It is no string.
        ConfigurationError: There is no such file, or it is no policy.

    Example:
        >>> read_policy_argument("O1")
        Policy(default='fp16', overrides=(), pure=False)
        >>> read_policy_argument("nowhere.toml")
        Traceback (most recent call last):
        ...
        halfstep.errors.ConfigurationError: Cannot read the policy nowhere.toml: No such file or directory.
    """
    given: Any = text
    if not isinstance(given, str):
        raise InvalidTypeError(f"A policy is named by the path of a TOML file or by a text such as 'fp16; head=fp32', not by {given!r}.")
    return NamedPolicy.of(given).policy


def _policy_file(text: str) -> Path | None:
    """The file that a text names; `None` where it names none."""
    if text.strip().endswith(".toml"):
        return Path(text.strip())
    try:
        return Path(text) if Path(text).is_file() else None
    except (OSError, ValueError):  # Longer than a name may be, or with a character that no name has.
        return None


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3].rstrip('; ')}..."
