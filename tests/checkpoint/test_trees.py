from __future__ import annotations

import math
import types
from collections import Counter, OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from halfstep import MixedPrecision
from halfstep.checkpoint import load_checkpoint, save_checkpoint
from halfstep.checkpoint.trees import at, copied, named, plain, put_at, tensors_in
from halfstep.errors import CheckpointError

__all__ = ["same", "trees"]

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.uint8, torch.bool, torch.complex64]


def tensors() -> st.SearchStrategy[Tensor]:
    """Of several types and shapes, some of which are views that are not contiguous."""

    def made(shape: list[int], dtype: torch.dtype, seed: int, kind: str) -> Tensor:
        numbers = torch.Generator().manual_seed(seed)
        tensor = torch.randint(-9, 9, shape, generator=numbers).to(dtype)
        match kind:
            case "turned":
                return tensor.mT if tensor.dim() > 1 else tensor
            case "part":
                return torch.cat([tensor, tensor])[1:] if tensor.dim() else tensor
            case "parameter" if dtype.is_floating_point:
                return nn.Parameter(tensor)
            case "expanded":
                return tensor.unsqueeze(0).expand(3, *shape)
        return tensor

    kinds = st.sampled_from(["whole", "turned", "part", "parameter", "expanded"])
    return st.builds(made, st.lists(st.integers(0, 3), max_size=3), st.sampled_from(DTYPES), st.integers(0, 99), kinds)


def leaves() -> st.SearchStrategy[Any]:
    return (
        st.none()
        | st.booleans()
        | st.integers(-(2**200), 2**200)
        | st.floats()
        | st.complex_numbers()
        | st.text()
        | st.binary(min_size=1, max_size=9)
        | st.sampled_from([torch.float16, torch.device("cpu"), torch.Size([2, 3]), torch.strided, 2**2000, -(2**70)])
        | st.frozensets(st.integers() | st.text(max_size=3), max_size=3).map(set)
        | tensors()
    )


def keys() -> st.SearchStrategy[Any]:
    one = st.text(max_size=4) | st.integers() | st.booleans() | st.none() | st.floats(allow_nan=False)
    return one | st.tuples(one, one)


def trees() -> st.SearchStrategy[Any]:
    def nest(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        lists = st.lists(inner, max_size=3)
        dictionaries = st.dictionaries(keys(), inner, max_size=3)
        counters = st.dictionaries(st.text(max_size=3), st.integers(0, 9), max_size=3).map(Counter)
        return lists | lists.map(tuple) | dictionaries | dictionaries.map(OrderedDict) | counters

    return st.recursive(leaves(), nest, max_leaves=12)


def same(one: Any, two: Any) -> bool:
    """Whether two nested states are alike, bit for bit and kind by kind."""
    if isinstance(one, Tensor):
        alike = isinstance(two, Tensor) and (one.dtype, one.shape) == (two.dtype, two.shape)
        return alike and torch.equal(one, two)
    if type(one) is not type(two):
        return False
    if isinstance(one, Mapping):
        return list(one) == list(two) and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    return repr(one) == repr(two) if isinstance(one, float | complex) else bool(one == two)


def engine() -> MixedPrecision:
    model = nn.Linear(1, 1)
    return MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32")


@given(tree=st.dictionaries(st.text(max_size=4), trees(), max_size=4))
def test_what_is_saved_comes_back(tree: dict[str, Any]) -> None:
    amp = engine()
    with TemporaryDirectory() as folder:
        path = save_checkpoint(Path(folder) / "a.pt", amp, step=1, extra=tree)
        extra = load_checkpoint(path, amp).extra
        assert same(tree, extra)
        names = [record.name for record in load_checkpoint(path, amp).record.tensors]
    assert [name for name in names if name.startswith("extra.")] == [named(("extra", *place)) for place, _ in tensors_in(tree)]


@given(tree=trees())
def test_a_copy_is_alike_and_shares_nothing_that_can_change(tree: Any) -> None:
    made = plain(tree, ("extra",))
    other = copied(made)
    assert same(tree, made)
    assert same(tree, other)
    before = copied(other)
    for _, tensor in tensors_in(made):
        if tensor.numel() and 0 not in tensor.stride():
            with torch.no_grad():
                tensor.detach().fill_(1)
    assert same(other, before)


@given(tree=trees())
def test_containers_are_new_and_tensors_share_their_memory(tree: Any) -> None:
    for (place, tensor), (again, other) in zip(tensors_in(tree), tensors_in(plain(tree, ())), strict=True):
        assert place == again
        assert at(tree, place) is tensor
        assert other.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        assert type(other) is Tensor
        assert not other.requires_grad


def test_tensors_that_are_saved_elsewhere_leave_none() -> None:
    one, two = torch.ones(1), torch.zeros(1)
    seen: list[tuple[Any, ...]] = []

    def take(place: tuple[Any, ...], tensor: Tensor) -> bool:
        seen.append(place)
        return tensor is one

    assert plain({"a": [one, two], "b": (one,)}, ("x",), take=take) == {"a": [None, two], "b": (None,)}
    assert seen == [("x", "a", 0), ("x", "a", 1), ("x", "b", 0)]


def test_numbers_of_numpy_become_python_s() -> None:
    made = plain({np.int64(3): np.float32(0.5), "flag": np.bool_(True), "text": np.str_("a"), "z": np.complex128(1j)}, ())
    assert made == {3: 0.5, "flag": True, "text": "a", "z": 1j}
    assert [type(each) for each in (*made, *made.values())] == [int, str, str, str, float, bool, str, complex]


def test_other_mappings_become_dictionaries() -> None:
    counts: defaultdict[str, int] = defaultdict(int, a=1)
    for mapping in (counts, UserDict({"a": 1}), types.MappingProxyType({"a": 1})):
        assert plain(mapping, ()) == {"a": 1}
        assert type(plain(mapping, ())) is dict
    assert type(plain(OrderedDict(a=1), ())) is OrderedDict


def test_versions_of_modules_are_kept() -> None:
    state = nn.BatchNorm1d(2).state_dict()
    made = plain(state, ())
    assert made._metadata == state._metadata  # type: ignore[attr-defined]


class Point(NamedTuple):
    x: int


class Text(str):
    pass


class Subclass(Tensor):
    pass


class WithState:
    def state_dict(self) -> dict[str, int]:
        return {}


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "object": (
        object,
        "a.b.0 is a object, which a checkpoint cannot hold: reading it would mean running code. Allowed are",
    ),
    "function": (lambda: math.sqrt, "a.b.0 is a builtin_function_or_method, which"),
    "class": (lambda: nn.Linear, "a.b.0 is a type, which a checkpoint cannot hold"),
    "named tuple": (lambda: Point(1), "a.b.0 is a Point, which a checkpoint cannot hold"),
    "text of a class": (lambda: Text("a"), "a.b.0 is a Text, which a checkpoint cannot hold"),
    "array": (lambda: np.ones(2), r"a.b.0 is a ndarray, .* Pass torch.from_numpy\(...\) of it, or its tolist\(\)"),
    "module": (nn.ModuleDict, r"a.b.0 is a ModuleDict, .* Pass its state_dict\(\)"),
    "optimizer": (lambda: torch.optim.SGD([torch.ones(1)], lr=0.1), r"a.b.0 is a SGD, .* Pass its state_dict\(\)"),
    "own state": (WithState, r"a.b.0 is a WithState, .* Pass its state_dict\(\)"),
    "kind of tensor": (lambda: torch.ones(1).as_subclass(Subclass), "a.b.0 is a Subclass, a kind of tensor that a checkpoint cannot hold"),
    "no values": (lambda: torch.ones(1, device="meta"), "a.b.0 is on the meta device and has no values"),
    "key": (lambda: {b"x": 1}, r"a.b.0 has the key b'x', a bytes\. Keys in a checkpoint are text and numbers"),
    "key of a set": (lambda: {frozenset()}, r"a.b.0 has the key frozenset\(\), a frozenset"),
    "nested key": (lambda: {(1, (2,)): 1}, r"a.b.0 has the key \(1, \(2,\)\), a tuple"),
    "empty bytes": (lambda: b"", "a.b.0 is empty bytes"),
    "huge number": (lambda: 2**3000, "a.b.0 is a whole number of 3001 bits, and torch cannot read one of more than 2039 again"),
    "bytearray": (lambda: bytearray(b"x"), "a.b.0 is a bytearray, which"),
    "void": (lambda: np.void(b"x"), "a.b.0 is a void, which"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_held(name: str) -> None:
    make, match = REFUSED[name]
    with pytest.raises(CheckpointError, match=match):
        plain({"b": [make()]}, ("a",))


def test_what_holds_itself() -> None:
    tree: dict[str, Any] = {"a": []}
    tree["a"].append(tree)
    with pytest.raises(CheckpointError, match=r"^x\.a\.0\.a\.0\.a\.0\.a\.\.\. is nested more than 64 levels deep, or holds itself"):
        plain(tree, ("x",))


def test_the_deepest_comes_back(tmp_path: Path) -> None:
    tree: Any = 1
    for _ in range(63):
        tree = [tree]
    amp = engine()
    path = save_checkpoint(tmp_path / "a.pt", amp, step=1, extra={"tree": tree})
    assert load_checkpoint(path, amp).extra == {"tree": tree}
    with pytest.raises(CheckpointError, match="is nested more than 64 levels deep"):
        save_checkpoint(tmp_path / "a.pt", amp, step=1, extra={"tree": [[tree]]})


def _in_inference() -> Tensor:
    with torch.inference_mode():
        return torch.ones(2) * 3


KINDS: dict[str, Callable[[], Tensor]] = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse, not summed up": lambda: torch.sparse_coo_tensor(torch.tensor([[0, 0, 2]]), torch.ones(3), (3,), check_invariants=True),
    "sparse rows": lambda: torch.eye(3).to_sparse_csr(),
    "conjugate": lambda: torch.tensor([1 + 2j]).conj(),
    "negative": lambda: torch.tensor([1 + 2j]).conj().imag,
    "float8": lambda: torch.tensor([1.5, 2.0]).to(torch.float8_e4m3fn),
    "uint16": lambda: torch.tensor([1, 60000], dtype=torch.uint16),
    "complex half": lambda: torch.tensor([1 + 2j]).to(torch.complex32),
    "nothing": lambda: torch.zeros(0, 3),
    "inference": _in_inference,
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize("name", KINDS)
def test_tensors_of_every_kind_come_back(name: str, tmp_path: Path) -> None:
    amp, tensor = engine(), KINDS[name]()
    path = save_checkpoint(tmp_path / "a.pt", amp, step=1, extra={"tensor": tensor})
    back = load_checkpoint(path, amp).extra["tensor"]
    assert (back.dtype, back.shape, back.layout) == (tensor.dtype, tensor.shape, tensor.layout)
    assert tensor.layout is not torch.sparse_coo or back.is_coalesced() == tensor.is_coalesced()
    if tensor.dtype in (torch.float8_e4m3fn, torch.complex32):
        back, tensor = back.view(torch.int8), tensor.view(torch.int8)
    if tensor.layout is not torch.strided:
        back, tensor = back.to_dense(), tensor.to_dense()
    assert torch.equal(back, tensor)


def test_what_shares_memory_shares_it_in_the_file(tmp_path: Path) -> None:
    weight = torch.randn(100)
    amp = engine()
    path = save_checkpoint(tmp_path / "a.pt", amp, step=1, extra={"whole": weight, "part": weight[10:20], "turned": weight.view(10, 10).T})
    stored = torch.load(path, weights_only=True)["extra"]
    assert len({each.untyped_storage().data_ptr() for each in stored.values()}) == 1
    records = {each.name: each.storage for each in load_checkpoint(path, amp).record.tensors}
    assert len({records[f"extra.{name}"] for name in ("whole", "part", "turned")}) == 1


def test_the_places_of_a_state() -> None:
    tree = {"a": [1, {"b": 2}]}
    put_at(tree, ("a", 1, "b"), 3)
    assert (at(tree, ("a", 1, "b")), at(tree, ()), tree) == (3, tree, {"a": [1, {"b": 3}]})
    with pytest.raises(LookupError):
        at(tree, ("a", 7))
