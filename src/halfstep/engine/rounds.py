"""When a loss scale may move: once per round of the engines that share it, and never under somebody's gradients."""

from __future__ import annotations

from typing import Final, final
from weakref import WeakKeyDictionary, finalize

import torch

from halfstep.errors import StepOrderError
from halfstep.scaler import Scaling

__all__ = ["Turn"]


@final
class Turn:
    """The place of one engine among those that share its loss scaler.

    A scale that moves once per engine grows too fast, and one that moves while another engine has gradients from several micro-batches
    would leave these in two different scales. So it moves when every engine has stepped, or when one of them starts its next step (as a
    discriminator that steps five times for each step of its generator does), and then only if no engine has gradients.

    Args:
        scaling: The engine's part of the scaler.
        scaler: The scaler.
    """

    __slots__ = ("__weakref__", "_key", "_round", "_scaling")

    def __init__(self, scaling: Scaling, scaler: torch.amp.GradScaler) -> None:
        self._scaling = scaling
        self._round = _ROUNDS.setdefault(scaler, _Round())
        self._key = id(self)
        self._round.members.add(self._key)
        # An engine that is gone holds up nobody.
        finalize(self, self._round.remove, self._key).atexit = False

    def check_settled(self) -> None:
        """Accepts a moment in which the scale has moved by every step that was taken.

        Raises:
            StepOrderError: Some of the engines that share the scaler have stepped, and the scale waits for the others.
        """
        if self._round.stepped:
            raise StepOrderError(
                f"{len(self._round.stepped)} of the {len(self._round.members)} engines that share a loss scaler have stepped, and the "
                "scale moves when all have: what it waits for is no part of a state. Save after the last of them has stepped."
            )

    def begin(self) -> None:
        """The engine is about to compute its first scaled gradients of a step.

        Raises:
            PersistentSkipsError: The scale moved, and has seen too many skips in a row.
        """
        if self._key in self._round.stepped and not self._round.with_gradients:
            self._move_scale()
        self._round.with_gradients.add(self._key)

    def abandon(self) -> None:
        """The engine has let go of its gradients."""
        self._round.with_gradients.discard(self._key)

    def end(self) -> None:
        """The engine has stepped or skipped, and let go of its gradients.

        Raises:
            PersistentSkipsError: The scale moved, and has seen too many skips in a row.
        """
        this = self._round
        this.with_gradients.discard(self._key)
        this.stepped.add(self._key)
        if not this.with_gradients and this.stepped == this.members:
            self._move_scale()

    def _move_scale(self) -> None:
        self._round.stepped.clear()
        self._scaling.update()


class _Round:
    """The engines that use one scaler: all of them, those with gradients, and those that have stepped."""

    __slots__ = ("members", "stepped", "with_gradients")

    def __init__(self) -> None:
        self.members: set[int] = set()
        self.with_gradients: set[int] = set()
        self.stepped: set[int] = set()

    def remove(self, key: int) -> None:
        for each in (self.members, self.with_gradients, self.stepped):
            each.discard(key)


_ROUNDS: Final[WeakKeyDictionary[torch.amp.GradScaler, _Round]] = WeakKeyDictionary()
