"""How code moves from `torch.cuda.amp` and `torch.cpu.amp` to `torch.amp`."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, final

from halfstep.lint.edits import AddArgument, Edit, RemoveArgument, ReplaceExpression
from halfstep.lint.module import Module
from halfstep.lint.signatures import AUTOCASTS

__all__ = ["HOMES", "Home", "Mention", "find_mentions", "is_guarded", "moved_import", "moved_use", "names_of", "spelled"]

Kind = Literal["autocast", "scaler", "mark", "function", "cast"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """What takes the place of an old name.

    Attributes:
        kind: How its arguments differ.
        new: Its full name.
        device: The device type that it must be told.
    """

    kind: Kind
    new: str
    device: str

    @property
    def call(self) -> str:
        """How it is called."""
        if self.kind == "mark":
            return f'{self.new}(device_type="{self.device}")'
        if self.kind == "cast":
            return f'{self.new}(value, "{self.device}", dtype)'
        return f'{self.new}("{self.device}"{", ..." if ".set_" in self.new else ""})'


def _homes() -> Iterator[tuple[str, Home]]:
    for device in ("cuda", "cpu"):
        for module, name, kind in _MEMBERS if device == "cuda" else _MEMBERS[:2]:
            for path in ("", f".{module}"):
                yield f"torch.{device}.amp{path}.{name}", Home(kind=kind, new=f"torch.amp.{name}", device=device)
    yield "torch.cuda.amp.autocast_mode._cast", Home(kind="cast", new="torch.amp.autocast_mode._cast", device="cuda")
    for infix, device in (("cpu", "cpu"), ("ipu", "ipu"), ("xla", "xla")):
        yield f"torch.is_autocast_{infix}_enabled", Home(kind="function", new="torch.is_autocast_enabled", device=device)
        yield f"torch.set_autocast_{infix}_enabled", Home(kind="function", new="torch.set_autocast_enabled", device=device)
    for infix, device in (("gpu", "cuda"), ("cpu", "cpu"), ("ipu", "ipu"), ("xla", "xla")):
        yield f"torch.get_autocast_{infix}_dtype", Home(kind="function", new="torch.get_autocast_dtype", device=device)
        yield f"torch.set_autocast_{infix}_dtype", Home(kind="function", new="torch.set_autocast_dtype", device=device)


_MEMBERS: tuple[tuple[str, str, Kind], ...] = (
    ("grad_scaler", "GradScaler", "scaler"),
    ("autocast_mode", "autocast", "autocast"),
    ("autocast_mode", "custom_fwd", "mark"),
    ("autocast_mode", "custom_bwd", "mark"),
)

# Each old name by its full name.
HOMES: Mapping[str, Home] = dict(_homes())

_OLD_MODULES = frozenset(name.rpartition(".")[0] for name in HOMES if ".amp" in name)
_LAST = frozenset(name.rpartition(".")[2] for name in HOMES)
_POSITIONAL = AUTOCASTS["torch.cuda.amp.autocast"]
# A test that tells old versions of torch from new ones.
_ABOUT_VERSIONS = re.compile(
    r"(?i)version|hasattr|getattr|signature|greater_equal|less_than|torch_?(ge|gt|lt|le)?_?v?\d|_(ge|gt|lt|le)_\d|new_amp"
)
_MISSING = frozenset(("ImportError", "ModuleNotFoundError", "AttributeError", "TypeError"))


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mention:
    """A use of an old name.

    Attributes:
        node: The whole name, such as `torch.cuda.amp.autocast`.
        home: What takes its place.
        through: What the file imports for it: the `name` itself, an `old` module such as `amp`, or `torch`, or something in between.
        alias: The import.
        torch: How torch is called where the name begins with it; empty otherwise.
    """

    node: ast.Name | ast.Attribute
    home: Home
    through: Literal["name", "old", "torch"]
    alias: ast.alias | None
    torch: str = ""


def find_mentions(module: Module) -> list[Mention]:
    """The uses of old names in a file that can give a warning, in order. Those for old versions of torch are left out."""
    found: list[Mention] = []
    imported = {alias.asname for statement in module.nodes(ast.ImportFrom) for alias in statement.names if alias.asname}
    for node in module.nodes(ast.Name, ast.Attribute):
        assert isinstance(node, ast.Name | ast.Attribute)
        last = node.attr if isinstance(node, ast.Attribute) else node.id
        if (last not in _LAST and last not in imported) or not isinstance(node.ctx, ast.Load):
            continue
        names = module.names(node)
        if len(names) != 1 or names[0] not in HOMES:
            continue
        mention = _mention(node, HOMES[names[0]], module)
        if mention is not None and _is_used(node, module) and not is_guarded(node, module):
            found.append(mention)
    return found


def _mention(node: ast.Name | ast.Attribute, home: Home, module: Module) -> Mention | None:
    root: ast.expr = node
    while isinstance(root, ast.Attribute):
        root = root.value
    bindings = module.bindings(root)
    imports = [binding.node for binding in bindings if isinstance(binding.node, ast.alias)]
    alias = imports[0] if imports and len(imports) == len(bindings) and len({binding.qualified for binding in bindings}) == 1 else None
    if root is node and alias is not None:
        return Mention(node=node, home=home, through="name", alias=alias)
    if not imports and (root is not node or not bindings):
        # By `amp = torch.cuda.amp`, or by `from torch.cuda.amp import *`.
        return Mention(node=node, home=home, through="torch", alias=None)
    if root is node:
        # By another way, such as `autocast = torch.cuda.amp.autocast`, it is no use of the old name.
        return None
    if alias is None or is_guarded(alias, module):
        # Several imports of torch in one scope are all the same.
        same = bool(bindings) and all(binding.qualified == "torch" for binding in bindings)
        return Mention(node=node, home=home, through="torch", alias=None, torch=module.source(root)) if same else None
    qualified = bindings[0].qualified
    if qualified in _OLD_MODULES:
        return Mention(node=node, home=home, through="old", alias=alias)
    return Mention(node=node, home=home, through="torch", alias=alias, torch=module.source(root) if qualified == "torch" else "")


def _is_used(node: ast.AST, module: Module) -> bool:
    """Whether a name is called, marks a function, is derived from, bound or tested against; not merely listed or compared."""
    for holder, part in module.syntax.ancestors(node):
        if isinstance(holder, ast.Call):
            return part is holder.func or _takes_classes(holder, module)
        if isinstance(holder, ast.Dict | ast.List | ast.Set | ast.Compare):
            return False
        if isinstance(holder, ast.stmt):
            return not isinstance(holder, ast.Return | ast.Expr)
    return True


def _takes_classes(call: ast.Call, module: Module) -> bool:
    """Whether a call is about the classes and functions that it is given: a check, or a part of a call to come."""
    if module.name(call.func) == "functools.partial":
        return True
    if module.name(call.func) not in {"builtins.isinstance", "builtins.issubclass"}:
        return False
    return not any(module.name(part).startswith(("torch.amp.", "torch.GradScaler", "torch.autocast")) for part in ast.walk(call))


def names_of(alias: ast.alias, statement: ast.stmt, module: Module) -> list[ast.Name]:
    """All uses of the name that an import binds."""
    local = alias.asname or alias.name.partition(".")[0]
    return [
        name
        for name in module.nodes(ast.Name)
        if name.id == local and isinstance(name.ctx, ast.Load) and any(binding.node is alias for binding in module.bindings(name))
    ]


def is_guarded(node: ast.AST, module: Module) -> bool:
    """Whether code is for old versions of torch: a fallback of an import, or behind a test of the version."""
    importing = isinstance(node, ast.Import | ast.ImportFrom | ast.alias)
    for holder, part in module.syntax.ancestors(node):
        if isinstance(holder, ast.If | ast.IfExp) and part is not holder.test and _tells_versions(holder.test, module):
            return True
        if isinstance(holder, ast.ExceptHandler) and _catches(holder, importing=importing):
            return True
        if isinstance(holder, ast.Try) and part in holder.body and _is_attempt(holder, module, importing=importing):
            return True
        if isinstance(part, ast.stmt) and _follows_return(part, holder, module):
            return True
    return False


def _tells_versions(test: ast.expr, module: Module) -> bool:
    if _ABOUT_VERSIONS.search(module.source(test)):
        return True
    for part in ast.walk(test):
        if isinstance(part, ast.Name) and any(
            binding.kind == "value" and binding.value is not None and _ABOUT_VERSIONS.search(module.source(binding.value))
            for binding in module.bindings(part)
        ):
            return True
    return False


def _catches(handler: ast.ExceptHandler, *, importing: bool) -> bool:
    """Whether a handler is for what an old torch lacks."""
    if handler.type is None:
        return importing
    caught = {part.id for part in ast.walk(handler.type) if isinstance(part, ast.Name)}
    return bool(caught & _MISSING) or (importing and "Exception" in caught)


def _is_attempt(attempt: ast.Try, module: Module, *, importing: bool) -> bool:
    if not any(_catches(handler, importing=importing) for handler in attempt.handlers):
        return False
    # An import that is tried has a fallback; anything else only if the new name stands there, too.
    return importing or any(
        isinstance(part, ast.Attribute) and module.name(part).startswith("torch.amp.")
        for handler in attempt.handlers
        for part in ast.walk(handler)
    )


def _follows_return(statement: ast.stmt, holder: ast.AST, module: Module) -> bool:
    """Whether a statement is reached only where a test of the version before it in the same block did not return."""
    for block in (getattr(holder, "body", None), getattr(holder, "orelse", None)):
        if isinstance(block, list) and statement in block:
            for earlier in block[: block.index(statement)]:
                if (
                    isinstance(earlier, ast.If)
                    and isinstance(earlier.body[-1], ast.Return | ast.Raise)
                    and _tells_versions(earlier.test, module)
                ):
                    return True
    return False


def moved_import(statement: ast.Import | ast.ImportFrom, aliases: list[ast.alias], module: Module) -> str:
    """The code of an import statement after some of its names have moved."""
    text = module.source(statement)
    if isinstance(statement, ast.Import):
        alias = aliases[0]
        new = f"import {_without_device(alias.name)}" + (f" as {alias.asname}" if alias.asname else "")
        rest = [spelled(other) for other in statement.names if other is not alias]
        return f"import {', '.join(rest)}\n{new}" if rest else new
    old = statement.module or ""
    if len(aliases) == len(statement.names) and ".amp" in old:
        # By text, so that parentheses and comments stay.
        return text.replace(old, _without_device(old), 1)
    moved: dict[str, list[str]] = {}
    for alias in statement.names:
        home = HOMES.get(f"{old}.{alias.name}")
        if alias not in aliases:
            moved.setdefault(old, []).append(spelled(alias))
        elif home is None:
            moved.setdefault(_without_device(f"{old}.amp").rpartition(".")[0], []).append(spelled(alias))
        else:
            package, _dot, name = home.new.rpartition(".")
            moved.setdefault(package, []).append(f"{name} as {alias.asname}" if alias.asname else name)
    return "\n".join(f"from {package} import {', '.join(names)}" for package, names in moved.items())


def spelled(alias: ast.alias) -> str:
    """How a name is written in an import."""
    return f"{alias.name} as {alias.asname}" if alias.asname else alias.name


def _without_device(name: str) -> str:
    """`torch.amp` for `torch.cuda.amp`, and likewise for what is in it."""
    return re.sub(r"^torch\.(cuda|cpu)\.amp\b", "torch.amp", name)


def moved_use(mention: Mention, module: Module) -> list[Edit] | None:
    """What becomes of a use, besides its import or its path; `None` where that is not known."""
    node, home = mention.node, mention.home
    parent = module.parent(node)
    name = _renamed(mention, module)
    rename: list[Edit] = [] if name == module.source(node) else [ReplaceExpression(node=node, code=name)]
    if isinstance(parent, ast.Call) and (
        parent.func is node or (module.name(parent.func) == "functools.partial" and parent.args[0] is node)
    ):
        arguments = _ARGUMENTS[home.kind](parent, home, module)
        return None if arguments is None else [*rename, *arguments]
    if isinstance(parent, ast.FunctionDef) and node in parent.decorator_list and home.kind == "mark":
        return [ReplaceExpression(node=node, code=f'{name}(device_type="{home.device}")')]
    return rename if home.kind in {"autocast", "scaler"} and _is_type(node, module) else None


def _renamed(mention: Mention, module: Module) -> str:
    """How the new name is spelled where the old one stands, once the import has moved."""
    written, last = module.source(mention.node), mention.home.new.rpartition(".")[2]
    if mention.through == "name":
        return written if mention.alias is None or mention.alias.asname else last
    if mention.through == "old":
        return written
    return f"{mention.torch or 'torch'}{mention.home.new.removeprefix('torch')}"


def _is_type(node: ast.AST, module: Module) -> bool:
    """Whether a class is only tested against, or an annotation."""
    for holder, part in module.syntax.ancestors(node):
        if isinstance(holder, ast.Call):
            return module.name(holder.func) in {"builtins.isinstance", "builtins.issubclass"}
        if isinstance(holder, ast.arg):
            return True
        if isinstance(holder, ast.AnnAssign):
            return part is holder.annotation
        if isinstance(holder, ast.FunctionDef | ast.AsyncFunctionDef):
            return part is holder.returns
        if isinstance(holder, ast.stmt):
            return False
    return False


def _autocast_arguments(call: ast.Call, home: Home, module: Module) -> list[Edit] | None:
    """The device comes first, and what was positional becomes a keyword."""
    whole = module.name(call.func) == "functools.partial"
    positional = call.args[1:] if whole else call.args
    if any(isinstance(argument, ast.Starred) for argument in positional) or len(positional) > len(_POSITIONAL):
        return None
    if any(keyword.arg == "device_type" for keyword in call.keywords):
        return []
    if whole and _is_called_by_position(call, module):
        return None
    if positional and (module.shown_dtypes(positional[0]) or isinstance(module.constant(positional[0]), str)):
        return None  # A dtype or a device in the place of `enabled`.
    edits: list[Edit] = []
    for name, argument in zip(_POSITIONAL, positional, strict=False):
        edits.append(RemoveArgument(call=call, argument=argument))
        edits.append(AddArgument(call=call, code=f"{name}={module.source(argument)}", where="last"))
    if not whole:
        return [AddArgument(call=call, code=f'"{home.device}"', where="first"), *edits]
    return [AddArgument(call=call, code=f'device_type="{home.device}"', where="last"), *edits]


def _is_called_by_position(partial: ast.Call, module: Module) -> bool:
    """Whether what a `functools.partial` gives is called with positional arguments in this file."""
    return any(
        call.args and any(binding.value is partial for binding in module.bindings(call.func))
        for call in module.nodes(ast.Call)
        if isinstance(call.func, ast.Name | ast.Attribute)
    )


def _scaler_arguments(call: ast.Call, home: Home, module: Module) -> list[Edit] | None:
    if any(keyword.arg == "device" for keyword in call.keywords):
        return None
    if module.name(call.func) != "functools.partial":
        return [AddArgument(call=call, code=f'"{home.device}"', where="first")]
    # What is passed by position now, or when it is called, would come before the device.
    return [AddArgument(call=call, code=f'device="{home.device}"', where="last")] if len(call.args) == 1 else None


def _mark_arguments(call: ast.Call, home: Home, module: Module) -> list[Edit] | None:
    return [AddArgument(call=call, code=f'device_type="{home.device}"', where="last")]


def _function_arguments(call: ast.Call, home: Home, module: Module) -> list[Edit] | None:
    if module.name(call.func) == "functools.partial":
        return None
    return [AddArgument(call=call, code=f'"{home.device}"', where="first")]


def _no_arguments(call: ast.Call, home: Home, module: Module) -> list[Edit] | None:
    return None


_ARGUMENTS: Mapping[Kind, Callable[[ast.Call, Home, Module], list[Edit] | None]] = {
    "autocast": _autocast_arguments,
    "scaler": _scaler_arguments,
    "mark": _mark_arguments,
    "function": _function_arguments,
    "cast": _no_arguments,
}
