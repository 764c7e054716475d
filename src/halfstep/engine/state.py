"""What an engine goes on from after an interruption, beside model, optimizer and schedule."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from halfstep.errors import ConfigurationError, HalfstepWarning, InvalidTypeError
from halfstep.records import Precision, ScalerStats
from halfstep.scaler import LossScaler

__all__ = ["engine_state", "engine_stats", "load_engine_state"]


def engine_stats(counting: torch.amp.GradScaler | None, *, steps: int) -> ScalerStats:
    """Steps and skips of an engine.

    Args:
        counting: The scaler that counts them; `None` where no step is ever skipped.
        steps: How many there were.

    Raises:
        ConfigurationError: The scaler is one of torch's, which does not count.
    """
    if counting is None:
        return ScalerStats(steps=steps, skips=0, consecutive_skips=0, scale=1.0)
    if not isinstance(counting, LossScaler):
        raise ConfigurationError(f"A {type(counting).__name__} does not count its steps. Leave scaler out, or pass a halfstep.LossScaler.")
    return counting.stats()


def engine_state(*, precision: Precision, steps: int, scaler: torch.amp.GradScaler | None, checker: LossScaler | None) -> dict[str, Any]:
    """The state of an engine between two steps.

    Args:
        precision: The engine's.
        steps: How many it has taken or skipped.
        scaler: What its losses are scaled with.
        checker: What counts its skips where losses are not scaled.
    """
    counting = scaler if isinstance(scaler, LossScaler) else checker
    return {
        "precision": precision,
        "steps": steps,
        "scaler": None if scaler is None else scaler.state_dict(),
        "counts": None if counting is None else _counts(counting.state_dict()),
    }


def _counts(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: state[name] for name in ("steps", "skips", "consecutive_skips") if name in state}


def load_engine_state(
    state: object,
    *,
    precision: Precision,
    scaler: torch.amp.GradScaler | None,
    checker: LossScaler | None,
    adopt_settings: bool,
) -> int:
    """Loads the scaler's part of a state, and returns the number of steps.

    Args:
        state: As from `engine_state`.
        precision: The engine's, which may be another than the state's.
        scaler: The engine's.
        checker: What counts the engine's skips where losses are not scaled.
        adopt_settings: Whether the scaler takes over the settings in the state, too.

    Raises:
        InvalidTypeError: It is no dictionary, or an entry is of the wrong type.
        ConfigurationError: An entry is missing or not allowed. Nothing was changed.
    """
    if not isinstance(state, Mapping):
        raise InvalidTypeError(
            f"An engine's state is a dictionary, as MixedPrecision.state_dict() returns it, not a {type(state).__name__}."
        )
    if missing := [name for name in ("precision", "steps", "scaler") if name not in state]:
        raise ConfigurationError(
            f"The engine's state has no entry {missing[0]!r}, but {', '.join(map(repr, state)) or 'none'}. Load what "
            "MixedPrecision.state_dict() returned; the state of a scaler alone goes to amp.scaler.load_state_dict()."
        )
    steps = state["steps"]
    if isinstance(steps, bool) or not isinstance(steps, int):
        raise InvalidTypeError(f"The engine's state, entry 'steps', is a whole number, not {steps!r}.")
    if steps < 0:
        raise ConfigurationError(f"The engine's state, entry 'steps', is {steps}; allowed are whole numbers from 0.")
    saved, counts = state["scaler"], state.get("counts")
    if not isinstance(counts, Mapping | None):
        raise InvalidTypeError(f"The engine's state, entry 'counts', is a dictionary or None, not {counts!r}.")
    if checker is not None and counts:
        checker.load_state_dict({**checker.state_dict(), **_counts(counts)})
    if scaler is not None:
        _load_scaler(scaler, saved, counts, precisions=(state["precision"], precision), adopt_settings=adopt_settings)
    elif saved:
        _say(f"The state was saved in {state['precision']} with loss scaling; {precision} here needs none, so the scale is set aside.")
    return steps


def _load_scaler(
    scaler: torch.amp.GradScaler, saved: Any, counts: Mapping[str, Any] | None, *, precisions: tuple[str, str], adopt_settings: bool
) -> None:
    then, now = precisions
    if not saved:
        if counts and isinstance(scaler, LossScaler):
            scaler.load_state_dict({**scaler.state_dict(), **_counts(counts)})
        _say(f"The state was saved in {then} without loss scaling; {now} here starts with a fresh loss scale.", stacklevel=5)
    elif isinstance(scaler, LossScaler):
        scaler.load_state_dict(saved, adopt_settings=adopt_settings)
    else:
        scaler.load_state_dict(_for_torch(saved, scaler=scaler, adopt_settings=adopt_settings))


def _for_torch(saved: object, *, scaler: torch.amp.GradScaler, adopt_settings: bool) -> dict[str, Any]:
    """A state for one of torch's own scalers, which would fail in the middle of a wrong one, and would take over all settings."""
    if not isinstance(saved, Mapping):
        raise InvalidTypeError(f"The engine's state, entry 'scaler', is a dictionary or None, not a {type(saved).__name__}.")
    settings = {
        "growth_factor": scaler.get_growth_factor(),
        "backoff_factor": scaler.get_backoff_factor(),
        "growth_interval": scaler.get_growth_interval(),
    }
    if missing := [name for name in ("scale", "_growth_tracker", *settings) if name not in saved]:
        raise ConfigurationError(f"The scaler's state in the engine's has no entry {missing[0]!r}, but {', '.join(map(repr, saved))}.")
    if adopt_settings:
        return dict(saved)
    # torch's kernel compares the tracker with the interval for equality.
    return {**saved, **settings, "_growth_tracker": min(saved["_growth_tracker"], scaler.get_growth_interval() - 1)}


def _say(what: str, *, stacklevel: int = 4) -> None:
    warnings.warn(what, HalfstepWarning, stacklevel=stacklevel)
