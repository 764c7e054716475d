"""The gradients of one step: whose they are, whether somebody else touched them, and their clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep._torch import version_of
from halfstep.distributed import Ranks, clip_, total_norm
from halfstep.errors import ConfigurationError, UnscaledBackwardError

__all__ = ["Gradients"]

# So many are looked at for writes by others. A backward pass writes to nearly all of them, so a sample tells, and costs a bounded time.
_WATCHED: Final = 64


@final
class Gradients:
    """The gradients of the parameters of some optimizers."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = tuple(optimizers)
        self._seen: list[tuple[Tensor, Tensor | None, int]] = []

    def parameters(self) -> Iterable[nn.Parameter]:
        """The parameters; parameter groups that are added later count, too."""
        return (parameter for optimizer in self._optimizers for group in optimizer.param_groups for parameter in group["params"])

    def tensors(self) -> list[Tensor]:
        """The gradients that there are."""
        return [
            gradient
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
            if (gradient := parameter.grad) is not None
        ]

    def named(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """The parameters by the names that the model gives them; one that is none of the model's has its place for a name."""
        own = {id(parameter): name for name, parameter in model.named_parameters()}
        return {
            own.get(id(parameter), f"optimizer {number}, group {group}, parameter {place}"): parameter
            for number, optimizer in enumerate(self._optimizers)
            for group, entries in enumerate(optimizer.param_groups)
            for place, parameter in enumerate(entries["params"])
        }

    def put(self, gradients: Mapping[str, Tensor], model: nn.Module) -> None:
        """Puts gradients in place, and clears the others.

        Args:
            gradients: By the names of the parameters, as in `named`.
            model: The model.
        """
        self.clear()
        for name, parameter in self.named(model).items():
            parameter.grad = gradients.get(name)

    def clear(self) -> None:
        """Does what `zero_grad()` does, without its entry in torch's profiler, which takes longer than all else that an engine adds."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        self._seen = []

    def remember(self) -> None:
        """Takes note of the gradients as they are."""
        parameters = list(self.parameters())
        stride = -(-len(parameters) // _WATCHED) or 1
        # The gradients themselves, since the identity of one that is gone may come back as that of another.
        seen: list[tuple[Tensor, Tensor | None, int]] = []
        for parameter in parameters[::stride]:
            gradient = parameter.grad
            seen.append((parameter, gradient, -1 if gradient is None else version_of(gradient)))
        self._seen = seen

    def check_untouched(self) -> None:
        """Accepts gradients that nobody has written to since they were remembered.

        Raises:
            UnscaledBackwardError: Somebody has.
        """
        for parameter, remembered, version in self._seen:
            gradient = parameter.grad
            if gradient is not remembered or (gradient is not None and version_of(gradient) != version):
                raise UnscaledBackwardError(
                    f"Gradients changed after amp.backward(), while they were multiplied by the loss scale (a parameter of shape "
                    f"{tuple(parameter.shape)} has others now). Either loss.backward() was called in place of amp.backward(loss), so that "
                    "its gradients are not scaled; or they were clipped or edited while scaled: use max_grad_norm, or call "
                    "amp.unscale_gradients() first. They were cleared; nothing was stepped."
                )

    def clip(
        self, gradients: list[Tensor], *, max_norm: float | None, max_value: float | None, ranks: Ranks | None = None
    ) -> Tensor | None:
        """Clips by norm, then by value, and returns the norm from before, 0-dimensional; `None` when no norm was asked for.

        Args:
            gradients: All that there are, as from `tensors`.
            max_norm: The L2 norm of all gradients to clip to; infinity only measures it.
            max_value: What each element is clamped to, from minus to plus.
            ranks: Those whose norms may differ, so that all have to clip by the largest; `None` where they cannot.

        Raises:
            ConfigurationError: A gradient is sparse, or complex where elements are clamped, which torch cannot clip.
        """
        for gradient in gradients:
            if gradient.layout is not torch.strided or (max_value is not None and gradient.is_complex()):
                kind = "complex" if gradient.is_complex() else "sparse"
                raise ConfigurationError(
                    f"The gradient of a parameter of shape {tuple(gradient.shape)} is {kind}, and torch cannot clip it. Leave out "
                    "max_grad_norm and max_grad_value, give that parameter to an engine of its own, or make its gradient dense."
                )
        norm = None
        if max_norm is not None:
            norm = total_norm(gradients)
            if ranks is not None:
                ranks.maximize_(norm)
            if not math.isinf(max_norm):  # To clip to infinity would turn gradients whose norm overflows into NaN.
                clip_(gradients, max_norm=max_norm, norm=norm)
        if max_value is not None:
            # torch's function cannot take DTensors, nor nothing.
            plain = [parameter for parameter in self.parameters() if type(parameter.grad) is Tensor]
            if plain:
                nn.utils.clip_grad_value_(plain, max_value)
            for gradient in gradients:
                if type(gradient) is not Tensor:
                    gradient.clamp_(-max_value, max_value)
        return norm

    def multiply(self, factor: float | Tensor) -> None:
        """Multiplies all gradients by a number."""
        with torch.no_grad():
            for gradient in self.tensors():
                gradient.mul_(factor)
