"""`scaler.step()` gets gradients of a loss that was never scaled."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import ClassVar, final

from halfstep.lint.edits import ReplaceExpression
from halfstep.lint.flow import Event, Kind, Verdicts, line_of, written_scale, written_scaler
from halfstep.lint.module import Module
from halfstep.lint.rules.rule import AbstractRule, Bad, Finding, Fix

__all__ = ["UnscaledBackward"]


@final
class UnscaledBackward(AbstractRule):
    """`scaler.step()` gets gradients of a loss that was never scaled."""

    code = "HS004"
    name = "unscaled_backward"
    severity = "error"
    summary = "`scaler.step()` gets gradients of a loss that was not scaled."
    explanation = """\
`scaler.step(optimizer)` divides the gradients by the loss scale. When `backward()` was called on the plain loss, they come out 65536
times too small: SGD stands still, Adam divides by its epsilon, weight decay is all that is left. The small gradients that the scale
should have saved from underflow are lost as well. Nothing raises.

Call `scaler.scale(loss).backward()`.

The fix puts the loss into `scaler.scale(...)`. It is safe: a scaler that is disabled hands the loss back as it is."""
    bad: ClassVar[tuple[Bad, ...]] = (
        Bad(
            code="""\
import torch


def train(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x)
        loss.backward()
        scaler.step(optimizer)
        scaler.update()
""",
            line=10,
            fixed="""\
import torch


def train(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
        ),
        Bad(
            code="""\
import torch


class Trainer:
    def __init__(self):
        self.scaler = torch.amp.GradScaler("cuda")

    def step(self, model, x, optimizer):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            first, second = model(x)
        (first + second).backward(retain_graph=True)
        self.scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        self.scaler.step(optimizer)
        self.scaler.update()
""",
            line=12,
            fixed="""\
import torch


class Trainer:
    def __init__(self):
        self.scaler = torch.amp.GradScaler("cuda")

    def step(self, model, x, optimizer):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            first, second = model(x)
        self.scaler.scale(first + second).backward(retain_graph=True)
        self.scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        self.scaler.step(optimizer)
        self.scaler.update()
""",
        ),
    )
    good: ClassVar[tuple[str, ...]] = (
        """\
import torch


def train(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x)
        scaled = scaler.scale(loss)
        scaled.backward()
        scaler.step(optimizer)
        scaler.update()
""",
        """\
import torch


def train(model, loader, optimizer, use_amp):
    scaler = torch.amp.GradScaler("cuda", enabled=use_amp)
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16, enabled=use_amp):
            loss = model(x)
        if use_amp:
            scaler.scale(loss).backward()
        else:
            loss.backward()
        scaler.step(optimizer)
        scaler.update()
""",
        """\
import torch


def fits(model, x, optimizer):
    try:
        model(x).sum().backward()
    except torch.OutOfMemoryError:
        return False
    optimizer.zero_grad()
    return True


def train(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        fits(model, x, optimizer)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""",
    )

    def check(self, module: Module) -> Iterator[Finding]:
        """Yields a finding for each plain backward pass whose gradients a scaler's step takes."""
        verdicts: Verdicts[tuple[Event, Event]] = Verdicts()
        for trace in module.traces:
            _judge(trace.events, verdicts)
        backwards: dict[ast.AST, tuple[Event, Event]] = {}
        for _step, (backward, step) in verdicts.shown():
            backwards.setdefault(backward.node, (backward, step))
        for place, (backward, step) in backwards.items():
            yield _finding(module, place, backward, step)


def _judge(events: Sequence[Event], verdicts: Verdicts[tuple[Event, Event]]) -> None:
    # A plain backward pass next to a scaled one may be meant for an optimizer of its own.
    alone = not any(event.kind is Kind.OPTIMIZER_STEP for event in events)
    plain: Event | None = None
    scaled = unknown = False
    for event in events:
        if event.kind is Kind.BACKWARD:
            plain = plain or event
        elif event.kind is Kind.SCALED_BACKWARD:
            scaled = True
        elif event.kind in (Kind.UNKNOWN_BACKWARD, Kind.ESCAPE):
            unknown = True
        elif event.kind in (Kind.OPTIMIZER_STEP, Kind.UPDATE, Kind.ZERO_GRAD):
            plain, scaled, unknown = None, False, False
        elif event.kind is Kind.STEP and event.scaler is not None:
            if plain is None or unknown or (scaled and not alone):
                verdicts.right(event.node)
            elif event.scaler.enabled is not False:
                verdicts.wrong(event.node, (plain, event))


def _finding(module: Module, place: ast.AST, backward: Event, step: Event) -> Finding:
    scaler = written_scaler(step) or "scaler"
    optimizer = step.optimizer.text if step.optimizer is not None else "optimizer"
    loss = backward.operand
    text = " ".join(module.source(loss).split()) if loss is not None else "loss"
    message = (
        f"`{scaler}.step({optimizer})` in line {line_of(step)} divides these gradients by the loss scale, but the loss was not "
        f"multiplied by it: they come out {written_scale(step.scaler, module)} times too small at first. "
        f"Call `{scaler}.scale({text}).backward()`."
    )
    receiver = place.func.value if isinstance(place, ast.Call) and isinstance(place.func, ast.Attribute) else None
    fix = None
    if isinstance(place, ast.Call) and receiver is not None and receiver is loss and backward.function is step.function:
        whole, inner = module.source(place), module.source(receiver)
        # What stands between the loss and the dot is the parenthesis around the loss, which `scale()` brings along.
        rest = whole[whole.index(inner) + len(inner) :].lstrip(") \t\r\n")
        if rest.startswith(".backward"):
            fix = Fix(edits=(ReplaceExpression(node=place, code=f"{scaler}.scale({inner}){rest}"),), safety="safe")
    return Finding(node=place, message=message, fix=fix)
