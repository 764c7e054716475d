"""Runs in which nothing is wrong, simulated."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial

from halfstep.records import Precision, StepRecord

__all__ = ["HEALTHY", "adversarial", "fp16", "plain"]

STEPS = 3000

GIB = 2**30


class Scaler:
    """torch's scaler: a scale that overflows above a limit, which varies a little from step to step."""

    def __init__(self, limit: float, *, generator: random.Random, growth_interval: int) -> None:
        self.scale, self.limit, self.interval = 65536.0, limit, growth_interval
        self.tracker, self.generator = 0, generator

    def overflows(self) -> bool:
        return self.scale > self.limit * self.generator.uniform(0.9, 1.6)

    def update(self, *, overflowed: bool) -> None:
        self.tracker = 0 if overflowed else self.tracker + 1
        if overflowed:
            self.scale /= 2
        elif self.tracker == self.interval:
            self.scale, self.tracker = self.scale * 2, 0


def learning_rate(step: int, *, warmup: int = 200) -> float:
    return 1e-3 * (step / warmup if step < warmup else 0.5 * (1 + math.cos(math.pi * (step - warmup) / (STEPS - warmup))))


def decreasing(generator: random.Random) -> Callable[[int], float]:
    floor, noise = generator.uniform(0.01, 1.0), generator.uniform(0.02, 0.3)
    return lambda step: (floor + 3 * math.exp(-step / 400)) * math.exp(noise * generator.gauss(0, 1))


def machine(step: int, generator: random.Random) -> tuple[float, int]:
    """Seconds and bytes: warm-up, evaluations, and what the allocator keeps."""
    seconds = 0.02 * math.exp(0.1 * generator.gauss(0, 1)) + (2.0 if step <= 3 else 0.0) + (20.0 if step % 250 == 0 else 0.0)
    return seconds, round(GIB * (1 + 0.5 * (1 - math.exp(-step / 150)) + 0.02 * generator.random()))


def fp16(skips: int, *, seed: int = 0, growth_interval: int = 500) -> list[StepRecord]:
    """A run that skips so many steps at its start, and one after each time that the scale has grown."""
    generator = random.Random(seed)
    loss = decreasing(generator)
    scaler = Scaler(2.0 ** (16 - skips), generator=generator, growth_interval=growth_interval)
    records = []
    for step in range(1, STEPS + 1):
        skipped, (seconds, memory) = scaler.overflows(), machine(step, generator)
        records.append(
            StepRecord(
                step=step,
                skipped=skipped,
                scale=scaler.scale,
                loss=loss(step),
                grad_norm=(math.inf if seed % 2 else None) if skipped else math.exp(0.4 * generator.gauss(0, 1) - step / 2000),
                lr=learning_rate(step),
                step_time_s=seconds,
                memory_bytes=memory,
                precision="fp16",
                scaler="used",
            )
        )
        scaler.update(overflowed=skipped)
    return records


def plain(precision: Precision, *, seed: int = 0, clips: bool = True, first: int = 1) -> list[StepRecord]:
    """A run without a scaler."""
    generator = random.Random(seed)
    loss = decreasing(generator)
    records = []
    for step in range(first, first + STEPS):
        seconds, memory = machine(step, generator)
        records.append(
            StepRecord(
                step=step,
                skipped=False,
                scale=1.0,
                loss=loss(step),
                grad_norm=generator.lognormvariate(0, 0.5) if clips else None,
                lr=learning_rate(step),
                step_time_s=seconds,
                memory_bytes=memory if seed % 2 else None,
                precision=precision,
                scaler="none" if seed % 2 else None,
            )
        )
    return records


def adversarial(*, seed: int = 0) -> list[StepRecord]:
    """Two optimizers that take turns, with one scaler: a skip of either is what the other sees the scale fall by."""
    generator = random.Random(seed)
    scaler = Scaler(2.0**14, generator=generator, growth_interval=300)
    records: list[StepRecord] = []
    for turn in range(STEPS // 2):
        overflowed = False
        for name, level in (("discriminator", 1.3), ("generator", 0.7)):
            skipped, (seconds, memory) = scaler.overflows(), machine(turn + 1, generator)
            overflowed |= skipped
            records.append(
                StepRecord(
                    step=len(records) + 1,
                    skipped=skipped,
                    scale=scaler.scale,
                    loss=level + 0.3 * math.sin(turn / 90) + generator.gauss(0, 0.15),
                    grad_norm=None if skipped else generator.lognormvariate(0, 0.6),
                    lr=2e-4,
                    step_time_s=seconds,
                    memory_bytes=memory,
                    precision="fp16",
                    optimizer=name,
                    scaler="used",
                )
            )
        scaler.update(overflowed=overflowed)
    return records


# Each of these raises no alert.
HEALTHY: dict[str, Callable[[], list[StepRecord]]] = {
    **{f"fp16, {skips} skips at first, seed {seed}": partial(fp16, skips, seed=seed) for skips in (1, 2, 3) for seed in (0, 1)},
    "fp16, growing after 2000 steps": partial(fp16, 0, growth_interval=2000),
    "fp16, growing after 50 steps": partial(fp16, 2, growth_interval=50),
    **{f"bf16, seed {seed}": partial(plain, "bf16", seed=seed) for seed in range(3)},
    **{f"fp32, seed {seed}": partial(plain, "fp32", seed=seed) for seed in range(3, 6)},
    "bf16, without norms, resumed": partial(plain, "bf16", clips=False, first=100_000),
    **{f"adversarial, seed {seed}": partial(adversarial, seed=seed) for seed in range(3)},
}
