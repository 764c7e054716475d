from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from halfstep.comparison.lineup import lowest_precision, name_policies
from halfstep.errors import ConfigurationError, InvalidTypeError
from halfstep.hardware import native_precisions
from halfstep.policy import Policy

CPU = torch.device("cpu")


class TestNames:
    def test_a_value_a_path_and_a_text(self, tmp_path: Path) -> None:
        islands = Policy.parse("bf16; head=fp32")
        file = islands.save(tmp_path / "islands.toml")
        assert name_policies([Policy.O3, file, "O2", "fp16; 0=fp32"], besides=["fp32"]) == {
            "pure fp16": Policy.O3,
            "islands": islands,
            "O2": Policy.O2,
            "fp16; 0=fp32": Policy.parse("fp16; 0=fp32"),
        }

    @pytest.mark.parametrize(
        ("policies", "message"),
        [
            (["bf16"], r"The policy 'bf16' would be the column 'bf16', like the precision\. .*a file with a name of its own"),
            (["O1", "O1"], "would be the column 'O1', like another policy"),
            (["bf16; 0=fp32", "bf16;0=fp32"], "would be the column 'bf16; 0=fp32', like another policy"),
        ],
    )
    def test_a_name_that_is_taken(self, policies: list[str], message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            name_policies(policies, besides=["fp32", "bf16"])

    def test_texts_that_begin_alike_are_columns_of_their_own(self) -> None:
        texts = [f"bf16; decoder.attention_block_number_{index}=fp32" for index in range(2)]
        named = name_policies(texts, besides=["fp32"])
        assert list(named) == ["bf16; deco...k_number_0=fp32", "bf16; deco...k_number_1=fp32"]
        assert list(named.values()) == [Policy.parse(text) for text in texts]
        with pytest.raises(ConfigurationError, match=r"would be the column 'bf16; deco\.\.\.k_number_0=fp32', like another policy"):
            name_policies([*texts, texts[0]], besides=["fp32"])

    def test_two_files_of_one_name(self, tmp_path: Path) -> None:
        (tmp_path / "a").mkdir()
        files = [Policy.O1.save(tmp_path / "islands.toml"), Policy.O2.save(tmp_path / "a" / "islands.toml")]
        with pytest.raises(ConfigurationError, match="would be the column 'islands', like another policy"):
            name_policies(files, besides=["fp32"])

    @pytest.mark.parametrize("given", ["O1", Path("a.toml"), Policy.O1, 3, None])
    def test_what_is_no_sequence(self, given: Any) -> None:
        with pytest.raises(InvalidTypeError, match=r"compare\(policies=\.\.\.\) takes a sequence of policies"):
            name_policies(given, besides=[])


@pytest.mark.parametrize(
    ("policy", "lowest"),
    [("fp32; 0=fp32", "fp32"), ("fp32; 0=bf16", "bf16"), ("bf16; 0=fp32", "bf16"), ("fp16", "fp16"), ("pure fp16; 0=fp32", "fp16")],
)
def test_the_precision_that_tells_how_fast_a_policy_can_be(policy: str, lowest: str) -> None:
    assert lowest_precision(Policy.parse(policy), device=CPU) == lowest


@pytest.mark.parametrize(
    ("native", "lowest"), [(("bf16", "fp32"), "fp16"), (("fp16", "fp32"), "bf16"), (("fp32",), "bf16"), (("bf16", "fp16", "fp32"), "bf16")]
)
def test_of_two_it_is_the_one_that_is_emulated(native: tuple[str, ...], lowest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfstep.comparison.lineup.native_precisions", lambda device: native)
    assert lowest_precision(Policy.parse("bf16; 0=fp16"), device=CPU) == lowest


def test_auto_is_what_it_means_on_the_device() -> None:
    assert lowest_precision(Policy.parse("auto"), device=CPU) == native_precisions(CPU)[0]
