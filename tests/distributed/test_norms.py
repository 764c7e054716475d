from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from halfstep.distributed import clip_, total_norm
from tests.ranks import run_ranks

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]


def torch_clip(gradients: list[Tensor], *, max_norm: float, norm: Tensor) -> list[Tensor]:
    """What torch makes of copies of the gradients."""
    parameters = [nn.Parameter(torch.empty_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def same_bits(ours: Tensor, theirs: Tensor) -> bool:
    flat, expected = ours.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8)
    return ours.dtype is theirs.dtype and ours.shape == theirs.shape and torch.equal(flat, expected)


class TestPlainGradients:
    @given(
        kinds=st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(0, 40), st.floats(1e-3, 1e3)), max_size=6),
        max_norm=st.floats(1e-3, 1e4),
    )
    def test_they_are_treated_as_torch_does(self, kinds: list[tuple[torch.dtype, int, float]], max_norm: float) -> None:
        gradients = [(torch.randn(size, dtype=torch.float64) * scale).to(dtype) for dtype, size, scale in kinds]
        norm = total_norm(gradients)
        assert same_bits(norm, torch.nn.utils.get_total_norm(gradients))
        expected = torch_clip(gradients, max_norm=max_norm, norm=norm)
        clip_(gradients, max_norm=max_norm, norm=norm)
        assert all(same_bits(ours, theirs) for ours, theirs in zip(gradients, expected, strict=True))

    @pytest.mark.parametrize("scale", [0.1, 1e3])
    def test_many_of_one_type_are_treated_as_torch_does(self, scale: float) -> None:
        gradients = [torch.randn(7, 5) * scale, torch.randn(3) * scale, torch.zeros(0)]
        norm = total_norm(gradients)
        assert torch.equal(norm, torch.nn.utils.get_total_norm(gradients))
        expected = torch_clip(gradients, max_norm=1.0, norm=norm)
        clip_(gradients, max_norm=1.0, norm=norm)
        assert all(map(torch.equal, gradients, expected))

    def test_a_subclass_of_tensor_is_accepted(self) -> None:
        gradients = [torch.ones(4).as_subclass(Subclass), torch.ones(5)]
        norm = total_norm(gradients)
        assert float(norm) == 3.0
        clip_(gradients, max_norm=1.5, norm=norm.as_subclass(Tensor))
        assert gradients[0].tolist() == pytest.approx([0.5] * 4)

    def test_gradients_with_a_graph_are_changed_outside_of_it(self) -> None:
        gradient = torch.ones(4, requires_grad=True) * 1.0
        norm = total_norm([gradient])
        assert not norm.requires_grad
        clip_([gradient], max_norm=1.0, norm=norm)
        assert gradient.tolist() == pytest.approx([0.5] * 4)

    @pytest.mark.parametrize("value", [float("inf"), float("nan")])
    def test_a_value_that_is_not_finite_shows(self, value: float) -> None:
        assert not total_norm([torch.ones(3), torch.tensor([1.0, value])]).isfinite()

    def test_a_tuple_and_a_whole_number_will_do(self) -> None:
        gradients = (torch.tensor([3.0]), torch.tensor([4.0]))
        clip_(gradients, max_norm=1, norm=total_norm(gradients))
        assert [gradient.item() for gradient in gradients] == pytest.approx([0.6, 0.8])


class Subclass(Tensor):
    """Does not know the foreach functions, as many do not."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.startswith("_foreach"):
            raise NotImplementedError(func.__name__)
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


def test_what_one_process_does_not_need_is_not_loaded() -> None:
    code = """
import sys, torch
before = {name for name in sys.modules if name.startswith(("torch.distributed.tensor", "torch.distributed.fsdp"))}
from halfstep import distributed
model = torch.nn.Linear(2, 2)
model(torch.ones(1, 2)).sum().backward()
gradients = [parameter.grad for parameter in model.parameters()]
distributed.clip_(gradients, max_norm=1.0, norm=distributed.total_norm(gradients))
assert distributed.ranks_of(model) is None
sync = distributed.GradientSync(model)
sync.hold()
sync.reduce_held(model.parameters())
after = {name for name in sys.modules if name.startswith(("torch.distributed.tensor", "torch.distributed.fsdp"))}
assert after == before, after - before
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# One rank's report on a mixture: its norm, and the float64 norm of the whole tensors; then what clipping left of each, as a whole tensor,
# beside what it should be.
Report = dict[str, Any]


def report(gradients: list[Tensor], wholes: list[Tensor], *, max_norm: float = 1.0) -> Report:
    # What is passed may share memory, and clipping is in place.
    gradients, wholes = [*map(copy_of, gradients)], [whole.clone() for whole in wholes]
    norm = total_norm(gradients)
    reference = torch.stack([torch.linalg.vector_norm(whole.to(torch.complex128)) for whole in wholes]).square().sum().sqrt()
    clip_(gradients, max_norm=max_norm, norm=norm)
    factor = min(1.0, max_norm / (float(norm) + 1e-6))
    close = [torch.allclose(whole_of(gradient), whole * factor, rtol=1e-2) for gradient, whole in zip(gradients, wholes, strict=True)]
    return {"norm": float(norm), "reference": float(reference), "close": close, "type": (type(norm), norm.dtype, norm.dim())}


def copy_of(tensor: Tensor) -> Tensor:
    """A copy that is spread in the same way; `clone` would sum a partial one."""
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 - slow to import, and only the ranks need it

    if not isinstance(tensor, DTensor):
        return tensor.clone()
    local = tensor.to_local().clone()
    return DTensor.from_local(local, tensor.device_mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride())


def whole_of(tensor: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 - slow to import, and only the ranks need it

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def two_ranks(rank: int) -> dict[str, Report]:
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415
    from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor  # noqa: PLC0415

    mesh = init_device_mesh("cpu", (2,))

    def spread(whole: Tensor, placement: Placement) -> Tensor:
        return distribute_tensor(whole, mesh, [placement])

    plain, matrix, row, odd = torch.randn(3), torch.randn(4, 3), torch.randn(1, 5), torch.randn(3)
    partial = DTensor.from_local(torch.full((4,), rank + 1.0), mesh, [Partial()])
    mean = DTensor.from_local(torch.full((4,), rank + 1.0), mesh, [Partial("avg")])
    assert (spread(row, Shard(0)).to_local().numel() == 0) == (rank == 1)  # type: ignore[attr-defined]
    found = {
        "sharded": report([spread(matrix, Shard(0)), spread(matrix, Shard(1)), spread(odd, Shard(0))], [matrix, matrix, odd]),
        "replicated": report([spread(matrix, Replicate()), spread(odd, Replicate())], [matrix, odd]),
        "empty on one rank": report([spread(row, Shard(0))], [row]),
        "partial": report([partial, mean], [torch.full((4,), 3.0), torch.full((4,), 1.5)]),
        "replicated first": report([spread(matrix, Replicate()), spread(row, Shard(0)), plain], [matrix, row, plain]),
        "plain first": report([plain, spread(matrix, Shard(0)), spread(odd, Replicate()), odd], [plain, matrix, odd, odd]),
        "types": report(
            [spread(matrix.half(), Shard(0)), spread(matrix.bfloat16(), Replicate()), spread(matrix.to(torch.complex64), Shard(0))],
            [matrix.half(), matrix.bfloat16(), matrix.to(torch.complex64)],
        ),
        "not clipped": report([spread(matrix, Shard(0))], [matrix], max_norm=100.0),
    }
    huge = torch.full((4, 3), 1e30)
    norm = total_norm([spread(huge, Shard(0)), huge])
    found["huge"] = {"norm": float(norm), "reference": 24**0.5 * 1e30}
    inf = torch.tensor([1.0, 2.0, 3.0, float("inf")])
    found["inf"] = {"norm": float(total_norm([plain, spread(inf, Shard(0))])), "reference": float("inf")}
    # A plain gradient that was never reduced: the ranks still clip by the same number.
    found["not reduced"] = report_of_unreduced(rank, spread(matrix, Shard(0)), matrix)
    return found


def report_of_unreduced(rank: int, gradient: Tensor, whole: Tensor) -> Report:
    norm = total_norm([gradient, torch.tensor([1.0 + 2 * rank])])
    return {"norm": float(norm), "reference": float((whole.square().sum() + 5).sqrt())}


def four_ranks(rank: int) -> dict[str, Report]:
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415
    from torch.distributed.tensor import Partial, Placement, Replicate, Shard, distribute_tensor  # noqa: PLC0415
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module  # noqa: PLC0415

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    other = init_device_mesh("cpu", (4,))
    matrix, row = torch.randn(5, 4), torch.randn(1, 3)

    def spread(whole: Tensor, *placements: Placement) -> Tensor:
        return distribute_tensor(whole, mesh, placements)

    found = {
        "hsdp": report([spread(matrix, Replicate(), Shard(0)), spread(row, Replicate(), Shard(0))], [matrix, row]),
        "both": report([spread(matrix, Shard(0), Shard(1)), spread(row, Shard(0), Shard(0))], [matrix, row]),
        "mixture": report(
            [
                spread(matrix, Replicate(), Replicate()),
                row,
                spread(row, Shard(0), Replicate()),
                spread(matrix, Replicate(), Shard(1)),
                spread(matrix, Partial(), Shard(0)),
                distribute_tensor(matrix, other, [Shard(0)]),
            ],
            [matrix, row, row, matrix, matrix, matrix],
        ),
    }
    model = nn.Sequential(nn.Linear(3, 6, bias=False), nn.ReLU(), nn.Linear(6, 5))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(model, grid["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=grid["data"])
    model(torch.randn(4, 3) * (1 + grid.get_local_rank("data"))).square().sum().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    found["fsdp and tensor parallel"] = report(gradients, [*map(whole_of, gradients)])
    return found


@pytest.mark.parametrize(("function", "size"), [(two_ranks, 2), (four_ranks, 4)])
def test_gradients_that_are_spread_over_ranks(function: Any, size: int, tmp_path: Path) -> None:
    first, *others = run_ranks(function, size=size, tmp_path=tmp_path)
    for name, found in first.items():
        assert found["norm"] == pytest.approx(found["reference"], rel=1e-6), name
        assert all(found.get("close", [])), name
        assert found.get("type", (Tensor, torch.float32, 0)) == (Tensor, torch.float32, 0), name
        assert all(other[name]["norm"] == found["norm"] for other in others), name
        assert all(all(other[name].get("close", [])) for other in others), name
