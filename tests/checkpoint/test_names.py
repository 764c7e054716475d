from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from halfstep._torch import versions_in
from halfstep.checkpoint.contents import model_state
from halfstep.checkpoint.names import canonical_names, transient_buffers


def compiled(module: nn.Module) -> nn.Module:
    made: Any = module if hasattr(module, "_orig_mod") else torch.compile(module, backend="eager")
    return made  # type: ignore[no-any-return]


WRAPPERS = [compiled, checkpoint_wrapper, nn.DataParallel]


def leaf() -> nn.Module:
    return nn.BatchNorm1d(2)


def wrapped() -> st.SearchStrategy[tuple[nn.Module, nn.Module]]:
    """A model with wrappers around some of its parts, and the same without."""

    def wrap(pair: tuple[nn.Module, nn.Module], wrapper: Any) -> tuple[nn.Module, nn.Module]:
        return (wrapper(pair[0]) if wrapper else pair[0]), pair[1]

    def hold(pairs: list[tuple[nn.Module, nn.Module]], names: list[str]) -> tuple[nn.Module, nn.Module]:
        named = list(zip(names, pairs, strict=False))
        return nn.ModuleDict({name: pair[0] for name, pair in named}), nn.ModuleDict({name: pair[1] for name, pair in named})

    names = st.lists(st.sampled_from(["module", "inner", "0", "_fsdp"]), min_size=3, max_size=3, unique=True)
    wrapper = st.sampled_from([None, *WRAPPERS])
    leaves = st.builds(lambda: (leaf(), leaf()))

    def nest(inner: st.SearchStrategy[tuple[nn.Module, nn.Module]]) -> st.SearchStrategy[tuple[nn.Module, nn.Module]]:
        held = st.builds(hold, st.lists(inner, min_size=1, max_size=3), names)
        return st.builds(wrap, held | inner, wrapper)

    return st.recursive(leaves, nest, max_leaves=5)


@given(pair=wrapped())
def test_wrappers_are_taken_off(pair: tuple[nn.Module, nn.Module]) -> None:
    model, bare = pair
    names = canonical_names(model, list(model.state_dict()))
    assert list(names) == list(model.state_dict())
    assert [*names.values()] == list(bare.state_dict())
    parameters = canonical_names(model, [name for name, _ in model.named_parameters()])
    assert [*parameters.values()] == [name for name, _ in bare.named_parameters()]


@given(pair=wrapped())
def test_so_are_those_of_the_versions(pair: tuple[nn.Module, nn.Module]) -> None:
    model, bare = pair
    state, bare_state = model_state(model), bare.state_dict()
    mine = {name: entry for name, entry in (versions_in(state) or {}).items() if entry}
    for name, entry in (versions_in(bare_state) or {}).items():
        assert entry.items() <= mine.get(name, {}).items(), name


def test_a_module_that_is_called_like_a_wrapper_s() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(1, 1)

    assert canonical_names(Own(), ["module.weight"]) == {"module.weight": "module.weight"}


def test_what_no_module_holds_keeps_its_name() -> None:
    model = nn.Sequential(nn.DataParallel(nn.Linear(1, 1)))
    names = ["0.module.weight", "0.module.deep.er", "9.weight", "weight", "_extra_state", ""]
    assert canonical_names(model, names) == {
        "0.module.weight": "0.weight",
        "0.module.deep.er": "0.deep.er",
        "9.weight": "9.weight",
        "weight": "weight",
        "_extra_state": "_extra_state",
        "": "",
    }


def test_one_module_in_two_places_and_one_that_holds_itself() -> None:
    shared = nn.Linear(1, 1)
    model = nn.ModuleDict({"one": nn.DataParallel(shared), "two": shared})
    assert [*canonical_names(model, list(model.state_dict())).values()] == ["one.weight", "one.bias", "two.weight", "two.bias"]
    model["self"] = model
    assert canonical_names(model, ["two.weight"]) == {"two.weight": "two.weight"}


@pytest.mark.parametrize(
    ("value", "is_kept"),
    [
        (torch.zeros(3), True),
        (torch.zeros(65536), True),
        (torch.zeros(65537), False),
        (torch.zeros(1).expand(3), False),
        (torch.eye(2).to_sparse(), False),
    ],
    ids=["small", "largest", "too large", "expanded", "sparse"],
)
def test_buffers_that_are_in_no_state(value: torch.Tensor, is_kept: bool) -> None:
    inner = nn.BatchNorm1d(2)
    inner.register_buffer("cache", value, persistent=False)
    inner.register_buffer("none", None, persistent=False)
    found = transient_buffers(nn.Sequential(nn.DataParallel(inner)))
    assert list(found) == (["0.module.cache"] if is_kept else [])
    assert all(buffer is value for buffer in found.values())
