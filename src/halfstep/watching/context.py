"""Following a training loop that halfstep does not own."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, cast, final
from weakref import WeakSet

from torch import nn
from typing_extensions import Self

from halfstep.errors import InvalidTypeError, StepOrderError
from halfstep.journal import RUNS, default_folder
from halfstep.monitor import DEFAULT_RULES, AbstractRule, Monitor, PersistentSkips, process_rank
from halfstep.records import Action, Alert, Site, StepRecord
from halfstep.watching.aftermath import Aftermath
from halfstep.watching.alike import AlikeSteps
from halfstep.watching.interception import Interception
from halfstep.watching.interventions import Intervention, Interventions, check_intervention
from halfstep.watching.lines import NOWHERE, Line, site_of
from halfstep.watching.measures import StepFacts
from halfstep.watching.scaling import ScalerEvents
from halfstep.watching.scene import Scene
from halfstep.watching.states import OptimizerState, ScalerState
from halfstep.watching.stepping import StepEvents

__all__ = ["Watch", "watch"]

# Records wait for so many steps, or so many seconds, and are then read, judged and written together.
_STEPS: Final = 64
_SECONDS: Final = 2.0
# Where something is to be done about skips, they are looked at sooner.
_STEPS_AT_HAND: Final = 4

_NO_LIMIT: Final = 2**62


def watch(
    log_dir: str | os.PathLike[str] | None = None,
    *,
    sinks: Sequence[Any] = ("jsonl", "alerts"),
    rules: Sequence[AbstractRule] = DEFAULT_RULES,
    on_alert: Callable[[Alert], object] | None = None,
    on_persistent_skips: Intervention | None = None,
    diagnose: bool = False,
    model: nn.Module | None = None,
    command: str | None = None,
) -> Watch:
    """A context that follows the training in it, whatever loop that is: each `GradScaler`, each optimizer, each autocast region.

    It records scale, skips, loss, gradient norm, learning rate, step time and memory of each optimizer step, notices misuse with the line
    of code that it is in, and judges by the health rules. `halfstep run train.py` does the same for a whole script, without a change to it.
    When it ends, torch is as it was.

    Args:
        log_dir: The folder of the run, whose `run.jsonl` is added to; `None` for a new one below `halfstep-runs`.
        sinks: Where records go: names or sinks, as `halfstep.Monitor` takes them.
        rules: The health rules.
        on_alert: Is called with each alert.
        on_persistent_skips: What to do when step after step is skipped: `warn`; `raise`; `save_and_stop`, which writes the state of model,
            optimizer and scaler into the folder first; or `fall_back`, which goes on in fp16 with the operation that overflows in fp32,
            then in bf16, then in fp32. Each is recorded. `None` for an alert alone.
        diagnose: Whether a step is traced, once five were skipped in a row, to find the operation that overflows.
        model: What is trained; it is looked for by the optimizer's parameters where it is not given.
        command: What runs, for the log; `None` for the command line of the process.

    Raises:
        InvalidTypeError: The model is no module.
        ConfigurationError: An argument has a value that is not allowed, or the folder cannot be made.

    Example:
        >>> import tempfile, torch
        >>> model = nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with watch(tempfile.mkdtemp(), sinks=["jsonl"]) as seen:
        ...     for _ in range(3):
        ...         optimizer.zero_grad()
        ...         with torch.autocast("cpu", dtype=torch.bfloat16):
        ...             loss = model(torch.ones(4, 2)).square().mean()
        ...         loss.backward()
        ...         optimizer.step()
        >>> seen.summary()[:21]
        '3 steps, none skipped'
    """
    check_intervention(on_persistent_skips)
    if model is not None and not isinstance(cast("object", model), nn.Module):
        raise InvalidTypeError(f"watch(model=...) takes a torch.nn.Module, not a {type(model).__name__}.")
    return Watch(
        log_dir,
        sinks=sinks,
        rules=rules,
        on_alert=on_alert,
        on_persistent_skips=on_persistent_skips,
        diagnose=diagnose,
        model=model,
        command=command,
    )


@final
class Watch:
    """What `watch` returns.

    Attributes:
        log_dir: The folder of the run, once it is entered.
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] | None,
        *,
        sinks: Sequence[Any],
        rules: Sequence[AbstractRule],
        on_alert: Callable[[Alert], object] | None,
        on_persistent_skips: Intervention | None,
        diagnose: bool,
        model: nn.Module | None,
        command: str | None,
    ) -> None:
        self.log_dir: Path | None = None if log_dir is None else Path(log_dir)
        self._sinks = sinks
        self._rules = rules
        self._on_alert = on_alert
        self._on_persistent_skips = on_persistent_skips
        self._diagnose = diagnose
        self._model = model
        self._command = shlex.join(sys.argv) if command is None else command
        self._monitor: Monitor | None = None
        # The steps that wait: the optimizer, what is known of the step, its line, and the epoch in which it ended.
        self._pending: list[tuple[OptimizerState | None, StepRecord | StepFacts, Line, int | None]] = []
        self._settled = time.monotonic()
        self._counts = [0, 0]
        self._is_settling = False

    def __enter__(self) -> Self:
        if self._monitor is not None:
            raise StepOrderError("This watch was entered before. Make a new one for each run: halfstep.watch(...).")
        is_first = process_rank() == 0
        if self.log_dir is None:  # The first rank writes the log.
            self.log_dir = default_folder(sys.argv[0] or "run") if is_first else Path(RUNS)
        self._monitor = Monitor(
            self.log_dir.absolute(),
            sinks=self._sinks,
            rules=self._rules,
            on_alert=None if self._on_alert is None else self._answer,
            locate=self._locate,
            flush_steps=_NO_LIMIT,
            flush_seconds=float("inf"),
            command=self._command,
        )
        self._scene = Scene(observe=self._observe, tell=self._tell)
        self._aftermath = Aftermath(self._scene)
        alike = AlikeSteps(self._scene, self._aftermath)
        self._steps = StepEvents(self._scene, alike)
        self._scalers = ScalerEvents(self._scene, self._steps)
        self._interventions = Interventions(
            self._scene,
            kind=self._on_persistent_skips,
            limit=next((each.skips for each in self._rules if isinstance(each, PersistentSkips)), PersistentSkips().skips),
            diagnose=self._diagnose,
            folder=self.log_dir.absolute() if is_first else None,  # A script may change the current folder.
            model=self._model,
            note=self._note,
        )
        if self._interventions.is_wanted:
            self._scalers.at_rest, self._scene.acts = self._at_rest, True
        self._interception = Interception(self._scene, self._steps, self._scalers, self._aftermath, alike)
        self._scene.find_existing()
        self._interception.open()
        _followed.add(self._scene)
        self._settled = time.monotonic()
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exception: BaseException | None, traceback: object) -> None:
        monitor = self._monitor
        assert monitor is not None
        ended = exception
        # In a child that was forked the monitor does nothing: the run is its parent's.
        try:
            self._scene.close_window()
            if exception is None:
                self._scalers.end()
            self.flush()
        except BaseException as error:
            ended = exception or error
        finally:
            self._interventions.close()
            self._interception.close()
            self._scene.measures.close()
        monitor.__exit__(None if ended is None else type(ended), ended, None)
        try:
            if exception is None and ended is not None:
                self._scene.failed(ended)
        finally:
            self._scene.is_active = False

    @property
    def alerts(self) -> tuple[Alert, ...]:
        """The alerts so far."""
        return () if self._monitor is None else self._monitor.alerts

    def summary(self) -> str:
        """What was seen, in a sentence, and how to see more."""
        steps, skips, alerts = *self._counts, len(self.alerts)
        told = f"{_count(alerts, 'alert', none='no')}"
        return (
            f"{_count(steps, 'step', none='no')}, {skips if skips else 'none'} skipped, {told}. "
            f"To look at it: halfstep report {shlex.quote(str(self.log_dir))}"
        )

    def flush(self) -> None:
        """Reads, judges and writes what waits; where values lie on an accelerator, the host waits for it once."""
        if self._is_settling or self._monitor is None:
            return
        self._is_settling = True
        try:
            taken = self._hand_over()
            self._aftermath.settle(taken)
            self._monitor.flush()
            for state, record, _ in taken:
                self._counts[0] += 1
                self._counts[1] += record.skipped
                if state is not None:
                    self._interventions.count(state, skipped=record.skipped)
        finally:
            self._is_settling = False

    def _hand_over(self) -> list[tuple[OptimizerState | None, StepRecord, Line]]:
        """Gives the monitor the records of the steps that wait."""
        assert self._monitor is not None
        pending, self._pending = self._pending, []
        self._settled = time.monotonic()
        make = self._scene.measures.record
        taken: list[tuple[OptimizerState | None, StepRecord, Line]] = []
        for state, step, line, epoch in pending:
            if isinstance(step, tuple):
                record = make(step)
                self._monitor.observe(record)
            else:
                record = step
                self._monitor.observe(record, epoch=epoch)  # An engine knows nothing of epochs.
            taken.append((state, record, line))
        return taken

    def _observe(self, state: OptimizerState | None, step: StepRecord | StepFacts, line: Line) -> None:
        self._pending.append((state, step, line, self._scene.epoch))
        if len(self._pending) >= _STEPS or time.monotonic() - self._settled >= _SECONDS:
            self.flush()

    def _tell(self, alert: Alert) -> None:
        assert self._monitor is not None
        self.flush()  # The log has it after the steps before it.
        self._monitor.report(alert)

    def _answer(self, alert: Alert) -> None:
        assert self._on_alert is not None
        try:
            self._on_alert(alert)
        except BaseException as error:
            self._scene.meant.append(error)
            raise

    def _note(self, action: Action) -> None:
        assert self._monitor is not None
        self._monitor.note(action)
        self._monitor.flush()

    def _at_rest(self, scaler: ScalerState) -> None:
        if len(self._pending) >= _STEPS_AT_HAND:
            self.flush()
        self._interventions.at_rest(scaler)

    def _locate(self, alert: Alert) -> Site | None:
        """The line that an alert of a record rule is about."""
        line = self._scene.places.get(alert.rule, NOWHERE)
        return None if line is NOWHERE else site_of(line)


def _count(number: int, noun: str, *, none: str) -> str:
    return f"{none if number == 0 else f'{number:,}'} {noun}{'' if number in {0, 1} else 's'}"


# What is followed now, so that a child that is forked can let go of it: it is its parent's.
_followed: Final[WeakSet[Scene]] = WeakSet()


def _let_go() -> None:
    for scene in list(_followed):
        scene.is_active = False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
