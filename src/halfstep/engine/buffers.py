"""Buffers as a part of a step: when the step is skipped, what its forward pass wrote into them is put back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from halfstep._torch import buffer_count, copy_all_, own_buffers, version_of

__all__ = ["BufferGuard", "is_expanded", "is_writable"]

# Up to this many elements a buffer is copied before each step. Batch normalization writes to its statistics without a trace, so a buffer
# like them has to be copied whether it was written to or not; anything larger is copied when it says that it was.
_SMALL: Final = 65536


@final
class BufferGuard:
    """Keeps the values that a model's buffers had before a step, and puts them back.

    One forward pass that overflows writes infinities and NaN into the statistics of batch normalization, where they stay for ever, since
    each new value is mixed with the one before. Training does not read them and looks healthy; evaluation is ruined.

    The cost is one copy of the buffers in memory, and one kernel per step that copies the small ones.

    Example:
        >>> norm = nn.BatchNorm1d(2)
        >>> guard = BufferGuard(norm)
        >>> guard.remember()
        >>> _ = norm(torch.full((4, 2), torch.inf))
        >>> guard.put_back()
        >>> norm.running_mean, norm.num_batches_tracked
        (tensor([0., 0.]), tensor(0))
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules: list[nn.Module] = []
        self._count = -1
        self._kept: list[_Kept] = []
        self._small: tuple[list[Tensor], list[Tensor]] = ([], [])

    @classmethod
    def of(cls, model: nn.Module) -> BufferGuard | None:
        """A guard for the buffers of a model; `None` when it has none."""
        return cls(model) if any(True for _ in _places_of([*model.modules()])) else None

    def remember(self) -> None:
        """Takes the values that the buffers have now for those of before the step."""
        if not self._is_current():
            self._renew()
            return
        with torch.no_grad():
            if self._small[0]:
                copy_all_(*self._small)
            for kept in self._kept:
                if kept.value is not None and not kept.small and version_of(kept.buffer) != kept.version:
                    kept.value.copy_(kept.buffer)
                    kept.version = version_of(kept.buffer)

    def remembered(self) -> dict[str, Tensor]:
        """Those of the remembered values that may be others now, by the names that the model gives its buffers."""
        names = {id(module): name for name, module in self._model.named_modules()}
        return {
            f"{names[id(kept.module)]}.{kept.name}".lstrip("."): kept.value
            for kept in self._kept
            if kept.value is not None and (kept.small or version_of(kept.buffer) != kept.version)
        }

    def recall(self, values: Mapping[str, Tensor]) -> None:
        """Takes these for the values of before the step, in place of those that the buffers have now.

        Args:
            values: As `remembered` returned them.
        """
        names = {id(module): name for name, module in self._model.named_modules()}
        with torch.no_grad():
            for kept in self._kept:
                name = f"{names[id(kept.module)]}.{kept.name}".lstrip(".")
                if name in values and kept.value is not None:
                    kept.value.copy_(values[name])
                    kept.version = -1  # Whether the buffer is the same, nobody knows.

    def settle(self, *, skipped: bool | None, found_inf: Tensor | None, began: bool) -> None:
        """Does what the end of a step asks for.

        Args:
            skipped: Whether it was not taken; `None` while only the device knows.
            found_inf: The verdict on its gradients; `None` where nothing was checked.
            began: Whether the values were remembered when its forward pass began.
        """
        if skipped is not False:
            known = skipped or found_inf is None
            if not began:
                self.rescue(None if known else found_inf)
            elif known:
                self.put_back()
            elif found_inf is not None:
                self.put_back_if(found_inf)
        if not began:  # The next forward pass may begin unseen, too.
            self.remember()

    def rescue(self, found_inf: Tensor | None = None) -> None:
        """Puts back what is not finite now and was before, where nobody said when the forward pass began.

        What was remembered may be older than the step, and somebody may have written to the buffers since: only what an overflow did is
        taken back. The host waits for nothing.

        Args:
            found_inf: 0-dimensional, 0 or 1: nothing is done where it is 0; `None` for 1.
        """
        with torch.no_grad():
            for kept in self._kept:
                current = kept.current()
                if kept.value is None or not isinstance(current, Tensor) or current.shape != kept.value.shape:
                    continue
                if current.is_floating_point() and current is kept.buffer:
                    bad = ~current.isfinite() & kept.value.isfinite()
                    current.copy_(torch.where(bad if found_inf is None else bad & (found_inf > 0), kept.value, current))

    def put_back(self) -> None:
        """Gives each buffer the value that was remembered; one that a module has exchanged is put in its place again."""
        with torch.no_grad():
            for kept in self._kept:
                if kept.current() is not kept.buffer:
                    setattr(kept.module, kept.name, kept.buffer)
                if kept.value is not None and (kept.small or version_of(kept.buffer) != kept.version):
                    if kept.buffer.shape != kept.value.shape:  # Somebody gave it other data.
                        kept.buffer.data = kept.value.clone()
                    kept.buffer.copy_(kept.value)
                    kept.version = version_of(kept.buffer)

    def put_back_if(self, found_inf: Tensor) -> None:
        """Does that where a verdict on the device is 1.

        The host waits for the verdict only when a module has put something else in the place of a buffer than a tensor of its shape.

        Args:
            found_inf: 0-dimensional, 0 or 1, on the device of the buffers.
        """
        if not all(kept.can_be_put_back_on_device() for kept in self._kept):
            if found_inf.item():
                self.put_back()
            return
        bad = found_inf > 0
        with torch.no_grad():
            for kept in self._kept:
                current = kept.current()
                if kept.value is None or (current is kept.buffer and not kept.small and version_of(current) == kept.version):
                    continue
                right = torch.where(bad, kept.value.to(current.dtype), current)
                if current is kept.buffer:
                    current.copy_(right)
                else:
                    setattr(kept.module, kept.name, right)

    def _is_current(self) -> bool:
        """Whether the buffers are still those that there is room for: modules may exchange, add and remove them."""
        return buffer_count(self._modules) == self._count and all(map(_Kept.is_current, self._kept))

    def _renew(self) -> None:
        self._modules = [*self._model.modules()]
        self._count = buffer_count(self._modules)
        values: dict[int, Tensor] = {}
        self._kept = [_Kept(module, name, buffer, values) for module, name, buffer in _places_of(self._modules)]
        small = [*{id(kept.buffer): kept for kept in self._kept if kept.small}.values()]
        self._small = ([kept.value for kept in small], [kept.buffer for kept in small])


class _Kept:
    """The place of a buffer, what was in it, and the value that this had; `None` where no forward pass, and no guard, can write to it."""

    __slots__ = ("buffer", "module", "name", "small", "value", "version")

    def __init__(self, module: nn.Module, name: str, buffer: Any, values: dict[int, Tensor]) -> None:
        self.module = module
        self.name = name
        self.buffer = buffer
        self.value: Any = None
        self.version = -1
        self.small = False
        if is_writable(buffer):
            if id(buffer) not in values:  # A buffer in several places is copied once.
                values[id(buffer)] = buffer.detach().clone()
            self.value = values[id(buffer)]
            self.version = version_of(buffer)
            self.small = buffer.numel() <= _SMALL

    def current(self) -> Any:
        """What is in the place now."""
        return getattr(self.module, self.name, None)

    def is_current(self) -> bool:
        """Whether the same buffer is in the place, in the same shape."""
        return self.current() is self.buffer and (self.value is None or self.buffer.shape == self.value.shape)

    def can_be_put_back_on_device(self) -> bool:
        """Whether it is the same buffer still, or one that can be compared element by element."""
        current = self.current()
        if current is self.buffer and self.is_current():
            return True
        return isinstance(current, Tensor) and self.value is not None and current.shape == self.value.shape


def _places_of(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str, Tensor | None]]:
    """Each place for a buffer, with what is in it; an empty one may be filled by the first forward pass."""
    for module in modules:
        for name, buffer in own_buffers(module).items():
            yield module, name, buffer


def is_writable(buffer: Tensor | None) -> bool:
    """Whether a forward pass can write into a buffer, and this guard, too."""
    if buffer is None or nn.parameter.is_lazy(buffer) or buffer.is_inference() or buffer.layout is not torch.strided:
        return False
    return not is_expanded(buffer)


def is_expanded(tensor: Tensor) -> bool:
    """Whether several elements of a strided tensor are the same memory, which torch refuses to write to."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
