"""Which values are half precision: followed forward from what makes them so, and through what autocast does to each operation."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final, final

from halfstep.lint.evidence import operations
from halfstep.lint.evidence.bindings import Reaching
from halfstep.lint.evidence.conversions import Conversions
from halfstep.lint.evidence.frames import Frame, Frames, Located
from halfstep.lint.evidence.kinds import NUMBER, SCALARS, UNKNOWN_NUMBERS, WIDE, Precision, is_root_below, is_size, spells_device, widest
from halfstep.lint.evidence.regions import Regions
from halfstep.lint.module import Module
from halfstep.lint.scopes import Binding
from halfstep.lint.syntax import FUNCTIONS, Function
from halfstep.lint.values import Network, Routine

__all__ = ["Evidence", "Precision", "gather"]

_DEPTH: Final = 60


@lru_cache(maxsize=1)
def gather(module: Module) -> Evidence:
    """The evidence of a file; asking again for the file that was asked for last costs nothing."""
    return Evidence(module)


@final
class Evidence:
    """Tells which expressions of a file are half precision.

    Args:
        module: The file.

    Attributes:
        frames: The ways in which its places are reached.
        regions: The autocast regions that are in force there.
        conversions: Which modules are converted to half precision.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        self.frames = Frames(module)
        self.regions = Regions(module, self.frames)
        self.conversions = Conversions(module)
        self._reaching = Reaching(module)
        self._known: dict[tuple[ast.AST, int], Precision] = {}
        self._keep: list[Frame] = []  # Whose identity stands in a key.
        self._open: set[tuple[ast.AST, int]] = set()

    def half(self, node: ast.expr) -> str:
        """Why an expression is half precision by one of the ways to it; empty where that is not shown."""
        for frame in self.frames.of(node):
            found = self.precision(node, frame)
            if found.kind == "half":
                return found.reason
        return ""

    def ways(self, node: ast.AST) -> Sequence[Frame]:
        """The ways in which a node is reached."""
        return self.frames.of(node)

    def precision(self, node: ast.expr, frame: Frame) -> Precision:
        """What is known about the numbers of an expression in a frame."""
        key = (node, id(frame))
        if key in self._known:
            return self._known[key]
        if key in self._open or len(self._open) > _DEPTH:
            return UNKNOWN_NUMBERS
        self._open.add(key)
        try:
            found = self._find(node, frame)
        finally:
            self._open.discard(key)
        self._known[key] = found
        self._keep.append(frame)
        return found

    def _find(self, node: ast.expr, frame: Frame) -> Precision:
        if isinstance(node, ast.Constant):
            return NUMBER if isinstance(node.value, int | float) else UNKNOWN_NUMBERS
        if isinstance(node, ast.Compare):
            return NUMBER
        if isinstance(node, ast.NamedExpr | ast.Starred | ast.Await):
            return self.precision(node.value, frame)
        if isinstance(node, ast.UnaryOp):
            return self.precision(node.operand, frame)
        if isinstance(node, ast.Subscript):
            return self.precision(node.value, frame)
        if isinstance(node, ast.IfExp):
            return self._either([Located(node.body, frame), Located(node.orelse, frame)])
        if isinstance(node, ast.BinOp):
            return self._operator(node, frame)
        if isinstance(node, ast.Call):
            return self._call(node, frame)
        if isinstance(node, ast.Name | ast.Attribute):
            return self._place(node, frame)
        return UNKNOWN_NUMBERS

    def _either(self, alternatives: Iterable[Located]) -> Precision:
        """What holds for all of several possibilities."""
        found = [self.precision(each.node, each.frame) for each in alternatives]
        kinds = {each.kind for each in found}
        return found[0] if len(kinds) == 1 else UNKNOWN_NUMBERS

    def _place(self, node: ast.Name | ast.Attribute, frame: Frame) -> Precision:
        if self._module.name(node):
            # Of torch and the standard library; `math.pi` is a number.
            return NUMBER if self._module.name(node).startswith(("math.", "numpy.")) else UNKNOWN_NUMBERS
        if isinstance(node, ast.Attribute):
            if node.attr in {"shape", "ndim", "dtype", "device", "training", "itemsize", "requires_grad"}:
                return NUMBER
            if node.attr in {"T", "mT", "H", "mH", "data"}:
                return self.precision(node.value, frame)
        bindings = self._reaching.bindings(node)
        if not bindings:
            return UNKNOWN_NUMBERS
        found = [self._bound(binding, node, frame) for binding in bindings]
        return found[0] if len({each.kind for each in found}) == 1 else UNKNOWN_NUMBERS

    def _bound(self, binding: Binding, node: ast.expr, frame: Frame) -> Precision:
        home = self._home(binding, frame)
        if binding.kind == "unknown" and isinstance(changed := self._module.parent(binding.node), ast.AugAssign):
            # What is changed in place keeps its type.
            before = self._reaching.bindings(changed.target)
            known = len(before) == 1 and before[0].node is not binding.node
            return self._bound(before[0], node, frame) if known else UNKNOWN_NUMBERS
        if binding.kind == "parameter":
            located = self.frames.argument(binding.node, home)
            if located is not None:
                return self.precision(located.node, located.frame)
            return self._by_name(binding.node)
        if binding.kind == "element":
            located = self.frames.follow(binding, home)
            return UNKNOWN_NUMBERS if located is None else self.precision(located.node, located.frame)
        if binding.kind != "value" or binding.value is None:
            return UNKNOWN_NUMBERS
        return self._part(Located(binding.value, home), binding.path)

    def _home(self, binding: Binding, frame: Frame) -> Frame:
        """The frame of the function that a binding stands in, seen from a function that may lie inside of it."""
        function = self._module.function(binding.node)
        if isinstance(binding.node, ast.arg):
            holder = self._module.parent(self._module.parent(binding.node) or binding.node)
            function = holder if isinstance(holder, FUNCTIONS) else None
        seen: Frame | None = frame
        while seen is not None:
            if seen.function is function:
                return seen
            seen = seen.caller
        return Frame(function=function)

    def _by_name(self, parameter: ast.AST) -> Precision:
        return NUMBER if isinstance(parameter, ast.arg) and parameter.arg in SCALARS else UNKNOWN_NUMBERS

    def _part(self, located: Located, path: tuple[int, ...]) -> Precision:
        """One element of a value that is unpacked, or the value itself."""
        value, frame = located.node, located.frame
        for step, index in enumerate(path):
            if isinstance(value, ast.Tuple | ast.List):
                if index >= len(value.elts) or any(isinstance(each, ast.Starred) for each in value.elts):
                    return UNKNOWN_NUMBERS
                value = value.elts[index]
            else:
                return self._unpacked(value, path[step:], frame)
        return self.precision(value, frame)

    def _unpacked(self, value: ast.expr, path: tuple[int, ...], frame: Frame) -> Precision:
        if isinstance(value, ast.Attribute) and value.attr == "shape":
            return NUMBER
        if not isinstance(value, ast.Call):
            return self.precision(value, frame) if isinstance(value, ast.Subscript | ast.Name) else UNKNOWN_NUMBERS
        last = value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", "")
        if last in {"chunk", "split", "unbind", "tensor_split", "size"}:
            return self.precision(value, frame)
        if last in {"max", "min", "sort", "topk", "median"}:
            return self.precision(value, frame) if path == (0,) else NUMBER
        if last == "map" and len(value.args) == 2 and isinstance(function := value.args[0], ast.Lambda):
            # The same function for each of several tensors: its frame is that of its only parameter.
            inner = Frame(function=function, call=ast.Call(func=function, args=[value.args[1]], keywords=[]), caller=frame)
            return self.precision(function.body, inner)
        return UNKNOWN_NUMBERS

    def _operator(self, node: ast.BinOp, frame: Frame) -> Precision:
        left, right = self.precision(node.left, frame), self.precision(node.right, frame)
        if isinstance(node.op, ast.MatMult):
            return self._lowered(node, [left, right], frame)
        if isinstance(node.op, ast.Pow) and left.kind == "unknown" and is_root_below(node.right) and is_size(node.left):
            return NUMBER
        found = widest([left, right])
        reciprocal = isinstance(node.op, ast.Div) and left.kind == "number"
        if found.kind == "half" and (isinstance(node.op, ast.Pow) or reciprocal):
            return self._widened(node, found, frame)
        return found

    def _lowered(self, node: ast.expr, operands: Sequence[Precision], frame: Frame) -> Precision:
        """An operation that autocast runs in the type of its region."""
        if operands and all(each.kind == "number" for each in operands):
            return NUMBER
        force = self.regions.at(node, frame)
        if force is not None:
            if "fp16" in force.dtypes:
                return Precision("half", f"{self._what(node)} runs in float16 under the autocast region of line {force.node.lineno}")
            return WIDE if force.dtypes else UNKNOWN_NUMBERS
        return next((each for each in operands if each.kind == "half"), UNKNOWN_NUMBERS)

    def _what(self, node: ast.expr) -> str:
        text = self._module.source(node)
        short = text if len(text) <= 40 and "\n" not in text else f"{' '.join(text.split())[:37]}..."
        return f"`{short}` (line {node.lineno})"

    def _widened(self, node: ast.expr, operand: Precision, frame: Frame) -> Precision:
        """An operation that CUDA autocast runs in fp32, on a half operand."""
        force = self.regions.at(node, frame)
        if force is None or force.device == "cpu":
            return operand
        return WIDE if force.device is not None else UNKNOWN_NUMBERS

    def _call(self, node: ast.Call, frame: Frame) -> Precision:
        name = self._module.name(node.func)
        if name:
            return self._torch_function(node, name, frame)
        values = self._module.values(node.func)
        if len(values) == 1 and isinstance(network := values[0], Network):
            return self._network(node, network, frame)
        if values and all(isinstance(value, Routine) for value in values):
            return self._own_function(node, [value for value in values if isinstance(value, Routine)], frame)
        if isinstance(node.func, ast.Attribute):
            return self._method(node, node.func, frame)
        return UNKNOWN_NUMBERS

    def _torch_function(self, node: ast.Call, name: str, frame: Frame) -> Precision:
        module, _dot, last = name.rpartition(".")
        if module in {"math", "builtins"}:
            return NUMBER if last not in {"map", "zip", "list", "tuple", "getattr", "next"} else UNKNOWN_NUMBERS
        if module.startswith("einops"):
            return self.precision(node.args[0], frame) if node.args else UNKNOWN_NUMBERS
        if not module.startswith("torch"):
            return UNKNOWN_NUMBERS
        if module.startswith("torch.linalg"):
            last = f"linalg_{last}"
        if last in operations.FACTORIES:
            return self._typed(node, frame) or WIDE
        if last == "Parameter":
            return self.precision(node.args[0], frame) if node.args else UNKNOWN_NUMBERS
        tensors = node.args[1:] if last in {"where", "einsum"} else node.args[:1]
        if last in {"cat", "stack", "concat"} and node.args and isinstance(node.args[0], ast.Tuple | ast.List):
            tensors = node.args[0].elts
        elif last in operations.POINTWISE_BINARY or last in operations.LOWERED_OPERATIONS:
            tensors = node.args[:2] if last != "einsum" else node.args[1:]
        if last in {"where", "cat", "stack", "concat"}:
            last = "add"  # The widest type among them, too.
        return self._operation(node, last, [self.precision(each, frame) for each in tensors], frame)

    def _method(self, node: ast.Call, function: ast.Attribute, frame: Frame) -> Precision:
        if function.attr in {"float", "double", "bfloat16"}:
            return WIDE
        base = self.precision(function.value, frame)
        if function.attr == "half":
            is_module = any(isinstance(value, Network) for value in self._module.values(function.value))
            return UNKNOWN_NUMBERS if is_module else Precision("half", f"{self._what(node)} is float16")
        if function.attr in {"to", "type", "type_as"}:
            return self._cast(node, base, frame)
        operands = [base]
        if function.attr in operations.POINTWISE_BINARY or function.attr in operations.LOWERED_OPERATIONS:
            operands += [self.precision(each, frame) for each in node.args[:1]]
        if function.attr == "where" and len(node.args) == 2:
            return widest([base, self.precision(node.args[1], frame)])
        return self._operation(node, function.attr, operands, frame)

    def _cast(self, node: ast.Call, base: Precision, frame: Frame) -> Precision:
        if (typed := self._typed(node, frame)) is not None:
            return typed
        for argument in node.args:
            precision = self._dtype(argument, node, frame)
            if precision is not None:
                return precision
        last = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if last == "to" and len(node.args) == 1 and not spells_device(node.args[0]):
            return UNKNOWN_NUMBERS if self._module.dtypes(node.args[0]) else self.precision(node.args[0], frame)
        return base if last == "to" else UNKNOWN_NUMBERS

    def _typed(self, node: ast.Call, frame: Frame) -> Precision | None:
        """What the keyword `dtype` of a call asks for; `None` where it has none."""
        word = next((each.value for each in node.keywords if each.arg == "dtype"), None)
        if word is None:
            return None
        return self._dtype(word, node, frame) or UNKNOWN_NUMBERS

    def _dtype(self, word: ast.expr, node: ast.Call, frame: Frame) -> Precision | None:
        if isinstance(word, ast.Attribute) and word.attr == "dtype":
            return self.precision(word.value, frame)
        if not isinstance(word, ast.Name | ast.Attribute | ast.IfExp | ast.BoolOp):
            return None
        found = self.regions.dtypes(word, frame)
        if "fp16" in found:
            return Precision("half", f"{self._what(node)} is float16")
        return WIDE if found & {"bf16", "fp32", "float64"} else NUMBER if found else None

    def _operation(self, node: ast.Call, name: str, operands: Sequence[Precision], frame: Frame) -> Precision:
        if (typed := self._typed(node, frame)) is not None:
            return typed
        if name in operations.INTEGER_RESULTS:
            return NUMBER
        if name in operations.LOWERED_OPERATIONS:
            return self._lowered(node, operands, frame)
        found = widest(operands)
        if name in operations.LIKE_FACTORIES or name in operations.PRESERVING or name in operations.POINTWISE_BINARY:
            return found
        if name in operations.CUDA_FP32_OPERATIONS_AND_COMPOSITES:
            return self._reduced(node, name, found, frame)
        return UNKNOWN_NUMBERS

    def _reduced(self, node: ast.Call, name: str, operand: Precision, frame: Frame) -> Precision:
        force = self.regions.at(node, frame)
        if force is not None and force.device == "cuda":
            return WIDE
        if force is not None and force.device == "cpu" and name in operations.CPU_FP32_OPERATIONS:
            return WIDE
        return self._widened(node, operand, frame)

    def _network(self, node: ast.Call, network: Network, frame: Frame) -> Precision:
        if network.definition is not None:
            forward = self.frames.forward(network.definition)
            return UNKNOWN_NUMBERS if forward is None else self._returned(node, forward, frame, bound=True)
        last = network.name.rpartition(".")[2]
        operand = self.precision(node.args[0], frame) if node.args else UNKNOWN_NUMBERS
        if last == "Sequential":
            return self._sequential(node, network, operand, frame)
        return self._layer(node, network, operand, frame)

    def _layer(self, node: ast.Call, network: Network, operand: Precision, frame: Frame) -> Precision:
        last = network.name.rpartition(".")[2]
        if last in operations.LOWERED_MODULES:
            converted = self.conversions.half(network.node)
            if converted and self.regions.at(node, frame) is None:
                return Precision("half", f"{self._what(node)} has float16 weights ({converted})")
            return self._lowered(node, [operand], frame)
        if last in operations.ACTIVATIONS:
            return operand
        if last in operations.CUDA_FP32_MODULES:
            force = self.regions.at(node, frame)
            return WIDE if force is not None and force.device == "cuda" else self._widened(node, operand, frame)
        if last in operations.WIDE_MODULES and not self.conversions.half(network.node):
            return WIDE
        return UNKNOWN_NUMBERS

    def _sequential(self, node: ast.Call, network: Network, operand: Precision, frame: Frame) -> Precision:
        for part in network.node.args:
            value = self._module.value(part)
            if not isinstance(value, Network) or value.definition is not None or value.name.endswith("Sequential"):
                operand = UNKNOWN_NUMBERS
                continue
            operand = self._layer(node, value, operand, frame)
        return operand

    def _own_function(self, node: ast.Call, routines: Sequence[Routine], frame: Frame) -> Precision:
        reached = self.frames.resolve(node.func, frame)
        if reached is not None and isinstance(reached.node, ast.Lambda):
            routines = [each for each in routines if each.node is reached.node]
        if len(routines) != 1 or isinstance(routines[0].node, ast.ClassDef):
            return UNKNOWN_NUMBERS
        return self._returned(node, routines[0].node, frame, bound=routines[0].bound)

    def _returned(self, node: ast.Call, function: Function, frame: Frame, *, bound: bool) -> Precision:
        depth, seen = 0, frame
        while seen.caller is not None:
            depth, seen = depth + 1, seen.caller
        if depth > 3:
            return UNKNOWN_NUMBERS
        inner = Frame(function=function, call=node, bound=bound, caller=frame)
        if isinstance(function, ast.Lambda):
            return self.precision(function.body, inner)
        results = [each.value for each in ast.walk(function) if isinstance(each, ast.Return) and self._module.function(each) is function]
        if not results or any(each is None for each in results):
            return UNKNOWN_NUMBERS
        return self._either(Located(each, inner) for each in results if each is not None)
