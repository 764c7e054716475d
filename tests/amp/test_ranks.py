from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from tests.amp.nets import INF, assert_same, make_batches
from tests.amp.on_ranks import accumulate, make_model, train
from tests.ranks import run_ranks


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(level: str, tmp_path: Path) -> None:
    factors = [[1.0, 1.0], [1.0, INF], [1.0, 1.0]]
    one, other = run_ranks(train, level, factors, tmp_path=tmp_path)
    scales = [128.0] * 3 if level == "O3" else [2.0**16, 2.0**15, 2.0**15]
    assert one["seen"] == other["seen"] == list(zip([False, True, False], scales, strict=True))
    assert_same(one["parameters"], other["parameters"])


@pytest.mark.parametrize("as_views", [False, True])
def test_two_losses_add_up_as_on_one_rank(as_views: bool, tmp_path: Path) -> None:
    one, other = run_ranks(accumulate, as_views, tmp_path=tmp_path)
    assert_same(one, other)
    model = make_model()
    loss = torch.stack([F.cross_entropy(model(x), y) for x, y in make_batches(2)]).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    for gradient, parameter in zip(one, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=0.01, atol=1e-3)
