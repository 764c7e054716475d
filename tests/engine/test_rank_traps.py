"""Traps of many processes: first what torch's own loop does, then that the engine does not."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch.distributed as dist

if not dist.is_available():
    pytest.skip("this build of torch has no torch.distributed", allow_module_level=True)

from tests.engine import rank_traps
from tests.ranks import run_ranks


def test_a_parameter_that_is_not_reduced_parts_the_scales(tmp_path: Path) -> None:
    first, second = run_ranks(rank_traps.left_alone, tmp_path=tmp_path)
    assert first["torch"] == (8.0, False), "this torch lets ranks agree by itself: the trap is gone"
    assert second["torch"] == (4.0, True)
    assert first["halfstep"] == second["halfstep"] == (4.0, True)


def test_a_replicated_parameter_hides_the_overflow_of_a_sharded_one(tmp_path: Path) -> None:
    first, second = run_ranks(rank_traps.replicated_before_sharded, tmp_path=tmp_path)
    assert (first["torch"], second["torch"]) == (True, False), "this torch lets ranks agree by itself: the trap is gone"
    assert first["halfstep"] == second["halfstep"] == (False, True)
    for found in (first, second):
        assert "mixed torch.Tensor and DTensor" in found["torch, beside a plain one"]
        assert found["halfstep, beside a plain one"] == (False, True)


def test_the_first_fsdp_is_refused_and_a_half_loss_is_not_made_infinite(tmp_path: Path) -> None:
    for found in run_ranks(rank_traps.first_fsdp, tmp_path=tmp_path):
        backoff, scaled = found["torch"]
        assert backoff == 0.25, "its positional arguments stand in torch's usual order now: the trap is gone"
        assert math.isinf(scaled)
        assert found["halfstep"] == 3.0 * 65536
        assert "fully_shard" in found["engine"]


def test_scalers_that_begin_in_different_states_are_told_apart(tmp_path: Path) -> None:
    first, second = run_ranks(rank_traps.other_state, tmp_path=tmp_path)
    assert (first["torch"], second["torch"]) == (4.0, 8.0)
    for found in (first, second):
        assert found["halfstep"].startswith("RanksDisagreeError")
        assert "rank 0: init_scale=4.0, scale=4.0; rank 1: init_scale=8.0, scale=8.0" in found["halfstep"]


def test_policies_that_differ_are_told_apart_and_one_policy_gives_what_one_rank_gives(tmp_path: Path) -> None:
    for found in run_ranks(rank_traps.other_policy, tmp_path=tmp_path):
        assert found["together"] == found["alone"]
        assert found["halfstep"].startswith("RanksDisagreeError")
        assert "rank 0: precision=bf16; rank 1: precision=bf16; 0=fp32" in found["halfstep"]
