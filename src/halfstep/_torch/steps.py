"""What halfstep uses of torch's optimizers, scalers, tensors and sharded modules."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "BeforeEachOperation",
    "buffer_count",
    "check_and_unscale_",
    "copy_all_",
    "cpu_features",
    "dense_parts",
    "finish_sharded_backward",
    "foreach_magnitudes",
    "foreach_multiply_",
    "foreach_norms",
    "found_infs",
    "has_found_infs",
    "is_joining",
    "own_buffers",
    "quiet_profiler",
    "record_found_inf",
    "reset_data_parallel",
    "reset_sharded",
    "steps_are_observed",
    "supports_device_verdict",
    "torch_device_type",
    "torch_scale",
    "tree_leaves",
    "tree_map",
    "update_scale_",
    "version_of",
    "without_step_hooks",
]


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


def check_and_unscale_(gradients: list[torch.Tensor], *, found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
    """Multiplies gradients by a number, and sets `found_inf` to 1 if one of them was not finite before; it is left alone otherwise.

    Private: `torch._amp_foreach_non_finite_check_and_unscale_`, the kernel of `GradScaler.unscale_`, because it does in one pass, without
    a wait for the device, what would take several with public operations. Seen on torch 2.9 to 2.13.

    Args:
        gradients: Strided, real, all of one dtype and on one device.
        found_inf: 0-dimensional float32 on that device.
        inverse_scale: 0-dimensional float32 on that device.
    """
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inverse_scale)


def update_scale_(
    scale: torch.Tensor,
    growth_tracker: torch.Tensor,
    *,
    found_inf: torch.Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
) -> None:
    """Moves a loss scale, in place and on its device, as `GradScaler.update` does.

    Private: `torch._amp_update_scale_`, the kernel of that method, so that a scale moves by the same arithmetic. Seen on torch 2.9 to
    2.13.
    """
    torch._amp_update_scale_(scale, growth_tracker, found_inf, growth_factor, backoff_factor, growth_interval)


def copy_all_(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copies each source into the target beside it.

    Private: `torch._foreach_copy_`, one call where a loop would make as many as there are tensors. Seen on torch 2.9 to 2.13.
    """
    torch._foreach_copy_(targets, sources)


def own_buffers(module: torch.nn.Module) -> Mapping[str, torch.Tensor | None]:
    """The buffers of a module without those of its submodules, by name, with those that are `None`.

    Private: `Module._buffers`, because the public `named_buffers` leaves out those that are `None`. Seen on torch 2.9 to 2.13.
    """
    return module._buffers


def buffer_count(modules: Iterable[torch.nn.Module]) -> int:
    """How many buffers the modules have, without those of their submodules.

    Private: `Module._buffers`, because a walk over `buffers()` takes ten times as long. Seen on torch 2.9 to 2.13.
    """
    return sum(len(module._buffers) for module in modules)


def version_of(tensor: torch.Tensor) -> int:
    """A number that grows whenever the tensor is written to in place.

    Private: `Tensor._version`, which the autograd notes describe, but under this name. Seen on torch 2.9 to 2.13.
    """
    return tensor._version


def supports_device_verdict(optimizer: object) -> bool:
    """Whether an optimizer decides by itself, on the device, whether to step: by its attribute `found_inf`, as the fused ones do.

    Private: `_step_supports_amp_scaling`, by which `GradScaler.step` recognises them. Seen on torch 2.9 to 2.13.
    """
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def steps_are_observed(optimizer: torch.optim.Optimizer) -> bool:
    """Whether somebody takes each call of `optimizer.step()` for a step: by a hook, or by a function put in its place.

    A hook with an attribute `observes_steps` that is false does not.

    Private: `Optimizer._optimizer_step_post_hooks` and `_optimizer_step_pre_hooks`, and the attribute `_wrapped_by_lr_sched` of the
    function that a learning-rate scheduler puts there, which only sets a flag; `functools.wraps` copies it to whatever is put around that.
    Seen on torch 2.9 to 2.13.
    """
    hooks = (*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values())
    if any(getattr(hook, "observes_steps", True) for hook in hooks):
        return True
    replaced = vars(optimizer).get("step")
    if replaced is None:
        return False
    only_scheduled = getattr(replaced, "_wrapped_by_lr_sched", False) and getattr(replaced, "__wrapped__", None) is type(optimizer).step
    return not only_scheduled


@contextmanager
def without_step_hooks(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """A block in which a step of an optimizer is nobody's business: no hook is called, neither its own nor those of all optimizers.

    Private: `Optimizer._optimizer_step_pre_hooks` and `_optimizer_step_post_hooks`, and those of the module for all optimizers. Seen on
    torch 2.9 to 2.13.
    """
    tables: list[Any] = [
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
    ]
    kept = [dict(table) for table in tables]
    try:
        for table in tables:
            table.clear()
        yield
    finally:
        for table, hooks in zip(tables, kept, strict=True):
            table.update(hooks)


def torch_device_type(scaler: torch.amp.GradScaler) -> str:
    """The device type that one of torch's own scalers was made for.

    Private: `GradScaler._device`, which has no public reader. Seen on torch 2.9 to 2.13.
    """
    return scaler._device


def torch_scale(scaler: torch.amp.GradScaler) -> torch.Tensor | None:
    """The tensor on its device in which one of torch's own scalers holds its scale; `None` until something was scaled.

    Private: `GradScaler._scale`, because `get_scale()` waits for the device. Seen on torch 2.9 to 2.13.
    """
    return scaler._scale


def record_found_inf(scaler: torch.amp.GradScaler, owner: object, found_inf: torch.Tensor) -> None:
    """Tells one of torch's own scalers what was found in the gradients of an optimizer, for its next `update`.

    Private: `GradScaler._per_optimizer_states`, because a scaler takes verdicts only from gradients that it unscaled itself. Seen on torch
    2.9 to 2.13.

    Args:
        scaler: It has scaled something.
        owner: Whatever stands for the optimizer; several verdicts of one owner count as the worst of them.
        found_inf: 0-dimensional float32: 1 if a gradient was not finite, 0 otherwise.
    """
    founds = scaler._per_optimizer_states[id(owner)]["found_inf_per_device"]
    earlier = founds.get(found_inf.device)
    founds[found_inf.device] = found_inf.clone() if earlier is None else torch.maximum(earlier, found_inf)


def has_found_infs(scaler: torch.amp.GradScaler) -> bool:
    """Whether one of torch's own scalers has a verdict to update by; without any its `update` raises.

    Private: `GradScaler._per_optimizer_states`, as above.
    """
    return any(state["found_inf_per_device"] for state in scaler._per_optimizer_states.values())


def found_infs(scaler: torch.amp.GradScaler) -> list[torch.Tensor]:
    """What one of torch's own scalers has found in the gradients since its last `update`, on their devices: 1 where one is not finite.

    Private: `GradScaler._per_optimizer_states`, as above.
    """
    return [found for state in scaler._per_optimizer_states.values() for found in state["found_inf_per_device"].values()]


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


def foreach_norms(tensors: list[torch.Tensor], *, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """The L2 norm of each tensor, as 0-d tensors, in one pass where the device has one; with a `dtype`, computed in it.

    Private: `torch._foreach_norm`, because the public `torch.nn.utils.get_total_norm` first sorts the tensors by device and type, which
    takes as long as the norms of a small model, and combines the norms in the tensors' own type. Seen on torch 2.9 to 2.13.
    """
    return [*torch._foreach_norm(tensors, 2.0, dtype=dtype)]


def foreach_magnitudes(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The largest magnitude in each tensor, as 0-d tensors, NaN where one is; in one pass where the device has one.

    Private: `torch._foreach_norm`, as in `foreach_norms`. Seen on torch 2.9 to 2.13.
    """
    return [*torch._foreach_norm(tensors, float("inf"))]


def foreach_multiply_(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiplies each tensor by a 0-d one, in place, in one pass where the device has one.

    Private: `torch._foreach_mul_`, for the same reason as in `foreach_norms`. Seen on torch 2.9 to 2.13.
    """
    torch._foreach_mul_(tensors, factor)


def finish_sharded_backward(module: Any) -> bool:
    """Does what ends a backward pass of an outermost `fully_shard` module: reduces the gradients that wait, and waits for the results.

    Other `fully_shard` modules, and those that never ran, are left alone. Returns whether this torch has the means.

    Private: `FSDPModule._get_fsdp_state`, and of that state `_is_root`, `_state_ctx.is_last_backward` and
    `_root_post_backward_final_callback`, which autograd calls after each backward pass. It reduces every group of parameters whose own
    hook did not run in that pass, and outside of one that is every group. torch has no public way to reduce gradients that
    `set_requires_gradient_sync(False)` held back, but another backward pass. Seen on torch 2.13.
    """
    try:
        state = module._get_fsdp_state()
        root, context, finish = state._is_root, state._state_ctx, state._root_post_backward_final_callback
        last = context.is_last_backward
    except AttributeError:
        return False
    if root:
        context.is_last_backward = True
        try:
            finish()
        finally:
            context.is_last_backward = last
    return True


def reset_sharded(module: Any) -> None:
    """Has a `fully_shard` module forget gradients that it holds back and a pass that broke off in the middle.

    Private: `FSDPModule._get_fsdp_state`, of that state `_is_root` and `_fsdp_param_groups` (one `_fsdp_param_group` before torch
    2.13), and of their parameters the two places where gradients accumulate, `unsharded_accumulated_grad` and `_unsharded_param.grad`,
    which the public `reset_iter_state` (new in torch 2.13) leaves. Seen on torch 2.13.
    """
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    for group in groups:
        for parameter in getattr(group, "fsdp_params", ()):
            parameter.unsharded_accumulated_grad = None
            gathered = getattr(parameter, "_unsharded_param", None)
            if gathered is not None:
                gathered.grad = None
    if getattr(state, "_is_root", False) and hasattr(module, "reset_iter_state"):
        module.reset_iter_state()


def reset_data_parallel(module: Any) -> None:
    """Has a `DistributedDataParallel` module forget a backward pass that broke off; it would refuse the next forward pass otherwise.

    Private: `DistributedDataParallel.reducer` and its `_reset_state`. Seen on torch 2.13; without them nothing happens.
    """
    reset = getattr(getattr(module, "reducer", None), "_reset_state", None)
    if reset is not None:
        reset()


def is_joining(module: Any) -> bool:
    """Whether a `DistributedDataParallel` module runs inside of its `join()`.

    Private: `DistributedDataParallel._join_config`, which has no public reader. Seen on torch 2.9 to 2.13.
    """
    return bool(getattr(getattr(module, "_join_config", None), "enable", False))
