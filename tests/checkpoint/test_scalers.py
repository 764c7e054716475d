from __future__ import annotations

import io
from collections import OrderedDict, deque
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfstep.checkpoint.scalers import FoundScaler, find_scalers, number
from halfstep.checkpoint.stand_ins import StandIn, read_inert
from halfstep.scaler import LossScaler
from tests.checkpoint.loops import follow, scaler

TORCH = {"scale": 512.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 7, "_growth_tracker": 3}
OTHER = {**TORCH, "scale": 256.0}
APEX = {"loss_scale": 512.0, "unskipped": 3}
SHORT = {"scale": 512.0, "_growth_tracker": 3}


def found(tree: Any, **where: str) -> list[tuple[str, dict[str, Any]]]:
    return [(each.key, each.entries) for each in find_scalers(tree, **where).found]


PLACES: list[tuple[Any, str, dict[str, Any]]] = [
    (TORCH, "", TORCH),
    (APEX, "", SHORT),
    (SHORT, "", SHORT),
    ({"model": {}, "scaler": TORCH}, "scaler", TORCH),
    ({"scaler_state_dict": TORCH, "epoch": 3}, "scaler_state_dict", TORCH),
    ({"amp": {"scaler": TORCH}}, "amp.scaler", TORCH),
    ({"amp": {"loss_scaler0": APEX}}, "amp.loss_scaler0", SHORT),
    (OrderedDict(loss_scaler0=APEX), "loss_scaler0", SHORT),
    ({"scalers": [None, TORCH]}, "scalers.1", TORCH),
    ({"history": ({"scaler": TORCH},)}, "history.0.scaler", TORCH),
    ({3: {"x": MappingProxyType(TORCH)}}, "3.x", TORCH),
    ([{"scaler": TORCH}], "0.scaler", TORCH),
    ({"precision": "fp16", "steps": 2, "scaler": TORCH, "counts": None}, "scaler", TORCH),
    ({"amp": {"precision": "fp16", "steps": 2, "scaler": TORCH}, "extra": {"scaler": OTHER}}, "amp.scaler", TORCH),
    ({"generator.amp": {"precision": "fp16", "steps": 2, "scaler": TORCH}}, "generator.amp.scaler", TORCH),
]
LIGHTNING = [
    "MixedPrecision",
    "MixedPrecisionPlugin",
    "NativeMixedPrecisionPlugin",
    "native_amp_scaling_state",
    "FSDPPrecision",
    "FSDPMixedPrecisionPlugin",
]


@pytest.mark.parametrize(("tree", "key", "entries"), PLACES)
def test_where_states_are_found(tree: Any, key: str, entries: dict[str, Any]) -> None:
    assert found(tree) == [(key, entries)]


@pytest.mark.parametrize("name", LIGHTNING)
def test_lightning_has_its_own_places_which_come_first(name: str) -> None:
    saved = {"pytorch-lightning_version": "2.6", "callbacks": {"ema": {"scaler": OTHER}}, name: TORCH}
    assert found(saved) == [(name, TORCH)]
    assert len(found({**saved, "pytorch-lightning_version": 0, "MyPrecision": APEX})) == 1
    del saved["pytorch-lightning_version"]
    assert len(found(saved)) == 2


def test_lightning_with_apex() -> None:
    saved = {"pytorch-lightning_version": "1.9", "amp_scaling_state": {"loss_scaler0": APEX}}
    assert found(saved) == [("amp_scaling_state.loss_scaler0", SHORT)]


def test_a_plugin_of_ones_own_is_found_everywhere() -> None:
    assert found({"pytorch-lightning_version": "2.6", "MyPrecision": TORCH}) == [("MyPrecision", TORCH)]


def test_states_that_say_the_same_are_one() -> None:
    same = {name: torch.tensor(value) for name, value in TORCH.items()}
    assert found({"scaler": TORCH, "a": {"scaler": same}, "b": {**TORCH, "more": "text"}}) == [("scaler", TORCH)]
    assert found({"scaler": APEX, "a": SHORT}) == [("scaler", SHORT)]


def test_states_that_differ_are_several() -> None:
    tree = {"generator": {"scaler": TORCH}, "discriminator": {"scaler": OTHER}, "scaler": APEX}
    assert [key for key, _ in found(tree)] == ["scaler", "generator.scaler", "discriminator.scaler"]
    assert [key for key, _ in found(tree, key="generator")] == ["generator.scaler"]
    assert found(tree, key="discriminator.scaler") == [("discriminator.scaler", OTHER)]


@pytest.mark.parametrize("key", ["x", "generator.x", "generator.scaler.scale.x", ".", "generator."])
def test_a_key_that_leads_nowhere(key: str) -> None:
    with pytest.raises(LookupError, match=key.replace(".", r"\.")):
        find_scalers({"generator": {"scaler": TORCH}}, key=key)


def test_a_key_with_dots_of_its_own() -> None:
    tree = {"a": {"x": 1, "b.c": {"scaler": OTHER}}, "a.b": {"c": {"scaler": TORCH}}}
    assert found(tree, key="a.b.c.scaler") == [("a.b.c.scaler", OTHER)]
    assert found({"a": 1, "a.b": TORCH}, key="a.b") == [("a.b", TORCH)]


def test_nothing_is_found_below_a_depth_unless_it_is_named() -> None:
    tree: Any = TORCH
    for _ in range(10):
        tree = {"a": tree}
    assert found(tree) == []
    assert len(found({"b": tree["a"], "c": 1})) == 0
    assert found(tree["a"]) == [(".".join("a" * 9), TORCH)]
    assert found(tree, key="a") == [(".".join("a" * 10), TORCH)]


def test_what_holds_itself_is_searched_once() -> None:
    tree: dict[str, Any] = {"scaler": TORCH}
    tree["self"] = tree
    tree["list"] = [tree, tree]
    assert found(tree) == [("scaler", TORCH)]


def test_nothing_to_find() -> None:
    for tree in ({}, {"scaler": {"scale": 1.0}}, {"scaler": {"_growth_tracker": 1}}, {"loss_scale": 1.0}, torch.ones(2), None, "text", [1]):
        assert found(tree) == []


@pytest.mark.parametrize(
    ("tree", "empty"),
    [
        ({}, ("",)),
        ({"scaler": {}}, ("scaler",)),
        ({"grad_scaler": {}, "optimizer": {}}, ("grad_scaler",)),
        ({"pytorch-lightning_version": "2", "MixedPrecision": {}}, ("MixedPrecision",)),
        ({"optimizer": {}, "extra": {}}, ()),
        ({"scaler": torch.amp.GradScaler("cpu", enabled=False)}, ("scaler",)),
        ({"scaler": None}, ()),
    ],
)
def test_states_of_disabled_scalers(tree: Any, empty: tuple[str, ...]) -> None:
    search = find_scalers(tree)
    assert (search.found, search.empty, search.unscaled) == ((), empty, "")


def test_engines_that_scale_nothing() -> None:
    engine = {"precision": "bf16", "steps": 2, "scaler": None}
    for tree in (engine, {"amp": engine}, {"generator.amp": engine, "extra": {}}):
        assert find_scalers(tree).unscaled == "bf16"
    assert find_scalers({"amp": engine, "extra": {"scaler": TORCH}}).found == (FoundScaler(key="extra.scaler", entries=TORCH),)
    assert find_scalers({"amp": {**engine, "scaler": TORCH}}).unscaled == ""


def test_scalers_that_were_saved_whole(tmp_path: Path) -> None:
    theirs = scaler()
    follow(theirs, [1.0, float("inf"), 1.0])
    assert theirs.state_dict()["_growth_tracker"] == 1
    assert found({"scaler": theirs}) == [("scaler", theirs.state_dict())]
    torch.save({"run": {"scaler": theirs}, "off": torch.amp.GradScaler("cpu", enabled=False)}, tmp_path / "state.pt")
    search = find_scalers(read_inert(tmp_path / "state.pt"))
    assert [(each.key, each.entries) for each in search.found] == [("run.scaler", theirs.state_dict())]
    assert search.empty == ("off",)


def test_states_within_objects_that_have_stand_ins() -> None:
    made = StandIn("a.Trainer", ({"first": OTHER},))
    made.__setstate__({"scaler": TORCH})
    assert [key for key, _ in found({"trainer": made})] == ["trainer.scaler", "trainer.0.first"]
    made.__setstate__((None, {"scaler": TORCH}))
    assert found({"trainer": made}, key="trainer.1") == [("trainer.1.scaler", TORCH)]


def test_the_state_of_a_loss_scaler_is_found_whole() -> None:
    mine = LossScaler("cpu", hysteresis=2, max_scale=2.0**24)
    follow(mine, [1.0, float("inf"), 1.0])
    assert found({"scaler": mine.state_dict()}) == [("scaler", mine.state_dict())]


NUMBERS: list[tuple[Any, Any]] = [
    (torch.tensor(2.5), 2.5),
    (torch.tensor([2.5]), 2.5),
    (torch.nn.Parameter(torch.tensor(2.5)), 2.5),
    (torch.tensor(3, dtype=torch.int32), 3),
    (np.float32(2.5), 2.5),
    (np.int64(3), 3),
    (np.array([3]), 3),
    (np.array(2.5), 2.5),
    (7, 7),
    (7.5, 7.5),
    (None, None),
    (True, True),
]


@pytest.mark.parametrize(("value", "plain"), NUMBERS)
def test_numbers_become_those_of_python(value: Any, plain: Any) -> None:
    assert number(value) == plain
    assert type(number(value)) is type(plain)


def test_a_whole_number_is_one_where_it_is_expected() -> None:
    assert type(number(torch.tensor(7.0), whole=True)) is int
    assert type(number(7.0)) is float
    assert number(7.5, whole=True) == 7.5
    assert str(number(float("nan"), whole=True)) == "nan"
    assert number(float("inf"), whole=True) == float("inf")
    assert type(found({"scale": 8.0, "_growth_tracker": 2.0, "growth_interval": 9.0})[0][1]["growth_interval"]) is int
    assert type(found({"loss_scale": 8.0, "unskipped": 2.0})[0][1]["_growth_tracker"]) is int


@pytest.mark.parametrize("value", [torch.ones(2), torch.empty(1, device="meta"), torch.tensor(1j), np.ones(2), "7", [7]])
def test_what_is_no_number_stays(value: Any) -> None:
    assert number(value) is value


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", ">f4", ">i8"])
def test_numbers_of_numpy_in_a_file(dtype: str, tmp_path: Path) -> None:
    saved = np.array([3], dtype=dtype)[0]
    torch.save({"scale": saved, "raw": 1}, tmp_path / "state.pt")
    read = read_inert(tmp_path / "state.pt")["scale"]
    assert isinstance(read, StandIn)
    assert number(read) == 3
    assert type(number(read)) is type(saved.item())


@pytest.mark.parametrize("saved", [np.complex64(1), np.datetime64("2026-01-31"), np.str_("a"), np.void(b"a")])
def test_other_scalars_of_numpy_are_no_numbers(saved: Any, tmp_path: Path) -> None:
    torch.save({"scale": saved}, tmp_path / "state.pt")
    read = read_inert(tmp_path / "state.pt")["scale"]
    assert number(read) is read


def test_a_number_of_numpy_that_was_tampered_with() -> None:
    kind = StandIn("numpy.dtype", ("f8", False, True))
    kind.__setstate__((3, "<", None, None, None, -1, -1, 0))
    whole = StandIn("numpy._core.multiarray.scalar", (kind, np.float64(3).tobytes()))
    assert number(whole) == 3.0
    short = StandIn("numpy._core.multiarray.scalar", (kind, b"abc"))
    assert number(short) is short
    other = StandIn("numpy._core.multiarray.other", (kind, b"12345678"))
    assert number(other) is other
    kind.__setstate__((3, "O"))
    assert number(whole) is whole


def leaves() -> st.SearchStrategy[Any]:
    small = st.builds(lambda: torch.ones(2)) | st.builds(lambda: {"scale": 1.0}) | st.builds(lambda: {"_growth_tracker": 1})
    return st.none() | st.integers() | st.text(max_size=5) | small


def nests() -> st.SearchStrategy[Any]:
    names = st.text(max_size=4) | st.integers(0, 9)
    return st.recursive(
        leaves(),
        lambda below: st.lists(below, max_size=3) | st.dictionaries(names, below, max_size=3) | st.lists(below, max_size=3).map(tuple),
        max_leaves=12,
    )


@given(st.data())
def test_a_state_is_found_wherever_it_stands(data: st.DataObject) -> None:
    states = data.draw(st.permutations([TORCH, OTHER, APEX, {**OTHER, "_growth_tracker": 5}]))[: data.draw(st.integers(1, 3))]
    tree: dict[str, Any] = {}
    expected = {}
    for number_, state in enumerate(states):
        node, path = tree, [f"branch{number_}"]
        for _ in range(data.draw(st.integers(0, 4))):
            child: dict[str, Any] = {"beside": data.draw(nests())}
            node[path[-1]] = data.draw(st.sampled_from([lambda made: made, lambda made: [made]]))(child)
            path += ["0"] * isinstance(node[path[-1]], list) + [data.draw(st.sampled_from(["scaler", "a", "state"]))]
            node = child
        node[path[-1]] = state
        expected[".".join(path)] = {**state} if state is not APEX else SHORT
    if data.draw(st.booleans()):
        file = io.BytesIO()
        torch.save(tree, file)
        file.seek(0)
        tree = torch.load(file, weights_only=True)
    assert dict(found(tree)) == expected
    for key, entries in expected.items():
        assert found(tree, key=key) == [(key, entries)]


def test_a_long_list_costs_little() -> None:
    assert found({"order": list(range(300_000)), "names": deque(map(str, range(1000))), "scaler": TORCH}) == [("scaler", TORCH)]
