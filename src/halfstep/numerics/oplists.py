"""What autocast does to each operation, on each device type, read from the installed torch.

The lists of CUDA, XPU, MTIA and MAIA stand in a header that comes with torch. Those of the CPU stand nowhere that can be read, so each of
its kernels is asked: it is handed small tensors, and what it does first with them tells.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Final

import torch

from halfstep._torch import all_overloads, aten_operations, probe_autocast_kernel
from halfstep.errors import ConfigurationError, HalfstepError, did_you_mean
from halfstep.numerics.kernels import torch_kernel
from halfstep.records import TRACE_SCHEMA, OperationLists, OperationTreatment, Treatment

__all__ = ["TARGETS", "check_target", "dtype_setters", "find_treatments", "list_treatments", "lowered_ops", "treatment_of"]

# The device types whose lists are known, the one that most people want first.
TARGETS: Final = ("cuda", "cpu", "xpu", "mtia", "maia")

_HEADER: Final = "include/ATen/autocast_mode.h"
_LOWER: Final = "AT_FORALL_LOWER_PRECISION_FP"
_SETS_DTYPE: Final = "AT_FORALL_FP32_SET_OPT_DTYPE"
_MACROS: Final[Mapping[str, Treatment]] = MappingProxyType(
    {
        _LOWER: "lower",
        "AT_FORALL_FP32": "fp32",
        _SETS_DTYPE: "fp32",
        "AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE": "fp32",
        "AT_FORALL_PROMOTE": "promote",
    }
)

# What autocast also lowers and the header does not list: CPU autocast keeps a list of its own, in ATen/autocast_mode.cpp, and CUDA autocast
# adds cuDNN's operations there and in ATen/cudnn/AutocastRNN.cpp.
_CPU_ONLY: Final = frozenset({"_addmm_activation", "_native_multi_head_attention", "mkldnn_rnn_layer"})
_CUDA_ONLY: Final = frozenset({"_cudnn_rnn", "cudnn_convolution", "cudnn_convolution_transpose"})

# What all but the CPU refuse, since its backward pass overflows in half precision. The header has no macro for it either.
_BANNED: Final = "binary_cross_entropy"


@cache
def lowered_ops() -> frozenset[str]:
    """The names of the aten operations that autocast runs in lower precision, without namespace and overload.

    Returns:
        Such as `{"linear", "matmul", "conv2d", ...}`, from the macro `AT_FORALL_LOWER_PRECISION_FP` of torch's own header.

    Raises:
        HalfstepError: This torch has no such header, or it no longer has the macro.

    Example:
        >>> "linear" in lowered_ops(), "softmax" in lowered_ops()
        (True, False)
    """
    names = frozenset(name.partition(".")[0] for name in _macro(_LOWER))
    return names | _CPU_ONLY | _CUDA_ONLY


@cache
def list_treatments(target: str = "cuda") -> Mapping[str, Treatment]:
    """What autocast does to each overload that it has a say in, on one device type.

    Args:
        target: `cuda`, `cpu`, `xpu`, `mtia` or `maia`.

    Returns:
        For names such as `softmax.int`, sorted: `lower` (runs in the dtype of the region), `fp32`, `promote` (runs in the widest dtype
        among its arguments) or `banned` (raises). All other operations run as they are.

    Raises:
        ConfigurationError: The target is none of these.
        HalfstepError: This torch has no header, or the header does not list what it should.

    Example:
        >>> list_treatments("cuda")["softmax.int"], list_treatments("cuda")["binary_cross_entropy"]
        ('fp32', 'banned')
    """
    check_target(target)
    found = _probed() if target == "cpu" else _listed(target)
    return MappingProxyType(dict(sorted(found.items())))


def treatment_of(operation: str, *, target: str = "cuda") -> Treatment:
    """What autocast does to one overload on one device type.

    Args:
        operation: Such as `softmax.int`; `aten::softmax.int` and `aten.softmax.int` are the same.
        target: One of `TARGETS`.

    Raises:
        ConfigurationError: There is no such operation, or no such target.

    Example:
        >>> treatment_of("aten.softmax.int"), treatment_of("softmax.int", target="cpu"), treatment_of("relu")
        ('fp32', 'as_is', 'as_is')
    """
    name = operation.removeprefix("aten::").removeprefix("aten.").removesuffix(".default")
    packet = name.partition(".")[0]
    if packet not in aten_operations():
        hint = did_you_mean(packet, known=aten_operations())
        raise ConfigurationError(f"torch {torch.__version__} has no operation aten::{packet}.{hint}")
    return list_treatments(target).get(name, "as_is")


def find_treatments(pattern: str = "", *, target: str = "cuda", against: str | None = None) -> OperationLists:
    """The operations whose names have a pattern in them, and what autocast does to each.

    Args:
        pattern: A part of a name, or a whole one with `*` and `?`; empty for all that autocast has a say in.
        target: One of `TARGETS`.
        against: Another one: only what the two treat otherwise is found.

    Raises:
        ConfigurationError: A target is not allowed, or no operation of torch has such a name.

    Example:
        >>> [(each.name, each.treatment) for each in find_treatments("*layer_norm").operations]
        [('layer_norm', 'fp32'), ('native_layer_norm', 'fp32')]
    """
    here, other = list_treatments(target), None if against is None else list_treatments(against)
    known = {*here, *(other or {})}
    wanted = pattern.lower().removeprefix("aten::").removeprefix("aten.").removesuffix(".default")
    glob = wanted if any(sign in wanted for sign in "*?[") else f"*{wanted}*"
    names = {name for name in known if fnmatchcase(name.lower(), glob)}
    # What autocast has no say in runs as it is, and can be asked for, too: by its own name, or where nothing else matches.
    packet = wanted if wanted in aten_operations() else glob if wanted and not names else ""
    names |= {
        each.short
        for each in all_overloads()
        if fnmatchcase(each.short.partition(".")[0].lower(), packet) and not each.short.endswith((".out", "_out"))
    }
    if wanted and not names:
        hint = did_you_mean(wanted, known=aten_operations())
        raise ConfigurationError(f"No operation of torch {torch.__version__} matches {pattern!r}.{hint}")
    operations = (
        OperationTreatment(name=name, treatment=here.get(name, "as_is"), other=None if other is None else other.get(name, "as_is"))
        for name in sorted(names)
    )
    return OperationLists(
        schema=TRACE_SCHEMA,
        torch=torch.__version__,
        target=target,
        against=against or "",
        pattern=pattern,
        operations=tuple(each for each in operations if each.other != each.treatment),
    )


@cache
def dtype_setters() -> frozenset[str]:
    """The overloads that autocast, instead of casting what they are given, tells to compute in fp32, if nobody has named another dtype.

    Example:
        >>> "softmax.int" in dtype_setters(), "layer_norm" in dtype_setters()
        (True, False)
    """
    return frozenset(_macro(_SETS_DTYPE))


def check_target(target: str) -> None:
    """Refuses what is no device type with known lists.

    Raises:
        ConfigurationError: It is none.

    Example:
        >>> check_target("cdua")
        Traceback (most recent call last):
        ...
        halfstep.errors.ConfigurationError: The lists of autocast are known for cuda, cpu, xpu, mtia and maia, not for 'cdua'. Did ...
    """
    if target not in TARGETS:
        known = f"{', '.join(TARGETS[:-1])} and {TARGETS[-1]}"
        raise ConfigurationError(
            f"The lists of autocast are known for {known}, not for {target!r}.{did_you_mean(str(target), known=TARGETS)}"
        )


def _listed(target: str) -> dict[str, Treatment]:
    found: dict[str, Treatment] = {name: treatment for macro, treatment in _MACROS.items() for name in _macro(macro)}
    extra = _CUDA_ONLY if target == "cuda" else frozenset[str]()
    return {**found, **dict.fromkeys(extra, "lower"), _BANNED: "banned"}


def _probed() -> dict[str, Treatment]:
    kernels = ((overload, torch_kernel(overload, device_type="cpu")) for overload in all_overloads())
    return {overload.short: probe_autocast_kernel(overload, kernel) for overload, kernel in kernels if kernel is not None}


def _macro(name: str) -> tuple[str, ...]:
    header = Path(torch.__file__).parent / _HEADER
    try:
        text = header.read_text(encoding="utf-8")
    except OSError as error:
        raise HalfstepError(f"torch {torch.__version__} comes without {_HEADER}, which lists the operations of autocast.") from error
    macro = re.search(rf"#define {name}\(_\)(.*?)\n\s*\n", text, flags=re.DOTALL)
    if macro is None:
        raise HalfstepError(f"{header} of torch {torch.__version__} has no macro {name}, which lists the operations of autocast.")
    # Either `_(name)` and `_(name, overload)`, or a signature in which the name stands in quotes.
    plain = [".".join(part.strip() for part in entry.split(",")) for entry in re.findall(r"_\(([\w\s,]+)\)", macro.group(1))]
    names = plain or re.findall(r'"(\w+(?:\.\w+)?)"', macro.group(1))
    if not names:
        raise HalfstepError(f"The macro {name} in {header} of torch {torch.__version__} lists nothing that halfstep can read.")
    return tuple(names)
