"""An iteration ends without `scaler.update()`."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import ClassVar, final

from halfstep.lint.edits import InsertStatement
from halfstep.lint.flow import Event, Kind, Trace, Verdicts, asks_about_gradients, depends, line_of, written_scaler
from halfstep.lint.module import Module
from halfstep.lint.rules.rule import AbstractRule, Bad, Finding, Fix

__all__ = ["MissingUpdate"]


@final
class MissingUpdate(AbstractRule):
    """An iteration ends without `scaler.update()`."""

    code = "HS005"
    name = "missing_update"
    severity = "error"
    summary = "An iteration that unscales or steps ends without `scaler.update()`."
    explanation = """\
`scaler.update()` ends an iteration: it changes the scale and forgets which optimizers were unscaled and stepped. Without it the
scale stays at 65536 for ever, and the next `scaler.step()` or `scaler.unscale_()` raises "has already been called since the last
update()". A branch that skips a bad batch by `continue` behind `unscale_()` is the common way to get there.

Call `scaler.update()` once at the end of every iteration that unscaled or stepped, also of those that are skipped by hand; drop the
gradients there, too.

The fix inserts `scaler.update()` behind the step, or before the `continue`. Behind the step it is safe; before a `continue` it is
marked unsafe, because dropping the gradients of the batch (`zero_grad()`) may be missing as well."""
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
        scaler.step(optimizer)
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
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if norm > 100:
            continue
        scaler.step(optimizer)
        scaler.update()
""",
            line=14,
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
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if norm > 100:
            scaler.update()
            continue
        scaler.step(optimizer)
        scaler.update()
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
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
        """\
class Loop:
    def __init__(self, scaler, optimizer):
        self.scaler, self.optimizer = scaler, optimizer

    def step(self, loss):
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)

    def end(self):
        self.scaler.update()
""",
        """\
import torch


def train(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        if x is None:
            continue
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if norm > 100:
            scaler.update()
            continue
        scaler.step(optimizer)
        scaler.update()
""",
    )

    def check(self, module: Module) -> Iterator[Finding]:
        """Yields a finding for each step without an update, and for each `continue` that passes it by."""
        updated = any(event.kind is Kind.UPDATE for trace in module.traces for event in trace.events)
        # Somebody else's code that gets the scaler may update it.
        handed = any(event.kind is Kind.ESCAPE for trace in module.traces for event in trace.events)
        verdicts: Verdicts[Event] = Verdicts()
        for trace in module.traces:
            _judge_steps(trace, verdicts, ends=not updated and not handed)
            _judge_skips(trace.events, verdicts)
            _judge_branches(trace.events, verdicts)
        for place, event in verdicts.shown():
            yield _finding(module, place, event, elsewhere=updated)


def _judge_steps(trace: Trace, verdicts: Verdicts[Event], *, ends: bool) -> None:
    """Whether each step is followed by an update before the next step of the same optimizer."""
    stepped: dict[object, Event] = {}
    left: set[object] = set()  # Whose iteration has ended since the step.
    for event in trace.events:
        if event.kind in (Kind.ITERATION, Kind.LOOP_END):
            left.update(key for key, step in stepped.items() if event.node in step.loops[-1:])
        elif event.kind in (Kind.UPDATE, Kind.ESCAPE):
            late = left if event.kind is Kind.UPDATE else set()
            verdicts.all_right(step.node for key, step in stepped.items() if key not in late)
            stepped, left = {}, set()
        elif _is_judged(event):
            key = (event.scaler, event.optimizer)
            if key in stepped and stepped[key].node is event.node:
                verdicts.wrong(event.node, stepped[key])
            stepped[key] = event
            left.discard(key)
    if ends and trace.whole and trace.function is not None:
        scaled = {event.scaler for event in trace.events if event.kind is Kind.SCALED_BACKWARD}
        for step in trace.events:
            if step.scaler in scaled and _is_enabled_step(step):
                verdicts.wrong(step.node, step)


def _is_judged(event: Event) -> bool:
    """Whether an event is a step that an update has to follow before it comes again: not in a loop over optimizers."""
    return _is_enabled_step(event) and event.optimizer is not None and not event.optimizer.varies


def _is_enabled_step(event: Event) -> bool:
    """Whether an event is a step of a scaler that is on. One with a closure is wrong for another reason."""
    if event.kind is not Kind.STEP or event.scaler is None or event.scaler.enabled is False:
        return False
    return isinstance(event.node, ast.Call) and len(event.node.args) + len(event.node.keywords) == 1


def _judge_skips(events: Sequence[Event], verdicts: Verdicts[Event]) -> None:
    """Whether a `continue` passes an update by, behind unscale_(); where the step is as unconditional as unscale_()."""
    unscaled: Event | None = None
    for index, event in enumerate(events):
        if event.kind in (Kind.UPDATE, Kind.ESCAPE, Kind.ITERATION, Kind.STEP):
            unscaled = None
        elif event.kind is Kind.UNSCALE and event.scaler is not None and event.scaler.enabled is not False:
            unscaled = event
        elif event.kind is Kind.LEAVE and unscaled is None:
            verdicts.right(event.node)
        elif event.kind is Kind.LEAVE and unscaled is not None and _meets_again(events[index:], unscaled):
            verdicts.wrong(event.node, unscaled)


def _judge_branches(events: Sequence[Event], verdicts: Verdicts[Event]) -> None:
    """Whether the branch that leaves a bad batch out passes the update by, and comes to unscale_() again."""
    unscaled: Event | None = None
    for event in events:
        if event.kind in (Kind.UPDATE, Kind.ESCAPE, Kind.STEP, Kind.LEAVE, Kind.LOOP_END):
            unscaled = None
        elif event.kind is Kind.UNSCALE and event.scaler is not None and event.scaler.enabled is not False:
            if unscaled is not None and unscaled.node is event.node and (branch := _branch(events, event)) is not None:
                verdicts.wrong(branch, event)
            unscaled = event


def _branch(events: Sequence[Event], unscale: Event) -> ast.expr | None:
    """The condition on the gradients' norm that the step stands behind, and unscale_() does not."""
    if unscale.optimizer is not None and unscale.optimizer.varies:
        return None
    steps = [step for step in events if step.kind is Kind.STEP and step.scaler is unscale.scaler and step.loops == unscale.loops]
    guards = [guard for step in steps for guard in depends(step, unscale) or ()]
    return next((guard.test for guard in guards if asks_about_gradients(guard)), None)


def _meets_again(rest: Sequence[Event], unscaled: Event) -> bool:
    """Whether the next iteration comes to unscale_() again with no update in between."""
    for event in rest:
        if event.kind in (Kind.UPDATE, Kind.ESCAPE, Kind.LOOP_END):
            return False
        if event.node is unscaled.node:
            return True
    return False


def _finding(module: Module, place: ast.AST, event: Event, *, elsewhere: bool) -> Finding:
    scaler = written_scaler(event) or "scaler"
    optimizer = event.optimizer.text if event.optimizer is not None else "optimizer"
    update = f"{scaler}.update()"
    if isinstance(place, ast.Continue):
        message = (
            f"`continue` leaves the iteration after `{scaler}.unscale_({optimizer})` in line {line_of(event)} and without "
            f"`{update}`: the next `unscale_()` raises a RuntimeError. Call `{update}` and drop the gradients first."
        )
        edit = InsertStatement(statement=place, code=update, where="before")
        return Finding(node=place, message=message, fix=Fix(edits=(edit,), safety="unsafe"))
    if place is not event.node:
        message = (
            f"One branch of this condition leaves the iteration after `{scaler}.unscale_({optimizer})` in line {line_of(event)} without "
            f"`{update}`: the next `unscale_()` raises a RuntimeError. Call `{update}` behind both branches."
        )
        return Finding(node=place, message=message)
    message = (
        f"`{scaler}.step({optimizer})` is not followed by `{update}`: the scale never changes, and the next step raises a RuntimeError. "
        f"Call `{update}` once at the end of the iteration."
    )
    statement = module.statement(place)
    # An update that stands elsewhere would come too often then.
    simple = isinstance(statement, ast.Expr | ast.Assign) and not elsewhere
    simple = simple and not (event.optimizer is not None and event.optimizer.varies)
    edit = InsertStatement(statement=statement, code=update, where="after")
    return Finding(node=place, message=message, fix=Fix(edits=(edit,), safety="safe") if simple else None)
