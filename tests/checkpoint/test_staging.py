from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from halfstep.checkpoint.staging import Stage
from halfstep.checkpoint.trees import copied, plain, tensors_in
from tests.checkpoint.test_trees import same, trees


def whole(tensor: Tensor) -> Tensor:
    """All the memory in which a tensor lies, as bytes."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


@given(first=trees(), second=trees())
def test_a_copy_stays_as_it_was(first: Any, second: Any) -> None:
    stage = Stage()
    for tree in (first, second, first):
        staged = stage.copy(plain(tree, ()))
        assert same(staged, tree)
        before = copied(staged)
        memory = [whole(tensor) for _, tensor in tensors_in(tree)]
        kept = [each.clone() for each in memory]
        for each in memory:
            each.zero_()
        assert same(staged, before)
        for each, value in zip(memory, kept, strict=True):
            each.copy_(value)


def keys(tree: Any) -> list[int]:
    return [tensor.untyped_storage().data_ptr() for _, tensor in tensors_in(tree)]


def test_what_shares_memory_shares_it_in_the_copy() -> None:
    all_of_it = torch.arange(12.0)
    parts = {"part": all_of_it[2:5], "turned": all_of_it.view(3, 4).T, "bits": all_of_it.view(torch.int32)}
    tree = {"whole": all_of_it, **parts, "other": torch.zeros(12)}
    staged = Stage().copy(dict(tree))
    pointers = dict(zip(tree, keys(staged), strict=True))
    assert len({pointers[name] for name in ("whole", "part", "turned", "bits")}) == 1
    assert pointers["other"] != pointers["whole"]
    assert staged["turned"].stride() == (1, 4)
    assert (staged["part"].storage_offset(), staged["part"].tolist()) == (2, [2.0, 3.0, 4.0])


def test_memory_is_used_again() -> None:
    stage = Stage()
    tree = {"a": torch.ones(1000), "b": torch.ones(1000), "c": [torch.ones(7), (torch.ones(3),)]}
    first = keys(stage.copy(copied(tree)))
    assert len(set(first)) == 4
    assert keys(stage.copy(copied(tree))) == first
    assert keys(stage.copy({"b": torch.ones(1000)})) == first[:1]


def test_memory_that_is_no_longer_needed_is_let_go() -> None:
    stage = Stage()
    stage.copy({"a": torch.ones(1000)})
    stage.copy({})
    assert sum(len(kept) for kept in stage._memory.values()) == 0


OTHERS: dict[str, Callable[[], Tensor]] = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "conjugate": lambda: torch.tensor([1 + 2j]).conj(),
    "negative": lambda: torch.tensor([1 + 2j]).conj().imag,
    "parameter": lambda: torch.nn.Parameter(torch.ones(2)),
    "empty": lambda: torch.zeros(0, 2),
    "number": lambda: torch.tensor(3),
}


@pytest.mark.parametrize("name", OTHERS)
def test_tensors_of_other_kinds(name: str) -> None:
    tensor = OTHERS[name]()
    staged = Stage().copy({"a": tensor, "b": (tensor,)})
    assert [type(each) for each in (staged["a"], staged["b"][0])] == [Tensor, Tensor]
    assert torch.equal(staged["a"].to_dense() if tensor.is_sparse else staged["a"], tensor.to_dense() if tensor.is_sparse else tensor)
    assert not staged["a"].requires_grad
    if tensor.numel() and not tensor.is_sparse:
        before = tensor.detach().clone()
        whole(tensor).zero_()
        assert torch.equal(staged["a"], before)


def test_a_tensor_alone() -> None:
    weight = torch.ones(2)
    staged = Stage().copy(weight)
    weight.zero_()
    assert staged.tolist() == [1.0, 1.0]


@given(sizes=st.lists(st.lists(st.integers(0, 5), max_size=5), min_size=2, max_size=4))
def test_states_of_changing_sizes(sizes: list[list[int]]) -> None:
    stage = Stage()
    for number, each in enumerate(sizes):
        tree = [torch.full((size,), float(number)) for size in each]
        staged = stage.copy(list(tree))
        assert [tensor.tolist() for tensor in staged] == [[float(number)] * size for size in each]
        filled = [pointer for pointer, size in zip(keys(staged), each, strict=True) if size]
        assert len(set(filled)) == len(filled)
