from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep import amp
from tests.amp.nets import make_net


def dtypes_of(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("keeps_norms", [True, False])
def test_what_is_stored_in_half(keeps_norms: bool, dtype: torch.dtype) -> None:
    model = amp.initialize(make_net(), opt_level="O3", keep_batchnorm_fp32=keeps_norms, cast_model_type=dtype)
    norm = torch.float32 if keeps_norms else dtype
    assert dtypes_of(model) == {
        **dict.fromkeys(("first.weight", "first.bias", "last.weight", "last.bias"), dtype),
        **dict.fromkeys(("norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"), norm),
        "norm.num_batches_tracked": torch.int64,
    }
    model(torch.randn(4, 6))
    assert model.norm.running_mean.dtype is norm
    assert model.norm.running_mean.any()


def test_a_parameter_that_a_norm_shares_stays_in_fp32_and_float64_as_it_is() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(4)
            self.scale = self.norm.weight
            self.register_buffer("steps", torch.zeros((), dtype=torch.float64))

    model = amp.initialize(Shared(), opt_level="O2", master_weights=False)
    assert model.scale is model.norm.weight
    assert dtypes_of(model) == {
        "scale": torch.float32, "norm.weight": torch.float32, "norm.bias": torch.float32, "steps": torch.float64
    }  # fmt: skip


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_an_lstm(level: str) -> None:
    torch.manual_seed(0)
    # torch's LSTM has no fp16 kernel for every CPU, but autocast asks for one.
    model = amp.initialize(nn.LSTM(4, 3), opt_level=level, cast_model_type=torch.bfloat16 if level == "O1" else None)
    output, (hidden, cell) = model(torch.ones(2, 1, 4))
    torch.manual_seed(0)
    expected, _ = nn.LSTM(4, 3)(torch.ones(2, 1, 4))
    assert output.dtype is hidden.dtype is cell.dtype is torch.float32
    torch.testing.assert_close(output, expected, rtol=0.01, atol=0.01)
    output.sum().backward()
    assert all(parameter.grad is not None and parameter.grad.dtype is parameter.dtype for parameter in model.parameters())


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_copies_and_pickles_are_of_the_model_without_the_level(level: str) -> None:
    model = amp.initialize(make_net(), opt_level=level, cast_model_outputs=torch.float16)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert dtypes_of(other) == dtypes_of(model)
        assert other.norm(torch.ones(2, 8, dtype=other.norm.weight.dtype)).dtype is other.norm.weight.dtype
        assert other(torch.ones(2, 6, dtype=other.first.weight.dtype)).dtype is torch.float16
    if level != "O3":
        again = amp.initialize(copy.deepcopy(model), opt_level="O3")  # It was not passed before.
        assert again.first.weight.dtype is torch.float16


def test_a_copy_leaves_batches_of_the_users_own_class_alone() -> None:
    class Batch:
        x = torch.ones(1, 6)

        def to(self, dtype: torch.dtype) -> Batch:
            raise AssertionError(dtype)

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 2)

        def forward(self, batch: Batch) -> Tensor:
            result: Tensor = self.inner(batch.x)
            return result

    model = amp.initialize(Reader(), opt_level="O2")
    assert copy.deepcopy(model)(Batch()).dtype is torch.float32
    with pytest.raises(AssertionError, match="float16"):
        model(Batch())


def test_tensors_in_nests_are_cast_whatever_the_nest_can_do() -> None:
    class Encoding(dict[str, Tensor]):
        def to(self, device: str) -> Encoding:
            raise AssertionError(device)

    class Reader(nn.Module):
        def forward(self, *nests: Any) -> list[torch.dtype]:
            first, second, third = nests
            return [first["x"].dtype, second[0].dtype, third.data.dtype]

    model = amp.initialize(Reader(), opt_level="O2")
    packed = nn.utils.rnn.pack_sequence([torch.ones(2, 3)])
    assert model(Encoding(x=torch.ones(2)), [torch.ones(2)], packed) == [torch.float16] * 3
