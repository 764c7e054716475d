"""What halfstep uses of the memory of torch's tensors."""

from __future__ import annotations

import torch

__all__ = ["storage_key"]


def storage_key(tensor: torch.Tensor) -> int:
    """A number that two tensors have in common exactly if they share their memory, as `torch.save` sees it, which writes that once.

    Private: `UntypedStorage._cdata`, because the public `data_ptr()` is 0 for every empty one. Seen on torch 2.9 to 2.13.
    """
    key: int = tensor.untyped_storage()._cdata
    return key
