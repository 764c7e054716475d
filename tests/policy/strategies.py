"""Hypothesis strategies for policies, with patterns that the text and the file of a policy could take for something else."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from halfstep import Policy
from halfstep._torch import aten_operations, functional_overloads
from halfstep.policy import Override
from halfstep.precision import PRECISIONS

__all__ = ["OPERATIONS", "overrides", "patterns", "policies"]

# All that autocast can have a say in, with and without overloads.
OPERATIONS = sorted(
    {name for name in aten_operations() if functional_overloads(name)}
    | {overload.short for name in aten_operations() for overload in functional_overloads(name)}
)

_AWKWARD = (
    "decoder.*.attn",
    "*",
    "[0-9]?",
    "op:softmax",
    "class:torch.nn.Linear",
    "module:head",
    "aten.softmax",
    "aten::softmax",
    "torch.nn.Linear",
    "torch.",
    "op:",
    "a=fp32",
    "a; b=fp16",
    ";",
    "=",
    '"',
    '"a"',
    '""',
    '\\"',
    "a\\",
    "\\",
    "a\nb",
    "a\r\nb",
    " a ",
    "\t",
    " ",
    "\xa0",
    "\u2028",
    "\x00",
    "\x1c",
    "\x7f",
    "größe.*",
    "\U0001f600",
    "'''",
    '"""',
    "# no comment",
    "pure fp16",
    "fp16",
    "fp32=fp16",
)


def patterns() -> st.SearchStrategy[str]:
    """Any pattern of a module or a class: all but the empty text, with what means something in a policy's text well represented."""
    text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
    pieces = st.lists(st.sampled_from(_AWKWARD) | st.sampled_from(list(';="\\ :.*a')), min_size=1, max_size=4).map("".join)
    return text | pieces


def overrides(kinds: tuple[str, ...] = ("module", "class", "op")) -> st.SearchStrategy[Override]:
    def override(kind: str) -> st.SearchStrategy[Any]:
        pattern = st.sampled_from(OPERATIONS) if kind == "op" else patterns()
        return st.builds(Override, kind=st.just(kind), pattern=pattern, precision=st.sampled_from(PRECISIONS))

    return st.sampled_from(kinds).flatmap(override)


def policies() -> st.SearchStrategy[Policy]:
    """Any policy."""
    any_kind = st.lists(overrides(), max_size=5).map(tuple)
    no_operation = st.lists(overrides(("module", "class")), max_size=5).map(tuple)
    mixed = st.builds(Policy, default=st.sampled_from(["auto", *PRECISIONS]), overrides=any_kind)
    pure = st.builds(Policy, default=st.sampled_from(["bf16", "fp16"]), overrides=no_operation, pure=st.just(True))
    return mixed | pure | st.sampled_from([Policy.O0, Policy.O1, Policy.O2, Policy.O3])
