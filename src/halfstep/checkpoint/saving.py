"""`save_checkpoint`: everything that a run goes on from, on disk."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from operator import index
from os import PathLike
from pathlib import Path
from typing import Any, SupportsIndex, TypeVar

import torch.distributed as dist

from halfstep.checkpoint.contents import Contents, as_engines, capture
from halfstep.checkpoint.folders import write_folder
from halfstep.checkpoint.ranks import on_all_ranks
from halfstep.checkpoint.writing import write_file
from halfstep.distributed import Ranks
from halfstep.engine import MixedPrecision
from halfstep.errors import CheckpointError, ConfigurationError, HalfstepWarning, InvalidTypeError, RanksDisagreeError

Value = TypeVar("Value")

__all__ = ["agreed", "captured", "check_step", "common_ranks", "path_of", "save_checkpoint"]


def save_checkpoint(
    path: str | PathLike[str],
    amp: MixedPrecision | Mapping[str, MixedPrecision],
    *,
    step: int,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Saves everything that a run goes on from: a run that loads it is bit for bit the run that never stopped.

    That is the model, the optimizers, the schedulers, the loss scaler, the step in progress where gradients are accumulated, and the random
    state of Python, NumPy and torch on every device. One process writes one file, which `torch.load(path, weights_only=True)` reads,
    too. Several ranks write one folder together: call it on each, with the same path, on a file system that they share.

    It is written aside, flushed to disk and renamed, so that there is always a whole checkpoint of this name: the old one or the new one.

    Args:
        path: Where to save it. A file, or for several ranks a folder; what was there before is replaced.
        amp: The engine, or several by name, such as `{"generator": amp_g, "discriminator": amp_d}`.
        step: The number of the step, as you count: what `load_checkpoint` returns, for the loop to go on from.
        extra: What else to keep, such as the position in the data, an average of the weights, or the best accuracy: nested dictionaries,
            lists and tuples of tensors, numbers and text. Each rank keeps its own.

    Returns:
        The path.

    Raises:
        CheckpointError: It cannot be written, such as on a full disk, or something in it cannot be saved safely; the message names it. What
            was there before is untouched.
        StepOrderError: The engine is between `unscale_gradients()` and `step()`, or has stepped where one that shares its scaler has not.
        InvalidTypeError: An argument is of the wrong type.
        ConfigurationError: An argument has a value that is not allowed.

    Example:
        >>> import torch
        >>> from tempfile import mkdtemp
        >>> model = torch.nn.Linear(2, 1)
        >>> amp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16")
        >>> path = save_checkpoint(Path(mkdtemp()) / "last.pt", amp, step=100, extra={"epoch": 3})
        >>> saved = torch.load(path, weights_only=True)
        >>> saved["step"], saved["extra"], sorted(saved["model"])
        (100, {'epoch': 3}, ['bias', 'weight'])
    """
    engines = as_engines(amp, call="save_checkpoint(path, amp, ...)")
    ranks = common_ranks(engines)
    number, name = agreed(lambda: (check_step(step), str(path_of(path, call="save_checkpoint(path, ...)"))), ranks=ranks)
    place = Path(name)
    contents = captured(engines, step=number, extra=extra, ranks=ranks, path=place)
    if ranks is None:
        write_file(contents, place)
    else:
        write_folder(contents, place, rank=ranks.rank, ranks=ranks.size, group=ranks.process_group)
    return place


def captured(
    engines: Mapping[str, MixedPrecision], *, step: int, extra: Mapping[str, Any] | None, ranks: Ranks | None, path: Path
) -> Contents:
    """What this process has to save; where one of several ranks cannot tell, all raise."""
    if ranks is None:
        return capture(engines, step=step, extra=extra, ranks=None)
    kept: list[Contents] = []
    failure = f"{path} could not be saved"
    on_all_ranks(lambda: kept.append(capture(engines, step=step, extra=extra, ranks=ranks)), group=ranks.process_group, failure=failure)
    return kept[0]


def agreed(work: Callable[[], Value], *, ranks: Ranks | None) -> Value:
    """What a function returns, on all ranks the same.

    Raises:
        RanksDisagreeError: It returns something else on some rank.
        CheckpointError: It raised on some rank; in one process it raises what it raises.
    """
    if ranks is None:
        return work()
    values = on_all_ranks(work, group=ranks.process_group, failure="The checkpoint could not be saved")
    if any(value != values[0] for value in values):
        listed = "; ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
        raise RanksDisagreeError(f"The ranks do not save the same checkpoint, by step and name: {listed}. Pass the same on every rank.")
    return values[0]


def common_ranks(engines: Mapping[str, MixedPrecision]) -> Ranks | None:
    """The ranks that the engines of a run train on; `None` for one process.

    Raises:
        ConfigurationError: They train on different ones.
    """
    found = [engine.ranks for engine in engines.values() if engine.ranks is not None]
    if not found:
        _warn_of_others()
        return None
    if any((each.rank, each.size) != (found[0].rank, found[0].size) for each in found):
        raise ConfigurationError("The engines train on different ranks, which one checkpoint cannot hold. Save each by itself.")
    return found[0]


def _warn_of_others() -> None:
    """Says that other processes may write the same file, where nothing tells that they train together."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        warnings.warn(
            f"This is rank {dist.get_rank()} of {dist.get_world_size()}, but its model is in no DistributedDataParallel or fully_shard: it "
            "is saved and loaded as that of one process, and ranks that save to the same path overwrite each other. Wrap the model, or "
            "pass MixedPrecision(process_group=...), for one checkpoint of all ranks; or give each rank a path of its own.",
            HalfstepWarning,
            stacklevel=4,
        )


def check_step(step: object) -> int:
    """A number of a step.

    Raises:
        InvalidTypeError: It is no whole number.
        ConfigurationError: It is negative.
    """
    if isinstance(step, bool) or not isinstance(step, SupportsIndex):
        raise InvalidTypeError(f"step is a whole number, as you count steps, not {step!r}.")
    number = int(index(step))  # Without the class of its own that a number may have.
    if number < 0:
        raise ConfigurationError(f"step is {number}; allowed are whole numbers from 0.")
    return number


def path_of(path: object, *, call: str) -> Path:
    """A path.

    Raises:
        InvalidTypeError: It is none.
        CheckpointError: It is empty.
    """
    if not isinstance(path, str | PathLike):
        raise InvalidTypeError(f"{call} takes a path, as text or as a pathlib.Path, not a {type(path).__name__}.")
    found = Path(path)
    if not str(path) or not found.name or "\0" in str(path):
        raise CheckpointError(f"{call} was given {str(path)!r}, which is no name for a checkpoint. Name a file or folder.")
    return found
