"""Optimizers, iterations and watchers that the tests of the scaler share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.scaler import LossScaler

__all__ = ["FUSED", "INF", "NAN", "OPTIMIZERS", "HostReads", "Model", "backward", "iterate", "same", "snapshot", "weights"]

INF, NAN = math.inf, math.nan

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.5),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.5),
    "amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=0.5, amsgrad=True),
    "tensor-lr": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.5), foreach=False),
    "sgd-fused": lambda parameters: torch.optim.SGD(parameters, lr=0.5, fused=True),
    "momentum-fused": lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9, fused=True),
    "adam-fused": lambda parameters: torch.optim.Adam(parameters, lr=0.5, fused=True),
    "adamw-fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.5, fused=True),
    "adagrad-fused": lambda parameters: torch.optim.Adagrad(parameters, lr=0.5, fused=True),
    "amsgrad-fused": lambda parameters: torch.optim.Adam(parameters, lr=0.5, amsgrad=True, fused=True),
    "tensor-lr-fused": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.5), fused=True),
    "capturable-fused": lambda parameters: torch.optim.Adam(parameters, lr=0.5, capturable=True, fused=True),
}
FUSED = [name for name in OPTIMIZERS if name.endswith("-fused")]


def weights(*sizes: int) -> list[nn.Parameter]:
    """Parameters of ones."""
    return [nn.Parameter(torch.ones(size)) for size in sizes or (3,)]


def backward(scaler: torch.amp.GradScaler, parameters: Iterable[Tensor], factor: float, *, clear: bool = True) -> None:
    """A loss whose gradient is `factor` in each element; gradients from before are cleared first."""
    parameters = list(parameters)
    for parameter in parameters:
        if clear:
            parameter.grad = None
    loss = sum(((parameter * factor).sum() for parameter in parameters), torch.zeros(()))
    scaler.scale(loss).backward()  # type: ignore[no-untyped-call]


def iterate(scaler: torch.amp.GradScaler, optimizer: Optimizer, factor: float, *, unscale: bool = False) -> None:
    """One whole iteration."""
    backward(scaler, [parameter for group in optimizer.param_groups for parameter in group["params"]], factor)
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


def snapshot(optimizer: Optimizer) -> Any:
    """A copy of the parameters and of the optimizer's state."""
    parameters = [parameter.detach().clone() for group in optimizer.param_groups for parameter in group["params"]]
    return parameters, deepcopy(optimizer.state_dict())


def same(left: Any, right: Any) -> bool:
    """Whether two nests hold the same values of the same types, tensors bit for bit."""
    if type(left) is not type(right):
        return False
    if isinstance(left, Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and bool((left == right).all())
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


class HostReads(TorchDispatchMode):
    """Counts how often the host waits for a value of a tensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.scalars = 0
        self._lists = _ListReads()

    @property
    def lists(self) -> int:
        """Reads by `Tensor.tolist`, which no operation stands for."""
        return self._lists.count

    @property
    def total(self) -> int:
        return self.scalars + self.lists

    def __enter__(self) -> HostReads:
        self._lists.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._lists.__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (
            torch.ops.aten._local_scalar_dense,
            torch.ops.aten.is_nonzero,
            torch.ops.aten.equal,
            torch.ops.aten.nonzero,
        ):
            self.scalars += 1
        return func(*args, **(kwargs or {}))


class _ListReads(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is Tensor.tolist
        return func(*args, **(kwargs or {}))


class Model:
    """What a `LossScaler` must do, in plain Python; a scale is rounded to float32 after each product, as torch's kernel does."""

    def __init__(self, scaler: LossScaler) -> None:
        settings = self.settings = scaler.settings
        self.scale = float(np.float32(settings.init_scale))
        self.tracker = 0
        self.tolerance = settings.hysteresis

    def update(self, *, bad: bool) -> None:
        settings = self.settings
        if settings.static:
            return
        if bad:
            self.tracker = 0
            if self.tolerance:
                self.tolerance -= 1
            else:
                self.scale = _float32(self.scale * settings.backoff_factor)
        else:
            self.tracker += 1
            if self.tracker == settings.growth_interval:
                self.tracker, self.tolerance = 0, settings.hysteresis
                grown = _float32(self.scale * settings.growth_factor)
                self.scale = grown if math.isfinite(grown) else self.scale
        self.scale = max(self.scale, _float32(settings.min_scale))
        if settings.max_scale is not None:
            self.scale = min(self.scale, _float32(settings.max_scale))

    def follow(self, flags: Sequence[bool]) -> list[float]:
        """The scale after each update; a flag says whether the gradients were finite."""
        scales = []
        for finite in flags:
            self.update(bad=not finite)
            scales.append(self.scale)
        return scales


def _float32(value: float) -> float:
    with np.errstate(over="ignore", under="ignore"):
        return float(np.float32(value))
