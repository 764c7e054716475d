"""A gradient scaler where nothing turns autocast on."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from typing import Final, final

from halfstep.lint.edits import AddArgument, Edit, ReplaceExpression
from halfstep.lint.evidence.spelling import quoted
from halfstep.lint.evidence.training import Entry, entries, uses
from halfstep.lint.module import Module
from halfstep.lint.rules.rule import AbstractRule, Bad, Finding, Fix
from halfstep.lint.scopes import last_name
from halfstep.lint.values import Network, Scaler

__all__ = ["ScalerWithoutAutocast"]

# Words of what may turn autocast on out of sight, or makes values half precision in another way.
_OTHERWISE: Final = re.compile(
    r"(?i)autocast|accelerat|fabric|lightning|deepspeed|apex|precision|amp_|_amp\b|half|float16|fp16|bf16|fsdp|fully_shard|policy"
)
# What a loss is computed with from a model's output; a loss turns no autocast on.
_LOSS: Final = re.compile(r"(?i)criteri|loss|metric|objective")
_ZOOS: Final = ("torchvision.models.",)


@final
class ScalerWithoutAutocast(AbstractRule):
    """`scaler.scale(loss).backward()` after a forward pass in float32."""

    code = "HS032"
    name = "scaler_without_autocast"
    severity = "warning"
    summary = "A `GradScaler` is on, but nothing computes in half precision."
    explanation = """
A `GradScaler` makes nothing faster: it protects the small gradients of float16, and it is `torch.autocast` that computes in float16. With
the scaler alone, training is float32 at full cost, plus a pass over all gradients in each step, and the scale grows until steps are
skipped.
That happens when one half of the change is forgotten, and when the two have flags of their own that differ:
`autocast(..., enabled=False)` next to `GradScaler()`.

Run the forward pass and the loss under `torch.autocast("cuda")`. Or, where float32 is wanted, switch the scaler off as well: give both the
same `enabled=use_amp`.

The rule fires where the whole forward pass is in sight: modules of torch, of torchvision, or of classes in the same file, none of which
enters autocast. A model that is imported or passed in may do so itself, and nothing is said about it. It fires as well where every region
of the file is off.

The fix, for a region that is off, switches off the scaler. It is unsafe, since it may be the region that should be on. Where there is no
region at all, no fix is offered.
"""
    bad = (
        Bad(
            code="""import torch
from torch import nn


def train(loader):
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).cuda()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
            line=9,
        ),
        Bad(
            code="""import torch


def train(model, loader, optimizer, criterion):
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", enabled=False):
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
            line=5,
            fixed="""import torch


def train(model, loader, optimizer, criterion):
    scaler = torch.amp.GradScaler("cuda", enabled=False)
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", enabled=False):
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
        ),
    )
    good = (
        """import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 10)

    @torch.autocast("cuda")
    def forward(self, x):
        return self.fc(x)


def train(loader, criterion):
    model = Net().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
        """import torch


def train_step(model, batch, optimizer, criterion, scaler):
    optimizer.zero_grad()
    loss = criterion(model(batch["x"]), batch["y"])
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def train(model, loader, optimizer, criterion):
    scaler = torch.amp.GradScaler("cuda")
    for batch in loader:
        train_step(model, batch, optimizer, criterion, scaler)
""",
        """import torch


def train(model, loader, optimizer, criterion, use_amp):
    scaler = torch.amp.GradScaler("cuda", enabled=use_amp)
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", enabled=use_amp):
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
        """import torch


def train(model, loader, optimizer, criterion):
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda"):
            output = model(x)
            with torch.autocast("cuda", enabled=False):
                loss = criterion(output.float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
    )

    def check(self, module: Module) -> Iterator[Finding]:
        """Yields the scalers that are on while everything computes in float32."""
        if "caler" not in module.text:
            return
        for scaler in module.scalers:
            if scaler.node is None or scaler.enabled is not True:
                continue
            scales = uses(scaler, module, "scale")
            if not scales:
                continue
            found = list(entries(module))
            if found:
                yield from _beside_regions(scaler, scaler.node, scales, found, module)
            elif not module.regions and _OTHERWISE.search(module.text) is None and (line := _forward(scales, module)):
                yield Finding(node=scaler.node, message=_message(scaler.node, line, module))


def _beside_regions(
    scaler: Scaler, node: ast.Call, scales: Sequence[ast.Call], found: Sequence[Entry], module: Module
) -> Iterator[Finding]:
    """A scaler that is on in a file whose regions are all off."""
    if any(region.enabled is not False for region in module.regions):
        return
    functions = {module.function(call) for call in scales}
    beside = [entry for entry in found if module.function(entry.block) in functions]
    if not beside:
        return
    region = beside[0].region.node
    message = (
        f"{quoted(node, module)} is on, but {quoted(region, module)} (line {region.lineno}) is off: everything is computed in float32, and "
        "scaled for nothing. Give both the same `enabled`."
    )
    edit: Edit = AddArgument(call=node, code="enabled=False", where="last")
    if (flag := scaler.arguments.get("enabled")) is not None:
        edit = ReplaceExpression(node=flag, code="False")
    fix = Fix(edits=(edit,), safety="unsafe") if scaler.name.startswith("torch") else None
    yield Finding(node=node, message=message, fix=fix)


def _forward(scales: Sequence[ast.Call], module: Module) -> int:
    """The line of a forward pass behind a scaled loss that is in sight as a whole; 0 where there is none, or one that is not."""
    found = 0
    for scale in scales:
        networks = [_line_of(call, module) for call in _calls_behind(scale, module)]
        if not any(networks) or any(line is None for line in networks):
            return 0
        found = found or next(line for line in networks if line)
    return found


def _calls_behind(scale: ast.Call, module: Module) -> Iterator[ast.Call]:
    """The calls that a loss is computed by, in its function."""
    function, order = module.function(scale), module.syntax.order
    assignments = [node for node in module.nodes(ast.Assign, ast.AugAssign, ast.AnnAssign) if module.function(node) is function]
    pending: list[ast.AST] = list(scale.args)
    seen: set[ast.AST] = set()
    while pending:
        node = pending.pop()
        for part in ast.walk(node):
            if isinstance(part, ast.Call):
                yield part
            key = module.key(part) if isinstance(part, ast.Name | ast.Attribute) else ""
            for assignment in assignments if key else ():
                if assignment not in seen and order(assignment) < order(scale) and key in _targets(assignment, module):
                    seen.add(assignment)
                    if isinstance(value := getattr(assignment, "value", None), ast.AST):
                        pending.append(value)


def _targets(node: ast.stmt, module: Module) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]
    return {module.key(part) for target in targets for part in ast.walk(target) if isinstance(part, ast.Name | ast.Attribute)}


def _line_of(call: ast.Call, module: Module) -> int | None:
    """The line of a call that runs a network which is in sight; 0 for a call that runs none; `None` for what may be one."""
    name = module.name(call.func)
    if name:
        # What makes a model is followed by its call; what else comes from elsewhere may do anything.
        return 0 if name.startswith(("torch.", "builtins.", "math.", "numpy.", *_ZOOS)) else None
    values = module.values(call.func)
    if values:
        if all(isinstance(value, Network) for value in values):
            return 0 if all(isinstance(value, Network) and _is_loss(value.name) for value in values) else call.lineno
        return 0 if _makes_networks(call, module) else None
    if _is_from_zoo(call.func, module):
        return call.lineno
    last = last_name(call.func)
    if isinstance(call.func, ast.Attribute) and not module.key(call.func).startswith(("self.", "cls.")):
        return 0  # A method of a tensor or of a batch.
    return 0 if _LOSS.search(last) else None


def _makes_networks(call: ast.Call, module: Module) -> bool:
    values = module.values(call)
    return bool(values) and all(isinstance(value, Network) for value in values)


def _is_loss(name: str) -> bool:
    return name.endswith("Loss")


def _is_from_zoo(node: ast.expr, module: Module) -> bool:
    bindings = module.bindings(node)
    if not bindings:
        return False
    for binding in bindings:
        value: ast.expr | None = binding.value
        # `resnet18().cuda()` and `model.to(device)` are still that model.
        while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in {"cuda", "to", "train"}:
            value = value.func.value
        if isinstance(value, ast.Name) and value.id == module.key(node):
            continue
        if not isinstance(value, ast.Call) or not module.name(value.func).startswith(_ZOOS):
            return False
    return True


def _message(node: ast.Call, line: int, module: Module) -> str:
    return (
        f"{quoted(node, module)} is on, but nothing in this file enters autocast: the forward pass (line {line}) computes in float32, "
        'and is scaled for nothing. Run it under `torch.autocast("cuda")`, or take the scaler out.'
    )
