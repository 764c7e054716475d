"""Modules whose classes are of an unusual kind."""

from __future__ import annotations

import abc
import copy
import pickle
import threading
from typing import Any, ClassVar, Generic, TypeVar

import pytest
import torch
from torch import Tensor, nn

from halfstep import Policy

BF16, FP32 = torch.bfloat16, torch.float32
T = TypeVar("T")


def region() -> torch.autocast:
    return torch.autocast("cpu", dtype=BF16)


class AnyOf(nn.Linear, Generic[T]):
    """A generic class."""


class AnyInt(AnyOf[int]):
    """One with its argument."""


class Abstract(abc.ABC, nn.Module):
    """An interface that comes before `nn.Module`."""

    @abc.abstractmethod
    def width(self) -> int: ...


class Concrete(Abstract):
    """What implements it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layer = nn.Linear(inputs, outputs)

    def width(self) -> int:
        return self.layer.out_features

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.layer(inputs)
        return result


class Slotted(nn.Linear):
    """A class with a slot."""

    __slots__ = ("note",)


class Stateful(nn.Linear):
    """A class that says what its pickles hold."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "extra": 1}

    def __setstate__(self, state: dict[str, Any]) -> None:
        assert state.pop("extra") == 1
        vars(self).update(state)


class Reduced(nn.Linear):
    """A class whose pickles are calls."""

    def __reduce__(self) -> Any:
        return Reduced, (self.in_features, self.out_features)


class New(nn.Linear):
    """A class that makes its instances itself."""

    def __new__(cls, *_: Any) -> New:
        return super().__new__(cls)


class Called(nn.Linear):
    """A class with a call of its own."""

    def __call__(self, *args: Any) -> Any:
        return super().__call__(*args)


class Magic(nn.Linear):
    """A class with attributes that are nowhere."""

    def __getattr__(self, name: str) -> Any:
        return 42 if name == "magic" else super().__getattr__(name)


class Registering(nn.Linear):
    """A class that keeps a register of those derived from it, under names that they give."""

    names: ClassVar[dict[str, type]] = {}

    def __init_subclass__(cls, *, name: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Registering.names[name] = cls


class Registered(Registering, name="registered"):
    """One of those."""


KINDS = [AnyOf, AnyInt, Concrete, Slotted, Stateful, Reduced, New, Called, Magic, Registered]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["bf16; 0=fp32", "pure bf16; 0=fp32", "fp32; 0=bf16"])
def test_an_island_of_the_class(kind: Any, text: str) -> None:
    model = nn.Sequential(kind(2, 3))
    before = [pickle.dumps(model, protocol) for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)]
    with Policy.parse(text).apply(model), region():
        assert model[0](torch.ones(1, 2)).shape == (1, 3)
        assert model[0](torch.ones(1, 2)).dtype is (BF16 if "0=bf16" in text else FP32)
        assert [pickle.dumps(model, protocol) for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)] == before
        assert type(copy.deepcopy(model)[0]) is kind
        assert isinstance(model[0], kind)
        assert model[0].__class__ is kind
    assert type(model[0]) is kind
    assert Registering.names == {"registered": Registered}


class Static(nn.Module):
    """A forward that is no method."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    @staticmethod
    def forward(inputs: Tensor) -> Tensor:
        return inputs @ inputs


class OfClass(nn.Module):
    """A forward that is a method of the class."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    @classmethod
    def forward(cls, inputs: Tensor) -> Tensor:
        assert cls is OfClass
        return inputs @ inputs


@pytest.mark.parametrize("kind", [Static, OfClass])
def test_a_forward_that_is_no_method_of_the_instance(kind: type[nn.Module]) -> None:
    model = nn.Sequential(kind())
    with Policy.parse("bf16; 0=fp32").apply(model), region():
        assert model(torch.ones(2, 2)).dtype is FP32


def test_a_lazy_module_becomes_what_it_would() -> None:
    model = nn.Sequential(nn.LazyLinear(2))
    with Policy.parse("bf16; 0=fp32").apply(model), region():
        assert model[0](torch.ones(1, 3)).dtype is FP32
        assert model[0](torch.ones(1, 3)).dtype is FP32
    assert type(model[0]) is nn.Linear
    assert model[0].weight.shape == (2, 3)


def test_a_module_that_fx_traced() -> None:
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    model = nn.Sequential(traced)
    kind = type(traced)
    with Policy.parse("bf16; 0=fp32").apply(model), region():
        assert model(torch.ones(1, 2)).dtype is FP32
    assert type(traced) is kind


def test_functions_of_parameters() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    parameters = {name: each.detach() * 2 for name, each in model.named_parameters()}
    inputs = torch.randn(3, 2)

    def loss(values: dict[str, Tensor]) -> Tensor:
        result: Tensor = torch.func.functional_call(model, values, (inputs,)).square().sum()
        return result

    with region():
        half = model[0](inputs)
    for text in ("bf16; 0=fp32", "pure bf16; 0=fp32"):
        with Policy.parse(text).apply(model):
            gradients = torch.func.grad(loss)(parameters)
            assert list(gradients) == list(parameters)
            assert {each.dtype for each in gradients.values()} == {FP32}
            batched = torch.func.vmap(model)(inputs[:, None])
            torch.testing.assert_close(batched[:, 0], model(inputs), rtol=0.02, atol=0.02)
    with region():
        assert torch.equal(model[0](inputs), half)


def test_threads_do_not_mix_their_regions() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    inputs = torch.randn(2, 8)
    wrong: list[int] = []
    with Policy.parse("bf16; 0=fp32; op:softmax=fp16; 2=bf16").apply(model):
        expected = model(inputs)

        def work() -> None:
            wrong.extend(1 for _ in range(100) if not torch.equal(model(inputs), expected))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
    assert not torch.is_autocast_enabled("cpu")
