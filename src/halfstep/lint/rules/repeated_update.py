"""`scaler.update()` is called more than once for one step."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator, Sequence
from typing import ClassVar, final

from halfstep.lint.edits import DeleteStatement
from halfstep.lint.flow import Event, Kind, Verdicts, line_of, written_scaler
from halfstep.lint.module import Module
from halfstep.lint.rules.rule import AbstractRule, Bad, Finding, Fix

__all__ = ["RepeatedUpdate"]


@final
class RepeatedUpdate(AbstractRule):
    """`scaler.update()` is called more than once for one step."""

    code = "HS007"
    name = "repeated_update"
    severity = "error"
    summary = "`scaler.update()` runs once per optimizer or per micro-batch instead of once per iteration."
    explanation = """\
`scaler.update()` changes the scale. Called between two optimizers of one iteration, it makes the second one divide its gradients by
another scale than they were multiplied by, after a skip by half of it; and each call counts as an iteration, so that the scale grows
twice as fast as `growth_interval` says. Called in every micro-batch of an accumulation, it mixes gradients of different scales in one
sum: a true gradient of 1.0 comes out as 0.25, with no error. Called where nothing was stepped or unscaled since the last one, it raises
"No inf checks were recorded prior to update".

Two phases of an iteration, each with a backward pass of its own behind the other's update, are right: the scale grows a little faster.

Call it once, at the end of the iteration, after every optimizer has stepped.

The fix deletes a call that another one follows in the same iteration, or one that can only raise; it is safe. For a call in every
micro-batch no fix is offered: an `unscale_()` next to it, to log a norm say, has to go as well."""
    bad: ClassVar[tuple[Bad, ...]] = (
        Bad(
            code="""\
import torch


def train(model, loader, encoder, head):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        encoder.zero_grad()
        head.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x)
        scaler.scale(loss).backward()
        scaler.step(encoder)
        scaler.update()
        scaler.step(head)
        scaler.update()
""",
            line=13,
            fixed="""\
import torch


def train(model, loader, encoder, head):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        encoder.zero_grad()
        head.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x)
        scaler.scale(loss).backward()
        scaler.step(encoder)
        scaler.step(head)
        scaler.update()
""",
        ),
        Bad(
            code="""\
import torch


def train(model, batches, optimizer, log):
    scaler = torch.amp.GradScaler("cuda")
    for micro_batches in batches:
        optimizer.zero_grad()
        for x in micro_batches:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(x) / len(micro_batches)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            log(model.head.weight.grad.norm())
            scaler.update()
        scaler.step(optimizer)
        scaler.update()
""",
            line=14,
        ),
    )
    good: ClassVar[tuple[str, ...]] = (
        """\
import torch


def train(model, loader, encoder, head):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        encoder.zero_grad()
        head.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x)
        scaler.scale(loss).backward()
        scaler.step(encoder)
        scaler.step(head)
        scaler.update()
""",
        """\
import torch


def train(model, batches, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for micro_batches in batches:
        optimizer.zero_grad()
        for x in micro_batches:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(x) / len(micro_batches)
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
        """\
import torch


def train(model, critic, loader, first, second):
    scaler, other = torch.amp.GradScaler("cuda"), torch.amp.GradScaler("cuda")
    for x in loader:
        first.zero_grad()
        second.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss, penalty = model(x), critic(x)
        scaler.scale(loss).backward()
        other.scale(penalty).backward()
        scaler.step(first)
        other.step(second)
        scaler.update()
        other.update()
""",
    )

    def check(self, module: Module) -> Iterator[Finding]:
        """Yields a finding for each update that is one too many."""
        verdicts: Verdicts[tuple[Event, Event]] = Verdicts()
        idle: Verdicts[tuple[Event, Event]] = Verdicts()
        for trace in module.traces:
            _judge_iteration(trace.events, verdicts)
            _judge_accumulation(trace.events, verdicts)
            _judge_idle(trace.events, idle)
        filtered = {event.loops[-1:] for trace in module.traces for event in trace.events if event.kind is Kind.LEAVE}
        for place, (update, other) in verdicts.shown():
            varies = other.optimizer is not None and other.optimizer.varies
            if varies and other is not update and update.loops[-1:] in filtered:
                continue  # A loop that picks one of the optimizers.
            yield _finding(module, place, update, other)
        for place, (update, other) in idle.shown():
            scaler = written_scaler(update)
            message = (
                f"Nothing was stepped or unscaled since `{scaler}.update()` in line {line_of(other)}: this call raises an AssertionError, "
                f'"No inf checks were recorded prior to update". Call it once, behind the step.'
            )
            statement = module.statement(place)
            whole = isinstance(statement, ast.Expr)
            yield Finding(
                node=place, message=message, fix=Fix(edits=(DeleteStatement(statement=statement),), safety="safe") if whole else None
            )


def _judge_iteration(events: Sequence[Event], verdicts: Verdicts[tuple[Event, Event]]) -> None:
    """Whether another optimizer steps behind an update, by gradients that were scaled before it."""
    stepped: dict[object, Event] = {}
    updated: dict[object, tuple[Event, Event]] = {}
    for event in events:
        scaler = event.scaler
        if event.kind is Kind.ESCAPE:
            stepped.clear()
            updated.clear()
        elif event.kind in (Kind.SCALED_BACKWARD, Kind.UNKNOWN_BACKWARD):
            stepped.pop(scaler, None)
            updated.pop(scaler, None)
        elif event.kind is Kind.UPDATE and scaler in stepped and event.operand is None:
            updated[scaler] = (event, stepped[scaler])
        elif event.kind is Kind.STEP and event.optimizer is not None:
            update, step = updated.pop(scaler, (event, event))
            same = step.optimizer is not None and step.optimizer.identity == event.optimizer.identity and not event.optimizer.varies
            if update is not event and not same:
                verdicts.wrong(update.node, (update, event))
            stepped[scaler] = event


def _judge_accumulation(events: Sequence[Event], verdicts: Verdicts[tuple[Event, Event]]) -> None:
    """Whether an update falls between a backward pass and a step that takes its gradients, with no step before it."""
    scaled: dict[object, Event] = {}
    updated: dict[object, Event] = {}
    for event in events:
        if event.kind in (Kind.ESCAPE, Kind.UNKNOWN_BACKWARD, Kind.LEAVE) or event.kind in (Kind.STEP, Kind.ZERO_GRAD):
            scaled.clear()
            updated.clear()
        elif event.kind is Kind.SCALED_BACKWARD and event.scaler is not None and event.scaler.enabled is not False:
            if event.scaler in updated and event.loops == updated[event.scaler].loops:
                verdicts.wrong(updated[event.scaler].node, (updated[event.scaler], updated[event.scaler]))
            scaled[event.scaler] = event
        elif event.kind is Kind.UPDATE and event.scaler in scaled and event.operand is None:
            updated[event.scaler] = event


def _judge_idle(events: Sequence[Event], verdicts: Verdicts[tuple[Event, Event]]) -> None:
    """Whether an update has anything to go by."""
    before: dict[object, Event] = {}
    used: set[object] = set()
    for event in events:
        if event.kind is Kind.ESCAPE:
            before.clear()
        elif event.kind in (Kind.STEP, Kind.UNSCALE) or (event.kind is Kind.UPDATE and event.operand is not None):
            before.pop(event.scaler, None)
            used.add(event.scaler)
        elif event.kind is Kind.UPDATE and event.scaler is not None:
            if event.scaler in used:
                verdicts.right(event.node)
            elif event.scaler in before and before[event.scaler].node is not event.node and event.scaler.enabled is not False:
                verdicts.wrong(event.node, (event, before[event.scaler]))
            before[event.scaler] = event
            used.discard(event.scaler)


def _is_followed(module: Module, update: Event) -> bool:
    """Whether another update follows wherever this one is reached, in the same iteration."""
    found = False
    for trace in module.traces:
        for index, event in enumerate(trace.events):
            if event.node is update.node:
                rest = itertools.takewhile(lambda later: later.kind not in (Kind.ITERATION, Kind.LOOP_END), trace.events[index + 1 :])
                if not any(later.kind is Kind.UPDATE and later.scaler is update.scaler for later in rest):
                    return False
                found = True
    return found


def _finding(module: Module, place: ast.AST, update: Event, other: Event) -> Finding:
    scaler = written_scaler(update)
    if other is update:
        message = (
            f"`{scaler}.update()` runs in a micro-batch whose gradients are kept for later: the parts of the sum carry different scales. "
            f"Call it once, behind `{scaler}.step()`."
        )
        return Finding(node=place, message=message)
    line = f"line {line_of(other)}" if other.loops == update.loops and line_of(other) > line_of(update) else "the next iteration"
    message = (
        f"`{scaler}.update()` runs before the step in {line}, whose gradients were scaled before it: that step divides by another "
        f"scale, and the scale grows faster than it should. Call it once, after all steps."
    )
    statement = module.statement(place)
    # Without the first one, the second must still be reached.
    whole = isinstance(statement, ast.Expr) and _is_followed(module, update)
    return Finding(node=place, message=message, fix=Fix(edits=(DeleteStatement(statement=statement),), safety="safe") if whole else None)
