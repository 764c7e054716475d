"""What the expressions of a file may be: followed through imports, assignments, parameters, attributes and returned values."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast, final

from halfstep.lint.calls import CallSites, callable_names, default_of, elements_of, is_method, passed
from halfstep.lint.construction import construct
from halfstep.lint.scopes import Binding, Scopes, dotted, last_name
from halfstep.lint.signatures import DTYPES
from halfstep.lint.syntax import FUNCTIONS, Syntax
from halfstep.lint.usage import annotates_scaler, used_scalers
from halfstep.lint.values import Constant, Dtype, Made, Network, Routine, Scaler, Value

__all__ = ["Evaluation", "Possible"]

# What gives back the module that it is called on, or that it is given first.
_SAME_MODULE = frozenset(
    ("to", "cuda", "cpu", "train", "eval", "half", "float", "bfloat16", "double", "requires_grad_", "to_empty", "apply")
)
_WRAPPERS = frozenset(("torch.compile", "torch.jit.script"))
_WRAPPER_CLASSES = frozenset(("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "convert_sync_batchnorm"))


@final
@dataclass(frozen=True, slots=True)
class Possible:
    """What an expression may be.

    Attributes:
        values: What it is shown to be at times.
        complete: Whether it is never anything else, besides None.
    """

    values: tuple[Value, ...] = ()
    complete: bool = False


_UNKNOWN = Possible()

# Beyond so many possibilities nothing can be said about an expression.
_MANY = 24
# And beyond such a depth nothing is asked: a chain of hundreds of terms would exhaust Python's own stack.
_DEEP = 100


def _union(parts: Iterable[Possible]) -> Possible:
    values: list[Value] = []
    complete, some = True, False
    for part in parts:
        some = True
        complete = complete and part.complete
        values.extend(value for value in part.values if value not in values)
        if len(values) > _MANY:
            return _UNKNOWN
    return Possible(tuple(values), complete and some)


@final
class Evaluation:
    """Tells what names and expressions stand for. Nothing is executed, and the order of statements is not looked at.

    Args:
        syntax: The file.
        scopes: Its bindings.
    """

    def __init__(self, syntax: Syntax, scopes: Scopes) -> None:
        self._syntax = syntax
        self._scopes = scopes
        self._known: dict[ast.AST, Possible] = {}
        self._running: set[ast.AST] = set()
        self._circles = 0
        self._selecting: set[tuple[ast.AST, tuple[int, ...]]] = set()
        self._provisional: dict[ast.AST, Possible] = {}
        self._naming: set[ast.AST] = set()
        self._names: dict[ast.AST, tuple[str, ...]] = {}
        self._bindings: dict[ast.AST, Sequence[Binding]] = {}
        self._made: dict[ast.AST, Made] = {}
        self._returns: dict[ast.AST, list[ast.expr]] = {}
        self._sites = CallSites(syntax, self)
        self._unbound: dict[tuple[ast.AST, str], Scaler] = {}
        self._used = used_scalers(syntax)

    def names(self, node: ast.AST) -> tuple[str, ...]:
        """The full names that an expression may stand for, through imports and aliases; empty where it is not a name from elsewhere."""
        if not isinstance(node, (ast.Name, ast.Attribute)):
            return ()
        if node in self._names:
            return self._names[node]
        if node in self._naming or len(self._naming) > _DEEP:
            self._circles += 1
            return ()
        circles = self._circles
        self._naming.add(node)
        try:
            found = tuple(dict.fromkeys(self._find_names(node)))
        finally:
            self._naming.discard(node)
        if self._circles == circles or not self._naming:
            self._names[node] = found
        return found

    def _find_names(self, node: ast.Name | ast.Attribute) -> Iterator[str]:
        bindings = self.bindings(node)
        for binding in bindings:
            if binding.kind == "import":
                yield binding.qualified
            elif binding.kind == "value" and binding.value is not None and not binding.path:
                yield from self.names(binding.value)
        if bindings:
            return
        if isinstance(node, ast.Attribute):
            for name in self.names(node.value):
                yield f"{name}.{node.attr}"
        elif hasattr(builtins, node.id):
            yield f"builtins.{node.id}"
        else:
            for module in self._scopes.stars:
                yield f"{module}.{node.id}"

    def bindings(self, node: ast.AST) -> Sequence[Binding]:
        """What the name or dotted place that an expression spells is bound to."""
        if node not in self._bindings:
            self._bindings[node] = self._find_bindings(node)
        return self._bindings[node]

    def _find_bindings(self, node: ast.AST) -> Sequence[Binding]:
        place = dotted(node)
        if not place:
            return ()
        head, dot, rest = place.partition(".")
        if dot and (owner := self._scopes.owner_of(node, head)) is not None:
            return self._attribute(owner, rest, frozenset())
        return self._scopes.bindings(place, node)

    def _attribute(self, owner: ast.ClassDef, name: str, seen: frozenset[ast.AST]) -> Sequence[Binding]:
        """An attribute of a class of this file, or of those of its bases that are in this file."""
        if found := self._scopes.attributes(owner, name):
            return found
        for base in owner.bases:
            definition = self._definition(base)
            known = isinstance(definition, ast.ClassDef) and definition not in seen
            if known and (found := self._attribute(cast("ast.ClassDef", definition), name, seen | {owner})):
                return found
        return ()

    def _definition(self, node: ast.AST) -> ast.AST | None:
        bindings = self.bindings(node)
        return bindings[0].node if len(bindings) == 1 and bindings[0].kind == "definition" else None

    def evaluate(self, node: ast.AST) -> Possible:
        """What an expression may be."""
        if node in self._known:
            return self._known[node]
        if node in self._provisional:
            return self._provisional[node]
        if node in self._running or len(self._running) > _DEEP:
            self._circles += 1
            return _UNKNOWN
        circles = self._circles
        self._running.add(node)
        try:
            found = self._evaluate(node)
        finally:
            self._running.discard(node)
        if not self._running:
            self._provisional.clear()
        if not self._running or self._circles == circles:
            self._known[node] = found
        else:
            # What was found while a question about itself was open may lack something: it serves for the question that is open only.
            self._provisional[node] = found
        return found

    def _evaluate(self, node: ast.AST) -> Possible:
        if isinstance(node, ast.Constant):
            return Possible(() if node.value is None else (Constant(value=node.value),), True)
        if isinstance(node, (ast.Name, ast.Attribute)):
            return self._place(node)
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.IfExp):
            return _union((self.evaluate(node.body), self.evaluate(node.orelse)))
        if isinstance(node, ast.BoolOp):
            return _union(self.evaluate(part) for part in node.values)
        if isinstance(node, ast.NamedExpr):
            return self.evaluate(node.value)
        if isinstance(node, ast.Lambda):
            return Possible((Routine(node=node),), True)
        return self._element(node) if isinstance(node, ast.Subscript) else _UNKNOWN

    def _element(self, node: ast.Subscript) -> Possible:
        """What is taken from a table or a list. Scalers that are taken by other keys are others, even if one call makes them all."""
        container: ast.AST = node.value
        bindings = self.bindings(container)
        if len(bindings) == 1 and bindings[0].kind == "value" and not bindings[0].path and bindings[0].value is not None:
            container = bindings[0].value
        if isinstance(container, (ast.ListComp, ast.DictComp)):
            found = self.evaluate(container.elt if isinstance(container, ast.ListComp) else container.value)
        elif isinstance(container, (ast.Dict, ast.List, ast.Tuple)):
            found = _union(self.evaluate(value) for value in (container.values if isinstance(container, ast.Dict) else container.elts))
        else:
            return _UNKNOWN
        scalers = [value for value in found.values if isinstance(value, Scaler)]
        if not scalers:
            return found
        key = (scalers[0].node or container, ast.unparse(node))
        return Possible((self._unbound.setdefault(key, replace(scalers[0], place=key[1])),), len(scalers) == len(found.values))

    def _place(self, node: ast.Name | ast.Attribute) -> Possible:
        for name in self.names(node):
            module, _dot, last = name.rpartition(".")
            if module == "torch" and last in DTYPES:
                return Possible((Dtype(name=DTYPES[last]),), True)
        found = _union(self._bound(binding, node) for binding in self.bindings(node))
        if not any(isinstance(value, Scaler) for value in found.values) and (unbound := self._scaler_by_use(node, found)) is not None:
            return Possible((unbound,), False)
        return found

    def _scaler_by_use(self, node: ast.Name | ast.Attribute, found: Possible) -> Scaler | None:
        place = dotted(node)
        if found.complete or not place:
            return None
        bindings = self.bindings(node)
        if place not in self._used and not any(annotates_scaler(binding.node) for binding in bindings):
            return None
        # The same variable gives the same scaler: known by where it is bound, or by its function where it is bound nowhere.
        anchor = bindings[0].node if bindings else (self._syntax.owner(node) or self._syntax.tree)
        key = (anchor, place)
        if key not in self._unbound:
            self._unbound[key] = Scaler(node=None, place=place)
        return self._unbound[key]

    def _bound(self, binding: Binding, at: ast.AST) -> Possible:
        if binding.kind == "definition":
            node = binding.node
            assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            return Possible((Routine(node=node, bound=isinstance(at, ast.Attribute) and is_method(self._syntax, node)),), True)
        if binding.kind == "parameter":
            return self._parameter(binding.node)
        if binding.value is None or binding.kind in {"import", "unknown"}:
            return _UNKNOWN
        if binding.kind == "element":
            return _union(self._selected(element, binding.path) for element in elements_of(binding))
        return self._selected(binding.value, binding.path)

    def _selected(self, value: ast.expr, path: tuple[int, ...]) -> Possible:
        """One element of a value that is unpacked, or the value itself."""
        if not path:
            return self.evaluate(value)
        if (value, path) in self._selecting or len(path) > 6:
            self._circles += 1
            return _UNKNOWN
        self._selecting.add((value, path))
        try:
            return self._find_selected(value, path)
        finally:
            self._selecting.discard((value, path))

    def _find_selected(self, value: ast.expr, path: tuple[int, ...]) -> Possible:
        if isinstance(value, (ast.Tuple, ast.List)):
            index, *rest = path
            if index < len(value.elts) and not any(isinstance(part, ast.Starred) for part in value.elts[: index + 1]):
                return self._selected(value.elts[index], tuple(rest))
            return _UNKNOWN
        if isinstance(value, ast.IfExp):
            return _union((self._selected(value.body, path), self._selected(value.orelse, path)))
        if isinstance(value, ast.Call):
            return _union(self._selected(returned, path) for returned in self.returned(value))
        bindings = self.bindings(value) if isinstance(value, (ast.Name, ast.Attribute)) else ()
        if len(bindings) == 1 and bindings[0].kind == "value" and bindings[0].value is not None:
            return self._selected(bindings[0].value, (*bindings[0].path, *path))
        return _UNKNOWN

    def routines(self, call: ast.Call) -> list[Routine]:
        """The functions, methods, lambdas and classes of this file that a call may reach."""
        function = call.func
        last = last_name(function)
        if last and last not in self._callables:
            return []
        return [value for value in self.evaluate(function).values if isinstance(value, Routine)]

    @cached_property
    def _callables(self) -> frozenset[str]:
        return callable_names(self._syntax)

    def returned(self, call: ast.Call) -> list[ast.expr]:
        """The expressions that a call of a function of this file may give back."""
        found: list[ast.expr] = []
        for routine in self.routines(call):
            if isinstance(routine.node, ast.Lambda):
                found.append(routine.node.body)
            elif isinstance(routine.node, ast.FunctionDef):
                if routine.node not in self._returns:
                    self._returns[routine.node] = list(self._results(routine.node))
                found.extend(self._returns[routine.node])
        return found

    def _results(self, function: ast.FunctionDef) -> Iterator[ast.expr]:
        managed = any(name.endswith("contextmanager") for mark in function.decorator_list for name in self.names(mark))
        for node in ast.walk(function):
            if isinstance(node, ast.Return) and node.value is not None and self._syntax.function(node) is function:
                yield node.value
            elif managed and isinstance(node, ast.Yield):
                # What a context manager of this file holds open while its body runs.
                for holder, part in self._syntax.ancestors(node):
                    if isinstance(holder, ast.With) and part in holder.body:
                        yield from (item.context_expr for item in holder.items)

    def _call(self, written: ast.Call) -> Possible:
        call = self._unfolded(written)
        for name in self.names(call.func):
            made = construct(call, name, self.evaluate)
            if made is not None:
                return self._one(written, made if call is written else replace(made, node=written))
            if name in _WRAPPERS or name.rpartition(".")[2] in _WRAPPER_CLASSES:
                return self.evaluate(call.args[0]) if call.args else _UNKNOWN
            if name == "contextlib.nullcontext":
                return Possible((), True)
        if isinstance(call.func, ast.Attribute) and call.func.attr in _SAME_MODULE:
            inner = self.evaluate(call.func.value)
            if any(isinstance(value, Network) for value in inner.values):
                return inner
        return self._own_call(call)

    def _unfolded(self, call: ast.Call) -> ast.Call:
        """A call of what functools.partial() made, with all of its arguments."""
        bindings = self.bindings(call.func)
        if len(bindings) != 1 or not isinstance(partial := bindings[0].value, ast.Call) or not partial.args or bindings[0].path:
            return call
        if "functools.partial" not in self.names(partial.func):
            return call
        whole = ast.Call(func=partial.args[0], args=[*partial.args[1:], *call.args], keywords=[*partial.keywords, *call.keywords])
        return ast.copy_location(whole, call)

    def _own_call(self, call: ast.Call) -> Possible:
        made: list[Possible] = []
        for routine in self.routines(call):
            if isinstance(routine.node, ast.ClassDef):
                made.append(self._instance(routine.node, call))
        made.extend(self.evaluate(value) for value in self.returned(call))
        return _union(made)

    def _instance(self, definition: ast.ClassDef, call: ast.Call) -> Possible:
        for name in self.base_names(definition):
            if name.startswith("torch.nn.") or name.endswith("LightningModule"):
                return self._one(call, Network(node=call, name=definition.name, definition=definition))
            if name.endswith("GradScaler"):
                return self._one(call, Scaler(node=call, name=definition.name))
        return _UNKNOWN

    def _one(self, call: ast.Call, made: Made) -> Possible:
        """What a call makes: one and the same, even where the call is evaluated again."""
        return Possible((self._made.setdefault(call, made),), True)

    def base_names(self, definition: ast.ClassDef) -> list[str]:
        """The full names of the classes from elsewhere that a class of this file derives from, directly or through others of this file."""
        found: list[str] = []
        pending, seen = [definition], {definition}
        while pending:
            for base in pending.pop().bases:
                found.extend(self.names(base))
                inner = self._definition(base)
                if isinstance(inner, ast.ClassDef) and inner not in seen:
                    seen.add(inner)
                    pending.append(inner)
        return found

    def given(self, parameter: ast.AST) -> list[ast.expr | None]:
        """What each call in this file passes for a parameter; `None` where a call leaves it to its default."""
        function = self._syntax.parent(self._syntax.parent(parameter) or parameter)
        if not isinstance(function, FUNCTIONS) or not isinstance(parameter, ast.arg):
            return []
        return [passed(call, function, parameter.arg, bound=bound) for call, bound in self._sites.of(function)]

    def _parameter(self, parameter: ast.AST) -> Possible:
        """What the calls in this file pass for a parameter, and its default."""
        function = self._syntax.parent(self._syntax.parent(parameter) or parameter)
        if not isinstance(function, FUNCTIONS) or not isinstance(parameter, ast.arg):
            return _UNKNOWN
        given = self.given(parameter)
        parts = [self.evaluate(value) for value in given if value is not None]
        default = default_of(function, parameter)
        if default is not None and (len(parts) < len(given) or not given):
            parts.append(self.evaluate(default))
        found = _union(parts)
        return Possible(found.values, found.complete and bool(given))
