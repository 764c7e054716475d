"""Files that were made to do harm."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from halfstep.checkpoint.stand_ins import read_inert
from halfstep.errors import CheckpointError
from tests.checkpoint.objects import (
    CANARY,
    Acting,
    Born,
    Dictionary,
    List,
    Thing,
    Waking,
    pickled,
    written,
)


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def command() -> str:
    return f"{sys.executable} -c \"open('{CANARY}', 'w')\""


ATTACKS: dict[str, Callable[[], Any]] = {
    "os.system": lambda: Acting(os.system, command()),
    "os.open": lambda: Acting(os.open, CANARY, os.O_CREAT),
    "exec": lambda: Acting(exec, f"open('{CANARY}', 'w')"),
    "eval": lambda: Acting(eval, f"open('{CANARY}', 'w')"),
    "open": lambda: Acting(open, CANARY, "w"),
    "torch.save": lambda: Acting(torch.save, 1, CANARY),
    "touch": lambda: Acting(Path.touch, Path(CANARY)),
    "setstate": Waking,
    "key": lambda: {Waking(): 1},
    "in a list": lambda: List([Acting(open, CANARY, "w")]),
    "in a tensor": lambda: Acting(torch._tensor._rebuild_from_type_v2, open, Tensor, (CANARY, "w"), {}),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of files that the attacks leave open
@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
@pytest.mark.parametrize("forced", [False, True])
def test_nothing_in_a_file_is_executed(
    attack: Callable[[], Any], old: bool, forced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if forced:
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    path = written({"scale": 1.0, "attack": attack()}, tmp_path / "state.pt", _use_new_zipfile_serialization=not old)
    try:
        read = read_inert(path)
    except CheckpointError:
        pass
    else:
        assert read["scale"] == 1.0
    assert not Path(CANARY).exists()
    with suppress(Exception):
        torch.load(path, weights_only=False)
    assert Path(CANARY).exists(), "the attack itself does not work"


def test_an_object_is_not_made(tmp_path: Path) -> None:
    path = written({"born": Born()}, tmp_path / "state.pt")
    Path(CANARY).unlink()
    assert read_inert(path)["born"].name.endswith("Born")
    assert not Path(CANARY).exists()


def test_no_module_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "canary_module.py").write_text(f"open({CANARY!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    read = read_inert(pickled(tmp_path / "state.pt", b"\x80\x02ccanary_module\nThing\n)\x81."))
    assert read.name == "canary_module.Thing"
    assert "canary_module" not in sys.modules
    assert not Path(CANARY).exists()


GADGETS = {
    # The name of a function, put on the stack by another function.
    "getattr": b"\x80\x02cbuiltins\ngetattr\n(cbuiltins\ndict\nX\x03\x00\x00\x00gettR(X\x05\x00\x00\x00a.txttR.",
    "a call of what was made": b"\x80\x02cbuiltins\neval\nX\x01\x00\x00\x001\x85R)R.",
    "state for a class": b"\x80\x02cbuiltins\nobject\n}X\x01\x00\x00\x00aK\x01sb.",
    "items for a function": b"\x80\x02cbuiltins\neval\nK\x01K\x02s.",
    "protocol 4": pickle.dumps(Acting(open, CANARY, "w"), protocol=4),
    "protocol 0": pickle.dumps(Acting(open, CANARY, "w"), protocol=0),
    "nothing": b"",
    "no end": b"\x80\x02}",
    "an empty stack": b"\x80\x02.",
    "a mark too few": b"\x80\x02cbuiltins\neval\nt.",
    "no such memory": b"\x80\x02cbuiltins\neval\nh\x05.",
    "noise": bytes(range(256)),
}


@pytest.mark.parametrize("code", GADGETS.values(), ids=GADGETS)
def test_pickles_made_by_hand_are_refused(code: bytes, tmp_path: Path) -> None:
    path = pickled(tmp_path / "state.pt", code)
    with pytest.raises(CheckpointError, match=r"state\.pt (cannot be read without running code|is damaged)"):
        read_inert(path)
    assert not Path(CANARY).exists()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(st.data())
def test_a_pickle_that_was_tampered_with_is_read_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    code = bytearray(pickle.dumps({"a": Dictionary(b=1), "b": Thing(List([1])), "c": Waking()}, protocol=2))
    for place in data.draw(st.lists(st.integers(0, len(code) - 1), min_size=1, max_size=4)):
        code[place] = data.draw(st.integers(0, 255))
    with suppress(CheckpointError):
        read_inert(pickled(tmp_path / "state.pt", bytes(code)))
    assert not Path(CANARY).exists()


def test_what_a_refusal_says(tmp_path: Path) -> None:
    path = written({"attack": Acting(os.system, command())}, tmp_path / "state.pt")
    with pytest.raises(CheckpointError, match=r"it names (posix|nt)\.system, which no state of a training run needs\. Do not load it"):
        read_inert(path)
    path = pickled(tmp_path / "state.pt", GADGETS["protocol 4"])
    with pytest.raises(
        CheckpointError, match=r"without running code \(Unsupported operand 149\)\. If you trust .* weights_only=False\) returned in place"
    ):
        read_inert(path)
    path = pickled(tmp_path / "state.pt", GADGETS["a call of what was made"])
    with pytest.raises(
        CheckpointError, match=r"without running code \(Trying to call reduce for unrecognized function <a builtins\.eval>\)"
    ):
        read_inert(path)
