"""What was saved, put into the run: all of it, or nothing."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from halfstep._torch import loads_by_itself, set_versions, versions_in
from halfstep.checkpoint.contents import schedulers_of
from halfstep.checkpoint.fitting import Fitting
from halfstep.checkpoint.nesting import load_inner, shared_groups
from halfstep.checkpoint.trees import copied
from halfstep.engine import MixedPrecision, StepProgress, go_on_from, state_of
from halfstep.errors import CheckpointError, HalfstepError, HalfstepWarning
from halfstep.randomness import RandomState
from halfstep.replay.state import StepState, TrainingState

__all__ = ["EnginePlan", "Plan"]


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)  # tensors have no single truth value to compare by
class EnginePlan:
    """What is to be loaded into an engine, in the form that each of its parts takes.

    Attributes:
        engine: The engine.
        model: For the model, by its own names.
        fillings: Places for buffers that are empty in this run, each with its tensor.
        copies: Tensors that are no part of the model's state, each with what is to be copied into it.
        versions: Those of the model's modules, by path.
        optimizers: For each optimizer; `None` where it stays as it is.
        inner: For what each optimizer holds of others.
        schedulers: For each scheduler; `None` where they stay as they are.
        state: For the engine itself.
        progress: The step that it is in the middle of; `None` between two steps.
    """

    engine: MixedPrecision
    model: Mapping[str, Any]
    fillings: Sequence[tuple[nn.Module, str, Tensor]]
    copies: Sequence[tuple[Tensor, Tensor]]
    versions: Mapping[str, dict[str, Any]]
    optimizers: Sequence[dict[str, Any] | None]
    inner: Sequence[Mapping[str, Any]]
    schedulers: Sequence[Any] | None
    state: Mapping[str, Any]
    progress: StepProgress | None


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """What is to be loaded into a run.

    Attributes:
        engines: For each engine.
        random: The state of the random generators; `None` where they stay as they are.
        fitting: What does not fit, and what became of that.
    """

    engines: Sequence[EnginePlan]
    random: RandomState | None
    fitting: Fitting

    def carry_out(self, *, stacklevel: int, together: Callable[[Callable[[], None]], object] = lambda work: work()) -> None:
        """Loads everything. When anything raises, such as code of the model's own, the run is as it was before.

        Args:
            stacklevel: Of the warnings in which the notes are said, for the line that the user wrote.
            together: Calls a function on each of several ranks, and raises on all when it raised on one.

        Raises:
            CheckpointError: What was saved cannot be gone on from in this run.
        """
        plans: list[EnginePlan] = []
        with ExitStack() as undo:
            for each in self.engines:
                undo.callback(go_on_from, None, engine=each.engine)  # In the end, with the values that are back.
            together(lambda: plans.extend(self._load(undo, stacklevel=stacklevel + 4)))
            for plan in plans:
                undo.callback(plan.engine.discard)
                go_on_from(plan.progress, engine=plan.engine)  # On several ranks they do it together.
            if self.random is not None:
                self.random.restore()
            undo.pop_all()

    def _load(self, undo: ExitStack, *, stacklevel: int) -> list[EnginePlan]:
        try:
            plans = [_load_parts(each, fitting=self.fitting, undo=undo) for each in self.engines]
        except HalfstepError:
            raise
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(
                "What was saved of an optimizer, a scheduler or the loss scaler cannot be loaded into that of this run: "
                f"{type(error).__name__}: {str(error).rstrip('.')}. Nothing was changed."
            ) from error
        for note in self.fitting.notes:
            warnings.warn(note, HalfstepWarning, stacklevel=stacklevel)
        for plan in plans:
            _load_model(plan, undo=undo)
        return plans


def _load_parts(plan: EnginePlan, *, fitting: Fitting, undo: ExitStack) -> EnginePlan:
    """Loads everything but the model, which is left for last because it takes the most to undo; and returns what remains to be loaded."""
    engine = plan.engine
    for optimizer, state, inner in zip(engine.optimizers, plan.optimizers, plan.inner, strict=True):
        if state is not None:
            shared = shared_groups(optimizer)
            undo.callback(setattr, optimizer, "param_groups", optimizer.param_groups)
            undo.callback(setattr, optimizer, "state", optimizer.state)
            optimizer.load_state_dict(state)
            load_inner(optimizer, inner, shared=shared, undo=undo)
    for scheduler, state in zip(schedulers_of(engine), plan.schedulers or [], strict=False):
        undo.callback(_attempt, partial(scheduler.load_state_dict, copy.deepcopy(scheduler.state_dict())))
        scheduler.load_state_dict(state)
    undo.callback(_load_quietly, engine, state_of(engine))
    for said in _load_quietly(engine, plan.state, adopt_settings=False):
        fitting.notes.append(said)
    if plan.progress is None or not plan.progress.micro_batches or engine.scaler is None:
        return plan
    then, now = plan.state["scaler"]["scale"], engine.scaler.get_scale()
    if then == now:
        return plan
    fitting.object(
        f"The checkpoint was saved in the middle of a step, with gradients multiplied by a loss scale of {then:g}, and this "
        f"run's is {now:g}.",
        instead="that step is given up: its micro-batches are not learned from",
    )
    return replace(plan, progress=replace(plan.progress, micro_batches=0, is_held=False))


def _load_quietly(engine: MixedPrecision, state: Mapping[str, Any], *, adopt_settings: bool = True) -> list[str]:
    """Loads an engine's own state, and returns what was said about it."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        engine.load_state_dict(state, adopt_settings=adopt_settings)
    return [str(each.message) for each in said]


def _load_model(plan: EnginePlan, *, undo: ExitStack) -> None:
    model = plan.engine.model
    parameters = [*model.parameters()]
    undo.callback(TrainingState(parameters, optimizers=[]).put_back)
    undo.callback(StepState(model, parameters=parameters, random=None).put_back)
    if any(loads_by_itself(module) for module in model.modules()):  # It may keep more than tensors.
        state = model.state_dict()
        kept = _Versioned((name, copied(value)) for name, value in state.items())
        set_versions(kept, versions_in(state) or {})
        undo.callback(_attempt, lambda: model.load_state_dict(kept, strict=False))
    for module, name, tensor in plan.fillings:
        undo.callback(setattr, module, name, None)
        setattr(module, name, tensor)
    values: dict[str, Any] = dict(plan.model)
    if plan.versions:
        set_versions(values := _Versioned(values), plan.versions)
    model.load_state_dict(values, strict=False)
    for target, value in plan.copies:
        undo.callback(_write, target, target.detach().clone())
        _write(target, value)


def _attempt(work: Callable[[], object]) -> None:
    """Calls a function that may fail again as it has failed before."""
    with suppress(Exception):
        work()


def _write(target: Tensor, value: Tensor) -> None:
    with torch.no_grad():
        target.copy_(value)


class _Versioned(dict[str, Any]):
    """A dictionary that an attribute can be set on, as torch's are."""
