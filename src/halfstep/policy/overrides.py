"""One rule of a policy."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final, Literal, cast, final, get_args

from torch import nn

from halfstep._torch import aten_operations, functional_overloads
from halfstep.errors import ConfigurationError, InvalidTypeError, did_you_mean
from halfstep.precision import parse_precision
from halfstep.records import Precision

__all__ = ["Override", "OverrideKind", "class_names"]

OverrideKind = Literal["module", "class", "op"]

_KINDS: Final[tuple[OverrideKind, ...]] = get_args(OverrideKind)

# What stands before a pattern, where the pattern alone does not tell its kind.
_PREFIX: Final = re.compile(rf"({'|'.join(_KINDS)}):")
_OPERATION: Final = re.compile(r"aten(?:\.|::)")
_CLASS: Final = re.compile(r"torch\.")

# A pattern with any of these is written as a JSON string, since the text of a policy means something else by them.
_SPECIAL: Final = re.compile(r'[;="\\\s]|[^\x20-\x7e]')
_QUOTED: Final = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """One rule of a policy: what it is about runs in a precision, forward and backward.

    Attributes:
        kind: What the pattern names: `module`, `class` or `op`.
        pattern: For a module, its path in the model (`decoder.3.attn`); for a class, its name (`torch.nn.LayerNorm`). Both may hold the
            wildcards `*` (anything, dots included), `?` (one character) and `[...]` (one of these). For an op, the name of an aten
            operation (`softmax`, or one overload: `softmax.int`).
        precision: `fp32`, `bf16` or `fp16`.

    Raises:
        InvalidTypeError: The pattern or the precision is no string.
        ConfigurationError: The kind, the precision or the operation is unknown, or the pattern is empty.

    Example:
        >>> str(Override(kind="op", pattern="softmax", precision="fp32"))
        'op:softmax=fp32'
    """

    kind: OverrideKind
    pattern: str
    precision: Precision

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ConfigurationError(f"Unknown kind of override {self.kind!r}. Allowed are module, class and op.")
        if not isinstance(cast("object", self.pattern), str):
            raise InvalidTypeError(f"The pattern of an override is a string, not {self.pattern!r}.")
        if not self.pattern:
            raise ConfigurationError("The pattern of an override is empty. Name a module, a class or an op; * stands for every module.")
        if any("\ud800" <= character <= "\udfff" for character in self.pattern):
            raise ConfigurationError(f"The pattern {self.pattern!r} holds half of a surrogate pair, which no file can. Put ? in its place.")
        parse_precision(self.precision)
        if self.kind == "op":
            object.__setattr__(self, "pattern", _operation(self.pattern))

    @classmethod
    def of(cls, pattern: str | type, precision: str) -> Override:
        """The override that a pattern stands for.

        Args:
            pattern: A class of modules; or a string: `op:softmax` or `aten.softmax` for an operation, `class:package.Name` or
                `torch.nn.Name` for a class, and anything else for the path of a module, which may begin with `module:`.
            precision: `fp32`, `bf16` or `fp16`.

        Example:
            >>> Override.of("decoder.*.attn", "fp32")
            Override(kind='module', pattern='decoder.*.attn', precision='fp32')
            >>> str(Override.of(nn.LayerNorm, "fp32"))
            'torch.nn.LayerNorm=fp32'
        """
        given: Any = pattern
        if isinstance(given, type):
            if not issubclass(given, nn.Module):
                raise InvalidTypeError(f"An override by class takes a class of modules, not {given.__name__}.")
            return cls(kind="class", pattern=class_names(given)[0], precision=parse_precision(precision))
        if not isinstance(given, str):
            raise InvalidTypeError(f"The pattern of an override is a string or a class of modules, not {given!r}.")
        given = given.strip()
        prefix = _PREFIX.match(given)
        kind = cast("OverrideKind", prefix.group(1)) if prefix else _kind_of(given)
        return cls(kind=kind, pattern=given[prefix.end() :].strip() if prefix else given, precision=parse_precision(precision))

    @classmethod
    def parse(cls, text: str) -> Override:
        """The override that a text stands for, as `str` writes it.

        Raises:
            ConfigurationError: It is none.

        Example:
            >>> Override.parse("op:softmax=fp32").kind
            'op'
        """
        outside = _QUOTED.sub(lambda quoted: "_" * len(quoted.group()), text)
        place = outside.rfind("=")
        pattern = text[:place].strip()
        if place < 0 or not pattern:
            raise ConfigurationError(
                f"{text.strip()!r} is no override. An override is written as pattern=precision, such as decoder.*.attn=fp32, "
                "torch.nn.LayerNorm=fp32 or op:softmax=fp32."
            )
        prefix = _PREFIX.match(pattern)
        quoted = pattern[prefix.end() :].strip() if prefix else pattern
        if _QUOTED.fullmatch(quoted):
            kind = cast("OverrideKind", prefix.group(1)) if prefix else "module"
            return cls(kind=kind, pattern=_unquoted(quoted), precision=parse_precision(text[place + 1 :].strip()))
        return cls.of(pattern, text[place + 1 :].strip())

    def __str__(self) -> str:
        quoted = bool(_SPECIAL.search(self.pattern))
        pattern = json.dumps(self.pattern) if quoted else self.pattern
        told = not quoted and not _PREFIX.match(self.pattern) and _kind_of(self.pattern) == self.kind and self.kind != "op"
        return f"{pattern}={self.precision}" if told else f"{self.kind}:{pattern}={self.precision}"

    def matches(self, *, path: str, module_class: type) -> bool:
        """Whether the override is about a module itself; those inside of a module that it is about run as that one does.

        Args:
            path: Of the module, such as `decoder.3.attn`; empty for the model itself.
            module_class: Its class. A class matches by the names of those that it is derived from, too.
        """
        if self.kind == "module":
            return bool(path) and fnmatchcase(path, self.pattern)
        if self.kind == "class":
            return any(fnmatchcase(name, self.pattern) for name in class_names(module_class))
        return False


def class_names(module_class: type) -> tuple[str, ...]:
    """What a class of modules can be called in an override: its name in full, as torch's documentation writes it, and the name alone.

    Those of the classes that it is derived from follow.

    Example:
        >>> class_names(nn.LayerNorm)[:3]
        ('torch.nn.LayerNorm', 'LayerNorm', 'torch.nn.modules.normalization.LayerNorm')
    """
    names: dict[str, None] = {}
    for kind in module_class.__mro__:
        if not issubclass(kind, nn.Module):
            continue
        full = f"{kind.__module__}.{kind.__qualname__}"
        public = f"torch.nn.{kind.__name__}" if full.startswith("torch.nn.modules.") and hasattr(nn, kind.__name__) else full
        names.update(dict.fromkeys((public, kind.__name__, full)))
    return tuple(names)


def _kind_of(pattern: str) -> OverrideKind:
    return "op" if _OPERATION.match(pattern) else "class" if _CLASS.match(pattern) else "module"


def _operation(pattern: str) -> str:
    name = _OPERATION.sub("", pattern.strip(), count=1)
    if functional_overloads(name):
        return name
    operation, _, overload = name.partition(".")
    if overload and functional_overloads(operation):
        raise ConfigurationError(f"The operation aten.{operation} has no overload {overload!r} that autocast could cast.")
    if operation in aten_operations():
        why, known = "which converts tensors, writes to them, returns views of them or takes none: it cannot be cast", []
    else:
        why, known = "which torch does not have", [each for each in sorted(aten_operations()) if functional_overloads(each)]
    raise ConfigurationError(f"The override {pattern!r} names the operation aten.{operation}, {why}.{did_you_mean(operation, known=known)}")


def _unquoted(text: str) -> str:
    try:
        return str(json.loads(text, strict=False))
    except ValueError as error:
        raise ConfigurationError(f"The pattern {text} is no valid JSON string ({error}).") from error
