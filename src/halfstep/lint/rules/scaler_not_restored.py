"""A resume that loads the optimizer's state and forgets the scaler's, though it was saved."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from halfstep.lint.edits import InsertStatement
from halfstep.lint.evidence.checkpoints import Owned, owned_scalers, saved_key, state_calls
from halfstep.lint.evidence.precision import gather
from halfstep.lint.evidence.spelling import quoted
from halfstep.lint.evidence.training import is_optimizer
from halfstep.lint.module import Module
from halfstep.lint.rules.rule import AbstractRule, Bad, Finding, Fix
from halfstep.lint.values import Scaler

__all__ = ["ScalerNotRestored"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Restore:
    """A call that loads an optimizer's state from a checkpoint.

    Attributes:
        call: The call.
        optimizer: The optimizer.
        source: What it is taken from, such as `checkpoint`; `None` where that is not an entry of a dictionary.
    """

    call: ast.Call
    optimizer: ast.expr
    source: ast.expr | None


@final
class ScalerNotRestored(AbstractRule):
    """`optimizer.load_state_dict(...)` without `scaler.load_state_dict(...)`."""

    code = "HS011"
    name = "scaler_not_restored"
    severity = "warning"
    summary = "A resume loads the optimizer's state but not the saved state of the `GradScaler`."
    explanation = """
The file saves the scaler's state and does not load it. The resumed run starts at a scale of 65536 and counts its good steps from 0: if the
scale had settled at 512, the first 7 steps after the restart overflow and are skipped, and the run is not the one that was interrupted.

Load it next to the optimizer's state, with the scaler made before: `scaler.load_state_dict(checkpoint["scaler"])`. Where older checkpoints
have no such entry, ask first: `if "scaler" in checkpoint:`.

The rule fires on the optimizer's `load_state_dict()` in a file that saves a scaler's state and loads none, and where the scaler's is loaded
under a condition that does not hold in one of the calls that the file makes.

The fix loads the state under the name that it was saved by. It is unsafe: a checkpoint from before has no such entry and raises a KeyError.
"""
    bad = (
        Bad(
            code="""import torch


def train(model, loader, optimizer, criterion, resume):
    scaler = torch.amp.GradScaler("cuda")
    if resume:
        checkpoint = torch.load("last.pt", weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    for images, labels in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda"):
            loss = criterion(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
    torch.save(state, "last.pt")
""",
            line=9,
            fixed="""import torch


def train(model, loader, optimizer, criterion, resume):
    scaler = torch.amp.GradScaler("cuda")
    if resume:
        checkpoint = torch.load("last.pt", weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scaler.load_state_dict(checkpoint["scaler"])
    for images, labels in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda"):
            loss = criterion(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
    torch.save(state, "last.pt")
""",
        ),
        Bad(
            code="""import torch


class Trainer:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters())
        self.scaler = torch.amp.GradScaler("cuda")

    def save(self, path):
        torch.save(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "grad_scaler": self.scaler.state_dict(),
            },
            path,
        )

    def load(self, path):
        state = torch.load(path, map_location="cpu", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
""",
            line=23,
            fixed="""import torch


class Trainer:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters())
        self.scaler = torch.amp.GradScaler("cuda")

    def save(self, path):
        torch.save(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "grad_scaler": self.scaler.state_dict(),
            },
            path,
        )

    def load(self, path):
        state = torch.load(path, map_location="cpu", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["grad_scaler"])
""",
        ),
        Bad(
            code="""import torch

scaler = torch.amp.GradScaler("cuda")


def save(model, optimizer):
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
    torch.save(state, "last.pt")


def load(model, optimizer, exactly):
    state = torch.load("last.pt", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    if exactly:
        scaler.load_state_dict(state["scaler"])


def compare(model, optimizer, run):
    for exactly in (True, False):
        load(model, optimizer, exactly)
        run(model, optimizer, scaler)
""",
            line=14,
        ),
    )
    good = (
        """import torch

scaler = torch.amp.GradScaler("cuda")


def save(model, optimizer):
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
    torch.save(state, "last.pt")


def load(model, optimizer):
    state = torch.load("last.pt", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    if "scaler" in state:
        scaler.load_state_dict(state["scaler"])
""",
        """import torch

scaler = torch.amp.GradScaler("cuda")


def save(model, optimizer):
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
    torch.save(state, "last.pt")


def load(model):
    state = torch.load("last.pt", weights_only=True)
    model.load_state_dict(state["model"])
""",
        """import torch

scaler = torch.amp.GradScaler("cuda")


def save(objects, path):
    torch.save({name: each.state_dict() for name, each in objects.items()}, path)


def load(objects, path):
    state = torch.load(path, weights_only=True)
    for name, each in objects.items():
        each.load_state_dict(state[name])
""",
    )

    def check(self, module: Module) -> Iterator[Finding]:
        """Yields where an optimizer's state is loaded and its scaler's is not."""
        if "load_state_dict" not in module.text or "caler" not in module.text:
            return
        key = saved_key(module)
        if not key:
            return
        loads = _loads_of_scalers(module)
        for restore in _restores(module):
            function = module.function(restore.call)
            callers = [] if function is None else [module.function(call) for call, _bound in gather(module).frames.sites(function)]
            owned = owned_scalers(function, restore.call, module, callers)
            if not owned:
                continue
            if not loads:
                yield Finding(node=restore.call, message=_message(restore, key, owned, module), fix=_fix(restore, key, owned, module))
            elif _is_skipped(restore, loads, module):
                yield Finding(node=restore.call, message=_conditional(restore, loads[0], module))


def _loads_of_scalers(module: Module) -> list[ast.Call]:
    """The calls that load the state of a scaler, or may do so."""
    found: list[ast.Call] = []
    for call, owner in state_calls(module.tree, module, "load_state_dict"):
        named = "scal" in module.key(owner).lower() or module.key(owner).rpartition(".")[2] == "amp"
        if named or any(isinstance(value, Scaler) for value in module.values(owner)) or not module.key(owner):
            found.append(call)
    return sorted(found, key=module.syntax.order)


def _restores(module: Module) -> Iterator[_Restore]:
    calls = sorted(state_calls(module.tree, module, "load_state_dict"), key=lambda each: module.syntax.order(each[0]))
    seen: set[ast.AST | None] = set()
    for call, owner in calls:
        function = module.function(call)
        if not is_optimizer(owner, module) or not call.args or function in seen:
            continue
        argument = call.args[0]
        source = argument.value if isinstance(argument, ast.Subscript) and isinstance(argument.slice, ast.Constant) else None
        if source is None and not (
            isinstance(argument, ast.Call) and isinstance(argument.func, ast.Attribute) and argument.func.attr in {"get", "pop"}
        ):
            continue
        seen.add(function)
        yield _Restore(call=call, optimizer=owner, source=source)


def _is_skipped(restore: _Restore, loads: list[ast.Call], module: Module) -> bool:
    """Whether the file itself comes by an optimizer's load on a way that passes each load of a scaler by."""
    function = module.function(restore.call)
    if any(module.function(load) is not function for load in loads):
        return False
    frames = gather(module).frames
    for frame in frames.of(restore.call):
        if any(frames.truth(test, frame) is not holds for test, holds in _tests(restore.call, module)):
            continue
        if all(any(frames.truth(test, frame) is (not holds) for test, holds in _tests(load, module)) for load in loads):
            return True
    return False


def _tests(node: ast.AST, module: Module) -> list[tuple[ast.expr, bool]]:
    """The conditions around a node in its function, and whether each has to hold."""
    function = module.function(node)
    return [
        (holder.test, part in holder.body)
        for holder, part in module.syntax.ancestors(node)
        if isinstance(holder, ast.If) and part is not holder.test and module.function(holder) is function
    ]


def _message(restore: _Restore, key: str, owned: list[Owned], module: Module) -> str:
    place = owned[0].place or "scaler"
    return (
        f"{quoted(restore.call, module)} restores the optimizer, but the state of the scaler, saved as `{key}`, is loaded nowhere: the "
        f"scale starts at its first value again, and the first steps are skipped. Load it with `{place}.load_state_dict()`."
    )


def _conditional(restore: _Restore, load: ast.Call, module: Module) -> str:
    return (
        f"{quoted(restore.call, module)} always restores the optimizer, but {quoted(load, module)} (line {load.lineno}) is passed by in "
        "one of this file's runs: there the scale starts at its first value again. Restore both or none."
    )


def _fix(restore: _Restore, key: str, owned: list[Owned], module: Module) -> Fix | None:
    statement = module.statement(restore.call)
    if len(owned) != 1 or not owned[0].place or restore.source is None or not isinstance(statement, ast.Expr):
        return None
    code = f'{owned[0].place}.load_state_dict({module.source(restore.source)}["{key}"])'
    return Fix(edits=(InsertStatement(statement=statement, code=code, where="after"),), safety="unsafe")
