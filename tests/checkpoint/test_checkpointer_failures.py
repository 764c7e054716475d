"""What goes wrong around a folder of checkpoints costs none of those that are there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from halfstep.archive import part_of, verify
from halfstep.checkpoint import Checkpointer
from halfstep.errors import (
    CheckpointError,
    ConfigurationError,
    DamagedCheckpointError,
    HalfstepWarning,
    InvalidTypeError,
)
from tests.checkpoint.cases import fp16_fused
from tests.checkpoint.runs import Run
from tests.checkpoint.shelves import failing, names, of_step

pytestmark = pytest.mark.usefixtures("one_thread")

BOTH = pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])


@pytest.fixture
def run() -> Run:
    return fp16_fused()


def test_the_only_valid_one_stays_when_newer_ones_are_damaged(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer = Checkpointer(tmp_path, amp=run.engines, keep=2)
    checkpointer.save(1)
    for step in (2, 3):
        (tmp_path / f"step-{step:08d}.pt").write_bytes(b"damaged")
    end = failing(monkeypatch, OSError(28, "No space left on device"))
    with pytest.raises(CheckpointError, match="the disk is full"):
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
        with pytest.raises(CheckpointError, match=r"Cannot write .*step-00000002.*the disk is full"):
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
    with pytest.raises(CheckpointError, match="the disk is full"), Checkpointer(tmp_path, amp=run.engines, background=True) as checkpointer:
        checkpointer.save(1)
    end()
    assert names(tmp_path) == []


def test_an_exception_in_the_block_comes_first(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        with Checkpointer(tmp_path, amp=run.engines, background=True) as checkpointer:
            checkpointer.save(1)
            raise ZeroDivisionError("mine")

    end = failing(monkeypatch, OSError(28, "No space left on device"))
    with pytest.warns(HalfstepWarning, match="The last checkpoint was not written: .*the disk is full"), pytest.raises(ZeroDivisionError):
        fail()
    end()
    with pytest.raises(ZeroDivisionError):
        fail()
    assert names(tmp_path) == of_step(1)


@BOTH
def test_an_older_one_that_cannot_be_removed(background: bool, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    checkpointer = Checkpointer(tmp_path, amp=run.engines, keep=1, background=background)
    checkpointer.save(1)
    checkpointer.wait()
    match = r"That of step 2 is saved, but .*step-00000001\.pt cannot be removed: Operation not permitted"
    unlink = Path.unlink
    monkeypatch.setattr(Path, "unlink", fail)
    if background:
        checkpointer.save(2)
    with pytest.raises(CheckpointError, match=match):
        checkpointer.save(3 if background else 2)
    monkeypatch.setattr(Path, "unlink", unlink)
    assert names(tmp_path) == of_step(1, 2)
    checkpointer.save(3)
    checkpointer.wait()
    assert names(tmp_path) == of_step(3)


def test_an_older_one_that_somebody_else_removes(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer = Checkpointer(tmp_path, amp=run.engines, keep=1)
    checkpointer.save(1)
    unlink = Path.unlink

    def twice(path: Path, **settings: Any) -> None:
        unlink(path)
        unlink(path, **settings)

    monkeypatch.setattr(Path, "unlink", twice)
    checkpointer.save(2)
    assert names(tmp_path) == of_step(2)


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
        with pytest.raises(CheckpointError, match=r"Cannot make the folder .*Permission denied"):
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
        ({"folder": ""}, CheckpointError, r"Checkpointer\(folder, \.\.\.\) was given '', which is no name"),
    ],
)
def test_arguments(settings: dict[str, Any], error: type[Exception], match: str, run: Run, tmp_path: Path) -> None:
    given = {"folder": tmp_path, "amp": run.engines, **settings}
    with pytest.raises(error, match=match):
        Checkpointer(given.pop("folder"), **given)


def test_arguments_of_its_methods(run: Run, tmp_path: Path) -> None:
    checkpointer = Checkpointer(str(tmp_path), amp=run.engines)
    checkpointer.save(1)
    with pytest.raises(ConfigurationError, match=r"save_if_due\(step\) needs Checkpointer\(every=\.\.\.\)"):
        checkpointer.save_if_due(1)
    with pytest.raises(ConfigurationError, match=r"step is -1; allowed are whole numbers from 0"):
        checkpointer.save(-1)
    with pytest.raises(InvalidTypeError, match=r"step is a whole number, as you count steps, not 1\.5"):
        checkpointer.save(1.5)  # type: ignore[arg-type]
    with pytest.raises(InvalidTypeError, match=r"extra is a dictionary of what else to keep, not a list"):
        checkpointer.save(1, extra=lambda: [1])  # type: ignore[arg-type]
    with pytest.raises(InvalidTypeError, match=r"load_checkpoint\(strict=\.\.\.\) takes True or False, not 'no'"):
        checkpointer.resume(strict="no")  # type: ignore[arg-type]
    assert names(tmp_path) == of_step(1)
