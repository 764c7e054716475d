"""The engine on a GPU: what only a device that works by itself can show."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from halfstep import LossScaler, MixedPrecision

pytestmark = pytest.mark.gpu


@pytest.fixture
def no_waiting() -> Iterator[None]:
    """Any operation that makes the host wait for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def make(precision: str, **settings: Any) -> MixedPrecision:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10)).cuda()
    return MixedPrecision(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), precision, **settings)


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(16, 32, generator=generator).cuda(), torch.randint(10, (16,), generator=generator).cuda()) for _ in range(count)]


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_no_step_waits_for_the_device(precision: str, clip: float | None, request: pytest.FixtureRequest) -> None:
    amp = make(precision, max_grad_norm=clip)
    data = batches(8)
    factors = [torch.tensor(math.inf if step in (3, 5) else 1.0, device="cuda") for step in range(8)]

    def loss(x: torch.Tensor, y: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(amp.model(x), y) * factor

    amp.train_step(loss, *data[0], factors[0])  # The optimizer makes its state.
    request.getfixturevalue("no_waiting")
    records = [amp.train_step(loss, *each, factor) for each, factor in zip(data, factors, strict=True)]
    torch.cuda.set_sync_debug_mode("default")
    assert [record.skipped for record in records] == [step in (3, 5) for step in range(8)]
    assert (amp.stats().steps, amp.stats().skips) == (9, 2)
    assert records[0].memory_bytes is not None
    assert all(bool(buffer.isfinite().all()) for buffer in amp.model.buffers())


@pytest.mark.parametrize("fused", [False, True])
def test_a_run_equals_the_loop_by_hand(fused: bool) -> None:
    data = batches(6)
    models = [nn.Linear(32, 10).cuda() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused) for model in models]
    amp = MixedPrecision(models[0], optimizers[0], "fp16", max_grad_norm=1.0, scaler=LossScaler(init_scale=1024.0))
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    for step, (x, y) in enumerate(data):
        factor = math.inf if step == 2 else 1.0
        amp.train_step(lambda x, y, factor=factor: nn.functional.cross_entropy(models[0](x), y) * factor, x, y)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = nn.functional.cross_entropy(models[1](x), y) * factor
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.unscale_(optimizers[1])
        nn.utils.clip_grad_norm_(models[1].parameters(), 1.0)
        scaler.step(optimizers[1])
        scaler.update()
        optimizers[1].zero_grad()
    for mine, by_hand in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(mine, by_hand)
