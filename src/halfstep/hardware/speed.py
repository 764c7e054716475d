"""How fast the device multiplies matrices in each precision, measured."""

from __future__ import annotations

import time
from typing import Final

import torch

from halfstep.hardware.device import synchronize
from halfstep.precision import DTYPES
from halfstep.records import Precision

__all__ = ["matmul_gain"]

_SIZE: Final = {"cpu": 768, "cuda": 4096}
_ROUNDS: Final = 15


def matmul_gain(precision: Precision, *, device: torch.device) -> float:
    """How many times as fast as in fp32 the device multiplies two large square matrices: a bound for what autocast can gain.

    Measured in turns, in some tens of milliseconds; the best time of each precision counts, which other programs disturb least.

    Example:
        >>> matmul_gain("bf16", device=torch.device("cpu")) > 0
        True
    """
    size = _SIZE[device.type]
    generator = torch.Generator(device).manual_seed(0)
    wide = torch.rand(size, size, device=device, generator=generator)
    best: dict[Precision, float] = {}
    names: tuple[Precision, ...] = ("fp32", precision)
    operands = {name: wide.to(DTYPES[name]) for name in names}
    for _ in range(_ROUNDS):
        for name, matrix in operands.items():
            synchronize(device)
            start = time.perf_counter()
            _ = matrix @ matrix
            synchronize(device)
            best[name] = min(best.get(name, float("inf")), time.perf_counter() - start)
    return best["fp32"] / best[precision]
