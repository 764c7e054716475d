"""What all health rules have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from halfstep.records import Alert, Severity, StepRecord

__all__ = ["AbstractRule"]


class AbstractRule(ABC):
    """Something that is read off the records of a run's steps, one after the other.

    A rule is a frozen dataclass of thresholds. What it has seen so far is a state of its own, which it makes anew for each record, so that
    a run that is read back from a file raises the alerts that it raised live. Each optimizer of a run has its own state.

    Attributes:
        name: By which alerts name it.
        severity: Of its alerts.
        is_located: Whether a watch says which line of code its alerts are about, though it knows none itself.
    """

    __slots__ = ()

    name: ClassVar[str]
    severity: ClassVar[Severity] = "warning"
    is_located: ClassVar[bool] = False

    @abstractmethod
    def start(self) -> Any:
        """The state before the first step."""

    @abstractmethod
    def judge(self, state: Any, record: StepRecord) -> tuple[Any, Alert | None]:
        """The state after one more step, and the alert that it gives rise to.

        Args:
            state: What `start` or the last call returned.
            record: The step.
        """

    def end(self, state: Any) -> Alert | None:
        """The alert that the end of a run gives rise to."""
        del state
        return None

    def alert(self, step: int, *, message: str, advice: str) -> Alert:
        """An alert of this rule.

        Args:
            step: In which it was seen.
            message: What was seen, and why it matters.
            advice: What to do.
        """
        return Alert(rule=self.name, step=step, message=message, advice=advice, site=None, severity=self.severity)
