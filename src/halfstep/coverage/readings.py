"""What a policy says of a model, before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import nn

from halfstep._torch import functional_overloads
from halfstep.errors import ConfigurationError
from halfstep.policy import Override, Policy
from halfstep.policy.application import chosen_decisions
from halfstep.policy.matching import Decision, Place, check_all_match, decide, places, unmatched_hint
from halfstep.records import EffectivePrecision, ModulePrecision, OverrideEffect, OverrideStatus

__all__ = ["Reading", "decided_overloads", "distinct_modules", "read"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a policy says of a model.

    Attributes:
        policy: The policy as far as it says something: without the overrides that decide about nothing, and with its default resolved.
        kept: The indices of its overrides in the policy that was given.
        modules: One for each module, the model itself first.
        deciders: For each module the index of the override that decides about it.
        overrides: One for each override of the policy that was given.
    """

    policy: Policy
    kept: tuple[int, ...]
    modules: tuple[ModulePrecision, ...]
    deciders: tuple[int | None, ...]
    overrides: tuple[OverrideEffect, ...]


def distinct_modules(model: nn.Module) -> list[nn.Module]:
    """The modules of a model, each once, in an order that is the same for every model that was made alike.

    Example:
        >>> shared = nn.Linear(1, 1)
        >>> [type(module).__name__ for module in distinct_modules(nn.Sequential(shared, nn.ReLU(), shared))]
        ['Sequential', 'Linear', 'ReLU']
    """
    return list({id(place.module): place.module for place in places(model)}.values())


def read(policy: Policy, model: nn.Module, *, device: torch.device) -> Reading:
    """What a policy says of a model.

    Args:
        policy: The policy. Unlike `policy.apply`, this accepts overrides that match nothing: they are what is found.
        model: The model, with no policy applied to it.
        device: Where it will run, by which a default of `auto` is settled.

    Example:
        >>> reading = read(Policy.parse("bf16; 1=fp32"), nn.Sequential(nn.ReLU(), nn.ReLU()), device=torch.device("cpu"))
        >>> [module.precision for module in reading.modules]
        ['bf16', 'bf16', 'fp32']
    """
    policy = policy.resolve(device)
    where = places(model)
    decisions = chosen_decisions(decide(policy.overrides, where))
    paths: dict[int, str] = {}
    for place in where:
        paths.setdefault(id(place.module), place.path)
    seen: set[int] = set()
    modules = tuple(_module(policy, module, decision, path=paths[id(module)], seen=seen) for module, decision in decisions)
    deciders = tuple(None if decision is None else decision.override for _, decision in decisions)
    overrides = tuple(_override(policy, index, where, modules=modules, deciders=deciders) for index in range(len(policy.overrides)))
    kept = tuple(index for index, each in enumerate(overrides) if each.status == "effective")
    return Reading(
        policy=replace(policy, overrides=tuple(policy.overrides[index] for index in kept)),
        kept=kept,
        modules=modules,
        deciders=deciders,
        overrides=overrides,
    )


def _module(policy: Policy, module: nn.Module, decision: Decision | None, *, path: str, seen: set[int]) -> ModulePrecision:
    own = [parameter for parameter in module.parameters(recurse=False) if id(parameter) not in seen]
    seen.update(map(id, own))
    index = None if decision is None else decision.override
    precision: EffectivePrecision = policy.resolved if index is None else policy.overrides[index].precision
    shared = decision is None and not policy.pure  # All of a pure policy's modules have a region of their own.
    return ModulePrecision(
        path=path,
        kind=type(module).__name__,
        precision="caller" if shared else precision,
        reason="shared by places that do not agree" if shared else "default" if index is None else str(policy.overrides[index]),
        direct=decision is not None and decision.direct,
        parameters=sum(parameter.numel() for parameter in {id(each): each for each in own}.values()),
        calls=None,
    )


def _override(
    policy: Policy, index: int, where: Sequence[Place], *, modules: Sequence[ModulePrecision], deciders: Sequence[int | None]
) -> OverrideEffect:
    override = policy.overrides[index]
    decided = [module for module, decider in zip(modules, deciders, strict=True) if decider == index]
    status, note = _status(policy, index, where, decides=bool(decided))
    return OverrideEffect(
        override=str(override),
        modules=len(decided),
        parameters=sum(module.parameters for module in decided),
        ran=None,
        casts=None,
        status=status,
        note=note,
    )


def _status(policy: Policy, index: int, where: Sequence[Place], *, decides: bool) -> tuple[OverrideStatus, str]:
    override = policy.overrides[index]
    if override.kind == "op":
        if decided_overloads(policy.overrides, index):
            return "effective", ""
        return "overruled", "It decides about nothing: later overrides are about the same operation."
    if decides:
        return "effective", ""
    if any(override.matches(path=place.path, module_class=type(place.module)) for place in where):
        return "overruled", "It decides about nothing: later overrides are about all that it matches."
    try:
        check_all_match([override], where)
    except ConfigurationError:
        name = type(where[0].module).__name__
        hint = unmatched_hint(override, where)
        return "unmatched", f"It matches no module of this {name}, so the policy cannot be applied as it is.{hint}"
    return "absent", "The model has no module of this class. That is no fault: a policy may serve many models."


def decided_overloads(overrides: Sequence[Override], index: int) -> frozenset[str]:
    """The overloads, such as `aten::softmax.int`, that an override of an operation has the last word on.

    Example:
        >>> overrides = [Override.of("op:softmax", "fp32"), Override.of("op:linear", "fp32")]
        >>> sorted(decided_overloads(overrides, 1))
        ['aten::linear']
    """
    last: dict[str, int] = {}
    for place, each in enumerate(overrides):
        if each.kind == "op":
            last.update({overload.name: place for overload in functional_overloads(each.pattern)})
    return frozenset(name for name, place in last.items() if place == index)
