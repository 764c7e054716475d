"""What does it cost to be watched? One training step, written by hand, with and without `halfstep.watch` around it, side by side.

    python benchmarks/watch_overhead.py                      # both models
    python benchmarks/watch_overhead.py --model mlp --blocks 40

The same loop trains the same model in turns, in blocks of steps: alone, and inside of `halfstep.watch` with its log and all health rules.
In a watched block the time includes reading, judging and writing all of its records; entering and leaving are printed by themselves.
Ratios are taken block by block, against the block before; printed are their medians with 95 % intervals.
"""

from __future__ import annotations

import argparse
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import halfstep
from halfstep.comparison.statistics import median_interval
from halfstep.task import load_task

Step = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One line of the table.

    Attributes:
        name: What it is called.
        make: Makes its step.
        threads: Of torch.
        block: Steps in a block.
        target: The ratio that is not to be exceeded.
    """

    name: str
    make: Callable[[], Step]
    threads: int
    block: int
    target: float


def make_mlp(*, clips: bool) -> Step:
    """A multi-layer perceptron 32-64-10 with batches of 16 in fp16, scaled and clipped: so small that a step is nearly all overhead."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    x, y = torch.randn(16, 32), torch.randint(0, 10, (16,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu")
    parameters = list(model.parameters())

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        if clips:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(parameters, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def make_resnet18() -> Step:
    """ResNet-18 of the examples in bf16, channels last, with batches of 32."""
    task = load_task("examples/cifar_resnet18.py:task")(0)
    images, classes = (part[:32] for part in next(iter(task.batches)))
    model: Any = task.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = images.contiguous(memory_format=torch.channels_last)

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = task.loss(model, (images, classes))
        loss.backward()  # type: ignore[no-untyped-call]
        task.optimizer.step()
        task.optimizer.zero_grad()

    return step


SETTINGS = {
    "mlp": [
        Setting(name="MLP, fp16, clipped", make=lambda: make_mlp(clips=True), threads=1, block=2000, target=1.10),
        Setting(name="MLP, fp16", make=lambda: make_mlp(clips=False), threads=1, block=2000, target=1.10),
    ],
    "resnet18": [Setting(name="ResNet-18, bf16", make=make_resnet18, threads=2, block=10, target=1.01)],
}


def seconds_of(step: Step, count: int) -> float:
    """Runs so many steps, and says how long they took."""
    begun = time.perf_counter()
    for _ in range(count):
        step()
    return time.perf_counter() - begun


def measure(setting: Setting, *, blocks: int) -> None:
    """Measures one setting and prints its line."""
    torch.set_num_threads(setting.threads)
    step = setting.make()
    seconds_of(step, setting.block)
    alone, watched, edges = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for block in range(blocks):
            alone.append(seconds_of(step, setting.block))
            begun = time.perf_counter()
            with halfstep.watch(folder, sinks=["jsonl"]) as seen:
                entered = time.perf_counter()
                seconds_of(step, setting.block)
                seen.flush()
                left = time.perf_counter()
            edges.append(time.perf_counter() - left + entered - begun)
            watched.append(left - entered)
            if block % 2:  # Neither comes always first.
                alone[-1] = (alone[-1] + seconds_of(step, setting.block)) / 2
    ratios = [with_it / without for with_it, without in zip(watched, alone, strict=True)]
    interval = median_interval(ratios)
    ratio = f"{interval.median:6.3f} [{interval.low:.3f}, {interval.high:.3f}] (at most {setting.target:.2f})"
    print(
        f"{setting.name:18} {1e6 * median(alone) / setting.block:9.0f} us {ratio}, "
        f"{1e6 * (median(watched) - median(alone)) / setting.block:+.1f} us a step; entered and left in {1e3 * median(edges):.0f} ms"
    )


def main() -> None:
    """Prints one line for each setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(SETTINGS), help="one of the two alone")
    parser.add_argument("--blocks", type=int, default=16, help="how many blocks of each kind (16)")
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}; alone, and watched over it")
    for model in [options.model] if options.model else SETTINGS:
        for setting in SETTINGS[model]:
            measure(setting, blocks=options.blocks)


if __name__ == "__main__":
    main()
