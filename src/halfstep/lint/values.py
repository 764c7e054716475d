"""What an expression of a checked file may be, as far as mixed precision is concerned. Values are told apart by where they are made."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, final

__all__ = [
    "UNKNOWN",
    "Autocast",
    "Constant",
    "Dtype",
    "Made",
    "Network",
    "Optimizer",
    "Routine",
    "Scaler",
    "Scheduler",
    "Unknown",
    "Value",
]


@final
class Unknown:
    """The type of `UNKNOWN`, which stands for a constant that is not one."""

    def __repr__(self) -> str:
        return "UNKNOWN"

    def __bool__(self) -> bool:
        return False


UNKNOWN = Unknown()


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scaler:
    """A gradient scaler.

    Attributes:
        node: The call that makes it; `None` for one that comes from elsewhere and is known by what is done with it.
        name: The full name of its class; empty where it comes from elsewhere.
        arguments: What it is made with, by the names of the parameters.
        enabled: Whether it scales; `None` where that is decided at run time.
        sharded: Whether it is FSDP1's.
        place: The name of the variable or attribute, for one from elsewhere.
    """

    node: ast.Call | None
    name: str = ""
    arguments: Mapping[str, ast.expr] = field(default_factory=dict)
    enabled: bool | None = None
    sharded: bool = False
    place: str = ""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Autocast:
    """An autocast object.

    Attributes:
        node: The call that makes it.
        name: The full name of its class.
        arguments: What it is made with, by the names of the parameters.
        device: The device type; `None` where it is not known.
        dtypes: The types that it may compute in, such as `{"fp16"}`, where all of them are known; otherwise empty.
        shown: The types that it is shown to compute in at times, even if there may be others.
        enabled: Whether it does anything; `None` where that is decided at run time.
    """

    node: ast.Call
    name: str
    arguments: Mapping[str, ast.expr]
    device: str | None
    dtypes: frozenset[str]
    shown: frozenset[str]
    enabled: bool | None


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Optimizer:
    """An optimizer.

    Attributes:
        node: The call that makes it.
        name: Its class without the module, such as `AdamW`.
        arguments: What it is made with: keywords by name, positional ones by number as text.
    """

    node: ast.Call
    name: str
    arguments: Mapping[str, ast.expr]


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scheduler:
    """A learning-rate schedule.

    Attributes:
        node: The call that makes it.
        name: Its class or function without the module, such as `OneCycleLR`.
        optimizer: The expression of its optimizer; `None` where it has none.
    """

    node: ast.Call
    name: str
    optimizer: ast.expr | None


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Network:
    """A module of torch, or of a class in this file.

    Attributes:
        node: The call that makes it.
        name: The full name of its class; just the class's name for one of this file.
        definition: The class, where it is one of this file.
    """

    node: ast.Call
    name: str
    definition: ast.ClassDef | None = None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Dtype:
    """A data type of torch.

    Attributes:
        name: `fp16`, `bf16`, `fp32`, or torch's name for any other.
    """

    name: str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """A literal.

    Attributes:
        value: What it is.
    """

    value: object


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routine:
    """A function, method, lambda or class of this file.

    Attributes:
        node: Its definition.
        bound: Whether its first parameter is filled already, by the object that it is a method of.
    """

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef
    bound: bool = False


# What a call makes.
Made: TypeAlias = Scaler | Autocast | Optimizer | Scheduler | Network
Value: TypeAlias = Made | Dtype | Constant | Routine
