from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import pytest
import torch

from halfstep.hardware import matmul_gain, speed
from halfstep.records import Precision

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "_SIZE", {"cpu": 16})
    monkeypatch.setattr(speed, "_ROUNDS", 7)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_gain_is_positive(precision: Precision) -> None:
    assert matmul_gain(precision, device=CPU) > 0


def test_the_gain_is_the_ratio_of_the_best_times(monkeypatch: pytest.MonkeyPatch) -> None:
    fp32 = [9.0, 8.0, 6.0, 8.0, 9.0, 7.0, 8.0]
    bf16 = [5.0, 4.0, 4.0, 2.0, 3.0, 9.0, 9.0]

    def ticks() -> Iterator[float]:
        yield from accumulate(gap for pair in zip(fp32, bf16, strict=True) for seconds in pair for gap in (1.0, seconds))

    clock = ticks()
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    assert matmul_gain("bf16", device=CPU) == 3.0
    with pytest.raises(StopIteration):
        next(clock)


def test_the_operands_have_the_dtype_of_the_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[torch.dtype] = set()
    matmul = torch.Tensor.__matmul__

    def watched(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        seen.add(a.dtype)
        return matmul(a, b)

    monkeypatch.setattr(torch.Tensor, "__matmul__", watched)
    matmul_gain("fp16", device=CPU)
    assert seen == {torch.float32, torch.float16}


def test_the_random_numbers_of_the_user_are_left_alone() -> None:
    before = torch.get_rng_state()
    matmul_gain("bf16", device=CPU)
    assert torch.equal(torch.get_rng_state(), before)
