"""Arguments that autocast does not have."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import final

from halfstep.lint.devices import device_code, is_device_object
from halfstep.lint.edits import AddArgument, RemoveArgument, ReplaceExpression
from halfstep.lint.module import Module
from halfstep.lint.rules.rule import AbstractRule, Bad, Finding, Fix
from halfstep.lint.signatures import AUTOCASTS

__all__ = ["UnknownAutocastArgument"]

# What people write, and what autocast calls it.
_MEANT: Mapping[str, str] = {
    "device": "device_type",
    "device_name": "device_type",
    "devicetype": "device_type",
    "torch_dtype": "dtype",
    "data_type": "dtype",
    "precision": "dtype",
    "compute_dtype": "dtype",
    "fast_dtype": "dtype",
    "enable": "enabled",
    "is_enabled": "enabled",
    "use_amp": "enabled",
    "cache": "cache_enabled",
    "enable_cache": "cache_enabled",
    "cached": "cache_enabled",
}


@final
class UnknownAutocastArgument(AbstractRule):
    """An argument that autocast refuses: one that it does not have, or a dtype or device object for the device type."""

    code = "HS020"
    name = "unknown_autocast_argument"
    severity = "error"
    summary = "`torch.autocast` does not have this argument; the call raises a TypeError."
    explanation = """
`torch.autocast` takes `device_type`, `dtype`, `enabled` and `cache_enabled`, and nothing else. Any other keyword raises a `TypeError` when
the line runs, which may be late: after the data was loaded, or only when a flag is on. The old `torch.cuda.amp.autocast` takes `enabled`,
`dtype` and `cache_enabled`, and no device.

The device type is a text such as `"cuda"`. A dtype in its place, as in `torch.autocast(torch.float16)`, raises a `ValueError`, and so does
a `torch.device`: pass `device.type`.

The fix gives a keyword its right name, takes away one that means nothing to autocast, and puts the device type first. It is safe where that
follows from the call, and unsafe where the device is a guess, or where an argument that is taken away named a data type.
"""
    bad = (
        Bad(
            code="""import torch


def evaluate(model, images):
    with torch.autocast("cuda", dtype=torch.bfloat16, logits_to_softmax=True):
        return model(images)
""",
            line=5,
            fixed="""import torch


def evaluate(model, images):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return model(images)
""",
        ),
        Bad(
            code="""import torch


def evaluate(model, images):
    with torch.amp.autocast(device="cuda", dtype=torch.bfloat16):
        return model(images)
""",
            line=5,
            fixed="""import torch


def evaluate(model, images):
    with torch.amp.autocast(dtype=torch.bfloat16, device_type="cuda"):
        return model(images)
""",
        ),
        Bad(
            code="""import torch


def evaluate(model, images):
    with torch.autocast(torch.bfloat16):
        return model(images.cuda())
""",
            line=5,
            fixed="""import torch


def evaluate(model, images):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return model(images.cuda())
""",
        ),
        Bad(
            code="""import torch

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def evaluate(model, images):
    with torch.autocast(device_type=device, dtype=torch.bfloat16):
        return model(images.to(device))
""",
            line=7,
            fixed="""import torch

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def evaluate(model, images):
    with torch.autocast(device_type=device.type, dtype=torch.bfloat16):
        return model(images.to(device))
""",
        ),
    )
    good = (
        """import torch


def evaluate(model, images, device):
    with torch.autocast(device_type=device.type, dtype=torch.bfloat16, enabled=True, cache_enabled=False):
        return model(images)
""",
        """import torch


def evaluate(model, images, device):
    with torch.autocast(device, torch.bfloat16):
        return model(images)
""",
        """from accelerate import Accelerator

accelerator = Accelerator()


def evaluate(model, images, handler):
    with accelerator.autocast(autocast_handler=handler):
        return model(images)
""",
        """import torch


def evaluate(model, images, options):
    with torch.autocast("cuda", **options):
        return model(images)
""",
    )

    def check(self, module: Module) -> Iterator[Finding]:
        """Yields the keywords that no autocast of that name has, and what is no device type but stands in its place."""
        if "autocast" not in module.text:
            return
        for call in module.nodes(ast.Call):
            function = _called(call, module)
            names = [name for name in module.names(function) if name in AUTOCASTS]
            if not names or len(names) < len(module.names(function)):
                continue
            parameters = {parameter for name in names for parameter in AUTOCASTS[name]}
            for keyword in call.keywords:
                if keyword.arg is not None and keyword.arg not in parameters:
                    yield _unknown(call, keyword, names[0], module)
            if all(AUTOCASTS[name][0] == "device_type" for name in names):
                yield from _check_device(call, module)


def _called(call: ast.Call, module: Module) -> ast.expr:
    """What a call calls, or prepares to call by `functools.partial`."""
    return call.args[0] if call.args and module.name(call.func) == "functools.partial" else call.func


def _unknown(call: ast.Call, keyword: ast.keyword, name: str, module: Module) -> Finding:
    parameters = AUTOCASTS[name]
    written = str(keyword.arg)
    free = [parameter for parameter in parameters if all(other.arg != parameter for other in call.keywords)]
    close = get_close_matches(written, free, 1, 0.8)
    meant = close[0] if close else _MEANT.get(written, "")
    head = f"`{module.source(_called(call, module))}` has no argument `{written}`: this raises a TypeError."
    if written == "device_type":
        message = f"{head} The old class knows its device; `torch.amp.autocast` takes a device type."
        return Finding(node=keyword, message=message)
    if meant in free:
        return Finding(node=keyword, message=f"{head} Its name is `{meant}`.", fix=_renamed(call, keyword, meant, module))
    message = f"{head} It takes {', '.join(parameters[:-1])} and {parameters[-1]}."
    named_dtype = bool(module.shown_dtypes(keyword.value)) or "dtype" in written
    fix = Fix(edits=(RemoveArgument(call=call, argument=keyword),), safety="unsafe" if named_dtype else "safe")
    return Finding(node=keyword, message=message, fix=fix)


def _renamed(call: ast.Call, keyword: ast.keyword, meant: str, module: Module) -> Fix | None:
    value = module.source(keyword.value)
    if meant == "device_type" and is_device_object(keyword.value, module):
        value += ".type"
    elif meant == "device_type" and not isinstance(module.constant(keyword.value), str):
        value = f"torch.device({value}).type"
    elif meant == "dtype" and (isinstance(module.constant(keyword.value), str) or not module.shown_dtypes(keyword.value)):
        return None  # A text such as "bf16" is no dtype for autocast.
    edits = (RemoveArgument(call=call, argument=keyword), AddArgument(call=call, code=f"{meant}={value}", where="last"))
    return Fix(edits=edits, safety="safe")


def _check_device(call: ast.Call, module: Module) -> Iterator[Finding]:
    keyword = next((keyword for keyword in call.keywords if keyword.arg == "device_type"), None)
    if keyword is not None:
        argument = keyword.value
    elif call.args and not isinstance(call.args[0], ast.Starred) and _called(call, module) is call.func:
        argument = call.args[0]
    else:
        return
    text = module.source(argument)
    head = f'`{module.source(call.func)}` takes a device type such as "cuda" first, and {text} is '
    constant = module.constant(argument)
    if is_device_object(argument, module):
        fix = Fix(edits=(ReplaceExpression(node=argument, code=f"{text}.type"),), safety="safe")
        yield Finding(node=argument, message=f"{head}a torch.device: this raises a ValueError. Pass `{text}.type`.", fix=fix)
    elif isinstance(constant, bool):
        yield _misplaced(call, argument, "enabled", f"{head}a boolean: this raises a ValueError.", module)
    elif not isinstance(constant, str) and module.dtypes(argument):
        yield _misplaced(call, argument, "dtype", f"{head}a dtype: this raises a ValueError.", module)


def _misplaced(call: ast.Call, argument: ast.expr, meant: str, message: str, module: Module) -> Finding:
    """What stands in the place of the device type and has a name of its own."""
    code, safety = device_code(call, module)
    message += f" Write `{module.source(call.func)}({code}, {meant}={module.source(argument)})`."
    if argument not in call.args or len(call.args) > 1 or any(keyword.arg == meant for keyword in call.keywords):
        return Finding(node=argument, message=message)
    edits = (
        ReplaceExpression(node=argument, code=code),
        AddArgument(call=call, code=f"{meant}={module.source(argument)}", where="last"),
    )
    return Finding(node=argument, message=message, fix=Fix(edits=edits, safety=safety))
