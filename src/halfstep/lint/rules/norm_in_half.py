"""A norm or a softmax that is written out, and overflows in float16 where torch's own does not."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import chain
from typing import final

from halfstep.lint.edits import DeleteStatement, Edit, ReplaceExpression
from halfstep.lint.evidence.patterns import Product, Scaling, exponential_ratios, scaled_products, squares
from halfstep.lint.evidence.precision import gather
from halfstep.lint.evidence.questions import depends_on_dtype
from halfstep.lint.evidence.relevance import may_be_half
from halfstep.lint.evidence.spelling import as_float, grouped, part_of, quoted
from halfstep.lint.module import Module
from halfstep.lint.rules.rule import AbstractRule, Bad, Finding, Fix

__all__ = ["NormInHalf"]


@final
class NormInHalf(AbstractRule):
    """`x * torch.rsqrt((x * x).mean(-1) + eps)` on float16 values."""

    code = "HS025"
    name = "norm_in_half"
    severity = "warning"
    summary = "A norm or a softmax that is written out overflows in float16, where torch's own would not."
    explanation = """
float16 ends at 65504. Written out, the parts of a norm or of a softmax pass that early:

- a square at 256: `rsqrt(inf)` is 0, so a hand-written RMSNorm gives zeros, and no NaN tells of it;
- `exp(x)` at 11.1: `inf / inf` is NaN;
- the scores of an attention, `(q @ k.transpose(-2, -1)) * scale`, before the scale has made them smaller: with 128 channels the raw
  products are 11 times as large as the scores, and the softmax of `inf` is NaN.

torch's own functions keep such parts in float32: use `F.rms_norm`, `F.layer_norm`, `torch.softmax`, `F.scaled_dot_product_attention`. By
hand, square and sum `x.float()`, take the largest value off before `exp`, and scale `q` before the product: `(q * scale) @ k` is the same
in exact arithmetic.

The rule fires where the values are shown to be float16. `pow`, `exp` and `sum` are float32 under CUDA autocast, but `x * x` is not, and
neither is any of them in a model that is float16 as a whole or under CPU autocast.

The fix scales `q` first, which is safe where the scale is a number, or computes the norm of `x.float()`. The latter is unsafe, since the
result is float32 then.
"""
    bad = (
        Bad(
            code="""import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.fc = nn.Linear(dim, dim)
        self.gain = nn.Parameter(torch.ones(dim))

    @torch.autocast("cuda", dtype=torch.float16)
    def forward(self, x):
        y = self.fc(x)
        power = (y * y).mean(dim=-1, keepdim=True)
        return y * torch.rsqrt(power + 1e-5) * self.gain
""",
            line=14,
            fixed="""import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.fc = nn.Linear(dim, dim)
        self.gain = nn.Parameter(torch.ones(dim))

    @torch.autocast("cuda", dtype=torch.float16)
    def forward(self, x):
        y = self.fc(x)
        power = (y.float() * y.float()).mean(dim=-1, keepdim=True)
        return y * torch.rsqrt(power + 1e-5) * self.gain
""",
        ),
        Bad(
            code="""import math

import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)
        self.scale = dim**-0.5

    @torch.autocast("cuda", dtype=torch.float16)
    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = (q @ k.transpose(-2, -1)) * self.scale
        return torch.softmax(scores, dim=-1) @ v
""",
            line=16,
            fixed="""import math

import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)
        self.scale = dim**-0.5

    @torch.autocast("cuda", dtype=torch.float16)
    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = (q * self.scale) @ k.transpose(-2, -1)
        return torch.softmax(scores, dim=-1) @ v
""",
        ),
        Bad(
            code="""import math

import torch


@torch.autocast("cuda", dtype=torch.float16)
def attend(query, key, value):
    scores = torch.matmul(query, key.transpose(-1, -2))
    scores = scores / math.sqrt(query.size(-1))
    weights = torch.softmax(scores, dim=-1)
    return torch.matmul(weights, value)
""",
            line=9,
            fixed="""import math

import torch


@torch.autocast("cuda", dtype=torch.float16)
def attend(query, key, value):
    scores = torch.matmul(query / math.sqrt(query.size(-1)), key.transpose(-1, -2))
    weights = torch.softmax(scores, dim=-1)
    return torch.matmul(weights, value)
""",
        ),
        Bad(
            code="""def attention_weights(logits):
    logits = logits.half()
    weights = logits.exp()
    return weights / weights.sum(dim=-1, keepdim=True)
""",
            line=4,
        ),
    )
    good = (
        """import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.fc = nn.Linear(dim, dim)

    @torch.autocast("cuda", dtype=torch.float16)
    def forward(self, x):
        y = self.fc(x)
        return y * torch.rsqrt(y.pow(2).mean(dim=-1, keepdim=True) + 1e-5)  # pow() is float32 there
""",
        """import torch


@torch.autocast("cuda", dtype=torch.float16)
def attend(q, k, v):
    scores = (q * 0.125) @ k.transpose(-2, -1)
    return torch.softmax(scores, dim=-1) @ v
""",
        """import torch
import torch.nn.functional as F


@torch.autocast("cuda", dtype=torch.float16)
def contrast(image, text, logit_scale):
    image, text = F.normalize(image, dim=-1), F.normalize(text, dim=-1)
    scores = (image @ text.t()) * logit_scale
    return torch.softmax(scores, dim=-1)
""",
        """def rms(x):
    y = x.half().float()
    return y * ((y * y).mean(dim=-1, keepdim=True) + 1e-5).rsqrt()
""",
        """def attention_weights(logits):
    logits = logits.half()
    weights = (logits - logits.amax(dim=-1, keepdim=True)).exp()
    return weights / weights.sum(dim=-1, keepdim=True)
""",
        """import torch


@torch.autocast("cuda", dtype=torch.bfloat16)
def attend(q, k, v):
    scores = (q @ k.transpose(-2, -1)) * 0.125
    return torch.softmax(scores, dim=-1) @ v
""",
    )

    def check(self, module: Module) -> Iterator[Finding]:
        """Yields the squares, exponentials and scores that float16 cannot hold."""
        if not may_be_half(module):
            return
        for finding in chain(_squares(module), _exponentials(module), _products(module)):
            if not depends_on_dtype(finding.node, module):
                yield finding


def _squares(module: Module) -> Iterator[Finding]:
    for square in squares(module):
        reason = gather(module).half(square.node)
        if reason:
            what = quoted(square.node, module, 40)
            message = (
                f"{what} is float16 ({reason}) and overflows where a value reaches 256, and its root is wrong: `rsqrt(inf)` is 0. "
                f"Compute the norm of {quoted(square.operand, module, 30)} in float32, or use torch's own norm."
            )
            edits = tuple(ReplaceExpression(node=each, code=as_float(each, module)) for each in square.operands)
            yield Finding(node=square.node, message=message, fix=Fix(edits=edits, safety="unsafe"))


def _exponentials(module: Module) -> Iterator[Finding]:
    for ratio, exponential in exponential_ratios(module):
        reason = gather(module).half(exponential)
        if reason:
            message = (
                f"{quoted(exponential, module, 40)} is float16 ({reason}) and overflows where its argument reaches 11.1: inf / inf is NaN. "
                "Use `torch.softmax`, which takes the largest value off first."
            )
            yield Finding(node=ratio, message=message)


def _products(module: Module) -> Iterator[Finding]:
    for scaling in scaled_products(module):
        reason = gather(module).half(scaling.product.node)
        if reason:
            query, factor = quoted(scaling.product.first, module, 30), quoted(scaling.factor, module, 30)
            scores = quoted(scaling.product.node, module, 40)
            message = (
                f"The scores {scores} are scaled by {factor} only after they are stored in float16 ({reason}): "
                f"raw products beyond 65504 are inf, and the softmax gives NaN. Scale {query} before the product, or use "
                "`F.scaled_dot_product_attention`."
            )
            yield Finding(node=scaling.node, message=message, fix=_scaled_first(scaling, module))


def _scaled_first(scaling: Scaling, module: Module) -> Fix | None:
    if not scaling.movable or scaling.node.lineno != scaling.node.end_lineno:
        return None
    evidence = gather(module)
    number = any(evidence.precision(scaling.factor, frame).kind == "number" for frame in evidence.ways(scaling.factor))
    sign = "/" if scaling.divides else "*"
    factor = grouped(scaling.factor, module)
    first = f"{grouped(scaling.product.first, module)} {sign} {factor}"
    edits: tuple[Edit, ...]
    if scaling.statement is not None:
        code = f"({first})" if isinstance(scaling.product.node, ast.BinOp) else first
        edits = (ReplaceExpression(node=scaling.product.first, code=code), DeleteStatement(statement=scaling.statement))
    else:
        edits = (ReplaceExpression(node=scaling.node, code=_whole(scaling.product, first, module)),)
    return Fix(edits=edits, safety="safe" if number else "unsafe")


def _whole(product: Product, first: str, module: Module) -> str:
    if isinstance(product.node, ast.BinOp):
        return f"({first}) @ {grouped(product.node.right, module)}"
    before, behind = part_of(product.node, product.first, module)
    return f"{before}{first}{behind}"
