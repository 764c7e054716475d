"""What is to be loaded into a run, settled before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from halfstep.checkpoint.contents import schedulers_of
from halfstep.checkpoint.fitting import Fitting, fit_model, fit_optimizer, fit_schedulers
from halfstep.checkpoint.names import empty_buffers
from halfstep.checkpoint.nesting import fit_inner
from halfstep.checkpoint.reading import Loaded
from halfstep.checkpoint.restoring import EnginePlan, Plan
from halfstep.checkpoint.resuming import fit_buffers, fit_frozen, fit_outside, fit_progress, fit_state, own_versions
from halfstep.checkpoint.spreading import part_name
from halfstep.engine import MixedPrecision
from halfstep.errors import CheckpointError, ConfigurationError, HalfstepError
from halfstep.randomness import RandomState

__all__ = ["plan_for"]


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
    record = loaded.record
    if (saved := [each.name for each in record.engines]) != list(engines):
        there, here = (", ".join(each or "a single one without a name" for each in names) for names in (saved, list(engines)))
        raise CheckpointError(
            f"{loaded.path} was saved with other engines: {there}. This run has {here}. Pass the same, by the same names."
        )
    try:
        plans = [_engine_plan(name, engine, loaded, fitting=fitting) for name, engine in engines.items()]
        random = _random_state(loaded)
    except HalfstepError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError, RuntimeError, ArithmeticError) as error:
        raise CheckpointError(
            f"{loaded.path} cannot be loaded into this run: {type(error).__name__}: {error}. Nothing was changed. Either it is not of the "
            "form that halfstep writes, or code of the model or of an optimizer, such as a hook, has raised that."
        ) from error
    _compare_places(loaded, device=next(iter(engines.values())).device.type, fitting=fitting)
    return Plan(engines=plans, random=_fit_random(random, loaded, fitting=fitting), fitting=fitting)


def _engine_plan(name: str, engine: MixedPrecision, loaded: Loaded, *, fitting: Fitting) -> EnginePlan:
    def part(kind: str) -> Any:
        return loaded.tree[part_name(name, kind)]

    setup, model = part("setup"), engine.model
    empty = empty_buffers(model)
    entries = {each: value for each, value in part("model").items() if each not in empty}
    values = fit_model(model, entries, part=part_name(name, "model"), fitting=fitting)
    fit_frozen(model, setup["frozen"], part=part_name(name, "model"), fitting=fitting)
    state = fit_state(engine, part("amp"), policy=setup["policy"], clipping=setup["clipping"], fitting=fitting)
    optimizers, inner = _fit_optimizers(engine, part("optimizer"), part("inner"), setup, part=part_name(name, "optimizer"), fitting=fitting)
    return EnginePlan(
        engine=engine,
        model=values,
        fillings=[
            (*empty[each], value.to(engine.device, copy=True))
            for each, value in (*part("model").items(), *part("buffers").items())
            if each in empty and isinstance(value, Tensor)
        ],
        copies=[
            *fit_buffers(model, part("buffers"), fitting=fitting),
            *fit_outside(engine, part("parameters"), fitting=fitting),
        ],
        versions=own_versions(model, part("model")),
        optimizers=optimizers,
        inner=inner,
        schedulers=fit_schedulers(
            schedulers_of(engine), part("scheduler"), kinds=setup["schedulers"], part=part_name(name, "scheduler"), fitting=fitting
        ),
        state=state,
        progress=fit_progress(engine, part("progress"), setup=setup, state=state, is_same=loaded.is_same, fitting=fitting),
    )


def _fit_optimizers(
    engine: MixedPrecision, saved: Any, inner: Any, setup: Any, *, part: str, fitting: Fitting
) -> tuple[list[dict[str, Any] | None], list[dict[str, Any]]]:
    """What to load into each optimizer of an engine, and into those that it holds."""
    several = len(setup["optimizers"]) > 1
    states = saved if several else [saved]
    if len(states) != len(engine.optimizers):
        fitting.object(
            f"The checkpoint was saved with {len(states)} optimizers, and this run has {len(engine.optimizers)}.",
            instead="the state of the optimizers, such as their moments, starts afresh",
        )
        return [None] * len(engine.optimizers), [{}] * len(engine.optimizers)
    fitted, held = [], []
    for number, (optimizer, state) in enumerate(zip(engine.optimizers, states, strict=True)):
        name = f"{part}.{number}" if several else part
        then = (setup["optimizers"][number], setup["parameters"][number])
        fitted.append(fit_optimizer(optimizer, state, model=engine.model, setup=then, part=name, fitting=fitting))
        held.append(fit_inner(optimizer, inner[number], part=name, fitting=fitting))
    return fitted, held


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


def _random_state(loaded: Loaded) -> RandomState:
    try:
        return RandomState.from_plain(loaded.tree["random"])
    except ConfigurationError as error:
        raise CheckpointError(f"{loaded.path} cannot be loaded: its part random is not what it should be. {error}") from error


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
