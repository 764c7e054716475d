"""Records of steps in; lines in files, alerts and actions out."""

from __future__ import annotations

import atexit
import os
import shlex
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Final, final

from typing_extensions import Self

from halfstep.errors import ConfigurationError, HalfstepWarning
from halfstep.journal import Entry
from halfstep.monitor.judging import Judging
from halfstep.monitor.process import outcome_of, process_rank, run_record, time_now
from halfstep.monitor.rules import DEFAULT_RULES, AbstractRule
from halfstep.monitor.sinks import AbstractSink, check_sinks, open_sinks
from halfstep.records import Action, Alert, Site, StepRecord

__all__ = ["Monitor"]

# The process of a monitor that is closed.
_NOBODY: Final = -1


@final
class Monitor:
    """Watches over a run: records its steps, judges them by health rules, and does what was asked for when one raises an alert.

    `observe` takes a record and returns. Every so many steps, or seconds, the records that wait are read, judged and written together;
    values that lie on a device are not read before. What was written is safe when the process is killed; what waits is written at the
    latest when Python ends. Of several ranks, all judge, and the first one writes. A process that was forked off does nothing.

    Args:
        log_dir: The folder of the run. A run that is resumed into it goes on at the end of its files.
        sinks: Where records go to: `jsonl` (run.jsonl, for `halfstep report`), `csv` (steps.csv), `tensorboard`, `console` (alerts and
            progress on standard error) or `alerts` (without progress), or sinks of one's own.
        rules: The health rules.
        on_alert: Is called with each alert, once it is written.
        actions: By the names of rules: is called with an alert of that rule, once it is written. The action that it returns is recorded;
            the error that it raises is recorded, too, and leaves `observe`, `flush` or `close` once all that waits is written.
        locate: Finds the line of code that an alert of a rule is about.
        flush_steps: So many records wait at most.
        flush_seconds: So long they wait at most, as long as more come.
        command: What is run; `None` for the command line of this process.

    Attributes:
        log_dir: The folder of the run.

    Raises:
        ConfigurationError: A setting is not allowed, or a file cannot be written.
        InvalidTypeError: A rule or a sink is none.

    Example:
        >>> from tempfile import mkdtemp
        >>> from halfstep.journal import read_run
        >>> with Monitor(mkdtemp()) as monitor:
        ...     for step in range(1, 4):
        ...         monitor.observe(StepRecord(step=step, skipped=False, scale=1.0, loss=1 / step, grad_norm=None, lr=0.1,
        ...             step_time_s=0.01, memory_bytes=None, precision="bf16"))
        >>> run = read_run(monitor.log_dir)
        >>> len(run.steps), run.ends[0].outcome, monitor.alerts
        (3, 'finished', ())
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str],
        *,
        sinks: Sequence[str | AbstractSink] = ("jsonl", "alerts"),
        rules: Sequence[AbstractRule] = DEFAULT_RULES,
        on_alert: Callable[[Alert], object] | None = None,
        actions: Mapping[str, Callable[[Alert], Action | None]] | None = None,
        locate: Callable[[Alert], Site | None] | None = None,
        flush_steps: int = 64,
        flush_seconds: float = 2.0,
        command: str | None = None,
    ) -> None:
        if flush_steps < 1:
            raise ConfigurationError(f"flush_steps={flush_steps!r}: allowed is a whole number from 1, such as 64.")
        if not flush_seconds >= 0:
            raise ConfigurationError(f"flush_seconds={flush_seconds!r}: allowed is a number from 0, such as 2.0.")
        self.log_dir: Final = Path(log_dir)
        self._judging = Judging(rules)
        check_sinks(sinks)
        self._on_alert = on_alert
        self._actions = dict(actions or {})
        self._locate = locate
        self._flush_steps = flush_steps
        self._flush_seconds = flush_seconds
        self._command = shlex.join(sys.argv) if command is None else command
        self._began = time_now()
        # Records, those whose epoch was given beside them, alerts and actions, in the order in which they came.
        self._waiting: deque[StepRecord | tuple[StepRecord, int] | Alert | Action] = deque()
        self._entries: list[Entry] = []
        self._errors: list[BaseException] = []
        self._alerts: list[Alert] = []
        self._has_begun = self._is_flushing = False
        self._sinks = list(open_sinks(sinks, folder=self.log_dir)) if process_rank() == 0 else []
        self._process = os.getpid()
        self._flushed = time.monotonic()
        atexit.register(self.flush)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if error is None:
            self.close()
            return
        # What an action has to say must not take the place of the error that ends the run.
        with suppress(BaseException):
            self.close(outcome=outcome_of(error))

    @property
    def alerts(self) -> tuple[Alert, ...]:
        """The alerts so far, in the order in which they were raised."""
        return tuple(self._alerts)

    def observe(self, record: StepRecord, *, epoch: int | None = None) -> None:
        """Takes the record of a step. After `close`, it does nothing.

        Args:
            record: The step.
            epoch: The number of the pass over the data, where the record does not know it.

        Raises:
            PersistentSkipsError: Or whatever else an action raises.
        """
        if os.getpid() != self._process:
            return
        self._waiting.append(record if epoch is None else (record, epoch))
        if len(self._waiting) >= self._flush_steps or time.monotonic() - self._flushed >= self._flush_seconds:
            self.flush()

    def report(self, alert: Alert) -> None:
        """Takes an alert that was seen elsewhere, such as in code, and flushes.

        An alert of one of the monitor's rules is the rule's to raise: `judge_run` judges anew, and would not find it.

        Args:
            alert: The alert.

        Raises:
            PersistentSkipsError: Or whatever else an action raises.
        """
        if os.getpid() == self._process:
            self._waiting.append(alert)
            self.flush()

    def note(self, action: Action) -> None:
        """Takes an action, which is written with the steps that wait.

        Args:
            action: What was done.
        """
        if os.getpid() == self._process:
            self._waiting.append(action)

    def flush(self) -> None:
        """Reads, judges and writes what waits.

        Raises:
            PersistentSkipsError: Or whatever else an action raises.
        """
        # What an action observes, reports or notes is worked off by the flush that called it.
        if os.getpid() == self._process and not self._is_flushing:
            self._work_off()
            self._raise_first()

    def close(self, outcome: str = "finished") -> None:
        """Flushes, records the end of the run, and closes the sinks. A second call does nothing.

        Args:
            outcome: How it ended.

        Raises:
            PersistentSkipsError: Or whatever else an action raises, once all is closed.
        """
        if os.getpid() != self._process:
            return
        try:
            self._work_off()
            for alert in self._judging.end():
                self._raise_alert(self._located(alert))
            self._work_off()  # What actions noted.
        except BaseException as error:
            self._errors.append(error)
        if self._errors and outcome == "finished":
            outcome = outcome_of(self._errors[0])
        self._begin()
        self._entries.append(run_record("ended", time=time_now(), command=self._command, outcome=outcome))
        self._write()
        self._process = _NOBODY
        atexit.unregister(self.flush)
        for sink in self._sinks:
            self._attempt(sink, sink.close)
        self._raise_first()

    def _begin(self) -> None:
        """Records the start, once there is something to record: only then is much known of torch and the device."""
        if not self._has_begun:
            self._has_begun = True
            self._entries.append(run_record("started", time=self._began, command=self._command))

    def _work_off(self) -> None:
        self._is_flushing = True
        self._flushed = time.monotonic()
        try:
            if self._waiting:
                self._begin()
            while self._waiting:
                self._take(self._waiting.popleft())
        finally:
            self._write()
            self._is_flushing = False

    def _take(self, item: StepRecord | tuple[StepRecord, int] | Alert | Action) -> None:
        if isinstance(item, Alert):
            self._raise_alert(item)
        elif isinstance(item, Action):
            self._entries.append(item)
        else:
            record, epoch = item if isinstance(item, tuple) else (item, None)
            if epoch is not None and epoch != record.epoch:
                record = replace(record, epoch=epoch)
            self._entries.append(record)
            for alert in self._judging.judge(record):
                self._raise_alert(self._located(alert))

    def _located(self, alert: Alert) -> Alert:
        site = None if self._locate is None else self._locate(alert)
        return alert if site is None else replace(alert, site=site)

    def _raise_alert(self, alert: Alert) -> None:
        self._alerts.append(alert)
        self._entries.append(alert)
        for answer in (self._on_alert, self._actions.get(alert.rule)):
            if answer is not None:
                self._write()
                self._answer(alert, answer)

    def _answer(self, alert: Alert, answer: Callable[[Alert], object]) -> None:
        waiting = len(self._waiting)
        try:
            action = answer(alert)
        except BaseException as error:
            self._errors.append(error)
            noted = any(isinstance(item, Action) and item.rule == alert.rule for item in islice(self._waiting, waiting, None))
            message = f"{type(error).__name__} was raised: {error}"
            action = None if noted else Action(rule=alert.rule, step=alert.step, action="raise", message=message)
        if isinstance(action, Action):
            self._entries.append(action)

    def _write(self) -> None:
        entries, self._entries = self._entries, []
        if entries:
            for sink in tuple(self._sinks):
                self._attempt(sink, partial(sink.write, entries))

    def _attempt(self, sink: AbstractSink, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # Whatever is wrong with a sink, training goes on.
            self._sinks.remove(sink)
            warnings.warn(
                f"{type(sink).__name__} failed, and is given nothing more: {type(error).__name__}: {error}", HalfstepWarning, stacklevel=2
            )

    def _raise_first(self) -> None:
        errors, self._errors = self._errors, []
        if errors:
            raise errors[0]
