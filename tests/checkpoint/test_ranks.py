"""What one rank raises is told on all of them. That ranks wait for nobody is tested in tests/checkpoint/test_shards.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
import torch.distributed as dist

if not dist.is_available():
    pytest.skip("this build of torch has no torch.distributed", allow_module_level=True)

from halfstep.checkpoint.ranks import on_all_ranks
from halfstep.errors import CheckpointError, ConfigurationError, DamagedCheckpointError
from tests.checkpoint import told_ranks
from tests.ranks import run_ranks


def raising(error: BaseException, *, within: BaseException | None = None) -> Callable[[], NoReturn]:
    def work() -> NoReturn:
        try:
            if within is not None:
                raise within
        finally:
            raise error

    return work


class TestAlone:
    def test_the_one_result(self) -> None:
        assert on_all_ranks(lambda: None, group=None, failure="It failed") == [None]

    @pytest.mark.parametrize(
        ("work", "text"),
        [
            (raising(ValueError("no\nC++ stack")), r"It failed: ValueError: no$"),
            (raising(ValueError()), r"It failed: ValueError$"),
            (raising(ConfigurationError("Choose another.")), r"It failed: Choose another\.$"),
            (raising(RuntimeError("unexpected pos 3"), within=OSError(28, "No space")), r"It failed: OSError: \[Errno 28\] No space$"),
            (raising(ConfigurationError("Choose another."), within=OSError(28, "No space")), r"It failed: Choose another\.$"),
        ],
    )
    def test_the_reason_is_told_in_a_line(self, work: Callable[[], None], text: str) -> None:
        with pytest.raises(CheckpointError, match=text) as caught:
            on_all_ranks(work, group=None, failure="It failed")
        assert caught.value.__cause__ is not None

    def test_damage_stays_damage(self) -> None:
        with pytest.raises(DamagedCheckpointError, match=r"^x is damaged\.$"):
            on_all_ranks(raising(DamagedCheckpointError("x is damaged.")), group=None, failure="It failed")

    def test_an_interrupt_stays_one(self) -> None:
        with pytest.raises(KeyboardInterrupt):
            on_all_ranks(raising(KeyboardInterrupt()), group=None, failure="It failed")

    def test_errors_that_lead_to_each_other_in_a_circle(self) -> None:
        one, other = ValueError("one"), ValueError("other")
        one.__context__, other.__context__ = other, one
        with pytest.raises(CheckpointError, match="It failed: ValueError: one"):
            on_all_ranks(raising(one), group=None, failure="It failed")


def test_on_several(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(told_ranks.outcomes, tmp_path=tmp_path, size=3)):
        assert found["results"] == [0, 10, 20]
        assert found["one"] == "CheckpointError: It failed: on rank 1, ValueError: 1"
        assert found["two"] == "CheckpointError: It failed: on rank 0, ValueError: 0; on rank 2, ValueError: 2"
        assert found["damage"] == "DamagedCheckpointError: x2 is damaged."
        assert found["some"] == ("" if rank == 0 else "CheckpointError: It failed: on rank 2, ValueError: 2")
        assert found["caused"] == (rank == 1)
