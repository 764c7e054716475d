"""What `amp.initialize` decided, for all later calls; and what of it goes into a checkpoint."""

from __future__ import annotations

import logging
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, final
from weakref import WeakKeyDictionary, WeakSet

from torch import nn
from torch.optim import Optimizer

from halfstep.amp.levels import Properties
from halfstep.amp.skipping import StepGuard
from halfstep.errors import ConfigurationError, HalfstepWarning, InvalidTypeError, StepOrderError
from halfstep.scaler import LossScaler

__all__ = ["Session", "begin", "current", "guards", "known_models", "load_state_dict", "logger", "session", "state_dict"]

logger: Final = logging.getLogger("halfstep.amp")

# Of all calls of `amp.initialize`, as long as the optimizers and models live.
guards: Final[WeakKeyDictionary[Optimizer, StepGuard]] = WeakKeyDictionary()
known_models: Final[WeakSet[nn.Module]] = WeakSet()


@final
@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Session:
    """What the last call of `amp.initialize` decided.

    Attributes:
        properties: The level and what was changed of it; `None` with `enabled=False`, when all calls do nothing.
        scalers: One for each loss.
        verbose: Whether skipped steps are logged.
    """

    properties: Properties | None
    scalers: tuple[LossScaler, ...] = ()
    verbose: bool = False

    def scaler(self, loss_id: int) -> LossScaler:
        """That of a loss.

        Raises:
            ConfigurationError: There are not so many losses.
        """
        given: Any = loss_id
        if isinstance(given, bool) or not isinstance(given, int) or not 0 <= given < len(self.scalers):
            raise ConfigurationError(
                f"amp.scale_loss(loss_id={loss_id!r}): with num_losses={len(self.scalers)}, allowed are whole numbers from 0 to "
                f"{len(self.scalers) - 1}. Pass a larger num_losses to amp.initialize."
            )
        return self.scalers[loss_id]


@final
@dataclass(slots=True)
class _Holder:
    held: Session | None = None


_holder: Final = _Holder()


def begin(made: Session) -> None:
    """Makes a session the one that all later calls belong to."""
    _holder.held = made


def current() -> Session | None:
    """The session; `None` before `amp.initialize`."""
    return _holder.held


def session(*, call: str) -> Session:
    """The session, for a call that needs one.

    Raises:
        StepOrderError: There is none yet.
    """
    if _holder.held is None:
        raise StepOrderError(
            f"{call} was called before amp.initialize. Call model, optimizer = amp.initialize(model, optimizer, opt_level=...) first."
        )
    return _holder.held


def state_dict(destination: OrderedDict[str, Any] | None = None) -> OrderedDict[str, Any]:
    """The state of all loss scalers, for a checkpoint, in the form of Apex: one entry for each loss.

    Args:
        destination: What it is put into; `None` for a new dictionary.

    Returns:
        For each loss `loss_scaler0`, `loss_scaler1`, ..., the entries `loss_scale` and `unskipped`, the steps in a row without a skip.
        Empty with `enabled=False`.

    Raises:
        StepOrderError: It was called before `amp.initialize`.

    Example:
        >>> import torch
        >>> from halfstep import amp
        >>> layer = torch.nn.Linear(2, 2)
        >>> model, optimizer = amp.initialize(layer, torch.optim.SGD(layer.parameters(), lr=0.1), opt_level="O1")
        >>> amp.state_dict()["loss_scaler0"]
        {'loss_scale': 65536.0, 'unskipped': 0}
    """
    found: OrderedDict[str, Any] = OrderedDict() if destination is None else destination
    for number, scaler in enumerate(session(call="amp.state_dict()").scalers):
        state = scaler.state_dict()
        found[f"loss_scaler{number}"] = {"loss_scale": state["scale"], "unskipped": state["_growth_tracker"]}
    return found


def load_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Has the loss scalers go on from what `state_dict` returned, here or in Apex. Load the model and the optimizers, too.

    A static loss scale is a setting, so it stays. A scale beyond the bounds of this run is brought back to them, with a warning.

    Args:
        state_dict: The entry of a checkpoint.

    Raises:
        StepOrderError: It was called before `amp.initialize`.
        InvalidTypeError: It is no mapping of mappings.
        ConfigurationError: An entry is not one of a loss scaler. Nothing was changed.

    Example:
        >>> import torch
        >>> from halfstep import amp
        >>> model = amp.initialize(torch.nn.Linear(2, 2), opt_level="O2")
        >>> amp.load_state_dict({"loss_scaler0": {"loss_scale": 1024.0, "unskipped": 7}})
        >>> amp.state_dict()["loss_scaler0"]
        {'loss_scale': 1024.0, 'unskipped': 7}
    """
    now = session(call="amp.load_state_dict(...)")
    given: Any = state_dict
    if not isinstance(given, Mapping):
        raise InvalidTypeError(f"amp.load_state_dict(...) takes what amp.state_dict() returned, not a {type(given).__name__}.")
    if now.properties is None:
        return
    names = [f"loss_scaler{number}" for number in range(max(len(given), len(now.scalers)))]
    for name, entry in given.items():
        if name not in names or not isinstance(entry, Mapping) or {"loss_scale", "unskipped"} - set(entry):
            raise ConfigurationError(
                f"amp.load_state_dict(...): {name!r}: {entry!r} is no entry of a loss scaler. Allowed are loss_scaler0, loss_scaler1, ..., "
                "each with loss_scale and unskipped, as amp.state_dict() returns them."
            )
    if len(given) != len(now.scalers):
        warnings.warn(
            f"The loaded state is one of {len(given)} loss scalers, and amp.initialize made {len(now.scalers)} (num_losses). Those that "
            "are in both are loaded.",
            HalfstepWarning,
            stacklevel=2,
        )
    for name, scaler in zip(names, now.scalers, strict=False):
        if name in given:
            scaler.load_state_dict({"scale": given[name]["loss_scale"], "_growth_tracker": given[name]["unskipped"]})
