"""Detours: arithmetic that leaves the range of fp16 on its way, forward or backward, and comes back, so that fp32 does not notice.

Each kind takes the half result of a linear layer, of shape (batch, length, width) and of order 1, and returns something of that shape and
order. A factor within its range makes exactly one operation overflow, whatever the weights of the model and the batch are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, final

import torch
from torch import Tensor, nn

from halfstep.records.trace import Phase

__all__ = ["BACKWARD", "DETOURS", "FORWARD", "Detour"]


def _product(x: Tensor, factor: float) -> Tensor:
    a, b = x * factor, x.roll(1, -1) * factor
    return a * b / factor**2


def _fused_product(x: Tensor, factor: float) -> Tensor:
    a, b = x * factor, x.roll(1, -1) * factor
    return torch.addcmul(a, a, b) / factor**2


def _square(x: Tensor, factor: float) -> Tensor:
    big = x * factor
    return big * torch.rsqrt((big * big).mean(-1, keepdim=True) + 1e-6)  # rsqrt(inf) is 0, which hides it


def _variance(x: Tensor, factor: float) -> Tensor:
    big = x * factor
    return (big - big.mean(-1, keepdim=True)) * torch.rsqrt(big.var(-1, keepdim=True) + 1e-5)


def _quartic(x: Tensor, factor: float) -> Tensor:
    square = (x * factor) * (x * factor)
    fourth = square * square
    return fourth / factor**4


def _power_of_two(x: Tensor, factor: float) -> Tensor:
    power = torch.exp2((x * factor).clamp(max=60.0))
    return (1 + power).log2() / factor


def _squarings(x: Tensor, factor: float) -> Tensor:
    power = 1 + x * (factor / 16)
    for _ in range(4):
        power = power * power
    return power.log1p() / factor


def _running_product(x: Tensor, factor: float) -> Tensor:
    first, *others = (x.abs() * factor + 1).chunk(8, -1)
    for other in others:
        first = first * other
    return x + (first.log1p() / factor).repeat(1, 1, 8)


def _doublings(x: Tensor, factor: float) -> Tensor:
    total = x * factor
    for _ in range(8):
        total = total + total
    return total / (256 * factor)


def _division(x: Tensor, factor: float) -> Tensor:
    return (x / factor) * factor


def _signs(x: Tensor, factor: float) -> Tensor:
    """About plus or minus the factor."""
    return torch.tanh(x * 30) * factor


def _ones(x: Tensor, factor: float) -> Tensor:
    total = _signs(x, factor).abs() @ torch.ones(x.shape[-1], 1)
    return x + total / (factor * x.shape[-1])


def _sum_by_index(x: Tensor, factor: float) -> Tensor:
    sizes = _signs(x, factor).abs()
    sums = torch.zeros_like(sizes[:, :1]).index_add(1, torch.zeros(x.shape[1], dtype=torch.long), sizes)
    return x + sums / (factor * x.shape[1])


def _einsum(x: Tensor, factor: float) -> Tensor:
    big = x * factor
    near = torch.einsum("bld,bmd->blm", big, big) / (factor**2 * x.shape[-1])
    return x + near @ x


def _batched_products(x: Tensor, factor: float) -> Tensor:
    big = x * factor
    unit = torch.eye(x.shape[-1], dtype=x.dtype).expand(len(x), -1, -1)
    mixed = torch.baddbmm(unit, big.transpose(1, 2), big) / (factor**2 * x.shape[1])
    return x + x @ mixed


def _added_product(x: Tensor, factor: float) -> Tensor:
    big = (x * factor).flatten(0, 1)
    mixed = torch.addmm(torch.eye(x.shape[-1], dtype=x.dtype), big.t(), big) / (factor**2 * len(big))
    return x + x @ mixed


@final
class _Convolution(nn.Module):
    """A convolution along the sequence whose weights are large."""

    def __init__(self, width: int, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.conv = nn.Conv1d(width, width, 3, padding=1)
        with torch.no_grad():
            self.conv.weight.mul_(factor)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv((x * 100).transpose(1, 2))
        return x + y.transpose(1, 2) / (100 * self.factor)


def _nothing(x: Tensor) -> Tensor:
    """Zeros, through which a gradient passes and becomes tiny: what follows may blow it up, and all in all it stays as it was."""
    little = x * 1e-12
    return little - little.detach()


def _shrunk_and_grown(x: Tensor, factor: float) -> Tensor:
    return x + _nothing(x) * factor


def _shrunk_and_divided(x: Tensor, factor: float) -> Tensor:
    return x + _nothing(x) / (1 / factor)


def _gated(x: Tensor, factor: float) -> Tensor:
    return x + (_nothing(x) * _signs(x, 3e4).detach()) * factor


def _mixed(x: Tensor, factor: float) -> Tensor:
    weights = torch.bmm(_nothing(x), _signs(x, 3e4).detach().transpose(1, 2))
    return x + torch.bmm(weights, x) * factor


@final
class _Gate(nn.Module):
    """A branch that counts for nothing at first, as in ReZero: the gradient of its gate overflows."""

    def __init__(self, width: int, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.gate * (x * 5e3)) * self.factor


@final
class _Adapter(nn.Module):
    """A low-rank update that counts for nothing at first, as in LoRA: the gradient of its second matrix overflows."""

    def __init__(self, width: int, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.down, self.up = nn.Linear(width, 8, bias=False), nn.Linear(8, width, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.up(self.down(x * 5e3))
        return x + y * self.factor


@final
class _LargeWeights(nn.Module):
    """A linear layer whose weights are large: the gradient of its input overflows."""

    def __init__(self, width: int, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.linear = nn.Linear(width, width, bias=False)
        nn.init.uniform_(self.linear.weight, -5e4, 5e4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(_nothing(x))
        return x + y * self.factor


@final
class _LargeKernel(nn.Module):
    """The same with a convolution."""

    def __init__(self, width: int, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.conv = nn.Conv1d(width, width, 3, padding=1, bias=False)
        nn.init.uniform_(self.conv.weight, -5e4, 5e4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(_nothing(x).transpose(1, 2))
        return x + y.transpose(1, 2) * self.factor


@final
class _SteepNorm(nn.Module):
    """A norm of what does not vary, with a tiny epsilon: its gradient overflows when it is cast to half."""

    def __init__(self, width: int, factor: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=factor)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(_nothing(x))
        return x + y


Function = Callable[[Tensor, float], Tensor]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Detour:
    """One kind of detour.

    Attributes:
        op: The operation that overflows.
        low: The smallest factor.
        high: The largest one.
        phase: The pass in which it overflows.
        function: What it does, given the factor; `None` where it is a module.
        module: A module that does it, given the width and the factor; `None` where it is a function.
        child: Which of its own modules the operation belongs to; empty for itself.
        is_hidden: Whether the step stays finite as a whole, since something makes a finite number of the infinite one.
    """

    op: str
    low: float
    high: float
    phase: Phase = "forward"
    function: Function | None = None
    module: Callable[[int, float], nn.Module] | None = None
    child: Literal["", "conv", "linear", "norm", "up"] = ""
    is_hidden: bool = False


FORWARD: Final[Mapping[str, Detour]] = MappingProxyType(
    {
        "product": Detour(op="aten.mul.Tensor", low=2e3, high=8e3, function=_product),
        "fused product": Detour(op="aten.addcmul.default", low=2e3, high=8e3, function=_fused_product),
        "square in a norm": Detour(op="aten.mul.Tensor", low=2e3, high=8e3, function=_square, is_hidden=True),
        "variance in a norm": Detour(op="aten.var.correction", low=3e3, high=8e3, function=_variance, is_hidden=True),
        "quartic": Detour(op="aten.mul.Tensor", low=32.0, high=40.0, function=_quartic),
        "power of two": Detour(op="aten.exp2.default", low=40.0, high=80.0, function=_power_of_two),
        "exponential by squarings": Detour(op="aten.mul.Tensor", low=40.0, high=80.0, function=_squarings),
        "running product": Detour(op="aten.mul.Tensor", low=20.0, high=40.0, function=_running_product),
        "sum by doublings": Detour(op="aten.add.Tensor", low=3e3, high=8e3, function=_doublings),
        "division": Detour(op="aten.div.Tensor", low=1e-7, high=2e-6, function=_division),
        "sum by ones": Detour(op="aten.mm.default", low=1e4, high=3e4, function=_ones),
        "sum by index": Detour(op="aten.index_add.default", low=1e4, high=3e4, function=_sum_by_index),
        "einsum": Detour(op="aten.bmm.default", low=1e3, high=4e3, function=_einsum),
        "baddbmm": Detour(op="aten.baddbmm.default", low=1e3, high=4e3, function=_batched_products),
        "addmm": Detour(op="aten.addmm.default", low=1e3, high=4e3, function=_added_product),
        "convolution": Detour(op="aten.convolution.default", low=2e4, high=2e5, module=_Convolution, child="conv"),
    }
)

BACKWARD: Final[Mapping[str, Detour]] = MappingProxyType(
    {
        "shrunk and grown": Detour(op="aten.mul.Tensor", low=1e11, high=1e12, phase="backward", function=_shrunk_and_grown),
        "shrunk and divided": Detour(op="aten.div.Tensor", low=1e11, high=1e12, phase="backward", function=_shrunk_and_divided),
        "gated": Detour(op="aten.mul.Tensor", low=2e4, high=2e5, phase="backward", function=_gated),
        "mixed": Detour(op="aten.bmm.default", low=2e4, high=2e5, phase="backward", function=_mixed),
        "gate": Detour(op="aten.mul.Tensor", low=2e5, high=1e6, phase="backward", module=_Gate),
        "adapter": Detour(op="aten.mm.default", low=2e5, high=1e6, phase="backward", module=_Adapter, child="up"),
        "large weights": Detour(op="aten.mm.default", low=2e4, high=2e5, phase="backward", module=_LargeWeights, child="linear"),
        "large kernel": Detour(
            op="aten.convolution_backward.default", low=2e4, high=2e5, phase="backward", module=_LargeKernel, child="conv"
        ),
        "steep norm": Detour(op="aten._to_copy.default", low=1e-24, high=1e-22, phase="backward", module=_SteepNorm, child="norm"),
    }
)

DETOURS: Final[Mapping[str, Detour]] = MappingProxyType({**FORWARD, **BACKWARD})
