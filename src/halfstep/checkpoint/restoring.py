"""What was saved, put into the run: all of it, or nothing."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

from halfstep._torch import loads_by_itself, set_versions, versions_in
from halfstep.checkpoint.contents import schedulers_of
from halfstep.checkpoint.fitting import Fitting, fit_model, fit_optimizer, fit_schedulers
from halfstep.checkpoint.reading import Loaded, copied
from halfstep.checkpoint.resuming import fit_buffers, fit_outside, fit_progress, fit_state, own_versions
from halfstep.checkpoint.spreading import part_name
from halfstep.engine import MixedPrecision, StepProgress, go_on_from, state_of
from halfstep.errors import CheckpointError, HalfstepError, HalfstepWarning
from halfstep.randomness import RandomState

__all__ = ["EnginePlan", "Plan", "plan_for"]


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)  # tensors have no single truth value to compare by
class EnginePlan:
    """What is to be loaded into an engine, in the form that each of its parts takes.

    Attributes:
        engine: The engine.
        model: For the model, by its own names.
        copies: Tensors that are no part of the model's state, each with what is to be copied into it.
        versions: Those of the model's modules, by path.
        optimizers: For each optimizer; `None` where it stays as it is.
        schedulers: For each scheduler; `None` where they stay as they are.
        state: For the engine itself.
        progress: The step that it is in the middle of; `None` between two steps.
    """

    engine: MixedPrecision
    model: Mapping[str, Any]
    copies: Sequence[tuple[Tensor, Tensor]]
    versions: Mapping[str, dict[str, Any]]
    optimizers: Sequence[dict[str, Any] | None]
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
            together(lambda: plans.extend(self._load(undo, stacklevel=stacklevel + 4)))
            for plan in plans:
                go_on_from(plan.progress, engine=plan.engine)  # On several ranks they do it together.
            undo.pop_all()
        if self.random is not None:
            self.random.restore()

    def _load(self, undo: ExitStack, *, stacklevel: int) -> list[EnginePlan]:
        plans = [_load_parts(each, fitting=self.fitting, undo=undo) for each in self.engines]
        for note in self.fitting.notes:
            warnings.warn(note, HalfstepWarning, stacklevel=stacklevel)
        for plan in plans:
            _load_model(plan, undo=undo)
        return plans


def _load_parts(plan: EnginePlan, *, fitting: Fitting, undo: ExitStack) -> EnginePlan:
    """Loads everything but the model, which is left for last because it takes the most to undo; and returns what remains to be loaded."""
    engine = plan.engine
    for optimizer, state in zip(engine.optimizers, plan.optimizers, strict=True):
        if state is not None:
            undo.callback(setattr, optimizer, "param_groups", optimizer.param_groups)
            undo.callback(setattr, optimizer, "state", optimizer.state)
            optimizer.load_state_dict(state)
    for scheduler, state in zip(schedulers_of(engine), plan.schedulers or [], strict=False):
        undo.callback(scheduler.load_state_dict, copy.deepcopy(scheduler.state_dict()))
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
    if any(loads_by_itself(module) for module in model.modules()):  # Code of the user's own may fail when half is done.
        state = model.state_dict()
        kept = _Versioned((name, copied(value)) for name, value in state.items())
        set_versions(kept, versions_in(state) or {})
        undo.callback(model.load_state_dict, kept, strict=False)
    values: dict[str, Any] = dict(plan.model)
    if plan.versions:
        set_versions(values := _Versioned(values), plan.versions)
    model.load_state_dict(values, strict=False)
    for target, value in plan.copies:
        undo.callback(_write, target, target.detach().clone())
        _write(target, value)


def _write(target: Tensor, value: Tensor) -> None:
    with torch.no_grad():
        target.copy_(value)


class _Versioned(dict[str, Any]):
    """A dictionary that an attribute can be set on, as torch's are."""


def plan_for(engines: Mapping[str, MixedPrecision], loaded: Loaded, *, strict: bool) -> Plan:
    """What to load into the engines of a run, which is not changed yet.

    Args:
        engines: By name.
        loaded: What a checkpoint holds.
        strict: Whether everything has to fit.

    Raises:
        CheckpointError: It does not fit.
    """
    fitting = Fitting(strict=strict)
    record, tree = loaded.record, loaded.tree
    if (saved := [each.name for each in record.engines]) != list(engines):
        there, here = (", ".join(each or "a single one without a name" for each in names) for names in (saved, list(engines)))
        raise CheckpointError(
            f"{loaded.path} was saved with other engines: {there}. This run has {here}. Pass the same, by the same names."
        )
    try:
        plans = [_engine_plan(name, engine, loaded, fitting=fitting) for name, engine in engines.items()]
        random = RandomState.from_plain(tree["random"])
    except HalfstepError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{loaded.path} cannot be loaded into this run: {type(error).__name__}: {error}. Nothing was changed. Either it is not of the "
            "form that halfstep writes, or code of the model or of an optimizer, such as a hook, has raised that."
        ) from error
    _compare_places(loaded, device=next(iter(engines.values())).device.type, fitting=fitting)
    return Plan(engines=plans, random=_fit_random(random, loaded, fitting=fitting), fitting=fitting)


def _engine_plan(name: str, engine: MixedPrecision, loaded: Loaded, *, fitting: Fitting) -> EnginePlan:
    def part(kind: str) -> Any:
        return loaded.tree[part_name(name, kind)]

    setup = part("setup")
    model = fit_model(engine.model, part("model"), part=part_name(name, "model"), fitting=fitting)
    many = len(setup["optimizers"]) > 1
    saved = part("optimizer") if many else [part("optimizer")]
    optimizers: list[dict[str, Any] | None] = [None] * len(engine.optimizers)
    if len(saved) != len(engine.optimizers):
        fitting.object(
            f"The checkpoint was saved with {len(saved)} optimizers, and this run has {len(engine.optimizers)}.",
            instead="the state of the optimizers, such as their moments, starts afresh",
        )
    else:
        optimizers = [
            fit_optimizer(
                optimizer,
                state,
                model=engine.model,
                setup=(setup["optimizers"][number], setup["parameters"][number]),
                part=part_name(name, f"optimizer.{number}" if many else "optimizer"),
                fitting=fitting,
            )
            for number, (optimizer, state) in enumerate(zip(engine.optimizers, saved, strict=True))
        ]
    schedulers = fit_schedulers(
        schedulers_of(engine), part("scheduler"), kinds=setup["schedulers"], part=part_name(name, "scheduler"), fitting=fitting
    )
    state = fit_state(engine, part("amp"), policy=setup["policy"], fitting=fitting)
    progress = fit_progress(engine, part("progress"), setup=setup, state=state, is_same=loaded.is_same, fitting=fitting)
    return EnginePlan(
        engine=engine,
        model=model,
        copies=[
            *fit_buffers(engine.model, part("buffers"), fitting=fitting),
            *fit_outside(engine, part("parameters"), fitting=fitting),
        ],
        versions=own_versions(engine.model, part("model")),
        optimizers=optimizers,
        schedulers=schedulers,
        state=state,
        progress=progress,
    )


def _compare_places(loaded: Loaded, *, device: str, fitting: Fitting) -> None:
    """Says what may make the run another one, although everything fits."""
    record = loaded.record
    for what, then, now in (("torch", record.torch, torch.__version__), ("the device type", record.device, device)):
        if then != now:
            fitting.notes.append(f"It was saved with {what} {then}, and this run has {now}: results may differ in the last bits.")
    if not loaded.is_same:
        fitting.notes.append(
            f"It was saved by {'one process' if record.ranks == 1 else f'{record.ranks} ranks'}, and this run has another number, so it is "
            "not the same run: batches are put together otherwise. A rank that was not there keeps random numbers of its own, and has what "
            "rank 0 saved for itself, such as buffers and extra."
        )


def _fit_random(random: RandomState, loaded: Loaded, *, fitting: Fitting) -> RandomState | None:
    if not loaded.has_own:
        return None
    count = torch.cuda.device_count()
    if len(random.cuda) <= count:
        return random
    fitting.notes.append(
        f"It holds the random state of {len(random.cuda)} CUDA devices, and this process sees {count}: what is drawn on the others is "
        "left out."
    )
    return replace(random, cuda=random.cuda[:count])
