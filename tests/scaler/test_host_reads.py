"""How often the host waits for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from halfstep.scaler import LossScaler
from tests.scaler.loops import FUSED, INF, OPTIMIZERS, HostReads, backward, iterate, weights

SETTINGS: list[dict[str, Any]] = [
    {},
    {"hysteresis": 2},
    {"min_scale": 0, "max_scale": 2.0**20},
    {"hysteresis": 2, "min_scale": 0.5, "growth_interval": 2},
    {"static": True},
]


def reads_of(scaler: torch.amp.GradScaler, name: str, factors: list[float], *, unscale: bool) -> HostReads:
    """The reads of an optimizer and scaler that made their first step before."""
    parameters = weights(3, 2)
    optimizer = OPTIMIZERS[name](parameters)
    iterate(scaler, optimizer, 1.0)
    with HostReads() as reads:
        for factor in factors:
            iterate(scaler, optimizer, factor, unscale=unscale)
    return reads


def test_a_read_is_seen() -> None:
    one = torch.ones(2)
    with HostReads() as reads:
        one[0].item()
        bool(one[0])
        one.tolist()
        torch.equal(one, one)
    assert (reads.scalars, reads.lists) == (3, 1)


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("name", [name for name in FUSED if not name.startswith("tensor-lr")])
def test_fused_optimizers_need_none(name: str, settings: dict[str, Any], unscale: bool) -> None:
    assert reads_of(LossScaler("cpu", **settings), name, [1.0, INF, 1.0, 1.0, INF, INF], unscale=unscale).total == 0


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in FUSED or name.startswith("tensor-lr")])
def test_other_optimizers_need_what_torch_needs(name: str, unscale: bool) -> None:
    factors = [1.0, INF, 1.0, 1.0, INF, INF]
    ours = reads_of(LossScaler("cpu", max_consecutive_skips=9), name, factors, unscale=unscale)
    theirs = reads_of(torch.amp.GradScaler("cpu"), name, factors, unscale=unscale)
    assert ours.scalars == theirs.scalars
    assert ours.lists == 0


@pytest.mark.parametrize("settings", [{}, {"hysteresis": 2}], ids=str)
@pytest.mark.parametrize("name", ["sgd-fused", "adamw-fused"])
def test_a_limit_on_skips_costs_one_in_as_many_updates(name: str, settings: dict[str, Any]) -> None:
    scaler = LossScaler("cpu", max_consecutive_skips=100, **settings)
    assert reads_of(scaler, name, [1.0] * 300, unscale=False).total == 3


def test_a_fused_optimizer_beside_another_adds_none() -> None:
    scaler, (first, second) = LossScaler("cpu"), weights(3, 2)
    optimizers = [OPTIMIZERS["adamw-fused"]([first]), OPTIMIZERS["sgd"]([second])]
    counts = []
    for _ in range(4):
        with HostReads() as reads:
            backward(scaler, [first, second], 1.0)
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
        counts.append(reads.total)
    assert counts[1:] == [1, 1, 1]
    assert counts[0] == 2, "the first step of a fused optimizer with state is decided on the host"


def test_everything_is_read_at_once() -> None:
    scaler, optimizer = LossScaler("cpu", hysteresis=2), OPTIMIZERS["sgd-fused"](weights())
    iterate(scaler, optimizer, INF)
    for read in (scaler.stats, scaler.state_dict):
        with HostReads() as reads:
            read()
        assert reads.total == 1
