"""Why a loop that halfstep does not own skips its steps."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable
from math import nan
from typing import Any, Final, cast, final

import torch
from torch import nn
from typing_extensions import Self

from halfstep._torch import found_infs
from halfstep.errors import ConfigurationError, HalfstepWarning, InvalidTypeError
from halfstep.numerics import Trace, users_level
from halfstep.policy import Policy
from halfstep.records import Diagnosis
from halfstep.replay import diagnosis_of_trace, open_trace, warning_text
from halfstep.scaler import LossScaler, SkipCounts, Verdict

__all__ = ["SkipDiagnosis", "diagnose_skips"]


def diagnose_skips(
    scaler: torch.amp.GradScaler, *, model: nn.Module, after: int = 5, on_diagnosis: Callable[[Diagnosis], object] | None = None
) -> SkipDiagnosis:
    """A context in which a loop of one's own finds out why it skips steps, once so many were skipped in a row.

    The step that follows then is traced as it runs, once for each run of skips. Since the loop cannot be replayed from outside, nothing
    tells whether fp32 breaks as well, and no remedy is tried; `halfstep.diagnose` does both, on a task. Until then a step pays for a count.

    Args:
        scaler: The loop's scaler, torch's own or a `LossScaler`.
        model: The model, whose paths modules are known by.
        after: So many skips in a row.
        on_diagnosis: Is called with each diagnosis; without it a warning says it.

    Raises:
        InvalidTypeError: An argument is of the wrong type.
        ConfigurationError: `after` is below 1, or the scaler is disabled.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        >>> with diagnose_skips(scaler, model=model, after=2, on_diagnosis=print) as watch:
        ...     for _ in range(3):
        ...         with torch.autocast("cpu", dtype=torch.float16):
        ...             loss = model(torch.ones(4, 2)).square().mean()
        ...         scaler.scale(loss).backward()
        ...         scaler.step(optimizer)
        ...         scaler.update()
        ...         optimizer.zero_grad()
        >>> watch.diagnosis is None
        True
    """
    given: Any = scaler
    if not isinstance(given, torch.amp.GradScaler):
        raise InvalidTypeError(
            f"diagnose_skips(scaler) takes a torch.amp.GradScaler or a halfstep.LossScaler, not a {type(given).__name__}."
        )
    if not scaler.is_enabled():
        raise ConfigurationError("diagnose_skips(scaler): the scaler is disabled, so it skips nothing.")
    if not isinstance(cast("object", model), nn.Module):
        raise InvalidTypeError(f"diagnose_skips(model=...) takes a torch.nn.Module, not a {type(model).__name__}.")
    if isinstance(after, bool) or not isinstance(cast("object", after), int):
        raise InvalidTypeError(f"diagnose_skips(after=...) takes a whole number, not {after!r}.")
    if after < 1:
        raise ConfigurationError(f"diagnose_skips(after={after}): the number of skips in a row is 1 or more.")
    return SkipDiagnosis(scaler, model=model, after=after, on_diagnosis=on_diagnosis)


@final
class SkipDiagnosis:
    """What `diagnose_skips` returns.

    Attributes:
        diagnosis: What was found last; `None` before that.
    """

    def __init__(
        self, scaler: torch.amp.GradScaler, *, model: nn.Module, after: int, on_diagnosis: Callable[[Diagnosis], object] | None
    ) -> None:
        self.diagnosis: Diagnosis | None = None
        self._scaler = scaler
        self._model = model
        self._after = after
        self._on_diagnosis = on_diagnosis
        self._counts = SkipCounts(limit=after)
        self._until_read = after
        self._scale = nan
        self._seen: Trace | None = None
        self._traced: Trace | None = None
        self._is_told = False

    def __enter__(self) -> Self:
        _follow(self)
        return self

    def __exit__(self, *exception: object) -> None:
        _unfollow(self)
        self._end_trace()

    @property
    def scaler(self) -> torch.amp.GradScaler:
        """The scaler that is followed."""
        return self._scaler

    def before_update(self) -> bool:
        """The scaler is about to update.

        Returns:
            Whether the limit is reached with it, as far as that can be told now.
        """
        self._end_trace()
        if isinstance(self._scaler, LossScaler):  # It counts by itself.
            return False
        verdicts = [Verdict(owner=None, found_inf=found.clone(), stepped=True, skipped=None) for found in found_infs(self._scaler)]
        return self._counts.add(verdicts) is not None

    def after_update(self, *, has_reached: bool) -> None:
        """The scaler has updated."""
        if isinstance(self._scaler, LossScaler):
            has_reached = self._has_counted(self._scaler)
        if self._traced is not None:
            traced, self._traced, self._is_told = self._traced, None, True
            self._tell_of(traced)
        if not has_reached:
            self._is_told = False
        elif not self._is_told:
            self._scale = self._scaler.get_scale()
            self._seen = open_trace(self._model)

    def _has_counted(self, scaler: LossScaler) -> bool:
        """Whether a scaler that counts has reached the limit; it is asked only where it may have, since the answer may be on a device."""
        self._until_read -= 1
        if self._until_read > 0:
            return False
        count = scaler.stats().consecutive_skips
        self._until_read = max(self._after - count, 1)
        return count >= self._after

    def _numbers(self) -> tuple[int, int]:
        """Steps and skips."""
        if isinstance(self._scaler, LossScaler):
            stats = self._scaler.stats()
            return stats.steps, stats.skips
        return self._counts.read()[:2]

    def _end_trace(self) -> None:
        if self._seen is not None:
            self._seen.__exit__(None, None, None)
            self._traced, self._seen = self._seen, None

    def _tell_of(self, seen: Trace) -> None:
        floor = self._scaler.settings.min_scale if isinstance(self._scaler, LossScaler) else 1.0
        steps, skips = self._numbers()
        self.diagnosis = diagnosis_of_trace(
            seen,
            model=self._model,
            policy=Policy(default="fp16"),
            device=next((each.device for each in self._model.parameters()), torch.device("cpu")),
            scale=self._scale,
            floor=floor,
            steps=steps,
            skips=skips,
        )
        if self._on_diagnosis is not None:
            self._on_diagnosis(self.diagnosis)
        else:
            warnings.warn(warning_text(self.diagnosis, skips=self._after), HalfstepWarning, stacklevel=users_level())


# What follows scalers, by their class, whose `update` is another function meanwhile. An attribute of the scaler itself would be pickled.
_followers: Final[dict[type, list[SkipDiagnosis]]] = defaultdict(list)
_originals: Final[dict[type, Any]] = {}


def _follow(follower: SkipDiagnosis) -> None:
    kind = type(follower.scaler)
    if not _followers[kind]:
        original = kind.update
        _originals[kind] = vars(kind).get("update")

        def update(self: torch.amp.GradScaler, *args: Any, **kwargs: Any) -> None:
            here = [each for each in _followers[kind] if each.scaler is self]
            reached = [each.before_update() for each in here]
            original(self, *args, **kwargs)
            for each, has_reached in zip(here, reached, strict=True):
                each.after_update(has_reached=has_reached)

        setattr(kind, "update", update)  # noqa: B010 - a type checker forbids the assignment
    _followers[kind].append(follower)


def _unfollow(follower: SkipDiagnosis) -> None:
    kind = type(follower.scaler)
    _followers[kind].remove(follower)
    if not _followers[kind]:
        original = _originals.pop(kind)
        if original is None:
            del kind.update
        else:
            setattr(kind, "update", original)  # noqa: B010 - as above
