"""Which calls make a scaler, an autocast region, an optimizer, a schedule or a module, and with what."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Protocol

from halfstep.lint.signatures import AUTOCASTS, DTYPES, OPTIMIZERS, SCALERS, SCHEDULERS, arguments_of
from halfstep.lint.values import Autocast, Constant, Dtype, Made, Network, Optimizer, Scaler, Scheduler, Value

__all__ = ["HasValues", "construct", "dtypes_of", "enabled_of", "may_construct"]


class HasValues(Protocol):
    """What an expression may be."""

    @property
    def values(self) -> tuple[Value, ...]:
        """What it is shown to be at times."""

    @property
    def complete(self) -> bool:
        """Whether it is never anything else."""


def may_construct(name: str) -> bool:
    """Whether a call of a class or function of this full name makes a scaler, an autocast region, an optimizer or a schedule.

    Args:
        name: The name.

    Example:
        >>> may_construct("torch.optim.AdamW"), may_construct("torch.stack")
        (True, False)
    """
    last = name.rpartition(".")[2]
    known = name in SCALERS or name in AUTOCASTS or last in OPTIMIZERS or last in SCHEDULERS
    return known or name.startswith("torch.optim.lr_scheduler")


def construct(call: ast.Call, name: str, evaluate: Callable[[ast.AST], HasValues]) -> Made | None:
    """What a call of a class or function from elsewhere makes; `None` for all that the rules do not know.

    Args:
        call: The call.
        name: The full name of what it calls.
        evaluate: Tells what an argument may be.
    """
    module, _dot, last = name.rpartition(".")
    if name in SCALERS:
        arguments = arguments_of(call, SCALERS[name])
        return Scaler(
            node=call, name=name, arguments=arguments, enabled=enabled_of(arguments, call, evaluate), sharded=last != "GradScaler"
        )
    if name in AUTOCASTS:
        return _autocast(call, name, evaluate)
    if module.startswith("torch.optim.lr_scheduler") or last in SCHEDULERS:
        optimizer = call.args[0] if call.args else next((word.value for word in call.keywords if word.arg == "optimizer"), None)
        return Scheduler(node=call, name=last, optimizer=optimizer)
    if last in OPTIMIZERS and (call.args or call.keywords):
        return Optimizer(node=call, name=last, arguments=arguments_of(call, ("params", "lr")))
    if (module == "torch.nn" or module.startswith("torch.nn.modules")) and last[:1].isupper() and last not in {"Parameter", "DataParallel"}:
        return Network(node=call, name=name)
    return None


def _autocast(call: ast.Call, name: str, evaluate: Callable[[ast.AST], HasValues]) -> Autocast:
    arguments = arguments_of(call, AUTOCASTS[name])
    device = name.split(".")[1] if name.startswith(("torch.cuda.", "torch.cpu.")) else _device_of(arguments, evaluate)
    dtype = arguments.get("dtype")
    if (dtype is None and _names_all(call)) or (isinstance(dtype, ast.Constant) and dtype.value is None):
        default = {"cuda": frozenset(("fp16",)), "cpu": frozenset(("bf16",))}.get(device or "", frozenset[str]())
        known, shown = default, default
    else:
        known, shown = dtypes_of(dtype, evaluate) if dtype is not None else (frozenset(), frozenset())
    enabled = enabled_of(arguments, call, evaluate)
    return Autocast(node=call, name=name, arguments=arguments, device=device, dtypes=known, shown=shown, enabled=enabled)


def _names_all(call: ast.Call) -> bool:
    """Whether a call has neither `*arguments` nor `**keywords`."""
    return all(word.arg is not None for word in call.keywords) and not any(isinstance(part, ast.Starred) for part in call.args)


def _device_of(arguments: Mapping[str, ast.expr], evaluate: Callable[[ast.AST], HasValues]) -> str | None:
    if "device_type" not in arguments:
        return None
    found = evaluate(arguments["device_type"])
    devices = {value.value.partition(":")[0] for value in found.values if isinstance(value, Constant) and isinstance(value.value, str)}
    return devices.pop() if found.complete and len(devices) == 1 else None


def dtypes_of(node: ast.AST, evaluate: Callable[[ast.AST], HasValues]) -> tuple[frozenset[str], frozenset[str]]:
    """The types that an expression may stand for: all of them (empty where that is not known), and those that are shown."""
    found = evaluate(node)
    shown: set[str] = set()
    complete = found.complete
    for value in found.values:
        if isinstance(value, Dtype):
            shown.add(value.name)
        elif isinstance(value, Constant) and isinstance(value.value, str) and value.value in DTYPES:
            shown.add(DTYPES[value.value])
        else:
            complete = False
    return (frozenset(shown) if complete else frozenset()), frozenset(shown)


def enabled_of(arguments: Mapping[str, ast.expr], call: ast.Call, evaluate: Callable[[ast.AST], HasValues]) -> bool | None:
    """Whether a scaler or an autocast region is on; `None` where that is decided at run time."""
    if "enabled" not in arguments:
        return True if _names_all(call) else None
    found = evaluate(arguments["enabled"])
    states = {value.value for value in found.values if isinstance(value, Constant) and isinstance(value.value, bool)}
    return states.pop() if found.complete and len(states) == 1 and len(found.values) == 1 else None
