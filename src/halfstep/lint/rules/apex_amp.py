"""Apex's mixed precision, which Apex no longer has."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import final

from halfstep.lint.edits import ReplaceStatement
from halfstep.lint.module import Module
from halfstep.lint.moving import spelled
from halfstep.lint.rules.rule import AbstractRule, Bad, Finding, Fix
from halfstep.lint.scopes import last_name

__all__ = ["ApexAmp"]

# What halfstep.amp has, too; a test compares it with the package.
_OFFERED = frozenset(
    (
        "disable_casts",
        "float_function",
        "half_function",
        "initialize",
        "load_state_dict",
        "master_params",
        "promote_function",
        "register_float_function",
        "register_half_function",
        "register_promote_function",
        "scale_loss",
        "state_dict",
    )
)
_GONE = ("apex.amp", "apex.fp16_utils")


@final
class ApexAmp(AbstractRule):
    """An import of `apex.amp` or `apex.fp16_utils`."""

    code = "HS022"
    name = "apex_amp"
    severity = "warning"
    summary = "`apex.amp` was removed from Apex in 2025; the import fails with any newer build."
    explanation = """
Apex removed `apex.amp` and `apex.fp16_utils` in 2025, after years of deprecation: `from apex import amp` now raises
`ImportError: cannot import name 'amp' from 'apex'`. The script runs only where somebody keeps an old build of Apex, and such a build has to
be compiled for each new version of torch and CUDA.

There are two ways on:

- `from halfstep import amp` is a drop-in: `amp.initialize` with all of its arguments and levels `O0` to `O3`, `amp.scale_loss`,
  `amp.master_params`, `amp.state_dict` and the functions that mark other functions. It runs on torch's own autocast, without a build, and
  reads the checkpoints of Apex.
- `torch.autocast` and `torch.amp.GradScaler`, written out.

The fix changes the import, where `halfstep.amp` has all that the file uses of it. It is unsafe: halfstep must be installed where the script
runs, and at O2 and O3 more layers stay in fp32 than with Apex.

Nothing is said about the rest of Apex, such as `apex.normalization`, `apex.optimizers` or `apex.parallel`, nor about an import that the
file can do without.
"""
    bad = (
        Bad(
            code="""import torch
from apex import amp


def train(model, loader, criterion):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
    for images, labels in loader:
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
""",
            line=2,
            fixed="""import torch
from halfstep import amp


def train(model, loader, criterion):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
    for images, labels in loader:
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
""",
        ),
        Bad(
            code="""from apex.parallel import DistributedDataParallel
from apex.amp import initialize, scale_loss as scaled


def prepare(model, optimizer):
    model, optimizer = initialize(model, optimizer)
    return DistributedDataParallel(model), optimizer, scaled
""",
            line=2,
            fixed="""from apex.parallel import DistributedDataParallel
from halfstep.amp import initialize, scale_loss as scaled


def prepare(model, optimizer):
    model, optimizer = initialize(model, optimizer)
    return DistributedDataParallel(model), optimizer, scaled
""",
        ),
        Bad(
            code="""import apex


def prepare(model, optimizer):
    return apex.amp.initialize(model, optimizer, opt_level="O1")
""",
            line=5,
        ),
        Bad(
            code="""from apex.fp16_utils import FP16_Optimizer


def wrap(optimizer):
    return FP16_Optimizer(optimizer, dynamic_loss_scale=True)
""",
            line=1,
        ),
        Bad(
            code="""def prepare(model, optimizer, args):
    if args.fp16:
        try:
            from apex import amp
        except ImportError:
            raise ImportError("Please install apex to train in fp16.")
        model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)
    return model, optimizer
""",
            line=4,
            fixed="""def prepare(model, optimizer, args):
    if args.fp16:
        try:
            from halfstep import amp
        except ImportError:
            raise ImportError("Please install apex to train in fp16.")
        model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)
    return model, optimizer
""",
        ),
    )
    good = (
        """from halfstep import amp


def prepare(model, optimizer):
    return amp.initialize(model, optimizer, opt_level="O1")
""",
        """try:
    from apex.normalization import FusedLayerNorm as LayerNorm
except ImportError:
    from torch.nn import LayerNorm
""",
        """try:
    from apex import amp
except ImportError:
    amp = None


def prepare(model, optimizer):
    return amp.initialize(model, optimizer) if amp is not None else (model, optimizer)
""",
        """from apex.optimizers import FusedAdam
from apex.parallel import DistributedDataParallel, convert_syncbn_model


def prepare(model):
    return DistributedDataParallel(convert_syncbn_model(model)), FusedAdam(model.parameters())
""",
        """from project.availability import is_apex_available

if is_apex_available():
    from apex import amp
""",
    )

    def check(self, module: Module) -> Iterator[Finding]:
        """Yields the imports of what Apex removed; where only `apex` is imported, the first use of it."""
        if "apex" not in module.text:
            return
        found = False
        for statement in module.nodes(ast.Import, ast.ImportFrom):
            assert isinstance(statement, ast.Import | ast.ImportFrom)
            gone = [name for alias in statement.names if _is_gone(name := _imported(statement, alias))]
            if gone and not _is_optional(statement, module):
                found = True
                yield Finding(node=statement, message=_message(gone[0], statement, module), fix=_fix(statement, module))
        if found:
            return
        for attribute in module.nodes(ast.Attribute):
            if attribute.attr in {"amp", "fp16_utils"} and _is_gone(name := module.name(attribute)):
                root = module.bindings(attribute.value)
                if not _is_optional(attribute, module) and not any(_is_optional(binding.node, module) for binding in root):
                    yield Finding(node=attribute, message=_message(name, None, module))
                return


def _imported(statement: ast.Import | ast.ImportFrom, alias: ast.alias) -> str:
    if isinstance(statement, ast.Import):
        return alias.name
    return "" if statement.level else f"{statement.module}.{alias.name}"


def _is_gone(name: str) -> bool:
    return any(name == gone or name.startswith(f"{gone}.") for gone in _GONE)


def _is_optional(node: ast.AST, module: Module) -> bool:
    """Whether a file goes on without an import: it handles its failure, or asks first whether Apex is there."""
    for holder, part in module.syntax.ancestors(node):
        if isinstance(holder, ast.Try) and part in holder.body and holder.handlers and not any(map(_raises, holder.handlers)):
            return True
        if isinstance(holder, ast.ExceptHandler):
            return True
        if isinstance(holder, ast.If) and part is not holder.test and "apex" in module.source(holder.test).lower():
            return True
    return False


def _raises(handler: ast.ExceptHandler) -> bool:
    return any(isinstance(part, ast.Raise) or (isinstance(part, ast.Call) and _ends_process(part)) for part in ast.walk(handler))


def _ends_process(call: ast.Call) -> bool:
    name = last_name(call.func)
    return name in {"exit", "quit", "_exit"}


def _message(name: str, statement: ast.stmt | None, module: Module) -> str:
    gone = next(gone for gone in _GONE if name == gone or name.startswith(f"{gone}."))
    head = f"`{gone}` was removed from Apex in 2025: "
    head += "this import raises an ImportError" if statement is not None else "this raises an AttributeError"
    if gone == "apex.amp":
        return f"{head} with any newer build. `halfstep.amp` takes its place, for the levels O0 to O3, or torch.autocast with a GradScaler."
    return f"{head} with any newer build. Use torch.autocast with a GradScaler."


def _fix(statement: ast.Import | ast.ImportFrom, module: Module) -> Fix | None:
    """Takes the names from halfstep, where it has them."""
    if isinstance(statement, ast.Import):
        alias = statement.names[0]
        if len(statement.names) > 1 or alias.name != "apex.amp" or alias.asname is None or _uses({alias.asname}, module) - _OFFERED:
            return None
        code = f"import halfstep.amp as {alias.asname}"
        return Fix(edits=(ReplaceStatement(statement=statement, code=code),), safety="unsafe")
    if statement.module == "apex.amp":
        moved = statement.names
        unknown = {alias.name for alias in moved} - _OFFERED
    else:
        moved = [alias for alias in statement.names if f"{statement.module}.{alias.name}" == "apex.amp"]
        unknown = _uses({alias.asname or alias.name for alias in moved}, module) - _OFFERED
    if unknown or len(moved) != sum(_is_gone(_imported(statement, alias)) for alias in statement.names):
        return None
    rest = [spelled(alias) for alias in statement.names if alias not in moved]
    new = f"from {'halfstep' if statement.module == 'apex' else 'halfstep.amp'} import {', '.join(map(spelled, moved))}"
    code = f"from apex import {', '.join(rest)}\n{new}" if rest else new
    return Fix(edits=(ReplaceStatement(statement=statement, code=code),), safety="unsafe")


def _uses(names: set[str], module: Module) -> set[str]:
    """The attributes that are taken from a module under one of these names."""
    return {attribute.attr for attribute in module.nodes(ast.Attribute) if module.key(attribute.value) in names}
