from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from halfstep.coverage import NamedPolicy, read_policy_argument
from halfstep.errors import ConfigurationError, InvalidTypeError
from halfstep.policy import Policy

POLICY = Policy.parse("fp16; decoder.*.attn=fp32; op:softmax=fp32")


def test_a_file_is_called_by_its_stem(tmp_path: Path) -> None:
    file = POLICY.save(tmp_path / "islands.toml")
    for given in (file, str(file), f" {file} "):
        assert NamedPolicy.of(given) == NamedPolicy(name="islands", policy=POLICY)
    assert read_policy_argument(str(file)) == POLICY


def test_a_file_that_exists_needs_no_ending(tmp_path: Path) -> None:
    file = POLICY.save(tmp_path / "policy")
    assert NamedPolicy.of(str(file)) == NamedPolicy(name="policy", policy=POLICY)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("bf16", "bf16"),
        ("bf16;head=fp32", "bf16; head=fp32"),
        ("O2", "O2"),
        (Policy.O3, "pure fp16"),
        (str(POLICY), "fp16; decoder.*.attn=fp32..."),
        ("bf16; 123456789012345=fp32", "bf16; 123456789012345=fp32"),
    ],
)
def test_a_text_is_its_own_name_where_it_is_short(given: str | Policy, name: str) -> None:
    named = NamedPolicy.of(given)
    assert named.name == name
    assert len(named.name) <= 28
    assert named.policy == (Policy.parse(given) if isinstance(given, str) else given)


def test_a_file_that_is_missing_is_no_text() -> None:
    with pytest.raises(ConfigurationError, match=r"Cannot read the policy nowhere/policy\.toml: No such file or directory"):
        read_policy_argument("nowhere/policy.toml")


@pytest.mark.parametrize("text", ["x" * 5000, "bf16\0", "fp61"])
def test_what_is_neither_a_file_nor_a_policy(text: str) -> None:
    with pytest.raises(ConfigurationError, match="Unknown precision"):
        read_policy_argument(text)


@pytest.mark.parametrize("given", [None, 3, ["bf16"]])
def test_what_is_no_policy_at_all(given: Any) -> None:
    with pytest.raises(InvalidTypeError, match=r"A policy is a halfstep\.Policy, the path of a TOML file, or a text"):
        NamedPolicy.of(given)
    with pytest.raises(InvalidTypeError, match="named by the path of a TOML file or by a text"):
        read_policy_argument(given)
