"""What halfstep uses of torch to follow a loop that it does not own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.nn.utils.clip_grad
import torch.utils._python_dispatch
import torch.utils.data.dataloader
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

__all__ = [
    "CLIPPING",
    "NORMS",
    "compiler_is_in_use",
    "hook_all_steps",
    "is_given_enabled",
    "loader_iterators",
    "modes_are_on",
    "override_region",
    "region_dtype",
    "region_is_enabled",
    "region_keeps_casts",
    "result_dtype",
    "saved_factors",
    "without_modes",
]

# Where all clipping by norm passes, by whatever name it was imported: the module, and the function in it. Private:
# `torch.nn.utils.clip_grad._clip_grads_with_norm_`, which `clip_grad_norm_` calls through its module. Seen on torch 2.9 to 2.13.
CLIPPING: tuple[ModuleType, str] = (torch.nn.utils.clip_grad, "_clip_grads_with_norm_")

# Where it computes that norm. Private: `torch.nn.utils.clip_grad._get_total_norm`, as above.
NORMS: tuple[ModuleType, str] = (torch.nn.utils.clip_grad, "_get_total_norm")


def region_dtype(region: torch.autocast) -> torch.dtype | None:
    """The dtype that an autocast region computes in, also one that was not entered.

    Seen on torch 2.9 to 2.13 as `autocast.fast_dtype`, which is public by its name and not documented.
    """
    dtype: torch.dtype | None = getattr(region, "fast_dtype", None)
    return dtype


def region_is_enabled(region: torch.autocast) -> bool:
    """Whether an autocast region switches autocast on, also one that was not entered.

    Private: `autocast._enabled`. Seen on torch 2.9 to 2.13.
    """
    return bool(region._enabled)


def region_keeps_casts(region: torch.autocast) -> bool:
    """Whether an autocast region keeps the weights that it has cast.

    Private: `autocast._cache_enabled`. Seen on torch 2.9 to 2.13.
    """
    return bool(region._cache_enabled)


def override_region(region: Any, dtype: torch.dtype | None) -> Callable[[], None]:
    """Has an autocast region compute in another dtype when it is entered, or switches it off where that is `None`.

    Private: `autocast._enabled`, as above.

    Returns:
        What puts the region back.
    """
    kept = (region._enabled, region.fast_dtype)

    def put_back() -> None:
        region._enabled, region.fast_dtype = kept

    if dtype is None:
        region._enabled = False
    else:
        region.fast_dtype = dtype
    return put_back


def is_given_enabled(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    """Whether `autocast(device_type, dtype, enabled, cache_enabled)` was asked to switch autocast on, whatever came of it."""
    return bool(arguments[2] if len(arguments) > 2 else keywords.get("enabled", True))


def loader_iterators() -> type:
    """The class of what iterates over a `DataLoader`.

    Private: `torch.utils.data.dataloader._BaseDataLoaderIter`, whose `__next__` is where batches come from. Seen on torch 2.9 to 2.13.
    """
    return torch.utils.data.dataloader._BaseDataLoaderIter


def saved_factors(node: Any) -> list[torch.Tensor]:
    """The tensors that a node of autograd keeps of a multiplication; none for other nodes.

    Private: `Node._saved_self` and `_saved_other`, of which the autograd notes tell. Seen on torch 2.9 to 2.13.
    """
    if node.name() != "MulBackward0":
        return []
    found = []
    for name in ("_saved_self", "_saved_other"):
        try:
            value = getattr(node, name)
        except RuntimeError:  # A backward pass has freed it.
            continue
        if isinstance(value, torch.Tensor):
            found.append(value)
    return found


def result_dtype(node: Any) -> torch.dtype | None:
    """The dtype of the result of the operation that a node of autograd belongs to.

    Private: `Node._input_metadata`, of which the custom functions of torch's own libraries make use. Seen on torch 2.9 to 2.13.
    """
    found = getattr(node, "_input_metadata", None)
    dtype: torch.dtype | None = getattr(found[0], "dtype", None) if found else None
    return dtype


def modes_are_on() -> bool:
    """Whether a dispatch mode or a function mode is active, which sees each operation.

    Private: `torch._C._len_torch_dispatch_stack` and `_len_torch_function_stack`. Seen on torch 2.9 to 2.13.
    """
    return bool(torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack())


def compiler_is_in_use() -> bool:
    """Whether something was compiled by `torch.compile` in this process, which a dispatch mode would be in the way of.

    Private: `torch._dynamo.eval_frame.cached_backends`. Seen on torch 2.9 to 2.13; a torch without it is taken for one that compiles.
    """
    frames = sys.modules.get("torch._dynamo.eval_frame")
    if frames is None:
        return False
    backends = getattr(frames, "cached_backends", None)
    return backends is None or any(each is not None for each in backends.values())


@contextmanager
def without_modes() -> Iterator[None]:
    """A block whose operations no mode sees.

    Private: `torch.utils._python_dispatch._disable_current_modes` and `torch._C.DisableTorchFunction`. Seen on torch 2.9 to 2.13.
    """
    with torch.utils._python_dispatch._disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def hook_all_steps(
    before: Callable[[Any, Any, Any], None], after: Callable[[Any, Any, Any], None]
) -> tuple[RemovableHandle, RemovableHandle]:
    """Has functions called before and after each step of each optimizer, with it and the arguments of the step.

    Seen on torch 2.9 to 2.13 as public names of `torch.optim.optimizer`, which is no attribute of `torch.optim`.
    """
    return register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)
