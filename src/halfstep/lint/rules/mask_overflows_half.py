"""A mask constant that float16 cannot hold."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from halfstep.lint.edits import ReplaceExpression
from halfstep.lint.evidence.precision import Evidence, gather
from halfstep.lint.evidence.questions import depends_on_dtype
from halfstep.lint.evidence.relevance import may_be_half
from halfstep.lint.evidence.spelling import quoted, spell_torch
from halfstep.lint.module import Module
from halfstep.lint.rules.rule import AbstractRule, Bad, Finding, Fix, Safety
from halfstep.lint.scopes import last_name

__all__ = ["MaskOverflowsHalf"]

_LARGEST = 65504.0
_FILLS = frozenset(("masked_fill", "masked_fill_"))
_CLAMPS = frozenset(("clamp", "clamp_", "clip", "clip_", "clamp_min", "clamp_max"))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A constant that meets a tensor.

    Attributes:
        constant: The constant.
        tensor: The tensor; or, where a new one is made, the dtype that it is to have.
        raises: Whether torch refuses the constant; otherwise it stores an infinity in silence.
        safety: How safe it is to put the dtype's own limit in its place.
        what: What is done with the constant, for the message.
    """

    constant: ast.expr
    tensor: ast.expr
    raises: bool
    safety: Safety
    what: str


@final
class MaskOverflowsHalf(AbstractRule):
    """`scores.masked_fill(mask, -1e9)` on float16 scores."""

    code = "HS023"
    name = "mask_overflows_half"
    severity = "error"
    summary = "A mask constant such as `-1e9` is beyond 65504, the largest number of float16."
    explanation = """
float16 ends at 65504. A constant beyond that, such as `-1e9`, `-1e5` or `torch.finfo(torch.float32).min`, cannot be stored in it.
`masked_fill`, `full_like` and `clamp` say so: `RuntimeError: value cannot be converted to type c10::Half without overflow`. `torch.where`,
an assignment to a part of the tensor and an addition store `-inf` without a word, and a row that is masked as a whole becomes NaN in the
softmax.

Take the limit of the tensor's own type: `torch.finfo(scores.dtype).min` is -65504 in float16 and -3.4e38 in float32 and bfloat16, and the
same line works in all of them. It is meant as a replacement: never add it to something, since -65504 - 16 is `-inf` again. `float("-inf")`
is right as well, as long as no row is masked as a whole.

The rule fires where the tensor is shown to be float16: a product or a layer's output in a float16 autocast region, in the function itself
or in one that is called there, `.half()`, or `.to(torch.float16)`.

The fix puts `torch.finfo(x.dtype).min`, or `.max`, in the constant's place. It is safe where the constant replaces values, and unsafe where
it is added or multiplied.
"""
    bad = (
        Bad(
            code="""import torch


def attend(q, k, v, mask):
    with torch.autocast("cuda", dtype=torch.float16):
        scores = q @ k.transpose(-2, -1)
        scores = scores.masked_fill(mask, -1e9)
        return torch.softmax(scores, dim=-1) @ v
""",
            line=7,
            fixed="""import torch


def attend(q, k, v, mask):
    with torch.autocast("cuda", dtype=torch.float16):
        scores = q @ k.transpose(-2, -1)
        scores = scores.masked_fill(mask, torch.finfo(scores.dtype).min)
        return torch.softmax(scores, dim=-1) @ v
""",
        ),
        Bad(
            code="""import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim)

    def forward(self, x, mask):
        scores = torch.matmul(self.query(x) * 0.125, self.key(x).transpose(1, 2))
        scores = torch.where(mask, scores, -1e5)  # padding
        return scores.softmax(dim=-1)


def train(loader, optimizer, scaler, criterion):
    model = Attention(64).cuda()
    for x, mask, target in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda"):
            loss = criterion(model(x, mask), target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
            line=13,
            fixed="""import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim)

    def forward(self, x, mask):
        scores = torch.matmul(self.query(x) * 0.125, self.key(x).transpose(1, 2))
        scores = torch.where(mask, scores, torch.finfo(scores.dtype).min)  # padding
        return scores.softmax(dim=-1)


def train(loader, optimizer, scaler, criterion):
    model = Attention(64).cuda()
    for x, mask, target in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda"):
            loss = criterion(model(x, mask), target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
        ),
        Bad(
            code="""import torch


def causal_mask(n):
    return torch.full((n, n), torch.finfo(torch.float32).min, dtype=torch.float16).triu(1)
""",
            line=5,
            fixed="""import torch


def causal_mask(n):
    return torch.full((n, n), torch.finfo(torch.float16).min, dtype=torch.float16).triu(1)
""",
        ),
        Bad(
            code="""import torch


@torch.no_grad()
def scores_of(encoder, tokens, mask):
    scores = encoder(tokens).half()
    return scores + (1.0 - mask.half()) * -1e6
""",
            line=7,
        ),
    )
    good = (
        """import torch


def attend(q, k, v, mask):
    with torch.autocast("cuda", dtype=torch.float16):
        scores = (q @ k.transpose(-2, -1)).float()
        scores = scores.masked_fill(mask, -1e9)
        return torch.softmax(scores, dim=-1) @ v
""",
        """import torch


def attend(q, k, v, mask):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        scores = q @ k.transpose(-2, -1)
        scores = scores.masked_fill(mask, -1e9)
        return torch.softmax(scores, dim=-1) @ v
""",
        """import torch


def attend(q, k, v, mask):
    with torch.autocast("cuda", dtype=torch.float16):
        scores = q @ k.transpose(-2, -1)
        scores = scores.masked_fill(mask, float("-inf"))
        return torch.softmax(scores, dim=-1) @ v
""",
        """import torch


def attend(q, k, v, mask):
    with torch.autocast("cuda", dtype=torch.float16):
        scores = q @ k.transpose(-2, -1) + (1.0 - mask) * -10000.0
        weights = torch.softmax(scores, dim=-1)
        return weights.masked_fill(mask == 0, -1e9).amax(dim=-1)
""",
        """from torch import nn


class Attention(nn.Module):
    def forward(self, q, k, mask):
        scores = q @ k.transpose(-2, -1)
        return scores.masked_fill(mask, -1e9).softmax(dim=-1)
""",
    )

    def check(self, module: Module) -> Iterator[Finding]:
        """Yields the constants that do not fit into the float16 tensor that they meet."""
        if not may_be_half(module):
            return
        for place in _places(module):
            if _is_too_large(place.constant, module) and not depends_on_dtype(place.constant, module):
                reason = _reason(place, gather(module))
                if reason:
                    yield Finding(node=place.constant, message=_message(place, reason, module), fix=_fix(place, module))


def _places(module: Module) -> Iterator[_Place]:
    for node in module.nodes(ast.Call, ast.BinOp, ast.Assign):
        if isinstance(node, ast.Call):
            yield from _in_call(node, module)
        elif isinstance(node, ast.BinOp):
            yield from _in_sum(node)
        elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(target := node.targets[0], ast.Subscript):
            yield _Place(constant=node.value, tensor=target.value, raises=False, safety="safe", what="the assignment")


def _in_call(call: ast.Call, module: Module) -> Iterator[_Place]:
    last = last_name(call.func)
    if last not in _FILLS | _CLAMPS | {"where", "fill_", "full", "full_like", "new_full", "pad"}:
        return
    named = {word.arg: word.value for word in call.keywords if word.arg is not None}
    arguments = list(call.args)
    if not module.name(call.func).startswith("torch"):
        if not isinstance(call.func, ast.Attribute):
            return
        # A method: its object comes first. `x.where(mask, other)` is `torch.where(mask, x, other)`.
        arguments.insert(1 if last == "where" else 0, call.func.value)
    if last == "where":
        yield from _in_where(arguments)
    elif last in _CLAMPS:
        yield from _in_clamp(last, arguments, named)
    elif last == "full":
        if "dtype" in named and len(arguments) > 1:
            yield _Place(constant=arguments[1], tensor=named["dtype"], raises=True, safety="safe", what="`full`")
    else:
        value = named.get("value") or named.get("fill_value") or _value_argument(last, arguments)
        if value is not None and "dtype" in named:
            yield _Place(constant=value, tensor=named["dtype"], raises=True, safety="safe", what="`full`")
        elif value is not None and arguments:
            yield _Place(constant=value, tensor=arguments[0], raises=True, safety="safe", what=f"`{last}`")


def _value_argument(last: str, arguments: list[ast.expr]) -> ast.expr | None:
    index = {"fill_": 1, "full_like": 1, "pad": 3}.get(last, 2)
    return arguments[index] if len(arguments) > index else None


def _in_where(arguments: list[ast.expr]) -> Iterator[_Place]:
    if len(arguments) == 3:
        _mask, first, second = arguments
        for constant, tensor in ((first, second), (second, first)):
            yield _Place(constant=_unpacked(constant), tensor=tensor, raises=False, safety="safe", what="`where`")


def _unpacked(node: ast.expr) -> ast.expr:
    """The number in `torch.tensor(-1e9)`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in {"tensor", "new_tensor"} and node.args:
        return node.args[0]
    return node


def _in_clamp(last: str, arguments: list[ast.expr], named: dict[str, ast.expr]) -> Iterator[_Place]:
    if arguments:
        for constant in (*arguments[1:], *(named[key] for key in ("min", "max") if key in named)):
            yield _Place(constant=constant, tensor=arguments[0], raises=True, safety="safe", what=f"`{last}`")


def _in_sum(node: ast.BinOp) -> Iterator[_Place]:
    if isinstance(node.op, ast.Add | ast.Sub):
        pairs = [(node.right, node.left), (node.left, node.right)]
    elif isinstance(node.op, ast.Mult):
        # Only the turned mask, whose ones become the constant: what else is multiplied may be small.
        pairs = [(each, other) for each, other in ((node.right, node.left), (node.left, node.right)) if _is_turned(other)]
    else:
        return
    for constant, tensor in pairs:
        yield _Place(constant=constant, tensor=tensor, raises=False, safety="unsafe", what="the sum" if pairs[1:] else "the product")


def _is_turned(node: ast.expr) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and isinstance(node.left, ast.Constant) and node.left.value == 1


def _is_too_large(node: ast.expr, module: Module) -> bool:
    if isinstance(node, ast.UnaryOp):
        return _is_too_large(node.operand, module)
    if isinstance(node, ast.Attribute) and node.attr in {"min", "max"} and isinstance(node.value, ast.Call):
        return _is_wide_limit(node.value, module)
    value = module.constant(node)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return math.isfinite(value) and abs(value) > _LARGEST
    if isinstance(node, ast.Name | ast.Attribute):
        bindings = module.bindings(node)
        return len(bindings) == 1 and isinstance(bound := bindings[0].value, ast.Attribute | ast.UnaryOp) and _is_too_large(bound, module)
    return False


def _is_wide_limit(call: ast.Call, module: Module) -> bool:
    """Whether a call is `finfo` of a type that reaches further than float16."""
    if module.name(call.func).rpartition(".")[2] != "finfo":
        return False
    if not call.args:
        return True  # torch's default type.
    dtype = call.args[0]
    known = module.dtypes(dtype)
    return (bool(known) and known <= {"fp32", "bf16", "float64"}) or module.name(dtype) in {
        "numpy.float32",
        "numpy.float64",
        "builtins.float",
    }


def _reason(place: _Place, evidence: Evidence) -> str:
    if place.what == "`full`":
        for frame in evidence.ways(place.tensor):
            if isinstance(place.tensor, ast.Attribute) and place.tensor.attr == "dtype":
                found = evidence.precision(place.tensor.value, frame)
                if found.kind == "half":
                    return found.reason
            elif "fp16" in evidence.regions.dtypes(place.tensor, frame):
                return "its dtype is float16"
        return ""
    return evidence.half(place.tensor)


def _message(place: _Place, reason: str, module: Module) -> str:
    constant, tensor = quoted(place.constant, module, 40), quoted(place.tensor, module, 40)
    effect = "raises a RuntimeError" if place.raises else "stores an infinity without a word"
    subject = "the new tensor" if place.what == "`full`" else tensor
    limit = _limit(place, "torch", module) or "`torch.finfo` of the tensor's own dtype"
    advice = f"Use `{limit}`." if "`" not in limit else f"Take the limit from {limit}."
    return f"{constant} is beyond 65504, where float16 ends, and {subject} is float16 ({reason}): {place.what} {effect}. {advice}"


def _limit(place: _Place, torch: str, module: Module) -> str:
    """The limit of the tensor's own type; empty where the tensor has no name."""
    end = "max" if _is_positive(place.constant, module) else "min"
    if place.what == "`full`":
        return f"{torch}.finfo({module.source(place.tensor)}).{end}"
    return f"{torch}.finfo({module.key(place.tensor)}.dtype).{end}" if module.key(place.tensor) else ""


def _is_positive(node: ast.expr, module: Module) -> bool:
    value = module.constant(node)
    if isinstance(value, int | float):
        return value > 0
    if isinstance(node, ast.UnaryOp):
        return not _is_positive(node.operand, module)
    if isinstance(node, ast.Name):
        bound = module.bindings(node)[0].value
        return bound is not None and _is_positive(bound, module)
    return isinstance(node, ast.Attribute) and node.attr == "max"


def _fix(place: _Place, module: Module) -> Fix | None:
    torch, imports = spell_torch(module)
    code = _limit(place, torch, module)
    if not code:
        return None
    return Fix(edits=(ReplaceExpression(node=place.constant, code=code), *imports), safety=place.safety)
