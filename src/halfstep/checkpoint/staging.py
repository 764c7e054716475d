"""A copy of a run's tensors in memory of its own, so that the run can go on while the copy is written."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from halfstep._torch import copy_all_, storage_key
from halfstep.checkpoint.trees import tensors_in

__all__ = ["Stage"]


@final
class Stage:
    """Memory of the host for a copy of nested states, used again for each copy, since to get new memory takes longer than to fill it.

    What shares memory in the state shares it in the copy. Tensors of other layouts than strided ones are copied to new memory each time.

    Example:
        >>> weight = torch.zeros(2)
        >>> staged = Stage().copy({"weight": weight, "tied": weight})
        >>> _ = weight.fill_(1.0)
        >>> staged["weight"], staged["weight"].data_ptr() == staged["tied"].data_ptr()
        (tensor([0., 0.]), True)
    """

    def __init__(self) -> None:
        self._memory: dict[int, list[Tensor]] = {}

    def copy(self, tree: Any) -> Any:
        """The same state with its tensors copied to the host; it stays as it is until the next call. Containers are changed in place.

        Args:
            tree: Dictionaries, lists and tuples of plain values and tensors; a tensor in a tuple is copied to new memory.
        """
        sources: list[Tensor] = []
        targets: list[Tensor] = []
        copies: dict[int, Tensor] = {}
        used: dict[int, list[Tensor]] = {}
        for place, tensor in list(tensors_in(tree)):
            if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
                copied = tensor.detach().to("cpu", copy=True)
            else:
                key = storage_key(tensor)
                if key not in copies:
                    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
                    copies[key] = self._room(whole.numel(), used)
                    sources.append(whole)
                    targets.append(copies[key])
                memory = copies[key].untyped_storage()
                copied = torch.empty(0, dtype=tensor.dtype).set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())
            tree = _with(tree, place, copied)
        self._memory = used
        if sources:
            copy_all_(targets, sources)
        return tree

    def _room(self, size: int, used: dict[int, list[Tensor]]) -> Tensor:
        """Memory of a size that this copy does not use yet; the same again for the same order of sizes."""
        taken, kept = used.setdefault(size, []), self._memory.get(size, [])
        pinned = torch.cuda.is_available()
        memory = kept[len(taken)] if len(taken) < len(kept) else torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        taken.append(memory)
        return memory


def _with(tree: Any, place: tuple[Any, ...], value: Tensor) -> Any:
    if not place:
        return value
    head, *rest = place
    if isinstance(tree, tuple):
        return tuple(_with(each, tuple(rest), value) if number == head else each for number, each in enumerate(tree))
    tree[head] = _with(tree[head], tuple(rest), value)
    return tree
