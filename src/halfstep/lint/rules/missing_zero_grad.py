"""Gradients are never dropped, or not where a step was skipped."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, final

from halfstep.lint.edits import DeleteStatement, Edit, InsertStatement, ReplaceStatement
from halfstep.lint.evidence.dropping import drops_otherwise, goes_elsewhere
from halfstep.lint.evidence.location import located
from halfstep.lint.evidence.skipping import asks_for_skips
from halfstep.lint.evidence.spelling import quoted
from halfstep.lint.flow import Event, Kind, Verdicts
from halfstep.lint.module import Module
from halfstep.lint.rules.rule import AbstractRule, Bad, Finding, Fix

__all__ = ["MissingZeroGrad"]


@final
class MissingZeroGrad(AbstractRule):
    """Gradients are never dropped, or not where a step was skipped."""

    code = "HS029"
    name = "missing_zero_grad"
    severity = "error"
    summary = "Gradients are never dropped, or not where a step was skipped: infinities stay in them, and every later step is skipped too."
    explanation = """\
`backward()` adds to the gradients that are there. Without `zero_grad()` each step goes by the sum of all batches so far, multiplied by
scales that differ. With a scaler there is worse to come: the first overflow leaves infinities in the gradients, infinity plus anything
stays infinite, and from then on every step is skipped, while the scale falls towards 0 and the loss stays where it is.

The same happens where `zero_grad()` stands behind a condition that is false after a skip (`if scaler.get_scale() >= scale:`), and where a
branch of one's own leaves a batch out with `continue` before the gradients are dropped: the bad gradient stays, and the next batch
is added to it.

Drop the gradients after each step, taken or skipped: `optimizer.zero_grad()` behind `scaler.update()`.

The fix moves the call out of the condition, or puts it in before the `continue`: both are safe. Where there is none at all, the fix adds
one behind the update; that is unsafe, since the gradients may be dropped elsewhere, in code that is not in this file."""
    bad: ClassVar[tuple[Bad, ...]] = (
        Bad(
            code="""\
import torch


def train(model, loader):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = torch.nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
            line=11,
            fixed="""\
import torch


def train(model, loader):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = torch.nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""",
        ),
        Bad(
            code="""\
import torch


def train(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scale = scaler.get_scale()
        scaler.update()
        if scaler.get_scale() >= scale:
            optimizer.zero_grad()
            print("stepped")
""",
            line=14,
            fixed="""\
import torch


def train(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scale = scaler.get_scale()
        scaler.update()
        if scaler.get_scale() >= scale:
            print("stepped")
        optimizer.zero_grad()
""",
        ),
        Bad(
            code="""\
import torch


def train(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if norm > 1000:
            scaler.update()
            continue
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""",
            line=14,
            fixed="""\
import torch


def train(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if norm > 1000:
            scaler.update()
            optimizer.zero_grad()
            continue
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""",
        ),
        Bad(
            code="""\
import torch


def train(model, loader, optimizer, scaler: torch.amp.GradScaler):
    for x in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).mean()
        scaler.scale(loss).backward()
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < scale:
            continue
        optimizer.zero_grad()
""",
            line=13,
            fixed="""\
import torch


def train(model, loader, optimizer, scaler: torch.amp.GradScaler):
    for x in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).mean()
        scaler.scale(loss).backward()
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < scale:
            optimizer.zero_grad()
            continue
        optimizer.zero_grad()
""",
        ),
    )
    good: ClassVar[tuple[str, ...]] = (
        """\
import torch


def train(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        for parameter in model.parameters():
            parameter.grad = None
""",
        """\
import torch


def step(model, x, optimizer, scaler: torch.amp.GradScaler):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
        """\
import torch

from library import prepare


def train(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        prepare(optimizer)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
    )

    def check(self, module: Module) -> Iterator[Finding]:
        """Yields a finding for each optimizer whose gradients are never dropped, and for each skip that keeps them."""
        kept: Verdicts[tuple[Event, Event | None]] = Verdicts()
        skips: Verdicts[tuple[Event, Event]] = Verdicts()
        left: Verdicts[tuple[Event, Event]] = Verdicts()
        drops = dict.fromkeys(event for trace in module.traces for event in trace.events if event.kind is Kind.ZERO_GRAD)
        for trace in module.traces:
            _judge_steps(trace.events, drops, module, kept, skips)
            _judge_leaves(trace.events, module, left)
        never = [] if drops else list(kept.shown())
        if never and not drops_otherwise(module):
            for place, (step, update) in never:
                if not goes_elsewhere(step, module):
                    yield Finding(node=place, message=_kept_message(step, module), fix=_addition(step, update, module))
        for place, (drop, step) in skips.shown():
            yield Finding(node=place, message=_skip_message(drop, step, module), fix=_move(drop, module))
        for place, (leave, given_up) in left.shown():
            yield Finding(node=place, message=_leave_message(given_up, module), fix=_before_leave(leave, given_up, module))


def _judge_steps(
    events: Sequence[Event],
    drops: Iterable[Event],
    module: Module,
    kept: Verdicts[tuple[Event, Event | None]],
    skips: Verdicts[tuple[Event, Event]],
) -> None:
    for step, update in _repeated_steps(events):
        kept.wrong(step.node, (step, update))
        for drop in drops:
            if _is_after_skips(drop, step, module):
                skips.wrong(drop.node, (drop, step))


def _repeated_steps(events: Sequence[Event]) -> Iterator[tuple[Event, Event | None]]:
    """Yields the second of two steps of one optimizer with a backward pass and no drop between them, and the update between them."""
    steps: dict[object, Event] = {}
    updates: dict[object, Event] = {}
    added: set[object] = set()
    for event in events:
        if event.kind in (Kind.ZERO_GRAD, Kind.ESCAPE):
            steps.clear()
        elif event.kind in (Kind.SCALED_BACKWARD, Kind.UNKNOWN_BACKWARD):
            added |= steps.keys()
        elif event.kind is Kind.UPDATE:
            updates.update({key: event for key, step in steps.items() if step.scaler is event.scaler and key not in updates})
        elif event.kind is Kind.STEP and event.scaler is not None and event.scaler.enabled is not False and event.optimizer is not None:
            key = event.optimizer.identity
            if key in steps and key in added and event.loops:
                yield event, updates.get(key)
            added.discard(key)
            updates.pop(key, None)
            steps[key] = event


def _is_after_skips(drop: Event, step: Event, module: Module) -> bool:
    """Whether gradients are dropped where a step by the scaler was taken, and nowhere else."""
    if drop.loops != step.loops or drop.function is not step.function or drop.guards[: len(step.guards)] != step.guards:
        return False
    own = drop.guards[len(step.guards) :]
    return len(own) == 1 and "get_scale" in _written_out(own[0].test, module) and asks_for_skips(own[0].test, module)


def _written_out(test: ast.expr, module: Module) -> str:
    """A condition, with what the names in it are bound to."""
    parts = [module.source(test)]
    for part in ast.walk(test):
        if isinstance(part, ast.Name | ast.Attribute):
            parts.extend(module.source(binding.value) for binding in module.bindings(part) if binding.value is not None)
    return " ".join(parts)


def _judge_leaves(events: Sequence[Event], module: Module, left: Verdicts[tuple[Event, Event]]) -> None:
    """Looks for a `continue` that leaves a batch out, from which the next backward pass adds to gradients that were given up.

    It stands behind `unscale_` and `update`, or behind a step, where the condition around it asks whether that was skipped.
    """
    given_up: Event | None = None
    updated = False
    leave: tuple[Event, Event] | None = None
    for event in events:
        if event.kind in (Kind.ZERO_GRAD, Kind.ESCAPE, Kind.OPTIMIZER_STEP, Kind.CLEAN):
            if leave is not None:
                left.right(leave[0].node)
            given_up, updated, leave = None, False, None
        elif event.kind is Kind.UNSCALE or (event.kind is Kind.STEP and event.scaler is not None and event.scaler.enabled is not False):
            given_up, updated = event, False
        elif event.kind is Kind.UPDATE:
            updated = given_up is not None and event.scaler is given_up.scaler
        elif event.kind is Kind.LEAVE and given_up is not None and updated:
            if given_up.kind is Kind.UNSCALE or _asks_for(given_up, event, module):
                leave = (event, given_up)
        elif event.kind in (Kind.SCALED_BACKWARD, Kind.BACKWARD) and leave is not None:
            left.wrong(leave[0].node, leave)
            given_up, updated, leave = None, False, None


def _asks_for(step: Event, event: Event, module: Module) -> bool:
    """Whether a condition of its own in front of an event asks for the scale after a step."""
    if event.guards[: len(step.guards)] != step.guards:
        return False
    return any("get_scale" in _written_out(guard.test, module) for guard in event.guards[len(step.guards) :])


def _kept_message(step: Event, module: Module) -> str:
    optimizer = step.optimizer.text if step.optimizer is not None else "optimizer"
    return (
        f"No gradients are dropped between one {quoted(step.node, module)} and the next: each step goes by the sum of all batches so far, "
        "and after the first overflow infinities stay in it and every step is skipped. "
        f"Call `{optimizer}.zero_grad()` behind the update."
    )


def _skip_message(drop: Event, step: Event, module: Module) -> str:
    return (
        f"{quoted(drop.node, module)} is left out where {located(step.node, module)} was skipped: the infinities stay in the gradients, "
        "and every later step is skipped too. Drop the gradients after a skipped step as well."
    )


def _leave_message(given_up: Event, module: Module) -> str:
    optimizer = given_up.optimizer.text if given_up.optimizer is not None else "optimizer"
    return (
        f"`continue` leaves a batch out behind {located(given_up.node, module)}, and keeps its gradients: the next batch is added to them, "
        f"and infinities stay for ever. Call `{optimizer}.zero_grad()` before."
    )


def _addition(step: Event, update: Event | None, module: Module) -> Fix | None:
    if update is None or step.optimizer is None or update.function is not step.function or update.guards != step.guards:
        return None
    statement = module.statement(update.node)
    if not isinstance(statement, ast.Expr) or update.loops != step.loops:
        return None
    code = f"{step.optimizer.text}.zero_grad()"
    return Fix(edits=(InsertStatement(statement=statement, code=code, where="after"),), safety="unsafe")


def _move(drop: Event, module: Module) -> Fix | None:
    """Puts the call behind the `if` that it stands in."""
    statement = module.statement(drop.node)
    branch = module.parent(statement)
    if not isinstance(statement, ast.Expr) or not isinstance(branch, ast.If) or statement not in branch.body or branch.orelse:
        return None
    code = module.source(statement)
    edits: tuple[Edit, ...] = (DeleteStatement(statement=statement), InsertStatement(statement=branch, code=code, where="after"))
    if branch.body == [statement]:
        edits = (ReplaceStatement(statement=branch, code=code),)
    return Fix(edits=edits, safety="safe")


def _before_leave(leave: Event, given_up: Event, module: Module) -> Fix | None:
    if given_up.optimizer is None or given_up.function is not leave.function or not isinstance(leave.node, ast.stmt):
        return None
    code = f"{given_up.optimizer.text}.zero_grad()"
    return Fix(edits=(InsertStatement(statement=leave.node, code=code, where="before"),), safety="safe")
