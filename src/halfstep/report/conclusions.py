"""What a diagnosis comes to, in one sentence for each cause."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from halfstep.records import Cause, Diagnosis, OpRecord
from halfstep.report.quantities import number_text
from halfstep.report.trace import FORMATS, module_text, origin_text

__all__ = ["conclusion_text", "format_text", "percent_text", "scale_text"]

# Up to here a float holds every whole number.
_LARGEST_WHOLE: Final = 2.0**53


def conclusion_text(diagnosis: Diagnosis) -> str:
    """The one sentence that a diagnosis comes to.

    Args:
        diagnosis: What was found.

    Example:
        >>> print(conclusion_text(Diagnosis(
        ...     schema=1, torch="2.13.0", task="digits", precision="fp16", target="cuda", device="cpu", cause="scale", step=1,
        ...     steps=1, skips=1, loss=2.3, scale=65536.0, passing_scale=1024.0, origin=None, first_nan=None, explanation="", remedies=(),
        ...     evidence=(), replays=3, is_reproduced=True, tensors=(), deviation=None, vanished=(), stuck=(), excerpt=(),
        ...     interrupted=False,
        ... )))
        The loss scale of 65536 is too high for step 1, and nothing else is wrong: with 1024 the step is clean.
    """
    if not diagnosis.is_reproduced:
        return f"Step {diagnosis.step} failed, and did not fail again when it was replayed."
    if diagnosis.interrupted and diagnosis.cause == "healthy":
        return f"Interrupted in step {diagnosis.step}: nothing was found by then."
    return _CONCLUSIONS[diagnosis.cause](diagnosis)


def format_text(dtype: str) -> str:
    """What readers call a dtype.

    Example:
        >>> format_text("float16"), format_text("int64")
        ('fp16', 'int64')
    """
    return FORMATS.get(dtype, dtype)


def percent_text(share: float) -> str:
    """A share in percent, never rounded to all or to nothing where it is neither.

    Example:
        >>> percent_text(0.5), percent_text(0.9999), percent_text(0.0004), percent_text(1.0)
        ('50 %', 'over 99 %', '0.04 %', '100 %')
    """
    percent = 100 * share
    if 99 < percent < 100:
        return "over 99 %"
    return f"{percent:.1g} %" if percent < 1 else f"{percent:.0f} %"


def scale_text(scale: float) -> str:
    """A loss scale, with all its digits where it is a whole number.

    Example:
        >>> scale_text(16777216.0), scale_text(0.5), scale_text(float("inf"))
        ('16777216', '0.5', 'inf')
    """
    return f"{scale:.0f}" if scale.is_integer() and abs(scale) <= _LARGEST_WHOLE else f"{scale:g}"


def _in_precision(diagnosis: Diagnosis) -> str:
    return "under the policy" if ";" in diagnosis.precision else f"in {diagnosis.precision}"


def _made(origin: OpRecord | None) -> str:
    """What an operation made, after a colon; nothing where none is known."""
    return f": {origin_text(origin)}" if origin is not None else ""


def _healthy(diagnosis: Diagnosis) -> str:
    many = diagnosis.steps != 1
    skips = f", and {diagnosis.skips} of them {'were' if diagnosis.skips != 1 else 'was'} skipped" if diagnosis.skips else ", none skipped"
    return f"Nothing is wrong: {diagnosis.steps} step{'s' * many} {'were' if many else 'was'} trained {_in_precision(diagnosis)}{skips}."


def _tensors(diagnosis: Diagnosis) -> str:
    """The first tensor that was not finite, after a colon, and how many more there are."""
    if not diagnosis.tensors:
        return ""
    first, *others = diagnosis.tensors
    more = f" and {len(others)} more" if others else ""
    since = f", since the update of step {first.since}" if first.since is not None else ""
    return f": {first.name} ({first.nonfinite:,} of {first.elements:,} values{since}){more}"


def _data(diagnosis: Diagnosis) -> str:
    return f"The batch of step {diagnosis.step} holds infinite values or NaN before anything is computed{_tensors(diagnosis)}."


def _parameters(diagnosis: Diagnosis) -> str:
    if any(each.since == diagnosis.step for each in diagnosis.tensors):
        return f"The update of step {diagnosis.step} made the model infinite or NaN{_tensors(diagnosis)}."
    return f"The model held infinite values or NaN before step {diagnosis.step} began{_tensors(diagnosis)}."


def _model(diagnosis: Diagnosis) -> str:
    return f"Step {diagnosis.step} breaks in fp32 as well, so it is no matter of precision{_made(diagnosis.origin)}."


def _forward(diagnosis: Diagnosis) -> str:
    return f"Not finite {_in_precision(diagnosis)}, and finite in fp32{_made(diagnosis.origin)}."


def _scale(diagnosis: Diagnosis) -> str:
    helps = f": with {scale_text(diagnosis.passing_scale)} the step is clean" if diagnosis.passing_scale is not None else ""
    return f"The loss scale of {scale_text(diagnosis.scale)} is too high for step {diagnosis.step}, and nothing else is wrong{helps}."


def _backward(diagnosis: Diagnosis) -> str:
    return f"Gradients overflow, at the lowest loss scale too, and not in fp32{_made(diagnosis.origin)}."


def _precision(diagnosis: Diagnosis) -> str:
    lost = "accuracy is lost"
    if diagnosis.origin is not None:
        lost = f"{diagnosis.origin.op} of {diagnosis.origin.site} loses its accuracy"
    if diagnosis.deviation is None:
        return f"All is finite, but {lost} {_in_precision(diagnosis)}."
    error, input_error = (number_text(each, digits=2) for each in (diagnosis.deviation.error, diagnosis.deviation.input_error))
    return (
        f"All is finite, but {lost} {_in_precision(diagnosis)}: a relative error of {error}, where what it was computed from has "
        f"{input_error}."
    )


def _underflow(diagnosis: Diagnosis) -> str:
    helps = f"; with a loss scale of {scale_text(diagnosis.passing_scale)} they do not" if diagnosis.passing_scale is not None else ""
    if not diagnosis.vanished:
        return f"Gradients become zero {_in_precision(diagnosis)}{helps}."
    worst = diagnosis.vanished[0]
    return (
        f"Gradients become zero {_in_precision(diagnosis)}: {percent_text(worst.share)} of those of {module_text(worst.module)} that "
        f"are not zero in fp32{helps}."
    )


def _update(diagnosis: Diagnosis) -> str:
    if not diagnosis.stuck:
        return "Updates are too small to change parameters that are stored in half precision."
    worst = diagnosis.stuck[0]
    return (
        f"Updates are too small to change parameters that are stored in half precision: {percent_text(worst.share)} of {worst.name} stays "
        f"as it is in {format_text(worst.dtype)}, and would change in fp32."
    )


_CONCLUSIONS: Final[dict[Cause, Callable[[Diagnosis], str]]] = {
    "healthy": _healthy,
    "data": _data,
    "parameters": _parameters,
    "model": _model,
    "forward": _forward,
    "scale": _scale,
    "backward": _backward,
    "precision": _precision,
    "underflow": _underflow,
    "update": _update,
}
