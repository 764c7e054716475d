from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from halfstep import Policy
from halfstep.errors import ConfigurationError, HalfstepError, InvalidTypeError
from halfstep.policy import Override
from halfstep.precision import PRECISIONS
from tests.policy.strategies import OPERATIONS, patterns, policies


@given(policies())
def test_a_policy_is_what_its_text_says(policy: Policy) -> None:
    assert Policy.parse(str(policy)) == policy


@given(policies())
def test_blanks_around_the_parts_mean_nothing(policy: Policy) -> None:
    spaced = ";  ".join(["", *map(str, policy.overrides), ""])
    assert Policy.parse(f"  {'pure ' if policy.pure else ''} {policy.default} {spaced} ") == policy


@given(patterns(), st.sampled_from(PRECISIONS), st.sampled_from(["module", "class"]))
@example("a=fp32; b", "fp16", "module")
def test_any_pattern_stands_in_quotation_marks(pattern: str, precision: Any, kind: Any) -> None:
    override = Override(kind=kind, pattern=pattern, precision=precision)
    assert Override.parse(str(override)) == override
    assert Policy.parse(f"bf16; {override}; last=fp32").overrides[0] == override


def test_every_operation_that_autocast_can_cast_is_accepted() -> None:
    assert len(OPERATIONS) > 1000
    for name in OPERATIONS:
        override = Override(kind="op", pattern=name, precision="fp32")
        assert override.pattern == name
        assert Override.parse(str(override)) == override


@pytest.mark.parametrize(
    "text", ["op:softmax=fp32", "aten.softmax=fp32", "aten::softmax=fp32", "op:aten.softmax=fp32", 'op:"softmax"=fp32']
)
def test_an_operation_is_named_in_several_ways(text: str) -> None:
    assert Override.parse(text) == Override(kind="op", pattern="softmax", precision="fp32")


@pytest.mark.parametrize(
    ("text", "kind", "pattern"),
    [
        ("decoder.*.attn=fp32", "module", "decoder.*.attn"),
        ("module:torch.head=fp32", "module", "torch.head"),
        ("torch.nn.LayerNorm=fp32", "class", "torch.nn.LayerNorm"),
        ("class:my.Block=fp32", "class", "my.Block"),
        ("class: my.Block =fp32", "class", "my.Block"),
        ('"torch.nn.LayerNorm"=fp32', "module", "torch.nn.LayerNorm"),
        ("a=b=fp32", "module", "a=b"),
        ('class:"a;b"=fp32', "class", "a;b"),
        ("op:softmax.int=fp32", "op", "softmax.int"),
    ],
)
def test_what_stands_before_a_pattern_tells_its_kind(text: str, kind: str, pattern: str) -> None:
    override = Override.parse(text)
    assert (override.kind, override.pattern, override.precision) == (kind, pattern, "fp32")


@pytest.mark.parametrize(
    ("text", "default", "pure", "count"),
    [
        ("fp16", "fp16", False, 0),
        ("auto; head=fp32", "auto", False, 1),
        (" bf16 ;; head=fp32; ", "bf16", False, 1),
        ("pure fp16; head=fp32", "fp16", True, 1),
        ("fp16;head=fp32;\n head=bf16", "fp16", False, 2),
    ],
)
def test_parts_of_a_text(text: str, default: str, pure: bool, count: int) -> None:
    policy = Policy.parse(text)
    assert (policy.default, policy.pure, len(policy.overrides)) == (default, pure, count)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", r"''.* Allowed are auto, fp32, bf16 and fp16"),
        (
            "head=fp32; fp16",
            r"The policy 'head=fp32; fp16' does not begin with its default precision\. A policy is written as default; pattern=precision",
        ),
        ("fp61", r"Unknown precision 'fp61'\. Allowed are auto, fp32, bf16 and fp16\. Did you mean 'fp16'"),
        ("pure", r"Unknown precision 'pure'"),
        ("pure pure fp16", r"Unknown precision 'pure fp16'"),
        ("pure fp32", r"A pure policy names its half precision: pure bf16 or pure fp16, not pure fp32\."),
        ("pure auto", r"not pure auto\."),
        ("pure fp16; op:softmax=fp32", r"op:softmax=fp32 cannot be part of a pure policy: it acts through autocast"),
        ("O4", r"Unknown precision 'O4'"),
        ("O2; head=fp32", r"Unknown precision 'O2'"),
        ("fp16; head", r"'head' is no override\. An override is written as pattern=precision"),
        ("fp16; =fp32", r"'=fp32' is no override"),
        ("fp16; head=", r"Unknown precision ''"),
        ("fp16; head=fp8", r"Unknown precision 'fp8'\. Allowed are fp32, bf16 and fp16\."),
        ("fp16; head=auto", r"Unknown precision 'auto'\. Allowed are fp32"),
        ('fp16; "head=fp32', r"has a quotation mark that is not closed: '\"head=fp32'"),
        ('fp16; "a\\x"=fp32', r"is no valid JSON string"),
        ('fp16; ""=fp32', r"The pattern of an override is empty\. Name a module, a class or an op"),
        ("fp16; class:=fp32", r"The pattern of an override is empty"),
        ("fp16; op:sofmax=fp32", r"names the operation aten\.sofmax, which torch does not have\. Did you mean .*'softmax'"),
        ("fp16; aten.sofmax=fp32", r"names the operation aten\.sofmax, which torch does not have"),
        ("fp16; op:softmax.in=fp32", r"The operation aten\.softmax has no overload 'in' that autocast could cast\."),
        (
            "fp16; op:add_=fp32",
            r"names the operation aten\.add_, which converts tensors, writes to them, returns views of them or takes none",
        ),
        ("fp16; op:zeros=fp32", r"returns views of them or takes none: it cannot be cast"),
    ],
)
def test_what_is_no_policy_is_refused(text: str, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        Policy.parse(text)


@pytest.mark.parametrize(
    ("values", "error", "match"),
    [
        ({"default": "fp8"}, ConfigurationError, r"Unknown precision 'fp8'\. Allowed are auto, fp32, bf16 and fp16"),
        ({"default": 16}, InvalidTypeError, r"A precision is named by a string, one of auto, fp32, bf16 and fp16, not 16\."),
        (
            {"overrides": []},
            InvalidTypeError,
            r"Policy\(overrides=\.\.\.\) takes a tuple of Override, not \[\]\. Policy\.override adds one\.",
        ),
        ({"overrides": ("head=fp32",)}, InvalidTypeError, r"takes a tuple of Override, not \('head=fp32',\)"),
        ({"default": "fp16", "pure": 1}, InvalidTypeError, r"Policy\(pure=\.\.\.\) takes True or False, not 1\."),
        ({"pure": True}, ConfigurationError, r"not pure auto\."),
    ],
)
def test_values_that_make_no_policy(values: dict[str, Any], error: type[HalfstepError], match: str) -> None:
    with pytest.raises(error, match=match):
        Policy(**values)


@pytest.mark.parametrize(
    ("values", "error", "match"),
    [
        ({"kind": "layer"}, ConfigurationError, r"Unknown kind of override 'layer'\. Allowed are module, class and op\."),
        ({"pattern": 3}, InvalidTypeError, r"The pattern of an override is a string, not 3\."),
        ({"pattern": ""}, ConfigurationError, r"The pattern of an override is empty"),
        ({"pattern": "a\ud800"}, ConfigurationError, r"holds half of a surrogate pair, which no file can\. Put \? in its place\."),
        ({"precision": "half"}, ConfigurationError, r"Unknown precision 'half'"),
        ({"precision": None}, InvalidTypeError, r"not None\."),
    ],
)
def test_values_that_make_no_override(values: dict[str, Any], error: type[HalfstepError], match: str) -> None:
    given: dict[str, Any] = {"kind": "module", "pattern": "head", "precision": "fp32"}
    with pytest.raises(error, match=match):
        Override(**(given | values))


def test_other_mistakes_are_told() -> None:
    with pytest.raises(InvalidTypeError, match=r"A policy is parsed from a string, such as 'fp16; head=fp32', not from None\."):
        Policy.parse(None)  # type: ignore[arg-type]
    with pytest.raises(InvalidTypeError, match=r"An override by class takes a class of modules, not int\."):
        Policy().override(int, "fp32")  # type: ignore[arg-type]
    with pytest.raises(InvalidTypeError, match=r"is a string or a class of modules, not 3\."):
        Policy().override(3, "fp32")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"Unknown precision 'fp8'"):
        Policy().override("head", "fp8")


def test_override_adds_at_the_end_and_changes_nothing() -> None:
    policy = Policy.parse("fp16; a=fp32")
    more = policy.override("b", "bf16").override(nn.LayerNorm, "fp32").override("op:softmax", "fp32")
    assert str(more) == "fp16; a=fp32; b=bf16; torch.nn.LayerNorm=fp32; op:softmax=fp32"
    assert str(policy) == "fp16; a=fp32"


def test_a_policy_is_a_value() -> None:
    policy = Policy.parse("fp16; a=fp32")
    assert policy == Policy.parse("fp16; a=fp32")
    assert len({policy, Policy.parse("fp16; a=fp32"), Policy.parse("fp16; a=bf16")}) == 2
    assert pickle.loads(pickle.dumps(policy)) == policy
    with pytest.raises(dataclasses.FrozenInstanceError, match="default"):
        policy.default = "bf16"  # type: ignore[misc]


def test_levels() -> None:
    assert [Policy.parse(level) for level in ("O0", " O1 ", "O2", "O3")] == [Policy.O0, Policy.O1, Policy.O2, Policy.O3]
    assert (str(Policy.O0), str(Policy.O1), str(Policy.O3)) == ("fp32", "fp16", "pure fp16")
    assert str(Policy.O2).startswith("pure fp16; torch.nn.modules.batchnorm._NormBase=fp32; torch.nn.LayerNorm=fp32")
