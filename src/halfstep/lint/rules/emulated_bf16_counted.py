"""`torch.cuda.is_bf16_supported()`, which is also true where bf16 is emulated."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import final

from halfstep.lint.edits import AddArgument
from halfstep.lint.module import Module
from halfstep.lint.rules.rule import AbstractRule, Bad, Finding, Fix

__all__ = ["EmulatedBf16Counted"]

_CAPABILITY = frozenset({"torch.cuda.get_device_capability", "torch.cuda.get_device_properties", "torch.cuda.get_device_name"})
# What shows or logs the answer decides nothing by it, and a test may well run on emulation.


@final
class EmulatedBf16Counted(AbstractRule):
    """`is_bf16_supported()` decides, although it counts emulation."""

    code = "HS021"
    name = "emulated_bf16_counted"
    severity = "warning"
    summary = "`torch.cuda.is_bf16_supported()` is also true on GPUs that only emulate bf16."
    explanation = """
`torch.cuda.is_bf16_supported()` asks whether the GPU can hold bf16, not whether it has units that compute in it. By default it counts
emulation, and so it is `True` on a T4 (compute capability 7.5) and on a V100 (7.0). A script that chooses its precision by that answer
picks bf16 there, and each matrix product is computed in fp32 with casts around it: slower than fp32, where fp16 has Tensor Cores.

Ask for the hardware: `torch.cuda.is_bf16_supported(including_emulation=False)`, which is `True` from compute capability 8.0 (A100, RTX 30)
and on AMD GPUs. Comparing `torch.cuda.get_device_capability()` with `(8, 0)` does the same on NVIDIA's.

The fix adds the argument. It is safe: on a GPU with bf16 units nothing changes, and elsewhere the other branch of the script runs, as it
was meant to. Without such a branch, look for one: fp16 needs a `GradScaler`.

Nothing is said where the compute capability is asked for as well, or where the answer is only printed.
"""
    bad = (
        Bad(
            code="""import torch

dtype = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
""",
            line=3,
            fixed="""import torch

dtype = torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
""",
        ),
        Bad(
            code="""from torch import cuda


def precision():
    if cuda.is_available() and cuda.is_bf16_supported():
        return "bf16"
    return "fp32"
""",
            line=5,
            fixed="""from torch import cuda


def precision():
    if cuda.is_available() and cuda.is_bf16_supported(including_emulation=False):
        return "bf16"
    return "fp32"
""",
        ),
        Bad(
            code="""from torch.cuda import is_bf16_supported

use_scaler = not is_bf16_supported()
""",
            line=3,
            fixed="""from torch.cuda import is_bf16_supported

use_scaler = not is_bf16_supported(including_emulation=False)
""",
        ),
    )
    good = (
        """import torch

dtype = torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
""",
        """import torch

if torch.cuda.is_bf16_supported() and torch.cuda.get_device_capability()[0] >= 8:
    dtype = torch.bfloat16
else:
    dtype = torch.float16
""",
        """import torch

major, minor = torch.cuda.get_device_capability()
if major >= 8:
    if torch.cuda.is_bf16_supported():
        dtype = torch.bfloat16
""",
        """import torch

holds, computes = torch.cuda.is_bf16_supported(), torch.cuda.is_bf16_supported(including_emulation=False)
print("emulated" if holds and not computes else computes)
""",
        """import torch

if not torch.cuda.is_bf16_supported():
    raise RuntimeError("bfloat16 is not possible here.")
""",
        """import torch


class Device:
    def is_bf16_supported(self):
        return False


dtype = torch.bfloat16 if Device().is_bf16_supported() else torch.float16
""",
    )

    def check(self, module: Module) -> Iterator[Finding]:
        """Yields the calls without an argument that decide something by themselves."""
        if "is_bf16_supported" not in module.text:
            return
        for call in module.nodes(ast.Call):
            if module.name(call.func) != "torch.cuda.is_bf16_supported" or call.args or call.keywords:
                continue
            if (
                _is_compared(call, module)
                or _skips_test(call, module)
                or _asks_whether_possible(call, module)
                or _has_capability_check(call, module)
            ):
                continue
            yield Finding(
                node=call,
                message=(
                    f"`{module.source(call)}` counts emulation: it is True on a T4 or V100 too, which have no bf16 units and run bf16 "
                    "slower than fp32. Ask with `including_emulation=False`."
                ),
                fix=Fix(edits=(AddArgument(call=call, code="including_emulation=False", where="last"),), safety="safe"),
            )


def _skips_test(call: ast.Call, module: Module) -> bool:
    """Whether the answer decides whether a test runs: emulation is good enough for that."""
    return any(
        isinstance(holder, ast.Call) and module.source(holder.func).rpartition(".")[2] in ("skipif", "skipIf", "skipUnless")
        for holder, _part in module.syntax.ancestors(call)
    )


def _asks_whether_possible(call: ast.Call, module: Module) -> bool:
    """Whether the answer only decides on giving up: what is emulated is possible."""
    statement = module.statement(call)
    if isinstance(statement, ast.Assert):
        return True
    return isinstance(statement, ast.If) and not statement.orelse and all(isinstance(part, ast.Raise) for part in statement.body)


def _is_compared(call: ast.Call, module: Module) -> bool:
    """Whether the same statement asks without emulation, too: somebody knows the difference."""
    statement = module.statement(call)
    return any(
        isinstance(other, ast.Call) and other.keywords and module.name(other.func) == "torch.cuda.is_bf16_supported"
        for other in ast.walk(statement)
    )


def _has_capability_check(call: ast.Call, module: Module) -> bool:
    """Whether the answer counts only together with a look at the GPU's compute capability."""
    child: ast.AST = call
    node = module.parent(call)
    while node is not None:
        if isinstance(node, ast.BoolOp) and any(_asks_capability(part, module) for part in node.values if part is not child):
            return True
        if isinstance(node, ast.If | ast.IfExp | ast.While) and child is not node.test and _asks_capability(node.test, module):
            return True
        child, node = node, module.parent(node)
    return False


def _asks_capability(test: ast.expr, module: Module) -> bool:
    names = {module.name(part) for part in ast.walk(test) if isinstance(part, ast.Name | ast.Attribute)}
    if names & _CAPABILITY:
        return True
    read = {part.id for part in ast.walk(test) if isinstance(part, ast.Name)}
    return bool(read & _capability_variables(module))


def _capability_variables(module: Module) -> set[str]:
    """The variables that hold something of the GPU's compute capability."""
    found: set[str] = set()
    for assignment in module.nodes(ast.Assign):
        if any(isinstance(part, ast.Call) and module.name(part.func) in _CAPABILITY for part in ast.walk(assignment.value)):
            found |= {part.id for target in assignment.targets for part in ast.walk(target) if isinstance(part, ast.Name)}
    return found
