"""The private attributes of torch that checkpoints use: a new torch that changes one fails here."""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from halfstep._torch import loads_by_itself, set_versions, storage_key, versions_in


def test_memory_is_known_by_its_key() -> None:
    whole = torch.zeros(4)
    assert storage_key(whole) == storage_key(whole[1:]) == storage_key(whole.view(2, 2).T)
    empty, other = torch.empty(0), torch.empty(0)
    assert len({storage_key(whole), storage_key(torch.zeros(4)), storage_key(empty), storage_key(other)}) == 4


def test_torch_writes_memory_with_one_key_once() -> None:
    whole = torch.zeros(1000)
    sizes = []
    for tensors in ([whole], [whole, whole[:10]], [whole, torch.zeros(1000)]):
        file = io.BytesIO()
        torch.save(tensors, file)
        sizes.append(len(file.getvalue()))
    assert sizes[1] - sizes[0] < 1000 < sizes[2] - sizes[0]


def test_versions_are_those_that_modules_find_when_they_load() -> None:
    state = nn.Sequential(nn.BatchNorm1d(2)).state_dict()
    assert versions_in(state) == {"": {"version": 1}, "0": {"version": 2}}
    seen: list[Any] = []

    class Curious(nn.BatchNorm1d):
        def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
            seen.append(local_metadata)
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    values = OrderedDict(state)
    set_versions(values, {"0": {"version": 7}})
    nn.Sequential(Curious(2)).load_state_dict(values)
    assert seen[0]["version"] == 7


@pytest.mark.parametrize("state", [{}, OrderedDict(), {"weight": torch.ones(1)}])
def test_other_dictionaries_have_no_versions(state: Any) -> None:
    assert versions_in(state) is None


def test_an_attribute_of_that_name_that_is_somebody_elses_is_none() -> None:
    state = OrderedDict[str, Any]()
    state._metadata = {"x": 1}  # type: ignore[attr-defined]
    assert versions_in(state) is None


class Own(nn.Linear):
    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)


class Extra(nn.Linear):
    def get_extra_state(self) -> int:
        return 1

    def set_extra_state(self, state: Any) -> None:
        del state


def _hooked(register: Callable[[nn.Module], object]) -> nn.Module:
    module = nn.Linear(1, 1)
    register(module)
    return module


LOADERS: dict[str, nn.Module] = {
    "own": Own(1, 1),
    "extra": Extra(1, 1),
    "before": _hooked(lambda module: module.register_load_state_dict_pre_hook(lambda *_: None)),  # type: ignore[no-untyped-call]
    "after": _hooked(lambda module: module.register_load_state_dict_post_hook(lambda *_: None)),  # type: ignore[no-untyped-call]
}


@pytest.mark.parametrize("name", LOADERS)
def test_code_of_others_that_runs_when_a_module_loads(name: str) -> None:
    assert loads_by_itself(LOADERS[name])


@pytest.mark.parametrize("module", [nn.Linear(1, 1), nn.BatchNorm1d(1), nn.LSTM(1, 1), nn.MultiheadAttention(2, 1)])
def test_torchs_own_modules_run_none(module: nn.Module) -> None:
    assert not loads_by_itself(module)
