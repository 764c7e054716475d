"""Rules over the steps of a run, live and saved."""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.errors import ConfigurationError, InvalidTypeError
from halfstep.journal import RunWriter, read_run
from halfstep.monitor import DEFAULT_RULES, Judging, Monitor, judge_run
from halfstep.records import Action, Alert, Site, StepRecord
from tests.monitor.toy_rules import RULES, AtEnd, EachSkip, ScaleFell, SkipsInARow, step
from tests.plain_strategies import floats

MISUSE = Alert(
    rule="clip_before_unscale",
    step=2,
    message="Gradients are clipped while they are scaled.",
    advice="Unscale first.",
    site=Site(module="unknown", file="train.py", line=9),
    severity="error",
)


def judged(judging: Judging, records: Sequence[StepRecord]) -> list[str]:
    return [f"{alert.rule} {alert.step}" for record in records for alert in judging.judge(record)]


def test_alerts_come_in_the_order_of_the_rules() -> None:
    records = [step(1, skipped=True), step(2, skipped=True, scale=8.0)]
    assert judged(Judging(RULES), records) == ["each_skip 1", "each_skip 2", "skips_in_a_row 2", "scale_fell 2"]
    assert judged(Judging(RULES[::-1]), records) == ["each_skip 1", "scale_fell 2", "skips_in_a_row 2", "each_skip 2"]


def test_each_optimizer_has_states_of_its_own() -> None:
    records = [step(number, optimizer=name, skipped=True) for number, name in ((1, "a"), (1, "b"), (2, "b"), (2, "a"))]
    # Both are in the same words, and close to each other: one is enough.
    assert judged(Judging([SkipsInARow()]), records) == ["skips_in_a_row 2"]
    assert judged(Judging([EachSkip()]), records) == ["each_skip 1", "each_skip 1", "each_skip 2", "each_skip 2"]


@pytest.mark.parametrize(("between", "times"), [(0, 1), (15, 1), (16, 2), (100, 2)])
def test_the_same_words_about_another_optimizer_are_news_only_later(between: int, times: int) -> None:
    high, low = {"scale": 16.0}, {"scale": 8.0}
    records = [step(1, optimizer="a", **high), step(1, optimizer="b", **high), step(2, optimizer="a", **low)]
    records += [step(number, optimizer="c") for number in range(between)]
    records += [step(2, optimizer="b", **low)]
    assert len(judged(Judging([ScaleFell()]), records)) == times


def test_the_same_words_about_the_same_optimizer_are_news() -> None:
    records = [step(number, scale=scale) for number, scale in enumerate([16.0, 8.0, 16.0, 8.0], 1)]
    assert judged(Judging([ScaleFell()]), records) == ["scale_fell 2", "scale_fell 4"]


def test_a_rule_speaks_up_twenty_times_for_an_optimizer() -> None:
    records = [step(number, optimizer=name, skipped=True) for number in range(1, 31) for name in ("a", "b")]
    judging = Judging([EachSkip()])
    assert judged(judging, records) == [f"each_skip {number}" for number in range(1, 21) for _ in "ab"]


def test_the_end_is_judged_for_each_optimizer() -> None:
    judging = Judging([AtEnd()])
    assert judging.end() == ()
    judged(judging, [step(4, optimizer="a"), step(5, optimizer="b")])
    assert [alert.step for alert in judging.end()] == [4, 5]
    judging = Judging([AtEnd()])
    judged(judging, [step(5, optimizer="a"), step(5, optimizer="b")])
    assert [alert.step for alert in judging.end()] == [5]


def test_what_is_no_rule_is_refused() -> None:
    wrong: Any = EachSkip
    with pytest.raises(InvalidTypeError, match=r"rules holds <class .*EachSkip'>, which is no rule\. Pass instances of rules"):
        Judging([wrong])
    with pytest.raises(ConfigurationError, match=r"rules holds skips_in_a_row more than once\."):
        Judging([SkipsInARow(), SkipsInARow(most=3)])


def records(numbers: st.SearchStrategy[int]) -> st.SearchStrategy[StepRecord]:
    return st.builds(
        step,
        numbers,
        skipped=st.booleans(),
        scale=st.sampled_from([1.0, 2.0, 4.0]) | floats(),
        loss=floats(),
        grad_norm=st.none() | floats(),
        optimizer=st.sampled_from(["", "a", "b"]),
        epoch=st.none() | st.integers(-1, 3),
    )


# Steps, with an epoch beside them or without; alerts from code; actions; flushes.
EVENTS = st.lists(
    st.tuples(records(st.integers(1, 5)), st.none() | st.integers(1, 3))
    | st.builds(replace, st.just(MISUSE), step=st.integers(1, 5), site=st.none() | st.just(MISUSE.site))
    | st.just(Action(rule="each_skip", step=1, action="warn", message="Done."))
    | st.none(),
    max_size=25,
)
ENDS = st.sampled_from(["finished", "KeyboardInterrupt", None])


def locate(alert: Alert) -> Site | None:
    return Site(module="unknown", file="train.py", line=alert.step) if alert.step % 2 else None


@given(processes=st.lists(st.tuples(EVENTS, ENDS), min_size=1, max_size=3), flush_steps=st.integers(1, 7))
def test_a_saved_run_raises_the_alerts_that_it_raised_live(
    tmp_path_factory: pytest.TempPathFactory, processes: list[tuple[list[Any], str | None]], flush_steps: int
) -> None:
    folder = tmp_path_factory.mktemp("run")
    live: list[Alert] = []
    for events, end in processes:
        monitor = Monitor(folder, sinks=["jsonl"], rules=RULES, locate=locate, flush_steps=flush_steps, flush_seconds=1e9)
        for event in events:
            if isinstance(event, tuple):
                monitor.observe(event[0], epoch=event[1])
            elif isinstance(event, Alert):
                monitor.report(event)
            elif isinstance(event, Action):
                monitor.note(event)
            else:
                monitor.flush()
        monitor.flush()
        if end is not None:
            monitor.close(end)
        live += monitor.alerts
        if end is None:  # As if it had been killed.
            atexit.unregister(monitor.flush)
            for sink in monitor._sinks:
                sink.close()
    saved = read_run(folder) if any(events or end for events, end in processes) and (folder / "run.jsonl").stat().st_size else None
    if saved is not None:
        assert judge_run(saved, RULES) == tuple(live) == saved.alerts


def saved_with(folder: Path, *entries: Any) -> Any:
    writer = RunWriter(folder)
    writer.write(entries)
    writer.close()
    return read_run(folder)


def test_other_rules_make_other_alerts_and_what_was_seen_in_code_stays(tmp_path: Path) -> None:
    skips = [step(number, skipped=True) for number in range(1, 5)]
    raised = SkipsInARow().alert(2, message="2 in a row.", advice="")
    located = replace(raised, site=MISUSE.site)
    old = Alert(rule=DEFAULT_RULES[0].name, step=2, message="So many.", advice="", site=None, severity="error")
    saved = saved_with(tmp_path, skips[0], MISUSE, skips[1], located, old, skips[2], skips[3])
    assert judge_run(saved, [SkipsInARow()]) == (MISUSE, located)
    # The step of the alert is another one, so it is not known which line it is about.
    assert judge_run(saved, [SkipsInARow(most=4)]) == (MISUSE, replace(raised, step=4, message="4 in a row."))
    assert judge_run(saved, []) == (MISUSE, located)


def test_the_default_rules_judge_an_empty_run(tmp_path: Path) -> None:
    assert judge_run(saved_with(tmp_path, MISUSE)) == (MISUSE,)
