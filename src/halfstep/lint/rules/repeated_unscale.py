"""The gradients of an optimizer are unscaled twice in one iteration."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import ClassVar, final

from halfstep.lint.edits import DeleteStatement
from halfstep.lint.flow import Event, Kind, Verdicts, asks_about_gradients, depends, line_of, written_scaler
from halfstep.lint.module import Module
from halfstep.lint.rules.rule import AbstractRule, Bad, Finding, Fix

__all__ = ["RepeatedUnscale"]


@final
class RepeatedUnscale(AbstractRule):
    """The gradients of an optimizer are unscaled twice in one iteration."""

    code = "HS008"
    name = "repeated_unscale"
    severity = "error"
    summary = "`scaler.unscale_()` meets an optimizer that was unscaled, or stepped, since the last `update()`."
    explanation = """\
A scaler divides the gradients of an optimizer once for each step. A second `unscale_()` before `update()` raises "unscale_() has
already been called on this optimizer since the last update()", and one behind `step()` raises as well, since the step has unscaled.

With accumulation the usual cause is an `unscale_()` (and clipping) in every micro-batch, while `step()` and `update()` stand behind a
condition. Unscaling there would be wrong even if it did not raise: the parts of the sum would carry different scales. Unscale and
clip where the step is taken.

The fix deletes a second call in the same iteration; it is safe, because that call can only raise. For one in every micro-batch no
fix is offered, since clipping has to move along."""
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
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
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
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
""",
        ),
        Bad(
            code="""\
import torch


def train(model, loader, optimizer, accumulate):
    scaler = torch.amp.GradScaler("cuda")
    for index, x in enumerate(loader):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x) / accumulate
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if (index + 1) % accumulate == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
""",
            line=10,
        ),
    )
    good: ClassVar[tuple[str, ...]] = (
        """\
import torch


def train(model, loader, optimizer, accumulate):
    scaler = torch.amp.GradScaler("cuda")
    for index, x in enumerate(loader):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x) / accumulate
        scaler.scale(loss).backward()
        if (index + 1) % accumulate == 0:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
""",
        """\
import torch


def train(loss, first, second):
    scaler = torch.amp.GradScaler("cuda")
    scaler.scale(loss).backward()
    scaler.unscale_(first)
    scaler.unscale_(second)
    for optimizer in (first, second):
        scaler.step(optimizer)
    scaler.update()
""",
        """\
import torch


def train(model, loader, optimizer, clip, accumulate):
    scaler = torch.amp.GradScaler("cuda")
    for index, x in enumerate(loader):
        last = (index + 1) % accumulate == 0
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x) / accumulate
        scaler.scale(loss).backward()
        if last and clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        if last:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
""",
    )

    def check(self, module: Module) -> Iterator[Finding]:
        """Yields a finding for each call of unscale_() that can only raise."""
        verdicts: Verdicts[tuple[Event, Event]] = Verdicts()
        for trace in module.traces:
            _judge(trace.events, verdicts)
        for place, (event, before) in verdicts.shown():
            yield _finding(module, place, event, before)


def _judge(events: Sequence[Event], verdicts: Verdicts[tuple[Event, Event]]) -> None:
    done: dict[object, Event] = {}
    started = 0
    for index, event in enumerate(events):
        if event.kind in (Kind.UPDATE, Kind.ESCAPE):
            done.clear()
        elif event.kind in (Kind.ITERATION, Kind.LOOP_END):
            started = index
        elif event.kind is Kind.STEP and event.scaler is not None:
            done[event.scaler, event.optimizer] = event
        elif event.kind is Kind.UNSCALE and event.scaler is not None and event.scaler.enabled is not False:
            before = done.get((event.scaler, event.optimizer))
            if before is None:
                # It is the first of its iteration; what the one before left behind is another matter.
                done[event.scaler, event.optimizer] = event
            elif before in events[started:index] if before.node is not event.node else _is_gated(events, event):
                verdicts.wrong(event.node, (event, before))


def _is_gated(events: Sequence[Event], unscale: Event) -> bool:
    """Whether the step stands behind a condition that unscale_() does not have, and nothing leaves the iteration in between."""
    if unscale.optimizer is not None and unscale.optimizer.varies:
        return False  # A loop over optimizers, not over micro-batches.
    steps = [event for event in events if event.kind is Kind.STEP and event.scaler is unscale.scaler and event.loops == unscale.loops]
    left = any(event.kind is Kind.LEAVE for event in events)
    further = [depends(step, unscale) for step in steps]
    if not steps or left or not all(further):
        return False
    # A branch on the norm leaves a bad batch out: what is missing there is the update.
    return not any(asks_about_gradients(guard) for guards in further for guard in guards or ())


def _finding(module: Module, place: ast.AST, event: Event, before: Event) -> Finding:
    scaler, optimizer = written_scaler(event), event.optimizer.text if event.optimizer is not None else "optimizer"
    if before.node is event.node:
        message = (
            f"`{scaler}.unscale_({optimizer})` runs in every micro-batch, but `{scaler}.step({optimizer})` only in some: the second call "
            f"raises a RuntimeError. Unscale and clip where the step is taken."
        )
        return Finding(node=place, message=message)
    did = "stepped (which unscales)" if before.kind is Kind.STEP else "unscaled"
    message = (
        f"The gradients of `{optimizer}` were {did} in line {line_of(before)} already, with no `{scaler}.update()` since: this "
        f"raises a RuntimeError. Delete this call."
    )
    statement = module.statement(place)
    # The earlier one must have happened wherever this one does.
    whole = isinstance(statement, ast.Expr) and statement.value is place and depends(event, before) is not None
    return Finding(node=place, message=message, fix=Fix(edits=(DeleteStatement(statement=statement),), safety="safe") if whole else None)
