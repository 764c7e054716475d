"""Runs code on fake tensors of CUDA, where there is no GPU, and prints which operations were called with which dtypes.

A process of its own, since it lends CUDA the device guard of meta tensors: a torch without CUDA has none, and asks for it whenever a graph
of autograd is made. It computes nothing, and backward passes are not possible.
"""

from __future__ import annotations

import ctypes
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep._torch import Overload
from halfstep.numerics import list_treatments
from tests.numerics.cast_cases import CASES
from tests.numerics.overload_cases import SKIPPED, arguments, mixes

__all__ = ["HALVES", "Call", "Recording", "overload_names", "run_overload"]

HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}

# An operation, and the floating dtypes that it was given and has returned.
Call: TypeAlias = tuple[str, list[str], list[str]]


class Recording(TorchDispatchMode):
    """Notes each operation below autograd."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append((str(func), dtypes([*args, *(kwargs or {}).values()]), dtypes(result)))
        return result


def dtypes(value: Any) -> list[str]:
    """The floating dtypes of the tensors in a nest, in order."""
    if isinstance(value, Tensor):
        return [str(value.dtype).removeprefix("torch.")] if value.is_floating_point() else []
    return [each for part in value for each in dtypes(part)] if isinstance(value, list | tuple) else []


def overload_names() -> list[str]:
    """The overloads that CUDA's autocast has a say in, without those that cannot be called here."""
    return [name for name in list_treatments("cuda") if name not in SKIPPED]


def run_overload(
    name: str, half: torch.dtype, *, opened: Callable[[], AbstractContextManager[Any]], place: Callable[[Any], Any]
) -> dict[str, list[Call]]:
    """What an overload comes down to, for each mix of dtypes.

    Args:
        name: The overload.
        half: The dtype of the region.
        opened: Opens the region.
        place: Brings an argument to the device.

    Returns:
        Calls for each mix.
    """
    found: dict[str, list[Call]] = {}
    for mix, (args, kwargs) in mixes(*arguments(name), half).items():
        with opened():
            on_device = [place(each) for each in args], {key: place(each) for key, each in kwargs.items()}
            with Recording() as recording:
                Overload.named(f"aten::{name}").call(*on_device[0], **on_device[1])
        found[mix] = recording.calls
    return found


def lend_device_guard() -> None:
    """Gives CUDA the device guard of meta tensors, unless it has one. The places are those of `c10/core/DeviceType.h`."""
    cuda, meta = 1, 14
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libc10.so"))
    guards = (ctypes.c_void_p * (meta + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    guards[cuda] = guards[cuda] or guards[meta]


def placed(value: Any) -> Any:
    """A module or tensor as a fake one of CUDA, with nothing in it."""
    if isinstance(value, nn.Module):
        for module in value.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(empty_like(parameter), requires_grad=parameter.requires_grad))
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, placed(buffer))
        return value
    if isinstance(value, list):
        return [placed(each) for each in value]
    if not isinstance(value, Tensor):
        return value
    return empty_like(value).requires_grad_(value.requires_grad)


def empty_like(value: Tensor) -> Tensor:
    """A tensor of CUDA, where fake tensors are made."""
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="cuda")


@contextmanager
def region(dtype: torch.dtype, *, enabled: bool = True, cache_enabled: bool = True) -> Iterator[None]:
    """What `torch.autocast("cuda", dtype=...)` does, which switches itself off where there is no GPU."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"), torch.is_autocast_cache_enabled()
    torch.set_autocast_enabled("cuda", enabled)
    torch.set_autocast_dtype("cuda", dtype)
    torch.set_autocast_cache_enabled(cache_enabled)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])
        torch.set_autocast_cache_enabled(before[2])


def fake_region(dtype: torch.dtype) -> Callable[[], AbstractContextManager[Any]]:
    """Opens a region in which tensors are fake."""

    @contextmanager
    def opened() -> Iterator[None]:
        with FakeTensorMode(), region(dtype):
            yield

    return opened


def run_case(name: str, dtype: torch.dtype) -> list[Call]:
    """The operations of a piece of code, on CUDA."""
    make, run = CASES[name]
    inputs = make()
    with FakeTensorMode():
        on_device = [placed(each) for each in inputs]
        recording = Recording()
        with recording:
            run(lambda **options: region(dtype, **options), *on_device)
    return recording.calls


def banned() -> str:
    """What CUDA's autocast says to binary cross entropy."""
    with FakeTensorMode(), region(torch.float16):
        x = torch.empty(2, device="cuda")
        try:
            nn.functional.binary_cross_entropy(x, x)
        except RuntimeError as error:
            return str(error)
    return ""


def main() -> None:
    """Prints all as JSON."""
    warnings.simplefilter("ignore")  # Fake tensors of CUDA without CUDA, and aliases that are going away.
    lend_device_guard()
    found: dict[str, Any] = {"banned": banned(), "cases": {}, "overloads": {}}
    for half, dtype in HALVES.items():
        found["cases"][half] = {name: run_case(name, dtype) for name in CASES}
        found["overloads"][half] = {name: run_overload(name, dtype, opened=fake_region(dtype), place=placed) for name in overload_names()}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
