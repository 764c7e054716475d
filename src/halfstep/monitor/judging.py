"""Rules, one after the other, over the steps of a run: live, and once it is saved."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, final

from halfstep.errors import ConfigurationError, InvalidTypeError
from halfstep.journal import SavedRun
from halfstep.monitor.rules import DEFAULT_RULES, AbstractRule
from halfstep.records import Alert, Site, StepRecord

__all__ = ["Judging", "judge_run"]

# A rule that speaks up more often than this has nothing new to say.
_MOST: Final = 20

# Optimizers that share a loss scale get into the same trouble within so many steps of theirs.
_NEAR: Final = 16


@final
class Judging:
    """Judges the steps of a run, in their order.

    Each optimizer has states of its own. What the rules say of two optimizers in the same words, within a few steps, is said once. A rule
    raises at most 20 alerts for an optimizer.

    Args:
        rules: The rules, in the order in which alerts of one step come.

    Raises:
        InvalidTypeError: One of them is no rule.
        ConfigurationError: Two of them have the same name.

    Example:
        >>> from halfstep.monitor.rules import PersistentSkips
        >>> judging = Judging([PersistentSkips()])
        >>> record = StepRecord(step=1, skipped=False, scale=1.0, loss=0.25, grad_norm=None, lr=0.1, step_time_s=0.01, memory_bytes=None,
        ...     precision="bf16")
        >>> judging.judge(record), judging.end()
        ((), ())
    """

    def __init__(self, rules: Sequence[AbstractRule] = DEFAULT_RULES) -> None:
        self._rules = _checked(rules)
        self._judges = tuple(rule.judge for rule in self._rules)
        self._states: dict[str, list[Any]] = {}
        self._steps = 0
        self._raised: Counter[tuple[str, str]] = Counter()
        # Of each rule and message: the last optimizer that it was about, and when.
        self._said: dict[tuple[str, str], tuple[str, int]] = {}

    def judge(self, record: StepRecord) -> tuple[Alert, ...]:
        """The alerts that a step gives rise to.

        Args:
            record: The step that follows the last one.
        """
        self._steps += 1
        states = self._states.get(record.optimizer)
        if states is None:
            states = self._states[record.optimizer] = [rule.start() for rule in self._rules]
        found: list[Alert] = []
        for place, judge in enumerate(self._judges):
            states[place], alert = judge(states[place], record)
            if alert is not None:
                found.append(alert)
        return tuple(alert for alert in found if self._is_news(alert, record.optimizer)) if found else ()

    def end(self) -> tuple[Alert, ...]:
        """The alerts that the end of the run gives rise to."""
        return tuple(
            alert
            for optimizer, states in self._states.items()
            for rule, state in zip(self._rules, states, strict=True)
            if (alert := rule.end(state)) is not None and self._is_news(alert, optimizer)
        )

    def _is_news(self, alert: Alert, optimizer: str) -> bool:
        words = (alert.rule, alert.message)
        about, when = self._said.get(words, (optimizer, self._steps))
        if about != optimizer and self._steps - when <= _NEAR:
            return False
        self._raised[alert.rule, optimizer] += 1
        if self._raised[alert.rule, optimizer] > _MOST:
            return False
        self._said[words] = (optimizer, self._steps)
        return True


def judge_run(saved: SavedRun, rules: Sequence[AbstractRule] = DEFAULT_RULES) -> tuple[Alert, ...]:
    """The alerts of a run that was read back: with the same rules, those that it raised when it ran.

    Each process that recorded the run begins anew, as it did. What was seen in code, and not by one of these rules, is in the file alone,
    and stays as it is; so does the line of code that an alert of a rule was found to be about.

    Args:
        saved: The run.
        rules: What to judge by.

    Returns:
        The alerts, in the order of the steps.

    Example:
        >>> from tempfile import mkdtemp
        >>> from halfstep.journal import RunWriter, read_run
        >>> record = StepRecord(step=1, skipped=False, scale=1.0, loss=0.25, grad_norm=None, lr=0.1, step_time_s=0.01, memory_bytes=None,
        ...     precision="bf16")
        >>> writer = RunWriter(mkdtemp())
        >>> writer.write([record])
        >>> judge_run(read_run(writer.path))
        ()
    """
    rules = _checked(rules)
    lasts = [*saved.segments[1:], len(saved.steps)]
    return tuple(
        alert
        for segment, (first, last) in enumerate(zip(saved.segments, lasts, strict=True))
        for alert in _judge_segment(saved, rules, segment=segment, first=first, last=last)
    )


def _judge_segment(saved: SavedRun, rules: Sequence[AbstractRule], *, segment: int, first: int, last: int) -> Iterator[Alert]:
    judging = Judging(rules)
    recorded = _Recorded(saved, rules, segment=segment)
    yield from recorded.others(first)
    for row, record in enumerate(saved.records(first, last), first + 1):
        for alert in judging.judge(record):
            yield recorded.located(alert, row)
        yield from recorded.others(row)
    if saved.ended[segment]:
        for alert in judging.end():
            yield recorded.located(alert, last)


@final
class _Recorded:
    """The alerts that one process recorded.

    Args:
        saved: The run.
        rules: Those that are judged by now.
        segment: The index of the process.
    """

    def __init__(self, saved: SavedRun, rules: Sequence[AbstractRule], *, segment: int) -> None:
        judged = {rule.name: rule.is_located for rule in rules}
        self._others: defaultdict[int, list[Alert]] = defaultdict(list)
        self._sites: defaultdict[tuple[str, int], deque[Site | None]] = defaultdict(deque)
        of_steps = {rule.name for rule in DEFAULT_RULES}
        for alert, row, its_segment in zip(saved.alerts, saved.alert_rows, saved.alert_segments, strict=True):
            if its_segment != segment:
                continue
            # One with a line that its rule does not know was seen in code.
            if alert.rule in judged and (alert.site is None or judged[alert.rule]):
                self._sites[alert.rule, row].append(alert.site)
            elif alert.site is not None or alert.rule not in of_steps:
                self._others[row].append(alert)

    def others(self, row: int) -> Sequence[Alert]:
        """Those that were seen in code after so many steps."""
        return self._others.get(row, ())

    def located(self, alert: Alert, row: int) -> Alert:
        """An alert of a rule, with the site that it had when it was recorded after so many steps."""
        sites = self._sites.get((alert.rule, row))
        site = sites.popleft() if sites else None
        return alert if site is None else replace(alert, site=site)


def _checked(rules: Iterable[object]) -> tuple[AbstractRule, ...]:
    checked = []
    for rule in rules:
        if not isinstance(rule, AbstractRule):
            known = ", ".join(type(each).__name__ for each in DEFAULT_RULES)
            raise InvalidTypeError(f"rules holds {rule!r}, which is no rule. Pass instances of rules, such as {known}.")
        checked.append(rule)
    twice = [name for name, times in Counter(rule.name for rule in checked).items() if times > 1]
    if twice:
        raise ConfigurationError(f"rules holds {twice[0]} more than once. Pass each rule once, with the thresholds that it should have.")
    return tuple(checked)
