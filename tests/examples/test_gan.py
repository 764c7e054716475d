from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from halfstep import LossScaler, MixedPrecision

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "gan.py")


@pytest.fixture(scope="module")
def gan() -> dict[str, Any]:
    return runpy.run_path(EXAMPLE)


def test_it_trains_and_draws(gan: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [EXAMPLE, "--precision", "fp16", "--steps", "24"])
    gan["main"]()
    *lines, _ = capsys.readouterr().out.split("\n")
    told, drawing = lines[:4], lines[4:]
    assert [line.split(":")[0] for line in told] == ["step 6", "step 12", "step 18", "step 24"]
    assert all("(fp16)" in line for line in told)
    assert [len(row) for row in drawing] == [16] * 8


def test_the_penalty_is_that_of_the_paper_in_every_precision(gan: dict[str, Any]) -> None:
    torch.manual_seed(0)
    _, critic = gan["make_networks"]()
    real, fake = torch.rand(8, 64), torch.rand(8, 64)
    found = {}
    for precision in ("fp32", "bf16", "fp16"):
        scaler = LossScaler(init_scale=2.0**14) if precision == "fp16" else None
        amp = MixedPrecision(critic, torch.optim.SGD(critic.parameters(), lr=0.1), precision, scaler=scaler)
        torch.manual_seed(1)
        with amp.autocast():
            found[precision] = gan["penalty"](amp, real, fake)
    torch.manual_seed(1)
    share = torch.rand(8, 1)
    between = (share * real + (1 - share) * fake).requires_grad_()
    (gradient,) = torch.autograd.grad(critic(between).sum(), between)
    expected = (gradient.norm(dim=1) - 1).pow(2).mean()
    torch.testing.assert_close(found["fp32"], expected)
    torch.testing.assert_close(found["fp16"], expected, rtol=2e-3, atol=1e-3)
    torch.testing.assert_close(found["bf16"], expected, rtol=2e-2, atol=1e-2)
    assert found["fp16"].requires_grad
