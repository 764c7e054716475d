"""The scaler in the place of torch's, in libraries that bring their own loops."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from halfstep.scaler import LossScaler
from tests.scaler.loops import INF, same, snapshot

FACTORS = [1.0, INF, 1.0, 1.0, INF, INF, 1.0]
SKIPS = [factor == INF for factor in FACTORS]


def make(*, fused: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)


@pytest.fixture
def accelerator() -> Iterator[Any]:
    accelerate = pytest.importorskip("accelerate")
    state = pytest.importorskip("accelerate.state")
    state.AcceleratorState._reset_state(reset_partial_state=True)
    made = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    made.scaler, made.native_amp = LossScaler("cpu", init_scale=8.0, growth_interval=100), True
    yield made
    state.AcceleratorState._reset_state(reset_partial_state=True)
    state.GradientState._reset_state()


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_accelerate_skips_what_it_should_and_knows_it(accelerator: Any, fused: bool, clip: bool) -> None:
    inner, made = make(fused=fused)
    model, optimizer = accelerator.prepare(inner, made)
    inputs, seen, scale = torch.ones(3, 4), [], 8.0
    for factor in FACTORS:
        before = snapshot(made)
        with accelerator.autocast():
            loss = model(inputs).float().sum() * factor
        accelerator.backward(loss)
        if clip:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(optimizer.step_was_skipped)
        assert same(snapshot(made), before) == (factor == INF)
        scale = scale / 2 if factor == INF else scale
        assert accelerator.scaler.get_scale() == scale
    assert seen == SKIPS
    assert accelerator.scaler.stats().steps == len(FACTORS)
    assert accelerator.scaler.stats().skips == sum(SKIPS)


def test_accelerate_saves_and_loads_it(accelerator: Any, tmp_path: Any) -> None:
    inner, made = make(fused=True)
    model, optimizer = accelerator.prepare(inner, made)
    for factor in (INF, 1.0):
        accelerator.backward(model(torch.ones(3, 4)).float().sum() * factor)
        optimizer.step()
        optimizer.zero_grad()
    saved = accelerator.scaler.state_dict()
    accelerator.save_state(tmp_path)
    accelerator.scaler.update(1024.0)
    accelerator.load_state(tmp_path)
    assert accelerator.scaler.state_dict() == saved
    accelerator.scaler._lazy_init_scale_growth_tracker(accelerator.scaler._device)  # As it does for FSDP2.
    assert accelerator.scaler.state_dict() == saved


@pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_fabric_skips_what_it_should(fused: bool, clip: bool) -> None:
    fabric_module = pytest.importorskip("lightning.fabric")
    plugins = pytest.importorskip("lightning.fabric.plugins")
    if fused and clip:
        pytest.skip("Fabric refuses to clip with a fused optimizer")
    scaler = LossScaler("cpu", init_scale=8.0, growth_interval=100)
    fabric = fabric_module.Fabric(accelerator="cpu", devices=1, plugins=[plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler)])
    inner, made = make(fused=fused)
    model, optimizer = fabric.setup(inner, made)
    scale = 8.0
    for factor in FACTORS:
        before = snapshot(made)
        with fabric.autocast():
            loss = model(torch.ones(3, 4)).float().sum() * factor
        fabric.backward(loss)
        if clip:
            fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
        optimizer.step()
        optimizer.zero_grad()
        assert same(snapshot(made), before) == (factor == INF)
        scale = scale / 2 if factor == INF else scale
        assert scaler.get_scale() == scale
    assert (scaler.stats().steps, scaler.stats().skips) == (len(FACTORS), sum(SKIPS))


def test_torch_functions_that_take_a_scaler_take_this_one() -> None:
    scaler = LossScaler("cpu", init_scale=8.0)
    assert isinstance(scaler, torch.amp.GradScaler)
    scaler.scale(torch.ones(()))
    scale = scaler._get_scale_async()
    assert scale is scaler.scale_on(torch.device("cpu"))
