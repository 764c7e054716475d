"""What do a rehearsal and a trace cost? Training steps in fp32, rehearsed, native and traced, side by side in one run.

    python benchmarks/rehearsal.py                                # ResNet-18 and a Transformer: some minutes
    python benchmarks/rehearsal.py --model transformer --blocks 40 --native-steps 0

Each loop trains the same model from the same weights on the same batch on the CPU: in fp32; in fp16 autocast as
`halfstep.rehearse("cuda")` computes it; in fp16 autocast with the CPU's own half kernels (which takes long: a few steps are enough); and
under `halfstep.trace`, beside `torch.autograd.detect_anomaly` and, where transformers is installed, its `DebugUnderflowOverflow`, which
look for the same faults. The loops take turns, in an order that is new for each block. Ratios are taken block by block; printed are their
medians with 95 % intervals. To open a rehearsal takes some milliseconds once, which are printed apart.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import platform
import random
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep
from halfstep.comparison.statistics import median_interval

MODELS = ("resnet", "transformer")
SCALE = 1024.0

Batch = tuple[Tensor, Tensor]
Context = Callable[[], AbstractContextManager[Any]]


class Block(nn.Module):
    """The basic block of a ResNet."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, images: Tensor) -> Tensor:
        """Shape (batch, channels, height, width), in and out."""
        inner = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(images)))))
        return F.relu(inner + self.shortcut(images))


class ResNet18(nn.Module):
    """ResNet-18 for images of 32 x 32, of width 64."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
        inputs = 64
        for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            layers += [Block(inputs, width, stride), Block(width, width, 1)]
            inputs = width
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(512, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Scores of shape (batch, 10)."""
        scores: Tensor = self.head(self.body(images).mean((2, 3)))
        return scores


class Transformer(nn.Module):
    """Four layers of width 256."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 256)
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True), 4)
        self.head = nn.Linear(256, 1000)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of shape (batch, 1000, length)."""
        scores: Tensor = self.head(self.layers(self.embed(tokens)))
        return scores.transpose(1, 2)


def make_model(name: str) -> tuple[nn.Module, Batch]:
    """A model and its batch: 32 images of 3 x 32 x 32, or 8 x 32 tokens."""
    torch.manual_seed(0)
    if name == "resnet":
        return ResNet18(), (torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,)))
    return Transformer(), (torch.randint(0, 1000, (8, 32)), torch.randint(0, 1000, (8, 32)))


@dataclass(frozen=True, kw_only=True)
class Loop:
    """One way to train.

    Attributes:
        half: Whether the forward pass runs in fp16 autocast.
        opened: What is open around a step, and not timed when it opens.
        observed: What is open around a step, and timed as a part of it; given the model.
        against: The loop that it is compared with.
    """

    half: bool
    opened: Context = nullcontext
    observed: Callable[[nn.Module], AbstractContextManager[Any]] = lambda _: nullcontext()
    against: str = "fp32"


def debug_overflow(model: nn.Module) -> AbstractContextManager[Any]:
    """The `DebugUnderflowOverflow` of transformers, without its reports on the screen."""
    from transformers.debug_utils import DebugUnderflowOverflow

    stack = ExitStack()
    stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
    # It has no way to take its hooks away; those that are there afterwards and were not before are its own.
    before = {module: set(module._forward_hooks) for module in model.modules()}
    look_out: Any = DebugUnderflowOverflow  # It is typed where it is installed, and unknown elsewhere.
    look_out(model, max_frames_to_save=100)

    def remove() -> None:
        for module, hooks in before.items():
            for number in set(module._forward_hooks) - hooks:
                del module._forward_hooks[number]

    stack.callback(remove)
    return stack


def anomaly(_: nn.Module) -> AbstractContextManager[Any]:
    """What torch has itself to look out for NaN in the backward pass."""
    warnings.filterwarnings("ignore", "Anomaly Detection has been enabled")
    return torch.autograd.detect_anomaly(check_nan=True)


def make_loops() -> dict[str, Loop]:
    """All loops but the native one, which is too slow to take turns."""
    loops = {
        "fp32": Loop(half=False),
        "fp32, again": Loop(half=False),
        "fp16 rehearsed": Loop(half=True, opened=halfstep.rehearse),
        "fp16 rehearsed, traced": Loop(half=True, opened=halfstep.rehearse, observed=halfstep.trace, against="fp16 rehearsed"),
        "fp32 traced": Loop(half=False, observed=halfstep.trace),
        "fp32 detect_anomaly": Loop(half=False, observed=anomaly),
    }
    with contextlib.suppress(ImportError):
        import transformers.debug_utils  # noqa: F401

        loops["fp32 DebugUnderflowOverflow"] = Loop(half=False, observed=debug_overflow)
    return loops


class Trainer:
    """One loop with a model of its own."""

    def __init__(self, name: str, loop: Loop) -> None:
        self.loop = loop
        self.model, self.batch = make_model(name)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.losses: list[float] = []

    def step(self) -> float:
        """Trains one step, and returns its seconds."""
        with self.loop.opened():
            start = time.perf_counter()
            with self.loop.observed(self.model):
                self._train()
            return time.perf_counter() - start

    def _train(self) -> None:
        x, y = self.batch
        with torch.autocast("cpu", dtype=torch.float16, enabled=self.loop.half):
            loss = F.cross_entropy(self.model(x), y)
        scale = SCALE if self.loop.half else 1.0
        (loss * scale).backward()  # type: ignore[no-untyped-call]
        for weight in self.model.parameters():
            if self.loop.half and weight.grad is not None:
                weight.grad.div_(scale)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())


def measure(name: str, *, blocks: int, native_steps: int) -> tuple[dict[str, list[float]], dict[str, Trainer]]:
    """Seconds of each step of each loop; those of the native one lie between blocks."""
    trainers = {loop: Trainer(name, what) for loop, what in make_loops().items()}
    seconds: dict[str, list[float]] = {loop: [] for loop in trainers}
    order = random.Random(0)
    for number in range(-2, blocks):  # Two blocks to warm up.
        print(f"{name}: block {number + 3} of {blocks + 2}", end="\r", file=sys.stderr, flush=True)
        for loop in order.sample(list(trainers), k=len(trainers)):
            taken = trainers[loop].step()
            if number >= 0:
                seconds[loop].append(taken)
    if native_steps:
        trainers["fp16 native"] = Trainer(name, Loop(half=True, against="fp16 rehearsed"))
        seconds["fp16 native"] = [trainers["fp16 native"].step() for _ in range(native_steps)]
    return seconds, trainers


def report(name: str, seconds: dict[str, list[float]], trainers: dict[str, Trainer]) -> None:
    """Prints one line for each loop."""
    print(f"\n{name}, {len(seconds['fp32'])} steps of each loop", end="")
    print(f", {len(seconds['fp16 native'])} of the native one" if "fp16 native" in seconds else "")
    print(f"  {'loop':<28}{'ms a step':>11}   ratio, with its 95 % interval")
    for loop, times in seconds.items():
        against = trainers[loop].loop.against
        # The native steps did not take turns with the others: they are held against the median of those.
        reference = seconds[against] if loop != "fp16 native" else [median_interval(seconds[against]).median] * len(times)
        ratio = median_interval([own / other for own, other in zip(times, reference, strict=True)])
        line = f"  {loop:<28}{median_interval(times).median * 1e3:>11.1f}   {ratio.median:.3f}"
        print(f"{line} [{ratio.low:.3f}, {ratio.high:.3f}] of {against}" if len(times) > 1 else f"{line} of {against}")
    rehearsed, exact = trainers["fp16 rehearsed"].losses, trainers["fp32"].losses
    print(f"  losses after {len(exact)} steps: fp32 {exact[-1]:.5f}, fp16 rehearsed {rehearsed[-1]:.5f}")


def time_to_open() -> float:
    """Milliseconds to open and close a rehearsal."""
    times = []
    for _ in range(20):
        start = time.perf_counter()
        with halfstep.rehearse():
            pass
        times.append(time.perf_counter() - start)
    return median_interval(times).median * 1e3


def main() -> None:
    """Measures what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, action="append", help="what to train; both when it is left out")
    parser.add_argument("--blocks", type=int, default=20, help="steps of each loop")
    parser.add_argument("--native-steps", type=int, default=3, help="steps with the CPU's own fp16 kernels; 0 for none")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, {arguments.threads} thread(s)")
    print(f"to open and close a rehearsal: {time_to_open():.1f} ms", flush=True)
    for name in arguments.model or MODELS:
        report(name, *measure(name, blocks=arguments.blocks, native_steps=arguments.native_steps))


if __name__ == "__main__":
    main()
