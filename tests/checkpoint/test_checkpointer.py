from __future__ import annotations

import threading
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import halfstep
from halfstep import MixedPrecision
from halfstep.archive import part_of, verify
from halfstep.checkpoint import Checkpointer, load_checkpoint, save_checkpoint
from halfstep.errors import (
    CheckpointError,
    ConfigurationError,
    DamagedCheckpointError,
    HalfstepWarning,
    InvalidTypeError,
    StepOrderError,
)
from halfstep.randomness import seed_everything
from tests.checkpoint.cases import engine, fp16_accumulated, fp16_fused, gan, loop, mlp
from tests.checkpoint.runs import Run, state, trained

pytestmark = pytest.mark.usefixtures("one_thread")

BOTH = pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def of_step(*steps: int) -> list[str]:
    return [f"step-{step:08d}.pt" for step in steps]


def amp_of(run: Run) -> MixedPrecision:
    assert isinstance(run.engines, MixedPrecision)
    return run.engines


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


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


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> Callable[[], None]:
    """Has the next checkpoint fail when some of it was written; returns what ends that."""
    save = torch.save

    def fail(tree: Any, file: Any) -> None:
        file.write(b"PK" * 100)
        raise error

    monkeypatch.setattr(torch, "save", fail)
    return lambda: monkeypatch.setattr(torch, "save", save)


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
    calls = []

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
        "step-00000003.pt is empty. An earlier checkpoint is used, if there is a valid one.",
    ]
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
    Checkpointer(tmp_path, amp=(other := loop(engine(model := nn.Linear(6, 1), torch.optim.SGD(model.parameters()), "fp16"))).engines).save(1)
    assert other is not None
    Checkpointer(tmp_path, amp=run.engines).save(0)
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
    with pytest.raises(StepOrderError, match=r"load_checkpoint\(\) was called after 1 of accumulate=3 micro-batches"):
        checkpointer.resume()


def test_the_only_valid_one_stays_when_newer_ones_are_damaged(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer = Checkpointer(tmp_path, amp=run.engines, keep=2)
    checkpointer.save(1)
    for step in (2, 3):
        (tmp_path / f"step-{step:08d}.pt").write_bytes(b"damaged")
    end = failing(monkeypatch, OSError(28, "No space left on device"))
    with pytest.raises(CheckpointError, match="No space left"):
        checkpointer.save(4)
    assert names(tmp_path) == of_step(1, 2, 3)
    end()
    with pytest.warns(HalfstepWarning, match="damaged|is no checkpoint"):
        assert checkpointer.resume() is not None
    for step in (2, 3, 4, 5):
        checkpointer.save(step)
        assert any(_is_valid(path) for path in checkpointer.checkpoints())
    assert names(tmp_path) == of_step(4, 5)


def _is_valid(path: Path) -> bool:
    try:
        verify(path)
    except DamagedCheckpointError:
        return False
    return True


def test_parts_of_the_dead_are_removed(run: Run, tmp_path: Path) -> None:
    # The number of no process, and this one's own, which writes.
    own = part_of(tmp_path / "step-00000001.pt")
    head, tail = own.name.split("-", 2)[:2], own.name.split("-", 3)[3]
    dead = tmp_path / f"{'-'.join(head)}-4194303-{tail}"
    for path in (own, dead):
        path.write_bytes(b"half")
    Checkpointer(tmp_path, amp=run.engines)
    assert names(tmp_path) == [own.name]


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), RuntimeError("stream failed"), MemoryError()])
def test_one_that_cannot_be_written(error: Exception, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer = Checkpointer(tmp_path, amp=run.engines)
    checkpointer.save(1)
    end = failing(monkeypatch, error)
    with pytest.raises((CheckpointError, MemoryError)):
        checkpointer.save(2)
    assert names(tmp_path) == of_step(1)
    end()
    run.step(0)
    checkpointer.save(2)
    assert names(tmp_path) == of_step(1, 2)


def test_one_that_cannot_be_written_in_the_background(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer = Checkpointer(tmp_path, amp=run.engines, background=True)
    checkpointer.save(1)
    checkpointer.wait()
    calls: list[Callable[[], Any]] = [lambda: checkpointer.save(3), checkpointer.wait, checkpointer.checkpoints, checkpointer.resume]
    for call in calls:
        end = failing(monkeypatch, OSError(28, "No space left on device"))
        checkpointer.save(2)
        with pytest.raises(CheckpointError, match=r"Cannot write .*step-00000002.*No space left on device"):
            call()
        end()
        run.step(0)
        checkpointer.wait()  # It is said once.
        assert names(tmp_path) == of_step(1)
    checkpointer.save(2)
    checkpointer.wait()
    assert names(tmp_path) == of_step(1, 2)


def test_the_end_of_the_block_says_what_went_wrong(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end = failing(monkeypatch, OSError(28, "No space left on device"))
    with pytest.raises(CheckpointError, match="No space left"), Checkpointer(tmp_path, amp=run.engines, background=True) as checkpointer:
        checkpointer.save(1)
    end()
    assert names(tmp_path) == []


def test_an_exception_in_the_block_comes_first(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        with Checkpointer(tmp_path, amp=run.engines, background=True) as checkpointer:
            checkpointer.save(1)
            raise ZeroDivisionError("mine")

    end = failing(monkeypatch, OSError(28, "No space left on device"))
    with pytest.warns(HalfstepWarning, match="The last checkpoint was not written: .*No space left"), pytest.raises(ZeroDivisionError):
        fail()
    end()
    with pytest.raises(ZeroDivisionError):
        fail()
    assert names(tmp_path) == of_step(1)


def test_an_older_one_that_cannot_be_removed(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer = Checkpointer(tmp_path, amp=run.engines, keep=1)
    checkpointer.save(1)

    def fail(*_: Any, **__: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", fail)
        with pytest.warns(HalfstepWarning, match=r"step-00000001\.pt.*Operation not permitted"):
            checkpointer.save(2)
    assert names(tmp_path) == of_step(1, 2)
    checkpointer.save(3)
    assert names(tmp_path) == of_step(3)


def test_an_interrupt_while_it_is_written(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer = Checkpointer(tmp_path, amp=run.engines)
    checkpointer.save(1)
    end = failing(monkeypatch, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        checkpointer.save(2)
    end()
    assert names(tmp_path) == of_step(1)
    assert torch.serialization.get_crc32_options()
    checkpointer.save(2)
    assert names(tmp_path) == of_step(1, 2)


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


def test_the_folder_is_gone(run: Run, tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "here", amp=run.engines)
    (tmp_path / "here").rmdir()
    assert (checkpointer.checkpoints(), checkpointer.resume()) == ([], None)
    with pytest.raises(CheckpointError, match=r"Cannot write .*step-00000001.*No such file or directory"):
        checkpointer.save(1)


def test_the_folder_is_a_file(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match=r"Cannot make the folder .*file for checkpoints: File exists"):
        Checkpointer(tmp_path / "file", amp=run.engines)
    with pytest.raises(CheckpointError, match=r"Cannot make the folder .*sub for checkpoints: Not a directory"):
        Checkpointer(tmp_path / "file" / "sub", amp=run.engines)


def test_a_folder_that_may_not_be_written_to(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer = Checkpointer(tmp_path, amp=run.engines)

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", refuse)
        with pytest.raises(CheckpointError, match=r"Cannot write .*step-00000001.*Permission denied"):
            checkpointer.save(1)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "mkdir", refuse)
        with pytest.raises(CheckpointError, match="Cannot make the folder .*Permission denied"):
            Checkpointer(tmp_path / "other", amp=run.engines)


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"every": 0}, ConfigurationError, r"Checkpointer\(every=0\): it is 1 or more, or None"),
        ({"keep": -1}, ConfigurationError, r"Checkpointer\(keep=-1\): it is 1 or more, or None"),
        ({"every": 2.0}, InvalidTypeError, r"Checkpointer\(every=\.\.\.\) takes a whole number or None, not 2\.0"),
        ({"keep": True}, InvalidTypeError, r"Checkpointer\(keep=\.\.\.\) takes a whole number or None, not True"),
        ({"background": 1}, InvalidTypeError, r"Checkpointer\(background=\.\.\.\) takes True or False, not 1"),
        ({"amp": nn.Linear(1, 1)}, InvalidTypeError, r"Checkpointer\(amp=\.\.\.\) takes a halfstep.MixedPrecision, .* not a Linear"),
        ({"amp": {}}, ConfigurationError, "was given no engine: the dictionary is empty"),
        ({"folder": 3}, InvalidTypeError, r"Checkpointer\(folder, \.\.\.\) takes a path, .* not a int"),
        ({"folder": ""}, CheckpointError, "was given an empty path"),
    ],
)
def test_arguments(settings: dict[str, Any], error: type[Exception], match: str, run: Run, tmp_path: Path) -> None:
    given = {"folder": tmp_path, "amp": run.engines, **settings}
    with pytest.raises(error, match=match):
        Checkpointer(given.pop("folder"), **given)


def test_arguments_of_its_methods(run: Run, tmp_path: Path) -> None:
    checkpointer = Checkpointer(str(tmp_path), amp=run.engines)
    with pytest.raises(ConfigurationError, match=r"save_if_due\(step\) needs Checkpointer\(every=\.\.\.\)"):
        checkpointer.save_if_due(1)
    with pytest.raises(ConfigurationError, match=r"step is -1; allowed are whole numbers from 0"):
        checkpointer.save(-1)
    with pytest.raises(InvalidTypeError, match=r"step is a whole number, as you count steps, not 1\.5"):
        checkpointer.save(1.5)  # type: ignore[arg-type]
    with pytest.raises(InvalidTypeError, match=r"extra is a dictionary of what else to keep, not a list"):
        checkpointer.save(1, extra=lambda: [1])  # type: ignore[arg-type,return-value]
    with pytest.raises(InvalidTypeError, match=r"load_checkpoint\(strict=\.\.\.\) takes True or False, not 'no'"):
        checkpointer.save(1) and checkpointer.resume(strict="no")  # type: ignore[arg-type]
    assert names(tmp_path) == of_step(1)


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
    amp_of(run)
