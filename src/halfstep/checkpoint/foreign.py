"""Going on with the loss scale of a run that another library trained."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from numbers import Real
from pathlib import Path
from typing import Any, Final, final

import torch

from halfstep._torch import has_found_infs
from halfstep.archive import verify
from halfstep.archive.frames import COMMENT, DIGITS
from halfstep.checkpoint.scalers import FoundScaler, Search, find_scalers
from halfstep.checkpoint.stand_ins import read_inert
from halfstep.engine import MixedPrecision, state_of
from halfstep.errors import CheckpointError, ConfigurationError, HalfstepError, HalfstepWarning, InvalidTypeError, StepOrderError
from halfstep.scaler import LossScaler, ScalerSettings
from halfstep.scaler.settings import check_scale
from halfstep.scaler.state import ScalerState

__all__ = ["ImportedScaler", "import_scaler_state"]

# In a folder, the file that has the scaler's state, and who writes it.
_FILES: Final = {
    "scaler.pt": "Accelerate's save_state, or the Trainer of transformers",
    "rank-0.pt": "halfstep",
    "meta.pt": "Lightning with FSDP",
}
_ACCEPTED: Final = (
    "Accepted are a file of torch.save, such as Accelerate's scaler.pt, a .ckpt of Lightning, or one of your own; a folder with a file "
    + ", ".join(f"{name} (of {writer})" for name, writer in _FILES.items())
    + "; and a dictionary."
)
_MOST_NAMED: Final = 20
_LONGEST_NAME: Final = 60

_TORCH_SETTINGS: Final = ("growth_factor", "backoff_factor", "growth_interval")
# What only a LossScaler has, beside what comes into play when a run fails.
_TORCH_FIXED: Final = ("max_scale", "hysteresis", "static")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedScaler:
    """What a scaler goes on from after `import_scaler_state`.

    Attributes:
        source: The file that it was read from; empty for a dictionary.
        key: Where in it, as keys with dots between them; empty where the state was all there was.
        scale: The loss scale now.
        growth_tracker: Updates in a row without a skip since it last moved.
    """

    source: str
    key: str
    scale: float
    growth_tracker: int


def import_scaler_state(
    source: str | os.PathLike[str] | Mapping[str, Any],
    amp: MixedPrecision | torch.amp.GradScaler,
    *,
    adopt_settings: bool = False,
    key: str = "",
) -> ImportedScaler:
    """Has a loss scaler go on from what Accelerate, the Trainer of transformers, Lightning, Fabric, Apex or your own loop saved.

    Without this a run that moves to halfstep starts with a fresh loss scale. Only the scaler's state is loaded: load the model, the
    optimizer and the schedule as before.

    Nothing in a file is executed: objects in it whose classes torch does not count as plain data, such as hyperparameters, are passed over.
    Weights are not read, but of files that torch wrote before 1.6, and of those that halfstep itself wrote, which are verified whole.

    Args:
        source: A file of `torch.save`; the folder of a checkpoint that has `scaler.pt` in it; or what was loaded from one.
        amp: The engine, or the scaler itself.
        adopt_settings: Whether the growth factor, backoff factor and growth interval in it, and with a `LossScaler` its other settings, are
            taken over, too. By default those of this run stay, and a warning says which ones differ.
        key: Where the state is in the dictionary, as keys with dots between them, such as `discriminator.scaler`; needed where there are
            several.

    Returns:
        Where the state was found, and what the scaler goes on from.

    Raises:
        InvalidTypeError: An argument is of the wrong type.
        ConfigurationError: The engine scales no losses, there are several states and no `key`, or nothing is at that key.
        StepOrderError: An iteration is in progress.
        CheckpointError: It cannot be read, or holds no state of a scaler, or one that no run could go on from. Nothing was changed.
        DamagedCheckpointError: It is a checkpoint of halfstep, and not as it was saved.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import mkdtemp
        >>> from halfstep.checkpoint import import_scaler_state
        >>> theirs = torch.amp.GradScaler("cpu", init_scale=1024.0)
        >>> path = Path(mkdtemp()) / "last.pt"
        >>> torch.save({"epoch": 3, "scaler": theirs.state_dict()}, path)
        >>> scaler = LossScaler("cpu")
        >>> imported = import_scaler_state(path, scaler)
        >>> imported.key, imported.scale, scaler.get_scale()
        ('scaler', 1024.0, 1024.0)
    """
    scaler = _scaler_of(amp)
    if not isinstance(key, str):
        raise InvalidTypeError(f"import_scaler_state(key=...) takes text, such as 'discriminator.scaler', not {key!r}.")
    if isinstance(source, Mapping):
        path, tree = "", source
    else:
        file = _file_of(source)
        path, tree = str(file), _tree_in(file)
    found = _chosen(tree, key=key, of=path or "The dictionary", scaler=scaler)
    where = " at ".join(filter(None, (path or "the dictionary", found.key and repr(found.key))))
    entries, settings = _checked(found, scaler=scaler, where=where, adopt_settings=adopt_settings)
    if not isinstance(scaler, LossScaler) and has_found_infs(scaler):
        raise StepOrderError("import_scaler_state(...) was called between unscale_() or step() and update(): call it between iterations.")
    if notes := _notes(found.entries, entries, scaler=scaler, settings=settings, adopt_settings=adopt_settings):
        warnings.warn(f"The state of the loss scaler in {where}: {' '.join(notes)}", HalfstepWarning, stacklevel=2)
    if isinstance(amp, MixedPrecision):
        amp.load_state_dict({**state_of(amp), "scaler": entries}, adopt_settings=adopt_settings)
    elif isinstance(scaler, LossScaler):
        scaler.load_state_dict(entries, adopt_settings=adopt_settings)
    else:
        scaler.load_state_dict(entries)
    now = scaler.state_dict()
    return ImportedScaler(source=path, key=found.key, scale=now["scale"], growth_tracker=now["_growth_tracker"])


def _scaler_of(amp: Any) -> torch.amp.GradScaler:
    """The scaler that is to go on.

    Raises:
        InvalidTypeError: It is neither an engine nor a scaler.
        ConfigurationError: It scales no losses.
    """
    if isinstance(amp, MixedPrecision):
        if amp.scaler is None:
            why = "its scaler is disabled" if amp.precision == "fp16" else "its losses need no scaling"
            raise ConfigurationError(
                f"This engine trains in {amp.precision} without a loss scaler, since {why}: there is nothing to load a scaler's state "
                "into. Leave import_scaler_state(...) out, or train in fp16 with a scaler."
            )
        return amp.scaler
    if not isinstance(amp, torch.amp.GradScaler):
        raise InvalidTypeError(
            "import_scaler_state(source, amp) takes a halfstep.MixedPrecision, a halfstep.LossScaler or a torch.amp.GradScaler, "
            f"not a {type(amp).__name__}."
        )
    if not amp.is_enabled():
        raise ConfigurationError(
            f"This {type(amp).__name__} is disabled: there is nothing to load a scaler's state into. Pass one that is enabled. "
            "(torch.amp.GradScaler() without a device means CUDA, and disables itself where there is none.)"
        )
    return amp


def _file_of(source: Any) -> Path:
    """The file to read.

    Raises:
        InvalidTypeError: It is no path.
        CheckpointError: There is none.
    """
    if not isinstance(source, str | os.PathLike):
        raise InvalidTypeError(
            f"import_scaler_state(source) takes a path, or the dictionary that was loaded, not a {type(source).__name__}."
        )
    path = Path(source)
    try:
        if path.is_dir():
            return _file_in(path)
        if path.is_file():
            return path
        is_there = path.exists()
    except (OSError, ValueError) as error:  # Such as a folder that may not be read, or a name with a zero in it.
        raise CheckpointError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}. {_ACCEPTED}") from error
    raise CheckpointError(f"{path} is {'no regular file' if is_there else 'not there'}. {_ACCEPTED}")


def _file_in(folder: Path) -> Path:
    for name in _FILES:
        if (folder / name).is_file():
            return folder / name
    names = sorted(child.name for child in folder.iterdir())
    below = [name for name in names if any((folder / name / file).is_file() for file in _FILES)]
    hint = f" Name one of the folders in it: {_listed(below)}." if below else ""
    raise CheckpointError(
        f"The folder {folder} has no scaler.pt in it, but {_listed(names)}.{hint} {_ACCEPTED} Runs in bf16 and fp32 save no scaler, "
        "because they have none."
    )


def _tree_in(file: Path) -> Any:
    """What a file holds; one that halfstep itself wrote is verified first."""
    end = b""
    with suppress(OSError), file.open("rb") as opened:  # The reader says that it cannot be read.
        opened.seek(-len(COMMENT) - DIGITS, os.SEEK_END)
        end = opened.read()
    if end.startswith(COMMENT):
        verify(file)
    return read_inert(file)


def _chosen(tree: Any, *, key: str, of: str, scaler: torch.amp.GradScaler) -> FoundScaler:
    """The one state that is meant.

    Raises:
        ConfigurationError: There is no such key, or there are several states.
        CheckpointError: There is none.
    """
    try:
        search = find_scalers(tree, key=key)
    except LookupError as error:
        others = [each.key for each in find_scalers(tree).found]
        raise ConfigurationError(
            f"import_scaler_state(key={key!r}): there is nothing at that key. The states of scalers are at {_listed(others)}."
        ) from error
    if len(search.found) > 1:
        places = [each.key for each in search.found]
        raise ConfigurationError(
            f"{of} has several states of loss scalers, which differ: at {_listed(places)}. Say which one is meant, as in "
            f"import_scaler_state(..., key={places[0]!r})."
        )
    if not search.found:
        raise CheckpointError(f"{of} {_lacking(tree, search, scaler=scaler)}")
    return search.found[0]


def _lacking(tree: Any, search: Search, *, scaler: torch.amp.GradScaler) -> str:
    if search.unscaled:
        return f"was saved in {search.unscaled}, where losses are not scaled: a fresh scale is right. Leave import_scaler_state(...) out."
    if search.empty:
        place = f" at {search.empty[0]!r}" if search.empty[0] else ""
        return (
            f"has the state of a scaler{place} that was disabled when it was saved, so that it is empty and says nothing of a scale. To "
            "start with a fresh one, leave import_scaler_state(...) out."
        )
    holds = f"Its keys are {_listed(map(str, tree))}" if isinstance(tree, Mapping) else f"It holds a {type(tree).__name__}"
    return (
        f"has no state of a loss scaler in it, as scaler.state_dict() makes it. {holds}. Without one the run is not the one that was "
        f"interrupted: its scale begins at {scaler.get_scale():g} again, steps are skipped until it has fallen to where it was, and the "
        "steps counted towards its growth are lost. If the state is in another file, pass that one; to start with a fresh scale, leave "
        "import_scaler_state(...) out."
    )


def _listed(names: Iterable[str]) -> str:
    known = [name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}..." for name in names]
    more = f" and {len(known) - _MOST_NAMED} more" if len(known) > _MOST_NAMED else ""
    return ", ".join(map(repr, known[:_MOST_NAMED])) + more or "nothing"


def _checked(
    found: FoundScaler, *, scaler: torch.amp.GradScaler, where: str, adopt_settings: bool
) -> tuple[dict[str, Any], ScalerSettings]:
    """The entries that the scaler is to load, and the settings that it will have.

    Raises:
        CheckpointError: An entry is not allowed.
    """
    for name, value in found.entries.items():
        if not isinstance(value, Real | None):
            raise CheckpointError(f"The state of the loss scaler in {where} has {name!r}, which is a {type(value).__name__}, not a number.")
    mine = _settings_of(scaler)
    adoptable = [field.name for field in fields(ScalerSettings)] if isinstance(scaler, LossScaler) else _TORCH_SETTINGS
    try:
        check_scale(found.entries["scale"], named="'scale'")
        settings = replace(mine, **{name: found.entries[name] for name in adoptable if adopt_settings and name in found.entries})
        entries = {**found.entries, "scale": settings.clamped(found.entries["scale"])}
        _, state = ScalerState.parse(entries, settings=settings, adopt_settings=False)
    except HalfstepError as error:
        raise CheckpointError(
            f"No run can go on from the state of the loss scaler in {where}. {error} Import that of an earlier checkpoint, or start with a "
            "fresh scale."
        ) from error
    if isinstance(scaler, LossScaler):
        return entries, settings
    kept = {name: getattr(settings, name) for name in _TORCH_SETTINGS}
    return {"scale": state.scale, "_growth_tracker": state.growth_tracker, **kept}, settings


def _settings_of(scaler: torch.amp.GradScaler) -> ScalerSettings:
    if isinstance(scaler, LossScaler):
        return scaler.settings
    return ScalerSettings(
        growth_factor=scaler.get_growth_factor(),
        backoff_factor=scaler.get_backoff_factor(),
        growth_interval=scaler.get_growth_interval(),
        min_scale=0.0,
    )


def _notes(
    theirs: Mapping[str, Any], entries: Mapping[str, Any], *, scaler: torch.amp.GradScaler, settings: ScalerSettings, adopt_settings: bool
) -> list[str]:
    """What of a state does not come into this run.

    Args:
        theirs: The state as it was found.
        entries: What is going to be loaded.
        scaler: This run's.
        settings: Those that it will have.
        adopt_settings: Whether they are the state's where it has any.
    """
    notes = []
    if adopt_settings and not any(name in theirs for name in _TORCH_SETTINGS):
        notes.append("It has no settings in it, so that there are none to adopt; those of this run stay.")
    differ = _differing(theirs, settings, scaler=scaler)
    if kept := {name: value for name, value in differ.items() if not (name in _TORCH_FIXED and not isinstance(scaler, LossScaler))}:
        listed = ", ".join(f"{name}={value!r} (here {getattr(settings, name)!r})" for name, value in kept.items())
        notes.append(f"It was saved with {listed}. The settings of this run stay; to take those over, pass adopt_settings=True.")
    if lost := {name: value for name, value in differ.items() if name not in kept}:
        listed = ", ".join(f"{name}={value!r}" for name, value in lost.items())
        notes.append(f"It was saved with {listed}, which this {type(scaler).__name__} cannot do. Use a halfstep.LossScaler for that.")
    if settings.static and theirs["scale"] != settings.init_scale:
        notes.append(f"The scale in it is {theirs['scale']:g}, but this run's is static and stays at {settings.init_scale:g}.")
    elif entries["scale"] != theirs["scale"] and not settings.static:
        notes.append(
            f"The scale in it, {theirs['scale']:g}, lies beyond this run's bounds, min_scale={settings.min_scale:g} and "
            f"max_scale={settings.max_scale}; the run goes on with {entries['scale']:g}."
        )
    return notes


def _differing(theirs: Mapping[str, Any], settings: ScalerSettings, *, scaler: torch.amp.GradScaler) -> dict[str, Any]:
    """The settings in a state, other than the first scale, that this run will not have."""
    names = [field.name for field in fields(ScalerSettings) if field.name != "init_scale"]
    if not isinstance(scaler, LossScaler):
        names = [*_TORCH_SETTINGS, *_TORCH_FIXED]
    return {name: theirs[name] for name in names if name in theirs and theirs[name] != getattr(settings, name)}
