"""A gradient scaler that is made anew in each iteration."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import final

from halfstep.lint.edits import DeleteStatement, InsertStatement
from halfstep.lint.evidence.renewal import makes_network, may_begin_anew, set_in, targets_of
from halfstep.lint.evidence.training import is_optimizer
from halfstep.lint.lines import LINE_END
from halfstep.lint.module import Module
from halfstep.lint.rules.rule import AbstractRule, Bad, Finding, Fix
from halfstep.lint.syntax import Loop
from halfstep.lint.values import Optimizer, Scaler

__all__ = ["ScalerCreatedInLoop"]


@final
class ScalerCreatedInLoop(AbstractRule):
    """`scaler = GradScaler()` in a loop that trains with one optimizer."""

    code = "HS009"
    name = "scaler_created_in_loop"
    severity = "error"
    summary = "A `GradScaler` made in the training loop forgets the scale that it has found."
    explanation = """
A `GradScaler` learns its scale: it starts at 65536, halves it at each overflow, and doubles it after 2000 good steps in a row. One that is
made in the loop starts again each time. Made for each batch, it never leaves 65536, and a model whose gradients overflow there skips every
step, for ever. Made for each epoch, it repeats the skips of the start in each one, and the scale grows in long epochs only.

Make it once, next to the optimizer, before the loop.

The fix moves the line in front of the outermost loop that does not make an optimizer or a model. It is safe: the line depends on nothing
that the loop sets.

One scaler for each network, fold or run is right, and nothing is said about a loop in which the optimizer or the model is new as well.
"""
    bad = (
        Bad(
            code="""import torch


def train(model, optimizer, loader, criterion):
    for images, labels in loader:
        scaler = torch.amp.GradScaler("cuda")
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
            line=6,
            fixed="""import torch


def train(model, optimizer, loader, criterion):
    scaler = torch.amp.GradScaler("cuda")
    for images, labels in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
        ),
        Bad(
            code="""import torch
from torch.amp import GradScaler, autocast


def train(model, loader, criterion, epochs, use_amp):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(epochs):
        model.train()
        scaler = GradScaler("cuda", enabled=use_amp)  # fp16 needs it
        for images, labels in loader:
            optimizer.zero_grad()
            with autocast("cuda", enabled=use_amp):
                loss = criterion(model(images), labels)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
""",
            line=9,
            fixed="""import torch
from torch.amp import GradScaler, autocast


def train(model, loader, criterion, epochs, use_amp):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cuda", enabled=use_amp)  # fp16 needs it
    for epoch in range(epochs):
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            with autocast("cuda", enabled=use_amp):
                loss = criterion(model(images), labels)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
""",
        ),
        Bad(
            code="""import torch


def train_epoch(model, optimizer, scaler, loader, criterion):
    for images, labels in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def main(model, loader, criterion):
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(10):
        scaler = torch.amp.GradScaler("cuda")
        train_epoch(model, optimizer, scaler, loader, criterion)
""",
            line=17,
            fixed="""import torch


def train_epoch(model, optimizer, scaler, loader, criterion):
    for images, labels in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def main(model, loader, criterion):
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(10):
        train_epoch(model, optimizer, scaler, loader, criterion)
""",
        ),
    )
    good = (
        """import torch


def cross_validate(folds, make_model, criterion, epochs):
    for loader in folds:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cuda")
        for _ in range(epochs):
            for images, labels in loader:
                optimizer.zero_grad()
                with torch.autocast("cuda", dtype=torch.float16):
                    loss = criterion(model(images), labels)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
""",
        """import torch

scalers = []
for _ in range(3):
    scalers.append(torch.amp.GradScaler("cuda"))

by_name = {name: torch.amp.GradScaler("cuda") for name in ("generator", "discriminator")}
""",
        """import torch


def train(pairs, loader, criterion):
    for model, optimizer in pairs:
        scaler = torch.amp.GradScaler("cuda")
        for images, labels in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = criterion(model(images), labels)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
""",
        """import torch


def train(model, optimizer, loader, criterion):
    scaler = None
    for images, labels in loader:
        if scaler is None:
            scaler = torch.amp.GradScaler("cuda")
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
        """import torch


def compare(model, optimizer, loader, criterion):
    for use_amp in (False, True):
        scaler = torch.amp.GradScaler("cuda", enabled=use_amp)
        for images, labels in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16, enabled=use_amp):
                loss = criterion(model(images), labels)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
""",
    )

    def check(self, module: Module) -> Iterator[Finding]:
        """Yields the scalers that a loop makes and uses with an optimizer from outside of it."""
        if "Scaler" not in module.text:
            return
        for statement in module.nodes(ast.Assign, ast.AnnAssign):
            assert isinstance(statement, ast.Assign | ast.AnnAssign)
            call, places = statement.value, _places(statement, module)
            if not isinstance(call, ast.Call) or len(places) != 1:
                continue
            loops = module.loops(statement)
            if not loops and _makes_scaler(call, module) and (loop := _loop_of_calls(statement, places[0], module)) is not None:
                yield Finding(node=call, message=_message(places[0], call, loop))
            if not loops:
                continue
            if not _is_plain(statement, loops[-1], module) or not _makes_scaler(call, module):
                continue
            loop = _outermost_of_training(loops, places[0], call, module)
            if loop is not None:
                yield Finding(node=call, message=_message(places[0], call, loop), fix=_fix(statement, loop, module))


def _loop_of_calls(statement: ast.stmt, place: str, module: Module) -> Loop | None:
    """The loop that calls a function again and again, which makes a scaler each time for an optimizer that was there before."""
    function = module.function(statement)
    if not isinstance(function, ast.FunctionDef) or statement not in function.body or function.name in {"__init__", "main"}:
        return None
    parameters = {parameter.arg for parameter in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)}
    stepped = {
        module.key(call.args[0])
        for call in module.nodes(ast.Call)
        if module.function(call) is function
        and isinstance(call.func, ast.Attribute)
        and call.func.attr == "step"
        and module.key(call.func.value) == place
        and call.args
        # With epochs and batches in one function, its calls are runs of their own.
        and len(module.loops(call)) == 1
    }
    held = {optimizer for optimizer in stepped if optimizer.startswith("self.")}
    if not held | parameters & stepped or not any(isinstance(part, ast.For | ast.While) for part in ast.walk(function)):
        return None
    for call in module.callers(function):
        for loop in module.loops(call)[-1:]:
            if _goes_on(loop, call, held, module):
                return loop
    return None


def _goes_on(loop: Loop, call: ast.Call, held: set[str], module: Module) -> bool:
    """Whether a loop calls a function with the same objects each time, apart from the loop's own variables."""
    made = set_in(loop, module)
    passed_on = {module.key(argument) for argument in (*call.args, *(word.value for word in call.keywords))}
    if isinstance(call.func, ast.Attribute):
        receiver = module.key(call.func.value)
        if held and (receiver != "self" or may_begin_anew(loop, module)):
            return False
        passed_on.add(receiver.partition(".")[0])
    return not (passed_on - {""}) & (made - targets_of(loop, module)) and not held & made and not makes_network(loop, module)


def _makes_scaler(call: ast.Call, module: Module) -> bool:
    return any(isinstance(value, Scaler) and value.node is call for value in module.values(call))


def _places(statement: ast.Assign | ast.AnnAssign, module: Module) -> list[str]:
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    return [place for target in targets if (place := module.key(target))]


def _is_plain(statement: ast.stmt, loop: Loop, module: Module) -> bool:
    """Whether a statement runs in each iteration, apart from a flag: not the first time only, and not after an error."""
    for holder, part in module.syntax.ancestors(statement):
        if holder is loop:
            return part in loop.body
        if isinstance(holder, ast.If):
            if not isinstance(holder.test, ast.Name | ast.Attribute) or part not in holder.body:
                return False
        elif not isinstance(holder, ast.With | ast.AsyncWith):
            return False
    return False


def _outermost_of_training(loops: tuple[Loop, ...], place: str, call: ast.Call, module: Module) -> Loop | None:
    """The outermost of the loops that goes on with the same optimizer and model; `None` where the innermost has new ones."""
    found: Loop | None = None
    for loop in reversed(loops):
        made = set_in(loop, module)
        optimizers = _optimizers(loop, place, module)
        depends = {module.key(part) for part in ast.walk(call) if isinstance(part, ast.Name | ast.Attribute)} & made
        if not optimizers or optimizers & made or place.partition(".")[0] in made - {place} or depends or makes_network(loop, module):
            return found
        found = loop
    return found


def _optimizers(loop: Loop, place: str, module: Module) -> set[str]:
    """The optimizers, by the first part of their place too, that a loop steps by the scaler, or passes on together with it."""
    found: set[str] = set()
    for call in ast.walk(loop):
        if not isinstance(call, ast.Call):
            continue
        if isinstance(call.func, ast.Attribute) and call.func.attr == "step" and module.key(call.func.value) == place and call.args:
            found.add(module.key(call.args[0]) or _root(call.args[0]))
        passed = [*call.args, *(keyword.value for keyword in call.keywords)]
        if any(module.key(argument) == place for argument in passed):
            found |= {module.key(part) for part in passed if any(isinstance(value, Optimizer) for value in module.values(part))}
        elif _holder(place) and any(module.key(argument) == _holder(place) for argument in passed):
            found |= {module.key(part) for part in passed if is_optimizer(part, module)}
    return found - {""}


def _holder(place: str) -> str:
    """The object that holds a place, as `loss_scaler` in `loss_scaler._scaler`; empty for what the method's own object holds."""
    holder = place.rpartition(".")[0]
    return "" if holder == "self" else holder


def _root(node: ast.expr) -> str:
    """The variable that a part is taken from, as `optimizers` in `optimizers[0]`."""
    while isinstance(node, ast.Subscript | ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _message(place: str, call: ast.Call, loop: Loop) -> str:
    kind = "while" if isinstance(loop, ast.While) else "for"
    return (
        f"`{place}` is made anew in each iteration of the `{kind}` loop of line {loop.lineno}: it forgets its scale and starts again, "
        f"at 65536 by default, so that each overflow of the start is repeated. Make it before line {loop.lineno}."
    )


def _fix(statement: ast.stmt, loop: Loop, module: Module) -> Fix | None:
    if module.parent(statement) not in module.loops(statement):
        return None  # Behind a flag: without the flag there may be another scaler.
    first, *others = LINE_END.split(module.source(statement))
    # The lines behind the first one stand deeper, as the loop's body does.
    code = "\n".join((first, *(line.removeprefix(" " * (statement.col_offset - loop.col_offset)) for line in others)))
    # A comment behind the statement goes along.
    line = LINE_END.split(module.text)[(statement.end_lineno or 0) - 1]
    rest = line.encode()[statement.end_col_offset or 0 :].decode().strip()
    if rest.startswith("#"):
        code += f"  {rest}"
    edits = (InsertStatement(statement=loop, code=code, where="before"), DeleteStatement(statement=statement))
    return Fix(edits=edits, safety="safe")
