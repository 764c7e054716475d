"""What a person may change in the code, by what broke there."""

from __future__ import annotations

import linecache
from collections.abc import Iterator
from typing import Final

from halfstep.records import UNKNOWN, OpRecord, Remedy, SourceLine, bare_name
from halfstep.records.formats import FORMATS
from halfstep.replay.alignment import Pair
from halfstep.replay.wording import HALF_LARGEST

__all__ = ["advice_for", "excerpt_of"]

# The smallest positive number of each format.
_SMALLEST: Final = {"float16": 2.0**-24, "bfloat16": 2.0**-133}

# So many lines are shown before and after the one that is meant.
_AROUND: Final = 3

# How far back a constant may have come into what broke.
_DEPTH: Final = 4

# What puts a constant into a mask, and what guards a quotient by one.
_FILLING: Final = frozenset({"where", "masked_fill", "full", "full_like", "fill", "scalar_tensor"})
_GUARDING: Final = frozenset({"add", "clamp", "clamp_min", "maximum", "sub", "rsub"})

_PRODUCTS: Final = frozenset({"mm", "bmm", "addmm", "baddbmm", "matmul"})
_SUMS: Final = frozenset({"sum", "mean", "cumsum", "prod", "cumprod", "logsumexp", "norm", "linalg_vector_norm", "var", "std"})
_LOGARITHMS: Final = frozenset({"log", "log2", "log10", "log1p", "binary_cross_entropy", "_log_softmax"})
_EXPONENTIALS: Final = frozenset({"exp", "expm1", "exp2", "sinh", "cosh"})
_QUOTIENTS: Final = frozenset({"div", "reciprocal", "rsqrt"})
_POWERS: Final = frozenset({"pow", "mul", "square"})


def advice_for(pair: Pair, index: int) -> tuple[Remedy, ...]:
    """What else may help where an operation broke: text alone, which nobody has tried.

    Args:
        pair: The run in which it broke, and the step in fp32.
        index: The index of the operation.
    """
    op = pair.low.ops[index]
    texts = [*_constants(pair, index), *(_habits(op) if op.nonfinite else ())]
    return tuple(Remedy(text=each, override=None, verified=False) for each in dict.fromkeys(texts))


def excerpt_of(op: OpRecord | None) -> tuple[SourceLine, ...]:
    """The source code around the line of an operation; empty where it cannot be read."""
    if op is None or op.site.file == UNKNOWN:
        return ()
    lines = linecache.getlines(op.site.file)
    if not 0 < op.site.line <= len(lines):
        return ()
    first, last = max(1, op.site.line - _AROUND), min(len(lines), op.site.line + _AROUND)
    return tuple(
        SourceLine(number=number, text=lines[number - 1].rstrip("\r\n"), is_marked=number == op.site.line)
        for number in range(first, last + 1)
    )


def _constants(pair: Pair, index: int) -> Iterator[str]:
    """Constants that half precision cannot hold, among the numbers that went into an operation."""
    op = pair.low.ops[index]
    dtype = next((each for each in (*op.output_dtypes, *op.input_dtypes) if each in HALF_LARGEST), "")
    if not dtype:
        return
    for where, number in _numbers(pair, index):
        size, place, name = abs(number), f"{where.site.file}:{where.site.line}", _name(where)
        if name in _FILLING and HALF_LARGEST[dtype] < size < float("inf"):
            yield (
                f"The constant {number:g} at {place} does not fit {FORMATS[dtype]}. Fill with torch.finfo(x.dtype).min or -inf, once, and "
                "combine masks as booleans before that."
            )
        elif name in _GUARDING and 0 < size < _SMALLEST[dtype] / 2:
            yield (
                f"The constant {number:g} at {place} is zero in {FORMATS[dtype]}, so it guards nothing. Use torch.finfo(x.dtype).tiny or "
                "more, or compute in fp32: x.float()."
            )


def _numbers(pair: Pair, index: int) -> Iterator[tuple[OpRecord, float]]:
    """The numbers among the arguments of an operation, and of those that its arguments come from."""
    waiting, seen = [(index, 0)], {index}
    while waiting:
        place, depth = waiting.pop(0)
        op, detail = pair.low.ops[place], pair.low.details[place]
        yield from ((op, number) for number in detail.numbers)
        for source in detail.sources:
            if source >= 0 and source not in seen and depth < _DEPTH:
                seen.add(source)
                waiting.append((source, depth + 1))


def _name(op: OpRecord) -> str:
    return bare_name(op.op).removesuffix("_")


def _habits(op: OpRecord) -> Iterator[str]:
    """What is known to help with operations of a kind."""
    name = _name(op)
    place = f"{op.site.file}:{op.site.line}" if op.site.file != UNKNOWN else op.site.module
    code = linecache.getline(op.site.file, op.site.line)
    if name in _PRODUCTS and ("@" in code or "matmul" in code or "einsum" in code or "bmm" in code):
        yield (
            f"If these are attention scores ({place}), multiply the queries by 1 / sqrt(d) before the product, or use "
            "torch.nn.functional.scaled_dot_product_attention."
        )
    elif name == "_to_copy":
        yield f"Bring the values into range before they are lowered at {place}: normalize the inputs, or clamp them."
    elif name in _SUMS:
        yield f"Sum in fp32 at {place}: x.float() before the reduction, or take the mean of means."
    elif name in _EXPONENTIALS:
        yield f"Do not take exponentials by hand at {place}: cross_entropy, log_softmax and logsumexp stay in range."
    elif name in _LOGARITHMS:
        yield f"Compute the loss at {place} from logits: binary_cross_entropy_with_logits, or log_softmax, takes no logarithm of a zero."
    elif name in _QUOTIENTS:
        yield f"Divide in fp32 at {place}, or by something that is not zero in half precision: x.clamp(min=torch.finfo(x.dtype).tiny)."
    elif name in _POWERS:
        yield f"Square and multiply in fp32 at {place}: x.float() first, as norms do, and back to x.dtype at the end."
    if op.phase == "backward" and "Sqrt" in op.node:
        yield f"Put an epsilon under the root at {place}: its gradient at zero is infinite."
