"""The errors that halfstep raises on purpose.

Every one derives from `HalfstepError`, so that a caller can catch them all. A mistake by the user also derives from the built-in
that Python itself would raise, so that ordinary `except ValueError` code keeps working. A message says what was passed, what is
allowed and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import final

__all__ = [
    "CheckpointError",
    "ConfigurationError",
    "DamagedCheckpointError",
    "HalfstepError",
    "HalfstepWarning",
    "InvalidTypeError",
    "PersistentSkipsError",
    "RanksDisagreeError",
    "RecordFormatError",
    "StepOrderError",
    "TaskError",
    "UnscaledBackwardError",
    "did_you_mean",
]


class HalfstepError(Exception):
    """The base of every error that halfstep raises on purpose.

    Example:
        >>> issubclass(ConfigurationError, HalfstepError)
        True
    """


@final
class ConfigurationError(HalfstepError, ValueError):
    """A setting has a value that is not allowed."""


@final
class InvalidTypeError(HalfstepError, TypeError):
    """An argument has a type that is not allowed."""


@final
class StepOrderError(HalfstepError, RuntimeError):
    """The parts of a training step were called in an order that cannot be right."""


@final
class UnscaledBackwardError(HalfstepError, RuntimeError):
    """Gradients reached a step that were not computed with its loss scale, or were changed while they were scaled."""


@final
class PersistentSkipsError(HalfstepError, RuntimeError):
    """Step after step was skipped, so that nothing is learned any more."""


@final
class RanksDisagreeError(HalfstepError, RuntimeError):
    """The processes that train one model together are not in the same state."""


@final
class CheckpointError(HalfstepError, RuntimeError):
    """A checkpoint could not be written, or does not fit the run that it was loaded into."""


@final
class DamagedCheckpointError(HalfstepError, ValueError):
    """A file is no checkpoint of halfstep, or a damaged one; the message names the part that is wrong."""


@final
class TaskError(HalfstepError, RuntimeError):
    """A task could not be found, built or run."""


@final
class RecordFormatError(HalfstepError, ValueError):
    """A file or text is not a halfstep record, or is one of a newer schema."""


@final
class HalfstepWarning(UserWarning):
    """Something that runs, but that is probably not what was meant."""


def did_you_mean(name: str, *, known: Iterable[str]) -> str:
    """A hint with the known names that are nearest to a mistyped one.

    Args:
        name: What was typed.
        known: The names that would have been accepted.

    Returns:
        A sentence with a leading space, or an empty string when nothing is near.

    Example:
        >>> did_you_mean("pf16", known=["fp32", "bf16", "fp16"])
        " Did you mean 'bf16' or 'fp16'?"
        >>> did_you_mean("tensorfloat", known=["fp32"])
        ''
    """
    near = get_close_matches(name, list(known), n=2, cutoff=0.6)
    return f" Did you mean {' or '.join(repr(match) for match in sorted(near))}?" if near else ""
