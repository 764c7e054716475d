"""Which part of a model to run in fp32: the smallest that holds what broke, and larger ones."""

from __future__ import annotations

from collections.abc import Sequence
from glob import escape
from itertools import takewhile
from typing import Final, final

from torch import nn

from halfstep.errors import ConfigurationError
from halfstep.numerics import kind_of_pass
from halfstep.policy import Override, Policy, module_paths
from halfstep.records import OpRecord, bare_name

__all__ = ["Islands"]

# What code calls by another name than the kernel has that runs in the end.
_CALLED: Final = {
    "mm": ("matmul", "mm", "linear"),
    "bmm": ("matmul", "bmm", "baddbmm"),
    "mv": ("matmul", "mv"),
    "dot": ("matmul", "dot"),
    "addmm": ("linear", "addmm"),
    "convolution": ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    "mkldnn_convolution": ("conv1d", "conv2d", "conv3d"),
    "_softmax": ("softmax",),
    "_log_softmax": ("log_softmax",),
}


# What makes values out of nothing has no precision to keep.
_VALUELESS: Final = frozenset({"makes", "draws", "converts"})


@final
class Islands:
    """The overrides that put an operation and what broke after it into fp32, the smallest first.

    Args:
        model: The model, whose modules overrides may name.
        policy: What it runs in. Overrides of operations are no part of a pure policy.

    Example:
        >>> import torch
        >>> from halfstep.numerics import trace
        >>> model = nn.Sequential(nn.Sequential(nn.Linear(1, 1), nn.ReLU()))
        >>> with trace(model) as seen:
        ...     result = model(torch.ones(1, 1))
        >>> linear, relu = [op for op in seen.ops if op.site.module.startswith("0.") and op.absmax is not None]
        >>> islands = Islands(model, policy=Policy.parse("fp16"))
        >>> Islands.text(islands.cover([linear])), Islands.text(islands.cover([relu]))
        ('0.0=fp32', '0=fp32')
    """

    def __init__(self, model: nn.Module, *, policy: Policy) -> None:
        self._paths = module_paths(model)
        self._has_operations = not policy.pure
        self._modules: list[str] = []
        self._operations: list[str] = []
        self._given: set[str] = set()

    @staticmethod
    def text(overrides: Sequence[Override]) -> str:
        """Overrides as the text of a policy has them."""
        return "; ".join(map(str, overrides))

    def cover(self, ops: Sequence[OpRecord]) -> tuple[Override, ...]:
        """Overrides that cover some operations as well as what they covered before; none where that comes to what was given already."""
        if len(ops) == 1:
            self._cover(ops[0].op, ops[0].site.module, enlarges=True)
        else:
            for op in ops:
                self._cover(op.op, op.site.module, enlarges=False)
        overrides = self._overrides()
        text = self.text(overrides)
        if text in self._given:
            return ()
        self._given.add(text)
        return overrides

    def _cover(self, op: str, module: str, *, enlarges: bool) -> None:
        if not module or module not in self._paths:
            self._add_operation(op)
        elif not any(_is_within(module, each) for each in self._modules):
            ancestor = _common([*self._modules, module])
            self._modules = [ancestor] if ancestor in self._paths and ancestor else [*self._modules, module]
        elif enlarges:
            self._enlarge(op, module)

    def _enlarge(self, op: str, module: str) -> None:
        """What is in an island already broke in it: the island has to be larger, since what comes in was rounded before."""
        around = next(each for each in self._modules if _is_within(module, each))
        parent = around.rpartition(".")[0]
        while parent and parent not in self._paths:
            parent = parent.rpartition(".")[0]
        if parent:
            self._modules = [each for each in self._modules if not _is_within(each, parent)] + [parent]
        else:
            self._add_operation(op)

    def _add_operation(self, op: str) -> None:
        name = _forward_name(op)
        if self._has_operations and name not in self._operations and kind_of_pass(name) not in _VALUELESS:
            self._operations.append(name)

    def _overrides(self) -> tuple[Override, ...]:
        found = [Override(kind="module", pattern=escape(path), precision="fp32") for path in self._modules]
        for name in self._operations:
            for called in _CALLED.get(name, (name,)):
                try:
                    found.append(Override(kind="op", pattern=called, precision="fp32"))
                except ConfigurationError:
                    continue  # An operation of the backward pass, or one that autocast has no way to meet.
        return tuple(found)


def _forward_name(op: str) -> str:
    """The name of an operation without namespace and overload; for one of a backward pass, that of what it is the backward pass of.

    Example:
        >>> _forward_name("aten.mul_.Tensor"), _forward_name("aten._softmax_backward_data.default")
        ('mul', '_softmax')
    """
    name = bare_name(op)
    return name.partition("_backward")[0].removesuffix("_") or name


def _is_within(module: str, outer: str) -> bool:
    return module == outer or module.startswith(f"{outer}.")


def _common(paths: Sequence[str]) -> str:
    """The path of the module that all of some modules are in."""
    parts = [path.split(".") for path in paths]
    return ".".join(names[0] for names in takewhile(lambda names: len(set(names)) == 1, zip(*parts, strict=False)))
