"""A training loop runs inside one autocast region."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, final

from halfstep.lint.evidence.location import located
from halfstep.lint.evidence.spelling import quoted
from halfstep.lint.evidence.training_loops import enclosed_loops
from halfstep.lint.module import Module
from halfstep.lint.rules.rule import AbstractRule, Bad, Finding

__all__ = ["LoopInsideAutocast"]


@final
class LoopInsideAutocast(AbstractRule):
    """A training loop runs inside one autocast region."""

    code = "HS028"
    name = "loop_inside_autocast"
    severity = "warning"
    summary = "A training loop runs inside one autocast region, whose casts of the weights are made once and kept."
    explanation = """\
Autocast casts each weight once in a region, and keeps the half-precision copy until the outermost region is left. Where optimizer steps
happen inside, the next forward pass still computes with the copies of the old weights: the optimizer moves the weights, the loss does
not move, and nothing is said. After the region, evaluation sees weights that no loss has ever been computed with.

Enter a new region for each forward pass, inside the loop, and leave it before `backward()`. Where one region around the loop has to be,
`torch.autocast(..., cache_enabled=False)` makes the casts anew each time, and `torch.clear_autocast_cache()` behind each step drops them.

There is no automatic fix: which part of the loop is the forward pass is for you to say."""
    bad: ClassVar[tuple[Bad, ...]] = (
        Bad(
            code="""\
import torch


def train(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    with torch.autocast("cuda", dtype=torch.float16):
        for x in loader:
            optimizer.zero_grad()
            loss = model(x).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
""",
            line=6,
        ),
        Bad(
            code="""\
import torch


@torch.autocast("cuda", dtype=torch.bfloat16)
def train(model, loader, optimizer, epochs):
    for epoch in range(epochs):
        for x in loader:
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
""",
            line=4,
        ),
        Bad(
            code="""\
import torch


def step(model, x, optimizer):
    optimizer.zero_grad()
    model(x).mean().backward()
    optimizer.step()


def train(model, loader, optimizer):
    region = torch.autocast("cuda", dtype=torch.bfloat16)
    with region:
        for x in loader:
            step(model, x, optimizer)
""",
            line=12,
        ),
        Bad(
            code="""\
import torch


class Trainer:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def run_epoch(self, loader):
        for x in loader:
            self.optimizer.zero_grad()
            self.model(x).mean().backward()
            self.optimizer.step()

    def run(self, loader):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            self.run_epoch(loader)
""",
            line=15,
        ),
    )
    good: ClassVar[tuple[str, ...]] = (
        """\
import torch


def train(model, loader, optimizer):
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(x).mean()
        loss.backward()
        optimizer.step()
""",
        """\
import torch


@torch.no_grad()
def evaluate(model, loader):
    with torch.autocast("cuda", dtype=torch.float16):
        return sum(model(x).mean().item() for x in loader)
""",
        """\
import torch


def train(model, chunks, optimizer):
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = 0
        for chunk in chunks:
            loss = loss + model(chunk).mean()
    loss.backward()
    optimizer.step()
""",
        """\
import torch


def train(model, loader, optimizer):
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=False):
        for x in loader:
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
""",
    )

    def check(self, module: Module) -> Iterator[Finding]:
        """Yields a finding for each region around a loop of training steps."""
        for enclosed in enclosed_loops(module):
            message = (
                f"The loop in line {enclosed.loop.lineno} trains inside the region {quoted(enclosed.region, module)}, which casts each "
                f"weight once and keeps the copy: what {located(enclosed.step.node, module)} changes is not seen by the next forward pass, "
                "and the loss does not move. Enter a new region for each forward pass, inside the loop."
            )
            yield Finding(node=enclosed.region, message=message)
