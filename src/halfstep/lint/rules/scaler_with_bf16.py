"""A gradient scaler that is on although everything computes in bfloat16."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import final

from halfstep.lint.edits import AddArgument, Edit, ReplaceExpression
from halfstep.lint.evidence.spelling import quoted, spell_torch
from halfstep.lint.evidence.training import Entry, entries_of, uses
from halfstep.lint.module import Module
from halfstep.lint.rules.rule import AbstractRule, Bad, Finding, Fix
from halfstep.lint.values import Scaler

__all__ = ["ScalerWithBf16"]

# What a scaler that is off refuses to tell.
_ASKED = (
    "get_growth_factor",
    "get_backoff_factor",
    "get_growth_interval",
    "set_growth_factor",
    "set_backoff_factor",
    "set_growth_interval",
)


@final
class ScalerWithBf16(AbstractRule):
    """`GradScaler()` next to `torch.autocast("cuda", dtype=torch.bfloat16)`."""

    code = "HS013"
    name = "scaler_with_bf16"
    severity = "warning"
    summary = "A `GradScaler` that is on has nothing to rescue where autocast computes in bfloat16."
    explanation = """
bfloat16 has the range of float32, so that no gradient is too small for it and a loss need not be scaled. A scaler that is on all the same
goes over all gradients once more in each step, and since nothing overflows it doubles its scale for ever: with `growth_interval=1` it
reached its cap of 1.7e38 after 111 steps. Gradients that large do overflow now and then, and the step is skipped for no reason. Older
torch has no kernel to unscale bfloat16 gradients on a GPU, and raises.

Switch it off: a `GradScaler(enabled=False)` passes losses and steps through, so that the rest of the code stays as it is. Where the dtype
is chosen at run time, write `enabled=(dtype == torch.float16)`.

The rule fires where all regions that the scaler is used with are shown to be bfloat16, and stays silent where one may be float16.

The fix passes `enabled`. It is safe, unless the file asks the scaler for its growth factor and the like, which one that is off does not
tell.
"""
    bad = (
        Bad(
            code="""import torch


def train(model, loader, optimizer, criterion):
    scaler = torch.amp.GradScaler("cuda")
    for images, labels in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = criterion(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
            line=5,
            fixed="""import torch


def train(model, loader, optimizer, criterion):
    scaler = torch.amp.GradScaler("cuda", enabled=False)
    for images, labels in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = criterion(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
        ),
        Bad(
            code="""import torch

dtype = torch.bfloat16
use_amp = torch.cuda.is_available()
scaler = torch.amp.GradScaler("cuda", init_scale=2.0**14, enabled=use_amp)


def train_step(model, batch, optimizer):
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=dtype, enabled=use_amp):
        loss = model(**batch).loss
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
            line=5,
            fixed="""import torch

dtype = torch.bfloat16
use_amp = torch.cuda.is_available()
scaler = torch.amp.GradScaler("cuda", init_scale=2.0**14, enabled=(dtype == torch.float16))


def train_step(model, batch, optimizer):
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=dtype, enabled=use_amp):
        loss = model(**batch).loss
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
        ),
    )
    good = (
        """import torch


def train(model, loader, optimizer, criterion):
    scaler = torch.amp.GradScaler("cuda", enabled=False)
    for images, labels in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = criterion(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
        """import torch


def train(model, loader, optimizer, criterion, use_bf16):
    dtype = torch.bfloat16 if use_bf16 else torch.float16
    scaler = torch.amp.GradScaler("cuda")
    for images, labels in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=dtype):
            loss = criterion(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
        """import torch


def train(model, teacher, loader, optimizer, criterion):
    scaler = torch.amp.GradScaler("cuda")
    for images in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            target = teacher(images).detach()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(model(images), target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
        """import torch


def train(model, loader, optimizer, criterion, args):
    scaler = torch.amp.GradScaler("cuda", enabled=args.precision == "fp16")
    for images, labels in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=args.precision == "bf16"):
            loss = criterion(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
    )

    def check(self, module: Module) -> Iterator[Finding]:
        """Yields the scalers that are on, with nothing but bfloat16 around them."""
        if "caler" not in module.text or not any(word in module.text for word in ("bf", "cpu")):
            return
        for scaler in module.scalers:
            call = scaler.node
            if call is None or scaler.enabled is False or not uses(scaler, module, "scale", "step"):
                continue
            found = [entry for entry in entries_of(scaler, module) if entry.region.enabled is not False]
            if found and all(entry.region.dtypes == {"bf16"} for entry in found) and _is_on(scaler, found, module):
                yield Finding(node=call, message=_message(call, found[0], module), fix=_fix(scaler, call, found, module))


def _is_on(scaler: Scaler, found: Sequence[Entry], module: Module) -> bool:
    """Whether a scaler is on at least where one of the regions is."""
    if scaler.enabled:
        return True
    flag = scaler.arguments.get("enabled")
    if flag is None:
        return False
    flags = {module.source(each) for entry in found if (each := entry.region.arguments.get("enabled")) is not None}
    return flags == {module.source(flag)}


def _message(call: ast.Call, entry: Entry, module: Module) -> str:
    region = entry.region.node
    return (
        f"{quoted(call, module)} is on, but {quoted(region, module)} (line {region.lineno}) computes in bfloat16, which "
        "needs no scaling: it costs a pass over all gradients, and its scale doubles until steps are skipped. Pass `enabled=False`."
    )


def _fix(scaler: Scaler, call: ast.Call, found: Sequence[Entry], module: Module) -> Fix | None:
    if not scaler.name.startswith("torch"):
        return None
    value, imports = _value(call, found, module)
    edits: tuple[Edit, ...]
    if (flag := scaler.arguments.get("enabled")) is not None:
        edits = (ReplaceExpression(node=flag, code=value),)
    else:
        edits = (AddArgument(call=call, code=f"enabled={value}", where="last"),)
    asked = any(f".{name}(" in module.text for name in _ASKED)
    return Fix(edits=(*edits, *imports), safety="unsafe" if asked else "safe")


def _value(call: ast.Call, found: Sequence[Entry], module: Module) -> tuple[str, tuple[Edit, ...]]:
    """What `enabled` is to be: a comparison where the dtype is a variable that the scaler's place can see."""
    dtypes = [entry.region.arguments.get("dtype") for entry in found]
    first = dtypes[0]
    if first is None or not isinstance(first, ast.Name) or {module.key(each) for each in dtypes if each is not None} != {first.id}:
        return "False", ()
    place = module.function(call)
    bindings = module.bindings(first)
    seen = bool(bindings) and all(
        each.kind == "value" and module.function(each.node) in {place, None} and getattr(each.node, "lineno", 0) < call.lineno
        for each in bindings
    )
    if not seen:
        return "False", ()
    torch, imports = spell_torch(module)
    return f"({first.id} == {torch}.float16)", imports
