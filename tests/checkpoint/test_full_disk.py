"""A checkpoint that cannot be written costs no other one, and leaves nothing behind."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from halfstep import MixedPrecision
from halfstep.archive import sealing, shelves, verify
from halfstep.checkpoint import Checkpointer, load_checkpoint, save_checkpoint, writing
from halfstep.errors import CheckpointError
from tests.checkpoint.cases import fp16_fused
from tests.checkpoint.runs import Run, state, trained
from tests.checkpoint.shelves import names, of_step

pytestmark = pytest.mark.usefixtures("one_thread")

PAGE = 4096
SIZE = 2 * 1024**2


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    words = [str(mount), "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)]
    if mount is None or subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("no disk can be mounted here; another test limits the size of a file")
    yield folder
    subprocess.run(["umount", folder], check=True)


def wide() -> MixedPrecision:
    """An engine whose checkpoint takes 160 KB."""
    model = nn.Linear(100, 200)
    return MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), "fp32")


def step(amp: MixedPrecision) -> None:
    amp.train_step(lambda x: amp.model(x).square().mean(), torch.randn(4, 100))


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
def test_a_full_disk(background: bool, small_disk: Path) -> None:
    amp = wide()
    checkpointer = Checkpointer(small_disk, amp=amp, keep=None, background=background)
    saved: list[int] = []

    def save_on() -> None:
        for number in range(100):
            step(amp)
            checkpointer.save(number)
            checkpointer.wait()
            saved.append(number)

    match = r"The disk is full: .* has \d+\.\d KiB free, and this checkpoint needs 1\d\d\.\d KiB\. Nothing was saved; older checkpoints are"
    with pytest.raises(CheckpointError, match=match):
        save_on()
    assert 5 < len(saved) < 20
    assert names(small_disk) == of_step(*saved)
    assert [verify(path).step for path in checkpointer.checkpoints()] == saved[::-1]
    step(amp)
    for path in checkpointer.checkpoints()[3:]:
        path.unlink()
    checkpointer.save(50)
    checkpointer.wait()
    info = Checkpointer(small_disk, amp=wide()).resume()
    assert info is not None
    assert info.step == 50


class Usage(NamedTuple):
    free: int


def test_a_disk_that_is_full_at_any_point_of_the_file(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    amp = wide()
    step(amp)
    older = save_checkpoint(small_disk / "older.pt", amp, step=1)
    pages = os.path.getsize(older) // PAGE + 1
    usage = shutil.disk_usage
    failed = 0
    for left in (*range(0, pages - 3, 7), *range(pages - 3, pages + 4)):
        filler = small_disk / "filler"
        filler.write_bytes(bytes(usage(small_disk).free - left * PAGE))
        with monkeypatch.context() as patched:
            patched.setattr(shutil, "disk_usage", lambda _: Usage(free=10**9))  # As if it were not full when that is looked at.
            said = ""
            try:
                save_checkpoint(small_disk / "newer.pt", amp, step=2)
            except CheckpointError as error:
                said = str(error)
        if said:
            assert re.match(r"Cannot write .*: the disk is full .* Older checkpoints are untouched\. Free some space", said)
            assert names(small_disk) == ["filler", "older.pt"]
            failed += 1
        else:
            assert verify(small_disk / "newer.pt").step == 2
            (small_disk / "newer.pt").unlink()
        filler.unlink()
        assert verify(older).step == 1
    assert pages // 7 < failed < pages // 7 + 7


LIMITED = """
import resource, sys, warnings
from pathlib import Path
from halfstep.checkpoint import Checkpointer
from halfstep.errors import CheckpointError
from tests.checkpoint.test_full_disk import step, wide

warnings.simplefilter("error")
amp = wide()
for background in (False, True):
    folder = Path(sys.argv[1]) / str(background)
    checkpointer = Checkpointer(folder, amp=amp, background=background)
    checkpointer.save(1)
    checkpointer.wait()
    size = (folder / "step-00000001.pt").stat().st_size
    step(amp)
    for limit in (1000, size // 2, size - 200, 2 * size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        try:
            checkpointer.save(2)
            checkpointer.wait()
        except CheckpointError as error:
            print(limit < size, "File too large. Older" in str(error), sorted(path.name for path in folder.iterdir()), step(amp))
        else:
            print(limit < size, "saved", checkpointer.resume().step)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no such limit")
def test_a_file_that_may_not_be_so_large(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, timeout=100, check=False)
    expected = [*["True True ['step-00000001.pt'] None"] * 3, "False saved 2"]
    assert (done.stdout.splitlines(), done.returncode) == (2 * expected, 0), done.stderr


class Short(io.FileIO):
    """A file that writes less than it is given, as those of the system do from 2 GiB on."""

    def write(self, data: Any) -> int:
        return super().write(memoryview(data).cast("B")[:1000])


def test_a_write_that_is_cut_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(path: Path, mode: str, buffering: int = -1) -> Any:
        raw = Short(path, mode.replace("b", ""))
        return raw if buffering == 0 else io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)

    monkeypatch.setattr(Path, "open", opened)
    amp = wide()
    assert load_checkpoint(save_checkpoint(tmp_path / "a.pt", amp, step=1), amp).step == 1


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


STAGES: dict[str, tuple[Any, str]] = {
    "look at the disk": (shutil, "disk_usage"),
    "make the file": (Path, "open"),
    "seal": (writing, "seal"),
    "checksums": (sealing, "checksums"),
    "flush the data": (sealing, "_flush_data"),
    "table of contents": (sealing, "_write_directory"),
    "digest": (sealing, "frame_digest"),
    "flush the file": (os, "fsync"),
    "publish": (writing, "publish"),
    "rename": (Path, "replace"),
    "open the folder": (os, "open"),
    "find the target": (shelves, "_target"),
}


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_failure_at_any_stage(stage: str, background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = fp16_fused()
    checkpointer = Checkpointer(tmp_path, amp=run.engines, background=background)
    checkpointer.save(1)
    checkpointer.wait()
    before = tmp_path.joinpath("step-00000001.pt").read_bytes()
    run.step(0)
    with monkeypatch.context() as patched:
        patched.setattr(*STAGES[stage], raising(OSError(5, "Input/output error")))
        if background:
            checkpointer.save(2)
        with pytest.raises((CheckpointError, OSError), match="Input/output error"):
            checkpointer.save(3 if background else 2)
    left = names(tmp_path)
    assert left in (of_step(1), of_step(1, 2) if stage == "open the folder" else of_step(1))
    assert tmp_path.joinpath("step-00000001.pt").read_bytes() == before
    check_that_it_goes_on(run, checkpointer)


def check_that_it_goes_on(run: Run, checkpointer: Checkpointer) -> None:
    trained(run, 1, 3)
    checkpointer.save(3)
    then = state(run)
    assert checkpointer.resume() is not None
    assert state(run) == then


def test_a_folder_that_knows_no_flushing_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, sync = fp16_fused(), os.fsync

    def refuse(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(22, "Invalid argument")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    assert save_checkpoint(tmp_path / "a.pt", run.engines, step=1).is_file()
