"""What is done to a run that skips step after step, where its user asked for it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Literal, final

import torch
from torch import nn

from halfstep.diagnosis import SkipDiagnosis, diagnose_skips
from halfstep.errors import ConfigurationError, HalfstepError, HalfstepWarning, PersistentSkipsError
from halfstep.files import write_text
from halfstep.hardware import native_precisions
from halfstep.numerics import users_level
from halfstep.policy import Policy, PolicyHandle
from halfstep.records import UNKNOWN, Action, Diagnosis
from halfstep.watching.modules import model_of
from halfstep.watching.scene import Scene
from halfstep.watching.states import OptimizerState, ScalerState, parameters_of

__all__ = ["RULE", "Intervention", "Interventions", "check_intervention"]

Intervention = Literal["warn", "raise", "save_and_stop", "fall_back"]

# The rule whose alerts these answer.
RULE: Final = "persistent_skips"

# So many skips in a row are looked into, where that was asked for.
_DIAGNOSED_AFTER: Final = 5

# Where a scale goes on after a change: high enough for most gradients, and not so high that it begins with skips.
_NEW_SCALE: Final = 2.0**12

_CHECKPOINT: Final = "stopped.pt"
_DIAGNOSIS: Final = "diagnosis.json"


@final
class Interventions:
    """Counts skips in a row, and does what was asked for once there are too many.

    Args:
        scene: What is known of the process.
        kind: What to do; `None` for nothing.
        limit: After so many skips in a row.
        diagnose: Whether skips are looked into.
        folder: Of the run; `None` on a rank that writes nothing.
        model: What is trained; `None` to look for it.
        note: Is given each action.
    """

    def __init__(
        self,
        scene: Scene,
        *,
        kind: Intervention | None,
        limit: int,
        diagnose: bool,
        folder: Path | None,
        model: nn.Module | None,
        note: Callable[[Action], None],
    ) -> None:
        self._scene = scene
        self._kind = kind
        self._limit = limit
        self._diagnose = diagnose
        self._folder = folder
        self._model = model
        self._note = note
        self._due: OptimizerState | None = None
        self._diagnosing: SkipDiagnosis | None = None
        self._is_diagnosed = False
        self._is_waiting = False
        self._handle: PolicyHandle | None = None
        self._changes: Iterator[str] | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether something is to be done at all."""
        return self._kind is not None or self._diagnose

    def count(self, state: OptimizerState, *, skipped: bool) -> None:
        """Takes in what became of a step."""
        state.skips_in_row = state.skips_in_row + 1 if skipped else 0
        if state.skips_in_row == _DIAGNOSED_AFTER and self._diagnose and not self._is_diagnosed:
            self._look_into(state)
        if self._kind is not None and state.skips_in_row >= self._limit:
            self._due = state

    def at_rest(self, scaler: ScalerState) -> None:
        """Does what is due. A scaler has just updated: nothing of its step is under way.

        Raises:
            PersistentSkipsError: The run is to end.
        """
        state = self._due
        if state is None:
            return
        self._due = None
        skips, state.skips_in_row = state.skips_in_row, 0
        match self._kind:
            case "warn":
                self._act(state, "warn", f"{skips} steps in a row were skipped.")
                warnings.warn(_text(skips, scaler), HalfstepWarning, stacklevel=users_level())
            case "raise":
                self._act(state, "raise", f"The run is ended after {skips} skips in a row.")
                raise PersistentSkipsError(_text(skips, scaler))
            case "save_and_stop":
                saved = self._save(state, scaler)
                self._act(state, "save_and_stop", f"The run is ended after {skips} skips in a row. {saved}")
                raise PersistentSkipsError(f"{_text(skips, scaler)} {saved}")
            case "fall_back":
                if self._changes is None:
                    self._changes = self._fall_back(state, scaler)
                if (change := next(self._changes, None)) is not None:
                    since = f"After {skips} skips in a row, " if skips else "With what the step has shown, "
                    self._act(state, "fall_back", since + change)

    def _act(self, state: OptimizerState, action: str, message: str) -> None:
        self._note(Action(rule=RULE, step=state.steps, action=action, message=message))

    def _find_model(self, state: OptimizerState) -> nn.Module | None:
        return self._model if self._model is not None else model_of(parameters_of(state.optimizer()))

    def _save(self, state: OptimizerState, scaler: ScalerState) -> str:
        """Writes the state of the run, and says where."""
        optimizer: Any = state.optimizer()
        model, holder = self._find_model(state), scaler.scaler()
        if self._folder is None:
            return "The first rank saves its state."
        path = self._folder / _CHECKPOINT
        part = path.with_suffix(".part")
        kept = {
            "model": None if model is None else model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scaler": None if holder is None else holder.state_dict(),
            "step": state.steps,
        }
        try:
            torch.save(kept, part)
            part.replace(path)
        except Exception as error:  # Such as state that cannot be pickled.
            part.unlink(missing_ok=True)
            return f"Its state could not be saved: {type(error).__name__}: {error}"
        return f"The state of the model, the optimizer and the scaler is in {path}."

    def _look_into(self, state: OptimizerState) -> None:
        scaler = None if state.scaler is None else state.scaler.scaler()
        model = self._find_model(state)
        if scaler is None or model is None or self._diagnosing is not None:
            return
        self._is_diagnosed = True
        self._diagnosing = diagnose_skips(scaler, model=model, after=1, on_diagnosis=lambda found: self._take(state, found))
        self._diagnosing.__enter__()

    def _take(self, state: OptimizerState, found: Diagnosis) -> None:
        """A step was looked into. Whatever goes wrong here is not the script's concern."""
        try:
            self._tell(state, found)
        except Exception as error:
            self._act(state, "diagnose", f"The diagnosis could not be written down: {error}")

    def _tell(self, state: OptimizerState, found: Diagnosis) -> None:
        place = ""
        if self._folder is not None:
            write_text(self._folder / _DIAGNOSIS, found.to_json(indent=2) + "\n")
            place = f" It is in {self._folder / _DIAGNOSIS}."
        where = "" if found.origin is None else f", at {found.origin.site}"
        if self._is_waiting:
            self._is_waiting, self._due = False, state
        self._act(state, "diagnose", f"Diagnosis: {found.cause}{where}. {found.explanation}{place}")

    def _fall_back(self, state: OptimizerState, scaler: ScalerState) -> Iterator[str]:
        """One change after the other, each as the end of a sentence, from the one that costs least."""
        if not self._is_diagnosed:
            self._look_into(state)
            self._is_waiting = self._diagnosing is not None
            yield "the next step is looked into."
            self._is_waiting = False
        override = None if self._diagnosing is None or self._diagnosing.diagnosis is None else _override_of(self._diagnosing.diagnosis)
        model = self._find_model(state)
        self._end_diagnosis()
        if override is not None and model is not None:
            try:
                self._handle = Policy.parse(f"fp16; {override}").apply(model)
            except HalfstepError as error:
                yield f"the remedy {override!r} could not be applied: {error}"
            else:
                _set_scale(scaler)
                yield f"the run goes on in fp16 with {override}, at a loss scale of {_NEW_SCALE:g}."
            self._remove_policy()
        if _has_bf16(state):
            self._force(torch.bfloat16)
            _set_scale(scaler)
            yield "the run goes on in bf16."
        self._force("off")
        _set_scale(scaler)
        yield "the run goes on in fp32."

    def _force(self, what: torch.dtype | str) -> None:
        """Has all regions compute in something else."""
        self._scene.forced = what
        self._scene.at_change()

    def _remove_policy(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()

    def _end_diagnosis(self) -> None:
        watch, self._diagnosing = self._diagnosing, None
        if watch is not None:
            watch.__exit__(None, None, None)

    def close(self) -> None:
        """Leaves the loop as it was."""
        self._end_diagnosis()
        self._remove_policy()
        self._scene.forced = None


def _text(skips: int, scaler: ScalerState) -> str:
    holder = scaler.scaler()
    scale = "" if holder is None else f" The loss scale is now {holder.get_scale():g}."
    return (
        f"{skips} optimizer steps in a row were skipped, because gradients were not finite.{scale} A skipped step changes no parameter. "
        "`halfstep diagnose` finds the operation, and `halfstep run --diagnose` looks into the step as it runs."
    )


def _override_of(found: Diagnosis) -> str | None:
    """What a diagnosis says is to run in fp32; without a replay it has tried nothing, and then that is the module of the origin."""
    override = next((each.override for each in found.remedies if each.override), None)
    if override is not None or found.origin is None or found.cause not in {"forward", "backward"}:
        return override
    module = found.origin.site.module
    return None if module in {"", UNKNOWN} else f"{module}=fp32"


def _set_scale(scaler: ScalerState) -> None:
    holder: Any = scaler.scaler()
    if holder is not None and holder.get_scale() < _NEW_SCALE:
        holder.update(_NEW_SCALE)


def _has_bf16(state: OptimizerState) -> bool:
    device = next((each.device for each in parameters_of(state.optimizer())), torch.device("cpu"))
    return device.type == "cpu" or "bf16" in native_precisions(device)


def check_intervention(kind: object) -> None:
    """Refuses what is no intervention.

    Raises:
        ConfigurationError: It is another value.
    """
    allowed = Intervention.__args__  # type: ignore[attr-defined]
    if kind is not None and kind not in allowed:
        raise ConfigurationError(f"watch(on_persistent_skips={kind!r}): it is one of {', '.join(map(repr, allowed))}, or None.")
