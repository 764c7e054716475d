"""Which device a file trains on, as far as it shows."""

from __future__ import annotations

import ast
from typing import Literal

from halfstep.lint.module import Module

__all__ = ["device_code", "device_types", "is_device_object"]

_TYPES = ("cuda", "cpu", "mps", "xpu", "hpu", "xla", "mtia")
# Where a file keeps its device, in the order in which they are looked for.
_PLACES = ("device", "self.device", "args.device", "cfg.device", "config.device")


def device_types(module: Module) -> frozenset[str]:
    """The device types that a file names or uses: by a text such as `"cuda:0"`, by `torch.cuda`, by `.cuda()`."""
    found = {
        constant.value.partition(":")[0]
        for constant in module.nodes(ast.Constant)
        if isinstance(constant.value, str) and constant.value.partition(":")[0] in _TYPES
    }
    for attribute in module.nodes(ast.Attribute):
        if attribute.attr == "cuda":
            found.add("cuda")
    return frozenset(found)


def is_device_object(node: ast.AST, module: Module) -> bool:
    """Whether an expression is shown to be a `torch.device`, and never a text."""
    if isinstance(node, ast.Call):
        return module.name(node.func) == "torch.device"
    bindings = module.bindings(node)
    return bool(bindings) and all(
        binding.kind == "value"
        and not binding.path
        and isinstance(binding.value, ast.Call)
        and module.name(binding.value.func) == "torch.device"
        for binding in bindings
    )


def device_code(node: ast.AST, module: Module) -> tuple[str, Literal["safe", "unsafe"]]:
    r"""What to pass for a device type at a node, and whether the file shows that it is the right one.

    A file that knows one kind of device only means that one. Else its variable for the device is taken. A file that shows nothing gets
    `"cuda"`.

    Example:
        >>> from halfstep.lint.module import parse_module
        >>> module = parse_module("import torch\nmodel.cuda()")
        >>> device_code(module.tree.body[1], module)
        ('"cuda"', 'safe')
    """
    types = device_types(module)
    if len(types) == 1:
        return f'"{next(iter(types))}"', "safe"
    for place in _PLACES:
        spelled = _at(place, node, module)
        if spelled is None:
            continue
        if is_device_object(spelled, module):
            return f"{place}.type", "safe"
        return f"torch.device({place}).type", "unsafe"
    return '"cuda"', "unsafe"


def _at(place: str, node: ast.AST, module: Module) -> ast.expr | None:
    """A use of a place, such as `device`, in the same function as a node or in the file's own code around it."""
    function = module.function(node)
    for read in module.nodes(ast.Name, ast.Attribute):
        if module.key(read) == place and module.function(read) in {function, None} and isinstance(read, ast.Name | ast.Attribute):
            return read
    return None
