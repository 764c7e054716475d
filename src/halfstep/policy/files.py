"""Policies as TOML files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import tomlkit
from tomlkit.exceptions import TOMLKitError

from halfstep.errors import ConfigurationError, did_you_mean

__all__ = ["PlainPolicy", "read_policy", "toml_text"]

_KEYS: Final = ("default", "pure", "override")
_KINDS: Final = ("module", "class", "op")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PlainPolicy:
    """What stands in a policy file; the values are not checked, only their places and types.

    Attributes:
        default: The default precision.
        pure: Whether it is a pure policy.
        overrides: Kind, pattern and precision of each override.
    """

    default: str
    pure: bool
    overrides: tuple[tuple[Any, str, Any], ...]


def toml_text(*, default: str, pure: bool, overrides: Sequence[tuple[str, str, str]]) -> str:
    """What a policy file holds.

    Example:
        >>> print(toml_text(default="bf16", pure=False, overrides=[("module", "head", "fp32")]), end="")
        default = "bf16"
        <BLANKLINE>
        [[override]]
        module = "head"
        precision = "fp32"
    """
    document = tomlkit.document()
    document["default"] = default
    if pure:
        document["pure"] = True
    tables = tomlkit.aot()
    for kind, pattern, precision in overrides:
        table = tomlkit.table()
        table[kind] = pattern
        table["precision"] = precision
        tables.append(table)
    if overrides:
        document["override"] = tables
    return tomlkit.dumps(document)


def read_policy(path: Path) -> PlainPolicy:
    """Reads a policy file.

    Raises:
        ConfigurationError: It cannot be read, is no TOML, or has other keys or types than a policy.
    """
    try:
        plain: dict[str, Any] = tomlkit.parse(path.read_bytes().decode("utf-8-sig")).unwrap()
    except OSError as error:
        raise ConfigurationError(f"Cannot read the policy {path}: {error.strerror or error}.") from error
    except (TOMLKitError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} is no policy: it is no valid TOML ({error}).") from error
    _check_keys(path, plain, allowed=_KEYS, where="a policy file")
    default, pure, overrides = plain.get("default"), plain.get("pure", False), plain.get("override", [])
    if not isinstance(default, str):
        raise ConfigurationError(f'{path} is no policy: it needs a line such as default = "fp16".')
    if not isinstance(pure, bool):
        raise ConfigurationError(f"{path} is no policy: pure is true or false, not {pure!r}.")
    if not isinstance(overrides, list) or not all(isinstance(each, dict) for each in overrides):
        raise ConfigurationError(f"{path} is no policy: each override is a table that begins with the line [[override]].")
    return PlainPolicy(
        default=default, pure=pure, overrides=tuple(_read_override(path, each, index + 1) for index, each in enumerate(overrides))
    )


def _read_override(path: Path, plain: dict[str, Any], number: int) -> tuple[Any, str, Any]:
    where = f"override {number}"
    _check_keys(path, plain, allowed=(*_KINDS, "precision"), where=where)
    kinds = [kind for kind in _KINDS if kind in plain]
    if len(kinds) != 1 or "precision" not in plain:
        raise ConfigurationError(
            f"{path} is no policy: {where} needs one of the keys module, class and op, and precision; "
            f"it has {', '.join(plain) or 'nothing'}."
        )
    pattern = plain[kinds[0]]
    if not isinstance(pattern, str):
        raise ConfigurationError(f"{path} is no policy: {kinds[0]} of {where} is a string, not {pattern!r}.")
    return kinds[0], pattern, plain["precision"]


def _check_keys(path: Path, plain: dict[str, Any], *, allowed: Sequence[str], where: str) -> None:
    unknown = [key for key in plain if key not in allowed]
    if unknown:
        raise ConfigurationError(
            f"{path} is no policy: {where} has no key {unknown[0]!r}. Allowed are {', '.join(allowed[:-1])} and {allowed[-1]}."
            f"{did_you_mean(unknown[0], known=allowed)}"
        )
