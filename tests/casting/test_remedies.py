"""Failures that people meet in half precision, and the override that is the remedy for each."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import binary_cross_entropy

from halfstep import Policy

FP16 = torch.float16


def run(model: nn.Module, x: Tensor, policy: str | None) -> Tensor:
    with torch.autocast("cpu", dtype=FP16):
        if policy is None:
            result: Tensor = model(x)
        else:
            with Policy.parse(policy).apply(model):
                result = model(x)
    return result


class Residual(nn.Module):
    """A stream that one projection drives beyond the range of fp16, as in models that were trained in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        nn.init.normal_(self.down.weight, std=1e5)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(self.up(self.norm(x)).relu())
        result: Tensor = self.norm(x)
        return result


def test_a_projection_that_overflows_is_mended_by_keeping_it_in_fp32() -> None:
    torch.manual_seed(0)
    model, x = Residual(), torch.randn(3, 16)
    assert not run(model, x, None).isfinite().all()
    # What the island returns is beyond fp16 and stays fp32: cast back, the overflow would be in the residual stream again.
    torch.testing.assert_close(run(model, x, "fp16; down=fp32").float(), model(x), rtol=1e-2, atol=1e-2)


class Attention(nn.Module):
    """Products of queries and keys that are scaled too late."""

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.matmul(x, x.transpose(-1, -2)) / 100.0
        return scores.softmax(dim=-1)


@pytest.mark.parametrize("policy", ["fp16; 0=fp32", "fp16; op:matmul=fp32"])
def test_products_that_overflow_are_mended_by_the_module_or_by_the_operation(policy: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Attention()), torch.randn(2, 4, 8) * 200
    assert run(model, x, None).isnan().any()
    torch.testing.assert_close(run(model, x, policy).float(), model(x), rtol=2e-2, atol=2e-2)


def test_an_lstm_that_a_cpu_cannot_run_in_fp16_runs_as_an_island() -> None:
    torch.manual_seed(0)
    model, x = nn.LSTM(4, 3, batch_first=True), torch.randn(2, 5, 4)
    net = nn.ModuleDict({"lstm": model})
    with Policy.parse("fp16; lstm=fp32").apply(net), torch.autocast("cpu", dtype=FP16):
        out, (hidden, cell) = model(x.half())
    assert {out.dtype, hidden.dtype, cell.dtype} == {torch.float32}
    out.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_loss_that_cuda_autocast_refuses_runs_where_an_override_has_it_in_fp32() -> None:
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", FP16)
    try:
        with FakeTensorMode():
            p, target = torch.rand(4, device="cuda", dtype=FP16), torch.rand(4, device="cuda")
            with pytest.raises(RuntimeError, match="unsafe to autocast"):
                binary_cross_entropy(p, target)
            with Policy.parse("fp16; op:binary_cross_entropy=fp32").apply(nn.Identity()):
                assert binary_cross_entropy(p, target).dtype is torch.float32
    finally:
        torch.set_autocast_enabled("cuda", False)
