"""The machine: devices, what they compute in hardware, and how much memory and time a step takes on them."""

from halfstep.hardware.device import (
    DEVICE_TYPES,
    check_device,
    describe_device,
    native_precisions,
    parse_device,
    resolve_precision,
    synchronize,
)
from halfstep.hardware.profile import StaticMemory, StepProfile, profile_step, static_memory
from halfstep.hardware.speed import matmul_gain

__all__ = [
    "DEVICE_TYPES",
    "StaticMemory",
    "StepProfile",
    "check_device",
    "describe_device",
    "matmul_gain",
    "native_precisions",
    "parse_device",
    "profile_step",
    "resolve_precision",
    "static_memory",
    "synchronize",
]
