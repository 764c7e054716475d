"""The tests of what ranks do together run on this."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks


def add_up(rank: int, more: float) -> tuple[int, float]:
    values = torch.tensor([rank + more])
    dist.all_reduce(values)
    return rank, values.item()


def fail_alone(rank: int) -> None:
    if rank == 1:
        raise LookupError("what rank 1 ran into")
    dist.barrier()


def wait_for_ever(rank: int) -> None:
    if rank == 0:
        dist.barrier()
    time.sleep(60)


def die(rank: int) -> None:
    if rank == 1:
        os._exit(3)
    dist.barrier()


def test_each_rank_returns_its_result_in_order(tmp_path: Path) -> None:
    assert run_ranks(add_up, 0.5, tmp_path=tmp_path) == [(0, 2.0), (1, 2.0)]
    assert run_ranks(add_up, 1.0, tmp_path=tmp_path, size=1) == [(0, 1.0)]


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (fail_alone, "Rank 1:\n.*LookupError: what rank 1 ran into"),
        (die, "Rank 1 died, with exit code 3"),
        (wait_for_ever, "After 4 s .*running.*Rank 0.*wait_for_ever"),
    ],
)
def test_errors_and_deadlocks_fail_the_test(function: object, match: str, tmp_path: Path) -> None:
    with pytest.raises(pytest.fail.Exception) as caught:
        run_ranks(function, tmp_path=tmp_path, timeout_s=4)  # type: ignore[arg-type]
    assert re.search(match, str(caught.value), re.DOTALL)
