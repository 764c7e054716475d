"""What may be done to a run because of an alert."""

from __future__ import annotations

import warnings
from typing import NoReturn

from halfstep.errors import HalfstepWarning, PersistentSkipsError
from halfstep.records import Action, Alert

__all__ = ["stop", "warn"]


def warn(alert: Alert) -> Action:
    """Shows an alert as a Python warning.

    Args:
        alert: What it is about.

    Returns:
        The action, for the record.

    Example:
        >>> alert = Alert(rule="skip_rate", step=40, message="9 of 40 steps were skipped.", advice="", site=None, severity="warning")
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     action = warn(alert)
        >>> action.action, str(caught[0].message)
        ('warn', 'skip_rate at step 40: 9 of 40 steps were skipped.')
    """
    warnings.warn(str(alert), HalfstepWarning, stacklevel=2)
    return Action(rule=alert.rule, step=alert.step, action="warn", message="A warning was shown.")


def stop(alert: Alert) -> NoReturn:
    """Ends a run by an error. A monitor records it as the action `raise`.

    Args:
        alert: What it is about.

    Raises:
        PersistentSkipsError: Always.

    Example:
        >>> stop(Alert(rule="persistent_skips", step=40, message="10 steps in a row were skipped.", advice="", site=None, severity="error"))
        Traceback (most recent call last):
        ...
        halfstep.errors.PersistentSkipsError: persistent_skips at step 40: 10 steps in a row were skipped.
    """
    raise PersistentSkipsError(str(alert))
