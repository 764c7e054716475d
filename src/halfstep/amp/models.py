"""Models as a level has them: checked, with a policy applied, and stored in half where the level says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from halfstep.amp.levels import Properties
from halfstep.amp.session import known_models
from halfstep.casting import cast_tensors
from halfstep.errors import ConfigurationError
from halfstep.policy import Policy, PolicyHandle
from halfstep.policy.application import chosen_decisions
from halfstep.policy.matching import decide, places

__all__ = ["check_model", "prepare_models"]

_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)
_HALVES = frozenset({torch.float16, torch.bfloat16})


def check_model(model: nn.Module) -> None:
    """Accepts a model as it is built: bare, in fp32, and new to `amp.initialize`.

    Raises:
        ConfigurationError: It is not.
    """
    name = type(model).__name__
    if isinstance(model, _WRAPPERS):
        raise ConfigurationError(
            f"amp.initialize was given a {name}. Wrap the model after amp.initialize has returned it: "
            f"model, optimizer = amp.initialize(model, optimizer, ...), then model = {name}(model)."
        )
    if model in known_models:
        raise ConfigurationError(
            f"This {name} was passed to amp.initialize before. Call it once, with all models and optimizers: "
            "[model1, model2], [optimizer1, optimizer2] = amp.initialize([model1, model2], [optimizer1, optimizer2], ...)."
        )
    for kind, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for path, tensor in tensors:
            if tensor.dtype in _HALVES:
                raise ConfigurationError(
                    f"amp.initialize takes a {name} in fp32, but its {kind} {path} is {tensor.dtype}. Leave out model.half() or "
                    "model.bfloat16(), at whatever level: amp.initialize casts what the level says."
                )


def prepare_models(models: list[nn.Module], properties: Properties, *, cast_model_outputs: torch.dtype | None) -> None:
    """Applies the policy of a level to all models, or to none, and stores their parameters in half if the level says so.

    Raises:
        ConfigurationError: A policy is applied to one of them already, or cannot be.
    """
    policy = properties.policy()
    handles: list[PolicyHandle] = []
    try:
        in_half = [_tensors_for_half(model, policy) if properties.stores_half and policy else [] for model in models]
        if policy is not None:
            handles.extend(policy.apply(model) for model in models)
    except BaseException:
        for handle in handles:
            handle.remove()
        raise
    for model, tensors in zip(models, in_half, strict=True):
        for tensor in tensors:
            tensor.data = tensor.data.to(properties.half)
            if tensor.grad is not None:
                tensor.grad = None
        if policy is not None and policy.pure and properties.half is not None:
            model.register_forward_pre_hook(_BatchesCast(properties.half), with_kwargs=True)
        if cast_model_outputs is not None:
            model.register_forward_hook(_OutputsCast(cast_model_outputs))
        known_models.add(model)


def _tensors_for_half(model: nn.Module, policy: Policy) -> list[Tensor]:
    """The fp32 parameters and buffers of all modules but those that an override keeps in fp32."""
    kept: set[int] = set()
    found: dict[int, Tensor] = {}
    for module, decision in chosen_decisions(decide(policy.overrides, places(model))):
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if decision is not None and decision.override is not None:
            kept.update(map(id, own))
        else:
            found.update({id(each): each for each in own if each.dtype is torch.float32})
    return [each for key, each in found.items() if key not in kept]


@final
@dataclass(frozen=True, slots=True)
class _OutputsCast:
    """A hook, which pickles with the model, by which what a model returns is cast."""

    dtype: torch.dtype

    def __call__(self, _: nn.Module, args: Any, output: Any) -> Any:
        return cast_tensors(output, self.dtype)


@final
@dataclass(frozen=True, slots=True)
class _BatchesCast:
    """A hook by which batches of a class of the user's own are cast as the class says; tensors in nests are cast without it."""

    dtype: torch.dtype

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if module not in known_models:  # A copy of the model, which is without the policy.
            return None
        return tuple(self._cast(each) for each in args), {name: self._cast(each) for name, each in kwargs.items()}

    def _cast(self, value: Any) -> Any:
        if (
            isinstance(value, Tensor | nn.Module | Mapping | tuple | list)
            or is_dataclass(value)
            or not callable(getattr(value, "to", None))
        ):
            return value
        return value.to(self.dtype)
