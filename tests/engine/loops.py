"""Training loops written by hand, as the documentation of torch has them: what the engine must equal bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.engine import MixedPrecision
from halfstep.precision import DTYPES
from halfstep.records import Precision, StepRecord

__all__ = [
    "OPTIMIZERS",
    "Batch",
    "Run",
    "by_hand",
    "by_manual_calls",
    "by_train_step",
    "loss_of",
    "make_batches",
    "make_net",
    "same_state",
    "snapshot",
]

Batch = tuple[Tensor, Tensor]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "adamw-fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "sgd-fused": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
}


def make_net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))


def make_batches(count: int, *, size: int = 6) -> list[Batch]:
    generator = torch.Generator().manual_seed(11)
    return [(torch.randn(size, 5, generator=generator), torch.randint(0, 3, (size,), generator=generator)) for _ in range(count)]


@dataclass(slots=True, kw_only=True)
class Run:
    """A model with its optimizer, and what a loop over it saw."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    scaler: torch.amp.GradScaler | None
    losses: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    lrs: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)

    @classmethod
    def start(cls, optimizer: str, *, precision: Precision, growth_interval: int = 2) -> Run:
        model = make_net()
        made = OPTIMIZERS[optimizer](model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=growth_interval) if precision == "fp16" else None
        return cls(model=model, optimizer=made, scheduler=torch.optim.lr_scheduler.StepLR(made, 2, gamma=0.5), scaler=scaler)

    def see(self, record: StepRecord) -> None:
        self.losses.append(record.loss)
        self.norms.append(record.grad_norm)
        self.scales.append(record.scale)
        self.lrs.append(record.lr)
        self.skipped.append(record.skipped)


def loss_of(model: nn.Module, x: Tensor, y: Tensor, factor: float = 1.0) -> Tensor:
    loss: Tensor = nn.functional.cross_entropy(model(x), y) * factor
    return loss


def by_hand(
    run: Run, batches: Sequence[Batch], *, precision: Precision, clip: float | None, accumulate: int, factors: Sequence[float] = ()
) -> None:
    """The loop of torch's documentation, with its knowledge of skips from a change of the first parameter's optimizer."""
    for step, (x, y) in enumerate(batches):
        factor = factors[step] if factors else 1.0
        total = 0.0
        run.scales.append(run.scaler.get_scale() if run.scaler else 1.0)
        run.lrs.append(run.optimizer.param_groups[0]["lr"])
        for xs, ys in zip(x.chunk(accumulate), y.chunk(accumulate), strict=True):
            with torch.autocast("cpu", dtype=DTYPES[precision] if precision != "fp32" else torch.bfloat16, enabled=precision != "fp32"):
                loss = loss_of(run.model, xs, ys, factor)
            part = loss / accumulate if accumulate > 1 else loss
            (run.scaler.scale(part) if run.scaler else part).backward()  # type: ignore[no-untyped-call]
            total = float(torch.tensor(total) + part.detach()) if accumulate > 1 else part.item()
        norm = None
        if run.scaler and clip is not None:
            run.scaler.unscale_(run.optimizer)
        if clip is not None:
            norm = nn.utils.clip_grad_norm_(run.model.parameters(), clip).item()
        skips = run.scaler is not None and not math.isfinite(factor)
        if run.scaler:
            run.scaler.step(run.optimizer)
            run.scaler.update()
        else:
            run.optimizer.step()
        if not skips:
            run.scheduler.step()
        run.optimizer.zero_grad()
        run.losses.append(total)
        run.norms.append(norm)
        run.skipped.append(skips)


def _engine(run: Run, *, precision: Precision, clip: float | None, accumulate: int) -> MixedPrecision:
    return MixedPrecision(
        run.model, run.optimizer, precision, scheduler=run.scheduler, max_grad_norm=clip, accumulate=accumulate, scaler=run.scaler
    )


def by_train_step(
    run: Run, batches: Sequence[Batch], *, precision: Precision, clip: float | None, accumulate: int, factors: Sequence[float] = ()
) -> None:
    amp = _engine(run, precision=precision, clip=clip, accumulate=accumulate)
    for step, (x, y) in enumerate(batches):
        factor = factors[step] if factors else 1.0
        run.see(amp.train_step(lambda x, y, factor=factor: loss_of(run.model, x, y, factor), x, y))


def by_manual_calls(
    run: Run, batches: Sequence[Batch], *, precision: Precision, clip: float | None, accumulate: int, factors: Sequence[float] = ()
) -> None:
    amp = _engine(run, precision=precision, clip=clip, accumulate=accumulate)
    for step, (x, y) in enumerate(batches):
        factor = factors[step] if factors else 1.0
        records = []
        for xs, ys in zip(x.chunk(accumulate), y.chunk(accumulate), strict=True):
            with amp.autocast():
                loss = loss_of(run.model, xs, ys, factor)
            amp.backward(loss)
            records.append(amp.step())
        *pending, record = records
        assert pending == [None] * (accumulate - 1)
        assert record is not None
        run.see(record)


def snapshot(run: Run) -> Any:
    """A copy of all that a skipped step must leave as it was."""
    return deepcopy((run.model.state_dict(), run.optimizer.state_dict(), run.scheduler.state_dict()))


def _flat(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict):
        for key in tree:
            yield key
            yield from _flat(tree[key])
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from _flat(item)
    else:
        yield tree


def same_state(first: Any, second: Any) -> bool:
    """Whether two nests of tensors and numbers are the same to the bit; a NaN is the same as itself."""
    left, right = list(_flat(first)), list(_flat(second))
    return len(left) == len(right) and all(_same(a, b) for a, b in zip(left, right, strict=True))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        if not isinstance(b, Tensor) or a.dtype != b.dtype or a.shape != b.shape:
            return False
        left, right = (each.contiguous().reshape(-1).view(torch.uint8) for each in (a, b))
        return torch.equal(left, right)
    if isinstance(a, float) and math.isnan(a):
        return isinstance(b, float) and math.isnan(b)
    return type(a) is type(b) and bool(a == b)
