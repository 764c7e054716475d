"""`optimizer.step()` is called on scaled gradients, past the scaler."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, final

from halfstep.lint.edits import DeleteStatement, Edit, ReplaceStatement
from halfstep.lint.flow import Event, Kind, Target, Verdicts, depends, line_of, written_scaler
from halfstep.lint.module import Module
from halfstep.lint.rules.rule import AbstractRule, Bad, Finding, Fix

__all__ = ["OptimizerStepBypassesScaler"]


@final
class OptimizerStepBypassesScaler(AbstractRule):
    """`optimizer.step()` is called on scaled gradients, past the scaler."""

    code = "HS006"
    name = "optimizer_step_bypasses_scaler"
    severity = "error"
    summary = "`optimizer.step()` is called on the gradients of a scaled loss, past the scaler."
    explanation = """\
After `scaler.scale(loss).backward()` the gradients are 65536 times too large. `optimizer.step()` takes them as they are: SGD moves
65536 times too far; Adam does not care, which hides the mistake, while its weight decay and any clipping are off. Steps with
non-finite gradients are no longer skipped, and the first overflow writes NaN into the weights.

A left-over `optimizer.step()` behind `scaler.step(optimizer)` applies every update twice, and applies the very gradients that the
scaler refused.

Call `scaler.step(optimizer)` and `scaler.update()` instead, or delete the left-over call.

The fix does that. It is safe: `scaler.step()` calls the optimizer's step itself."""
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
        scaler.scale(loss).backward()
        optimizer.step()
""",
            line=11,
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


def train(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.step()  # from before
""",
            line=13,
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
    )
    good: ClassVar[tuple[str, ...]] = (
        """\
import torch


def train(model, loader, optimizer, use_amp):
    scaler = torch.amp.GradScaler("cuda", enabled=use_amp)
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16, enabled=use_amp):
            loss = model(x)
        scaler.scale(loss).backward()
        if use_amp:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
""",
        """\
import torch


def train(model, critic, loader, optimizer, other):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        other.zero_grad()
        critic(x).backward()
        other.step()
""",
        """\
import torch


def train(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if norm.isfinite():
            optimizer.step()
        scaler.update()
""",
    )

    def check(self, module: Module) -> Iterator[Finding]:
        """Yields a finding for each step of an optimizer that takes scaled gradients."""
        verdicts: Verdicts[_Bypass] = Verdicts()
        for trace in module.traces:
            _judge(trace.events, verdicts)
        for place, bypass in verdicts.shown():
            yield _finding(module, place, bypass)


@final
@dataclass(frozen=True, slots=True)
class _Bypass:
    """A step that goes past the scaler.

    Attributes:
        step: The optimizer's own step.
        scaled: The backward pass of the scaled loss.
        stepped: The scaler's step of the same optimizer before it; `None` where there is none.
        updated: Whether the scaler is updated later in the iteration.
    """

    step: Event
    scaled: Event
    stepped: Event | None
    updated: bool


@final
@dataclass(slots=True)
class _Window:
    """What happened since gradients were dropped or the iteration began."""

    scaled: Event | None = None
    plain: bool = False
    stepped: dict[Target, Event] = field(default_factory=dict)
    unscaled: dict[Target, Event] = field(default_factory=dict)


def _judge(events: Sequence[Event], verdicts: Verdicts[_Bypass]) -> None:
    window = _Window()
    for index, event in enumerate(events):
        if event.kind in (Kind.ESCAPE, Kind.UNKNOWN_BACKWARD):
            window = _Window(plain=True)
        elif event.kind is Kind.ZERO_GRAD:
            window = _Window()
        elif event.kind is Kind.BACKWARD:
            window.plain = True
        elif event.kind is Kind.SCALED_BACKWARD and event.scaler is not None and event.scaler.enabled is not False:
            window.scaled = event
            # A backward pass after a step begins anew.
            window.stepped.clear()
            window.unscaled.clear()
        elif event.kind is Kind.STEP and event.optimizer is not None:
            window.stepped[event.optimizer] = event
        elif event.kind is Kind.UNSCALE and event.optimizer is not None:
            window.unscaled[event.optimizer] = event
        elif event.kind is Kind.OPTIMIZER_STEP and event.optimizer is not None:
            _judge_step(event, window, events[index:], verdicts)


def _judge_step(event: Event, window: _Window, rest: Sequence[Event], verdicts: Verdicts[_Bypass]) -> None:
    assert event.optimizer is not None
    scaled = window.scaled
    if scaled is None or scaled.scaler is None or window.plain or _is_decided(event, window, scaled):
        verdicts.right(event.node)
        return
    updated = False
    for later in rest:
        if later.kind in (Kind.ITERATION, Kind.LOOP_END):
            break
        updated = updated or (later.kind is Kind.UPDATE and later.scaler is scaled.scaler)
    verdicts.wrong(event.node, _Bypass(event, scaled, _same(window.stepped, event.optimizer), updated))


def _is_decided(event: Event, window: _Window, scaled: Event) -> bool:
    """Whether a condition decides that the optimizer steps by itself: scaling may be off then, or the gradients were looked at."""
    assert event.optimizer is not None
    assert scaled.scaler is not None
    unscaled = _same(window.unscaled, event.optimizer)
    if unscaled is not None and depends(event, unscaled) != ():
        return True
    if _same(window.stepped, event.optimizer) is None and window.stepped:
        # Another optimizer went through the scaler: this one may hold other parameters, whose loss was not scaled.
        return True
    return scaled.scaler.enabled is not True and depends(event, scaled) != () and _same(window.stepped, event.optimizer) is None


def _same(events: dict[Target, Event], optimizer: Target) -> Event | None:
    return next((event for target, event in events.items() if target.identity == optimizer.identity), None)


def _finding(module: Module, place: ast.AST, bypass: _Bypass) -> Finding:
    step = bypass.step
    optimizer = step.optimizer.text if step.optimizer is not None else "optimizer"
    statement = module.statement(place)
    whole = isinstance(statement, ast.Expr) and statement.value is place and isinstance(place, ast.Call) and not place.args
    edit: Edit
    if bypass.stepped is not None:
        scaler = written_scaler(bypass.stepped)
        message = (
            f"`{scaler}.step({optimizer})` in line {line_of(bypass.stepped)} has taken this step already: every update is applied "
            f"twice, and a skipped one is applied after all. Delete this call."
        )
        edit = DeleteStatement(statement=statement)
    else:
        scaler = written_scaler(bypass.scaled)
        message = (
            f"`{optimizer}.step()` takes gradients that are still multiplied by the loss scale (`{scaler or 'the scaler'}` scaled the "
            f"loss in line {line_of(bypass.scaled)}), and overflows are not skipped. Call `{scaler or 'scaler'}.step({optimizer})` instead."
        )
        code = f"{scaler}.step({optimizer})" + ("" if bypass.updated else f"\n{scaler}.update()")
        edit = ReplaceStatement(statement=statement, code=code)
        whole = whole and bool(scaler) and step.function is bypass.scaled.function
    return Finding(node=place, message=message, fix=Fix(edits=(edit,), safety="safe") if whole else None)
