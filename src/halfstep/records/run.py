"""What a run leaves behind beside its steps: that it began and ended, alerts, and actions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

from halfstep.records.base import AbstractRecord, Severity
from halfstep.records.trace import UNKNOWN, Site

__all__ = ["RUN_SCHEMA", "Action", "Alert", "RunEvent", "RunRecord"]

# The number of the format of a run on disk.
RUN_SCHEMA = 1

RunEvent = Literal["started", "ended"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord(AbstractRecord):
    """That a process began to record a run, or that it ended in good order.

    A run that was killed has no second one. A run that was resumed into the same folder has one pair for each process.

    Attributes:
        schema: The number of the format.
        event: `started` or `ended`.
        time: When, in UTC, as ISO 8601 with seconds.
        command: What was run, as a shell would take it; empty where that is not known.
        halfstep: The version of halfstep.
        torch: The version of torch; `None` where no torch was loaded.
        device: The name of the device that it trains on; empty where that is not known.
        rank: Of the process among those that train together.
        world_size: How many those are.
        outcome: How it ended, such as `finished`, `exit status 3` or `KeyboardInterrupt`; empty for its start.

    Example:
        >>> started = RunRecord(event="started", time="2026-01-31T12:00:00+00:00", command="train.py --epochs 3", halfstep="0.1.0",
        ...     torch=None, device="", rank=0, world_size=1)
        >>> RunRecord.from_json(started.to_json()) == started
        True
    """

    schema: int = RUN_SCHEMA
    event: RunEvent
    time: str
    command: str
    halfstep: str
    torch: str | None
    device: str
    rank: int
    world_size: int
    outcome: str = ""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Alert(AbstractRecord):
    """Something in a run that needs attention.

    Attributes:
        rule: The name of what was found, such as `persistent_skips`.
        step: The number of the step in which it was seen.
        message: What was seen, and why it matters.
        advice: What to do.
        site: The line of the user's code that it is about; `None` for what was read off the numbers of the steps alone.
        severity: `info`, `warning`, or `error` where what is trained is wrong.

    Example:
        >>> alert = Alert(rule="persistent_skips", step=40, message="10 steps in a row were skipped.", advice="Diagnose one.", site=None,
        ...     severity="error")
        >>> str(alert)
        'persistent_skips at step 40: 10 steps in a row were skipped. Diagnose one.'
    """

    rule: str
    step: int
    message: str
    advice: str
    site: Site | None
    severity: Severity

    def __str__(self) -> str:
        place = f" ({self.place})" if self.place else ""
        return f"{self.rule} at step {self.step}{place}: {self.message} {self.advice}".rstrip()

    @property
    def place(self) -> str:
        """The file and the line that it is about, such as `train.py:40`, with the module where one is known; empty where none is."""
        if self.site is None or self.site.file == UNKNOWN:
            return "" if self.site is None or self.site.module == UNKNOWN else self.site.module
        line = f"{self.site.file}:{self.site.line}"
        return line if self.site.module in {UNKNOWN, ""} else f"{line}, {self.site.module}"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Action(AbstractRecord):
    """Something that was done to a run because of an alert, since its user asked for that.

    Attributes:
        rule: The rule of the alert.
        step: The number of the last step before it.
        action: What was done, such as `warn`, `raise`, `save_and_stop` or `fall_back`.
        message: The same in words, with what came of it.

    Example:
        >>> Action(rule="persistent_skips", step=40, action="fall_back", message="The run goes on in bf16.").action
        'fall_back'
    """

    rule: str
    step: int
    action: str
    message: str
