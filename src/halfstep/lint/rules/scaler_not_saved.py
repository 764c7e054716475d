"""A checkpoint with the optimizer's state and without the scaler's."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Final, final

from halfstep.lint.edits import AddArgument, InsertStatement, ReplaceExpression
from halfstep.lint.evidence.checkpoints import (
    Checkpoint,
    Owned,
    checkpoints,
    is_handed_on,
    lone_states,
    mentions_scaler_state,
    owned_scalers,
    uses_of,
)
from halfstep.lint.evidence.precision import gather
from halfstep.lint.evidence.spelling import quoted, text_of
from halfstep.lint.evidence.training import entries_of
from halfstep.lint.lines import LINE_END
from halfstep.lint.module import Module
from halfstep.lint.rules.rule import AbstractRule, Bad, Finding, Fix

__all__ = ["ScalerNotSaved"]

_WORD: Final = re.compile(r"optimizers?|optim|opt(?![a-z])")


@final
class ScalerNotSaved(AbstractRule):
    """`torch.save({"model": ..., "optimizer": ...}, path)` with a scaler in use."""

    code = "HS010"
    name = "scaler_not_saved"
    severity = "warning"
    summary = "A checkpoint holds the optimizer's state but not the `GradScaler`'s."
    explanation = """
The scale is a part of the state of training, like the momentum. A run that is resumed without it starts at 65536 again and counts its good
steps from 0. If the scale had settled at 512, the first 7 steps after each restart overflow and are skipped, and the run is not the one
that was interrupted: the losses differ from there on.

Save `scaler.state_dict()` in the same dictionary, and load it next to the optimizer's state. A scaler that is off has an empty state, so
that it can be saved all the same.

The rule fires on a dictionary that is saved with an optimizer's `state_dict()` in it, where a scaler is in use and its state is saved
nowhere in the file; and on an optimizer's state that is saved in a file of its own there. A checkpoint of weights only is left alone.

The fix adds the scaler's state to the dictionary. It is safe: code that loads the checkpoint reads what it knows by name. Loading the
new entry is up to you.
"""
    bad = (
        Bad(
            code="""import torch


def train(net, loader, optimizer, criterion):
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(10):
        for images, labels in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda"):
                loss = criterion(net(images), labels)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        torch.save({"epoch": epoch, "net": net.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")
""",
            line=14,
            fixed="""import torch


def train(net, loader, optimizer, criterion):
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(10):
        for images, labels in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda"):
                loss = criterion(net(images), labels)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        torch.save({"epoch": epoch, "net": net.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}, "last.pt")
""",
        ),
        Bad(
            code="""import torch


class Trainer:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters())
        self.scaler = torch.amp.GradScaler("cuda")

    def train_step(self, batch):
        self.optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = self.model(**batch).loss
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def save(self, path):
        checkpoint = {
            "model_state_dict": self.model.state_dict(),
            "optimizer_state_dict": self.optimizer.state_dict(),
        }
        torch.save(checkpoint, path)
""",
            line=19,
            fixed="""import torch


class Trainer:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters())
        self.scaler = torch.amp.GradScaler("cuda")

    def train_step(self, batch):
        self.optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = self.model(**batch).loss
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def save(self, path):
        checkpoint = {
            "model_state_dict": self.model.state_dict(),
            "optimizer_state_dict": self.optimizer.state_dict(),
            "scaler_state_dict": self.scaler.state_dict(),
        }
        torch.save(checkpoint, path)
""",
        ),
        Bad(
            code="""import torch


def save(path, model, optimizer):
    torch.save(dict(model=model.state_dict(), optim=optimizer.state_dict()), path)


def train(model, loader, optimizer, criterion):
    scaler = torch.amp.GradScaler("cuda")
    for images, labels in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda"):
            loss = criterion(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    save("last.pt", model, optimizer)
""",
            line=5,
        ),
    )
    good = (
        """import torch


def train(model, loader, optimizer, criterion):
    scaler = torch.amp.GradScaler("cuda")
    for images, labels in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda"):
            loss = criterion(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    checkpoint["scaler"] = scaler.state_dict()
    torch.save(checkpoint, "last.pt")
""",
        """import torch


def train(model, loader, optimizer, criterion):
    scaler = torch.amp.GradScaler("cuda")
    for images, labels in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda"):
            loss = criterion(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    torch.save({"model": model.state_dict(), "args": {"lr": 0.1}}, "weights.pt")
""",
        """import torch


def train(model, loader, optimizer, criterion):
    for images, labels in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")
""",
        """import torch

scaler = torch.amp.GradScaler("cuda", enabled=False)


def save(model, optimizer):
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")
""",
    )

    def check(self, module: Module) -> Iterator[Finding]:
        """Yields the checkpoints that lack the state of the scaler."""
        if "state_dict" not in module.text or "caler" not in module.text or mentions_scaler_state(module):
            return
        seen: set[ast.AST] = set()
        for checkpoint in checkpoints(module):
            if checkpoint.table in seen or _is_filled_elsewhere(checkpoint, module):
                continue
            if owned := _in_use(checkpoint.entry or checkpoint.table, module):
                seen.add(checkpoint.table)
                fix = _fix(checkpoint, owned, module)
                yield Finding(
                    node=_shown(checkpoint, module), message=_message("checkpoint holds", checkpoint.optimizer, owned[0], module), fix=fix
                )
        if not seen:
            yield from _alone(module)


def _alone(module: Module) -> Iterator[Finding]:
    """The optimizers' states that are saved in files of their own, one for each function."""
    seen: set[ast.AST | None] = set()
    for save, state in lone_states(module):
        function = module.function(save)
        if function not in seen and (owned := _in_use(save, module)):
            seen.add(function)
            yield Finding(node=save, message=_message("file saves", state, owned[0], module))


def _in_use(node: ast.AST, module: Module) -> list[Owned]:
    """The scalers that the function around a node has and that matter."""
    function = module.function(node)
    callers = [] if function is None else [module.function(call) for call, _bound in gather(module).frames.sites(function)]
    owned = owned_scalers(function, node, module, callers)
    return [each for each in owned if not _is_idle(each, module) and not is_handed_on(each.scaler, module)]


def _is_idle(owned: Owned, module: Module) -> bool:
    """Whether all that a scaler is used with is bfloat16, so that its scale means nothing."""
    found = entries_of(owned.scaler, module)
    return bool(found) and all(entry.region.dtypes == {"bf16"} for entry in found)


def _is_filled_elsewhere(checkpoint: Checkpoint, module: Module) -> bool:
    """Whether a variable's dictionary gets entries that are not known, or goes to unknown code before it is saved."""
    for name in checkpoint.names:
        for use in uses_of(name, module):
            parent = module.parent(use)
            if isinstance(parent, ast.Attribute) and parent.attr in {"update", "setdefault"}:
                return True
            if isinstance(parent, ast.Subscript) and isinstance(parent.ctx, ast.Store) and not isinstance(parent.slice, ast.Constant):
                return True
            if isinstance(parent, ast.Call) and parent is not checkpoint.save and use in parent.args and not _saves(parent):
                return True
        function = module.function(name)
        for change in module.nodes(ast.AugAssign):
            if module.function(change) is function and module.key(change.target) == name.id:
                return True
    return False


def _saves(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute | ast.Name) and "save" in (
        call.func.attr if isinstance(call.func, ast.Attribute) else call.func.id
    )


def _shown(checkpoint: Checkpoint, module: Module) -> ast.AST:
    if checkpoint.entry is not None:
        return checkpoint.entry
    written_there = module.statement(checkpoint.table) is module.statement(checkpoint.save)
    return checkpoint.save if written_there else checkpoint.table


def _key(checkpoint: Checkpoint) -> str:
    """The entry's name, after the pattern of the optimizer's."""
    key, changed = _WORD.subn("scaler", checkpoint.key, count=1)
    return key if changed else "scaler"


def _message(what: str, state: ast.Call, owned: Owned, module: Module) -> str:
    place = owned.place or "scaler"
    line = owned.scaler.node.lineno if owned.scaler.node is not None else 0
    made = f" (line {line})" if line else ""
    return (
        f"The {what} {quoted(state, module)} but not the state of the scaler{made}: after a resume the scale "
        f"starts at its first value again, and the first steps are skipped. Save `{place}.state_dict()` as well."
    )


def _fix(checkpoint: Checkpoint, owned: list[Owned], module: Module) -> Fix | None:
    if len(owned) != 1 or not owned[0].place:
        return None
    key, state = _key(checkpoint), f"{owned[0].place}.state_dict()"
    if checkpoint.entry is not None:
        return _inserted(checkpoint.entry.targets[0], key, state, checkpoint.entry)
    if isinstance(checkpoint.table, ast.Call):
        edit = AddArgument(call=checkpoint.table, code=f"{key}={state}", where="last") if key.isidentifier() else None
        return None if edit is None else Fix(edits=(edit,), safety="safe")
    extended = _extended(checkpoint.table, key, state, module)
    if extended:
        return Fix(edits=(ReplaceExpression(node=checkpoint.table, code=extended),), safety="safe")
    statement = module.statement(checkpoint.table)
    if isinstance(statement, ast.Assign) and statement.value is checkpoint.table and len(statement.targets) == 1:
        return _inserted(statement.targets[0], key, state, statement)
    return None


def _inserted(target: ast.expr, key: str, state: str, statement: ast.Assign) -> Fix | None:
    """An assignment of one more entry behind the statement that makes a dictionary or sets an entry of it."""
    name = target.value if isinstance(target, ast.Subscript) else target
    if not isinstance(name, ast.Name):
        return None
    code = f'{name.id}["{key}"] = {state}'
    return Fix(edits=(InsertStatement(statement=statement, code=code, where="after"),), safety="safe")


def _extended(table: ast.Dict, key: str, state: str, module: Module) -> str:
    """The text of a dictionary with one more entry, laid out as the others; empty where the layout is not understood."""
    text, last = text_of(table, module), table.values[-1]
    entry = f'"{key}": {state}'
    if table.lineno == table.end_lineno:
        body = text[:-1].rstrip()
        return f"{body.rstrip(',')}, {entry}}}"
    lines = LINE_END.split(text)
    index = (last.end_lineno or 0) - table.lineno
    first = table.keys[-1]
    if first is None or first.lineno == table.lineno or index + 1 >= len(lines) or lines[index + 1].strip() != "}":
        return ""
    line = lines[index]
    margin_width = module.statement(table).col_offset
    column = len(line.encode()[: (last.end_col_offset or 0) - margin_width].decode())
    before, behind = line[:column], line[column:]
    lines[index] = f"{before},{behind.removeprefix(',')}"
    indent = lines[first.lineno - table.lineno]
    margin = indent[: len(indent) - len(indent.lstrip())]
    comma = "," if behind.lstrip().startswith(",") else ""
    lines.insert(index + 1, f"{margin}{entry}{comma}")
    return "\n".join(lines)
