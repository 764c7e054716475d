"""The step, in every combination of optimizers, clipping, accumulation and placement, with overflows at chosen steps on chosen ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.engine.every_case import STEPS, Case, Placement, Run, by_engine, by_hand, cases, in_one_process, on_rank, overflows
from tests.ranks import run_ranks

RANKS = 2


def check_steps(case: Case, run: Run, hand: Run) -> None:
    expected = [overflows(case, step) for step in range(STEPS)]
    assert run.skips == expected
    assert run.untouched
    assert all(run.untouched), "a skipped step changed something"
    assert run.lrs == hand.lrs
    assert run.scales == hand.scales
    turns = 2 if case.optimizers == "apart" else 1
    assert run.counts == (STEPS * turns, sum(sum(flags.values()) for flags in expected) // (2 // turns))


@pytest.mark.parametrize("case", cases("alone"), ids=str)
def test_one_process(case: Case) -> None:
    run, hand = by_engine(case, rank=0), by_hand(case, rank=0)
    check_steps(case, run, hand)
    for name, parameter in run.parameters.items():
        assert torch.equal(parameter, hand.parameters[name]), name


@pytest.fixture(scope="module", params=["ddp", "fsdp2"])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Placement, list[Any]]:
    if not dist.is_available():
        pytest.skip("this build of torch has no torch.distributed")
    placement: Placement = request.param
    return placement, run_ranks(on_rank, placement, tmp_path=tmp_path_factory.mktemp(placement), size=RANKS, timeout_s=300)


@pytest.mark.parametrize("number", range(len(cases("ddp"))))
def test_two_ranks(runs: tuple[Placement, list[Any]], number: int) -> None:
    placement, by_rank = runs
    case = cases(placement)[number]
    alone = in_one_process(case, size=RANKS)
    for rank in range(RANKS):
        run, hand = by_rank[rank][number]
        check_steps(case, run, hand)
        for name, parameter in run.parameters.items():
            assert torch.equal(parameter, by_rank[0][number][0].parameters[name]), f"the ranks part at {name}"
            if placement == "ddp" or not case.clip:
                assert torch.equal(parameter, hand.parameters[name]), name
            else:  # The norm of sharded gradients is summed up in another order than torch does.
                torch.testing.assert_close(parameter, hand.parameters[name], rtol=1e-5, atol=1e-7)
            torch.testing.assert_close(parameter, alone[name], rtol=2e-3, atol=2e-4)
