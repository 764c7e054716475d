"""What the device is and which precisions it computes in hardware."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Final

import torch

from halfstep._torch import cpu_features
from halfstep.errors import ConfigurationError
from halfstep.precision import parse_precision
from halfstep.records import Device, Precision

__all__ = [
    "DEVICE_TYPES",
    "check_device",
    "describe_device",
    "native_precisions",
    "parse_device",
    "resolve_precision",
    "synchronize",
]

DEVICE_TYPES: Final = ("cpu", "cuda")


def parse_device(name: str = "auto") -> torch.device:
    """The device that a name stands for.

    Args:
        name: `cpu`, `cuda`, `cuda:N`, or `auto` for CUDA where there is such a device and the CPU elsewhere.

    Raises:
        ConfigurationError: The name is unknown, or this machine has no such device.

    Example:
        >>> parse_device("cpu")
        device(type='cpu')
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ConfigurationError(f"Unknown device {name!r}. Allowed are auto, cpu, cuda and cuda:N.") from error
    check_device(device)
    if device.type == "cpu":
        return torch.device("cpu")  # torch accepts `cpu:3` and means the same.
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        raise ConfigurationError(f"Device {name!r} was asked for, but this torch ({torch.__version__}) sees no CUDA device. Use cpu.")
    if (device.index or 0) >= count:
        listed = "only cuda:0" if count == 1 else f"only cuda:0 to cuda:{count - 1}"
        raise ConfigurationError(f"Device {name!r} was asked for, but this machine has {listed}.")
    return device


def check_device(device: torch.device) -> None:
    """Accepts the device types that halfstep supports.

    Raises:
        ConfigurationError: It is of another type.
    """
    if device.type not in DEVICE_TYPES:
        raise ConfigurationError(f"Device type {device.type!r} is not supported. Allowed are {' and '.join(DEVICE_TYPES)}.")


def native_precisions(device: torch.device) -> tuple[Precision, ...]:
    """The precisions that the device computes in hardware, the fastest for training first; fp32 is always the last.

    CUDA: bf16 and fp16 from compute capability 8.0 (Ampere) on, fp16 alone on 7.x (Volta, Turing). `torch.cuda.is_bf16_supported()` is
    not asked, because it counts emulation. CPU: what the instruction set offers.

    Example:
        >>> native_precisions(torch.device("cpu"))[-1]
        'fp32'
    """
    if device.type == "cuda":
        major, _ = torch.cuda.get_device_capability(device)
        return ("bf16", "fp16", "fp32") if major >= 8 else ("fp16", "fp32") if major == 7 else ("fp32",)
    lower: tuple[Precision, ...] = ("bf16", "fp16")
    found = cpu_features()
    return (*(precision for precision in lower if precision in found), "fp32")


def resolve_precision(name: str, *, device: torch.device) -> Precision:
    """The precision that a name means on a device: `auto` is the fastest that the device computes in hardware, bf16 before fp16.

    Raises:
        InvalidTypeError: The name is no string.
        ConfigurationError: The name is neither `auto` nor a precision.

    Example:
        >>> resolve_precision("fp16", device=torch.device("cpu"))
        'fp16'
    """
    return native_precisions(device)[0] if name == "auto" else parse_precision(name, besides=("auto",))


def describe_device(device: torch.device) -> Device:
    """The record of a device and of the software on it."""
    return Device(
        type=device.type,
        name=torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name(),
        native=native_precisions(device),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        python=platform.python_version(),
    )


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def synchronize(device: torch.device) -> None:
    """Waits until the device has done all that it was given; nothing to wait for on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
