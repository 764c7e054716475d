from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from halfstep.distributed import compress_gradients, fsdp_policy
from halfstep.errors import ConfigurationError, InvalidTypeError, StepOrderError
from tests.ranks import run_ranks


class TestPolicy:
    @pytest.mark.parametrize(
        ("precision", "dtypes"),
        [("bf16", (torch.bfloat16, torch.float32)), ("fp16", (torch.float16, torch.float32)), ("fp32", (None, None))],
    )
    def test_half_precision_is_for_parameters_alone(self, precision: str, dtypes: tuple[Any, Any]) -> None:
        policy = fsdp_policy(precision)
        assert (policy.param_dtype, policy.reduce_dtype) == dtypes
        assert policy.output_dtype is None
        assert policy.cast_forward_inputs

    def test_another_name_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match=r"Unknown precision 'fp8'\. Allowed are fp32, bf16 and fp16"):
            fsdp_policy("fp8")

    def test_a_torch_without_distributed_has_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(dist, "is_available", lambda: False)
        with pytest.raises(ConfigurationError, match=r"fsdp_policy\('bf16'\): this build of torch has no torch\.distributed"):
            fsdp_policy("bf16")


def wrapped(*, group: dist.ProcessGroup | None = None) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Linear(3, 2), process_group=group)


def gradient(model: DistributedDataParallel, rank: int) -> torch.Tensor:
    model.zero_grad()
    model((torch.arange(12.0).reshape(4, 3) + 1) / 7 * (rank + 1)).square().sum().backward()
    found = model.module.weight.grad
    assert isinstance(found, torch.Tensor)
    return found.clone()


def two_ranks(rank: int) -> dict[str, Any]:
    # A group of its own: the hook must not use the world.
    group = [dist.new_group([0]), dist.new_group([1])][rank]
    single, plain, model = wrapped(group=group), wrapped(), wrapped()
    mine = gradient(single, rank)
    both: list[torch.Tensor] = [torch.zeros_like(mine) for _ in range(2)]
    dist.all_gather(both, mine)
    expected = sum((each.bfloat16() / 2 for each in both), torch.zeros_like(mine).bfloat16()).float()
    compress_gradients(model)
    compress_gradients(single)
    compressed = gradient(model, rank)
    return {
        "as computed by hand": torch.equal(compressed, expected),
        "fp32": compressed.dtype is torch.float32,
        "near the exact mean": torch.allclose(compressed, gradient(plain, rank), rtol=2**-7),
        "rounded": not torch.equal(compressed, gradient(plain, rank)),
        "within the model's group": torch.equal(gradient(single, rank), mine.bfloat16().float()),
    }


def test_gradients_are_exchanged_in_bf16(tmp_path: Path) -> None:
    for found in run_ranks(two_ranks, tmp_path=tmp_path):
        assert [name for name, right in found.items() if not right] == []


class TestCompression:
    def test_only_data_parallel_models_are_accepted(self) -> None:
        with pytest.raises(InvalidTypeError, match=r"takes a DistributedDataParallel model, not a Linear\. Wrap the model first"):
            compress_gradients(nn.Linear(2, 2))  # type: ignore[arg-type]

    def test_twice_is_refused(self, alone: None) -> None:
        model = wrapped()
        compress_gradients(model)
        with pytest.raises(StepOrderError, match=r"takes one communication hook only, so call it once"):
            compress_gradients(model)

    @pytest.mark.parametrize(("config", "native"), [("cuda:nccl", True), ("cpu:gloo,xpu:xccl", True), ("cpu:gloo,cuda:gloo", False)])
    def test_the_hook_of_torch_is_used_where_torch_takes_it(
        self, config: str, native: bool, alone: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks  # noqa: PLC0415 - slow to import

        model, taken = wrapped(), []
        monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
        monkeypatch.setattr(model, "register_comm_hook", lambda state, hook: taken.append((state, hook)))
        compress_gradients(model)
        ((state, hook),) = taken
        assert state is model.process_group
        assert (hook is default_hooks.bf16_compress_hook) == native
