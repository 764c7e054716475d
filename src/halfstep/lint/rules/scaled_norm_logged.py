"""The size of gradients is read while they are multiplied by the loss scale."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import ClassVar, final

from halfstep.lint.flow import Event, Kind, Verdicts, line_of, written_scaler
from halfstep.lint.module import Module
from halfstep.lint.rules.rule import AbstractRule, Bad, Finding
from halfstep.lint.values import Scaler

__all__ = ["ScaledNormLogged"]


@final
class ScaledNormLogged(AbstractRule):
    """The size of gradients is read while they are multiplied by the loss scale."""

    code = "HS034"
    name = "scaled_norm_logged"
    severity = "warning"
    summary = "A gradient norm is read while the gradients are multiplied by the loss scale."
    explanation = """\
Between `scaler.scale(loss).backward()` and `scaler.unscale_(optimizer)` a gradient norm is the true one times the loss scale. A log
of it doubles whenever the scale grows, every 2000 steps by default, though nothing changed in the model; a run whose true norm is
0.99 reports 254, 507, 1015. A decision that is made by it, such as skipping a step above a limit, is made by the scale.

Read the norm behind `scaler.unscale_(optimizer)`, and log `scaler.get_scale()` next to it. `clip_grad_norm_()` there gives the norm
for nothing. There is no fix: where `unscale_()` belongs depends on what else happens to the gradients."""
    bad: ClassVar[tuple[Bad, ...]] = (
        Bad(
            code="""\
import torch


def train(model, loader, optimizer, scaler, log):
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x)
        scaler.scale(loss).backward()
        log("grad norm", model.head.weight.grad.norm())
        scaler.step(optimizer)
        scaler.update()
""",
            line=10,
        ),
        Bad(
            code="""\
import torch


def grad_norm(model):
    return torch.norm(torch.stack([torch.norm(p.grad.detach()) for p in model.parameters()]))


def train(model, loader, optimizer, log):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x)
        scaler.scale(loss).backward()
        log("grad norm", grad_norm(model))
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
""",
            line=5,
        ),
    )
    good: ClassVar[tuple[str, ...]] = (
        """\
import torch


def train(model, loader, optimizer, scaler, log):
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        log("grad norm", model.head.weight.grad.norm(), scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
""",
        """\
import torch


def train(model, loader, optimizer, scaler, log):
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x)
        scaler.scale(loss).backward()
        log("grad norm", model.head.weight.grad.norm() / scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
""",
        """\
import torch


def train(model, loader, optimizer, log):
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(x)
        loss.backward()
        log("grad norm", model.head.weight.grad.norm())
        optimizer.step()
""",
    )

    def check(self, module: Module) -> Iterator[Finding]:
        """Yields a finding for each norm of scaled gradients."""
        verdicts: Verdicts[Event] = Verdicts()
        nodes: dict[ast.AST, ast.AST] = {}
        for trace in module.traces:
            _judge(trace.events, module, verdicts, nodes)
        for statement, scaled in verdicts.shown():
            scaler = written_scaler(scaled) or "scaler"
            message = (
                f"The gradients are multiplied by the loss scale here (`{scaler}` scaled the loss in line {line_of(scaled)}), "
                f"and what is read grows and shrinks with it. Read it behind `{scaler}.unscale_(optimizer)`."
            )
            yield Finding(node=nodes[statement], message=message)


def _judge(events: Sequence[Event], module: Module, verdicts: Verdicts[Event], nodes: dict[ast.AST, ast.AST]) -> None:
    scaled: dict[Scaler, Event] = {}
    unscaled: set[Scaler] = set()
    for event in events:
        scaler = event.scaler
        if event.kind in (Kind.ESCAPE, Kind.UNKNOWN_BACKWARD, Kind.CLEAN):
            scaled.clear()
        elif scaler is not None and event.kind is Kind.SCALED_BACKWARD and scaler.enabled is not False:
            scaled[scaler] = event
        elif scaler is not None and event.kind is Kind.UNSCALE:
            unscaled.add(scaler)
        elif scaler is not None and event.kind in (Kind.STEP, Kind.UPDATE):
            scaled.pop(scaler, None)
            unscaled.discard(scaler)
        elif event.kind is Kind.NORM:
            # Several parts of one expression, such as abs().max(), are one reading.
            statement = module.statement(event.node)
            nodes.setdefault(statement, event.node)
            if scaled.keys() - unscaled and not _divided(event, module):
                verdicts.wrong(statement, next(iter(scaled.values())))
            else:
                verdicts.right(statement)


def _divided(event: Event, module: Module) -> bool:
    """Whether a statement that reads gradients has the scale in it, to divide by."""
    return "scale" in module.source(module.statement(event.node)).lower()
