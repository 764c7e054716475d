"""What runs on each rank, for tests of what they tell each other."""

from __future__ import annotations

import torch.distributed as dist

from halfstep.checkpoint.ranks import on_all_ranks
from halfstep.errors import DamagedCheckpointError, HalfstepError


def fail(rank: int, guilty: tuple[int, ...]) -> int:
    if rank in guilty:
        raise ValueError(rank)
    return 10 * rank


def damage(rank: int) -> int:
    if rank == 2:
        raise DamagedCheckpointError(f"x{rank} is damaged.")
    return fail(rank, (0,))


def outcomes(rank: int) -> dict[str, object]:
    group = dist.group.WORLD
    some = dist.new_group([1, 2])
    found: dict[str, object] = {"results": on_all_ranks(lambda: fail(rank, ()), group=group, failure="It failed"), "some": ""}
    works = {
        "one": (lambda: fail(rank, (1,)), group),
        "two": (lambda: fail(rank, (0, 2)), group),
        "damage": (lambda: damage(rank), group),
        "some": (lambda: fail(rank, (2,)), some),
    }
    for name, (work, among) in works.items():
        if name == "some" and rank == 0:
            continue
        try:
            on_all_ranks(work, group=among, failure="It failed")
        except HalfstepError as error:
            found[name] = f"{type(error).__name__}: {error}"
            if name == "one":
                found["caused"] = isinstance(error.__cause__, ValueError)
    return found
