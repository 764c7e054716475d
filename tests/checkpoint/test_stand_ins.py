from __future__ import annotations

import os
import pickle
import threading
import zipfile
from collections import OrderedDict, defaultdict, deque
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from halfstep.checkpoint.stand_ins import StandIn, read_inert
from halfstep.errors import CheckpointError
from tests.checkpoint.objects import (
    Acting,
    Dictionary,
    Kind,
    List,
    Ordered,
    Slotted,
    Thing,
    Wrapper,
    written,
)


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_plain_data_is_as_it_was_saved(tmp_path: Path) -> None:
    saved = {"weight": torch.arange(6.0).view(2, 3), "epoch": 3, "name": "run", "rates": [0.5, (1, None)], "order": OrderedDict(a=True)}
    read = read_inert(written(saved, tmp_path / "state.pt"))
    assert torch.equal(read.pop("weight"), saved.pop("weight"))  # type: ignore[arg-type]
    assert read == saved


def test_each_unknown_object_has_a_stand_in(tmp_path: Path) -> None:
    saved = {
        "thing": Thing([1, 2]),
        "slotted": Slotted("a"),
        "date": date(2026, 1, 31),
        "path": Path("runs/a"),
        "frozen": frozenset([7]),
        "function": nn.functional.relu,
        "module": nn.Linear(2, 2),
        "array": np.arange(3.0),
    }
    read = read_inert(written(saved, tmp_path / "state.pt"))
    assert read["thing"].state == {"value": [1, 2]}
    assert read["slotted"].state == (None, {"value": "a"})
    assert read["path"].arguments == ("runs", "a")
    assert read["frozen"].arguments == ([7],)
    assert isinstance(read["function"], type)
    assert {name: type(value) for name, value in read.items() if name != "function"} == dict.fromkeys(set(saved) - {"function"}, StandIn)
    assert repr(read["date"]) == "<a datetime.date>"
    assert repr(read["thing"]) == f"<a {Thing.__module__}.Thing>"
    assert torch.equal(read["module"].state["_parameters"]["weight"], saved["module"].weight)  # type: ignore[attr-defined]


def test_tensors_of_unknown_kinds_can_be_passed_over(tmp_path: Path) -> None:
    saved = {"kind": torch.ones(2).as_subclass(Kind), "wrapper": Wrapper(torch.ones(2)), "after": 1}
    read = read_inert(written(saved, tmp_path / "state.pt"))
    assert list(read) == list(saved)
    assert read["after"] == 1
    assert not isinstance(read["kind"], Kind)


LIKE_LISTS: list[Any] = [list, List, deque, tuple]
LIKE_DICTIONARIES: list[Any] = [dict, Dictionary, Ordered, OrderedDict, lambda made: defaultdict(list, made)]


def containers() -> st.SearchStrategy[Any]:
    def nests(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        lists, mappings = st.lists(values, max_size=4), st.dictionaries(st.text(max_size=3), values, max_size=4)
        filled: list[st.SearchStrategy[Any]] = [lists.map(kind) for kind in LIKE_LISTS]
        named: list[st.SearchStrategy[Any]] = [mappings.map(kind) for kind in LIKE_DICTIONARIES]
        things: st.SearchStrategy[Any] = st.builds(Thing, values)
        return st.one_of(*filled, *named, things)

    numbers = st.integers(-(2**70), 2**70) | st.floats()
    return st.recursive(st.none() | numbers | st.text(max_size=4) | st.binary(min_size=1, max_size=4), nests)


def bare(value: Any) -> Any:
    """A nest without the kinds of its containers, which those that are empty have not shown, either."""
    if isinstance(value, dict | list | deque | tuple) and not value:
        return "empty"
    if isinstance(value, dict):
        return {name: bare(each) for name, each in value.items()}
    if isinstance(value, list | deque | tuple):
        return [bare(each) for each in value]
    if isinstance(value, Thing):
        return ("thing", bare(value.value))
    if isinstance(value, StandIn):
        return ("thing", bare(value.state["value"])) if value.state else "empty"
    return repr(value)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@given(containers())
def test_containers_of_unknown_kinds_are_read_as_those_that_they_stem_from(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "state.pt"
    assert bare(read_inert(written({"value": [value, value]}, path))) == bare({"value": [value, value]})


def test_a_file_without_checksums_is_read(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        path = written({"weights": torch.ones(9), "nested": Dictionary(a=Dictionary())}, tmp_path / "state.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    assert read_inert(path)["nested"] == {"a": {}}


def test_the_form_that_torch_wrote_before_1_6(tmp_path: Path) -> None:
    path = written({"weight": torch.ones(2), "scale": 4.0}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert read_inert(path)["scale"] == 4.0
    path = written({"thing": Thing(1)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"old\.pt has the form of a torch before 1\.6, and holds more than tensors and plain values"):
        read_inert(path)
    whole = written({"weight": torch.ones(99)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False).read_bytes()
    path.write_bytes(whole[:-20])
    with pytest.raises(CheckpointError, match=r"old\.pt is damaged, or no file that torch\.save wrote"):
        read_inert(path)


@pytest.mark.parametrize("content", [b"", b"PK", b"{}", pickle.dumps({"scale": 1.0}), b"x" * 100])
def test_files_that_torch_did_not_write(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "state.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"state\.pt is no file that torch\.save wrote\. Name the file that holds the scaler's"):
        read_inert(tmp_path / "state.pt")


def test_damaged_files(tmp_path: Path) -> None:
    path = written({"weight": torch.ones(99), "scale": 4.0}, tmp_path / "state.pt")
    whole = path.read_bytes()
    for length in (len(whole) - 1, len(whole) // 2, 40):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"state\.pt is damaged, or no file that torch\.save wrote"):
            read_inert(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/b.txt", "text")
    with pytest.raises(CheckpointError, match=r"is damaged, or no file"):
        read_inert(path)


def test_a_program_of_torchscript_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "program.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/constants.pkl", b"\x80\x02.")
        archive.writestr("archive/data.pkl", b"\x80\x02}.")
    with pytest.raises(CheckpointError, match=r"program\.pt is damaged, or no file that torch\.save wrote"):
        read_inert(path)


def test_a_file_that_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match=r"state\.pt cannot be read: No such file or directory\. Name the file"):
        read_inert(tmp_path / "state.pt")

    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    written({}, tmp_path / "state.pt")
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(CheckpointError, match=r"state\.pt cannot be read: Permission denied"):
        read_inert(tmp_path / "state.pt")


@pytest.mark.parametrize("old", [False, True])
def test_torch_is_told_to_run_nothing_and_to_read_no_weights(old: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []
    load = torch.load

    def spy(*given: Any, **settings: Any) -> Any:
        told.append(settings)
        return load(*given, **settings)

    monkeypatch.setattr(torch, "load", spy)
    path = written({"weight": torch.ones(2)}, tmp_path / "state.pt", _use_new_zipfile_serialization=not old)
    read_inert(path)
    assert told == [{"map_location": "cpu", "weights_only": True, "mmap": not old}]


@pytest.mark.parametrize("saved", [Thing(1), Acting(os.system, "true")])
def test_what_torch_counts_as_plain_data_stays_as_it_was(saved: Any, tmp_path: Path) -> None:
    path = written({"saved": saved, "more": Dictionary()}, tmp_path / "state.pt")
    before = set(torch.serialization.get_safe_globals())
    with suppress(CheckpointError):
        read_inert(path)
    assert set(torch.serialization.get_safe_globals()) == before
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        torch.load(path, weights_only=True)


def test_what_the_program_itself_has_allowed_is_what_it_is(tmp_path: Path) -> None:
    path = written({"thing": Thing(3), "slotted": Slotted(4)}, tmp_path / "state.pt")
    with torch.serialization.safe_globals([Thing]):
        read = read_inert(path)
    assert read["thing"].value == 3
    assert isinstance(read["slotted"], StandIn)


def test_several_threads_read_at_once(tmp_path: Path) -> None:
    path = written([Thing(number) for number in range(300)], tmp_path / "state.pt")
    failed: list[BaseException] = []

    def read() -> None:
        try:
            for _ in range(5):
                assert len(read_inert(path)) == 300
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed
