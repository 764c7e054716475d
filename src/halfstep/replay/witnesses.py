"""What a single trace of a step says, where the step cannot be replayed."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from math import isfinite

from torch import nn

from halfstep.errors import HalfstepWarning, StepOrderError
from halfstep.numerics import Trace, trace
from halfstep.policy import Policy
from halfstep.records import UNKNOWN, Cause, Experiment, OpRecord, Remedy
from halfstep.replay.advice import advice_for
from halfstep.replay.alignment import Pair
from halfstep.replay.explanations import explain_data, explain_parameters, explain_witnessed
from halfstep.replay.faults import entering_fault, own_faults
from halfstep.replay.findings import Finding
from halfstep.replay.inputs import nonfinite_tensors
from halfstep.replay.runs import Run
from halfstep.replay.wording import operation_name

__all__ = ["finding_of_trace", "open_trace"]


def open_trace(model: nn.Module) -> Trace | None:
    """A trace that is open from now on, for `finding_of_trace`; `None` where the user traces already: there will be another step."""
    seen = trace(model, samples=1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HalfstepWarning)  # That a compiled model is traced eagerly.
            seen.__enter__()
    except StepOrderError:
        return None
    return seen


def finding_of_trace(
    seen: Trace, *, model: nn.Module, policy: Policy, scale: float, floor: float, loss: float
) -> tuple[Finding, Sequence[Experiment]]:
    """The finding that the trace of one step comes to, and the evidence.

    No replay tells causes apart: what overflows forward may do so in fp32 as well, and what overflows backward is put down to the loss
    scale unless that is at its floor.

    Args:
        seen: The trace, with details.
        model: The model.
        policy: What the step ran in.
        scale: Its loss scale.
        floor: The lowest loss scale.
        loss: Its loss; NaN where it is not known.
    """
    run = Run(policy=policy, scale=scale, loss=loss, gradients={}, buffers={}, ops=seen.ops, details=seen.details)
    index = own_faults(run)
    origin = None if index is None else run.ops[index]
    entry = entering_fault(run, only_gradients=True)
    told = "No: nothing in it is infinite or NaN." if origin is None else f"Yes: {operation_name(origin)} is not finite."
    evidence = Experiment(
        question="Does the next step break, under a trace?",
        precision=str(policy),
        scale=scale,
        is_clean=origin is None and entry is None,
        answer=told,
        origin=origin,
    )
    return _finding(run, index, entry, model=model, floor=floor), (evidence,)


def _finding(run: Run, index: int | None, entry: int | None, *, model: nn.Module, floor: float) -> Finding:
    loss = run.loss
    if entry is not None and (index is None or entry < index):
        named = set(run.details[entry].outside)
        foreign = tuple(each for each in nonfinite_tensors(None, model, since={}) if each.name in named)
        text = "Leave such samples out, or go back to a checkpoint that is finite."
        remedies = (Remedy(text=text, override=None, verified=False),)
        cause: Cause = "parameters" if foreign else "data"
        told = explain_parameters(foreign, is_tried=False) if foreign else explain_data((), run.ops[entry])
        return Finding(cause=cause, loss=loss, explanation=told, tensors=foreign, remedies=remedies)
    if index is None:
        return Finding(cause="healthy", loss=loss, explanation="", is_reproduced=False)
    origin = run.ops[index]
    return Finding(
        cause=_cause(origin, scale=run.scale, floor=floor),
        loss=loss,
        explanation=explain_witnessed(origin),
        origin=origin,
        first_nan=run.first_nan(index),
        remedies=(_fp32(origin), *advice_for(Pair(low=run, full=run), index)),
    )


def _cause(origin: OpRecord, *, scale: float, floor: float) -> Cause:
    if origin.phase == "forward":
        return "forward"
    return "scale" if scale > floor and isfinite(scale) else "backward"


def _fp32(origin: OpRecord) -> Remedy:
    module = "the code around it" if origin.site.module == UNKNOWN else origin.site.module or "the model"
    text = f"Run {module} in fp32, if it is finite there. `halfstep diagnose` tries that, on a task."
    return Remedy(text=text, override=None, verified=False)
