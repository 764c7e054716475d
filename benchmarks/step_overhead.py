"""What does the engine cost? One training step, written by hand and through halfstep, Accelerate and Lightning Fabric, side by side.

    python benchmarks/step_overhead.py                      # both models
    python benchmarks/step_overhead.py --model mlp --blocks 200

Every loop trains the same model from the same weights on the same batches, does the same work (autocast, scaling and clipping where the
precision calls for it, step, clear), and the loops take turns in blocks of steps. Ratios are taken block by block, against the
hand-written loop of the same block; printed are their medians with 95 % intervals.

The peers have to be talked into scaling on a CPU: Accelerate is given a `torch.amp.GradScaler("cpu")` and `native_amp = True`, Fabric a
`MixedPrecision("16-mixed", "cpu", scaler=...)` plugin. Install them with `make peers`.
"""

from __future__ import annotations

import argparse
import platform
import random
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import MixedPrecision
from halfstep.comparison.statistics import median_interval
from halfstep.precision import DTYPES
from halfstep.task import load_task

Step = Callable[[Any], None]
MAX_GRAD_NORM = 1.0


class NotMeasuredError(Exception):
    """A loop makes no sense in a setting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A fresh model and what it trains on."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[nn.Module, Any], Tensor]
    batches: list[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One line of the table: a model in a precision, with or without clipping."""

    model: str
    precision: str
    clip: bool
    threads: int
    block: int
    fused: bool = False


SETTINGS = {
    "mlp": [
        Setting(model="mlp", precision="bf16", clip=False, threads=1, block=100),
        Setting(model="mlp", precision="fp16", clip=True, threads=1, block=100),
        Setting(model="mlp", precision="fp16", clip=True, threads=1, block=100, fused=True),
    ],
    "resnet18": [Setting(model="resnet18", precision="bf16", clip=False, threads=2, block=1)],
}


def make_mlp(setting: Setting) -> Problem:
    """A multi-layer perceptron 32-64-10 with batches of 16: so small that a step is nearly all overhead."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    batches = [(torch.randn(16, 32), torch.randint(0, 10, (16,))) for _ in range(8)]
    return Problem(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01, fused=setting.fused), loss=classify, batches=batches)


def classify(model: nn.Module, batch: Any) -> Tensor:
    """Cross-entropy of a batch of inputs and classes."""
    inputs, classes = batch
    return F.cross_entropy(model(inputs), classes)


def make_resnet18(setting: Setting) -> Problem:
    """ResNet-18 of the examples, channels last, with batches of 32."""
    task = load_task("examples/cifar_resnet18.py:task")(0)
    batches = [tuple(part[:32] for part in batch) for _, batch in zip(range(4), task.batches, strict=False)]
    model = task.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    laid_out = [(images.contiguous(memory_format=torch.channels_last), classes) for images, classes in batches]
    return Problem(model=model, optimizer=task.optimizer, loss=task.loss, batches=laid_out)


PROBLEMS = {"mlp": make_mlp, "resnet18": make_resnet18}


def by_hand(problem: Problem, setting: Setting) -> Step:
    """The loop that PyTorch's documentation teaches."""
    model, optimizer = problem.model, problem.optimizer
    dtype = DTYPES[setting.precision]  # type: ignore[index]
    scaler = torch.amp.GradScaler("cpu") if setting.precision == "fp16" else None
    parameters = list(model.parameters())

    def step(batch: Any) -> None:
        with torch.autocast("cpu", dtype=dtype):
            loss = problem.loss(model, batch)
        if scaler is None:
            loss.backward()  # type: ignore[no-untyped-call]
            if setting.clip:
                nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
            optimizer.step()
        else:
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            if setting.clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()

    return step


def by_halfstep(problem: Problem, setting: Setting) -> Step:
    """The engine, with its accounting on."""
    model = problem.model
    amp = MixedPrecision(model, problem.optimizer, setting.precision, max_grad_norm=MAX_GRAD_NORM if setting.clip else None)

    def step(batch: Any) -> None:
        amp.train_step(problem.loss, model, batch)

    return step


def by_halfstep_without_buffers(problem: Problem, setting: Setting) -> Step:
    """The engine without putting buffers back after a skipped step, to see what having them ready costs."""
    model = problem.model
    if next(model.buffers(), None) is None:
        raise NotMeasuredError("the model has no buffers")
    clip = MAX_GRAD_NORM if setting.clip else None
    amp = MixedPrecision(model, problem.optimizer, setting.precision, max_grad_norm=clip, restore_buffers=False)

    def step(batch: Any) -> None:
        amp.train_step(problem.loss, model, batch)

    return step


def by_accelerate(problem: Problem, setting: Setting) -> Step:
    """Accelerate, given a scaler for the CPU."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # It is one for the process, and remembers the precision before.
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    if setting.precision == "fp16":
        accelerator.state._mixed_precision = "fp16"
        accelerator.scaler = torch.amp.GradScaler("cpu")
    accelerator.native_amp = True
    model, optimizer = accelerator.prepare(problem.model, problem.optimizer)

    def step(batch: Any) -> None:
        with accelerator.autocast():
            loss = problem.loss(model, batch)
        accelerator.backward(loss)
        if setting.clip:
            accelerator.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return step


def by_fabric(problem: Problem, setting: Setting) -> Step:
    """Lightning Fabric, with its mixed-precision plugin given a scaler for the CPU."""
    from lightning.fabric import Fabric
    from lightning.fabric.plugins import MixedPrecision as Plugin

    if setting.fused and setting.clip:
        raise NotMeasuredError("Fabric refuses to clip gradients for a fused optimizer with loss scaling")
    scaler = torch.amp.GradScaler("cpu") if setting.precision == "fp16" else None
    plugin = Plugin("16-mixed" if scaler is not None else "bf16-mixed", "cpu", scaler=scaler)
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    model, optimizer = fabric.setup(problem.model, problem.optimizer)

    def step(batch: Any) -> None:
        with fabric.autocast():
            loss = problem.loss(model, batch)
        fabric.backward(loss)
        if setting.clip:
            fabric.clip_gradients(model, optimizer, max_norm=MAX_GRAD_NORM, error_if_nonfinite=False)
        optimizer.step()
        optimizer.zero_grad()

    return step


LOOPS = {
    "by hand": by_hand,
    "halfstep": by_halfstep,
    "halfstep, no buffers": by_halfstep_without_buffers,
    "Lightning Fabric": by_fabric,
    "Accelerate": by_accelerate,
}


def make_loops(setting: Setting) -> dict[str, tuple[Step, Problem]]:
    """A stepping function and what it trains, for each loop whose library is installed."""
    loops = {}
    for name, make in LOOPS.items():
        problem = PROBLEMS[setting.model](setting)
        try:
            loops[name] = (make(problem, setting), problem)
        except ImportError as error:
            print(f"{name}: not measured, {error.name} is not installed (make peers)")
        except NotMeasuredError as error:
            print(f"{name}: not measured, {error}")
    return loops


def measure(setting: Setting, *, blocks: int) -> dict[str, list[float]]:
    """Seconds a step, for each loop and block; the loops take turns, in a new random order for each block."""
    loops = make_loops(setting)
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    order = random.Random(0)
    for number in range(-2, blocks):  # Two blocks to warm up.
        for name in order.sample(list(loops), k=len(loops)):
            step, problem = loops[name]
            start = time.perf_counter()
            for index in range(setting.block):
                step(problem.batches[index % len(problem.batches)])
            if number >= 0:
                seconds[name].append((time.perf_counter() - start) / setting.block)
    check_same_weights({name: problem.model for name, (_, problem) in loops.items()})
    return seconds


def check_same_weights(models: dict[str, nn.Module]) -> None:
    """Makes sure that all loops did the same work: they end with the same weights, bit for bit."""
    expected = [parameter.detach() for parameter in models["by hand"].parameters()]
    for name, model in models.items():
        if not all(torch.equal(mine, own) for mine, own in zip(expected, model.parameters(), strict=True)):
            raise SystemExit(f"{name} did not do the work of the hand-written loop: its weights differ.")


def report(setting: Setting, seconds: dict[str, list[float]]) -> None:
    """Prints one line for each loop."""
    clip = f"clipping to {MAX_GRAD_NORM}" if setting.clip else "no clipping"
    scaling = "loss scaling" if setting.precision == "fp16" else "no loss scaling"
    blocks = f"{len(seconds['by hand'])} blocks of {setting.block} step(s)"
    fused = ", fused optimizer" if setting.fused else ""
    print(f"\n{setting.model}, {setting.precision}, {scaling}{fused}, {clip}, {setting.threads} thread(s), {blocks}")
    print(f"  {'loop':<22}{'ms a step':>12}   times the hand-written loop, with its 95 % interval")
    for name, times in seconds.items():
        ratio = median_interval([own / hand for own, hand in zip(times, seconds["by hand"], strict=True)])
        print(f"  {name:<22}{median_interval(times).median * 1e3:>12.3f}   {ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]")


def main() -> None:
    """Measures what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(SETTINGS), action="append", help="what to measure; all when it is left out")
    parser.add_argument("--blocks", type=int, default=60, help="blocks of steps for each loop")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", category=UserWarning, module="lightning")
    warnings.filterwarnings("ignore", message="fp16 on this CPU is emulated")
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}")
    for name in arguments.model or sorted(SETTINGS):
        for setting in SETTINGS[name]:
            torch.set_num_threads(setting.threads)
            report(setting, measure(setting, blocks=arguments.blocks))


if __name__ == "__main__":
    main()
