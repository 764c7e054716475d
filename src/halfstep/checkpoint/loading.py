"""`load_checkpoint`: a run goes on from what was saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, final

import torch

from halfstep.archive import checkpoints_in
from halfstep.archive.folders import FOLDER_FILE
from halfstep.checkpoint.contents import as_engines
from halfstep.checkpoint.folders import read_spread
from halfstep.checkpoint.planning import plan_for
from halfstep.checkpoint.ranks import on_all_ranks
from halfstep.checkpoint.reading import Loaded, read_file
from halfstep.checkpoint.restoring import Plan
from halfstep.checkpoint.saving import common_ranks, path_of
from halfstep.checkpoint.trees import copied
from halfstep.distributed import Ranks
from halfstep.engine import MixedPrecision, micro_batches_of
from halfstep.errors import CheckpointError, InvalidTypeError, StepOrderError
from halfstep.records import CheckpointRecord

__all__ = ["CheckpointInfo", "load_checkpoint", "load_into"]


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)  # extra may hold tensors, which have no single truth value to compare by
class CheckpointInfo:
    """What was loaded.

    Attributes:
        path: Where it was.
        step: The number of the step that it was saved at: the loop goes on with the next.
        extra: What was saved besides, tensors on the CPU.
        notes: What is other than it was, or was left out, a sentence or two each; each was said in a warning, too.
        record: What it says about itself.
    """

    path: Path
    step: int
    extra: dict[str, Any]
    notes: tuple[str, ...]
    record: CheckpointRecord


def load_checkpoint(
    path: str | PathLike[str], amp: MixedPrecision | Mapping[str, MixedPrecision], *, strict: bool = True
) -> CheckpointInfo:
    """Has a run go on from a checkpoint: made like the one that was saved, it is bit for bit the run that never stopped.

    First all of it is verified against its checksums, then compared with this run; only then anything is changed, and if that fails, it is
    put back. Nothing in the file is ever executed.

    The precision may be another one: from fp16 to bf16 or fp32 the loss scale is set aside, from those to fp16 it starts afresh. This run's
    settings of the scaler are kept, and those of how its optimizer computes (`fused`, `foreach`). What one process saved may be loaded by
    several ranks, and the other way round. Each such change is said in a warning and noted in what this returns.

    Args:
        path: What `save_checkpoint` or a `Checkpointer` wrote. On several ranks, call it on each.
        amp: The engine, or several by the names that they were saved by, between two steps.
        strict: Whether everything that was saved has to fit this run, and the other way round. Without that, what does not is left out,
            and said.

    Raises:
        DamagedCheckpointError: It is no checkpoint, or not as it was saved; the message names the part that is wrong.
        CheckpointError: It is not there, or does not fit this run; the message says what it would mean to go on.
        StepOrderError: An engine is in the middle of a step.

    Example:
        >>> import torch
        >>> from tempfile import mkdtemp
        >>> from halfstep.checkpoint import save_checkpoint
        >>> def run():
        ...     model = torch.nn.Linear(2, 1)
        ...     return model, MixedPrecision(model, torch.optim.Adam(model.parameters()), "bf16")
        >>> model, amp = run()
        >>> path = save_checkpoint(Path(mkdtemp()) / "last.pt", amp, step=100)
        >>> other, amp = run()
        >>> load_checkpoint(path, amp).step, bool((model.weight == other.weight).all())
        (100, True)
    """
    engines = as_engines(amp, call="load_checkpoint(path, amp, ...)")
    return load_into(engines, path_of(path, call="load_checkpoint(path, ...)"), strict=strict, stacklevel=3)


def load_into(engines: Mapping[str, MixedPrecision], path: Path, *, strict: bool, stacklevel: int) -> CheckpointInfo:
    """Does what `load_checkpoint` does; `stacklevel` is that of the warnings."""
    given: object = strict
    if not isinstance(given, bool):
        raise InvalidTypeError(f"load_checkpoint(strict=...) takes True or False, not {given!r}.")
    for engine in engines.values():
        _check_between_steps(engine)
    with torch.inference_mode(mode=False):  # What is loaded there could not be trained.
        return _load(engines, path, strict=strict, stacklevel=stacklevel + 1)


def _load(engines: Mapping[str, MixedPrecision], path: Path, *, strict: bool, stacklevel: int) -> CheckpointInfo:
    ranks = common_ranks(engines)
    together = _together(ranks, failure=f"{path} could not be loaded")
    loaded = _read(path, engines, ranks=ranks, together=together)
    plans: list[Plan] = []
    together(lambda: plans.append(plan_for(engines, loaded, strict=strict)))
    extra = copied(loaded.tree["extra"])
    plans[0].carry_out(stacklevel=stacklevel, together=together)
    return CheckpointInfo(path=path, step=loaded.record.step, extra=extra, notes=tuple(plans[0].fitting.notes), record=loaded.record)


def _check_between_steps(engine: MixedPrecision) -> None:
    if seen := micro_batches_of(engine):
        raise StepOrderError(
            f"A checkpoint was loaded after {seen} of accumulate={engine.accumulate} micro-batches, whose gradients "
            "would be lost. Load it before the first, or give that step up with discard()."
        )


def _read(
    path: Path, engines: Mapping[str, MixedPrecision], *, ranks: Ranks | None, together: Callable[[Callable[[], object]], object]
) -> Loaded:
    together(lambda: _check_one(path))
    rank, count = (0, 1) if ranks is None else (ranks.rank, ranks.size)
    if path.is_dir():
        return read_spread(path, engines, rank=rank, ranks=count, group=None if ranks is None else ranks.process_group)
    kept: list[Loaded] = []
    together(lambda: kept.append(read_file(path, rank=rank, ranks=count)))
    return kept[0]


def _check_one(path: Path) -> None:
    """Accepts a path that is not that of a folder of checkpoints: which of them is meant, nobody knows."""
    try:
        below = [] if not path.is_dir() or (path / FOLDER_FILE).exists() else checkpoints_in(path)
    except OSError as error:  # Such as a name that is too long to ask about.
        raise CheckpointError(f"Cannot read {path}: {error.strerror or error}.") from error
    if below:
        raise CheckpointError(
            f"{path} is no checkpoint, but holds {len(below)} of them. Name one, such as {below[0][1]}, or use "
            f"Checkpointer({str(path)!r}, ...).resume(), which goes on from the newest valid one."
        )


def _together(ranks: Ranks | None, *, failure: str) -> Callable[[Callable[[], object]], object]:
    """Calls a function here, or on each of several ranks, where all raise when it raised on one."""
    if ranks is None:
        return lambda work: work()
    group = ranks.process_group

    def call(work: Callable[[], object]) -> None:
        def alone() -> None:
            work()

        on_all_ranks(alone, group=group, failure=failure)

    return call
