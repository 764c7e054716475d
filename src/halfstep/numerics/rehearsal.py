"""The numerics of another device type, rehearsed on a CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final, final

import torch
from typing_extensions import Self

from halfstep._torch import Overload, WatchingMode, WeightCacheClears, insert_mode, remove_mode
from halfstep.errors import ConfigurationError, StepOrderError
from halfstep.numerics.arithmetic import HalfArithmetic
from halfstep.numerics.deciders import WeightCache, decider_for, fuse_dropout
from halfstep.numerics.kernels import Decider, decide_operation
from halfstep.numerics.oplists import check_target, dtype_setters, list_treatments
from halfstep.numerics.rounding import roundings
from halfstep.records import Treatment

__all__ = ["Rehearsal", "rehearse"]

_FORMATS: Final = (torch.float16, torch.bfloat16)

# What casts all that it is given on a GPU, inside of operations that a CPU build of torch does not have, such as cuDNN's.
_RECURRENT: Final = tuple(f"{kind}.{form}" for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu") for form in ("input", "data"))


def rehearse(target: str = "cuda", dtype: torch.dtype = torch.float16, *, tf32: bool = False) -> Rehearsal:
    """A context in which a CPU computes mixed precision with the numerics of another device type, at 1.3 to 1.7 times the cost of fp32.

    While it is open, `torch.autocast("cpu", ...)` regions cast as autocast casts on the target, with its weight cache; operations that the
    target refuses raise the target's error; and tensors in half precision, fp16 and bf16, are stored in half, while each operation computes
    in fp32 and rounds its result once, which is what a Tensor Core does. Everything is as before when it is closed, after an exception too.
    docs/rehearsal.md says how faithful that is, and what is not modelled.

    The backward pass and the optimizer's step belong into the context as well. Functions that were compiled by `torch.compile` run eagerly
    in it. What is computed on other devices, and in other threads, is left alone.

    Args:
        target: The device type whose numerics are wanted: `cuda`, `xpu`, `mtia`, `maia`, or `cpu` for the CPU's own lists of operations
            without its slow kernels.
        dtype: The dtype of regions that name none: `torch.float16` or `torch.bfloat16`. A region that names one has that.
        tf32: Whether fp32 matrices are rounded to TF32 (10 bits of mantissa) before they are multiplied or convolved, as on a GPU after
            `torch.backends.cuda.matmul.allow_tf32 = True`.

    Returns:
        A context manager that is used once.

    Raises:
        ConfigurationError: The target or dtype is not allowed.
        StepOrderError: Another rehearsal is open in this process (raised on entering).

    Example:
        >>> scores = torch.tensor([[6.0, 300.0]], dtype=torch.float16)
        >>> with torch.autocast("cpu", dtype=torch.float16):
        ...     scores.softmax(-1).dtype  # CPU autocast leaves it in half,
        torch.float16
        >>> with rehearse("cuda"), torch.autocast("cpu", dtype=torch.float16):
        ...     scores.softmax(-1).dtype  # and CUDA's runs it in fp32.
        torch.float32
    """
    check_target(target)
    if dtype not in _FORMATS:
        raise ConfigurationError(f"rehearse(dtype={dtype!r}): it takes torch.float16 or torch.bfloat16. For fp32, open no region.")
    if not isinstance(tf32, bool):
        raise ConfigurationError(f"rehearse(tf32={tf32!r}) takes True or False.")
    return Rehearsal(target=target, dtype=dtype, tf32=tf32)


# Only one can be open: what autocast does to an operation is decided for the whole process.
_open: Final = threading.Lock()


@final
class Rehearsal:
    """What `rehearse` returns.

    Attributes:
        target: The device type whose numerics are rehearsed.
        dtype: The dtype of regions that name none.
        tf32: Whether fp32 matrices are rounded to TF32.
    """

    def __init__(self, *, target: str, dtype: torch.dtype, tf32: bool) -> None:
        self.target = target
        self.dtype = dtype
        self.tf32 = tf32
        self._end: ExitStack | None = None
        self._was_used = False

    def __enter__(self) -> Self:
        if self._was_used:
            raise StepOrderError("A rehearsal is used once. Call halfstep.rehearse() again for the next one.")
        if not _open.acquire(blocking=False):
            raise StepOrderError(
                "Another rehearsal is open in this process. Close it first: what autocast does is decided for the whole process, so there "
                "can be one at a time, in one thread."
            )
        self._was_used = True
        with ExitStack() as stack:
            stack.callback(_open.release)
            self._begin(stack)
            self._end = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._end is not None
        self._end.close()

    def _begin(self, stack: ExitStack) -> None:
        stack.callback(torch.set_autocast_dtype, "cpu", torch.get_autocast_dtype("cpu"))
        torch.set_autocast_dtype("cpu", self.dtype)
        if self.target != "cpu":
            self._register(stack)
        # Casts that were made before belong to other numerics, and those that are made now must not be met afterwards.
        torch.clear_autocast_cache()
        stack.callback(torch.clear_autocast_cache)
        mode = HalfArithmetic(target=self.target, tf32=self.tf32)
        insert_mode(mode, below=WatchingMode)
        stack.callback(remove_mode, mode)
        roundings.target = self.target
        stack.callback(setattr, roundings, "target", "")

    def _register(self, stack: ExitStack) -> None:
        weights = WeightCache()
        stack.callback(WeightCacheClears(weights.clear).close)
        thread = threading.get_ident()
        for name, treatment in _differences(self.target).items():
            overload = Overload.named(f"aten::{name}")
            decider = decider_for(overload, treatment, weights=weights)
            stack.callback(decide_operation(overload, _in_thread(thread, decider), device_type="cpu", last=True))
        dropout = Overload.named("aten::dropout")
        stack.callback(decide_operation(dropout, _in_thread(thread, fuse_dropout), device_type="cpu", last=True))


def _differences(target: str) -> dict[str, Treatment]:
    """What has to be decided, since the CPU's own autocast does something else or does it in another way."""
    here, there = list_treatments("cpu"), list_treatments(target)
    wanted: dict[str, Treatment] = {name: there.get(name, "as_is") for name in (*here, *there)}
    # Casts of weights are cached in one place, so all that is lowered is decided here. The rest is left to torch where it agrees.
    decided = {
        name: treatment
        for name, treatment in wanted.items()
        if treatment == "lower" or name in dtype_setters() or here.get(name) != treatment
    }
    return {**decided, **dict.fromkeys(_RECURRENT, "lower")}


def _in_thread(thread: int, decider: Decider) -> Decider:
    """A decider that has its say in one thread alone."""

    def decide(pass_on: Callable[..., Any], keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if threading.get_ident() != thread:
            return pass_on(keyset, *args, **kwargs)
        return decider(pass_on, keyset, args, kwargs)

    return decide
