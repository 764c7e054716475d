"""What a step may change, kept and put back, so that it can run again from where it began."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep._torch import own_buffers
from halfstep.distributed import local_tensor
from halfstep.randomness import RandomState

__all__ = ["StepState", "TrainingState"]


_PLAIN: Final = (bool, int, float, complex, str, type(None), Tensor)


@final
class StepState:
    """What a forward and a backward pass change: random numbers, buffers, gradients, and plain attributes of modules such as a counter.

    Gradients are taken away meanwhile.

    Args:
        model: The model.
        parameters: All tensors that may get gradients.
        random: The state of the generators when the step began; `None` for what it is now.

    Example:
        >>> norm = nn.BatchNorm1d(2)
        >>> state = StepState(norm, parameters=[*norm.parameters()], random=None)
        >>> norm(torch.full((4, 2), torch.inf)).sum().backward()
        >>> state.put_back()
        >>> norm.running_mean, norm.weight.grad
        (tensor([0., 0.]), None)
    """

    def __init__(self, model: nn.Module, *, parameters: Sequence[Tensor], random: RandomState | None) -> None:
        self._outside = RandomState.capture()
        self._random = random or self._outside
        self._buffers = [
            (module, name, buffer, None if buffer is None else buffer.detach().clone())
            for module in model.modules()
            for name, buffer in own_buffers(module).items()
        ]
        self._attributes = [(module, _plain_attributes(module)) for module in model.modules()]
        self._gradients = [(parameter, parameter.grad) for parameter in parameters]
        self.start_over()

    def start_over(self) -> None:
        """Puts random numbers and buffers to where the step began; nothing has gradients.

        A buffer that is stored in another dtype for now stays in that.
        """
        self._random.restore()
        with torch.no_grad():
            for module, name, buffer, value in self._buffers:
                if own_buffers(module).get(name) is not buffer:
                    setattr(module, name, buffer)
                if buffer is not None and value is not None:
                    _write(buffer, value.to(buffer.dtype) if value.dtype.is_floating_point else value)
        for module, attributes in self._attributes:
            for name in _plain_attributes(module).keys() - attributes.keys():
                del vars(module)[name]
            vars(module).update(attributes)
        for parameter, _ in self._gradients:
            parameter.grad = None

    def put_back(self) -> None:
        """Puts all to where it was when this was made."""
        self.start_over()
        self._outside.restore()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    """What user code keeps in a module beside parameters, buffers and modules: numbers, texts, tensors; what is in containers stays."""
    return {name: value for name, value in vars(module).items() if not name.startswith("_") and isinstance(value, _PLAIN)}


@final
class TrainingState:
    """What whole training steps change: parameters, and what optimizers keep; buffers and random numbers are a `StepState`'s.

    Args:
        parameters: The tensors that are trained.
        optimizers: What trains them.

    Example:
        >>> layer = nn.Linear(1, 1)
        >>> optimizer = torch.optim.Adam(layer.parameters())
        >>> state = TrainingState([*layer.parameters()], optimizers=[optimizer])
        >>> layer(torch.ones(1, 1)).sum().backward()
        >>> optimizer.step()
        >>> state.put_back()
        >>> len(optimizer.state)
        0
    """

    def __init__(self, parameters: Sequence[Tensor], *, optimizers: Sequence[Optimizer]) -> None:
        self._values = [(parameter, parameter.data, parameter.detach().clone()) for parameter in parameters]
        self._optimizers = [_OptimizerState(optimizer) for optimizer in optimizers]

    def put_back(self) -> None:
        """Puts parameters and optimizers to where they were."""
        with torch.no_grad():
            for parameter, data, value in self._values:
                if parameter.dtype != value.dtype:
                    parameter.data = data
                _write(parameter, value)
        for each in self._optimizers:
            each.put_back()


@final
class _OptimizerState:
    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._attributes = {name: value for name, value in vars(optimizer).items() if isinstance(value, bool | int | float)}
        self._groups = [
            (group, {name: _kept(value) for name, value in group.items() if name != "params"}) for group in optimizer.param_groups
        ]
        self._state = {key: (entry, _kept(entry)) for key, entry in optimizer.state.items()}

    def put_back(self) -> None:
        vars(self._optimizer).update(self._attributes)
        for group, values in self._groups:
            for name in [name for name in group if name != "params" and name not in values]:
                del group[name]
            for name, value in values.items():
                group[name] = _restored(group.get(name), value)
        self._optimizer.state.clear()
        for key, (entry, value) in self._state.items():
            self._optimizer.state[key] = _restored(entry, value)


@final
class _KeptTensor:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.value = tensor.detach().clone()


def _kept(value: Any) -> Any:
    """A copy of what an optimizer keeps; a parameter in it is not copied."""
    if isinstance(value, nn.Parameter):
        return value
    if isinstance(value, Tensor):
        return _KeptTensor(value)
    if isinstance(value, dict):
        return {name: _kept(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_kept(each) for each in value])
    return deepcopy(value)


def _restored(current: Any, kept: Any) -> Any:
    """What was kept; tensors and dictionaries are the same objects as before."""
    if isinstance(kept, _KeptTensor):
        with torch.no_grad():
            _write(kept.tensor, kept.value)
        return kept.tensor
    if isinstance(kept, dict):
        entry = current if isinstance(current, dict) else {}
        values = {name: _restored(entry.get(name), each) for name, each in kept.items()}
        entry.clear()
        entry.update(values)
        return entry
    return type(kept)([_restored(None, each) for each in kept]) if isinstance(kept, list | tuple) else kept


def _write(tensor: Tensor, value: Tensor) -> None:
    if tensor.shape != value.shape or tensor.dtype != value.dtype:
        tensor.data = value.clone()
    elif not _is_same(tensor, value):  # One that is expanded, or read only, has not changed.
        tensor.copy_(value)


def _is_same(tensor: Tensor, value: Tensor) -> bool:
    """Whether two tensors are the same bit for bit; numbers say that 0 is -0, and that NaN is not NaN."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return False
    bits = [local_tensor(each.detach()).resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8) for each in (tensor, value)]
    return torch.equal(*bits)
