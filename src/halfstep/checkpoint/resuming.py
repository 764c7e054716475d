"""An engine's own state and the step that it was in the middle of, fitted to the engine of this run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from halfstep._torch import versions_in
from halfstep.checkpoint.contents import outside_parameters
from halfstep.checkpoint.fitting import Fitting
from halfstep.checkpoint.names import canonical_names, frozen_names, transient_buffers
from halfstep.checkpoint.placing import shard_like
from halfstep.checkpoint.trees import copied
from halfstep.distributed import fully_sharded_modules, local_tensor
from halfstep.engine import MixedPrecision, StepProgress, trained_parameters
from halfstep.numerics.ranges import dtype_name

__all__ = ["fit_buffers", "fit_frozen", "fit_outside", "fit_progress", "fit_state", "own_versions"]

_GIVEN_UP = "that step is given up: its micro-batches are not learned from"


def own_versions(model: nn.Module, saved: Any) -> dict[str, dict[str, Any]]:
    """The versions that a model's modules had when it was saved, by the paths that they have in this run."""
    versions = versions_in(saved)
    if versions is None:
        return {}
    paths = [path for path, _ in model.named_modules(remove_duplicate=False)]
    canonical = canonical_names(model, [f"{path}.x" if path else "x" for path in paths])
    found = {path: canonical[f"{path}.x" if path else "x"][:-2] for path in paths}
    return {path: versions[name] for path, name in found.items() if name in versions}


def fit_buffers(model: nn.Module, saved: Mapping[str, Tensor], *, fitting: Fitting) -> list[tuple[Tensor, Tensor]]:
    """The buffers that are no part of a model's state, each with what to copy into it.

    One that has grown since, as a cache does, is left as the model made it.
    """
    own = transient_buffers(model)
    names = canonical_names(model, list(own))
    pairs = []
    for name, buffer in own.items():
        value = saved.get(names[name])
        if value is not None and _fits(value, buffer):
            pairs.append((buffer, value))
        elif value is not None:
            fitting.notes.append(
                f"The buffer {names[name]}, which is in no state of the model, is {_kind(value)} in the checkpoint, and {_kind(buffer)} "
                "in this run: it stays as the model made it."
            )
    return pairs


def fit_frozen(model: nn.Module, saved: Sequence[str], *, part: str, fitting: Fitting) -> None:
    """Says where other parameters are trained than were."""
    own = set(frozen_names(model))
    known = {*canonical_names(model, [name for name, _ in model.named_parameters()]).values()}
    for names, then, now in (
        (sorted(own - set(saved)), "was trained", "is frozen (requires_grad=False)"),
        (sorted(known & set(saved) - own), "was frozen", "is trained"),
    ):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            fitting.notes.append(
                f"{part}.{names[0]}{more} {then} when the checkpoint was saved, and {now} in this run, which stays so: for the same run, "
                "freeze the same parameters before loading."
            )


def fit_outside(engine: MixedPrecision, saved: Mapping[str, Tensor], *, fitting: Fitting) -> list[tuple[Tensor, Tensor]]:
    """The tensors that an engine trains beside its model, each with what to copy into it.

    Raises:
        CheckpointError: One is missing, or has another shape or type, unless that was allowed.
    """
    pairs = []
    for name, tensor in outside_parameters(engine).items():
        value = saved.get(name)
        if value is not None and _fits(value, tensor):
            pairs.append((tensor, value))
        else:
            there = "missing" if value is None else _kind(value)
            fault = f"The tensor of {name}, which is none of the model's, is {there} in the checkpoint, and {_kind(tensor)} in this run."
            fitting.object(fault, instead="it stays as this run made it")
    return pairs


def _fits(value: Tensor, tensor: Tensor) -> bool:
    return value.shape == tensor.shape and value.dtype == tensor.dtype


def _kind(tensor: Tensor) -> str:
    return f"{dtype_name(tensor.dtype)} of shape {tuple(tensor.shape)}"


def fit_state(
    engine: MixedPrecision, saved: Mapping[str, Any], *, policy: str, clipping: Sequence[float | None], fitting: Fitting
) -> dict[str, Any]:
    """What to load into an engine besides the model and the optimizers.

    Raises:
        CheckpointError: The state of the loss scaler is missing, unless that was allowed.
    """
    state: dict[str, Any] = copied(dict(saved))
    if policy != str(engine.policy):
        fitting.notes.append(f"It was saved in {policy}, and this run goes on in {engine.policy}.")
    for name, then, now in zip(("max_grad_norm", "max_grad_value"), clipping, (engine.max_grad_norm, engine.max_grad_value), strict=True):
        if then != now:
            fitting.notes.append(f"It was saved with {name}={then}, and this run goes on with {name}={now}.")
    scaler = engine.scaler
    if scaler is None:
        return state
    if not state.get("scaler"):
        state["scaler"] = None
        if "fp16" in policy:
            fitting.object(
                f"The checkpoint was saved in {policy} without the state of a loss scaler, which this run has. The loss scale would start "
                f"afresh at {scaler.get_scale():g}: steps are skipped until it has fallen to where gradients are finite, and until it has "
                "grown again small gradients are lost.",
                instead="it starts afresh",
            )
        return state
    own = scaler.state_dict()
    differing = [
        f"{name} {value!r} (there {state['scaler'][name]!r})"
        for name, value in own.items()
        if name in _SETTINGS and name in state["scaler"] and state["scaler"][name] != value
    ]
    if differing:
        fitting.notes.append(f"The loss scaler keeps the settings of this run: {', '.join(differing)}.")
    return state


_SETTINGS = frozenset({"growth_factor", "backoff_factor", "growth_interval", "min_scale", "max_scale", "hysteresis", "static"})


def fit_progress(
    engine: MixedPrecision, saved: Any, *, setup: Mapping[str, Any], state: Mapping[str, Any], is_same: bool, fitting: Fitting
) -> StepProgress | None:
    """The step that was saved in the middle; `None` where it was saved between two.

    Args:
        engine: The engine.
        saved: What was computed for that step.
        setup: How the engine was set up then.
        state: What will be loaded into the engine.
        is_same: Whether as many ranks saved it as load it.
        fitting: Notes what does not fit.

    Raises:
        CheckpointError: The step cannot be gone on with, unless that was allowed.
    """
    if saved is None:
        return None
    _check_form(saved)
    count, of = saved["micro_batches"], setup["accumulate"]
    fault = _fault(engine, saved, setup=setup, state=state, is_same=is_same)
    if fault:
        fitting.object(f"The checkpoint was saved after {count} of {of} micro-batches of a step, and {fault}.", instead=_GIVEN_UP)
        count = 0
    model = engine.model
    parameters = trained_parameters(engine)
    names = canonical_names(model, list(parameters))
    buffers = canonical_names(model, [name for name, _ in model.named_buffers()])
    gradients = saved["gradients"] if count else {}
    held = saved["held_back"] if count else {}
    loss = saved["loss"]
    return StepProgress(
        micro_batches=count,
        loss=None if loss is None else loss.to(engine.device, copy=True),
        gradients={
            name: shard_like(parameters[name], gradients[names[name]].to(engine.device, copy=True))
            for name in names
            if names[name] in gradients
        },
        is_held=bool(count) and saved["is_held"],
        held_back={name: held[names[name]].to(engine.device, copy=True) for name in names if names[name] in held},
        began=saved["began"],
        buffers={
            name: saved["buffers"][buffers[name]]
            for name, buffer in model.named_buffers()
            if buffers[name] in saved["buffers"] and _fits(saved["buffers"][buffers[name]], buffer)
        },
    )


def _fault(engine: MixedPrecision, saved: Mapping[str, Any], *, setup: Mapping[str, Any], state: Mapping[str, Any], is_same: bool) -> str:
    """Why a step cannot be gone on with, after a comma; empty where it can."""
    if not saved["micro_batches"]:
        return ""
    if not is_same:
        return "this run has another number of ranks, whose gradients are others"
    if setup["accumulate"] != engine.accumulate:
        return f"this run has accumulate={engine.accumulate}"
    if bool(state.get("scaler")) != (engine.scaler is not None):
        return f"this run is in {engine.precision}, with gradients of another scale"
    if saved["held_back"] and not fully_sharded_modules(engine.model):
        return "this model is not in fully_shard, which held its gradients back"
    parameters = trained_parameters(engine)
    names = canonical_names(engine.model, list(parameters))
    known = {names[name]: parameter for name, parameter in parameters.items()}
    for name in (*saved["gradients"], *saved["held_back"]):
        if name not in known:
            return f"this model has no {name} that its gradient could belong to"
    for name, gradient in saved["gradients"].items():
        if not _fits(gradient, local_tensor(known[name])):
            return f"the gradient of {name} is {_kind(gradient)}, and {name} of this run {_kind(local_tensor(known[name]))}"
    return ""


def _check_form(saved: Any) -> None:
    """Accepts what has the form of a step in progress.

    Raises:
        TypeError: It has not.
    """
    count, loss = saved["micro_batches"], saved["loss"]
    tensors = [each for part in ("gradients", "held_back", "buffers") for each in saved[part].values()]
    if (
        type(count) is not int
        or count < 0
        or not all(type(saved[name]) is bool for name in ("is_held", "began"))
        or not all(isinstance(each, Tensor) for each in tensors)
        or not (isinstance(loss, Tensor) and loss.dim() == 0 if count else loss is None or isinstance(loss, Tensor))
    ):
        raise TypeError("the step in progress is not of the form that it should have")
