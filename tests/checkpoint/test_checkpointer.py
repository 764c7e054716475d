from __future__ import annotations

import threading
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import halfstep
from halfstep.archive import verify
from halfstep.checkpoint import Checkpointer, load_checkpoint, save_checkpoint
from halfstep.engine import MixedPrecision
from halfstep.errors import (
    CheckpointError,
    DamagedCheckpointError,
    HalfstepWarning,
    StepOrderError,
)
from halfstep.randomness import seed_everything
from tests.checkpoint.cases import engine, fp16_accumulated, fp16_fused, gan, loop, mlp
from tests.checkpoint.runs import Run, state, trained
from tests.checkpoint.shelves import damage, names, of_step

pytestmark = pytest.mark.usefixtures("one_thread")

BOTH = pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])


@pytest.fixture
def run() -> Run:
    return fp16_fused()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Writing waits until this is set."""
    release, save = threading.Event(), torch.save

    def slow(*args: Any, **settings: Any) -> None:
        assert release.wait(30)
        save(*args, **settings)

    monkeypatch.setattr(torch, "save", slow)
    yield release
    release.set()


@BOTH
def test_the_newest_few_stay(run: Run, background: bool, tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "a" / "b", amp=run.engines, every=2, keep=2, background=background) as checkpointer:
        paths = []
        for step in range(12):
            run.step(step)
            paths.append(checkpointer.save_if_due(step + 1))
    assert [path is None for path in paths] == [True, False] * 6
    assert names(tmp_path / "a" / "b") == of_step(10, 12)
    assert paths[-1] == checkpointer.folder / "step-00000012.pt"
    assert [path.name for path in checkpointer.checkpoints()] == of_step(12, 10)
    assert [verify(path).step for path in checkpointer.checkpoints()] == [12, 10]


def test_all_stay_when_that_is_asked_for(run: Run, tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, amp=run.engines, keep=None)
    for step in range(6):
        checkpointer.save(step)
    assert names(tmp_path) == of_step(*range(6))


def test_what_is_no_checkpoint_is_left_alone(run: Run, tmp_path: Path) -> None:
    others = ["best.pt", "step-7.pt", "step-00000001.txt", ".hidden", "notes"]
    for name in others:
        (tmp_path / name).write_text("mine")
    (tmp_path / "step-00000000").mkdir()
    checkpointer = Checkpointer(tmp_path, amp=run.engines, keep=1)
    for step in (1, 2, 3):
        checkpointer.save(step)
    assert names(tmp_path) == sorted([*others, *of_step(3)])


def test_a_step_that_is_saved_again_is_replaced(run: Run, tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, amp=run.engines)
    checkpointer.save(3, extra={"time": "first"})
    checkpointer.save(3, extra={"time": "second"})
    info = checkpointer.resume()
    assert info is not None
    assert (names(tmp_path), info.extra) == (of_step(3), {"time": "second"})


def test_later_ones_than_the_step_are_not_counted(run: Run, tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, amp=run.engines, keep=2)
    for step in (10, 20):
        checkpointer.save(step)
    for step in (3, 4, 5):
        checkpointer.save(step)
    assert names(tmp_path) == of_step(4, 5, 10, 20)


def test_step_zero_is_never_due(run: Run, tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, amp=run.engines, every=1)
    assert checkpointer.save_if_due(0) is None
    assert names(tmp_path) == []


def test_extra_may_be_a_function_that_is_called_when_it_is_needed(run: Run, tmp_path: Path) -> None:
    calls: list[int] = []

    def extra() -> dict[str, Any]:
        calls.append(len(calls))
        return {"calls": len(calls), "average": torch.ones(2)}

    checkpointer = Checkpointer(tmp_path, amp=run.engines, every=3)
    for step in range(1, 7):
        checkpointer.save_if_due(step, extra=extra)
    info = checkpointer.resume()
    assert info is not None
    assert (calls, info.extra["calls"], info.extra["average"].tolist()) == ([0, 1], 2, [1.0, 1.0])


def records(path: Path) -> dict[str, bytes]:
    """What a file holds, but for when it was written."""
    with zipfile.ZipFile(path) as archive:
        return {info.filename: archive.read(info) for info in archive.infolist() if not info.filename.endswith("halfstep.json")}


def test_both_ways_write_the_same(tmp_path: Path) -> None:
    for background in (False, True):
        seed_everything(5)
        run = fp16_accumulated()
        with Checkpointer(tmp_path / str(background), amp=run.engines, keep=None, background=background) as checkpointer:
            for step in range(9):
                run.step(step)
                checkpointer.save(step + 1, extra={"view": torch.arange(6.0)[2:4], "words": ["a", ("b", 1)]})
    for name in of_step(*range(1, 10)):
        assert records(tmp_path / "False" / name) == records(tmp_path / "True" / name)
        assert verify(tmp_path / "False" / name).tensors == verify(tmp_path / "True" / name).tensors


def test_the_run_goes_on_while_it_is_written(tmp_path: Path, held: threading.Event) -> None:
    run = fp16_accumulated()
    average = torch.zeros(3)
    trained(run, 0, 7)
    then = state(run)
    checkpointer = Checkpointer(tmp_path, amp=run.engines, background=True)
    path = checkpointer.save(7, extra={"average": average, "log": (log := [1, 2])})
    trained(run, 7, 20)
    average.fill_(1.0)
    log.append(3)
    assert not path.exists()
    held.set()
    checkpointer.wait()
    assert path.is_file()
    resumed = fp16_accumulated()
    info = load_checkpoint(path, resumed.engines)
    assert state(resumed) == then
    assert (info.extra["average"].tolist(), info.extra["log"]) == ([0.0, 0.0, 0.0], [1, 2])


def test_the_next_one_waits_for_the_one_before(run: Run, tmp_path: Path, held: threading.Event) -> None:
    checkpointer = Checkpointer(tmp_path, amp=run.engines, background=True)
    checkpointer.save(1)
    assert names(tmp_path) in ([], [name for name in names(tmp_path) if name.endswith(".part")])
    threading.Timer(0.05, held.set).start()
    checkpointer.save(2)
    checkpointer.wait()
    assert names(tmp_path) == of_step(1, 2)


def test_the_listing_and_a_resume_wait_for_it(run: Run, tmp_path: Path, held: threading.Event) -> None:
    checkpointer = Checkpointer(tmp_path, amp=run.engines, background=True)
    for step, look in ((1, checkpointer.checkpoints), (2, checkpointer.resume)):
        held.clear()
        checkpointer.save(step)
        threading.Timer(0.05, held.set).start()
        look()
        assert (tmp_path / of_step(step)[0]).is_file()


@BOTH
def test_resumes_from_the_newest(background: bool, tmp_path: Path) -> None:
    run = fp16_accumulated()
    checkpointer = Checkpointer(tmp_path, amp=run.engines, background=background)
    for step in range(8):
        run.step(step)
        checkpointer.save(step + 1, extra={"step": step + 1})
    then = state(run)
    seed_everything(9)
    resumed = fp16_accumulated()
    info = Checkpointer(tmp_path, amp=resumed.engines).resume() if not background else None
    if background:
        checkpointer.wait()
        info = Checkpointer(tmp_path, amp=resumed.engines).resume()
    assert info is not None
    assert (info.step, info.extra, info.path.name, info.notes) == (8, {"step": 8}, "step-00000008.pt", ())
    assert state(resumed) == then


def test_there_is_none_yet(run: Run, tmp_path: Path) -> None:
    before = state(run)
    assert Checkpointer(tmp_path, amp=run.engines).resume() is None
    assert state(run) == before


def test_a_damaged_one_is_passed_over(run: Run, tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, amp=run.engines, keep=None)
    states = {}
    for step in range(1, 5):
        run.step(step)
        states[step] = state(run)
        checkpointer.save(step)
    damage(tmp_path / "step-00000004.pt")
    (tmp_path / "step-00000003.pt").write_bytes(b"")
    with pytest.warns(HalfstepWarning) as said:
        info = checkpointer.resume()
    assert info is not None
    assert info.step == 2
    assert state(run) == states[2]
    assert [str(each.message).split(":")[0].split("/")[-1] for each in said] == [
        "step-00000004.pt is damaged",
        "step-00000003.pt is damaged",
    ]
    assert all(str(each.message).endswith(" An earlier checkpoint is used, if there is a valid one.") for each in said)
    assert {each.filename for each in said} == {__file__}
    assert names(tmp_path) == of_step(1, 2, 3, 4)


def test_all_are_damaged(run: Run, tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, amp=run.engines)
    for step in (1, 2):
        damage(checkpointer.save(step))
    before = state(run)
    match = r"None of the 2 checkpoints in .* is valid.*step-00000002\.pt is damaged.*use another folder"
    with pytest.warns(HalfstepWarning, match="is damaged"), pytest.raises(DamagedCheckpointError, match=match):
        checkpointer.resume()
    assert state(run) == before


def test_the_newest_valid_one_does_not_fit(run: Run, tmp_path: Path) -> None:
    Checkpointer(tmp_path, amp=run.engines).save(0)
    model = nn.Linear(6, 1)
    Checkpointer(tmp_path, amp=engine(model, torch.optim.SGD(model.parameters()), "fp16")).save(1)
    with pytest.raises(CheckpointError, match="is another one"):
        Checkpointer(tmp_path, amp=run.engines).resume()


def test_what_does_not_fit_may_be_left_out(run: Run, tmp_path: Path) -> None:
    model = mlp()
    Checkpointer(tmp_path, amp=engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp16")).save(5)
    with pytest.warns(HalfstepWarning) as said:
        info = Checkpointer(tmp_path, amp=run.engines).resume(strict=False)
    assert info is not None
    assert len(info.notes) == len(said) == 2
    assert {each.filename for each in said} == {__file__}


def test_in_the_middle_of_a_step(tmp_path: Path) -> None:
    run = fp16_accumulated()
    checkpointer = Checkpointer(tmp_path, amp=run.engines)
    checkpointer.save(0)
    run.step(0)
    with pytest.raises(StepOrderError, match=r"after 1 of accumulate=3 micro-batches, whose gradients would be lost"):
        checkpointer.resume()


def test_an_interrupt_while_it_is_waited_for(run: Run, tmp_path: Path, held: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer = Checkpointer(tmp_path, amp=run.engines, background=True)
    checkpointer.save(1)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "join", interrupted)
        with pytest.raises(KeyboardInterrupt):
            checkpointer.wait()
    held.set()
    checkpointer.save(2)
    checkpointer.wait()
    assert names(tmp_path) == of_step(1, 2)


def test_several_engines(tmp_path: Path) -> None:
    run = gan()
    checkpointer = Checkpointer(tmp_path, amp=run.engines)
    trained(run, 0, 3)
    then = state(run)
    checkpointer.save(3)
    trained(run, 3, 6)
    assert checkpointer.resume() is not None
    assert state(run) == then


def test_notes_are_said_where_the_run_is_resumed(run: Run, tmp_path: Path) -> None:
    path = Checkpointer(tmp_path, amp=run.engines).save(1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        other = loop(engine(model := mlp(), torch.optim.AdamW(model.parameters(), lr=0.01), "fp16"))
        del said[:]
        Checkpointer(tmp_path, amp=other.engines).resume(strict=False)
        load_checkpoint(path, other.engines, strict=False)
    assert len(said) == 2
    assert {each.filename for each in said} == {__file__}


def test_it_is_public(run: Run, tmp_path: Path) -> None:
    assert halfstep.Checkpointer is Checkpointer
    assert halfstep.save_checkpoint is save_checkpoint


@pytest.mark.parametrize(
    ("counted", "saved_at"),
    [
        (range(1, 41), [10, 20, 30, 40]),
        (range(3, 45, 3), [12, 21, 30, 42]),
        (range(5, 50, 10), [15, 25, 35, 45]),
        ([10, 10, 4, 10, 11], [10, 10]),
        ([0, 25], [25]),
    ],
)
def test_a_loop_may_count_in_strides(counted: Sequence[int], saved_at: list[int], tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    amp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32")
    checkpointer = Checkpointer(tmp_path, amp=amp, every=10, keep=None)
    saved = [step for step in counted if checkpointer.save_if_due(step) is not None]
    assert saved == saved_at
