"""That a run began and ended, alerts and actions."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, get_args

import pytest

from halfstep.errors import RecordFormatError
from halfstep.records import RUN_SCHEMA, UNKNOWN, Action, Alert, RunEvent, RunRecord, Severity, Site

STARTED = RunRecord(
    event="started",
    time="2026-01-31T12:00:00+00:00",
    command="train.py --epochs 3",
    halfstep="0.1.0",
    torch="2.13.0",
    device="NVIDIA H200",
    rank=0,
    world_size=1,
)
ALERT = Alert(
    rule="persistent_skips", step=40, message="10 steps in a row were skipped.", advice="Diagnose one.", site=None, severity="error"
)


def site(**changes: Any) -> Site:
    values: dict[str, Any] = {"module": UNKNOWN, "file": "train.py", "line": 12}
    return Site(**(values | changes))


def test_a_record_of_a_run_says_the_number_of_its_format() -> None:
    assert STARTED.schema == RUN_SCHEMA == 1
    assert json.loads(STARTED.to_json())["schema"] == 1
    assert STARTED.outcome == ""


@pytest.mark.parametrize(("field", "wrong"), [("event", "paused"), ("torch", 2), ("rank", None)])
def test_a_run_with_a_wrong_field_is_refused(field: str, wrong: object) -> None:
    with pytest.raises(RecordFormatError, match=rf"not a RunRecord: .* @ \$\.{field}"):
        RunRecord.from_json(json.dumps({**json.loads(STARTED.to_json()), field: wrong}))


def test_what_may_be_said() -> None:
    assert get_args(RunEvent) == ("started", "ended")
    assert get_args(Severity) == ("info", "warning", "error")


@pytest.mark.parametrize(
    ("where", "place"),
    [
        (None, ""),
        (site(), "train.py:12"),
        (site(module=""), "train.py:12"),
        (site(module="decoder.3"), "train.py:12, decoder.3"),
        (site(module="decoder.3", file=UNKNOWN, line=0), "decoder.3"),
        (site(module=UNKNOWN, file=UNKNOWN, line=0), ""),
    ],
)
def test_an_alert_says_where_it_is_about(where: Site | None, place: str) -> None:
    alert = replace(ALERT, site=where)
    assert alert.place == place
    middle = f" ({place})" if place else ""
    assert str(alert) == f"persistent_skips at step 40{middle}: 10 steps in a row were skipped. Diagnose one."


def test_an_alert_without_advice_ends_with_its_message() -> None:
    assert str(replace(ALERT, advice="")) == "persistent_skips at step 40: 10 steps in a row were skipped."


def test_the_site_of_an_alert_survives_json() -> None:
    alert = replace(ALERT, site=site(module="decoder.3"))
    assert Alert.from_json(alert.to_json()) == alert
    assert json.loads(alert.to_json())["site"] == {"module": "decoder.3", "file": "train.py", "line": 12}


def test_an_action_names_the_alert_that_it_answers() -> None:
    action = Action(rule=ALERT.rule, step=ALERT.step, action="fall_back", message="The run goes on in bf16.")
    assert Action.from_json(action.to_json()) == action
    assert action != replace(action, step=41)
