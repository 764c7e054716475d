"""A learning-rate schedule moves on with steps that the scaler skipped."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import ClassVar, final

from halfstep.lint.evidence.location import located
from halfstep.lint.evidence.skipping import followers, gate
from halfstep.lint.evidence.spelling import quoted
from halfstep.lint.flow import Event, Kind
from halfstep.lint.module import Module
from halfstep.lint.rules.rule import AbstractRule, Bad, Finding, Fix

__all__ = ["UnconditionalSchedulerStep"]


@final
class UnconditionalSchedulerStep(AbstractRule):
    """A learning-rate schedule moves on with steps that the scaler skipped."""

    code = "HS015"
    name = "unconditional_scheduler_step"
    severity = "warning"
    summary = "A schedule that counts iterations moves on where the scaler has skipped the optimizer's step."
    explanation = """\
`scaler.step(optimizer)` leaves the step out where gradients are not finite, and says nothing. That is normal at the start: with the
default scale of 65536 the first steps of many runs are skipped, 7 to 16 of the first 30 in a small model with a large loss. A schedule
that moves in every iteration runs ahead of the training by as many steps; a warm-up is partly over before the first weight has moved.
Where the very first step is skipped, torch warns of `lr_scheduler.step()` before `optimizer.step()`.

Move the schedule only where the optimizer stepped. The scaler shows a skip by lowering its scale in `update()`: remember the scale
before that, and compare.

The fix does so. It is safe: a run without skips comes out the same. `get_scale()` waits for the GPU, as `scaler.step` does already.

Nothing is said about schedules that count epochs, about `scheduler.step(value)` with an argument, which sets where the schedule is, and
where any condition around it may have to do with skipped steps."""
    bad: ClassVar[tuple[Bad, ...]] = (
        Bad(
            code="""\
import torch


def train(model, loader):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=500)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = torch.nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        warm_up.step()  # once an iteration
""",
            line=15,
            fixed="""\
import torch


def train(model, loader):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=500)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = torch.nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scale = scaler.get_scale()
        scaler.update()
        if scaler.get_scale() >= scale:
            warm_up.step()  # once an iteration
""",
        ),
        Bad(
            code="""\
import torch


class Trainer:
    def __init__(self, model, optimizer, scheduler=None, accumulate=1):
        self.model, self.optimizer = model, optimizer
        self.scheduler, self.accumulate = scheduler, accumulate
        self.scaler = torch.amp.GradScaler("cuda")

    def run(self, loader):
        for index, x in enumerate(loader):
            with torch.autocast("cuda", dtype=torch.float16):
                loss = self.model(x).mean() / self.accumulate
            self.scaler.scale(loss).backward()
            if (index + 1) % self.accumulate == 0:
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.optimizer.zero_grad()
                if self.scheduler is not None:
                    self.scheduler.step()
""",
            line=20,
            fixed="""\
import torch


class Trainer:
    def __init__(self, model, optimizer, scheduler=None, accumulate=1):
        self.model, self.optimizer = model, optimizer
        self.scheduler, self.accumulate = scheduler, accumulate
        self.scaler = torch.amp.GradScaler("cuda")

    def run(self, loader):
        for index, x in enumerate(loader):
            with torch.autocast("cuda", dtype=torch.float16):
                loss = self.model(x).mean() / self.accumulate
            self.scaler.scale(loss).backward()
            if (index + 1) % self.accumulate == 0:
                self.scaler.step(self.optimizer)
                scale = self.scaler.get_scale()
                self.scaler.update()
                self.optimizer.zero_grad()
                if self.scheduler is not None:
                    if self.scaler.get_scale() >= scale:
                        self.scheduler.step()
""",
        ),
        Bad(
            code="""\
import torch


def step(model, x, optimizer, lr_scheduler, scaler):
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    lr_scheduler.step()
    scaler.update()
""",
            line=10,
        ),
    )
    good: ClassVar[tuple[str, ...]] = (
        """\
import torch


def train(model, loader, optimizer, scheduler):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        is_skipped = before > scaler.get_scale()
        if not is_skipped:
            scheduler.step()
""",
        """\
import torch


def train(model, loader, optimizer, scheduler, epochs):
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(epochs):
        for x in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(x).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        scheduler.step()
""",
        """\
import torch


def train(model, loader, optimizer, scheduler, epoch):
    scaler = torch.amp.GradScaler("cuda")
    for index, x in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step(epoch + index / len(loader))
""",
        """\
import torch


def train(model, loader, optimizer, scheduler):
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(x).mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
""",
    )

    def check(self, module: Module) -> Iterator[Finding]:
        """Yields a finding for each schedule that follows a step by a scaler in the same iteration, whatever became of that."""
        for follower in followers(module, Kind.SCHEDULER_STEP):
            if _has_arguments(follower.event):
                continue
            edits = gate(module, follower)
            message = (
                f"{quoted(follower.event.node, module)} moves the schedule also where {located(follower.step.node, module)} was skipped: "
                "each skip, common in the first iterations, puts it one step ahead of the training. Move it only where the scale did not "
                "go down."
            )
            yield Finding(node=follower.event.node, message=message, fix=Fix(edits=edits, safety="safe") if edits is not None else None)


def _has_arguments(event: Event) -> bool:
    return isinstance(event.node, ast.Call) and bool(event.node.args or event.node.keywords)
