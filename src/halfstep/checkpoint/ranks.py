"""What ranks do together on a checkpoint: all of them learn what came of it on each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, final

import torch.distributed as dist

from halfstep.errors import CheckpointError, DamagedCheckpointError, HalfstepError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["on_all_ranks"]

Result = TypeVar("Result")


@final
@dataclass(frozen=True, slots=True)
class _Outcome(Generic[Result]):
    """What came of it on a rank: a result, or a reason, and whether that is a damaged file."""

    result: Result | None = None
    reason: str = ""
    is_damage: bool = False


def on_all_ranks(work: Callable[[], Result], *, group: ProcessGroup | None, failure: str) -> list[Result]:
    """Calls a function on every rank of a group, and returns what it returned on each, in their order.

    A collective operation. Where it raises on any rank, an error is raised on all of them, with the reasons of each: nobody waits for a
    rank that has given up.

    Args:
        work: The function. It must not be one that waits for the other ranks. What it returns must be picklable.
        group: The ranks; `None` for this process alone.
        failure: What it means that it failed, such as `runs/a could not be written`.

    Raises:
        DamagedCheckpointError: It raised such an error on some rank.
        CheckpointError: It raised anything else on some rank.

    Example:
        >>> on_all_ranks(lambda: 1 + 1, group=None, failure="There is no sum")
        [2]
        >>> on_all_ranks(lambda: 1 // 0, group=None, failure="There is no quotient")
        Traceback (most recent call last):
        ...
        halfstep.errors.CheckpointError: There is no quotient: ZeroDivisionError: integer division or modulo by zero
    """
    error: BaseException | None = None
    outcome: _Outcome[Result]
    try:
        outcome = _Outcome(result=work())
    except BaseException as raised:
        error, outcome = raised, _Outcome(reason=_reason(raised), is_damage=isinstance(raised, DamagedCheckpointError))
    outcomes = [outcome] if group is None else _gather(outcome, group=group)
    if error is not None and not isinstance(error, Exception):
        raise error  # such as an interrupt by the user, which the others have been told of
    if any(each.reason for each in outcomes):
        _fail(outcomes, group=group, failure=failure, error=error)
    results: list[Any] = [each.result for each in outcomes]
    return results


def _gather(outcome: _Outcome[Result], *, group: ProcessGroup) -> list[_Outcome[Result]]:
    outcomes: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(outcomes, outcome, group=group)
    return outcomes


def _reason(error: BaseException) -> str:
    if isinstance(error, HalfstepError):
        return str(error)
    # On a full disk torch.save raises an error of its own about positions in its archive, which says nothing of the disk.
    chain = [error]
    while (before := chain[-1].__cause__ or chain[-1].__context__) is not None and before not in chain:
        chain.append(before)
    first = next((each for each in chain if isinstance(each, OSError)), error)
    lines = str(first).splitlines()  # torch's own go on with the places in its source
    return f"{type(first).__name__}: {lines[0]}" if lines else type(first).__name__


def _fail(outcomes: list[_Outcome[Result]], *, group: ProcessGroup | None, failure: str, error: BaseException | None) -> NoReturn:
    damages = [each.reason for each in outcomes if each.is_damage]
    if damages:
        raise DamagedCheckpointError(damages[0]) from error
    reasons = [
        each.reason if group is None else f"on rank {dist.get_global_rank(group, rank)}, {each.reason}"
        for rank, each in enumerate(outcomes)
        if each.reason
    ]
    raise CheckpointError(f"{failure}: {'; '.join(reasons)}") from error
