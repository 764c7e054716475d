"""Positional arguments of `ShardedGradScaler`, whose order is not that of `GradScaler`."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import final

from halfstep.lint.edits import AddArgument, Edit, RemoveArgument
from halfstep.lint.module import Module
from halfstep.lint.rules.rule import AbstractRule, Bad, Finding, Fix
from halfstep.lint.signatures import SCALERS

__all__ = ["ShardedScalerPositional"]

_NAMES = frozenset(
    ("torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler", "torch.distributed.fsdp.ShardedGradScaler"),
)
_ORDER = tuple(SCALERS["torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler"])
_DOCUMENTED = ("init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled", "process_group")


@final
class ShardedScalerPositional(AbstractRule):
    """`ShardedGradScaler(...)` with arguments in the order of `GradScaler`."""

    code = "HS026"
    name = "sharded_scaler_positional"
    severity = "error"
    summary = "`ShardedGradScaler` takes the backoff factor before the growth factor, and the device first."
    explanation = """
`ShardedGradScaler` extends `GradScaler`, but its positional arguments come in another order: `(device, init_scale, backoff_factor,
growth_factor, growth_interval, ...)`, where `GradScaler` has `(device, init_scale, growth_factor, backoff_factor, ...)`. Its own
documentation lists the growth factor first and leaves the device out, so that arguments land in the wrong places:

- `ShardedGradScaler("cuda", 2.0**16, 2.0, 0.5)` raises `AssertionError: The growth factor must be > 1.0.`
- `ShardedGradScaler(2.0**14)` takes the number for the device. Nothing is raised, and the scale starts at 65536 and not at 16384.
- `ShardedGradScaler(2.0**14, 2.0, 0.5, 100)` starts at a scale of 2, and multiplies it by 100 when it grows.

Pass all but the device by name. The fix does so. It is safe: it is offered where the values show which is which, and a factor of growth is
above 1, a factor of backoff below.

Arguments that are in the right order, or whose values are not known, are let through.
"""
    bad = (
        Bad(
            code="""from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

scaler = ShardedGradScaler("cuda", 2.0**16, 2.0, 0.5)
""",
            line=3,
            fixed="""from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

scaler = ShardedGradScaler("cuda", init_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5)
""",
        ),
        Bad(
            code="""from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

scaler = ShardedGradScaler(2.0**14)
""",
            line=3,
            fixed="""from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

scaler = ShardedGradScaler(init_scale=2.0**14)
""",
        ),
        Bad(
            code="""from torch.distributed.fsdp import sharded_grad_scaler

scaler = sharded_grad_scaler.ShardedGradScaler(2.0**14, 2.0, 0.5, 100)
""",
            line=3,
            fixed="""from torch.distributed.fsdp import sharded_grad_scaler

scaler = sharded_grad_scaler.ShardedGradScaler(init_scale=2.0**14, growth_factor=2.0, backoff_factor=0.5, growth_interval=100)
""",
        ),
        Bad(
            code="""from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler


def make(cfg):
    return ShardedGradScaler("cuda", cfg.init_scale, cfg.growth_factor, cfg.backoff_factor)
""",
            line=5,
            fixed="""from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler


def make(cfg):
    return ShardedGradScaler("cuda", init_scale=cfg.init_scale, growth_factor=cfg.growth_factor, backoff_factor=cfg.backoff_factor)
""",
        ),
    )
    good = (
        """from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

scaler = ShardedGradScaler("cuda", init_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5)
""",
        """from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

scaler = ShardedGradScaler("cuda", 2.0**16, 0.5, 2.0)
""",
        """from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler


def make(first, second):
    return ShardedGradScaler("cuda", 2.0**16, first, second)
""",
        """from torch.amp import GradScaler

scaler = GradScaler("cuda", 2.0**16, 2.0, 0.5)
""",
    )

    def check(self, module: Module) -> Iterator[Finding]:
        """Yields the calls whose positional arguments are shown to land in the wrong places."""
        if "ShardedGradScaler" not in module.text:
            return
        for call in module.nodes(ast.Call):
            if not call.args or module.name(call.func) not in _NAMES:
                continue
            if any(isinstance(argument, ast.Starred) for argument in call.args):
                continue
            kinds = [_kind(argument, module) for argument in call.args]
            meant = _meant(kinds)
            if meant is not None:
                yield Finding(node=call, message=_message(call, meant, module), fix=_fix(call, kinds, meant, module))


def _kind(argument: ast.expr, module: Module) -> str:
    """What an argument is by its value, or else by its name; empty where neither tells."""
    value = module.constant(argument)
    if isinstance(value, bool):
        return "enabled"
    if isinstance(value, int | float):
        return "backoff_factor" if 0 < value < 1 else "number"
    if isinstance(value, str):
        return "device"
    written = module.key(argument).rpartition(".")[2].lower()
    for word, kind in (
        ("interval", "growth_interval"),
        ("growth", "growth_factor"),
        ("backoff", "backoff_factor"),
        ("scale", "init_scale"),
        ("device", "device"),
    ):
        if word in written:
            return kind
    return ""


def _meant(kinds: list[str]) -> tuple[str, ...] | None:
    """What the arguments are meant for, where that is known and not what they are taken for."""
    if kinds and kinds[0] in ("number", "init_scale"):
        order = _DOCUMENTED if len(kinds) < 3 or kinds[2] in ("backoff_factor", "") else _swapped(_DOCUMENTED, 1)
        return order[: len(kinds)]
    if len(kinds) < 3:
        return None
    growth_first = kinds[2] == "growth_factor" or (len(kinds) > 3 and kinds[3] == "backoff_factor" and kinds[2] == "number")
    return _swapped(_ORDER, 2)[: len(kinds)] if growth_first else None


def _swapped(names: tuple[str, ...], first: int) -> tuple[str, ...]:
    return (*names[:first], names[first + 1], names[first], *names[first + 2 :])


def _message(call: ast.Call, meant: tuple[str, ...], module: Module) -> str:
    text = {name: module.source(argument) for name, argument in zip(meant, call.args, strict=False)}
    taken: Mapping[str, str] = {name: module.source(argument) for name, argument in zip(_ORDER, call.args, strict=False)}
    wrong = [f"{taken[name]} for `{name}`" for name in _ORDER if name in taken and taken[name] != text.get(name)]
    order = "its order is (device, init_scale, backoff_factor, growth_factor, ...), unlike that of `GradScaler`"
    head = f"`ShardedGradScaler` takes {', '.join(wrong)}: {order}."
    return f"{head} Pass them by name: {', '.join(f'{name}={value}' for name, value in text.items() if name != 'device')}."


def _fix(call: ast.Call, kinds: list[str], meant: tuple[str, ...], module: Module) -> Fix | None:
    shown = all(
        kind == name or (kind, name) == ("number", "growth_factor") for kind, name in zip(kinds, meant, strict=True) if "factor" in name
    )
    if not shown or {keyword.arg for keyword in call.keywords} & set(meant):
        return None
    edits: list[Edit] = []
    for name, argument in zip(meant, call.args, strict=True):
        if name != "device":
            edits += [
                RemoveArgument(call=call, argument=argument),
                AddArgument(call=call, code=f"{name}={module.source(argument)}", where="last"),
            ]
    return Fix(edits=tuple(edits), safety="safe")
