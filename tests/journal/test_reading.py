"""Runs, read back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.errors import ConfigurationError, RecordFormatError
from halfstep.journal import Entry, RunWriter, SavedRun, encode_line, read_run
from halfstep.records import Action, Alert, RunRecord, StepRecord
from tests.records.test_codec import same
from tests.strategies import actions, alerts, run_records, step_records

STEP = StepRecord(
    step=7, skipped=True, scale=65536.0, loss=0.5, grad_norm=None, lr=0.01, step_time_s=0.25, memory_bytes=1024, precision="fp16"
)
STARTED = RunRecord(
    event="started", time="2026-01-31T12:00:00+00:00", command="train.py", halfstep="0.1.0", torch=None, device="", rank=0, world_size=1
)
ENDED = replace(STARTED, event="ended", outcome="finished")
ALERT = Alert(rule="skip_rate", step=7, message="Many.", advice="", site=None, severity="warning")
ACTION = Action(rule="skip_rate", step=7, action="warn", message="A warning was shown.")

INT64 = st.integers(-(2**63), 2**63 - 1)
ENTRIES: st.SearchStrategy[list[Entry]] = st.lists(
    step_records(whole_numbers=INT64) | run_records() | alerts() | actions(), min_size=1, max_size=12
)


def write(folder: Path, *lines: Entry | str | bytes) -> Path:
    folder.mkdir(exist_ok=True)
    texts = [line if isinstance(line, bytes) else line.encode() if isinstance(line, str) else encode_line(line).encode() for line in lines]
    (folder / "run.jsonl").write_bytes(b"".join(texts))
    return folder


def of_kind(entries: Sequence[Entry], cls: type) -> list[Any]:
    return [entry for entry in entries if isinstance(entry, cls)]


def check_holds(run: SavedRun, entries: Sequence[Entry]) -> None:
    """That a run holds these entries and no other ones."""
    assert all(same(*pair) for pair in zip(run.records(), of_kind(entries, StepRecord), strict=True))
    assert [*run.alerts] == of_kind(entries, Alert)
    assert [*run.actions] == of_kind(entries, Action)
    runs = of_kind(entries, RunRecord)
    assert [*run.starts] == [each for each in runs if each.event == "started"]
    assert [*run.ends] == [each for each in runs if each.event == "ended"]
    before = [len(of_kind(entries[:place], StepRecord)) for place, entry in enumerate(entries) if isinstance(entry, Alert)]
    assert [*run.alert_rows] == before
    assert len(run.segments) == len(run.ended) >= max(1, len(run.starts))


@given(entries=ENTRIES)
def test_what_was_written_is_read(tmp_path_factory: pytest.TempPathFactory, entries: list[Entry]) -> None:
    folder = tmp_path_factory.mktemp("run")
    writer = RunWriter(folder)
    writer.write(entries[:3])
    writer.write(entries[3:])
    writer.close()
    run = read_run(folder)
    check_holds(run, entries)
    assert run.notes == ()


@given(entries=ENTRIES, data=st.data())
def test_a_file_that_is_cut_anywhere_keeps_its_whole_lines(
    tmp_path_factory: pytest.TempPathFactory, entries: list[Entry], data: st.DataObject
) -> None:
    lines = [encode_line(entry).encode() for entry in entries]
    whole = b"".join(lines)
    # Without its newline a line is still whole.
    ends = [sum(map(len, lines[:place])) + len(line) - 1 for place, line in enumerate(lines)]
    cut = data.draw(st.integers(ends[0], len(whole)) | st.sampled_from(ends))
    kept = sum(end <= cut for end in ends)
    torn = cut > ends[kept - 1] + 1
    folder = write(tmp_path_factory.mktemp("run"), whole[:cut])
    run = read_run(folder)
    check_holds(run, entries[:kept])
    assert run.notes == ((f"Line {kept + 1} was passed over. It is torn: its process ended while it wrote, or is writing still.",) * torn)
    # The process that resumes it adds lines; both sides are kept.
    writer = RunWriter(folder)
    writer.write(entries)
    writer.close()
    again = read_run(folder)
    check_holds(again, [*entries[:kept], *entries])
    assert len(again.notes) == torn
    assert all(note.startswith(f"Line {kept + 1} was passed over. It is no JSON") for note in again.notes)


def test_every_cut_of_a_small_run_is_read_or_is_no_run(tmp_path: Path) -> None:
    whole = b"".join(encode_line(entry).encode() for entry in (STARTED, STEP, ALERT))
    first = len(encode_line(STARTED)) - 1
    for cut in range(len(whole) + 1):
        folder = write(tmp_path / "run", whole[:cut])
        if cut < first:
            with pytest.raises(RecordFormatError, match=r"run\.jsonl holds no run: (it is empty|none of its 1 lines is one of a run)\."):
                read_run(folder)
        else:
            assert len(read_run(folder).notes) <= 1


def test_a_run_knows_its_folder_and_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "first", STEP)
    for path in (folder, folder / "run.jsonl", str(folder)):
        run = read_run(path)
        assert (run.folder, run.name) == (folder, "first")
    monkeypatch.chdir(folder)
    assert read_run(".").name == read_run("run.jsonl").name == "first"
    other = (folder / "run.jsonl").rename(folder / "kept.jsonl")
    assert read_run(other).name == "kept"


@pytest.mark.parametrize(
    ("entries", "segments", "ended"),
    [
        ([STARTED, STEP, STEP, ENDED], (0,), (True,)),
        ([STARTED, STEP, STARTED, STEP, STEP, ENDED], (0, 1), (False, True)),
        ([STARTED, STEP, ENDED, STARTED], (0, 1), (True, False)),
        ([STARTED, STARTED, STEP], (0, 0), (False, False)),
        ([STEP], (0,), (False,)),
        ([STEP, STARTED, STEP], (0, 1), (False, False)),
        ([STEP, ENDED, STARTED, STEP], (0, 1), (True, False)),
        ([ALERT, STARTED, STEP], (0, 0), (False, False)),
        ([ENDED], (0,), (True,)),
        ([ACTION], (0,), (False,)),
    ],
)
def test_each_process_is_a_segment(tmp_path: Path, entries: list[Entry], segments: tuple[int, ...], ended: tuple[bool, ...]) -> None:
    run = read_run(write(tmp_path, *entries))
    assert (run.segments, run.ended) == (segments, ended)


def test_an_alert_knows_its_place(tmp_path: Path) -> None:
    run = read_run(write(tmp_path, STARTED, ALERT, STEP, ALERT, STEP, ALERT, ENDED, STARTED, ALERT, STEP))
    assert run.alert_rows == (0, 1, 2, 2)
    assert run.alert_segments == (0, 0, 0, 1)


@pytest.mark.parametrize(
    ("lines", "notes"),
    [
        ([STEP, "\n", "  \r\n", STEP], []),
        (
            [STEP, "no JSON\n"],
            ["Line 2 was passed over. It is no JSON: its process was killed while it wrote, or something else wrote it."],
        ),
        ([STEP, b"\xff\xfe\n", b"\x00\x00\n", "[" * 100_000 + "\n"], ["3 lines were passed over, line 2 the first of them. It is no JSON"]),
        ([STEP, '{"kind": "step", "loss": NaN}\n'], ["Line 2 was passed over. It is no JSON"]),
        ([STEP, encode_line(STEP)[:-1] + encode_line(STEP)], ["Line 2 was passed over. It is no JSON"]),
        (
            [STEP, '{"kind": "op"}\n', "[]\n", "3\n", '{"kind": ["step"]}\n'],
            ["4 lines were passed over, line 2 the first of them. No kind"],
        ),
        ([STEP, '{"kind": "alert"}\n'], ["Line 2 was passed over. This JSON is not an Alert: required field missing @ $.rule"]),
        ([STEP, '{"kind": "step"}\n'], ["Line 2 was passed over. This JSON is not a StepRecord: required field missing @ $.step"]),
        (
            ["x\n", '{"kind": "step", "step": "a"}\n', STEP, "y\n", '{"kind": "step"}\n', "torn"],
            ["2 lines were passed over, line 1", "2 lines were passed over, line 2", "Line 6 was passed over. It is torn"],
        ),
    ],
)
def test_foreign_lines_are_passed_over_with_a_note(tmp_path: Path, lines: list[Any], notes: list[str]) -> None:
    run = read_run(write(tmp_path, *lines))
    assert [*run.records()] == [line for line in lines if isinstance(line, StepRecord)]
    assert len(run.notes) == len(notes)
    for note, beginning in zip(run.notes, notes, strict=True):
        assert note.startswith(beginning)


def test_fields_of_a_newer_halfstep_are_passed_over_and_those_of_an_older_one_have_defaults(tmp_path: Path) -> None:
    plain = json.loads(STEP.to_json())
    newer = {"kind": "step", "temperature": [1, {"a": 2}], **plain}
    older = {"kind": "step", **{name: plain[name] for name in plain if name not in {"epoch", "optimizer", "scaler"}}}
    shuffled = dict(reversed([*newer.items()]))
    run = read_run(write(tmp_path, *(f"{json.dumps(line)}\n" for line in (newer, older, shuffled))))
    assert [*run.records()] == [STEP] * 3
    assert run.notes == ()


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordFormatError, match=r"written by a newer halfstep: its format has the number 2, and this one reads up to 1\."):
        read_run(write(tmp_path, STEP, replace(STARTED, schema=2), STEP))


def test_no_run_is_an_error_that_says_what_one_is(tmp_path: Path) -> None:
    how = r"A run folder holds run\.jsonl; `halfstep run train\.py` makes one\."
    with pytest.raises(ConfigurationError, match=rf"^There is no run at .*missing\. {how}$"):
        read_run(tmp_path / "missing")
    with pytest.raises(ConfigurationError, match=rf"^There is no run in .*\. {how}$"):
        read_run(tmp_path)
    write(tmp_path / "b", STEP)
    write(tmp_path / "a", STEP)
    with pytest.raises(ConfigurationError, match=rf"{how} There are 2 runs below it; the last is .*b\.$"):
        read_run(tmp_path)
    for text, found in (("", "it is empty"), ("\n", "none of its 1 lines"), ("a\nb\n", "none of its 2 lines")):
        with pytest.raises(RecordFormatError, match=rf"run\.jsonl holds no run: {found}.* {how}"):
            read_run(write(tmp_path / "c", text))


def test_what_cannot_be_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path, STEP)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    with pytest.raises(ConfigurationError, match=r"Cannot read .*below: Not a directory\."):
        read_run(folder / "run.jsonl" / "below")
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ConfigurationError, match=r"Cannot read .*run\.jsonl: Permission denied\."):
        read_run(folder)


def test_many_lines_are_read_in_order(tmp_path: Path) -> None:
    """More than fit into one part of a column, with a wrong line among them."""
    records = [replace(STEP, step=step, grad_norm=None if step % 3 else float(step)) for step in range(2500)]
    run = read_run(write(tmp_path, *records[:1500], '{"kind": "step", "step": null}\n', ALERT, *records[1500:]))
    assert [*run.records()] == records
    assert run.alert_rows == (1500,)
    assert [note[:27] for note in run.notes] == ["Line 1501 was passed over. "]
