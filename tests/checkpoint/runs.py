"""Runs that are interrupted and gone on with, and everything by which the one that never stopped could tell them apart."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, final

import numpy as np
import pytest
import torch
from torch import Tensor

from halfstep import MixedPrecision
from halfstep.checkpoint import CheckpointInfo, load_checkpoint, save_checkpoint
from halfstep.distributed import local_tensor
from halfstep.engine import progress_of, state_of
from halfstep.errors import HalfstepWarning
from halfstep.randomness import RandomState, seed_everything
from halfstep.records import StepRecord

__all__ = ["Build", "Run", "batch", "facts", "noted", "seeded", "state", "sweep", "trained"]

STEPS = 40

# What a step says of itself.
Facts = tuple[str, ...]


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """A run that is made, and can be trained.

    Attributes:
        engines: Its engine, or several by name.
        step: Trains on the micro-batch of a number, and tells what came of it.
    """

    engines: MixedPrecision | Mapping[str, MixedPrecision]
    step: Callable[[int], Facts]


Build = Callable[[], Run]


def batch(number: int, *, large: Iterable[int] = (), infinite: Iterable[int] = ()) -> tuple[Tensor, Tensor]:
    """A batch, which is the same for the same number and the same state of Python's and NumPy's generators.

    Args:
        number: Its number.
        large: The numbers of those whose values are so large that half precision overflows.
        infinite: The numbers of those that have an infinite value.
    """
    numbers = torch.Generator().manual_seed(number)
    x, y = torch.randn(8, 6, generator=numbers), torch.randn(8, 1, generator=numbers)
    x += 0.1 * random.gauss(0, 1) + 0.1 * float(np.random.standard_normal())
    if number in large:
        x *= 1e4
    if number in infinite:
        x[3, 2] = float("inf")
    return x, y


def facts(loss: Tensor | float, record: StepRecord | None) -> Facts:
    """A loss and a record, but for the time."""
    number = loss.item() if isinstance(loss, Tensor) else loss
    if record is None:
        return (repr(number),)
    told = (record.step, record.skipped, record.scale, record.loss, record.grad_norm, record.lr, record.precision)
    return (repr(number), *map(repr, told))


def by_name(engines: MixedPrecision | Mapping[str, MixedPrecision]) -> Mapping[str, MixedPrecision]:
    return {"": engines} if isinstance(engines, MixedPrecision) else engines


def state(run: Run) -> dict[str, str]:
    """Everything that a run goes on from, bit for bit, by names."""
    found: dict[str, Any] = {"random": RandomState.capture().to_plain()}
    for name, engine in by_name(run.engines).items():
        schedulers: Any = engine.scheduler
        progress = progress_of(engine)
        found[name] = {
            "model": dict(engine.model.state_dict(keep_vars=True)),
            "buffers": dict(engine.model.named_buffers()),
            # Between two steps an engine has none; what another's backward pass has left it clears before it adds its own.
            "gradients": {name: each.grad for name, each in engine.model.named_parameters() if each.grad is not None and progress},
            "optimizers": [optimizer.state_dict() for optimizer in engine.optimizers],
            "schedulers": [each.state_dict() for each in (schedulers if isinstance(schedulers, list) else [schedulers]) if each],
            "engine": state_of(engine),
            "progress": [] if progress is None else [progress.micro_batches, progress.loss, progress.held_back],
        }
    return dict(flat(found))


def flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Each value of a nested state, as text that differs where a bit does."""
    if isinstance(value, Tensor):
        yield name, tensor_text(value)
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from flat(each, f"{name}.{key}")
    elif isinstance(value, list | tuple) and len(value) < 100:
        for number, each in enumerate(value):
            yield from flat(each, f"{name}.{number}")
    else:
        yield name, repr(value)


def tensor_text(tensor: Tensor) -> str:
    tensor = local_tensor(tensor).detach().resolve_conj()
    if tensor.layout is torch.sparse_coo:
        return f"sparse {tensor.is_coalesced()} {tensor_text(tensor._indices())} {tensor_text(tensor._values())}"
    kind = f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}"
    data = tensor.cpu().contiguous().flatten().view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
    return f"{kind} {sha256(data.numpy().tobytes()).hexdigest()[:16]}"


def trained(run: Run, start: int, end: int) -> list[Facts]:
    """What the steps from one number to another say."""
    return [run.step(number) for number in range(start, end)]


def seeded(build: Build, seed: int, *, rank: int = 0) -> Run:
    """A run whose ranks begin with the same weights, and then draw each their own random numbers."""
    seed_everything(seed)
    run = build()
    if rank:
        seed_everything(seed + 10000 * rank)
    return run


def sweep(build: Build, *, at: Iterable[int], folder: Path, steps: int = STEPS, rank: int = 0) -> list[Facts]:
    """Interrupts a run at each of some steps, and makes sure that it is the one that never stopped.

    Args:
        build: Makes the run, of the weights and random numbers that torch's generators are seeded for.
        at: After how many steps.
        folder: For the checkpoints.
        steps: How many the whole run has.
        rank: Of this process among those that train together, which draw other random numbers each.

    Returns:
        What the steps of the run say.
    """
    places = sorted(at)
    untouched = seeded(build, 0, rank=rank)
    expected, end = trained(untouched, 0, steps), state(untouched)

    saving = seeded(build, 0, rank=rank)
    seen: list[Facts] = []
    states = {}
    for number in range(steps + 1):
        if number in places:
            states[number] = state(saving)
            save_checkpoint(folder / f"{number}.pt", saving.engines, step=number)
        if number < steps:
            seen.append(saving.step(number))
    assert (seen, state(saving)) == (expected, end), "to save has changed the run"

    for number in places:
        resumed = seeded(build, 1000 + number, rank=rank)
        with warnings.catch_warnings():
            warnings.simplefilter("error", HalfstepWarning)
            info = load_checkpoint(folder / f"{number}.pt", resumed.engines)
        assert (info.step, info.notes) == (number, ())
        assert state(resumed) == states[number], f"what was loaded at {number} is not what was saved"
        assert trained(resumed, number, steps) == expected[number:], f"resumed at {number}, later steps are others"
        assert state(resumed) == end, f"resumed at {number}, the end is another"
    return expected


def noted(path: Path, amp: MixedPrecision, *matches: str, strict: bool = True) -> CheckpointInfo:
    """Loads what is said to be another in these words, one match for each note."""
    with pytest.warns(HalfstepWarning) as said:
        info = load_checkpoint(path, amp, strict=strict)
    assert [str(each.message) for each in said] == list(info.notes)
    assert len(info.notes) == len(matches), info.notes
    for note, match in zip(info.notes, matches, strict=True):
        assert re.search(match, note), note
    return info
