"""Gradients of different loss scales are added up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from halfstep.lint.flow import Event, Kind, Verdicts, depends, line_of, written_scaler
from halfstep.lint.module import Module
from halfstep.lint.rules.rule import AbstractRule, Bad, Finding

__all__ = ["GradientsKeptAcrossUpdate"]


@final
class GradientsKeptAcrossUpdate(AbstractRule):
    """Gradients of different loss scales are added up."""

    code = "HS036"
    name = "gradients_kept_across_update"
    severity = "error"
    summary = "Gradients are kept across `scaler.update()`: later ones of another scale are added to them."
    explanation = """\
Two optimizers share a scaler, and one of them steps more often than the other. `scaler.update()` after the frequent one's step changes
the scale, while the gradients of the rare one are kept for later: its sum mixes parts of different scales, and is divided by the last
one. Where the scale was halved by a skip in between, the older parts count twice as much. (A true sum of 2 came out as 3.)

The same happens where one optimizer steps in every iteration, but its gradients are dropped in every second one.

Give each optimizer a scaler of its own, with its own `update()` behind its own step; or let all of them step in the same iterations.
There is no fix, since which of the two is meant cannot be seen."""
    bad: ClassVar[tuple[Bad, ...]] = (
        Bad(
            code="""\
import torch


def train(model, head, loader, fast, slow):
    scaler = torch.amp.GradScaler("cuda")
    for index, x in enumerate(loader):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = head(model(x))
        scaler.scale(loss).backward()
        scaler.step(fast)
        fast.zero_grad()
        if (index + 1) % 4 == 0:
            scaler.step(slow)
            slow.zero_grad()
        scaler.update()
""",
            line=13,
        ),
        Bad(
            code="""\
import torch


class Trainer:
    def __init__(self):
        self.scaler = torch.amp.GradScaler("cuda")

    def step(self, index, loss):
        self.scaler.scale(loss).backward()
        self.scaler.step(self.head)
        self.head.zero_grad(set_to_none=True)
        if index % self.every == 0:
            self.scaler.step(self.body)
            self.body.zero_grad(set_to_none=True)
        self.scaler.update()

    def train(self, model, loader):
        for index, x in enumerate(loader):
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(x)
            self.step(index, loss)
""",
            line=13,
        ),
        Bad(
            code="""\
import torch


def train(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for index, x in enumerate(loader):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if index % 2 == 1:
            optimizer.zero_grad()
""",
            line=11,
        ),
    )
    good: ClassVar[tuple[str, ...]] = (
        """\
import torch


def train(model, head, loader, fast, slow):
    scaler, other = torch.amp.GradScaler("cuda"), torch.amp.GradScaler("cuda")
    for index, x in enumerate(loader):
        with torch.autocast("cuda", dtype=torch.float16):
            loss, far = head(model(x))
        scaler.scale(loss).backward(inputs=list(head.parameters()), retain_graph=True)
        other.scale(far).backward(inputs=list(model.parameters()))
        scaler.step(fast)
        scaler.update()
        fast.zero_grad()
        if (index + 1) % 4 == 0:
            other.step(slow)
            other.update()
            slow.zero_grad()
""",
        """\
import torch


def train(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for index, x in enumerate(loader):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x)
        scaler.scale(loss).backward()
        if (index + 1) % 4 == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
""",
        """\
import torch


def train(generator, critic, loader, first, second):
    scaler = torch.amp.GradScaler("cuda")
    for index, x in enumerate(loader):
        second.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = critic(x)
        scaler.scale(loss).backward()
        scaler.step(second)
        if index % 5 == 0:
            first.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = critic(generator(x))
            scaler.scale(loss).backward()
            scaler.step(first)
        scaler.update()
""",
    )

    def check(self, module: Module) -> Iterator[Finding]:
        """Yields a finding for each step that takes gradients of several scales."""
        verdicts: Verdicts[_Mixed] = Verdicts()
        kept: Verdicts[_Mixed] = Verdicts()
        for trace in module.traces:
            _judge(trace.events, verdicts)
            _judge_counted(module, trace.events, kept)
        for place, mixed in kept.shown():
            scaler = written_scaler(mixed.update)
            optimizer = mixed.step.optimizer.text if mixed.step.optimizer is not None else "optimizer"
            message = (
                f"`{scaler}.update()` runs in every iteration, but the gradients of `{optimizer}` are dropped only in some: the next "
                f"backward pass adds gradients of another scale. Step, update and drop gradients in the same iterations."
            )
            yield Finding(node=place, message=message)
        for place, mixed in verdicts.shown():
            scaler = written_scaler(mixed.update)
            optimizer = mixed.step.optimizer.text if mixed.step.optimizer is not None else "optimizer"
            message = (
                f"`{scaler}.update()` in line {line_of(mixed.update)} runs between backward passes whose gradients `{optimizer}` adds up: "
                f"they carry different scales and are divided by the last one. Give `{optimizer}` a scaler of its own."
            )
            yield Finding(node=place, message=message)


@final
@dataclass(frozen=True, slots=True)
class _Mixed:
    """A step that takes gradients of several scales.

    Attributes:
        step: The scaler's step.
        update: The update between the backward passes.
    """

    step: Event
    update: Event


def _judge(events: Sequence[Event], verdicts: Verdicts[_Mixed]) -> None:
    """Looks at each step: was there, since its gradients were dropped, an update between two scaled backward passes?

    Only for optimizers whose gradients are dropped right behind their step and nowhere else: their sum begins there.
    """
    sums = _sums(events)
    for index, event in enumerate(events):
        if event.kind is not Kind.STEP or event.optimizer is None or event.optimizer.identity not in sums or event.scaler is None:
            continue
        update: Event | None = None
        state = "none"
        for earlier in events[:index]:
            if earlier.kind in (Kind.ESCAPE, Kind.UNKNOWN_BACKWARD):
                state = "lost"
            elif (
                earlier.kind is Kind.ZERO_GRAD and earlier.optimizer is not None and earlier.optimizer.identity == event.optimizer.identity
            ):
                state = "none"
            elif earlier.kind is Kind.SCALED_BACKWARD and earlier.scaler is event.scaler and state != "lost":
                state = "mixed" if state in {"updated", "mixed"} else "scaled"
            elif earlier.kind is Kind.UPDATE and earlier.scaler is event.scaler and earlier.operand is None and state == "scaled":
                state, update = "updated", earlier
        # An update with no step before it is another mistake.
        if state == "mixed" and update is not None and _stepped_another(events, event, update):
            verdicts.wrong(event.node, _Mixed(event, update))


def _judge_counted(module: Module, events: Sequence[Event], verdicts: Verdicts[_Mixed]) -> None:
    """Looks for gradients that are dropped in each n-th iteration, though their optimizer steps in all of them."""
    for index, update in enumerate(events):
        if (
            update.kind is not Kind.UPDATE
            or index == 0
            or (step := events[index - 1]).kind is not Kind.STEP
            or step.scaler is not update.scaler
        ):
            continue
        backward = next((event for event in reversed(events[:index]) if event.kind is Kind.SCALED_BACKWARD), None)
        if backward is None or depends(step, backward) != ():
            continue  # A step behind a condition of its own: with which iterations it agrees is not known.
        drops = [event for event in events if event.kind is Kind.ZERO_GRAD and _same_optimizer(event, step)]
        if drops and all(_is_counted(module, event, step) for event in drops) and _adds(events[index + 1 :], step):
            verdicts.wrong(update.node, _Mixed(step, update))


def _same_optimizer(event: Event, step: Event) -> bool:
    return event.optimizer is not None and step.optimizer is not None and event.optimizer.identity == step.optimizer.identity


def _is_counted(module: Module, drop: Event, step: Event) -> bool:
    """Whether gradients are dropped behind a condition on a counter, which the step does not stand behind."""
    own = [guard for guard in drop.guards if guard not in step.guards]
    return bool(own) and drop.loops == step.loops and any("%" in module.source(guard.test) for guard in own)


def _adds(rest: Sequence[Event], step: Event) -> bool:
    """Whether the next backward pass adds to the gradients of a step."""
    for event in rest:
        if event.kind is Kind.SCALED_BACKWARD and event.scaler is step.scaler:
            return True
        if (event.kind is Kind.ZERO_GRAD and _same_optimizer(event, step)) or event.kind in (Kind.ESCAPE, Kind.UNKNOWN_BACKWARD):
            return False
    return False


def _sums(events: Sequence[Event]) -> set[object]:
    """The optimizers whose gradients are dropped behind their step, each time."""
    found: set[object] = set()
    excluded: set[object] = set()
    stepped: set[object] = set()
    for event in events:
        identity = event.optimizer.identity if event.optimizer is not None else None
        if event.kind is Kind.STEP:
            stepped.add(identity)
        elif event.kind is Kind.SCALED_BACKWARD:
            stepped.clear()
        elif event.kind is Kind.ZERO_GRAD:
            (found if identity in stepped else excluded).add(identity)
    return found - excluded


def _stepped_another(events: Sequence[Event], step: Event, update: Event) -> bool:
    return any(
        event.kind is Kind.STEP and event.scaler is step.scaler and event.optimizer != step.optimizer
        for event in events[: events.index(update)]
    )
