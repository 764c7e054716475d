"""`torch.cuda.amp` and `torch.cpu.amp`, which `torch.amp` has taken the place of."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import final

from halfstep.lint.edits import AddImport, Edit, ReplaceExpression, ReplaceStatement
from halfstep.lint.module import Module
from halfstep.lint.moving import HOMES, Mention, find_mentions, is_guarded, moved_import, moved_use, names_of
from halfstep.lint.rules.rule import AbstractRule, Bad, Finding, Fix

__all__ = ["DeprecatedNamespace"]

# One of these stands in each file that the rule is about.
_WORDS = re.compile(r"\bamp\b|autocast")


@final
class DeprecatedNamespace(AbstractRule):
    """A class or function of `torch.cuda.amp` or `torch.cpu.amp`, or one of torch's functions about autocast for one kind of device."""

    code = "HS001"
    name = "deprecated_namespace"
    severity = "warning"
    summary = "`torch.cuda.amp` and `torch.cpu.amp` are deprecated; `torch.amp` takes the device type."
    explanation = """
Since torch 2.4, `GradScaler`, `autocast`, `custom_fwd` and `custom_bwd` of `torch.cuda.amp`, and those of `torch.cpu.amp`, give a
`FutureWarning` at each call: in a training loop once for each step, and in a test suite that turns warnings into errors a failure. Those of
`torch.amp` take their place and are told the device type:

| old | new |
|---|---|
| `torch.cuda.amp.GradScaler()` | `torch.amp.GradScaler("cuda")` |
| `torch.cuda.amp.autocast()` | `torch.amp.autocast("cuda")` |
| `torch.cpu.amp.autocast()` | `torch.amp.autocast("cpu")` |
| `@torch.cuda.amp.custom_fwd` | `@torch.amp.custom_fwd(device_type="cuda")` |
| `torch.get_autocast_gpu_dtype()` | `torch.get_autocast_dtype("cuda")` |
| `torch.is_autocast_cpu_enabled()` | `torch.is_autocast_enabled("cpu")` |

Mind the order of `autocast`'s arguments: the old one begins with `enabled, dtype`, the new one with `device_type, dtype, enabled`, and so
`autocast("cuda", False)` is an error. Old positional arguments become keywords.

A name that is imported is reported at its import, and mended there and wherever it is used, all at once. Otherwise each use is reported.

The fix is safe: both forms do the same from torch 2.4 on. No fix is offered where something is only imported, since other files may take it
from there, for a class that is derived from the old one, and where a class is handed on.

Nothing is said about code for old versions of torch: an import with a fallback, or what stands behind a test of a version or `hasattr`.
"""
    bad = (
        Bad(
            code="""from torch.cuda.amp import autocast


def evaluate(model, images, use_amp):
    with autocast(use_amp):
        return model(images)
""",
            line=1,
            fixed="""from torch.amp import autocast


def evaluate(model, images, use_amp):
    with autocast("cuda", enabled=use_amp):
        return model(images)
""",
        ),
        Bad(
            code="""import torch


def train(model, optimizer, loader, criterion, use_amp):
    scaler = torch.amp.GradScaler("cuda", enabled=use_amp)
    for images, labels in loader:
        optimizer.zero_grad()
        with torch.cuda.amp.autocast(enabled=use_amp):
            loss = criterion(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
            line=8,
            fixed="""import torch


def train(model, optimizer, loader, criterion, use_amp):
    scaler = torch.amp.GradScaler("cuda", enabled=use_amp)
    for images, labels in loader:
        optimizer.zero_grad()
        with torch.amp.autocast("cuda", enabled=use_amp):
            loss = criterion(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
        ),
        Bad(
            code="""import torch
from torch.cuda.amp import GradScaler as Scaler

scaler = Scaler(2.0**14, growth_interval=500)


def train(model, optimizer, loader, criterion):
    for images, labels in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
            line=2,
            fixed="""import torch
from torch.amp import GradScaler as Scaler

scaler = Scaler("cuda", 2.0**14, growth_interval=500)


def train(model, optimizer, loader, criterion):
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
from torch.cuda import amp


def evaluate(model, images):
    with amp.autocast(dtype=torch.bfloat16):
        return model(images)
""",
            line=6,
            fixed="""import torch
from torch import amp


def evaluate(model, images):
    with amp.autocast("cuda", dtype=torch.bfloat16):
        return model(images)
""",
        ),
        Bad(
            code="""import torch


class Double(torch.autograd.Function):
    @staticmethod
    @torch.cuda.amp.custom_fwd
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx, grad):
        return 2 * grad
""",
            line=6,
            fixed="""import torch


class Double(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx, grad):
        return 2 * grad
""",
        ),
        Bad(
            code="""import torch


def kernel(x):
    return x.to(torch.get_autocast_gpu_dtype()) if torch.is_autocast_enabled() else x
""",
            line=5,
            fixed="""import torch


def kernel(x):
    return x.to(torch.get_autocast_dtype("cuda")) if torch.is_autocast_enabled() else x
""",
        ),
        Bad(
            code="""# What the other files take their mixed precision from.
from torch.cuda.amp import GradScaler
""",
            line=2,
        ),
    )
    good = (
        """import torch
from torch.amp import GradScaler, autocast

scaler = GradScaler("cuda")


def evaluate(model, images):
    with autocast("cuda"), torch.autocast("cuda"):
        return model(images)
""",
        """try:
    from torch.amp import autocast
except ImportError:
    from torch.cuda.amp import autocast


def evaluate(model, images):
    with autocast("cuda"):
        return model(images)
""",
        """import torch

NEW = hasattr(torch.amp, "GradScaler")


def make_scaler():
    if NEW:
        return torch.amp.GradScaler("cuda")
    return torch.cuda.amp.GradScaler()
""",
        """import torch
from packaging import version

if version.parse(torch.__version__) >= version.parse("2.4"):
    from torch.amp import custom_bwd, custom_fwd
else:
    from torch.cuda.amp import custom_bwd, custom_fwd
""",
        """import warnings

warnings.filterwarnings("ignore", message=".*torch.cuda.amp.GradScaler.*", category=FutureWarning)


def evaluate(model, images):
    \"\"\"Runs in half, without `torch.cuda.amp.autocast()`.\"\"\"
    return model.half()(images.half())
""",
        """import torch


def is_scaler(value):
    return isinstance(value, (torch.amp.GradScaler, torch.cuda.amp.GradScaler))
""",
    )

    def check(self, module: Module) -> Iterator[Finding]:
        """Yields the imports of old names, and the uses of them by way of a module."""
        if not _WORDS.search(module.text):
            return
        mentions = find_mentions(module)
        for statement in module.nodes(ast.ImportFrom):
            yield from _check_import(statement, mentions, module)
        yield from _check_paths(mentions, module)


def _check_import(statement: ast.ImportFrom, mentions: list[Mention], module: Module) -> Iterator[Finding]:
    """The old names that a statement imports, with one fix for all that can be moved."""
    aliases = [alias for alias in statement.names if f"{statement.module}.{alias.name}" in HOMES]
    if not aliases or statement.level or is_guarded(statement, module):
        return
    uses = {alias: names_of(alias, statement, module) for alias in aliases}
    found = {alias: [mention for mention in mentions if mention.alias is alias] for alias in aliases}
    edits: dict[ast.alias, list[Edit]] = {}
    for alias in aliases:
        moved = [moved_use(mention, module) for mention in found[alias]]
        once = all(len(module.bindings(name)) == 1 for name in uses[alias])
        if moved and once and len(moved) == len(uses[alias]) and None not in moved and not _is_public(alias, module):
            edits[alias] = [edit for part in moved for edit in part or ()]
    fix = None
    if edits:
        statement_edit = ReplaceStatement(statement=statement, code=moved_import(statement, list(edits), module))
        fix = Fix(edits=(statement_edit, *(edit for part in edits.values() for edit in part)), safety="safe")
    for alias in aliases:
        if uses[alias] and not found[alias]:
            continue  # Only compared with, or listed next to the new one.
        yield Finding(node=alias, message=_about_import(alias, statement, found[alias], module), fix=fix if alias in edits else None)


def _is_public(alias: ast.alias, module: Module) -> bool:
    """Whether a file offers a name to others by `__all__`."""
    for assignment in module.nodes(ast.Assign):
        if any(module.key(target) == "__all__" for target in assignment.targets):
            texts = {part.value for part in ast.walk(assignment.value) if isinstance(part, ast.Constant)}
            return (alias.asname or alias.name) in texts
    return False


def _about_import(alias: ast.alias, statement: ast.ImportFrom, mentions: list[Mention], module: Module) -> str:
    home = HOMES[f"{statement.module}.{alias.name}"]
    lines = sorted({mention.node.lineno for mention in mentions if not _is_annotation(mention.node, module)})
    head = f"`{statement.module}.{alias.name}` is deprecated since torch 2.4"
    if mentions and not lines:
        return f"{head}. Here it stands in annotations only, which give no warning. `{home.new}` takes its place."
    if not lines:
        return f"{head}, and whoever takes it from here gets a warning at each call. `{home.call}` takes its place."
    where = f"line {lines[0]}" if len(lines) == 1 else f"lines {', '.join(map(str, lines[:-1]))} and {lines[-1]}"
    return f"{head}: its use in {where} warns. Use `{home.call}`."


def _is_annotation(node: ast.AST, module: Module) -> bool:
    """Whether a name stands in the annotation of a variable, a parameter or a result."""
    return any(
        part in {getattr(holder, "annotation", None), getattr(holder, "returns", None)}
        for holder, part in module.syntax.ancestors(node)
        if isinstance(holder, ast.arg | ast.AnnAssign | ast.FunctionDef | ast.AsyncFunctionDef)
    )


def _check_paths(mentions: list[Mention], module: Module) -> Iterator[Finding]:
    """The uses of old names by way of a module, such as `torch.cuda.amp.autocast` or `amp.autocast`."""
    groups: dict[ast.alias, list[Mention]] = {}
    for mention in mentions:
        if mention.alias is not None and mention.through == "old":
            groups.setdefault(mention.alias, []).append(mention)
    shared = {alias: _fix_of_group(alias, group, module) for alias, group in groups.items()}
    for mention in mentions:
        if mention.through == "name":
            continue
        fix = shared.get(mention.alias) if mention.alias is not None else None
        written = module.source(mention.node)
        effect = f"warns at each call. Use `{mention.home.call}`"
        if _is_annotation(mention.node, module):
            effect = f"is only an annotation here, which gives no warning. `{mention.home.new}` takes its place"
        yield Finding(
            node=mention.node,
            message=f"`{written}` is deprecated since torch 2.4 and {effect}.",
            fix=fix or _fix_of_path(mention, module),
        )


def _fix_of_group(alias: ast.alias, group: list[Mention], module: Module) -> Fix | None:
    """One fix for a module under a short name: its import and all of its uses."""
    statement = module.statement(alias)
    if not isinstance(statement, ast.Import | ast.ImportFrom) or len(names_of(alias, statement, module)) != len(group):
        return None
    moved = [moved_use(mention, module) for mention in group]
    if None in moved:
        return None
    code = moved_import(statement, [alias], module)
    edits: list[Edit] = [ReplaceStatement(statement=statement, code=code)]
    edits += [edit for part in moved for edit in part or ()]
    return Fix(edits=tuple(edits), safety="safe")


def _fix_of_path(mention: Mention, module: Module) -> Fix | None:
    """A fix for one use, by the full name of what takes its place."""
    edits = moved_use(mention, module)
    if edits is None:
        return None
    path = f"{mention.torch or 'torch'}{mention.home.new.removeprefix('torch')}"
    if not any(isinstance(edit, ReplaceExpression) and edit.node is mention.node for edit in edits):
        edits = [ReplaceExpression(node=mention.node, code=path), *edits]
    imported: list[Edit] = [] if mention.torch else [AddImport(module="torch")]
    return Fix(edits=(*edits, *imported), safety="safe")
