from __future__ import annotations

from halfstep.journal import SavedRun
from halfstep.records import Alert
from halfstep.report import Item
from halfstep.report.runs import ReportedRun, reported_runs
from halfstep.report.runs.alerts import alert_cards, difference_items, worst_alert
from tests.report import run_samples as samples

MISUSE = samples.alert("clip_before_unscale", 1, site=samples.site(), severity="error", message="Scaled.", advice="Unscale.")


def judged(*now: Alert, recorded: tuple[Alert, ...]) -> ReportedRun:
    def judge(saved: SavedRun) -> tuple[Alert, ...]:
        del saved
        return now

    (run,) = reported_runs([samples.saved([samples.step(1), *recorded])], judge=judge)
    return run


class TestCards:
    def test_a_card_tells_what_was_seen_where_and_what_to_do(self) -> None:
        (card,) = alert_cards([samples.reported(samples.step(1), MISUSE)])
        assert (card.badge, card.tone, card.title) == ("error", "bad", "clip_before_unscale")
        assert (card.place, card.text, card.advice) == ("step 1 · train.py:57", "Scaled.", "Unscale.")
        assert card.role == ""

    def test_the_worst_come_first_and_then_the_earliest(self) -> None:
        alerts = [
            samples.alert("info_late", 9, severity="info"),
            samples.alert("warning_late", 8),
            samples.alert("warning_early", 2),
            samples.alert("error_late", 30, severity="error"),
        ]
        cards = alert_cards([samples.reported(*samples.steps(30), *alerts)])
        assert [card.title for card in cards] == ["error_late", "warning_early", "warning_late", "info_late"]
        assert [card.tone for card in cards] == ["bad", "warning", "warning", "neutral"]

    def test_alerts_of_one_rule_at_one_place_share_a_card(self) -> None:
        alerts = [samples.alert(at=at, message=f"Loss {at}.") for at in (3, 5, 9)]
        (card,) = alert_cards([samples.reported(*samples.steps(9), *alerts)])
        assert card.place == "steps 3, 5 and 9 · 3 times"
        assert card.text == "The first: Loss 3."

    def test_equal_messages_are_told_as_they_are(self) -> None:
        (card,) = alert_cards([samples.reported(*samples.steps(9), *(samples.alert(at=at) for at in (3, 5)))])
        assert card.text == samples.alert().message

    def test_other_places_and_severities_have_cards_of_their_own(self) -> None:
        alerts = [MISUSE, samples.alert("clip_before_unscale", 2, site=samples.site(line=90)), samples.alert("clip_before_unscale", 3)]
        assert len(alert_cards([samples.reported(*samples.steps(3), *alerts)])) == 3

    def test_a_card_of_one_of_several_runs_names_it(self) -> None:
        runs = reported_runs([samples.saved([samples.step(1), MISUSE], name=name) for name in "xy"])
        cards = alert_cards(runs)
        assert [(card.place, card.role) for card in cards] == [("x · step 1 · train.py:57", "x"), ("y · step 1 · train.py:57", "y")]


def test_the_worst_alert_is_the_first_of_the_most_severe() -> None:
    late, early = samples.alert("a", 9), samples.alert("b", 2)
    assert worst_alert([late, early, samples.alert("c", 1, severity="info")]) is early
    assert worst_alert([]) is None


class TestDifferences:
    def test_what_only_one_of_both_judgements_says_is_told(self) -> None:
        both = samples.alert("both", 1)
        new = (samples.alert("new", 2), samples.alert("other", 3), samples.alert("new", 5))
        run = judged(both, *new, recorded=(both, samples.alert("old", 7)))
        assert difference_items(run) == (
            Item(label="Only now", text="new at steps 2 and 5; other at step 3"),
            Item(label="Only when it ran", text="old at step 7"),
        )

    def test_judgements_that_agree_differ_in_nothing(self) -> None:
        both = samples.alert("both", 1)
        assert difference_items(judged(samples.alert("both", 1, message="In other words."), recorded=(both,))) == ()

    def test_an_alert_more_at_the_same_step_is_told(self) -> None:
        both = samples.alert("both", 1)
        assert difference_items(judged(both, both, recorded=(both,))) == (Item(label="Only now", text="both at step 1"),)

    def test_a_run_that_was_not_judged_anew_has_none(self) -> None:
        assert difference_items(samples.reported(samples.step(1), samples.alert())) == ()
