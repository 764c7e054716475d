"""Exact counts of steps and skips that stay on the device until somebody reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from halfstep.errors import PersistentSkipsError

__all__ = ["SkipCounts", "Verdict", "too_many_skips"]


@final
@dataclass(slots=True)
class Verdict:
    """What the gradients of one optimizer were like in one iteration, and what came of it.

    Attributes:
        owner: What stands for the optimizer; it is kept alive, so that nothing else can have its identity.
        found_inf: 0-dimensional float32: 1 if a gradient was not finite, 0 otherwise; `None` when there were no gradients.
        unscaled: Whether the gradients are divided by the scale already.
        stepped: Whether the optimizer's turn to step has come, whatever came of it.
        skipped: Whether the step was not taken; `None` while only the device knows.
    """

    owner: object
    found_inf: Tensor | None = None
    unscaled: bool = False
    stepped: bool = False
    skipped: bool | None = None


@final
class SkipCounts:
    """How many steps were asked for and how many were skipped, in all and in a row.

    Verdicts that the host knows are counted on the host. The first one that only the device knows moves the counts there, and from then
    on they are read when somebody asks.

    Args:
        limit: Updates in a row with a skip at which `add` says so; `None` for never. To know it exactly costs one read in `limit` updates
            of a healthy run: after `n` in a row, `limit - n` more must pass before the limit can be reached.
    """

    __slots__ = ("_consecutive", "_limit", "_on_device", "_skips", "_steps", "_until_read")

    def __init__(self, *, limit: int | None = None, steps: int = 0, skips: int = 0, consecutive: int = 0) -> None:
        self._limit = limit
        self._steps = steps
        self._skips = skips
        self._consecutive = consecutive
        self._on_device: tuple[Tensor, Tensor] | None = None
        self._until_read = 0 if limit is None else max(limit - consecutive, 1)

    def add(self, verdicts: Sequence[Verdict]) -> int | None:
        """Counts one update of the scaler, and returns the number of updates in a row with a skip when it reached the limit."""
        if len(verdicts) == 1 and self._on_device is None and verdicts[0].skipped is not None:  # The common case, without a detour.
            verdict = verdicts[0]
            self._steps += verdict.stepped
            if verdict.found_inf is None:
                return None
            self._skips += bool(verdict.skipped)
            self._consecutive = self._consecutive + 1 if verdict.skipped else 0
            return self._consecutive if self._limit is not None and self._consecutive >= self._limit else None
        self._steps += sum(verdict.stepped for verdict in verdicts)
        checked = [verdict for verdict in verdicts if verdict.found_inf is not None]
        if not checked:
            return None
        if self._on_device is None and all(verdict.skipped is not None for verdict in checked):
            skips = sum(bool(verdict.skipped) for verdict in checked)
            self._skips += skips
            self._consecutive = self._consecutive + 1 if skips else 0
            return self._consecutive if self._limit is not None and self._consecutive >= self._limit else None
        self._add_on_device(checked)
        return self._look()

    def _add_on_device(self, checked: Sequence[Verdict]) -> None:
        founds = [verdict.found_inf for verdict in checked if verdict.found_inf is not None]
        if self._on_device is None:
            device = founds[0].device  # float64 counts to 2**53, and takes a float32 without a conversion.
            self._on_device = (
                torch.full((), self._skips, dtype=torch.float64, device=device),
                torch.full((), self._consecutive, dtype=torch.float64, device=device),
            )
            self._until_read = 0 if self._limit is None else max(self._limit - self._consecutive, 1)
        skips, consecutive = self._on_device
        for verdict in checked:
            if verdict.stepped and verdict.found_inf is not None:
                skips.add_(verdict.found_inf)
        worst = founds[0] if len(founds) == 1 else torch.stack(founds).amax()
        consecutive.add_(1).mul_(worst)

    def _look(self) -> int | None:
        if self._limit is None:
            return None
        self._until_read -= 1
        if self._until_read > 0:
            return None
        consecutive = self.read()[2]
        self._until_read = max(self._limit - consecutive, 1)
        return consecutive if consecutive >= self._limit else None

    @property
    def may_reach_limit(self) -> bool:
        """Whether one more update with a skip may reach the limit, as far as the host knows."""
        if self._limit is None:
            return False
        return self._consecutive + 1 >= self._limit if self._on_device is None else self._until_read <= 1

    def tensors(self) -> list[Tensor]:
        """What is to be read from the device: the skips, and the updates in a row with one; empty when the host knows them."""
        return [] if self._on_device is None else list(self._on_device)

    def read(self, values: Sequence[float] | None = None) -> tuple[int, int, int]:
        """Steps, skips, and updates in a row with a skip.

        Args:
            values: Those of `tensors()`, if they were read already.
        """
        if self._on_device is None:
            return self._steps, self._skips, self._consecutive
        skips, consecutive = torch.stack(self._on_device).tolist() if values is None else values
        return self._steps, int(skips), int(consecutive)


def too_many_skips(count: int, *, limit: int | None, scale: float) -> PersistentSkipsError:
    """The error that ends a run which skips step after step.

    Example:
        >>> str(too_many_skips(3, limit=3, scale=1.0))[:95]
        '3 steps in a row were skipped, because gradients were not finite (max_consecutive_skips=3); the'
    """
    return PersistentSkipsError(
        f"{count} steps in a row were skipped, because gradients were not finite (max_consecutive_skips={limit}); the loss scale is now "
        f"{scale:g}. Either an operation overflows at any scale, or the data or the parameters hold infinities or NaN: `halfstep diagnose "
        "TASK` finds which. A skipped step changes no parameter."
    )
