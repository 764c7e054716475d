"""Whether what was saved fits the run that it is loaded into, found out before anything is changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.checkpoint.names import canonical_names
from halfstep.checkpoint.placing import placed_like
from halfstep.checkpoint.spreading import optimizer_parameters
from halfstep.checkpoint.trees import copied
from halfstep.engine import is_expanded
from halfstep.errors import CheckpointError, did_you_mean
from halfstep.numerics.ranges import dtype_name

__all__ = ["Fitting", "fit_model", "fit_optimizer", "fit_schedulers"]

_SHOWN: Final = 5

# How an optimizer computes, which is this run's business, and what moves by a schedule, which need not be told.
_HOW: Final = ("fused", "foreach", "capturable", "differentiable")
_MOVING: Final = frozenset(
    {"lr", "initial_lr", "max_lr", "min_lr", "momentum", "base_momentum", "max_momentum", "betas", "params", "param_names"}
)


@final
class Fitting:
    """What does not fit, and what becomes of that.

    Attributes:
        strict: Whether everything has to.
        notes: What is other than it was, or was left out, a sentence or two each.
    """

    def __init__(self, *, strict: bool) -> None:
        self.strict = strict
        self.notes: list[str] = []

    def object(self, fault: str, *, instead: str) -> None:
        """Something does not fit.

        Args:
            fault: What it is, and what it means for the training.
            instead: What is done where that was asked for.

        Raises:
            CheckpointError: That was not asked for.
        """
        if self.strict:
            raise CheckpointError(f"{fault} Nothing was changed. To go on all the same: strict=False; then {instead}.")
        self.notes.append(f"{fault} {instead[0].upper()}{instead[1:]}.")


def fit_model(model: nn.Module, saved: Mapping[str, Any], *, part: str, fitting: Fitting) -> dict[str, Any]:
    """What to load into a model, by its own names.

    Args:
        model: The model.
        saved: What was saved, by canonical names.
        part: The name of the part, for messages.
        fitting: Notes what does not fit.

    Raises:
        CheckpointError: A shape or a type differs; with `strict` also an entry that one of the two lacks.
    """
    state = model.state_dict()
    names = canonical_names(model, list(state))
    current = {names[name]: name for name in state}
    missing = [name for name in current if name not in saved]
    unexpected = [name for name in saved if name not in current]
    if missing or unexpected:
        what = [
            *([f"it lacks {_some(missing)}"] if missing else []),
            *([f"it has {_some(unexpected)}, which this model has not{_near(unexpected, missing)}"] if unexpected else []),
        ]
        instead = "what both have is loaded, and the rest of the model stays as it is"
        fitting.object(f"The {part} in the checkpoint is another one: {'; '.join(what)}.", instead=instead)
    values = {}
    for name, own in current.items():
        if name in saved and not _is_fixed(f"{part}.{name}", saved[name], state[own]):
            values[own] = _fit_value(f"{part}.{name}", saved[name], state[own], fitting=fitting)
    return values


def _is_fixed(name: str, value: Any, own: Any) -> bool:
    """Whether nobody can write to a tensor, which is then as it was saved.

    Raises:
        CheckpointError: It is another.
    """
    if not isinstance(own, Tensor) or not isinstance(value, Tensor) or nn.parameter.is_lazy(own) or own.layout is not torch.strided:
        return False
    if not is_expanded(own):
        return False
    if torch.equal(own.cpu(), value):
        return True
    raise CheckpointError(f"{name} is expanded memory in this model, which cannot be written to, and differs from that in the checkpoint.")


def _fit_value(name: str, value: Any, own: Any, *, fitting: Fitting) -> Any:
    if not isinstance(own, Tensor):
        return copied(value)
    if nn.parameter.is_lazy(own):
        raise CheckpointError(f"{name} of this model has no shape yet. Run one batch through the model before loading.")
    if not isinstance(value, Tensor):
        raise CheckpointError(f"{name} is a tensor in this model, and a {type(value).__name__} in the checkpoint.")
    if value.shape != own.shape:
        raise CheckpointError(
            f"{name} has the shape {tuple(value.shape)} in the checkpoint, and {tuple(own.shape)} in this model. Nothing was changed. "
            "Build the model as it was when it was saved."
        )
    if value.dtype != own.dtype:
        then, now = map(dtype_name, (value.dtype, own.dtype))
        fitting.object(f"{name} is {then} in the checkpoint, and {now} in this model.", instead=f"it is converted to {now}")
    return placed_like(own, value)


def fit_optimizer(
    optimizer: Optimizer, saved: Any, *, model: nn.Module, setup: tuple[str, Any], part: str, fitting: Fitting
) -> dict[str, Any] | None:
    """What to load into an optimizer, with its parameters in this run's order; `None` where it is to stay as it is.

    Args:
        optimizer: The optimizer.
        saved: The state that it had.
        model: The model, which names its parameters.
        setup: The name of its class, and for each of its groups the names and shapes of the parameters, when it was saved.
        part: The name of the part, for messages.
        fitting: Notes what does not fit.

    Raises:
        CheckpointError: It is not the same optimizer, unless that was allowed.
    """
    kind, then = setup
    now = optimizer_parameters(model, optimizer)
    instead = f"the state of the {type(optimizer).__name__}, such as its moments, starts afresh"
    if kind != type(optimizer).__name__:
        fitting.object(f"The {part} was saved of a {kind}, and this run has a {type(optimizer).__name__}.", instead=instead)
        return None
    if difference := _difference(then, now):
        fitting.object(f"The {part} in the checkpoint is over other parameters: {difference}.", instead=instead)
        return None
    own = optimizer.state_dict()
    groups = [
        _fit_group(old, new, part=part, number=number, fitting=fitting)
        for number, (old, new) in enumerate(zip(saved["param_groups"], own["param_groups"], strict=True))
    ]
    index = _new_places(then, now)
    tensors = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {
        # Some optimizers keep what is no parameter's under a name.
        index.get(old, old): copied(values)
        if old not in index
        else {key: placed_like(tensors[index[old]], copied(value)) for key, value in values.items()}
        for old, values in saved["state"].items()
    }
    further = {key: copied(value) for key, value in saved.items() if key not in ("state", "param_groups")}
    return {**further, "state": state, "param_groups": groups}


def _difference(then: Sequence[Any], now: Sequence[Any]) -> str:
    """How the parameter groups differ, in words; empty where they do not, but for the order within each."""
    if len(then) != len(now):
        return f"it has {len(then)} parameter groups, and this run's has {len(now)}"
    for number, (old, new) in enumerate(zip(then, now, strict=True)):
        if len(old) != len(new):
            return f"group {number} has {len(old)} parameters there, and {len(new)} here"
        shapes = {name: tuple(shape) for name, shape in new}
        if sorted(name for name, _ in old) != sorted(shapes) and all(name for name, _ in (*old, *new)):
            others = [name for name, _ in old if name not in shapes]
            return f"group {number} has {_some(others)} there, which is not in it here{_near(others, shapes)}"
        for name, shape in old:
            if name in shapes and name and tuple(shape) != shapes[name]:
                return f"{name} has the shape {tuple(shape)} there, and {shapes[name]} here"
    return ""


def _new_places(then: Sequence[Any], now: Sequence[Any]) -> dict[int, int]:
    """For the number of each parameter in the saved state the one that it has in this run."""
    places: dict[int, int] = {}
    start = 0
    for old, new in zip(then, now, strict=True):
        names = [name for name, _ in new]
        named = all(names) and len(set(names)) == len(names) and sorted(names) == sorted(name for name, _ in old)
        for number, (name, _) in enumerate(old):
            places[start + number] = start + (names.index(name) if named else number)
        start += len(old)
    return places


def _fit_group(saved: Mapping[str, Any], own: Mapping[str, Any], *, part: str, number: int, fitting: Fitting) -> dict[str, Any]:
    kept = {key: own[key] for key in (*_HOW, "params", "param_names") if key in own}
    # Where something schedules the learning rate, the one that it started from tells whether the script was changed.
    moving = _MOVING - {"initial_lr" if "initial_lr" in saved and "initial_lr" in own else "" if "initial_lr" in (*saved, *own) else "lr"}
    for key, value in saved.items():
        if key not in kept and key not in moving and key in own and type(value) is type(own[key]) and value != own[key]:
            fitting.notes.append(
                f"{key} of the {part} (group {number}) is {value!r} in the checkpoint, and {own[key]!r} in this run: the checkpoint's is "
                "used, as load_state_dict() of an optimizer does. To change it, set it after loading."
            )
    return {**{key: copied(value) for key, value in saved.items() if key not in (*_HOW, "param_names")}, **kept}


def fit_schedulers(schedulers: Sequence[Any], saved: Any, *, kinds: Sequence[str], part: str, fitting: Fitting) -> list[Any] | None:
    """What to load into the schedulers; `None` where they are to stay as they are.

    Raises:
        CheckpointError: They are not the same, unless that was allowed.
    """
    now = [type(each).__name__ for each in schedulers]
    if list(kinds) != now:
        there, here = (", ".join(each) or "none" for each in (kinds, now))
        fitting.object(
            f"The checkpoint was saved with the {part} {there}, and this run has {here}: the learning rate would follow another course.",
            instead="schedules start as this run made them, and the learning rate is the checkpoint's",
        )
        return None
    return [copied(each) for each in ([saved] if len(now) == 1 else saved or [])]


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


def _near(names: Sequence[str], known: Iterable[str]) -> str:
    hint = did_you_mean(names[0], known=known) if names else ""
    return hint.rstrip("?").replace(" Did you mean", "; it is perhaps") if hint else ""
