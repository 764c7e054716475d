"""Norms, softmaxes and attention scores that are written out."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, final

from halfstep.lint.evidence.bindings import Reaching
from halfstep.lint.module import Module
from halfstep.lint.scopes import last_name

__all__ = ["Product", "Scaling", "Square", "exponential_ratios", "scaled_products", "squares"]

_ROOTS: Final = frozenset(("sqrt", "rsqrt", "sqrt_", "rsqrt_"))
_TRANSPOSED: Final = frozenset(("transpose", "permute", "t", "swapaxes", "swapdims", "mT", "T", "mH"))
_PRODUCTS: Final = frozenset(("matmul", "bmm", "mm", "einsum"))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Square:
    """A square whose mean or sum goes into a root.

    Attributes:
        node: The square.
        operand: What is squared.
        operands: Each time that it is written.
    """

    node: ast.expr
    operand: ast.expr
    operands: tuple[ast.expr, ...]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A matrix product of queries and keys.

    Attributes:
        node: The product.
        first: The queries.
    """

    node: ast.BinOp | ast.Call
    first: ast.expr


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """A product that is scaled before it goes into a softmax.

    Attributes:
        node: The expression or statement that scales it.
        product: The product.
        factor: What it is multiplied with or divided by.
        divides: Whether it is divided.
        statement: The statement that does nothing else; `None` where the scaling is part of the expression of the product.
        movable: Whether the factor can be written at the product just as well.
    """

    node: ast.expr
    product: Product
    factor: ast.expr
    divides: bool
    statement: ast.stmt | None
    movable: bool


def squares(module: Module) -> Iterator[Square]:
    """The squares, and the variances, of which a norm by hand takes the root."""
    for node in module.nodes(ast.BinOp, ast.Call):
        found = _square_of(node, module) if isinstance(node, ast.BinOp | ast.Call) else None
        if found is not None and _goes_into_root(found.node, module):
            yield found


def _square_of(node: ast.BinOp | ast.Call, module: Module) -> Square | None:
    if isinstance(node, ast.BinOp):
        if isinstance(node.op, ast.Mult) and module.source(node.left) == module.source(node.right):
            return Square(node=node, operand=node.left, operands=(node.left, node.right))
        if isinstance(node.op, ast.Pow) and isinstance(node.right, ast.Constant) and node.right.value == 2:
            return Square(node=node, operand=node.left, operands=(node.left,))
        return None
    if not isinstance(node.func, ast.Attribute) or node.func.attr not in {"pow", "square", "var"}:
        return None
    function = module.name(node.func).startswith("torch")
    arguments = node.args if function else [node.func.value, *node.args]
    if not arguments or (node.func.attr == "pow" and not (len(arguments) > 1 and module.constant(arguments[1]) == 2)):
        return None
    return Square(node=node, operand=arguments[0], operands=(arguments[0],))


def _goes_into_root(node: ast.expr, module: Module) -> bool:
    """Whether the mean, or the sum, of a square is taken and then its root, here or by way of a variable."""
    reduced = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "var"
    for holder, part in module.syntax.ancestors(node):
        if isinstance(holder, ast.Call) and part in holder.args:
            last = holder.func.attr if isinstance(holder.func, ast.Attribute) else ""
            if last in _ROOTS:
                return reduced
            reduced = reduced or last in {"mean", "sum"}
        elif isinstance(holder, ast.Attribute) and isinstance(module.parent(holder), ast.Call):
            if holder.attr in _ROOTS:
                return reduced
            reduced = reduced or holder.attr in {"mean", "sum"}
        elif isinstance(holder, ast.BinOp) and isinstance(holder.op, ast.Pow) and part is holder.left and _is_root(holder.right, module):
            return reduced
        elif isinstance(holder, ast.Assign) and len(holder.targets) == 1 and isinstance(holder.targets[0], ast.Name):
            return reduced and _is_rooted(holder.targets[0], module)
        elif isinstance(holder, ast.stmt):
            return False
    return False


def _is_root(node: ast.expr, module: Module) -> bool:
    value = module.constant(node)
    return isinstance(value, float) and abs(value) == 0.5


def _is_rooted(name: ast.Name, module: Module) -> bool:
    """Whether the root of a variable is taken in its function."""
    function = module.function(name)
    for read in module.nodes(ast.Name):
        if read.id != name.id or isinstance(read.ctx, ast.Store) or module.function(read) is not function:
            continue
        for holder, part in module.syntax.ancestors(read):
            if isinstance(holder, ast.Attribute) and holder.attr in _ROOTS:
                return True
            if (
                isinstance(holder, ast.Call)
                and part in holder.args
                and isinstance(holder.func, ast.Attribute)
                and holder.func.attr in _ROOTS
            ):
                return True
            if isinstance(holder, ast.BinOp) and isinstance(holder.op, ast.Pow) and part is holder.left and _is_root(holder.right, module):
                return True
            if isinstance(holder, ast.stmt):
                break
    return False


def exponential_ratios(module: Module) -> Iterator[tuple[ast.BinOp, ast.Call]]:
    """The softmaxes that are written as `exp(x) / exp(x).sum()`, with the exponential."""
    reaching = Reaching(module)
    for node in module.nodes(ast.BinOp):
        if not isinstance(node.op, ast.Div) or not isinstance(node.right, ast.Call | ast.BinOp):
            continue
        exponential = _exponential(node.left, module, reaching)
        summed = module.source(node.left)
        if exponential is not None and any(
            isinstance(part, ast.Call) and last_name(part.func) == "sum" and summed in module.source(part) for part in ast.walk(node.right)
        ):
            yield node, exponential


def _exponential(node: ast.expr, module: Module, reaching: Reaching) -> ast.Call | None:
    if isinstance(node, ast.Name):
        bindings = reaching.bindings(node)
        bound = bindings[0].value if len(bindings) == 1 and not bindings[0].path else None
        return _exponential(bound, module, reaching) if isinstance(bound, ast.Call) else None
    if not isinstance(node, ast.Call) or last_name(node.func) != "exp" or not isinstance(node.func, ast.Attribute):
        return None
    argument = node.args[0] if node.args else node.func.value
    if isinstance(argument, ast.Name):
        bindings = reaching.bindings(argument)
        argument = bindings[0].value if len(bindings) == 1 and bindings[0].value is not None else argument
    # What the largest value is taken off from stays below 1.
    return None if isinstance(argument, ast.BinOp) and isinstance(argument.op, ast.Sub) else node


def scaled_products(module: Module) -> Iterator[Scaling]:
    """The attention scores that are scaled after the product of queries and keys, and go into a softmax."""
    if "oftmax" not in module.text:
        return
    reaching = Reaching(module)
    for node in module.nodes(ast.BinOp):
        if not isinstance(node.op, ast.Mult | ast.Div):
            continue
        pairs = [(node.left, node.right)] if isinstance(node.op, ast.Div) else [(node.left, node.right), (node.right, node.left)]
        for scores, factor in pairs:
            found = _scaling(node, scores, factor, module, reaching)
            if found is not None and _goes_into_softmax(node, module):
                yield found


def _scaling(node: ast.BinOp, scores: ast.expr, factor: ast.expr, module: Module, reaching: Reaching) -> Scaling | None:
    value = module.constant(factor)
    if isinstance(value, int | float) and (value > 1) != isinstance(node.op, ast.Div):
        return None  # Made larger, not smaller.
    divides = isinstance(node.op, ast.Div)
    product = _product(scores, module, reaching)
    if product is not None:
        return Scaling(node=node, product=product, factor=factor, divides=divides, statement=None, movable=_has_first(product))
    if not isinstance(scores, ast.Name):
        return None
    bindings = reaching.bindings(scores)
    bound = bindings[0].value if len(bindings) == 1 and not bindings[0].path else None
    product = _product(bound, module, reaching) if bound is not None else None
    if product is None:
        return None
    statement = module.statement(node)
    alone = (
        isinstance(statement, ast.Assign) and statement.value is node and [module.key(each) for each in statement.targets] == [scores.id]
    )
    movable = alone and _has_first(product) and _follows(statement, module.statement(bindings[0].node), module)
    return Scaling(node=node, product=product, factor=factor, divides=divides, statement=statement if alone else None, movable=movable)


def _has_first(product: Product) -> bool:
    return not (
        isinstance(product.node, ast.Call) and isinstance(product.node.func, ast.Attribute) and product.node.func.value is product.first
    )


def _follows(statement: ast.stmt, before: ast.stmt, module: Module) -> bool:
    """Whether a statement comes right behind another one."""
    holder = module.parent(statement)
    for block in ("body", "orelse", "finalbody"):
        statements = getattr(holder, block, None)
        if isinstance(statements, list) and statement in statements and before in statements:
            return statements.index(statement) == statements.index(before) + 1
    return False


def _product(node: ast.expr, module: Module, reaching: Reaching) -> Product | None:
    """A product of queries with transposed keys, unless it is that of vectors of length one."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        operands = [node.left, node.right]
        found = Product(node=node, first=node.left)
    elif isinstance(node, ast.Call) and last_name(node.func) in _PRODUCTS:
        function = module.name(node.func).startswith("torch")
        operands = [*node.args] if function or not isinstance(node.func, ast.Attribute) else [node.func.value, *node.args]
        if last_name(node.func) == "einsum":
            operands = operands[1:]
        if len(operands) < 2:
            return None
        found = Product(node=node, first=operands[0])
    else:
        return None
    transposed = (isinstance(node, ast.Call) and last_name(node.func) == "einsum") or _is_transposed(operands[1], module, reaching)
    return None if not transposed or any(_is_normalized(each, reaching) for each in operands) else found


def _is_transposed(node: ast.expr, module: Module, reaching: Reaching) -> bool:
    for part in ast.walk(_bound(node, reaching)):
        if isinstance(part, ast.Attribute) and part.attr in _TRANSPOSED:
            return True
    return any(isinstance(part, ast.Attribute) and part.attr in _TRANSPOSED for part in ast.walk(node))


def _is_normalized(node: ast.expr, reaching: Reaching) -> bool:
    """Whether an operand is shown to be small: a unit vector, or what comes out of a norm."""
    for part in (*ast.walk(node), *ast.walk(_bound(node, reaching))):
        if isinstance(part, ast.Call) and ("norm" in last_name(part.func).lower() or last_name(part.func) == "softmax"):
            return True
    return False


def _bound(node: ast.expr, reaching: Reaching) -> ast.expr:
    """What a variable has been given last, as far as there is one such expression."""
    if not isinstance(node, ast.Name):
        return node
    bindings = reaching.bindings(node)
    if len(bindings) != 1 or bindings[0].value is None:
        return node
    value, path = bindings[0].value, bindings[0].path
    if path and isinstance(value, ast.Tuple) and path[0] < len(value.elts):
        return value.elts[path[0]]
    return value


def _goes_into_softmax(node: ast.expr, module: Module) -> bool:
    """Whether a value goes into a softmax in its function, on the spot or by way of variables."""
    derived: set[str] = set()
    for holder, part in module.syntax.ancestors(node):
        if isinstance(holder, ast.Call) and _is_softmax(holder) and part is not holder.func:
            return True
        if isinstance(holder, ast.Attribute) and holder.attr == "softmax":
            return True
        if isinstance(holder, ast.Assign):
            derived |= {target.id for target in holder.targets if isinstance(target, ast.Name)}
        if isinstance(holder, ast.stmt):
            break
    return bool(derived) and _reaches_softmax(module.statement(node), derived, module)


def _reaches_softmax(start: ast.stmt, derived: set[str], module: Module) -> bool:
    function, order = module.function(start), module.syntax.order
    for node in module.nodes(ast.Assign, ast.Call):
        if order(node) <= order(start) or module.function(node) is not function:
            continue
        if isinstance(node, ast.Call) and _is_softmax(node):
            if any(isinstance(part, ast.Name) and part.id in derived for part in ast.walk(node)):
                return True
        elif isinstance(node, ast.Assign) and any(isinstance(part, ast.Name) and part.id in derived for part in ast.walk(node.value)):
            derived = derived | {target.id for target in node.targets if isinstance(target, ast.Name)}
    return False


def _is_softmax(call: ast.Call) -> bool:
    # `nn.Softmax(dim=-1)(scores)` calls what a call has made.
    made = call.func if isinstance(call.func, ast.Call) else call
    return "softmax" in last_name(made.func).lower()
