"""What runs on each of two ranks, for tests of an engine that finds out why it skips."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from halfstep import LossScaler, MixedPrecision
from halfstep.errors import HalfstepWarning
from halfstep.randomness import seed_everything
from halfstep.records import Diagnosis

__all__ = ["diagnosed", "one_rank_fails", "run"]

FACTORS = {".": 1.0, "F": 1e6, "O": 1e6}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.drop, self.head = nn.Linear(4, 8), nn.LayerNorm(8), nn.Dropout(0.2), nn.Linear(8, 2)

    def forward(self, x: Tensor, factor: float) -> Tensor:
        result: Tensor = self.head(self.drop(self.norm(self.up(x) * factor)))
        return result


def make(rank: int, after: int | None, *, fused: bool, accumulate: int = 1, policy: str = "fp16") -> MixedPrecision:
    seed_everything(3)
    net = DistributedDataParallel(Net())
    seed_everything(rank)
    return MixedPrecision(
        net,
        torch.optim.AdamW(net.parameters(), lr=0.01, fused=fused),
        policy,
        scaler=LossScaler(init_scale=1024.0, growth_interval=3),
        diagnose_after=after,
        accumulate=accumulate,
    )


def take(amp: MixedPrecision, x: Tensor, factor: float, *, by_hand: bool) -> bool:
    if not by_hand:
        return amp.train_step(lambda x: amp.model(x, factor).float().square().mean(), x).skipped
    record = None
    for part in x.chunk(amp.accumulate):
        with amp.autocast():
            loss = amp.model(part, factor).float().square().mean()
        amp.backward(loss)
        record = amp.step()
    assert record is not None
    return record.skipped


def run(rank: int, after: int | None, story: str, *, by_hand: bool, **settings: Any) -> tuple[MixedPrecision, list[Any], list[str]]:
    """A run: its engine, all that it leaves behind, and the warnings. O overflows on rank 1 alone."""
    amp = make(rank, after, **settings)
    generator = torch.Generator().manual_seed(rank)
    skipped, causes, messages = [], [], []
    for letter in story:
        x = torch.randn(4, 4, generator=generator)
        factor = 1.0 if letter == "O" and rank == 0 else FACTORS[letter]
        before = amp.diagnosis
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            skipped.append(take(amp, x, factor, by_hand=by_hand))
        messages += [str(each.message) for each in told if issubclass(each.category, HalfstepWarning)]
        if amp.diagnosis is not None and amp.diagnosis is not before:
            causes.append(amp.diagnosis.cause)
    state = amp.optimizer.state_dict()["state"]
    left = [
        [each.detach().flatten().tolist() for each in amp.model.parameters()],
        [[value.flatten().tolist() for value in entry.values()] for entry in state.values()],
        amp.state_dict(),
        skipped,
    ]
    own = [torch.get_rng_state().tolist(), random.random()]
    return amp, [left, own, causes], messages


def diagnosed(rank: int, story: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The same run with a diagnosis and without."""
    _, (expected, own, _), silence = run(rank, None, story, **settings)
    amp, (found, mine, causes), messages = run(rank, 2, story, **settings)
    diagnosis: Diagnosis | None = amp.diagnosis
    return {
        "same": found == expected and own == mine and not silence,
        "left": found,
        "causes": causes,
        "messages": messages,
        "diagnosis": None if diagnosis is None else diagnosis.to_json(),
    }


def _caught(function: Callable[[], object]) -> str:
    try:
        function()
    except ValueError as error:
        return str(error)
    return ""


def one_rank_fails(rank: int) -> dict[str, Any]:
    """All ranks raise in the step that is traced; the next one is traced in its place."""
    amp = make(rank, 1, fused=False)

    def fails() -> Tensor:
        amp.model(torch.ones(4, 4), 1.0)
        raise ValueError("in the loss")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HalfstepWarning)
        take(amp, torch.ones(4, 4), 1e6, by_hand=False)
        told = _caught(lambda: amp.train_step(fails))
        nothing = amp.diagnosis is None
        take(amp, torch.ones(4, 4), 1e6, by_hand=False)
    dist.barrier()
    assert amp.diagnosis is not None
    return {"told": told, "nothing": nothing, "cause": amp.diagnosis.cause, "steps": amp.stats().steps}
