"""A backward pass runs inside an autocast region."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from typing import ClassVar, final

from halfstep.lint.edits import MoveOutOfBlock
from halfstep.lint.evidence.spelling import quoted
from halfstep.lint.evidence.training_loops import enclosed_loops
from halfstep.lint.flow import BACKWARDS, Event, Kind, Verdicts
from halfstep.lint.module import Module
from halfstep.lint.rules.rule import AbstractRule, Bad, Finding, Fix
from halfstep.lint.scopes import last_name
from halfstep.lint.values import Autocast

__all__ = ["BackwardInAutocast"]

# Calls that compute nothing that autocast would have a say in.
_INDIFFERENT = re.compile(
    "print|item|detach|cpu|float|int|len|str|format|round|append|extend|update|info|debug|warning|log|write|add_scalar|set_description"
    "|set_postfix|set_postfix_str|get_last_lr|get_scale|isfinite|isnan|time|perf_counter|synchronize"
)


@final
class BackwardInAutocast(AbstractRule):
    """A backward pass runs inside an autocast region."""

    code = "HS003"
    name = "backward_in_autocast"
    severity = "warning"
    summary = "A backward pass runs inside an autocast region."
    explanation = """\
A backward pass runs in the types that its forward pass used, without any help. Inside an autocast region, autocast has its say a second
time: what ran in fp32 on purpose, with `torch.autocast("cuda", enabled=False)` or in a custom function, has its matrix products cast to
half precision on the way back. Behind an fp32 linear layer, gradients were 0.25 % off under bf16 and 1.3 % off under fp16, with values
below 6e-8 gone altogether, and they still came out as fp32 tensors, so that nothing shows it. The casts of all weights are also kept
alive until the region is left.

PyTorch's documentation asks for the region around the forward pass and the loss only. Leave it before `backward()`.

The fix moves the call, and what follows it in the block, behind the block. It is safe: it is only offered where all of that is a part
of the step, or logging, so that no forward computation leaves the region. `torch.autograd.grad` inside a region, as for a gradient
penalty whose result goes into the loss, is no finding."""
    bad: ClassVar[tuple[Bad, ...]] = (
        Bad(
            code="""\
import torch


def train(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = torch.nn.functional.mse_loss(model(x), y)
            scaler.scale(loss).backward()  # back we go
            scaler.step(optimizer)
            scaler.update()
        print(loss.item())
""",
            line=10,
            fixed="""\
import torch


def train(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = torch.nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()  # back we go
        scaler.step(optimizer)
        scaler.update()
        print(loss.item())
""",
        ),
        Bad(
            code="""\
import torch


def step(model, x, optimizer, is_training=True):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(x).square().mean()
        if is_training:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.detach()
""",
            line=9,
            fixed="""\
import torch


def step(model, x, optimizer, is_training=True):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(x).square().mean()
    if is_training:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.detach()
""",
        ),
        Bad(
            code="""\
import torch


@torch.autocast("cuda", dtype=torch.bfloat16)
def step(model, x, optimizer):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
""",
            line=8,
        ),
        Bad(
            code="""\
import torch


class Trainer:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def train(self, loader):
        for x in loader:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                self.step(x)

    def step(self, x):
        self.optimizer.zero_grad()
        self.model(x).mean().backward()
        self.optimizer.step()
""",
            line=15,
        ),
        Bad(
            code="""\
import torch


def train(model, critic, x, optimizer):
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        first = model(x).mean()
        first.backward()
        second = critic(model(x)).mean()
    second.backward()
    optimizer.step()
""",
            line=8,
        ),
    )
    good: ClassVar[tuple[str, ...]] = (
        """\
import torch


def train(model, loader, optimizer, scaler):
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
        """\
import torch


def train(critic, x, optimizer):
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        scores = critic(x)
        (grads,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
        loss = scores.mean() + 10 * (grads.norm(2, dim=1) - 1).square().mean()
    loss.backward()
    optimizer.step()
""",
        """\
import torch


def train(model, x, optimizer):
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(x).mean()
        with torch.autocast("cuda", enabled=False):
            loss.backward()
    optimizer.step()
""",
        """\
import torch


def train(model, x, optimizer, accelerator):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(x).mean()
        accelerator.backward(loss)  # somebody else's, which may leave the region
    optimizer.step()
    optimizer.zero_grad()
""",
        """\
import torch


def train(model, x, optimizer):
    optimizer.zero_grad()
    with torch.autocast("cuda", enabled=False):
        model(x).mean().backward()
    optimizer.step()
""",
    )

    def check(self, module: Module) -> Iterator[Finding]:
        """Yields a finding for each backward pass that runs in a region on all ways to it."""
        verdicts: Verdicts[Event] = Verdicts()
        parts: set[ast.AST] = set()
        for trace in module.traces:
            for event in trace.events:
                parts.add(event.node)
                if _is_backward(event):
                    _judge(event, verdicts)
        loops = {enclosed.loop for enclosed in enclosed_loops(module)}
        for place, event in verdicts.shown():
            # Where the whole loop stands in the region, that is the fault to mend.
            if event.autocast is not None and loops.isdisjoint(event.loops):
                yield Finding(node=place, message=_message(event, event.autocast, module), fix=_fix(event, module, parts))


def _is_backward(event: Event) -> bool:
    """Whether an event is `loss.backward()`, and not a method of something else with the loss as its argument."""
    if event.kind not in BACKWARDS or not isinstance(event.node, ast.Call):
        return False
    return event.kind is not Kind.UNKNOWN_BACKWARD or not event.node.args


def _judge(event: Event, verdicts: Verdicts[Event]) -> None:
    if event.autocast is None:
        verdicts.right(event.node)
    else:
        verdicts.wrong(event.node, event)


def _message(event: Event, region: Autocast, module: Module) -> str:
    what = quoted(event.node, module)
    return (
        f"{what} runs inside the autocast region of line {region.node.lineno}: matrix products that ran in fp32 on purpose are cast to "
        "half precision on the way back (1 % off in fp16, and below 6e-8 all is 0). Leave the region before it."
    )


def _fix(event: Event, module: Module, parts: set[ast.AST]) -> Fix | None:
    """Moves the rest of the block behind it, where no forward computation is in that."""
    statement = module.statement(event.node)
    block: ast.AST | None = module.parent(statement)
    while isinstance(block, ast.If):
        statement, block = block, module.parent(block)
    if not isinstance(block, ast.With | ast.AsyncWith) or len(block.items) != 1 or statement is block.body[0]:
        return None
    if event.autocast not in module.values(block.items[0].context_expr) or module.autocasts(block):
        return None
    rest = block.body[block.body.index(statement) :]
    if not _is_indifferent(rest, parts, module):
        return None
    return Fix(edits=(MoveOutOfBlock(block=block, first=statement),), safety="safe")


def _is_indifferent(statements: Sequence[ast.stmt], parts: set[ast.AST], module: Module) -> bool:
    """Whether statements compute the same outside of a region: parts of a step, logging, and what needs no autocast."""
    for statement in statements:
        for part in ast.walk(statement):
            if isinstance(part, ast.With | ast.AsyncWith | ast.FunctionDef | ast.Lambda | ast.MatMult | ast.Try):
                return False
            if isinstance(part, ast.Call) and not _is_known(part, parts, module):
                return False
    return True


def _is_known(call: ast.Call, parts: set[ast.AST], module: Module) -> bool:
    if call in parts or any(call is getattr(getattr(part, "func", None), "value", None) for part in parts):
        return True  # A part of a step, or the `scaler.scale(loss)` of one.
    function = call.func
    last = last_name(function)
    return _INDIFFERENT.fullmatch(last) is not None or (last == "parameters" and not call.args)
