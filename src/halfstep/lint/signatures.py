"""The names of torch that the rules know, and the order of their parameters.

They are written down here, because a linter must not pay for `import torch`; a test compares them with the installed one.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence

__all__ = ["AUTOCASTS", "DTYPES", "OPTIMIZERS", "SCALERS", "SCHEDULERS", "arguments_of"]

_SCALER = ("init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled")
_SHARDED = ("device", "init_scale", "backoff_factor", "growth_factor", "growth_interval", "enabled", "process_group")
_AUTOCAST = ("device_type", "dtype", "enabled", "cache_enabled")
_OLD_AUTOCAST = ("enabled", "dtype", "cache_enabled")

# Full name -> its parameters in order. Every way to reach a class is listed, since people use them all.
SCALERS: Mapping[str, Sequence[str]] = {
    "torch.amp.GradScaler": ("device", *_SCALER),
    "torch.amp.grad_scaler.GradScaler": ("device", *_SCALER),
    "torch.GradScaler": ("device", *_SCALER),
    "torch.cuda.amp.GradScaler": _SCALER,
    "torch.cuda.amp.grad_scaler.GradScaler": _SCALER,
    "torch.cpu.amp.GradScaler": _SCALER,
    "torch.cpu.amp.grad_scaler.GradScaler": _SCALER,
    "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler": _SHARDED,
}

AUTOCASTS: Mapping[str, Sequence[str]] = {
    "torch.autocast": _AUTOCAST,
    "torch.amp.autocast": _AUTOCAST,
    "torch.amp.autocast_mode.autocast": _AUTOCAST,
    "torch.cuda.amp.autocast": _OLD_AUTOCAST,
    "torch.cuda.amp.autocast_mode.autocast": _OLD_AUTOCAST,
    "torch.cpu.amp.autocast": _OLD_AUTOCAST,
    "torch.cpu.amp.autocast_mode.autocast": _OLD_AUTOCAST,
}

# torch's names of data types, and halfstep's.
DTYPES: Mapping[str, str] = {
    "float16": "fp16",
    "half": "fp16",
    "fp16": "fp16",
    "bfloat16": "bf16",
    "bf16": "bf16",
    "float32": "fp32",
    "float": "fp32",
    "fp32": "fp32",
    "float64": "float64",
    "double": "float64",
    "int64": "int64",
    "long": "int64",
    "int32": "int32",
    "int": "int32",
    "uint8": "uint8",
    "bool": "bool",
}

# Classes of optimizers by their last name, wherever they come from.
OPTIMIZERS = frozenset(
    [
        "ASGD",
        "Adadelta",
        "Adafactor",
        "Adagrad",
        "Adam",
        "Adamax",
        "AdamW",
        "Adan",
        "FusedAdam",
        "FusedLAMB",
        "FusedSGD",
        "Lamb",
        "LBFGS",
        "Lion",
        "Muon",
        "NAdam",
        "Novograd",
        "NovoGrad",
        "RAdam",
        "Ranger",
        "RMSprop",
        "Rprop",
        "SGD",
        "SparseAdam",
        "Adam8bit",
        "AdamW8bit",
        "PagedAdamW8bit",
        "ZeroRedundancyOptimizer",
    ]
)

# Schedules by their last name; classes of torch.optim.lr_scheduler are known by their module.
SCHEDULERS = frozenset(
    [
        "get_cosine_schedule_with_warmup",
        "get_linear_schedule_with_warmup",
        "get_constant_schedule_with_warmup",
        "get_constant_schedule",
        "get_polynomial_decay_schedule_with_warmup",
        "get_cosine_with_hard_restarts_schedule_with_warmup",
        "get_scheduler",
        "OneCycleLR",
        "CosineAnnealingLR",
        "CosineAnnealingWarmRestarts",
        "LinearLR",
        "LambdaLR",
        "StepLR",
        "MultiStepLR",
        "ExponentialLR",
        "CyclicLR",
        "PolynomialLR",
        "ConstantLR",
        "SequentialLR",
        "ChainedScheduler",
        "MultiplicativeLR",
        "ReduceLROnPlateau",
    ]
)


def arguments_of(call: ast.Call, parameters: Sequence[str]) -> dict[str, ast.expr]:
    """What a call passes, by the names of the parameters. What stands behind a `*unpacked` argument is left out.

    Args:
        call: The call.
        parameters: The names of the positional parameters in order; further positional arguments go by their number.

    Example:
        >>> call = ast.parse("GradScaler('cuda', enabled=use_amp)", mode="eval").body
        >>> sorted(arguments_of(call, SCALERS["torch.amp.GradScaler"]))
        ['device', 'enabled']
    """
    found: dict[str, ast.expr] = {}
    for index, argument in enumerate(call.args):
        if isinstance(argument, ast.Starred):
            break
        found[parameters[index] if index < len(parameters) else str(index)] = argument
    found.update({keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None})
    return found
