"""Gradients are dropped in every micro-batch, although a step is taken only after several."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, final

from halfstep.lint.edits import DeleteStatement, InsertStatement
from halfstep.lint.evidence.location import line_of, located
from halfstep.lint.evidence.spelling import quoted
from halfstep.lint.flow import BACKWARDS, Event, Guard, Kind, Verdicts, depends
from halfstep.lint.module import Module
from halfstep.lint.rules.rule import AbstractRule, Bad, Finding, Fix

__all__ = ["ZeroGradPerMicrobatch"]

_STEPS = (Kind.STEP, Kind.OPTIMIZER_STEP)
_MODEL = re.compile(r"(?i)(model|net|network)$")
_ACCUMULATION = re.compile(r"(?i)accum|boundary|micro|sync_grad|is_last|last_in|window")


@final
class ZeroGradPerMicrobatch(AbstractRule):
    """Gradients are dropped in every micro-batch, although a step is taken only after several."""

    code = "HS037"
    name = "zero_grad_per_microbatch"
    severity = "warning"
    summary = "Gradients are dropped in every micro-batch, although a step is taken only after several: nothing is accumulated."
    explanation = """\
With accumulation, `backward()` adds the gradients of several micro-batches before one step goes by their sum. Where `zero_grad()` runs in
each micro-batch, all but the last of them are thrown away: of a window of 8, seven eighths of the work do nothing, and since each loss is
divided by 8, the gradient that is left is an eighth of what it should be. The loss goes down, only slowly and with the noise of a small
batch, so that it is taken for a wrong learning rate.

Drop the gradients once a window: next to the step, behind it.

The fix moves the call behind the update, into the branch that steps. It is unsafe, since it changes the order of statements: look whether
anything between needs gradients that are not there."""
    bad: ClassVar[tuple[Bad, ...]] = (
        Bad(
            code="""\
import torch


def train(model, loader, optimizer, accumulate):
    scaler = torch.amp.GradScaler("cuda")
    for index, x in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).mean() / accumulate
        scaler.scale(loss).backward()
        if (index + 1) % accumulate == 0:
            scaler.step(optimizer)
            scaler.update()
""",
            line=7,
            fixed="""\
import torch


def train(model, loader, optimizer, accumulate):
    scaler = torch.amp.GradScaler("cuda")
    for index, x in enumerate(loader):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).mean() / accumulate
        scaler.scale(loss).backward()
        if (index + 1) % accumulate == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
""",
        ),
        Bad(
            code="""\
import torch


def train(model, loader, optimizer, window=4):
    scaler = torch.amp.GradScaler("cuda")
    for index, x in enumerate(loader):
        is_last_of_window = (index + 1) % window == 0
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).mean() / window
        scaler.scale(loss).backward()
        if is_last_of_window:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
""",
            line=16,
            fixed="""\
import torch


def train(model, loader, optimizer, window=4):
    scaler = torch.amp.GradScaler("cuda")
    for index, x in enumerate(loader):
        is_last_of_window = (index + 1) % window == 0
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).mean() / window
        scaler.scale(loss).backward()
        if is_last_of_window:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
""",
        ),
        Bad(
            code="""\
import torch


def train(model, batches, optimizer):
    for batch in batches:
        for part in batch.chunk(4):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(part).mean() / 4
            loss.backward()
        optimizer.step()
""",
            line=7,
        ),
    )
    good: ClassVar[tuple[str, ...]] = (
        """\
import torch


def train(model, loader, optimizer, accumulate):
    scaler = torch.amp.GradScaler("cuda")
    for index, x in enumerate(loader):
        if index % accumulate == 0:
            optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).mean() / accumulate
        scaler.scale(loss).backward()
        if (index + 1) % accumulate == 0:
            scaler.step(optimizer)
            scaler.update()
""",
        """\
import torch


def train(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).mean()
        scaler.scale(loss).backward()
        if not torch.isfinite(loss):
            continue
        scaler.step(optimizer)
        scaler.update()
""",
        """\
import torch


def train(critic, generator, loader, c_optimizer, g_optimizer, n_critic=5):
    scaler = torch.amp.GradScaler("cuda")
    for index, x in enumerate(loader):
        c_optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            c_loss = critic(x).mean() - critic(generator(x).detach()).mean()
        scaler.scale(c_loss).backward()
        scaler.step(c_optimizer)
        g_optimizer.zero_grad()
        if index % n_critic == 0:
            with torch.autocast("cuda", dtype=torch.float16):
                g_loss = -critic(generator(x)).mean()
            scaler.scale(g_loss).backward()
            scaler.step(g_optimizer)
        scaler.update()
""",
    )

    def check(self, module: Module) -> Iterator[Finding]:
        """Yields a finding for each `zero_grad` that throws away what a gated step was to go by."""
        verdicts: Verdicts[tuple[Event, Event, Event]] = Verdicts()
        steps = dict.fromkeys(
            event for trace in module.traces for event in trace.events if event.kind in _STEPS and event.optimizer is not None
        )
        for trace in module.traces:
            _judge(trace.events, steps, module, verdicts)
        updates = dict.fromkeys(event for trace in module.traces for event in trace.events if event.kind is Kind.UPDATE)
        for place, (drop, step, backward) in verdicts.shown():
            message = (
                f"{quoted(drop.node, module)} throws away the gradients of every micro-batch, although {located(step.node, module)} comes "
                f"only after several: of the passes of line {line_of(backward.node)} only the last one counts, and the sum is too small. "
                "Drop the gradients behind the step."
            )
            yield Finding(node=place, message=message, fix=_fix(drop, step, updates, module))


def _judge(events: Sequence[Event], steps: Iterable[Event], module: Module, verdicts: Verdicts[tuple[Event, Event, Event]]) -> None:
    """Looks for gradients that are dropped without having been stepped by, where the step waits for the end of a window."""
    added: Event | None = None
    for index, event in enumerate(events):
        if event.kind in BACKWARDS:
            added = event
        elif event.kind in _STEPS or event.kind in (Kind.ESCAPE, Kind.UNSCALE):
            added = None
        elif event.kind is Kind.ZERO_GRAD:
            step = _waiting_step(event, steps, module)
            if _is_giving_up(event, module):
                step = None
            if added is not None and added.loops == event.loops and step is not None and not _begins_anew(events[index + 1 :], event, step):
                verdicts.wrong(event.node, (event, step, added))
            added = None


def _is_giving_up(drop: Event, module: Module) -> bool:
    """Whether gradients are dropped because something went wrong: in a handler of an exception, or before the loop is left."""
    statement = module.statement(drop.node)
    holder = module.parent(statement)
    if any(isinstance(around, ast.ExceptHandler) for around, _part in module.syntax.ancestors(statement)):
        return True
    blocks = [block for block in vars(holder).values() if isinstance(block, list) and statement in block] if holder is not None else []
    return any(isinstance(later, ast.Break | ast.Continue | ast.Return | ast.Raise) for block in blocks for later in block)


def _waiting_step(drop: Event, steps: Iterable[Event], module: Module) -> Event | None:
    """The step for which gradients are accumulated, of the optimizer that drops them."""
    own = [step for step in steps if _is_same(step, drop, steps)]
    if len(own) != 1:
        return None
    step = own[0]
    if step.loops == drop.loops:
        further = depends(step, drop)
        return step if further and any(_is_window(guard, module) for guard in further) else None
    # An inner loop over micro-batches, with the step behind it.
    is_inner = len(drop.loops) == len(step.loops) + 1 and drop.loops[:-1] == step.loops and drop.function is step.function
    return step if is_inner and module.syntax.order(step.node) > module.syntax.order(drop.node) and drop.guards == step.guards else None


def _begins_anew(rest: Sequence[Event], drop: Event, step: Event) -> bool:
    """Whether gradients are made anew behind an inner loop, so that those of the loop were for something else."""
    if step.loops == drop.loops:
        return False
    for event in rest:
        if event.kind in (*BACKWARDS, Kind.ZERO_GRAD) and event.loops == step.loops:
            return True
        if event.kind in _STEPS:
            return False
    return True


def _is_same(step: Event, drop: Event, steps: Iterable[Event]) -> bool:
    """Whether the gradients that are dropped are those that a step goes by: its optimizer's, or all of the model's."""
    if step.optimizer is None or drop.optimizer is None or step.optimizer.identity == drop.optimizer.identity:
        return step.optimizer is not None and drop.optimizer is not None
    others = {each.optimizer.identity for each in steps if each.optimizer is not None}
    return len(others) == 1 and step.loops == drop.loops and _MODEL.search(drop.optimizer.text) is not None


def _is_window(guard: Guard, module: Module) -> bool:
    """Whether a condition counts micro-batches."""
    texts = [module.source(guard.test)]
    for part in ast.walk(guard.test):
        if isinstance(part, ast.Name | ast.Attribute):
            texts.extend(module.source(binding.value) for binding in module.bindings(part) if binding.value is not None)
    text = " ".join(texts)
    return "%" in text or _ACCUMULATION.search(text) is not None


def _fix(drop: Event, step: Event, updates: Iterable[Event], module: Module) -> Fix | None:
    """Moves the call behind the update that belongs to the step."""
    statement = module.statement(drop.node)
    update = next(
        (each for each in updates if each.scaler is step.scaler and each.guards == step.guards and each.function is step.function), None
    )
    if step.kind is not Kind.STEP or update is None or update.loops != step.loops or step.function is not drop.function:
        return None
    behind = module.statement(update.node)
    if not isinstance(statement, ast.Expr) or not isinstance(behind, ast.Expr) or drop.loops != step.loops:
        return None
    code = module.source(statement)
    return Fix(edits=(DeleteStatement(statement=statement), InsertStatement(statement=behind, code=code, where="after")), safety="unsafe")
