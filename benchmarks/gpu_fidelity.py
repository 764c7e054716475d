"""Is a rehearsal on a CPU what a GPU computes? Losses, gradients, the origin of an overflow and the history of the scale, side by side.

    python benchmarks/gpu_fidelity.py

It needs a CUDA device, and takes less than three minutes there. Without one it says so, claims nothing and ends with exit code 0.

Each model trains from the same weights on the same batches twice, in fp16 and in bf16: on the GPU in `torch.autocast("cuda")`, and on the
CPU in `halfstep.rehearse("cuda")`. Printed is how far the rehearsal is from the GPU, beside how far fp32 on the GPU is from it, which is
what there is to be modelled. Nothing here drops out values, since a CPU and a GPU draw different random numbers.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep
from halfstep.records import OpRecord

STEPS = 12
SCALE = 128.0
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}

Batch = tuple[Tensor, Tensor]


class ConvNet(nn.Module):
    """Convolutions, batch norm, pooling, and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()),
        )
        self.head = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Images of shape (batch, 3, height, width) to scores of shape (batch, 10)."""
        scores: Tensor = self.head(self.body(x))
        return scores


class Encoder(nn.Module):
    """A Transformer encoder with a mean over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens of shape (batch, length) to scores of shape (batch, 10)."""
        scores: Tensor = self.head(self.layers(self.embed(x)).mean(1))
        return scores


class Recurrent(nn.Module):
    """An LSTM and a head on its last output."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 64)
        self.lstm = nn.LSTM(64, 64, batch_first=True)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens of shape (batch, length) to scores of shape (batch, 10)."""
        scores: Tensor = self.head(self.lstm(self.embed(x))[0][:, -1])
        return scores


class Overflowing(nn.Module):
    """Attention by hand that scales its scores after they were rounded to half, so that they overflow in fp16."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(64, 64), nn.Linear(64, 64)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Vectors of shape (batch, 16, 64) to scores of shape (batch, 10)."""
        attention = (self.query(x) @ self.key(x).transpose(-1, -2)) / 64
        scores: Tensor = self.head(attention.softmax(-1).mean(1))
        return scores


def images() -> Batch:
    """A batch of images."""
    return torch.randn(16, 3, 16, 16), torch.randint(0, 10, (16,))


def tokens() -> Batch:
    """A batch of tokens."""
    return torch.randint(0, 100, (16, 24)), torch.randint(0, 10, (16,))


def large_vectors() -> Batch:
    """A batch of vectors whose products pass 65504."""
    return torch.randn(16, 16, 64) * 400, torch.randint(0, 10, (16,))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {
    "conv net": (ConvNet, images),
    "Transformer": (Encoder, tokens),
    "LSTM": (Recurrent, tokens),
    "overflowing attention": (Overflowing, large_vectors),
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one training run gave.

    Attributes:
        losses: One for each step.
        scales: The loss scale after each step.
        gradients: Those of one step before the first, with a moderate scale, unscaled, one after the other, on the CPU.
        origin: The first operation of that step that made something non-finite.
    """

    losses: list[float]
    scales: list[float]
    gradients: Tensor
    origin: OpRecord | None


def opened(device: str) -> AbstractContextManager[Any]:
    """A rehearsal on a CPU; nothing on a GPU, which is what is rehearsed."""
    return nullcontext() if device == "cuda" else halfstep.rehearse("cuda")


def first_gradients(model: nn.Module, batch: Batch, *, dtype: torch.dtype | None, device: str) -> tuple[Tensor, OpRecord | None]:
    """The gradients of one traced step with a moderate scale, and the origin of what is not finite in it."""
    x, y = batch
    with opened(device), halfstep.trace(model) as seen:
        with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
            loss = F.cross_entropy(model(x), y)
        (loss * SCALE).backward()  # type: ignore[no-untyped-call]
    gradients = torch.cat([weight.grad.flatten().float().cpu() for weight in model.parameters() if weight.grad is not None])
    model.zero_grad()
    return gradients / SCALE, seen.origin


def train(name: str, *, dtype: torch.dtype | None, device: str) -> Run:
    """Trains a model; on a CPU in a rehearsal."""
    make_model, make_batch = MODELS[name]
    torch.manual_seed(0)
    model = make_model().to(device)
    batches = [(x.to(device), y.to(device)) for x, y in (make_batch() for _ in range(STEPS))]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    # It starts too high on purpose, and grows soon: the history has both kinds of change.
    scaler = torch.amp.GradScaler(device, init_scale=2.0**24, growth_interval=4, enabled=dtype is torch.float16)
    gradients, origin = first_gradients(model, batches[0], dtype=dtype, device=device)
    losses, scales = [], []
    for x, y in batches:
        with opened(device):
            with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    return Run(losses=losses, scales=scales, gradients=gradients, origin=origin)


def distance(one: Tensor, other: Tensor) -> str:
    """How far the finite values of one are from another's, relative to those; and whether both are non-finite in the same places."""
    finite = one.isfinite() & other.isfinite()
    agree = bool((one.isfinite() == other.isfinite()).all())
    if not finite.any():
        return "none finite, in both" if agree else "finite in one alone"
    relative = ((one - other)[finite].norm() / other[finite].norm()).item()
    return f"{relative:.2e}" + ("" if agree else ", non-finite in other places")


def described(origin: OpRecord | None) -> str:
    """The operation and module of an origin."""
    return "none" if origin is None else f"{origin.op} in {origin.site.module or 'the model'} ({origin.phase})"


def compare(name: str, precision: str) -> None:
    """Prints how far the rehearsal is from the GPU."""
    dtype = DTYPES[precision]
    gpu, rehearsed = train(name, dtype=dtype, device="cuda"), train(name, dtype=dtype, device="cpu")
    exact = train(name, dtype=None, device="cuda")
    print(f"\n{name}, {precision}")
    for label, of in (("losses", lambda run: torch.tensor(run.losses)), ("gradients of one step", lambda run: run.gradients)):
        print(f"  {label:<30} rehearsed {distance(of(rehearsed), of(gpu))}; fp32 on the GPU {distance(of(exact), of(gpu))}")
    same = "the same" if rehearsed.scales == gpu.scales else f"GPU {gpu.scales}, rehearsed {rehearsed.scales}"
    print(f"  {'scales':<30} {same}")
    print(f"  {'origin':<30} GPU {described(gpu.origin)}; rehearsed {described(rehearsed.origin)}")


def main() -> None:
    """Compares all models, or says that there is no GPU."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    if not torch.cuda.is_available():
        print("No CUDA device is at hand, so nothing was compared. Run this on a machine with a GPU.")
        return
    start = time.perf_counter()
    # fp32 convolutions would run in TF32, and sums of matrix products in half, which a rehearsal does not model.
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {torch.cuda.get_device_name()}", flush=True)
    for name in MODELS:
        for precision in DTYPES:
            compare(name, precision)
    print(f"\n{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
