"""Whether updates change parameters and buffers that are stored in half precision."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.numerics.ranges import dtype_name
from halfstep.precision import HALVES
from halfstep.records import StuckTensor
from halfstep.replay.runs import Replay, Run
from halfstep.replay.state import TrainingState
from halfstep.replay.verification import plain_step

__all__ = ["stuck_tensors", "widen_optimizers"]


def stuck_tensors(replay: Replay, low: Run, full: Run, *, optimizers: Sequence[Optimizer]) -> tuple[StuckTensor, ...]:
    """How much of one update reaches each tensor that is stored in half precision, the one with the least first.

    For parameters the optimizers step twice with the gradients of a run, once as they are and once with parameters and state in fp32; all
    is put back. For buffers the run is compared with the same in fp32, in which they were stored so, too.

    Args:
        replay: The step.
        low: The run in low precision.
        full: The same in fp32.
        optimizers: What trains the parameters.
    """
    found = [
        *_stuck_parameters(replay, low, optimizers=optimizers),
        *(
            _stuck(name, buffer.dtype, stored=low.buffers[name] - buffer.float(), exact=full.buffers[name] - buffer.float())
            for name, buffer in replay.half_buffers.items()
        ),
    ]
    return tuple(sorted((each for each in found if each.elements), key=lambda each: -each.share))


def _stuck_parameters(replay: Replay, run: Run, *, optimizers: Sequence[Optimizer]) -> Iterator[StuckTensor]:
    halves = {name: each.dtype for name, each in replay.parameters.items() if each.dtype in HALVES}
    if not halves or not optimizers:
        return
    parameters = [*replay.parameters.values()]
    stored = _updated(replay, run, parameters, optimizers=optimizers)
    with replay.stored_wide():
        exact = _updated(replay, run, parameters, optimizers=optimizers)
    for name, dtype in halves.items():
        yield _stuck(name, dtype, stored=stored[name], exact=exact[name])


def _stuck(name: str, dtype: torch.dtype, *, stored: Tensor, exact: Tensor) -> StuckTensor:
    moves = exact != 0
    stuck = moves & (stored == 0)
    return StuckTensor(name=name, dtype=dtype_name(dtype), stuck=int(stuck.sum()), elements=int(moves.sum()))


def _updated(replay: Replay, run: Run, parameters: Sequence[Tensor], *, optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """By how much a step changes each parameter, in fp64."""
    state = TrainingState(parameters, optimizers=optimizers)
    before = {name: each.detach().double() for name, each in replay.parameters.items()}
    try:
        with replay.going_on():
            if not any(each.dtype in HALVES for each in parameters):
                widen_optimizers(optimizers)
            for name, gradient in run.gradients.items():
                replay.parameters[name].grad = (gradient / run.scale).to(replay.parameters[name].dtype)
            for optimizer in optimizers:
                plain_step(optimizer, lambda: torch.tensor(run.loss))
            return {name: each.detach().double() - before[name] for name, each in replay.parameters.items()}
    finally:
        state.put_back()


def widen_optimizers(optimizers: Sequence[Optimizer]) -> None:
    """Puts what optimizers keep in half precision into fp32."""
    for optimizer in optimizers:
        for entry in optimizer.state.values():
            for name, value in entry.items():
                if isinstance(value, Tensor) and value.dtype in HALVES:
                    entry[name] = value.float()
