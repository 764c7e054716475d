"""Gradients are cleaned of infinities when the scaler has noted these already."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import ClassVar, final

from halfstep.lint.edits import DeleteStatement
from halfstep.lint.evidence.location import located
from halfstep.lint.evidence.spelling import quoted
from halfstep.lint.flow import Event, Kind, Verdicts
from halfstep.lint.module import Module
from halfstep.lint.rules.rule import AbstractRule, Bad, Finding, Fix

__all__ = ["CleaningAfterUnscale"]


@final
class CleaningAfterUnscale(AbstractRule):
    """Gradients are cleaned of infinities when the scaler has noted these already."""

    code = "HS038"
    name = "cleaning_after_unscale"
    severity = "error"
    summary = (
        "Gradients are cleaned of infinities behind `scaler.unscale_`, which has noted them already: the step is skipped all the same."
    )
    explanation = """\
`scaler.unscale_(optimizer)` does two things: it divides the gradients by the scale, and it notes whether any of them is not finite.
`scaler.step(optimizer)` goes by that note and does not look again. Gradients that are cleaned in between (`nan_to_num_`, zeros where they
are not finite) are never used: the step is skipped, the scale goes down, and the code only looks as if it had saved the step. A norm that
is computed of them hides the overflow from the log.

Remove the cleaning, and let the scaler skip: a skipped step costs one batch, and the scale that it lowers is what prevents the next one.
Where steps are skipped all the time, find the operation that overflows. Cleaning *before* `unscale_` is no way out: the scaler sees
nothing then, keeps or even raises a scale that is too large, and the weights take gradients with holes, or with the 3.4e38 that
`nan_to_num_` puts in for an infinity unless it is told otherwise.

The fix deletes the cleaning, with the loop around it where nothing else is in it. It is unsafe: what reads the gradients afterwards, such
as a norm in a log, or a sum that is not dropped after a skip, sees the infinities then."""
    bad: ClassVar[tuple[Bad, ...]] = (
        Bad(
            code="""\
import torch


def train(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.nan_to_num_(0.0, 0.0, 0.0)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
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
            loss = model(x).mean()
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


class Trainer:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.scaler = torch.amp.GradScaler("cuda")

    def clean(self):
        count = 0
        for parameter in self.model.parameters():
            parameter.grad[~torch.isfinite(parameter.grad)] = 0
            count += 1
        return count

    def step(self, x):
        self.optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = self.model(x).mean()
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        self.clean()
        self.scaler.step(self.optimizer)
        self.scaler.update()
""",
            line=12,
            fixed="""\
import torch


class Trainer:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.scaler = torch.amp.GradScaler("cuda")

    def clean(self):
        count = 0
        for parameter in self.model.parameters():
            count += 1
        return count

    def step(self, x):
        self.optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = self.model(x).mean()
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        self.clean()
        self.scaler.step(self.optimizer)
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
            loss = model(x).mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
""",
        """\
import torch


def train(model, loader, optimizer):
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(x).mean()
        loss.backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                torch.nan_to_num(parameter.grad, nan=0.0, out=parameter.grad)
        optimizer.step()
""",
        """\
import torch


def train(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            outputs = model(x).nan_to_num(0.0)
            loss = outputs.mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        print(sum(torch.isfinite(parameter.grad).all() for parameter in model.parameters()))
        scaler.step(optimizer)
        scaler.update()
""",
    )

    def check(self, module: Module) -> Iterator[Finding]:
        """Yields a finding for each cleaning between `unscale_` and the step that goes by it."""
        verdicts: Verdicts[tuple[Event, Event, Event]] = Verdicts()
        for trace in module.traces:
            _judge(trace.events, module, verdicts)
        for statement, (clean, unscaled, step) in verdicts.shown():
            message = (
                f"{located(unscaled.node, module)} has noted before that gradients are not finite, and {quoted(step.node, module)} goes by "
                "that: it skips the step all the same, and what is cleaned here is never used. Remove it, and let the scaler skip."
            )
            fix = Fix(edits=(DeleteStatement(statement=_all_of_it(statement, module)),), safety="unsafe")
            yield Finding(node=clean.node, message=message, fix=fix)


def _judge(events: Sequence[Event], module: Module, verdicts: Verdicts[tuple[Event, Event, Event]]) -> None:
    unscaled: list[Event] = []
    cleaned: list[Event] = []
    for event in events:
        if event.kind in (Kind.ESCAPE, Kind.SCALED_BACKWARD, Kind.BACKWARD, Kind.UNKNOWN_BACKWARD):
            unscaled, cleaned = [], []
        elif event.kind is Kind.UNSCALE and event.scaler is not None and event.scaler.enabled is not False:
            unscaled.append(event)
        elif event.kind is Kind.CLEAN:
            if unscaled:
                cleaned.append(event)
            else:
                verdicts.right(module.statement(event.node))
        elif event.kind is Kind.STEP:
            unscale = next((each for each in unscaled if each.scaler is event.scaler and each.optimizer == event.optimizer), None)
            for each in cleaned:
                if unscale is None:
                    verdicts.right(module.statement(each.node))
                else:
                    verdicts.wrong(module.statement(each.node), (each, unscale, event))


def _all_of_it(place: ast.AST, module: Module) -> ast.stmt:
    """The statement that cleans, with the loops and conditions around it that hold nothing else."""
    statement = module.statement(place)
    while True:
        holder = module.parent(statement)
        if not isinstance(holder, ast.For | ast.If) or holder.body != [statement] or holder.orelse:
            return statement
        if isinstance(holder, ast.If) and "grad" not in module.source(holder.test):
            return statement
        statement = holder
