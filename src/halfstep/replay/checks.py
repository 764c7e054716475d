"""Whether tensors are finite, many at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from halfstep._torch import dense_parts, foreach_magnitudes

__all__ = ["all_finite"]


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no value of any tensor is infinite or NaN. One call for all of a kind: under a dispatch mode each call is dear.

    Example:
        >>> all_finite([torch.ones(2), torch.ones(3)]), all_finite([torch.ones(2), torch.tensor([1.0, torch.nan])])
        (True, False)
    """
    groups: dict[Any, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        for part in dense_parts(tensor.detach()):
            if part.numel() and (part.is_floating_point() or part.is_complex()):
                groups[part.device, part.dtype].append(torch.view_as_real(part.resolve_conj()) if part.is_complex() else part)
    return all(bool(torch.isfinite(torch.stack(foreach_magnitudes(group))).all()) for group in groups.values())
