"""The tables of torch's names against the installed torch."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch

from halfstep.lint.signatures import AUTOCASTS, DTYPES, OPTIMIZERS, SCALERS, SCHEDULERS


def _load(name: str) -> object:
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise AssertionError(name)


@pytest.mark.parametrize(("name", "parameters"), [*SCALERS.items(), *AUTOCASTS.items()])
def test_parameters_are_those_of_torch(name: str, parameters: tuple[str, ...]) -> None:
    made = _load(name)
    assert isinstance(made, type)
    assert tuple(inspect.signature(made).parameters) == tuple(parameters)


@pytest.mark.parametrize("name", [name for name in DTYPES if hasattr(torch, name)])
def test_dtypes_are_those_of_torch(name: str) -> None:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    short = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
    assert dtype == short.get(DTYPES[name], getattr(torch, DTYPES[name], None))


def test_every_optimizer_and_schedule_of_torch_is_known() -> None:
    optimizers = {
        name
        for name, made in vars(torch.optim).items()
        if isinstance(made, type) and issubclass(made, torch.optim.Optimizer) and made is not torch.optim.Optimizer
    }
    assert optimizers <= OPTIMIZERS
    schedulers = {
        name for name in vars(torch.optim.lr_scheduler) if name.endswith("LR") and name != "LRScheduler" and not name.startswith("_")
    }
    assert len(schedulers) > 10
    assert schedulers <= SCHEDULERS
