"""Whether updates change parameters and buffers that are stored in half precision."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep._torch import without_step_hooks
from halfstep.precision import HALVES
from halfstep.records import StuckTensor
from halfstep.replay.runs import Replay, Run
from halfstep.replay.state import TrainingState
from halfstep.replay.verification import plain_step

__all__ = ["stuck_tensors"]


def stuck_tensors(replay: Replay, run: Run, *, optimizers: Sequence[Optimizer]) -> tuple[StuckTensor, ...]:
    """How much of one update reaches each parameter that is stored in half precision, the one with the least first.

    The optimizers step twice with the gradients of a run, once as they are and once with parameters and state in fp32; all is put back.
    """
    halves = {name: each for name, each in replay.parameters.items() if each.dtype in HALVES}
    if not halves or not optimizers:
        return ()
    parameters = [*replay.parameters.values()]
    stored = _updated(replay, run, parameters, optimizers=optimizers, dtype=None)
    exact = _updated(replay, run, parameters, optimizers=optimizers, dtype=torch.float32)
    found = []
    for name, parameter in halves.items():
        moves = exact[name] != 0
        stuck = moves & (stored[name] == 0)
        if bool(moves.any()):
            dtype = str(parameter.dtype).removeprefix("torch.")
            found.append(StuckTensor(name=name, dtype=dtype, stuck=int(stuck.sum()), elements=int(moves.sum())))
    return tuple(sorted(found, key=lambda each: -each.share))


def _updated(
    replay: Replay, run: Run, parameters: Sequence[Tensor], *, optimizers: Sequence[Optimizer], dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """By how much a step changes each parameter, in fp64."""
    state = TrainingState(parameters, optimizers=optimizers)
    before = {name: each.detach().double() for name, each in replay.parameters.items()}
    try:
        with replay.going_on():
            if dtype is not None:
                _convert(parameters, optimizers, dtype)
            for name, gradient in run.gradients.items():
                replay.parameters[name].grad = (gradient / run.scale).to(replay.parameters[name].dtype)
            for optimizer in optimizers:
                with without_step_hooks(optimizer):
                    plain_step(optimizer, lambda: torch.tensor(run.loss))
            return {name: each.detach().double() - before[name] for name, each in replay.parameters.items()}
    finally:
        state.put_back()


def _convert(parameters: Sequence[Tensor], optimizers: Sequence[Optimizer], dtype: torch.dtype) -> None:
    for parameter in parameters:
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    for optimizer in optimizers:
        for entry in optimizer.state.values():
            for name, value in entry.items():
                if isinstance(value, Tensor) and value.dtype in HALVES:
                    entry[name] = value.to(dtype)
