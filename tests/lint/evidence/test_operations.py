"""The names of operations, compared with what the installed torch does to them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from halfstep.lint.evidence import operations
from halfstep.numerics.oplists import list_treatments

# How aten calls what people call otherwise.
ATEN = {"cross_entropy": "cross_entropy_loss", "normalize": "", "einsum": "", "linalg_norm": "", "vector_norm": "", "softmin": ""}


def treatments(name: str, target: str) -> set[str]:
    """What autocast does to the overloads of an operation that it knows."""
    found = list_treatments(target)
    return {treatment for operation, treatment in found.items() if operation.partition(".")[0] == ATEN.get(name, name)}


@pytest.mark.parametrize("name", sorted(operations.LOWERED_OPERATIONS - {"einsum"}))
@pytest.mark.parametrize("target", ["cuda", "cpu"])
def test_lowered_operations(name: str, target: str) -> None:
    # Where autocast does not know an operation by its name, it ends in one that it knows.
    assert treatments(name, target) <= {"lower"}
    assert treatments(name, "cuda") == {"lower"}


@pytest.mark.parametrize("name", sorted(operations.CUDA_FP32_OPERATIONS))
def test_operations_that_cuda_runs_in_fp32(name: str) -> None:
    assert treatments(name, "cuda") == {"fp32"}


@pytest.mark.parametrize("name", sorted(operations.CPU_FP32_OPERATIONS))
def test_operations_that_the_cpu_runs_in_fp32(name: str) -> None:
    assert treatments(name, "cpu") == {"fp32"}


@pytest.mark.parametrize("name", sorted(operations.CUDA_FP32_OPERATIONS - operations.CPU_FP32_OPERATIONS))
def test_operations_that_the_cpu_leaves_alone(name: str) -> None:
    assert treatments(name, "cpu") <= {"as_is"}


@pytest.mark.parametrize("name", sorted(operations.PRESERVING - {"data", "rearrange", "softmax2d"}))
@pytest.mark.parametrize("target", ["cuda", "cpu"])
def test_operations_that_keep_the_type(name: str, target: str) -> None:
    pooling = name.startswith(("avg_pool", "max_pool", "adaptive", "interpolate"))
    assert treatments(name, target) <= {"as_is"} or pooling


def test_every_kind_is_a_kind_of_its_own() -> None:
    kinds = [
        operations.LOWERED_OPERATIONS,
        operations.CUDA_FP32_OPERATIONS_AND_COMPOSITES,
        operations.PRESERVING,
        operations.POINTWISE_BINARY,
        operations.INTEGER_RESULTS,
        operations.FACTORIES,
        operations.LIKE_FACTORIES,
    ]
    names = [name for kind in kinds for name in kind]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    "name", sorted(operations.LOWERED_MODULES | operations.CUDA_FP32_MODULES | operations.WIDE_MODULES | operations.ACTIVATIONS)
)
def test_modules_are_torchs(name: str) -> None:
    assert issubclass(getattr(nn, name), nn.Module)


@pytest.mark.parametrize("name", ["sigmoid", "tanh", "relu", "abs", "mean", "sqrt", "amax", "clone", "cumsum", "exp", "softmax"])
def test_cpu_autocast_leaves_half_in_half(name: str) -> None:
    x = torch.ones(2, 2, dtype=torch.float16)
    with torch.autocast("cpu", dtype=torch.float16):
        result = getattr(x, name)(*([0] if name in {"cumsum", "softmax"} else []))
    assert result.dtype == torch.float16
