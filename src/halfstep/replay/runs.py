"""A step that can be run again and again from the same state, in other precisions and with other loss scales."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, cast, final

import torch
from torch import Tensor, nn

from halfstep.casting import Region, in_force, shielding_table
from halfstep.errors import ConfigurationError, HalfstepWarning, InvalidTypeError
from halfstep.numerics import OUTSIDE, Draws, OperationDetail, Trace, Widening, trace
from halfstep.policy import Policy, attach_policy, check_no_policy
from halfstep.precision import HALVES
from halfstep.randomness import RandomState
from halfstep.records import OpRecord, Site
from halfstep.replay.checks import all_finite
from halfstep.replay.state import StepState

__all__ = ["Replay", "Run", "StepCode", "compute_step"]

# So many values of each result are compared.
_SAMPLES: Final = 64


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepCode:
    """What a training step computes.

    Attributes:
        model: The model.
        parts: The micro-batches: a function that computes the loss of each, and what its gradients are divided by.
        batch: What the step is given, for its tensors to be looked at; `None` where that is not known.
    """

    model: nn.Module
    parts: Sequence[tuple[Callable[[], Tensor], float]]
    batch: Any = None


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """What came out of a step.

    Attributes:
        policy: The policy that it ran under.
        scale: The loss scale.
        loss: The loss, unscaled.
        gradients: The gradients as the backward pass left them, multiplied by the scale, by the name of the parameter.
        buffers: What the buffers that are stored in half precision hold after it, in fp32.
        ops: The operations; empty where no trace was made.
        details: Their details, where they were asked for.
    """

    policy: Policy
    scale: float
    loss: float
    gradients: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    ops: tuple[OpRecord, ...]
    details: tuple[OperationDetail, ...]

    @cached_property
    def is_finite(self) -> bool:
        """Whether the loss and all gradients are, when this is first asked."""
        return self.loss - self.loss == 0 and all_finite(self.gradients.values())

    @cached_property
    def consumers(self) -> Mapping[int, list[int]]:
        """For each operation the operations that were given what it made."""
        consumers: dict[int, list[int]] = defaultdict(list)
        for index, detail in enumerate(self.details):
            for source in dict.fromkeys(detail.sources):
                if source != OUTSIDE:
                    consumers[source].append(index)
        return consumers

    def first_nan(self, index: int) -> OpRecord | None:
        """The first operation after another that makes NaN; `None` where there is none, and where that one makes NaN itself."""
        return None if self.ops[index].nans else next((op for op in self.ops[index + 1 :] if op.makes_nan), None)


@final
class Replay:
    """A step, as often as it is wanted; `with` puts everything back at the end.

    Args:
        code: What the step computes.
        device: The model's.
        random: The random numbers that it begins with; `None` for those of now.
        others: Tensors that may get gradients besides the model's parameters.

    Attributes:
        parameters: What may get gradients, by name.
        half_buffers: The buffers that are stored in half precision, by name.
        count: How often the step ran.
        samples: How many values of each result are kept for comparison.

    Example:
        >>> layer = nn.Linear(1, 1)
        >>> code = StepCode(model=layer, parts=[(lambda: layer(torch.full((2, 1), 1e6)).mean(), 1.0)])
        >>> with Replay(code, device=torch.device("cpu")) as replay:
        ...     [replay.run(Policy.parse(text), scale=1.0).is_finite for text in ("fp16", "fp32")]
        [False, True]
        >>> replay.count, layer.weight.grad
        (2, None)
    """

    def __init__(self, code: StepCode, *, device: torch.device, random: RandomState | None = None, others: Sequence[Tensor] = ()) -> None:
        self.code = code
        self.device = device
        named = {name: each for name, each in code.model.named_parameters() if each.requires_grad}
        known = {id(each) for each in named.values()}
        foreign = {f"optimizer[{place}]": each for place, each in enumerate(others) if id(each) not in known}
        self.parameters: Mapping[str, Tensor] = {**named, **foreign}
        self.half_buffers = {name: each for name, each in code.model.named_buffers() if each.dtype in HALVES}
        self.count = 0
        self.samples = _SAMPLES
        self._random = random
        self._state: StepState | None = None
        self._draws = Draws()

    def __enter__(self) -> Replay:
        check_no_policy(self.code.model)
        self._state = StepState(self.code.model, parameters=[*self.parameters.values()], random=self._random)
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._state is not None
        self._state.put_back()

    def run(self, policy: Policy, *, scale: float) -> Run:
        """Runs the step from its beginning."""
        return self._run(policy, scale=scale, within=nullcontext(), seen=None)

    def traced(self, policy: Policy, *, scale: float) -> Run:
        """The same under a trace, with the details of all operations; the random numbers that it draws are noted."""
        return self._run(policy, scale=scale, within=self._draws.taken(), seen=trace(self.code.model, samples=self.samples))

    def repeated(self, policy: Policy, *, scale: float) -> Run:
        """The same, with the random numbers that the last traced run drew."""
        return self._run(policy, scale=scale, within=self._draws.given(), seen=trace(self.code.model, samples=self.samples))

    def widened(self, policy: Policy) -> Run:
        """The same without half precision: the operations of the last traced run in fp32, with its random numbers and a scale of 1."""
        within = _both(self._draws.given(), Widening())
        with self.stored_wide():
            return self._run(policy, scale=1.0, within=within, seen=trace(self.code.model, samples=self.samples))

    @contextmanager
    def stored_wide(self) -> Iterator[None]:
        """A block in which what is stored in half precision is stored in fp32: gradients have the dtype of what they are of."""
        kept = [(each, each.data) for each in (*self.parameters.values(), *self.half_buffers.values()) if each.dtype in HALVES]
        try:
            for tensor, data in kept:
                tensor.data = data.float()
            yield
        finally:
            for tensor, data in kept:
                tensor.grad = None
                tensor.data = data

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """A block in which steps follow each other; what they change besides parameters and optimizers is put back at its end."""
        assert self._state is not None, "open it with `with` first"
        self._state.start_over()
        try:
            yield
        finally:
            self._state.start_over()

    def follow(self, code: StepCode, policy: Policy, *, scale: float) -> Run:
        """Runs another step from where things are now, within `going_on()`; its gradients stay with the parameters."""
        for parameter in self.parameters.values():
            parameter.grad = None
        loss = compute_step(code, policy, scale=scale)
        return Run(policy=policy, scale=scale, loss=loss, gradients=self._gradients(), buffers={}, ops=(), details=())

    def _run(self, policy: Policy, *, scale: float, within: AbstractContextManager[Any], seen: Trace | None) -> Run:
        assert self._state is not None, "open it with `with` first"
        self._state.start_over()
        self.count += 1
        own: list[range] = []
        try:
            inside = _both(within, seen or nullcontext())
            loss = compute_step(self.code, policy, scale=scale, within=inside, device=self.device, seen=seen, own=own)
            gradients = self._gradients()
            buffers = {name: each.detach().float().clone() for name, each in self.half_buffers.items()}
        finally:
            self._state.start_over()
        return Run(
            policy=policy,
            scale=scale,
            loss=loss,
            gradients=gradients,
            buffers=buffers,
            ops=() if seen is None else _with_users_sites(seen.ops, own),
            details=() if seen is None else seen.details,
        )

    def _gradients(self) -> dict[str, Tensor]:
        return {name: each.grad for name, each in self.parameters.items() if each.grad is not None}


def compute_step(
    code: StepCode,
    policy: Policy,
    *,
    scale: float = 1.0,
    within: AbstractContextManager[Any] | None = None,
    device: torch.device | None = None,
    seen: Trace | None = None,
    own: list[range] | None = None,
) -> float:
    """Runs the forward and the backward pass of a step under a policy; gradients are added to those that there are.

    Args:
        code: The step, whose model has no policy.
        policy: With no `auto` in it.
        scale: The loss scale.
        within: What is open around the passes.
        device: The model's; `None` for where its parameters are.
        seen: The trace that is open within.
        own: Takes in which of its operations are those that scale the loss.

    Returns:
        The loss, unscaled.
    """
    loss = 0.0
    device = device or next((each.device for each in (*code.model.parameters(), *code.model.buffers())), torch.device("cpu"))
    with _applied(policy, code.model) as (region, recomputation), warnings.catch_warnings():
        warnings.simplefilter("ignore", HalfstepWarning)  # A trace says that it runs a compiled model eagerly; that is known,
        warnings.filterwarnings("ignore", message="Using `torch.compile")  # and so is that it hangs hooks on all modules.
        with within or nullcontext():
            for compute, divisor in code.parts:
                part = _forward(compute, region=region, device=device)
                if part.requires_grad:
                    start = 0 if seen is None else seen.count
                    scaled = part if divisor == 1 else part / divisor
                    scaled = scaled if scale == 1 else scaled * torch.tensor(scale, device=part.device)
                    if own is not None and seen is not None:
                        own.append(range(start, seen.count))
                    with recomputation():
                        scaled.backward()  # type: ignore[no-untyped-call]
                loss += float(part.detach()) / divisor
    return loss


def _forward(compute: Callable[[], Tensor], *, region: Region, device: torch.device) -> Tensor:
    dtype = region.autocast_dtype
    with in_force(region.operations or shielding_table()), torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
        part = compute()
    _check_part(part)
    return part


def _with_users_sites(ops: tuple[OpRecord, ...], own: Sequence[range]) -> tuple[OpRecord, ...]:
    """Operations, of which those that scale a loss, and their backward passes, belong to where the loss was computed."""
    sites: dict[Site, Site] = {}
    for part in own:
        before = next((op.site for op in reversed(ops[: part.start]) if op.phase == "forward" and op.absmax is not None), None)
        sites |= {ops[index].site: before for index in part if before is not None}
    if not sites:
        return ops
    return tuple(replace(op, site=sites[op.site]) if op.site in sites else op for op in ops)


def _check_part(loss: object) -> None:
    if not isinstance(loss, Tensor):
        raise InvalidTypeError(f"The loss must be a scalar tensor, not a {type(loss).__name__}.")
    if loss.numel() != 1:
        raise ConfigurationError(
            f"The loss must be a scalar tensor, not one of shape {tuple(loss.shape)}. Reduce it, for example with loss.mean()."
        )


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


@contextmanager
def _applied(policy: Policy, model: nn.Module) -> Iterator[tuple[Region, Callable[[], AbstractContextManager[None]]]]:
    """A policy on a model for a while: the region of its forward pass, and a context for its backward pass."""
    if not policy.overrides and not policy.pure:
        yield Region(precision=policy.resolved), nullcontext
        return
    with attach_policy(policy, model, everywhere=False) as handle:
        yield handle.region, cast("Any", handle.recomputation)
