"""A policy on a model: the modules that run in other precisions, and the operations."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from inspect import getattr_static
from typing import TYPE_CHECKING, Any, final

from torch import nn
from typing_extensions import Self

from halfstep._torch import HeldSetting
from halfstep.casting import Island, Islands, OperationTable, Region, Registrations, check_no_island, in_force
from halfstep.errors import ConfigurationError, InvalidTypeError
from halfstep.policy.matching import Decision, Place, check_all_match, decide, places
from halfstep.precision import DTYPES
from halfstep.records import Precision

if TYPE_CHECKING:
    from halfstep.policy.values import Policy

__all__ = ["PolicyHandle", "attach_policy", "check_no_policy", "chosen_decisions"]


@final
class PolicyHandle:
    """A policy that is applied to a model.

    Attributes:
        policy: The policy.
        model: The model.
        region: What the code around the model runs in, where that is the engine's to say.
    """

    def __init__(
        self, policy: Policy, model: nn.Module, *, region: Region, removals: Sequence[Callable[[], None]], everywhere: bool
    ) -> None:
        self.policy = policy
        self.model = model
        self.region = region
        self._removals = tuple(removals)
        self._everywhere = everywhere

    def recomputation(self) -> AbstractContextManager[None]:
        """A backward pass through the model, in which what was checkpointed runs again as it ran in the forward pass."""
        return in_force(self.region.operations)

    def remove(self) -> None:
        """Takes the policy away: the model is as it was. The second call does nothing."""
        removals, self._removals = self._removals, ()
        for remove in removals:
            remove()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """A block in which the policy is not on the model; it is no matter where it was removed for good."""
        is_applied = bool(self._removals)
        self.remove()
        try:
            yield
        finally:
            if is_applied:
                self._removals = attach_policy(self.policy, self.model, everywhere=self._everywhere)._removals

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def attach_policy(policy: Policy, model: nn.Module, *, everywhere: bool) -> PolicyHandle:
    """Applies a policy to a model.

    Args:
        policy: The policy.
        model: The model, bare or wrapped.
        everywhere: Whether the model's forward enters the default precision by itself, and overrides of operations hold in every autocast
            region. Otherwise somebody else enters `handle.region` around the model and the loss.

    Raises:
        InvalidTypeError: It is no module.
        ConfigurationError: An override is about nothing in the model, or a policy is applied already. Nothing was changed.
    """
    given: Any = model
    if not isinstance(given, nn.Module):
        raise InvalidTypeError(f"A policy is applied to a torch.nn.Module, not to a {type(given).__name__}.")
    where = places(model)
    check_all_match(policy.overrides, where)
    if policy.pure:
        _check_not_lazy(model)
    device = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), None)
    if policy.default == "auto":
        if device is None:
            raise ConfigurationError(
                "The policy's default is auto, but the model has no parameters that tell its device. Name fp32, bf16 or fp16 instead."
            )
        policy = policy.resolve(device)
    regions = _Regions(policy)
    islands = _islands(policy, where, regions=regions, everywhere=everywhere)
    around = Region(precision="fp32") if policy.pure else regions.of(None)
    made = Islands(islands, device_type="cpu" if device is None else device.type)
    try:
        registrations = Registrations(regions.tables(), standing=around.operations if everywhere else None)
    except BaseException:
        made.remove()
        raise
    # A compiled backward pass would be traced with the autocast that is on around the model, in islands, too.
    setting = HeldSetting("backward_pass_autocast", "off")
    # An engine that is dropped with its model leaves nothing of this to the process.
    root = where[0].module
    weakref.finalize(root, registrations.abandon)
    weakref.finalize(root, setting.close)
    removals = (made.remove, registrations.remove, setting.close)
    return PolicyHandle(policy, model, region=around, removals=removals, everywhere=everywhere)


def check_no_policy(model: nn.Module) -> None:
    """Accepts a model that no policy is applied to.

    Raises:
        ConfigurationError: One is.
    """
    for module in model.modules():
        check_no_island(module)


def _check_not_lazy(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise ConfigurationError(
                f"The parameter {name!r} has no shape yet, as in lazy modules before their first batch. Run one batch through the model "
                "before a pure policy is applied to it."
            )


@final
class _Regions:
    """The regions of a policy, one for each precision and set of operations."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._known: dict[tuple[Precision, bool, Precision | None, tuple[tuple[str, Precision], ...]], Region] = {}
        self._has_operations = any(each.kind == "op" for each in policy.overrides)

    def of(self, index: int | None, *, within: Precision | None = None) -> Region:
        """The region of what the override of an index decides about; with `None`, the policy's own.

        Args:
            index: The index.
            within: In a pure policy, the precision of the module around; `None` for the whole model.
        """
        overrides = self._policy.overrides
        precision = self._policy.resolved if index is None else overrides[index].precision
        # An operation runs as the last override says that is about it or about the module that it is called in.
        after = -1 if index is None else index
        later: dict[str, Precision] = {}
        for each in overrides[after + 1 :]:
            if each.kind == "op":
                later.pop(each.pattern, None)  # An overload may stand between two overrides of its operation: the order counts.
                later[each.pattern] = each.precision
        key = (precision, index is None, within, tuple(later.items()))
        if key not in self._known:
            table = OperationTable.of(later, base=precision) if self._has_operations else None
            self._known[key] = Region(
                precision=precision,
                pure=self._policy.pure,
                operations=table,
                within=within,
                is_outermost=index is None,
            )
        return self._known[key]

    def tables(self) -> list[OperationTable]:
        """The tables of operations of all regions."""
        return [region.operations for region in self._known.values() if region.operations is not None]


def _islands(policy: Policy, where: Sequence[Place], *, regions: _Regions, everywhere: bool) -> list[Island]:
    """The modules that get a region of their own, or something else that the policy needs."""
    root = where[0].module
    decided = dict(chosen_decisions(decide(policy.overrides, where)))
    around = _precisions_around(policy, where, decided) if policy.pure else {}
    own: dict[nn.Module, Region] = {}
    for module, decision in decided.items():
        runs = "forward" in vars(module) or getattr_static(type(module), "forward") is not nn.Module.forward
        overridden = decision is not None and decision.override is not None
        if decision is not None and runs and (policy.pure or overridden or (everywhere and module is root)):
            own[module] = regions.of(decision.override, within=around.get(module))
    skipping = {module for module in decided if _would_skip(module, own)}
    return [
        Island(
            module=module,
            region=own.get(module),
            shows_weights=policy.pure or (module in own and own[module].precision == "fp32"),
            calls_inner=module in skipping,
            # What hooks of the whole model do, such as to gather or to cast, is its surroundings' business.
            with_hooks=module is not root,
            seen_again=None if not policy.pure else own[module].dtype if module in own else DTYPES[policy.resolved],
        )
        for module in decided
        if policy.pure or module in own or module in skipping
    ]


def _precisions_around(
    policy: Policy, where: Sequence[Place], decided: Mapping[nn.Module, Decision | None]
) -> dict[nn.Module, Precision | None]:
    """For each module but the whole model the precision of the module that it is in, in the first of its places."""
    modules = {place.path: place.module for place in where}
    found: dict[nn.Module, Precision | None] = {}
    for place in where:
        if place.path and place.module not in found:
            decision = decided[modules[place.path.rpartition(".")[0]]]
            index = None if decision is None else decision.override
            found[place.module] = policy.resolved if index is None else policy.overrides[index].precision
    return found


def _would_skip(module: nn.Module, own: Mapping[nn.Module, Region]) -> bool:
    """Whether a module may compute without calling those inside of it, although they have regions that are not its own."""
    if not isinstance(module, nn.TransformerEncoderLayer):
        return False
    return any(inner in own and own[inner] is not own.get(module) for inner in module.modules() if inner is not module)


def chosen_decisions(decisions: Sequence[Decision]) -> list[tuple[nn.Module, Decision | None]]:
    """For each module what decides about it; `None` for one that runs in the precision of whatever calls it.

    A module may be in several places. What is said of it directly, in any of them, is said of it; otherwise, if the places do not agree, it
    runs as what calls it.
    """
    by_module: dict[int, list[Decision]] = {}
    for decision in decisions:
        by_module.setdefault(id(decision.place.module), []).append(decision)
    chosen: list[tuple[nn.Module, Decision | None]] = []
    for several in by_module.values():
        direct = [each for each in several if each.direct]
        agreed = len({each.override for each in several}) == 1
        best = max(direct, key=lambda each: -1 if each.override is None else each.override) if direct else several[0] if agreed else None
        chosen.append((several[0].place.module, best))
    return chosen
