"""Which operations autocast runs in lower precision, read from the installed torch."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Final

import torch

from halfstep.errors import HalfstepError

__all__ = ["lowered_ops"]

_HEADER: Final = "include/ATen/autocast_mode.h"
_MACRO: Final = "AT_FORALL_LOWER_PRECISION_FP"

# What autocast also lowers and the header does not list: CPU autocast keeps a list of its own, in ATen/autocast_mode.cpp, and CUDA autocast
# adds cuDNN's operations there and in ATen/cudnn/AutocastRNN.cpp.
_CPU_ONLY: Final = frozenset({"_addmm_activation", "_native_multi_head_attention", "mkldnn_rnn_layer"})
_CUDA_ONLY: Final = frozenset({"_cudnn_rnn", "cudnn_convolution", "cudnn_convolution_transpose"})


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
    header = Path(torch.__file__).parent / _HEADER
    try:
        text = header.read_text(encoding="utf-8")
    except OSError as error:
        raise HalfstepError(f"torch {torch.__version__} comes without {_HEADER}, which lists the operations of autocast.") from error
    macro = re.search(rf"#define {_MACRO}\(_\)(.*?)\n\s*\n", text, flags=re.DOTALL)
    if macro is None:
        raise HalfstepError(f"{header} of torch {torch.__version__} has no macro {_MACRO}, which lists the operations of autocast.")
    names = frozenset(re.findall(r"_\(\s*(\w+)", macro.group(1)))
    if not names:
        raise HalfstepError(f"The macro {_MACRO} in {header} of torch {torch.__version__} lists nothing that halfstep can read.")
    return names | _CPU_ONLY | _CUDA_ONLY
