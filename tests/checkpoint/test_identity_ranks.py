"""Runs of several ranks: stopped and gone on with they are bit for bit those that never stopped, and they load what other ranks saved."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from halfstep.checkpoint import Checkpointer
from halfstep.errors import HalfstepWarning
from tests.checkpoint import identity_ranks
from tests.checkpoint.identity_ranks import CASES, SAVED, STEPS
from tests.checkpoint.runs import seeded, trained
from tests.ranks import run_ranks

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed"),
]

ANOTHER = "and this run has another number, so it is not the same run: batches are put together otherwise"
KINDS = ("ddp", "fsdp")


def skips(said: list[tuple[str, ...]]) -> list[int]:
    return [number for number, each in enumerate(said) if len(each) > 2 and each[2] == "True"]


def test_stopped_after_some_steps(tmp_path: Path) -> None:
    # torch reduces the first gradients of a static graph at once, whatever it is told, so that the group that a run is resumed in is summed
    # up in another order, unless only its last micro-batch was missing.
    places: dict[str, Any] = {name: (2, 5) if name == "ddp fp32 accumulated, static graph" else (0, 1, 5, 7, 14) for name in CASES}
    ranks = run_ranks(identity_ranks.interrupted, tmp_path, places, tmp_path=tmp_path, timeout_s=240)
    for name in CASES:
        first, second = (said[name] for said in ranks)
        assert skips(first) == skips(second)
        assert skips(first) or name == "ddp sparse"
        assert not skips(first) or skips(first)[0] < 6
        assert not skips(first) or skips(first)[-1] >= 5
        assert [each[0] for each in first] != [each[0] for each in second]


def test_three_ranks(tmp_path: Path) -> None:
    # What DistributedDataParallel sums on more than two ranks depends on where it lies in memory, which it lays out anew after each start.
    places = {"fsdp fp16 accumulated": (1, 7)}
    run_ranks(identity_ranks.interrupted, tmp_path, places, tmp_path=tmp_path, size=3, timeout_s=120)


def test_other_processes(tmp_path: Path) -> None:
    one = seeded(partial(identity_ranks.plain, "fp16"), 9)
    trained(one, 0, SAVED)
    Checkpointer(tmp_path / "one", amp=one.engines).save(SAVED)
    ranks = run_ranks(identity_ranks.saved, tmp_path, "fp16", tmp_path=tmp_path)
    expected: dict[str, Any] = {kind: ranks[0][kind][0] for kind in KINDS}
    assert expected == {kind: ranks[1][kind][0] for kind in KINDS}
    expected["one"] = identity_ranks.gathered(identity_ranks.amp_of(one))

    # As many as there were: it is the run that was not stopped, and nothing is said, whichever way its weights are spread now.
    for rank, found in enumerate(run_ranks(identity_ranks.loaded, tmp_path, "fp16", tmp_path=tmp_path)):
        for (there, here), (then, notes, extra, said, end) in found.items():
            assert then == expected[there]
            assert extra == ({} if there == "one" else {"rank": rank})
            assert there == "one" or notes == ()
            assert there != "one" or ANOTHER in notes[0]
            if there == here:
                assert (said, end) == ranks[rank][there][1:]

    for rank, found in enumerate(run_ranks(identity_ranks.loaded, tmp_path, "fp16", tmp_path=tmp_path, size=3)):
        for (there, _), (then, notes, extra, said, _) in found.items():
            assert then == expected[there]
            assert extra == ({} if there == "one" else {"rank": rank if rank < 2 else 0})
            assert len(notes) == 1
            assert f"It was saved by {'one process' if there == 'one' else '2 ranks'}, {ANOTHER}" in notes[0]
            assert len(said) == STEPS - SAVED

    for kind in KINDS:
        run = seeded(partial(identity_ranks.plain, "fp16"), 4)
        with pytest.warns(HalfstepWarning, match=f"It was saved by 2 ranks, {ANOTHER}"):
            info = Checkpointer(tmp_path / kind, amp=run.engines).resume()
        assert info is not None
        assert (info.step, info.extra) == (SAVED, {"rank": 0})
        assert identity_ranks.gathered(identity_ranks.amp_of(run)) == expected[kind]
        assert len(trained(run, SAVED, STEPS)) == STEPS - SAVED


def test_what_goes_wrong_on_one_rank_is_told_to_all(tmp_path: Path) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    first, second = run_ranks(identity_ranks.failures, folder, tmp_path=tmp_path)
    assert first == second
    assert "could not be saved: on rank 1, extra.x is a object, which a checkpoint cannot hold" in first["saved"]
    assert "whole could not be loaded: on rank 1, The checkpoint was saved with the scheduler CosineAnnealingLR" in first["loaded"]
    assert first["damaged"].startswith("DamagedCheckpointError: ")
    assert "rank-1.pt" in first["damaged"]
    assert first["resumed"].startswith("1: ")
    assert "rank-1.pt" in first["resumed"]
