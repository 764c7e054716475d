"""Every private attribute of torch that halfstep uses, each with the reason.

Nothing else in the package may touch a name of torch that begins with an underscore. `tests/test_torch_private.py` fails loudly when a
new torch changes one of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["BeforeEachOperation", "cpu_features", "dense_parts", "quiet_profiler", "tree_leaves", "tree_map"]


class BeforeEachOperation(TorchDispatchMode):
    """A context in which a function is called before each operation of torch, forward and backward; it may raise to stop the work.

    Private: `torch.utils._python_dispatch.TorchDispatchMode`, the documented way to see every operation, in a module whose name is
    private. Seen on torch 2.9 to 2.13.
    """

    def __init__(self, call: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._call = call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls the function, then the operation."""
        self._call()
        return func(*args, **(kwargs or {}))


def cpu_features() -> frozenset[str]:
    """The low-precision instruction sets of this CPU: any of `bf16` and `fp16`, each only where training kernels use it.

    Private: `torch.cpu._is_avx512_bf16_supported`, `torch.cpu._is_amx_fp16_supported`, `torch._C._has_mkldnn` and
    `torch.ops.mkldnn._is_mkldnn_bf16_supported`, because torch has no public question with the same meaning. Seen on torch 2.9 to 2.13.

    On x86, oneDNN accepts bf16 on any AVX-512 CPU and emulates it, so only the instruction itself counts. It also accepts fp16 with
    AVX512-FP16, but then computes a convolution's weight gradient with its reference code, some 80 times slower than in fp32; kernels
    for training exist with AMX-FP16 alone. On Arm, oneDNN's own answer follows the instruction.
    """
    found = set()
    if torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        if torch.cpu._is_avx512_bf16_supported():
            found.add("bf16")
        if torch.cpu._is_amx_fp16_supported():
            found.add("fp16")
    elif torch._C._has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        found.add("bf16")
    return frozenset(found)


def dense_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The strided tensors that hold a tensor's data: itself, or the indices and values of a sparse one; none for any other layout.

    Private: `Tensor._indices` and `Tensor._values`, because the public `indices` and `values` refuse a COO tensor that is not coalesced,
    and coalescing would allocate. Seen on torch 2.13.
    """
    if tensor.layout is torch.strided:
        return (tensor,)
    if tensor.layout is torch.sparse_coo:
        return (tensor._indices(), tensor._values())
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    return ()


def quiet_profiler() -> None:
    """Keeps the profiler from writing its start and stop lines on standard error.

    Private: Kineto's environment variable `KINETO_LOG_LEVEL`; 6 is above every message. Kineto reads it at the first profile of the
    process. A value that the user set stays. Seen on torch 2.13.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """The same nest of tuples, lists and dictionaries with the function applied to each leaf.

    Private: `torch.utils._pytree`, because it is what torch's own data and export code nests by. Seen on torch 2.9 to 2.13.
    """
    return torch.utils._pytree.tree_map(function, tree)


def tree_leaves(tree: Any) -> list[Any]:
    """The leaves of a nest of tuples, lists and dictionaries, in order.

    Private: `torch.utils._pytree`, as in `tree_map`.
    """
    return torch.utils._pytree.tree_leaves(tree)
