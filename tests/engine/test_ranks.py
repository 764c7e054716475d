"""An engine that trains with others: one verdict, one scale, and no more reductions than needed."""

from __future__ import annotations

import math
from itertools import permutations
from pathlib import Path

import pytest
import torch.distributed as dist

if not dist.is_available():
    pytest.skip("this build of torch has no torch.distributed", allow_module_level=True)

from tests.engine import on_ranks
from tests.ranks import run_ranks


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("order", ["".join(each) for each in permutations("prs")])
def test_one_verdict_however_parameters_are_placed(order: str, fused: bool, tmp_path: Path) -> None:
    for by_guilty in run_ranks(on_ranks.mixed_placements, order, fused, tmp_path=tmp_path):
        assert by_guilty == [([False, True, False], True)] * 3


@pytest.mark.parametrize("fused", [False, True])
def test_a_parameter_that_is_not_reduced_counts_on_all_ranks(fused: bool, tmp_path: Path) -> None:
    for skips, scales in run_ranks(on_ranks.ignored_parameter, fused, tmp_path=tmp_path):
        assert skips == [False, False, True, False]
        assert scales == [1024.0, 1024.0, 1024.0, 512.0]


def test_scalers_that_differ_are_told_with_both_states(tmp_path: Path) -> None:
    by_rank = run_ranks(on_ranks.different_scalers, tmp_path=tmp_path)
    for rank, found in enumerate(by_rank):
        assert found["start"].startswith("RanksDisagreeError: The ranks differ in what decides their steps")
        assert "rank 0: init_scale=8.0, scale=8.0; rank 1: init_scale=16.0, scale=16.0" in found["start"]
        assert "rank 0: growth_interval=10; rank 1: growth_interval=11" in found["settings"]
        assert f"on rank {rank}: the scales go from 8 to 16 (here {8 * (rank + 1)}). Load" in found["load"]
        assert f"on rank {rank}: the scales go from 4 to 8 (here {4 * (rank + 1)}). Load" in found["one load"]
        assert f"on rank {rank}: the growth trackers go from 1 to 5 (here {5 if rank else 1}). Load" in found["tracker"]
        assert "rank 0: scale=8.0; rank 1: scale=16.0" in found["torch"]
        assert found["same"] == "nothing was raised"


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_gradients_are_reduced_once_in_a_step_and_a_partial_group_is_a_group(kind: str, tmp_path: Path) -> None:
    by_rank = run_ranks(on_ranks.reductions, kind, tmp_path=tmp_path)
    for found in by_rank:
        assert found["group"] == found["whole"]
        assert len(found["whole"]) == 1
        for name in ("flushed", "known"):
            for mine, expected in zip(found[name], found["by hand"], strict=True):
                assert mine == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert by_rank[0] == by_rank[1]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_step_that_breaks_off_leaves_nothing_behind(kind: str, tmp_path: Path) -> None:
    for fresh, resumed in run_ranks(on_ranks.broken_off, kind, tmp_path=tmp_path):
        assert fresh == resumed


def test_the_first_fsdp_is_refused(tmp_path: Path) -> None:
    for text in run_ranks(on_ranks.first_fsdp, tmp_path=tmp_path):
        assert text.startswith("ConfigurationError: ")
        assert "fully_shard" in text


def test_a_rank_without_a_bad_gradient_skips_with_the_other(tmp_path: Path) -> None:
    assert run_ranks(on_ranks.without_gradients, tmp_path=tmp_path, timeout_s=30) == [([False, True, False], (3, 1))] * 2


def test_fully_shard_trains_with_the_policy_of_each_precision(tmp_path: Path) -> None:
    by_rank = run_ranks(on_ranks.policies, tmp_path=tmp_path)
    for found in by_rank:
        for losses, skips in found.values():
            assert skips == [False, False, True, False, False, False]
            assert losses[5] < losses[0]
            assert math.isfinite(losses[5])


def test_ranks_that_were_set_up_differently_are_told(tmp_path: Path) -> None:
    """What the ranks exchange depends on none of these settings, so that the difference is told instead of a deadlock."""
    for found in run_ranks(on_ranks.different_setups, tmp_path=tmp_path):
        assert "rank 0: precision=bf16, scaler=NoneType" in found["precision"] or "rank 0: precision=bf16" in found["precision"]
        assert "rank 1: precision=fp16" in found["precision"]
        assert "rank 0: init_scale=16.0, scale=16.0; rank 1: init_scale=128.0, scale=128.0" in found["static scales"]
        assert "rank 0: static=False; rank 1: static=True" in found["static"]
        assert "rank 0: max_grad_norm=1.0; rank 1: max_grad_norm=2.0" in found["clipping"]
        assert "rank 0: accumulate=1; rank 1: accumulate=2" in found["accumulation"]


def test_a_scaler_that_changes_on_one_rank_does_no_harm_and_is_told(tmp_path: Path) -> None:
    for found in run_ranks(on_ranks.changed_later, tmp_path=tmp_path):
        assert found["skipped"], "gradients in two scales were stepped with"
        assert found["same"]
        assert "RanksDisagreeError: The loss scalers of the 2 ranks have drifted apart" in found["told"]
        assert found["steps"] <= 50


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_ranks_with_different_numbers_of_micro_batches_stay_together(precision: str, tmp_path: Path) -> None:
    """With DistributedDataParallel; the forward passes of a sharded model are collective operations themselves."""
    first, second = run_ranks(on_ranks.uneven, precision, tmp_path=tmp_path)
    assert first == second


@pytest.mark.parametrize("kind", ["ignored", "meshes"])
def test_all_ranks_clip_by_the_same_norm(kind: str, tmp_path: Path) -> None:
    size = 4 if kind == "meshes" else 2
    by_rank = run_ranks(on_ranks.different_gradients, kind, tmp_path=tmp_path, size=size)
    assert len({norm for _, norm in by_rank}) == 1
    assert all(shared == by_rank[0][0] for shared, _ in by_rank)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_clipping_by_value(kind: str, tmp_path: Path) -> None:
    for weights, by_hand in run_ranks(on_ranks.clipped_by_value, kind, tmp_path=tmp_path):
        for mine, expected in zip(weights, by_hand, strict=True):
            assert mine == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_backward_pass_that_breaks_off_leaves_nothing_behind(kind: str, accumulate: int, tmp_path: Path) -> None:
    for fresh, resumed in run_ranks(on_ranks.broken_backward, kind, accumulate, tmp_path=tmp_path):
        assert fresh == resumed


def test_an_engine_is_made_after_a_forward_pass_of_a_sharded_model(tmp_path: Path) -> None:
    for losses in run_ranks(on_ranks.after_validation, tmp_path=tmp_path):
        assert losses[-1] < losses[0]


def test_joining_is_refused(tmp_path: Path) -> None:
    for text in run_ranks(on_ranks.joined, tmp_path=tmp_path):
        assert text.startswith("StepOrderError: An engine cannot step inside of model.join()")
