from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from halfstep.coverage import NamedPolicy, check_policy_first, told_apart
from halfstep.errors import ConfigurationError, InvalidTypeError
from halfstep.policy import Policy

POLICY = Policy.parse("fp16; decoder.*.attn=fp32; op:softmax=fp32")


def test_a_file_is_called_by_its_stem(tmp_path: Path) -> None:
    file = POLICY.save(tmp_path / "islands.toml")
    for given in (file, str(file), f" {file} "):
        assert NamedPolicy.of(given) == NamedPolicy(name="islands", policy=POLICY)


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
        NamedPolicy.of("nowhere/policy.toml")


@pytest.mark.parametrize("text", ["x" * 5000, "bf16\0", "fp61"])
def test_what_is_neither_a_file_nor_a_policy(text: str) -> None:
    with pytest.raises(ConfigurationError, match="Unknown precision"):
        NamedPolicy.of(text)


@pytest.mark.parametrize("given", [None, 3, ["bf16"]])
def test_what_is_no_policy_at_all(given: Any) -> None:
    with pytest.raises(InvalidTypeError, match=r"A policy is a halfstep\.Policy, the path of a TOML file, or a text"):
        NamedPolicy.of(given)


class TestTextInAFile:
    @pytest.mark.parametrize(
        ("text", "toml"),
        [
            ("bf16", 'default = "bf16"'),
            ("\ufeffO3\n", 'default = "fp16"\npure = true'),
            (
                "fp16; decoder.*.attn=fp32;\nclass:my.Block=bf16; op:softmax=fp32",
                'default = "fp16"\n\n[[override]]\nmodule = "decoder.*.attn"\nprecision = "fp32"\n\n[[override]]\nclass = "my.Block"\n'
                'precision = "bf16"\n\n[[override]]\nop = "softmax"\nprecision = "fp32"',
            ),
            (
                r'bf16; "a\"\u00e9\u007f;\\b"=fp32',
                'default = "bf16"\n\n[[override]]\nmodule = "a\\"é\\u007f;\\\\b"\nprecision = "fp32"',
            ),
        ],
    )
    @pytest.mark.parametrize("name", ["islands.toml", "islands"])
    def test_it_is_shown_as_toml_which_can_be_read(self, tmp_path: Path, text: str, toml: str, name: str) -> None:
        file = tmp_path / name
        file.write_text(text, encoding="utf-8")
        policy = Policy.parse(text.lstrip("\ufeff"))
        message = (
            f"{file} holds a policy in the form for command lines and Policy.parse, {str(policy)!r}. A file holds it as TOML:\n\n{toml}"
        )
        with pytest.raises(ConfigurationError, match=f"^{re.escape(message)}$"):
            NamedPolicy.of(str(file))
        file.write_text(toml, encoding="utf-8")
        assert NamedPolicy.of(str(file)).policy == policy

    @pytest.mark.parametrize("content", [b"default = bf16", b"", b"\xff", b"import torch"])
    def test_a_file_that_holds_neither_is_told_what_is_wrong_with_its_toml(self, tmp_path: Path, content: bytes) -> None:
        file = tmp_path / "islands.toml"
        file.write_bytes(content)
        with pytest.raises(ConfigurationError, match=r"islands\.toml is no policy: it "):
            NamedPolicy.of(str(file))


class TestToldApart:
    @staticmethod
    def names(*given: str | Policy | Path) -> list[str]:
        return [each.name for each in told_apart([NamedPolicy.of(each) for each in given])]

    def test_texts_that_end_differently_show_their_ends(self) -> None:
        names = self.names(*(f"bf16; decoder.attention_block_number_{index}=fp32" for index in range(3)))
        assert names == [f"bf16; deco...k_number_{index}=fp32" for index in range(3)]
        assert {len(name) for name in names} == {28}

    def test_texts_that_differ_only_in_their_middle_are_numbered_by_their_places(self) -> None:
        names = self.names("O1", *(f"bf16; decoder.attention_block_{index}=fp32; op:softmax=fp32; head=fp32" for index in range(12)))
        assert names[:2] == ["O1", "bf16; decoder.attent... (2)"]
        assert len(set(names)) == 13
        assert max(map(len, names)) <= 28

    def test_only_what_is_alike_is_named_anew(self, tmp_path: Path) -> None:
        alike = [f"bf16; decoder.attention_block_number_{index}=fp32" for index in range(2)]
        file = Policy.parse(alike[0]).save(tmp_path / "islands.toml")
        other = "fp16; decoder.attention_block_number_0=fp32"
        assert self.names(other, file, "O2", *alike) == [NamedPolicy.of(other).name, "islands", "O2", *self.names(*alike)]

    def test_groups_whose_ends_are_alike_are_numbered(self) -> None:
        texts = [f"bf16; decoder.{which}_attention_of_block_{index}=fp32" for which in ("first", "second") for index in (0, 1)]
        assert [name[-3:] for name in self.names(*texts)] == ["(1)", "(2)", "(3)", "(4)"]

    @pytest.mark.parametrize("others", [[], ["bf16; decoder.attention_block_number_1=fp32"]])
    def test_the_same_policy_twice_keeps_one_name(self, others: list[str]) -> None:
        text = "bf16; decoder.attention_block_number_0=fp32"
        first, second, *_ = self.names(text, Policy.parse(text), *others)
        assert first == second

    def test_files_of_one_name_keep_it(self, tmp_path: Path) -> None:
        (tmp_path / "a").mkdir()
        assert self.names(POLICY.save(tmp_path / "x.toml"), Policy.O1.save(tmp_path / "a" / "x.toml")) == ["x", "x"]


class TestOrder:
    @pytest.mark.parametrize("policy", ["bf16; head=fp32", "O1", "FILE"])
    @pytest.mark.parametrize("task", ["train.py:task", "package.module:task", "FILE.py"])
    def test_a_task_before_a_policy(self, tmp_path: Path, policy: str, task: str) -> None:
        (tmp_path / "train.py").write_text("import torch\n")
        policy = str(POLICY.save(tmp_path / "islands.toml")) if policy == "FILE" else policy
        task = str(tmp_path / "train.py") if task == "FILE.py" else task
        check_policy_first(policy, task)
        with pytest.raises(ConfigurationError, match=re.escape(f"{task!r} is no policy, but {policy!r} is one: the policy comes first")):
            check_policy_first(task, policy)

    def test_what_is_wrong_otherwise_is_told_elsewhere(self) -> None:
        check_policy_first("fp61", "train.py:task")
        check_policy_first("bf16", "fp16")
