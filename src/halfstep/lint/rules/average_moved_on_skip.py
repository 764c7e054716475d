"""An average of the weights moves on with steps that the scaler skipped."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import ClassVar, final

from halfstep.lint.evidence.location import located
from halfstep.lint.evidence.skipping import followers, gate
from halfstep.lint.evidence.spelling import quoted
from halfstep.lint.flow import Event, Kind, receiver_of
from halfstep.lint.module import Module
from halfstep.lint.rules.rule import AbstractRule, Bad, Finding, Fix

__all__ = ["AverageMovedOnSkip"]

# Running means of losses and the like are called by the same names.
_NUMBERS = re.compile(r"(?i)loss|acc|metric|meter|time|reward|score|error|norm|speed|\.item\(|\.detach\(")


@final
class AverageMovedOnSkip(AbstractRule):
    """An average of the weights moves on with steps that the scaler skipped."""

    code = "HS033"
    name = "average_moved_on_skip"
    severity = "warning"
    summary = "An average of the weights, or a target network, moves on where the scaler has skipped the optimizer's step."
    explanation = """\
`scaler.step(optimizer)` leaves the step out where gradients are not finite, and says nothing: with the default scale of 65536, 7 to 16
of the first 30 steps of a small model with a large loss. The weights are the same as before then, and an average that is moved all the
same takes them in once more. Its count runs ahead of the training: with a decay that grows with the count, as most have, it hardly moves
by the time that training begins; an average of equal parts, such as `AveragedModel`, holds the untrained weights once for each skip.

Move it only where the optimizer stepped. The scaler shows a skip by lowering its scale in `update()`: remember the scale before that,
and compare.

The fix does so. It is safe: a run without skips comes out the same. `get_scale()` waits for the GPU, as `scaler.step` does already.

Nothing is said where any condition around the average may have to do with skipped steps, where the average moves once an epoch, and
about plain copies (`target.load_state_dict(...)`), which come out the same after a skip."""
    bad: ClassVar[tuple[Bad, ...]] = (
        Bad(
            code="""\
import torch
from torch.optim.swa_utils import AveragedModel


def train(model, loader, optimizer):
    average = AveragedModel(model)
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        average.update_parameters(model)
""",
            line=15,
            fixed="""\
import torch
from torch.optim.swa_utils import AveragedModel


def train(model, loader, optimizer):
    average = AveragedModel(model)
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scale = scaler.get_scale()
        scaler.update()
        if scaler.get_scale() >= scale:
            average.update_parameters(model)
""",
        ),
        Bad(
            code="""\
import torch


class Trainer:
    def __init__(self, model, optimizer, ema=None):
        self.model, self.optimizer, self.ema = model, optimizer, ema
        self.scaler = torch.amp.GradScaler("cuda")

    def step(self, loss):
        self.scaler.scale(loss).backward()
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        if self.ema:
            self.ema.update(self.model)
        return scale

    def run(self, loader):
        for x in loader:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = self.model(x).mean()
            self.step(loss)
""",
            line=16,
            fixed="""\
import torch


class Trainer:
    def __init__(self, model, optimizer, ema=None):
        self.model, self.optimizer, self.ema = model, optimizer, ema
        self.scaler = torch.amp.GradScaler("cuda")

    def step(self, loss):
        self.scaler.scale(loss).backward()
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        if self.ema:
            if self.scaler.get_scale() >= scale:
                self.ema.update(self.model)
        return scale

    def run(self, loader):
        for x in loader:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = self.model(x).mean()
            self.step(loss)
""",
        ),
    )
    good: ClassVar[tuple[str, ...]] = (
        """\
import torch


def train(model, loader, optimizer, ema):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).mean()
        scaler.scale(loss).backward()
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < scale:
            continue
        ema.update(model)
""",
        """\
import torch


def train(model, loader, optimizer, ema, epochs):
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(epochs):
        for x in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(x).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        ema.update(model)
""",
        """\
import torch


def train(model, loader, optimizer, loss_ema):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        loss_ema.update(loss.detach())
""",
        """\
import torch


def train(model, loader, optimizer, ema):
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(x).mean()
        loss.backward()
        optimizer.step()
        ema.update(model)
""",
    )

    def check(self, module: Module) -> Iterator[Finding]:
        """Yields a finding for each average that follows a step by a scaler in the same iteration, whatever became of that."""
        for follower in followers(module, Kind.AVERAGE):
            if _is_of_numbers(follower.event, module):
                continue
            edits = gate(module, follower)
            message = (
                f"{quoted(follower.event.node, module)} moves the average also where {located(follower.step.node, module)} was skipped: "
                "the same weights count once more, and its decay runs ahead of the training. Move it only where the scale did not go down."
            )
            yield Finding(node=follower.event.node, message=message, fix=Fix(edits=edits, safety="safe") if edits is not None else None)


def _is_of_numbers(event: Event, module: Module) -> bool:
    """Whether what moves is a running mean of a loss or another number."""
    place = receiver_of(event)
    if place is not None and _NUMBERS.search(module.source(place)):
        return True
    return isinstance(event.node, ast.Call) and any(_NUMBERS.search(module.source(argument)) for argument in event.node.args)
