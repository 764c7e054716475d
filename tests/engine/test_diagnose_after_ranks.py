"""An engine on several ranks that finds out why it skips. A replay on one rank would wait for the others, so the next step is traced."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

if not dist.is_available():
    pytest.skip("this build of torch has no torch.distributed", allow_module_level=True)

from halfstep.records import Diagnosis
from tests.engine import diagnosed_ranks
from tests.ranks import run_ranks


def read(text: str) -> Diagnosis:
    return Diagnosis.from_json(text)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("by_hand", [False, True])
def test_the_next_step_is_traced_on_all_ranks(by_hand: bool, fused: bool, tmp_path: Path) -> None:
    settings = {"by_hand": by_hand, "fused": fused}
    by_rank = run_ranks(diagnosed_ranks.diagnosed, ".FFFF..FFF.", settings, tmp_path=tmp_path, timeout_s=60)
    assert by_rank[0]["left"] == by_rank[1]["left"]
    for found in by_rank:
        assert found["same"], "the diagnosis changed the run"
        assert found["causes"] == ["forward", "forward"]
        assert all(text.startswith("2 steps in a row were skipped. Diagnosis: forward, at ") for text in found["messages"])
        assert len(found["messages"]) == 2
        diagnosis = read(found["diagnosis"])
        assert diagnosis.origin is not None
        assert diagnosis.origin.op == "aten.mul.Tensor"
        assert diagnosis.origin.site.file.endswith("diagnosed_ranks.py")
        assert (diagnosis.replays, diagnosis.verified, diagnosis.step, diagnosis.steps, diagnosis.skips) == (0, False, 10, 10, 7)


@pytest.mark.parametrize("policy", ["fp16", "fp16; head=fp32"])
def test_with_micro_batches_and_policies(policy: str, tmp_path: Path) -> None:
    settings = {"by_hand": True, "fused": False, "accumulate": 2, "policy": policy}
    by_rank = run_ranks(diagnosed_ranks.diagnosed, ".FFF.", settings, tmp_path=tmp_path, timeout_s=60)
    assert by_rank[0]["left"] == by_rank[1]["left"]
    for found in by_rank:
        assert found["same"]
        assert found["causes"] == ["forward"]
        diagnosis = read(found["diagnosis"])
        assert diagnosis.origin is not None
        assert diagnosis.origin.op == "aten.mul.Tensor"
        assert (diagnosis.step, diagnosis.precision) == (4, policy)


def test_a_rank_on_which_nothing_overflows_does_not_hang(tmp_path: Path) -> None:
    by_rank = run_ranks(diagnosed_ranks.diagnosed, ".OOOO.", {"by_hand": False, "fused": False}, tmp_path=tmp_path, timeout_s=60)
    assert by_rank[0]["left"] == by_rank[1]["left"]
    assert all(found["same"] for found in by_rank)
    guilty = read(by_rank[1]["diagnosis"])
    assert guilty.cause == "forward"
    assert guilty.origin is not None
    assert guilty.origin.op == "aten.mul.Tensor"
    assert len(by_rank[0]["messages"]) == len(by_rank[1]["messages"]) == 1


def test_where_the_traced_step_fails_the_next_one_is_traced(tmp_path: Path) -> None:
    for found in run_ranks(diagnosed_ranks.one_rank_fails, tmp_path=tmp_path, timeout_s=60):
        assert found == {"told": "in the loss", "nothing": True, "cause": "forward", "steps": 2}
