"""A policy on two ranks: the loss and the gradients of one rank with the whole batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

if not dist.is_available():
    pytest.skip("this build of torch has no torch.distributed", allow_module_level=True)

from tests.casting import on_ranks
from tests.ranks import run_ranks

TEXTS = ["bf16", "bf16; 2=fp32; op:softmax=fp16", "bf16; 3=fp32; 3.layer=bf16; 0=fp16", "pure bf16; 2=fp32"]


def close(found: Any, expected: Any, *, tolerance: float) -> None:
    assert found[0] == pytest.approx(expected[0], rel=tolerance)
    assert len(found[1]) == len(expected[1]) == 8
    for mine, own in zip(found[1], expected[1], strict=True):
        assert mine == pytest.approx(own, rel=tolerance, abs=tolerance / 10)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_ranks_come_to_what_one_comes_to(kind: str, tmp_path: Path) -> None:
    by_rank = run_ranks(on_ranks.every_step, kind, TEXTS, tmp_path=tmp_path)
    for found in by_rank:
        assert len(found) == 4 * len(TEXTS)
        for index, each in enumerate(found):
            if index % 2 == 0:  # The ranks have the same batch: the mean is exact, and nothing else differs.
                assert each["together"] == each["alone"]
            else:
                close(each["together"], each["alone"], tolerance=0.02)
            assert each["keys"]
            text = TEXTS[index // 4]
            assert each["island"] == ("[torch.float32]" if "2=fp32" in text else "[torch.bfloat16]")
            plain = ["Sequential", "Linear", "Tanh", "Linear", "Scores", "Linear", "Linear"]
            sharded = ["FSDPSequential", "Linear", "Tanh", "FSDPLinear", "FSDPScores", "Linear", "Linear"]
            assert each["names"] == (plain if kind == "ddp" else sharded)
    assert [each["together"] for each in by_rank[0]] == [each["together"] for each in by_rank[1]]


@pytest.mark.parametrize("text", ["bf16; 2=fp32", "bf16; 3=fp32"])
def test_an_island_of_weights_that_are_gathered_in_half(text: str, tmp_path: Path) -> None:
    """What the island computes with is bf16 by its place in the model; it is cast, and the sum is in fp32."""
    for found in run_ranks(on_ranks.gathered_in_half, text, tmp_path=tmp_path):
        for each in found:
            close(each["together"], each["alone"], tolerance=0.05)
            assert each["island"] == ("[torch.float32]" if "2=fp32" in text else "[torch.bfloat16]")
