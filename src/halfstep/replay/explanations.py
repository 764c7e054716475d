"""Why a step went wrong, in words."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from halfstep.records import UNKNOWN, Deviation, NonFiniteTensor, OpRecord, StuckTensor, VanishedGradients
from halfstep.records.formats import FORMATS
from halfstep.replay.alignment import Pair
from halfstep.replay.runs import Run
from halfstep.replay.wording import HALF_LARGEST, amount, operation_name

__all__ = [
    "explain_backward",
    "explain_broken_update",
    "explain_data",
    "explain_forward",
    "explain_model",
    "explain_parameters",
    "explain_precision",
    "explain_scale",
    "explain_underflow",
    "explain_update",
    "explain_witnessed",
]


def explain_forward(pair: Pair, index: int) -> str:
    """Why an operation of the forward pass breaks in low precision."""
    return f"{_how(pair, index)} In fp32 the same operation is finite. {_aftermath(pair.low, index)}".strip()


def explain_backward(pair: Pair, index: int, *, floor: float) -> str:
    """Why gradients overflow at every loss scale."""
    return (
        f"{_how(pair, index)} That is with a loss scale of {amount(floor)}, the lowest that training comes down to. In fp32 it is finite, "
        "so the operation needs fp32."
    )


def explain_scale(low: Run, origin: OpRecord | None, *, scale: float, passing: float) -> str:
    """Why a loss scale is too high."""
    where = "" if origin is None else f" {operation_name(origin)} is the first that overflows."
    return (
        f"Multiplied by {amount(scale)}, gradients leave the range of {_format(origin) or 'half precision'}.{where} With a loss scale of "
        f"{amount(passing)} the same step is clean, so nothing is wrong with the model. In the first steps of a training this is normal."
    )


def explain_witnessed(origin: OpRecord) -> str:
    """What one trace says of a step that cannot be replayed."""
    return f"{_makes(origin)} The step was traced as it ran, and not replayed, so that whether it breaks in fp32 as well is not known."


def explain_data(tensors: Sequence[NonFiniteTensor], entry: OpRecord) -> str:
    """What is wrong with a batch."""
    line = f" ({entry.site.file}:{entry.site.line})" if UNKNOWN not in (entry.site.file, entry.site.module) else ""
    where = f"{operation_name(entry)}{line} is the first operation that takes"
    if not tensors:
        return f"{where} values that are not finite, which no operation and no parameter has made: they are a part of the batch."
    named = ", ".join(f"{each.name} ({each.nonfinite} of {each.elements} values)" for each in tensors[:5])
    return f"Not finite in the batch: {named}. {where} them. The step breaks in fp32 as well, and is clean with zeros in their place."


def explain_parameters(tensors: Sequence[NonFiniteTensor], *, is_tried: bool = True) -> str:
    """What is wrong with parameters and buffers.

    Args:
        tensors: Those that are not finite.
        is_tried: Whether the step was replayed in fp32.
    """
    named = ", ".join(f"{each.kind} {each.name} ({each.nonfinite} of {each.elements} values)" for each in tensors[:5])
    more = f", and {len(tensors) - 5} more" if len(tensors) > 5 else ""
    since = min((each.since for each in tensors if each.since is not None), default=None)
    told = f" They have been so since the update of step {since}." if since is not None else ""
    return f"Before the step began, these were not finite: {named}{more}.{told}{' The step breaks in fp32 as well.' if is_tried else ''}"


def explain_model(origin: OpRecord | None) -> str:
    """Why it is no matter of precision."""
    where = f" {operation_name(origin)} makes {_kind(origin)} there." if origin is not None else ""
    return f"The same step breaks in fp32, so it is no matter of precision: another precision or loss scale will not help.{where}"


def explain_broken_update(tensors: Sequence[NonFiniteTensor], *, step: int) -> str:
    """Why an update made parameters that are stored in half precision non-finite."""
    named = ", ".join(f"{each.name} ({each.nonfinite} of {each.elements} values)" for each in tensors[:5])
    return (
        f"The gradients of step {step} were finite, and the optimizer's update made these parameters infinite or NaN: {named}. They are "
        "stored in half precision, and so is what the optimizer computes with: an epsilon of 1e-8 is zero in fp16, and so is the square "
        "of a small gradient, which leaves a quotient of zeros."
    )


def explain_precision(pair: Pair, index: int, deviation: Deviation) -> str:
    """Which operation loses the accuracy."""
    op = pair.low.ops[index]
    return (
        f"{operation_name(op)} differs by {_percent(deviation.error)} from the same in fp32, while what it is computed from differs by "
        f"{_percent(deviation.input_error)} at most: what half precision has rounded before is all that is left there. The loss differs by "
        f"{_percent(deviation.loss_error)}, the gradients by {_percent(deviation.gradient_error)}."
    )


def explain_underflow(vanished: Sequence[VanishedGradients], *, scale: float) -> str:
    """How much of the gradients is lost."""
    zeros, elements = sum(each.zeros for each in vanished), sum(each.elements for each in vanished)
    scaled = "without a loss scale" if scale == 1 else f"at a loss scale of {amount(scale)}"
    return (
        f"In {len(vanished)} module{'' if len(vanished) == 1 else 's'} gradients become zero {scaled}: {_percent(zeros / elements)} of "
        "those that matter in fp32. These parameters hardly learn, and nothing says so."
    )


def explain_update(stuck: Sequence[StuckTensor]) -> str:
    """Why updates do not change parameters."""
    lost, elements = sum(each.stuck for each in stuck), sum(each.elements for each in stuck)
    dtype = FORMATS.get(stuck[0].dtype, stuck[0].dtype)
    return (
        f"{len(stuck)} tensor{'' if len(stuck) == 1 else 's'} in {dtype}: {_percent(lost / elements)} of the elements that would change in "
        f"fp32 stay as they are, because the update is smaller than half a unit in the last place of {dtype}. The same is lost in each "
        "step."
    )


def _how(pair: Pair, index: int) -> str:
    op, full = pair.low.ops[index], pair.counterpart(index)
    text = _makes(op)
    dtype = op.output_dtypes[0] if op.output_dtypes else ""
    largest = op.exact_absmax if op.exact_absmax is not None and op.exact_absmax < inf else None
    if largest is None and full is not None and full.absmax is not None and full.absmax < inf:
        largest = full.absmax * (pair.low.scale if op.phase == "backward" else 1.0)
    if dtype in HALF_LARGEST and largest is not None and largest > HALF_LARGEST[dtype]:
        return f"{text} The largest would be {amount(largest)}, and {FORMATS[dtype]} ends at {amount(HALF_LARGEST[dtype])}."
    return text


def _makes(op: OpRecord) -> str:
    given = "infinite values" if op.has_nonfinite_input else "finite values"
    return f"{operation_name(op)} makes {op.nonfinite} of {op.elements} values {_kind(op)} out of {given}."


def _aftermath(run: Run, index: int) -> str:
    if run.is_finite:
        return "Later operations turn that into finite values, which are wrong: neither the loss nor a gradient shows it."
    nan = run.first_nan(index)
    return "" if nan is None else f"The first NaN comes later, in {operation_name(nan)}."


def _kind(op: OpRecord) -> str:
    if not op.nans:
        return "infinite"
    return "NaN" if op.nans == op.nonfinite else "infinite or NaN"


def _format(op: OpRecord | None) -> str:
    return "" if op is None or not op.output_dtypes else FORMATS.get(op.output_dtypes[0], "")


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
