"""What an island is given, and what it gives back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from halfstep import Policy

BF16, FP32 = torch.bfloat16, torch.float32


def region() -> torch.autocast:
    return torch.autocast("cpu", dtype=BF16)


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


@dataclass(frozen=True)
class Frozen:
    values: Tensor
    name: str = "x"


class Recording(nn.Module):
    """Keeps what it is given and returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.given: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.given = (args, kwargs)
        return args[0] if args else None


def given(*args: Any, text: str = "bf16; 0=fp32", **kwargs: Any) -> Any:
    """What an island is given of these arguments, and what it gives back."""
    model = nn.ModuleList([Recording()])
    with Policy.parse(text).apply(model), region():
        result = model[0](*args, **kwargs)
    recording: Any = model[0]
    return (*recording.given, result)


def test_casts_of_all_kinds_of_arguments() -> None:
    half = torch.ones(2, dtype=BF16)
    args, kwargs, _ = given(
        half, (half, [half, None]), {"a": half, "b": 3}, Pair(half, half), Frozen(half), "text", mask=half > 0, more=half
    )
    assert args[0].dtype is FP32
    assert (args[1][0].dtype, args[1][1][0].dtype, args[1][1][1]) == (FP32, FP32, None)
    assert args[2]["a"].dtype is FP32
    assert args[2]["b"] == 3
    assert type(args[3]) is Pair
    assert args[3].left.dtype is FP32
    assert type(args[4]) is Frozen
    assert (args[4].values.dtype, args[4].name, args[5]) == (FP32, "x", "text")
    assert kwargs["mask"].dtype is torch.bool
    assert kwargs["more"].dtype is FP32
    # One tensor in seven places is cast once.
    assert len({id(each) for each in (args[0], args[1][0], args[1][1][0], args[2]["a"], *args[3], args[4].values, kwargs["more"])}) == 1
    assert half.dtype is BF16


def test_what_needs_no_cast_is_passed_on_itself() -> None:
    whole, double, number = torch.ones(2), torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.long)
    nest = {"a": [whole, (double, number)]}
    args, _, result = given(nest, whole)
    assert args[0] is nest
    assert args[1] is whole
    assert result is nest


def test_without_tensors() -> None:
    assert given() == ((), {}, None)
    assert given(3, text="fp32; 0=bf16", name="x") == ((3,), {"name": "x"}, 3)


def test_packed_sequences() -> None:
    model = nn.ModuleDict({"lstm": nn.LSTM(3, 2)})
    packed = pack_sequence([torch.randn(4, 3), torch.randn(2, 3)])
    half = PackedSequence(packed.data.bfloat16(), packed.batch_sizes)
    with Policy.parse("bf16; lstm=fp32").apply(model), region():
        outputs, state = model["lstm"](half)
    expected, _ = model["lstm"](PackedSequence(half.data.float(), packed.batch_sizes))
    assert isinstance(outputs, PackedSequence)
    assert torch.equal(outputs.data, expected.data)
    assert state[0].dtype is FP32


def test_results_are_cast_to_what_the_code_around_computes_in() -> None:
    model = nn.ModuleList([Recording()])
    half = torch.ones(2, dtype=BF16)
    with Policy.parse("fp32; 0=bf16").apply(model):
        assert model[0](Pair(half, half)).left.dtype is FP32
        assert model[0]({"a": half})["a"].dtype is FP32
        with region():
            assert model[0](half).dtype is BF16
