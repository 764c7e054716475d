"""Gradients that `fully_shard` holds back: a run that is stopped there and resumed comes to what one comes to that never stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

if not dist.is_available():
    pytest.skip("this build of torch has no torch.distributed", allow_module_level=True)

from torch.nn.parallel import DistributedDataParallel

from halfstep.distributed import GradientSync
from tests.distributed import held_back_ranks
from tests.ranks import run_ranks

# Those of the parameters that are trained and used, in two blocks and before and after them.
COUNT = 14


def test_a_resumed_run_is_the_one_that_never_stopped(tmp_path: Path) -> None:
    for found in run_ranks(held_back_ranks.all_kinds, tmp_path=tmp_path):
        assert len(found) == 4 * 2 * 2 * 2
        assert {name: each for name, each in found.items() if each != (True, COUNT)} == {}


def test_also_where_modules_are_spread_in_other_ways(tmp_path: Path) -> None:
    for found in run_ranks(held_back_ranks.other_kinds, tmp_path=tmp_path, size=4):
        assert len(found) == 5 * 2
        assert {name: each for name, each in found.items() if not each[0]} == {}
        assert {count for _, count in found.values()} == {COUNT, 6}


def test_what_cannot_be_kept_or_does_not_fit_is_told(tmp_path: Path) -> None:
    misfit = "CheckpointError: A gradient that fully_shard held back does not fit this model: "
    for found in run_ranks(held_back_ranks.refused, tmp_path=tmp_path, size=4):
        assert found["sum"] == (
            "StepOrderError: The gradient of 3.weight is a sum over ranks that is still to be made, which can be kept only within the "
            "process. Save between two steps."
        )
        assert found["name"] == misfit + "it has no parameter 0.mistake that fully_shard spreads."
        assert found["shape"] == misfit + "that of 0.weight has the shape [4, 5], and here it has [5, 4]."
        assert found["plain"] == misfit + "it has no parameter weight that fully_shard spreads."


def test_names_are_those_that_the_model_gives(tmp_path: Path) -> None:
    for plain, compiled, inside in run_ranks(held_back_ranks.names, tmp_path=tmp_path):
        assert len(plain) == COUNT
        assert {"0.weight", "1.up.weight", "2._checkpoint_wrapped_module.gain"} < plain
        assert compiled == {f"_orig_mod.{name}" for name in plain}
        assert inside == {f"a.1.{name}" for name in plain}


def test_nothing_is_held_back_without_fully_shard(alone: None) -> None:
    for model in (nn.Linear(2, 1), DistributedDataParallel(nn.Linear(2, 1))):
        sync = GradientSync(model)
        sync.hold()
        model(torch.ones(1, 2)).sum().backward()
        assert sync.held_back() == {}
        sync.hold_back({})
