"""Attributes that torch's `GradScaler` does not have, or keeps for itself."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import final

from halfstep.lint.edits import ReplaceExpression
from halfstep.lint.evidence.numberplaces import item_call, takes_number
from halfstep.lint.module import Module
from halfstep.lint.rules.rule import AbstractRule, Bad, Finding, Fix
from halfstep.lint.signatures import SCALERS
from halfstep.lint.values import Scaler

__all__ = ["UnknownScalerAttribute"]

_PUBLIC = frozenset(
    (
        "scale",
        "unscale_",
        "step",
        "update",
        "get_scale",
        "get_growth_factor",
        "set_growth_factor",
        "get_backoff_factor",
        "set_backoff_factor",
        "get_growth_interval",
        "set_growth_interval",
        "is_enabled",
        "state_dict",
        "load_state_dict",
        "process_group",
    )
)
_PRIVATE = frozenset(
    (
        "_device",
        "_enabled",
        "_init_scale",
        "_growth_factor",
        "_backoff_factor",
        "_growth_interval",
        "_init_growth_tracker",
        "_scale",
        "_growth_tracker",
        "_per_optimizer_states",
        "_check_scale_growth_tracker",
        "_lazy_init_scale_growth_tracker",
        "_unscale_grads_",
        "_maybe_opt_step",
        "_get_scale_async",
        "_get_growth_tracker",
        "_check_inf_per_device",
        "_found_inf_per_device",
    )
)

# What is meant by an attribute, and the method without arguments that gives it.
_GETTERS: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "loss_scale",
            "_loss_scale",
            "scale_value",
            "scale_factor",
            "_scale_factor",
            "cur_scale",
            "current_scale",
            "get_loss_scale",
            "get_scale_value",
        ),
        "get_scale",
    ),
    **dict.fromkeys(("enabled", "_enabled", "is_enable", "get_enabled"), "is_enabled"),
    **dict.fromkeys(("growth_factor", "_growth_factor"), "get_growth_factor"),
    **dict.fromkeys(("backoff_factor", "_backoff_factor"), "get_backoff_factor"),
    **dict.fromkeys(("growth_interval", "_growth_interval"), "get_growth_interval"),
}
_RENAMED: Mapping[str, str] = {
    "unscale": "unscale_",
    "_unscale": "unscale_",
    "unscale_grads": "unscale_",
    "unscale_gradients": "unscale_",
}
_INSTEAD: Mapping[str, str] = {
    "_scale": "It is None until the first `scale()`, and a tensor after that. `{scaler}.get_scale()` gives the scale as a number.",
    "_growth_tracker": "`{scaler}.state_dict()` holds the count of good steps as `_growth_tracker`.",
    "_get_growth_tracker": "`{scaler}.state_dict()` holds the count of good steps as `_growth_tracker`.",
    "_init_scale": "`{scaler}.get_scale()` gives the scale now.",
    "backward": "Scale the loss: `{scaler}.scale(loss).backward()`.",
    "set_scale": "`{scaler}.update(new_scale)` sets the scale.",
    "clip_grad_norm_": "Call `{scaler}.unscale_(optimizer)`, then `torch.nn.utils.clip_grad_norm_`.",
}
_SKIPS = re.compile(r"skip|overflow|inf|per_optimizer|num_steps|step_count")
_ABOUT_SKIPS = (
    "A GradScaler has no public word on which steps it skipped. `halfstep.LossScaler`, a GradScaler, counts them: `stats().skips`."
)


@final
class UnknownScalerAttribute(AbstractRule):
    """An attribute of a `GradScaler` that does not exist, or that is private."""

    code = "HS019"
    name = "unknown_scaler_attribute"
    severity = "error"
    summary = "`GradScaler` does not have this attribute, or keeps it private."
    explanation = """
A `GradScaler` has methods only: `scale`, `unscale_`, `step`, `update`, `get_scale`, `is_enabled`, the getters and setters of the growth
factor, the backoff factor and the growth interval, `state_dict` and `load_state_dict`. Names such as `loss_scale` belong to other libraries
(Apex, DeepSpeed, fairseq) and raise an `AttributeError`, often only where a line of the log is written.

There is no `_skipped_steps` and no `found_inf`: a scaler does not tell which steps it skipped. "The scale went down" is not the same: at a
scale that has been set by hand, or with an optimizer that is skipped by itself, it is wrong. `halfstep.LossScaler` is a `GradScaler` that
counts steps and skips, and `found_inf(optimizer)` is its verdict.

Private attributes exist in some versions of torch and change without notice. `_scale` is `None` until the first loss is scaled, so that
`scaler._scale.item()` fails when training resumes with a validation run; `_per_optimizer_states` is emptied by `update()`.

The fix puts the public method in its place where there is one. It is safe: the two give the same, or the old line raises. Only for a bare
`_scale` it is unsafe, since that is a tensor and `get_scale()` gives a number; where a tensor is asked for, there is none.

Nothing is said about a scaler whose class is not torch's own, about attributes that the file sets itself, or behind `hasattr`.
"""
    bad = (
        Bad(
            code="""import torch

scaler = torch.amp.GradScaler("cuda")


def train(model, optimizer, loader, criterion):
    for step, (images, labels) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 100 == 0:
            print("scale", scaler.loss_scale)
""",
            line=15,
            fixed="""import torch

scaler = torch.amp.GradScaler("cuda")


def train(model, optimizer, loader, criterion):
    for step, (images, labels) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 100 == 0:
            print("scale", scaler.get_scale())
""",
        ),
        Bad(
            code="""import torch


class Trainer:
    def __init__(self, model, optimizer, criterion):
        self.model, self.optimizer, self.criterion = model, optimizer, criterion
        self.scaler = torch.amp.GradScaler("cuda")

    def step(self, images, labels):
        self.optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = self.criterion(self.model(images), labels)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.scaler._skipped_steps
""",
            line=16,
        ),
        Bad(
            code="""from torch.amp import GradScaler, autocast

scaler = GradScaler("cuda")


def step(model, optimizer, images, labels, criterion):
    optimizer.zero_grad()
    with autocast("cuda"):
        loss = criterion(model(images), labels)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return {"scale": scaler._scale.item()}
""",
            line=13,
            fixed="""from torch.amp import GradScaler, autocast

scaler = GradScaler("cuda")


def step(model, optimizer, images, labels, criterion):
    optimizer.zero_grad()
    with autocast("cuda"):
        loss = criterion(model(images), labels)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return {"scale": scaler.get_scale()}
""",
        ),
        Bad(
            code="""import torch

scaler = torch.amp.GradScaler("cuda")


def step(model, optimizer, images, labels, criterion):
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16, enabled=scaler._enabled):
        loss = criterion(model(images), labels)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
            line=8,
            fixed="""import torch

scaler = torch.amp.GradScaler("cuda")


def step(model, optimizer, images, labels, criterion):
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16, enabled=scaler.is_enabled()):
        loss = criterion(model(images), labels)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
        ),
    )
    good = (
        """import torch

scaler = torch.amp.GradScaler("cuda")


def step(model, optimizer, images, labels, criterion):
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16, enabled=scaler.is_enabled()):
        loss = criterion(model(images), labels)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), scaler.state_dict()["_growth_tracker"]
""",
        """import torch


class CountingScaler(torch.amp.GradScaler):
    def __init__(self):
        super().__init__("cuda")
        self.skipped_steps = 0

    def update(self, new_scale=None):
        before = self.get_scale()
        super().update(new_scale)
        self.skipped_steps += self.get_scale() < before


scaler = CountingScaler()


def step(model, optimizer, images, labels, criterion):
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = criterion(model(images), labels)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return scaler.skipped_steps
""",
        """from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

scaler = DynamicLossScaler(init_scale=2**16, scale_factor=2.0)
print(scaler.loss_scale)
""",
        """import torch

scaler = torch.amp.GradScaler("cuda")


def scale_of():
    if hasattr(scaler, "current_scale"):
        return scaler.current_scale
    return scaler.get_scale()
""",
        """from sklearn.preprocessing import StandardScaler

scaler = StandardScaler()
print(scaler.scale_, scaler.mean_)
""",
    )

    def check(self, module: Module) -> Iterator[Finding]:
        """Yields the attributes of scalers of torch that are not public."""
        if "GradScaler" not in module.text:
            return
        attributes = [
            attribute for attribute in module.nodes(ast.Attribute) if _is_strange(attribute.attr) and _is_likely(attribute, module)
        ]
        if not attributes:
            return
        texts = {constant.value for constant in module.nodes(ast.Constant) if isinstance(constant.value, str)}
        own = {attribute.attr for attribute in attributes if not isinstance(attribute.ctx, ast.Load)} - _PRIVATE
        for attribute in attributes:
            if attribute.attr not in texts | own and _is_scaler(attribute.value, module) and not _is_tried(attribute, module):
                yield Finding(node=attribute, message=_message(attribute, module), fix=_fix(attribute, module))


def _is_strange(name: str) -> bool:
    return name not in _PUBLIC and not (name.startswith("__") and name.endswith("__"))


def _is_likely(attribute: ast.Attribute, module: Module) -> bool:
    """Whether it is worth while to find out what an attribute belongs to, which takes long in large files."""
    if attribute.attr in _PRIVATE or attribute.attr in _GETTERS or attribute.attr in _RENAMED or attribute.attr in _INSTEAD:
        return True
    if "scaler" in module.key(attribute.value).lower() or "skip" in attribute.attr:
        return True
    bound = [binding.value for binding in module.bindings(attribute.value)]
    return any(isinstance(value, ast.Call) and module.name(value.func) in SCALERS for value in bound)


def _is_scaler(node: ast.expr, module: Module) -> bool:
    """Whether an expression is always a scaler of torch, made in this file."""
    possible = module.evaluation.evaluate(node)
    values = possible.values
    return possible.complete and bool(values) and all(isinstance(value, Scaler) and value.name in SCALERS for value in values)


def _is_tried(node: ast.AST, module: Module) -> bool:
    """Whether a missing attribute is expected there."""
    for holder, part in module.syntax.ancestors(node):
        if isinstance(holder, ast.Try) and part in holder.body:
            caught = {module.key(name) for handler in holder.handlers if handler.type for name in ast.walk(handler.type)}
            if "AttributeError" in caught:
                return True
    return False


def _message(attribute: ast.Attribute, module: Module) -> str:
    name, scaler = attribute.attr, module.source(attribute.value)
    if name in _PRIVATE:
        head = f"`{scaler}.{name}` is private to torch and changes without notice."
    else:
        head = f"`{scaler}` is a GradScaler and has no attribute `{name}`: this raises an AttributeError."
    if name in _INSTEAD:
        meant = name if isinstance(attribute.ctx, ast.Load) or name != "_scale" else "set_scale"
        return f"{head} {_INSTEAD[meant].format(scaler=scaler)}"
    if _SKIPS.search(name):
        return f"{head} {_ABOUT_SKIPS}"
    if name in _GETTERS:
        return f"{head} Use `{scaler}.{_GETTERS[name]}()`."
    if name in _RENAMED:
        return f"{head} The method is `{_RENAMED[name]}`."
    close = get_close_matches(name.lstrip("_"), sorted(_PUBLIC), 1, 0.75)
    return f"{head} Did you mean `{close[0]}`?" if close else f"{head} It has {', '.join(sorted(_PUBLIC - {'process_group'}))}."


def _fix(attribute: ast.Attribute, module: Module) -> Fix | None:
    name, scaler = attribute.attr, module.source(attribute.value)
    parent = module.parent(attribute)
    call = parent if isinstance(parent, ast.Call) and parent.func is attribute else None
    if not isinstance(attribute.ctx, ast.Load):
        return None
    if name in _RENAMED and call is not None:
        return Fix(edits=(ReplaceExpression(node=attribute, code=f"{scaler}.{_RENAMED[name]}"),), safety="safe")
    if name in _GETTERS:
        if call is not None and (call.args or call.keywords):
            return None
        return Fix(edits=(ReplaceExpression(node=call or attribute, code=f"{scaler}.{_GETTERS[name]}()"),), safety="safe")
    if name == "_scale":
        item = item_call(attribute, module)
        whole: ast.expr = item or attribute
        if item is None and not takes_number(attribute, module):
            return None
        return Fix(edits=(ReplaceExpression(node=whole, code=f"{scaler}.get_scale()"),), safety="safe" if item else "unsafe")
    return None
