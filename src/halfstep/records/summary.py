"""What a saved run comes to: the numbers that a person asks for first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from halfstep.records.base import AbstractRecord
from halfstep.records.run import Action, Alert, RunRecord
from halfstep.records.step import Precision

__all__ = ["SUMMARY_SCHEMA", "EpochSummary", "OptimizerSummary", "RunSummaries", "RunSummary"]

# The number of the format of a summary as JSON.
SUMMARY_SCHEMA = 1


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EpochSummary(AbstractRecord):
    """What one epoch of a run comes to; where a run knows of no epochs, one of about ten parts of equally many steps.

    Attributes:
        epoch: The number of the epoch, from 1; `None` for a part of a run that knows of no epochs, and for steps before its first one.
        first_step: The number of its first step.
        last_step: The number of its last step.
        steps: How many steps were recorded in it, skipped ones included.
        skips: How many of them were skipped.
        loss: The median of the losses that are finite; `None` where none is.
        scale: The loss scale of its last step.
        step_time_ms: The median time of a step in milliseconds; `None` where none was timed.

    Example:
        >>> epoch = EpochSummary(epoch=1, first_step=1, last_step=500, steps=500, skips=3, loss=0.7, scale=8192.0,
        ...     step_time_ms=41.5)
        >>> EpochSummary.from_json(epoch.to_json()) == epoch
        True
    """

    epoch: int | None
    first_step: int
    last_step: int
    steps: int
    skips: int
    loss: float | None
    scale: float
    step_time_ms: float | None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSummary(AbstractRecord):
    """What the steps of one optimizer come to.

    Attributes:
        optimizer: Its name; empty where a run has one optimizer.
        steps: How many steps were recorded, skipped ones included.
        skips: How many of them were skipped.
        first_loss: The first loss that is finite; `None` where none is, as for all losses below.
        last_loss: The last loss that is finite, of a single step.
        best_loss: The lowest loss that is finite, of a single step.
        best_step: The number of that step.
        settled_loss: The median of the last 100 losses that are finite: what to compare runs by, since single steps vary.
        final_scale: The loss scale of the last step; `None` where nothing was scaled.
        final_lr: The learning rate of the last step.

    Example:
        >>> generator = OptimizerSummary(optimizer="generator", steps=500, skips=3, first_loss=2.3, last_loss=0.41, best_loss=0.39,
        ...     best_step=488, settled_loss=0.42, final_scale=8192.0, final_lr=0.0003)
        >>> generator.best_step
        488
    """

    optimizer: str
    steps: int
    skips: int
    first_loss: float | None
    last_loss: float | None
    best_loss: float | None
    best_step: int | None
    settled_loss: float | None
    final_scale: float | None
    final_lr: float | None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary(AbstractRecord):
    """What a saved run comes to.

    Attributes:
        schema: The number of the format.
        name: What the run is called: the name of its folder.
        folder: Where it lies.
        starts: That processes began to record it: one, and one more each time that it was resumed.
        ends: That processes ended in good order; one that was killed has none.
        precisions: In which its steps computed, in the order of their first steps.
        steps: How many steps were recorded, skipped ones included.
        skips: How many of them were skipped.
        nonfinite_losses: How many steps have a loss that is infinite or NaN; not those whose loss nobody knows.
        median_step_time_ms: The median time in milliseconds of the steps that were timed and not skipped; `None` where there are none.
        peak_memory_mib: The most memory that a step reports, in MiB; `None` where none does.
        optimizers: What the steps of each optimizer come to; one for a run with one optimizer.
        epochs: What each epoch comes to, or each part of a run that knows of no epochs.
        alerts: What needs attention, in the order of the steps.
        recorded_alerts: What the run itself alerted, where `alerts` are those of a later judgement; `None` where they are the run's own.
        actions: What was done because of alerts.
        notes: What could not be read of the run.

    Example:
        >>> summary = RunSummary(name="digits", folder="halfstep-runs/digits", starts=(), ends=(), precisions=("bf16",), steps=500,
        ...     skips=0, nonfinite_losses=0, median_step_time_ms=41.5, peak_memory_mib=812.0, optimizers=(), epochs=(), alerts=(),
        ...     recorded_alerts=None, actions=(), notes=())
        >>> summary.has_findings
        False
    """

    schema: int = SUMMARY_SCHEMA
    name: str
    folder: str
    starts: tuple[RunRecord, ...]
    ends: tuple[RunRecord, ...]
    precisions: tuple[Precision, ...]
    steps: int
    skips: int
    nonfinite_losses: int
    median_step_time_ms: float | None
    peak_memory_mib: float | None
    optimizers: tuple[OptimizerSummary, ...]
    epochs: tuple[EpochSummary, ...]
    alerts: tuple[Alert, ...]
    recorded_alerts: tuple[Alert, ...] | None
    actions: tuple[Action, ...]
    notes: tuple[str, ...]

    @property
    def has_findings(self) -> bool:
        """Whether something needs attention: an alert that is more than information."""
        return any(alert.severity != "info" for alert in self.alerts)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummaries(AbstractRecord):
    """What several saved runs come to.

    Attributes:
        schema: The number of the format.
        runs: The runs, in the order in which they were named.

    Example:
        >>> RunSummaries(runs=()).has_findings
        False
    """

    schema: int = SUMMARY_SCHEMA
    runs: tuple[RunSummary, ...]

    @property
    def has_findings(self) -> bool:
        """Whether something needs attention in one of the runs."""
        return any(run.has_findings for run in self.runs)
