"""`torch.autocast(...)` without the device type."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import final

from halfstep.lint.devices import device_code
from halfstep.lint.edits import AddArgument, ReplaceExpression
from halfstep.lint.module import Module
from halfstep.lint.rules.rule import AbstractRule, Bad, Finding, Fix

__all__ = ["AutocastWithoutDevice"]

_AUTOCASTS = frozenset(("torch.autocast", "torch.amp.autocast", "torch.amp.autocast_mode.autocast"))
_FIXED = frozenset(("dtype", "enabled", "cache_enabled"))


@final
class AutocastWithoutDevice(AbstractRule):
    """`torch.amp.autocast(enabled=...)`, which lacks its one required argument."""

    code = "HS035"
    name = "autocast_without_device"
    severity = "error"
    summary = "`torch.autocast` needs a device type; without one it raises a TypeError."
    explanation = """
`torch.cuda.amp.autocast()` knew its device. `torch.autocast` and `torch.amp.autocast`, which take its place, must be told:
`torch.amp.autocast(enabled=True)` raises `TypeError: missing 1 required positional argument: 'device_type'`. So does `torch.autocast()`.
`@torch.autocast` without parentheses takes the function for the device type and raises a `ValueError`.

It is easily missed where mixed precision is behind a flag, since the line runs only with the flag on.

Pass the device type: `torch.autocast("cuda", dtype=torch.float16)`, or `torch.autocast(device.type)` where `device` is a `torch.device`.

The fix does so. It is safe where the file knows one kind of device only, or where it has a variable that is shown to be a `torch.device`.
Elsewhere it is a guess, and so it is unsafe.
"""
    bad = (
        Bad(
            code="""import torch


def evaluate(model, images, use_amp):
    with torch.amp.autocast(enabled=use_amp):
        return model(images.cuda())
""",
            line=5,
            fixed="""import torch


def evaluate(model, images, use_amp):
    with torch.amp.autocast("cuda", enabled=use_amp):
        return model(images.cuda())
""",
        ),
        Bad(
            code="""import torch

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def evaluate(model, images):
    with torch.autocast(dtype=torch.bfloat16):
        return model(images.to(device))
""",
            line=7,
            fixed="""import torch

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def evaluate(model, images):
    with torch.autocast(device.type, dtype=torch.bfloat16):
        return model(images.to(device))
""",
        ),
        Bad(
            code="""from torch import nn
from torch.amp import autocast


class Head(nn.Module):
    @autocast(enabled=False)
    def forward(self, x):
        return x.float().cuda()
""",
            line=6,
            fixed="""from torch import nn
from torch.amp import autocast


class Head(nn.Module):
    @autocast("cuda", enabled=False)
    def forward(self, x):
        return x.float().cuda()
""",
        ),
        Bad(
            code="""import torch


@torch.autocast
def evaluate(model, images):
    return model(images)
""",
            line=4,
            fixed="""import torch


@torch.autocast("cuda")
def evaluate(model, images):
    return model(images)
""",
        ),
    )
    good = (
        """import torch


def evaluate(model, images, device, use_amp):
    with torch.autocast(device_type=device, enabled=use_amp):
        return model(images)
""",
        """import torch


def evaluate(model, images, **options):
    with torch.autocast(**options):
        return model(images)
""",
        """from functools import partial

import torch

autocast = partial(torch.autocast, dtype=torch.bfloat16)


def evaluate(model, images):
    with autocast("cuda"):
        return model(images)
""",
        """from accelerate import Accelerator

accelerator = Accelerator()


def evaluate(model, images):
    with accelerator.autocast():
        return model(images)
""",
    )

    def check(self, module: Module) -> Iterator[Finding]:
        """Yields the calls that pass no device type, and the decorators that are no call."""
        if "autocast" not in module.text:
            return
        for call in module.nodes(ast.Call):
            # Arguments that autocast does not have are another rule's: one of them is often the device by a wrong name.
            known = {keyword.arg for keyword in call.keywords} <= _FIXED
            if not call.args and known and _is_autocast(call.func, module):
                code, safety = device_code(call, module)
                yield Finding(
                    node=call,
                    message=(
                        f"`{module.source(call)}` has no device type and raises a TypeError when it runs. Write "
                        f"`{module.source(call.func)}({code}{', ...' if call.keywords else ''})`."
                    ),
                    fix=Fix(edits=(AddArgument(call=call, code=code, where="first"),), safety=safety),
                )
        for function in module.nodes(ast.FunctionDef, ast.AsyncFunctionDef):
            yield from self._check_decorators(function, module)

    def _check_decorators(self, function: ast.AST, module: Module) -> Iterator[Finding]:
        assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for mark in function.decorator_list:
            if _is_autocast(mark, module):
                code, _safety = device_code(function, module)
                yield Finding(
                    node=mark,
                    message=(
                        f"`@{module.source(mark)}` takes `{function.name}` for the device type and raises a ValueError. "
                        f"Write `@{module.source(mark)}({code})`."
                    ),
                    fix=Fix(edits=(ReplaceExpression(node=mark, code=f"{module.source(mark)}({code})"),), safety="unsafe"),
                )


def _is_autocast(node: ast.AST, module: Module) -> bool:
    names = module.names(node)
    return bool(names) and set(names) <= _AUTOCASTS
