"""Files that are damaged, or made to do harm: each is refused as such, nothing in it is run, and the run is as it was."""

from __future__ import annotations

import copy
import os
import random
import shutil
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from halfstep.archive import seal, verify
from halfstep.checkpoint import load_checkpoint, save_checkpoint
from halfstep.errors import DamagedCheckpointError
from halfstep.randomness import seed_everything
from tests.checkpoint.cases import fp16_accumulated
from tests.checkpoint.runs import Run, state, trained

pytestmark = pytest.mark.usefixtures("one_thread")

COUNT = 1000


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved in the middle of a step."""
    seed_everything(1)
    run = fp16_accumulated()
    trained(run, 0, 8)
    return save_checkpoint(tmp_path_factory.mktemp("good") / "good.pt", run.engines, step=8, extra={"note": "fine", "mean": torch.ones(3)})


def fresh() -> Run:
    seed_everything(2)
    return fp16_accumulated()


def resealed(path: Path, tree: Any, good: Path) -> Path:
    """A file of a state that says of itself what a good one does, with checksums that are right."""
    torch.save(tree, path)
    seal(path, replace(verify(good), tensors=()))
    return path


class Calls:
    """A pickle of this calls a function when it is read."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> Any:
        return self.function, self.args


class Builds(Calls):
    """A pickle of this hands a state to what the function made."""

    def __reduce__(self) -> Any:
        return self.function, self.args[:-1], self.args[-1]


def within(tree: Any, place: tuple[Any, ...], value: Any) -> Any:
    """The same state with something else at one place."""
    head, *rest = place
    changed: Any = copy.copy(tree) if isinstance(tree, dict) else list(tree)
    changed[head] = within(changed[head], tuple(rest), value) if rest else value
    return changed


HOSTILE: dict[str, Callable[[Path], Any]] = {
    "shell": lambda canary: Calls(os.system, f"touch {canary}"),
    "eval": lambda canary: Calls(eval, f"open({str(canary)!r}, 'w')"),
    "exec": lambda canary: Calls(exec, f"open({str(canary)!r}, 'w')"),
    "path": lambda canary: Calls(Path.touch, canary),
    "copy": lambda canary: Calls(shutil.copyfile, "/etc/hostname", str(canary)),
    "torch's own": lambda canary: Calls(torch.save, [1], str(canary)),
    "unlimited load": lambda canary: Calls(torch.load, str(canary)),
    "module": lambda canary: Calls(getattr, Calls(__import__, "os"), "system"),
    "state of a module": lambda canary: Builds(torch.nn.Linear, 1, 1, {"training": Calls(os.system, f"touch {canary}")}),
    "state of a dictionary": lambda canary: Builds(OrderedDict, {"update": Calls(os.system, f"touch {canary}")}),
}


@pytest.mark.parametrize("place", [("extra", "note"), ("model", "0.weight"), ("random", "numpy"), ("format",), ()], ids=".".join)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_state_that_would_run_code(name: str, place: tuple[str, ...], good: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    bad = HOSTILE[name](canary)
    tree = torch.load(good, weights_only=True)
    path = resealed(tmp_path / "bad.pt", within(tree, place, bad) if place else bad, good)
    run = fresh()
    before = state(run)
    with pytest.raises(DamagedCheckpointError, match=r"bad\.pt is refused: .* would have to be run to be read, .* Nothing in it was run"):
        load_checkpoint(path, run.engines)
    assert not canary.exists()
    assert state(run) == before


def junk() -> list[Any]:
    tensors = [torch.ones(2), torch.zeros(0), torch.eye(2).to_sparse()]
    return [None, -1, 2**70, 0.5, float("nan"), "x", b"x", [], [1, "x"], {}, {"x": 1}, (), *tensors]


def places(tree: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of each value in a state; of long lists the first few."""
    if place:
        yield place
    items = tree.items() if isinstance(tree, dict) else enumerate(tree[:3]) if isinstance(tree, list | tuple) else ()
    for key, value in items:
        yield from places(value, (*place, key))


@pytest.mark.filterwarnings("ignore::halfstep.errors.HalfstepWarning")
def test_a_state_with_anything_anywhere(good: Path, tmp_path: Path) -> None:
    tree = torch.load(good, weights_only=True)
    chance = random.Random(0)
    run = fresh()
    before = state(run)
    for place in places(tree):
        if place[0] == "extra":
            continue
        for value in chance.sample(junk(), 1):
            path = tmp_path / "bad.pt"
            path.unlink(missing_ok=True)
            resealed(path, within(tree, place, value), good)
            try:
                load_checkpoint(path, run.engines)
            except Exception:  # Whatever torch makes of it.
                assert state(run) == before, (place, value)
            else:
                run = fresh()
                assert state(run) == before


def damaged(content: bytes, records: list[tuple[int, int]], chance: random.Random) -> bytes:
    """A file that is not what was saved, in one of many ways."""
    changed = bytearray(content)
    match chance.randrange(8):
        case 0 | 1:
            for place in chance.sample(range(8 * len(content)), chance.choice([1, 1, 2, 30])):
                changed[place // 8] ^= 1 << place % 8
        case 2:
            del changed[chance.randrange(len(content)) :]
        case 3:
            del changed[: chance.randrange(1, len(content))]
        case 4:
            begin = chance.randrange(len(content))
            changed[begin : begin + 512] = bytes(len(changed[begin : begin + 512]))
        case 5:
            (one, size), (other, other_size) = chance.sample(records, 2)
            length = min(size, other_size)
            changed[one : one + length], changed[other : other + length] = content[other : other + length], content[one : one + length]
        case 6:
            place = chance.randrange(len(content))
            changed[place:place] = chance.choice([b"\0", content[:100], chance.randbytes(chance.randrange(1, 300))])
        case _:  # A pickle in the place of the state's, and one more byte, so that not even the checksum is right by chance.
            begin = content.index(b"\x80\x02")
            attack = b"cos\nsystem\nX" + len(order := b"touch canary").to_bytes(4, "little") + order + b"\x85R."
            changed[begin + 2 : begin + 2 + len(attack)] = attack
            begin = chance.randrange(len(content))
            changed[begin] ^= chance.randrange(256)
    return bytes(changed)


def test_a_thousand_damaged_files(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    content = good.read_bytes()
    with zipfile.ZipFile(good) as archive:
        records = [(content.index(data := archive.read(info)), len(data)) for info in archive.infolist() if info.file_size > 8]
    run = fresh()
    before = state(run)
    path = tmp_path / "bad.pt"
    chance = random.Random(0)
    made = 0
    while made < COUNT:
        changed = damaged(content, records, chance)
        if changed == content:
            continue
        path.write_bytes(changed)
        with pytest.raises(DamagedCheckpointError, match=r"bad\.pt "):
            load_checkpoint(path, run.engines)
        assert state(run) == before
        made += 1
    assert not (tmp_path / "canary").exists()
    path.write_bytes(content)
    assert load_checkpoint(path, run.engines).step == 8
    assert state(run) != before


def test_one_of_a_run_that_is_other_than_it_says(good: Path, tmp_path: Path) -> None:
    tree = torch.load(good, weights_only=True)
    run = fresh()
    before = state(run)
    for changed, match in (
        ({**tree, "step": 7}, "is damaged: it says of itself that it is of step 8, and holds 7"),
        ({**tree, "format": "other 1"}, "it should begin with 'halfstep checkpoint 1', and begins with 'other 1'"),
        ([1], "is no checkpoint of halfstep inside: .* and begins with None"),
        ({key: value for key, value in tree.items() if key != "optimizer"}, "is damaged: its part 'optimizer' is missing"),
        ({key: value for key, value in tree.items() if key != "random"}, "is damaged: its part 'random' is missing"),
    ):
        path = resealed(tmp_path / "bad.pt", changed, good)
        with pytest.raises(DamagedCheckpointError, match=match):
            load_checkpoint(path, run.engines)
        assert state(run) == before
        path.unlink()
