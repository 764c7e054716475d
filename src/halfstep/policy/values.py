"""`Policy`: which precision each module and operation runs in."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, TypeAlias, cast, final

from halfstep.errors import ConfigurationError, InvalidTypeError
from halfstep.files import write_text
from halfstep.hardware import resolve_precision
from halfstep.policy.application import PolicyHandle, attach_policy
from halfstep.policy.files import read_policy, toml_text
from halfstep.policy.overrides import Override
from halfstep.precision import parse_precision
from halfstep.records import Precision

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["DefaultPrecision", "Policy"]

DefaultPrecision: TypeAlias = Precision | Literal["auto"]

# A text that ends where it should: between two overrides, and not within a quoted pattern.
_ITEM: Final = re.compile(r'(?:[^;"]|"(?:[^"\\]|\\.)*")*', re.DOTALL)
_LEVELS: Final = ("O0", "O1", "O2", "O3")


@final
@dataclass(frozen=True, slots=True)
class Policy:
    """Which precision each module and operation of a model runs in: a default, and overrides, of which a later one wins.

    As text, `fp16; decoder.*.attn=fp32; op:softmax=fp32` is fp16 autocast, except that the attention modules of the decoder, with all that
    is in them, and the softmax operation run in fp32, forward and backward. As a file it is TOML.

    Attributes:
        default: `fp32`, `bf16`, `fp16`, or `auto` for the fastest that the device computes in hardware.
        overrides: The exceptions, each one stronger than those before it. See `Override` for what they can name.
        pure: Whether all of the model runs in the default precision, and not only what autocast would lower: inputs and weights are cast to
            it where they are used, and what the model returns is cast to fp32. The weights themselves stay fp32, for the optimizer.
        O0: Apex's level O0, fp32.
        O1: Apex's level O1, fp16 where autocast has it.
        O2: Apex's level O2, a half-precision model with fp32 norms and fp32 master weights.
        O3: Apex's level O3, a half-precision model.

    Raises:
        InvalidTypeError: A value is of the wrong type.
        ConfigurationError: The default is no precision, or `pure` does not go with it or with an override.

    Example:
        >>> policy = Policy.parse("fp16; op:softmax=fp32").override("decoder.*.attn", "fp32")
        >>> str(policy)
        'fp16; op:softmax=fp32; decoder.*.attn=fp32'
        >>> Policy.parse(str(policy)) == policy
        True
    """

    default: DefaultPrecision = "auto"
    overrides: tuple[Override, ...] = ()
    pure: bool = False

    O0: ClassVar[Policy]
    O1: ClassVar[Policy]
    O2: ClassVar[Policy]
    O3: ClassVar[Policy]

    def __post_init__(self) -> None:
        if self.default != "auto":
            parse_precision(self.default, besides=("auto",))
        given: Any = self.overrides
        if not isinstance(given, tuple) or not all(isinstance(each, Override) for each in given):
            raise InvalidTypeError(f"Policy(overrides=...) takes a tuple of Override, not {given!r}. Policy.override adds one.")
        if not isinstance(cast("object", self.pure), bool):
            raise InvalidTypeError(f"Policy(pure=...) takes True or False, not {self.pure!r}.")
        if self.pure and self.default in ("auto", "fp32"):
            raise ConfigurationError(f"A pure policy names its half precision: pure bf16 or pure fp16, not pure {self.default}.")
        operations = [str(each) for each in self.overrides if each.kind == "op"]
        if self.pure and operations:
            raise ConfigurationError(
                f"{operations[0]} cannot be part of a pure policy: it acts through autocast, which is off in one. Override the module "
                "that calls the operation, or leave out `pure`."
            )

    @classmethod
    def parse(cls, text: str) -> Policy:
        """The policy that a text stands for.

        Args:
            text: A default precision, with `pure` before it or not, and overrides, all separated by semicolons; or `O0` to `O3`. A pattern
                that holds a semicolon, an equals sign, a blank or a quotation mark stands in quotation marks, as a JSON string.

        Raises:
            InvalidTypeError: It is no string.
            ConfigurationError: It is no policy; the message says which part is not.

        Example:
            >>> Policy.parse("bf16; torch.nn.LayerNorm=fp32").overrides[0].kind
            'class'
        """
        given: Any = text
        if not isinstance(given, str):
            raise InvalidTypeError(f"A policy is parsed from a string, such as 'fp16; head=fp32', not from {given!r}.")
        if given.strip() in _LEVELS:
            level: Policy = getattr(cls, given.strip())
            return level
        items = _items(given)
        first, *rest = items or [""]
        words = first.split()
        if "=" in first:
            raise ConfigurationError(
                f"The policy {given!r} does not begin with its default precision. A policy is written as default; pattern=precision; ..., "
                "such as fp16; decoder.*.attn=fp32; op:softmax=fp32."
            )
        pure = words[:1] == ["pure"] and len(words) > 1
        name = " ".join(words[1:] if pure else words)
        default: DefaultPrecision = "auto" if name == "auto" else parse_precision(name, besides=("auto",))
        return cls(default=default, overrides=tuple(map(Override.parse, rest)), pure=pure)

    def __str__(self) -> str:
        return "; ".join([f"pure {self.default}" if self.pure else self.default, *map(str, self.overrides)])

    @classmethod
    def load(cls, path: str | Path) -> Policy:
        """The policy in a TOML file.

        Raises:
            ConfigurationError: The file cannot be read, or holds no policy.
        """
        try:
            plain = read_policy(Path(path))
        except ConfigurationError as error:
            as_text = _policy_in(Path(path))
            if as_text is None:
                raise
            raise ConfigurationError(
                f"{path} holds a policy in the form for command lines and Policy.parse, {str(as_text)!r}. A file holds it as TOML:"
                f"\n\n{as_text._toml().rstrip()}"
            ) from error
        try:
            return cls(
                default=cast("DefaultPrecision", plain.default),
                overrides=tuple(Override(kind=kind, pattern=pattern, precision=precision) for kind, pattern, precision in plain.overrides),
                pure=plain.pure,
            )
        except (ConfigurationError, InvalidTypeError) as error:
            raise ConfigurationError(f"{path} is no policy: {error}") from error

    def save(self, path: str | Path) -> Path:
        """Writes the policy into a TOML file, whole or not at all; an old file is replaced.

        Returns:
            The path.

        Raises:
            ConfigurationError: The file cannot be written.
        """
        write_text(Path(path), self._toml())
        return Path(path)

    def _toml(self) -> str:
        overrides = [(each.kind, each.pattern, each.precision) for each in self.overrides]
        return toml_text(default=self.default, pure=self.pure, overrides=overrides)

    def override(self, pattern: str | type[nn.Module], precision: str) -> Policy:
        """A policy with one more override, which is stronger than all others.

        Args:
            pattern: What it is about: the path of a module (`decoder.*.attn`), a class (`torch.nn.LayerNorm`, or the class itself), or an
                operation (`op:softmax`). See `Override.of`.
            precision: `fp32`, `bf16` or `fp16`.

        Example:
            >>> str(Policy.parse("bf16").override("head", "fp32"))
            'bf16; head=fp32'
        """
        return replace(self, overrides=(*self.overrides, Override.of(pattern, precision)))

    @property
    def precisions(self) -> frozenset[DefaultPrecision]:
        """The precisions that it names."""
        return frozenset({self.default, *(each.precision for each in self.overrides)})

    @property
    def resolved(self) -> Precision:
        """The default precision, when it is not `auto`.

        Raises:
            ConfigurationError: It is `auto`.
        """
        if self.default == "auto":
            raise ConfigurationError("The policy's default is auto, which means something else on each device. Call resolve(device) first.")
        return self.default

    def resolve(self, device: torch.device) -> Policy:
        """The same policy, with `auto` replaced by what it means on a device.

        Example:
            >>> import torch
            >>> Policy.parse("auto; head=fp32").resolve(torch.device("cpu")).default in ("bf16", "fp16", "fp32")
            True
        """
        return replace(self, default=resolve_precision(self.default, device=device))

    def apply(self, model: nn.Module) -> PolicyHandle:
        """Has a model run in the precisions of the policy, until the handle that it returns is removed.

        The model's `forward` runs in the default precision, and the modules that an override is about in that one's, whoever calls them and
        whether an autocast region is active or not. What comes out is what the code around can use: where autocast is on, anything, since
        autocast casts what its next operation needs; elsewhere fp32. Overrides of operations hold in all autocast regions of the process.

        Parameters, buffers, state dict and hooks of the model stay as they are. Copies and pickles of it are of the model without the
        policy.

        Args:
            model: The model, bare or wrapped (DistributedDataParallel, fully_shard, torch.compile). Paths are those of the bare model.

        Returns:
            A handle with `remove()`. It is a context manager, too, that removes the policy at its end.

        Raises:
            ConfigurationError: An override is about a module or class that the model does not have, or a policy is applied already.
                Nothing was changed.

        Example:
            >>> from torch import nn
            >>> import torch
            >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            >>> with Policy.parse("bf16; 1=fp32").apply(model), torch.autocast("cpu", dtype=torch.bfloat16):
            ...     model[0](torch.ones(1, 4)).dtype, model(torch.ones(1, 4)).dtype
            (torch.bfloat16, torch.float32)
        """
        return attach_policy(self, model, everywhere=True)


def _policy_in(path: Path) -> Policy | None:
    """The policy that a file holds as text, and not as TOML; `None` if it holds none."""
    try:
        return Policy.parse(path.read_bytes().decode("utf-8-sig"))
    except (OSError, UnicodeDecodeError, ConfigurationError):
        return None


def _items(text: str) -> list[str]:
    """The parts between semicolons that are outside of quotation marks, without empty ones."""
    items, place = [], 0
    while place <= len(text):
        found = _ITEM.match(text, place)
        assert found is not None, text
        if found.end() < len(text) and text[found.end()] != ";":
            raise ConfigurationError(f'The policy {text!r} has a quotation mark that is not closed: {text[found.end() :]!r}. Write "...".')
        items.append(found.group().strip())
        place = found.end() + 1
    return [item for item in items if item]


_NORMS: Final = (
    "torch.nn.modules.batchnorm._NormBase",
    "torch.nn.LayerNorm",
    "torch.nn.GroupNorm",
    "torch.nn.RMSNorm",
)

Policy.O0 = Policy(default="fp32")
Policy.O1 = Policy(default="fp16")
Policy.O2 = Policy(default="fp16", overrides=tuple(Override(kind="class", pattern=name, precision="fp32") for name in _NORMS), pure=True)
Policy.O3 = Policy(default="fp16", pure=True)
