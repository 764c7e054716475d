from __future__ import annotations

from halfstep.journal import Entry
from halfstep.report.runs.course import course_items
from tests.report import run_samples as samples


def course(*entries: Entry) -> list[tuple[str, str]]:
    return [(item.label, item.text) for item in course_items(samples.reported(*entries))][:-1]


def test_a_run_that_ended_is_told_from_its_command_to_its_outcome() -> None:
    run = samples.reported(*samples.complete(3))
    assert [(item.label, item.text) for item in course_items(run)] == [
        ("Command", "train.py --epochs 3"),
        ("Began", "2026-01-31 12:00:00 UTC, with step 1, NVIDIA H200, torch 2.13.0, halfstep 0.1.0"),
        ("Ended", "2026-01-31 13:30:00 UTC, after 90 min, finished"),
        ("Folder", str(run.saved.folder)),
    ]


def test_a_run_without_an_end_was_killed_or_goes_on() -> None:
    assert course(samples.start(command=""), samples.step(1))[-1] == ("Ended", "No end was recorded: it was killed, or is still running.")


def test_each_process_of_a_resumed_run_is_told() -> None:
    entries: list[Entry] = [
        samples.start(),
        *samples.steps(3),
        samples.start(torch=None, rank=1, world_size=4),
        *samples.steps(2, first=3),
        samples.end(),
    ]
    assert course(*entries)[1:] == [
        ("Began", "2026-01-31 12:00:00 UTC, with step 1, NVIDIA H200, torch 2.13.0, halfstep 0.1.0"),
        ("Ended", "No end was recorded: it was killed."),
        ("Resumed", "2026-01-31 12:00:00 UTC, with step 3, NVIDIA H200, rank 1 of 4, halfstep 0.1.0"),
        ("Ended", "2026-01-31 13:30:00 UTC, after 90 min, finished"),
    ]


def test_a_start_that_was_lost_is_told() -> None:
    told = course(*samples.steps(2), samples.start(), samples.step(3))
    assert told[1] == ("Began", "with step 1; its start was not recorded")
    assert told[3][0] == "Resumed"


def test_a_run_without_a_step_is_told() -> None:
    assert course(samples.start(), samples.end(outcome="KeyboardInterrupt"))[1:] == [
        ("Began", "2026-01-31 12:00:00 UTC, without a step, NVIDIA H200, torch 2.13.0, halfstep 0.1.0"),
        ("Ended", "2026-01-31 13:30:00 UTC, after 90 min, KeyboardInterrupt"),
    ]


def test_of_many_processes_the_first_and_the_last_are_told() -> None:
    entries = [entry for number in range(1, 10) for entry in (samples.start(command=f"train {number}"), samples.step(number))]
    told = course(*entries)
    assert [text for label, text in told if label == "Command"] == ["train 1", "train 2", "train 3"]
    assert ("…", "3 more processes resumed it.") in told
    began = [text.split(", ")[1] for label, text in told if label in {"Began", "Resumed"}]
    assert began == [f"with step {number}" for number in (1, 2, 3, 7, 8, 9)]
