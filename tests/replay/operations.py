"""Operations, runs and pairs that are made by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from halfstep.numerics import OperationDetail
from halfstep.policy import Policy
from halfstep.records import OpRecord, Site
from halfstep.replay.runs import Run

__all__ = ["detail", "operation", "run_of"]


def operation(
    op: str = "aten.mul.Tensor",
    *,
    module: str = "net",
    file: str = "train.py",
    line: int = 3,
    phase: Literal["forward", "backward"] = "forward",
    dtype: str = "float16",
    elements: int = 8,
    absmax: float | None = 1.0,
    nonfinite: int = 0,
    nans: int = 0,
    exact: float | None = None,
    given: Literal["finite", "inf", "nan"] = "finite",
    node: str = "",
) -> OpRecord:
    """An operation that returns one tensor."""
    return OpRecord(
        op=op,
        phase=phase,
        site=Site(module=module, file=file, line=line),
        input_dtypes=(dtype,),
        output_dtypes=(dtype,) if dtype else (),
        elements=elements,
        absmax=absmax,
        nonfinite=nonfinite,
        nans=nans,
        flushed=0,
        exact_absmax=exact,
        has_nonfinite_input=given != "finite",
        has_nan_input=given == "nan",
        node=node,
        seconds=None,
    )


def detail(*sources: int, sample: Sequence[float] | None = (1.0,), numbers: tuple[float, ...] = ()) -> OperationDetail:
    """What is known of an operation: where its arguments come from, and what values it makes."""
    return OperationDetail(sources=sources, sample=None if sample is None else torch.tensor(sample), numbers=numbers)


def run_of(
    *ops: tuple[OpRecord, OperationDetail],
    loss: float = 1.0,
    scale: float = 1.0,
    gradients: Mapping[str, Tensor] | None = None,
    policy: str = "fp16",
) -> Run:
    """A run of some operations."""
    return Run(
        policy=Policy.parse(policy),
        scale=scale,
        loss=loss,
        gradients=gradients or {},
        buffers={},
        ops=tuple(op for op, _ in ops),
        details=tuple(each for _, each in ops),
    )
