"""Gradients are clipped while they are multiplied by the loss scale."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import ClassVar, final

from halfstep.lint.edits import InsertStatement
from halfstep.lint.flow import Event, Kind, Verdicts, depends, line_of, written_scale, written_scaler
from halfstep.lint.module import Module
from halfstep.lint.rules.rule import AbstractRule, Bad, Finding, Fix
from halfstep.lint.values import Scaler

__all__ = ["ClipBeforeUnscale"]


@final
class ClipBeforeUnscale(AbstractRule):
    """Gradients are clipped while they are multiplied by the loss scale."""

    code = "HS002"
    name = "clip_before_unscale"
    severity = "error"
    summary = "Gradients are clipped while they are multiplied by the loss scale."
    explanation = """\
After `scaler.scale(loss).backward()` every gradient is multiplied by the loss scale, 65536 at first. A threshold of 1.0 then
compares with norms that are 65536 times too large: nearly every step is clipped, and the scaler divides what is left by the scale
once more. With a scale of 4096 and a true norm of 2.39, an update comes out 4100 times too small. Nothing raises, and the loss
curve is flat.

Call `scaler.unscale_(optimizer)` before clipping: it divides the gradients in place, once for each step; `scaler.step(optimizer)`
knows that and does not divide again.

The fix inserts that call. It is safe: it is the order that PyTorch's documentation prescribes. With accumulation, where clipping
happens in every micro-batch and the step in some, clipping itself has to move next to the step, and no fix is offered."""
    bad: ClassVar[tuple[Bad, ...]] = (
        Bad(
            code="""\
import torch

scaler = torch.amp.GradScaler("cuda")


def train(model, loader, optimizer):
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x, y)
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # keep it small
        scaler.step(optimizer)
        scaler.update()
""",
            line=12,
            fixed="""\
import torch

scaler = torch.amp.GradScaler("cuda")


def train(model, loader, optimizer):
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x, y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # keep it small
        scaler.step(optimizer)
        scaler.update()
""",
        ),
        Bad(
            code="""\
import torch
from torch.nn.utils import clip_grad_value_


class Trainer:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.scaler = torch.amp.GradScaler("cuda")

    def step(self, x):
        self.optimizer.zero_grad()
        with torch.autocast("cuda"):
            loss = self.model(x)
        self.scaler.scale(loss).backward()
        self.finish()

    def finish(self):
        clip_grad_value_(self.model.parameters(), 0.5)
        self.scaler.step(self.optimizer)
        self.scaler.update()
""",
            line=18,
            fixed="""\
import torch
from torch.nn.utils import clip_grad_value_


class Trainer:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.scaler = torch.amp.GradScaler("cuda")

    def step(self, x):
        self.optimizer.zero_grad()
        with torch.autocast("cuda"):
            loss = self.model(x)
        self.scaler.scale(loss).backward()
        self.finish()

    def finish(self):
        self.scaler.unscale_(self.optimizer)
        clip_grad_value_(self.model.parameters(), 0.5)
        self.scaler.step(self.optimizer)
        self.scaler.update()
""",
        ),
        Bad(
            code="""\
import torch


def train(model, loader, optimizer, scaler, accumulate):
    for index, x in enumerate(loader):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x) / accumulate
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if (index + 1) % accumulate == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
""",
            line=9,
        ),
    )
    good: ClassVar[tuple[str, ...]] = (
        """\
import torch


def train(model, loader, optimizer, use_amp, max_norm):
    scaler = torch.amp.GradScaler("cuda", enabled=use_amp)
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", enabled=use_amp):
            loss = model(x, y)
        scaler.scale(loss).backward()
        if max_norm > 0:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
""",
        """\
import torch


def train(model, loader, optimizer, scaler=None):
    for x, y in loader:
        optimizer.zero_grad()
        if scaler is not None:
            with torch.autocast("cuda"):
                loss = model(x, y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
        else:
            loss = model(x, y)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
""",
        """\
import torch


def train(model, loader, optimizer, scaler, clip):
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda"):
            loss = model(x)
        scaler.scale(loss).backward()
        clip(scaler, optimizer, model)  # somebody else's, which may unscale
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
""",
    )

    def check(self, module: Module) -> Iterator[Finding]:
        """Yields a finding for each clipping of scaled gradients."""
        verdicts: Verdicts[tuple[Event, Event, Event | None]] = Verdicts()
        unscaled: set[ast.AST] = set()
        for trace in module.traces:
            _judge(trace.events, verdicts, unscaled)
        for place, (scaled, clip, step) in verdicts.shown():
            scaler = written_scaler(scaled) or "scaler"
            optimizer = step.optimizer.text if step is not None and step.optimizer is not None else "optimizer"
            line = line_of(scaled)
            message = (
                f"Gradients are clipped while they are multiplied by the loss scale (`{scaler}` scaled the loss in line {line}): the "
                f"threshold meets values that are {written_scale(scaled.scaler, module)} times too large at first, and the update shrinks. "
                f"Call `{scaler}.unscale_({optimizer})` before."
            )
            # Where unscale_() is called on another way to the same place, a second call would raise there.
            yield Finding(node=place, message=message, fix=None if place in unscaled else _fix(module, clip, step))


def _judge(events: Sequence[Event], verdicts: Verdicts[tuple[Event, Event, Event | None]], places: set[ast.AST]) -> None:
    """Judges each clipping, and collects those that gradients come to unscaled on some way."""
    scaled: dict[Scaler, Event] = {}
    unscaled: dict[Scaler, Event] = {}
    for index, event in enumerate(events):
        scaler = event.scaler
        if event.kind is Kind.ESCAPE or event.kind is Kind.UNKNOWN_BACKWARD:
            scaled.clear()
        elif scaler is not None and event.kind is Kind.SCALED_BACKWARD and scaler.enabled is not False:
            scaled[scaler] = event
        elif scaler is not None and event.kind is Kind.UNSCALE:
            unscaled[scaler] = event
        elif scaler is not None and event.kind in (Kind.STEP, Kind.UPDATE):
            scaled.pop(scaler, None)
            unscaled.pop(scaler, None)
        elif event.kind is Kind.CLIP and scaled:
            if unscaled:
                places.add(event.node)
            _judge_clip(events[index:], scaled, unscaled, verdicts)


def _judge_clip(
    rest: Sequence[Event],
    scaled: dict[Scaler, Event],
    unscaled: dict[Scaler, Event],
    verdicts: Verdicts[tuple[Event, Event, Event | None]],
) -> None:
    clip = rest[0]
    for scaler, backward in scaled.items():
        # A call behind a condition of its own does not excuse what always happens, if the scaler is certainly on.
        always = scaler.enabled is True and depends(clip, backward) == ()
        if scaler not in unscaled:
            verdicts.wrong(clip.node, (backward, clip, _next_step(rest, scaler)))
        elif not (always and depends(unscaled[scaler], backward)):
            verdicts.right(clip.node)


def _next_step(rest: Sequence[Event], scaler: Scaler) -> Event | None:
    for event in rest[1:]:
        if event.kind is Kind.ITERATION:
            return None
        if event.kind is Kind.STEP and event.scaler is scaler:
            return event
    return None


def _fix(module: Module, clip: Event, step: Event | None) -> Fix | None:
    """Inserts unscale_() where the step follows under the same conditions, in the same function."""
    if (
        step is None
        or step.optimizer is None
        or step.function is not clip.function
        or depends(step, clip) != ()
        or clip.loops != step.loops
    ):
        return None
    statement = module.statement(clip.node)
    if not isinstance(statement, ast.Expr | ast.Assign | ast.AnnAssign | ast.If):
        return None
    code = f"{written_scaler(step)}.unscale_({step.optimizer.text})"
    return Fix(edits=(InsertStatement(statement=statement, code=code, where="before"),), safety="safe")
