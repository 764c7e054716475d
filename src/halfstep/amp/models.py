"""Models as a level has them: checked, with a policy applied, and stored in half where the level says so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from halfstep._torch import own_modules
from halfstep.amp.hooks import ArgumentsCast, OutputsCast, show_state_in_fp32
from halfstep.amp.levels import Properties
from halfstep.amp.session import known_models
from halfstep.errors import ConfigurationError
from halfstep.policy import Policy, PolicyHandle
from halfstep.policy.application import chosen_decisions
from halfstep.policy.matching import bare_model, decide, places
from halfstep.precision import HALVES

__all__ = ["check_model", "prepare_models"]

_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


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
            if tensor.dtype in HALVES:
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
    in_half = _tensors_for_half(models, policy) if properties.stores_half and policy is not None else []
    if policy is not None:
        _apply(policy, models)
    for tensor in in_half:
        tensor.data = tensor.data.to(properties.half)
        if tensor.grad is not None:
            tensor.grad = None
    if in_half:
        for module in {each: None for model in models for each in model.modules()}:
            module.register_state_dict_post_hook(show_state_in_fp32)  # type: ignore[no-untyped-call]
    for model in models:
        if policy is not None:
            batches = None if properties.patch_torch_functions else properties.cast_model_type
            # A model that computes in float64 itself needs its inputs as they are.
            doubles = not any(parameter.dtype is torch.float64 for parameter in model.parameters())
            model.register_forward_pre_hook(ArgumentsCast(batches=batches, doubles=doubles), with_kwargs=True)
        if cast_model_outputs is not None:
            model.register_forward_hook(OutputsCast(cast_model_outputs))
        known_models.add(model)


def _apply(policy: Policy, models: list[nn.Module]) -> None:
    """Applies a policy to models that may share modules, or be parts of each other.

    Each model is one by itself for the policy: its hooks run around its forward. So those inside of others come first, and whatever has the
    policy already is not shown to it again.
    """
    handles: list[PolicyHandle] = []
    covered: set[nn.Module] = set()
    inside = {model: [place.module for place in places(model)] for model in models}
    try:
        for model in sorted(models, key=lambda each: len(set(inside[each]))):
            if bare_model(model) not in covered:
                with _without(covered, inside[model]):
                    handles.append(policy.apply(model))
                covered.update(inside[model])
    except BaseException:
        for handle in handles:
            handle.remove()
        raise


@contextmanager
def _without(covered: set[nn.Module], modules: list[nn.Module]) -> Iterator[None]:
    """A block in which modules do not hold those that are covered."""
    hidden = [
        (module, name, child)
        for module in dict.fromkeys(modules)
        if module not in covered
        for name, child in own_modules(module).items()
        if child is not None and bare_model(child) in covered
    ]
    for module, name, _ in hidden:
        setattr(module, name, None)
    try:
        yield
    finally:
        for module, name, child in hidden:
            setattr(module, name, child)


def _tensors_for_half(models: list[nn.Module], policy: Policy) -> list[Tensor]:
    """The fp32 parameters and buffers of all modules but those that an override keeps in fp32."""
    kept: set[int] = set()
    found: dict[int, Tensor] = {}
    for module, decision in (each for model in models for each in chosen_decisions(decide(policy.overrides, places(model)))):
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if decision is not None and decision.override is not None:
            kept.update(map(id, own))
        else:
            found.update({id(each): each for each in own if each.dtype is torch.float32})
    return [each for key, each in found.items() if key not in kept]
