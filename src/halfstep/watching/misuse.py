"""What is said of each misuse that is seen at run time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

from halfstep.records import UNKNOWN, Alert, Severity
from halfstep.watching.lines import Line, site_of

__all__ = ["FP16_UNSCALED", "MISUSES", "Misuse", "alert_of"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Misuse:
    """A way to use mixed precision wrongly.

    Attributes:
        why: Why it matters.
        advice: What to do.
        severity: Of its alerts.
    """

    why: str
    advice: str
    severity: Severity = "warning"


MISUSES: Final[dict[str, Misuse]] = {
    "clip_before_unscale": Misuse(
        why="The limit is compared with gradients that are still multiplied with the loss scale, so that nearly every update shrinks.",
        advice="Call scaler.unscale_(optimizer) right before it.",
        severity="error",
    ),
    "unscaled_backward": Misuse(
        why="scaler.step divides the gradients by the scale all the same, so that the update is that much too small.",
        advice="Write scaler.scale(loss).backward().",
        severity="error",
    ),
    "optimizer_step_bypasses_scaler": Misuse(
        why="The scaler does not skip the step where gradients are not finite, and divides none that it has not unscaled.",
        advice="Step by scaler.step(optimizer) alone, followed by scaler.update().",
        severity="error",
    ),
    "missing_update": Misuse(
        why="Without an update the scale never moves, and torch refuses to unscale or step the same optimizer again.",
        advice="Call scaler.update() once in each iteration that steps, also where the step is left out by hand; "
        "in an accumulation window, unscale and clip only where the step is taken.",
        severity="error",
    ),
    "repeated_update": Misuse(
        why="The scale may change between gradients that are added up, or between the backward pass and the step, and then they are "
        "divided by another number than they were multiplied with.",
        advice="Call scaler.update() once in each iteration, after the last scaler.step.",
        severity="error",
    ),
    "scaler_created_in_loop": Misuse(
        why="The scale begins anew each time, so that it is never calibrated and steps are skipped again and again.",
        advice="Make one scaler before the loop.",
    ),
    "backward_in_autocast": Misuse(
        why="The backward pass chooses its types by those of the forward pass; under autocast what it calls besides is cast once more.",
        advice="Leave the autocast region before you call backward.",
    ),
    "fp16_without_scaler": Misuse(
        why="Gradients below 6e-8 become zero in fp16, so that parts of the model stop learning without an error.",
        advice="Use torch.amp.GradScaler or halfstep.LossScaler, or train in bf16, which needs none.",
        severity="error",
    ),
    "schedule_moved_on_skip": Misuse(
        why="The schedule runs ahead of the training, and its warm-up is over before anything was learned.",
        advice="Move it only where the step was taken: compare scaler.get_scale() before and after scaler.update(), or let "
        "halfstep.MixedPrecision do it.",
    ),
    "state_saved_before_update": Misuse(
        why="The saved scale is that of the step before, so that a resumed run is not the run that never stopped.",
        advice="Call scaler.update() first, then scaler.state_dict().",
    ),
    "loop_inside_autocast": Misuse(
        why="Autocast casts each weight once in a region and keeps the cast: after an optimizer step the forward pass still sees the old "
        "weights.",
        advice="Open the region for each forward pass, and leave it before the backward pass and the step.",
        severity="error",
    ),
    "scaled_norm_logged": Misuse(
        why="The number contains the loss scale, and doubles or halves with it.",
        advice="Call scaler.unscale_(optimizer) first.",
    ),
    "autocast_device_mismatch": Misuse(
        why="Autocast acts on the operations of its own device type alone, so that everything runs in full precision.",
        advice="Give autocast the device type of the tensors: torch.autocast(device_type=x.device.type, ...).",
    ),
    "stale_parameters": Misuse(
        why="What the model trains by is not what the optimizer updates.",
        advice="Make the optimizer after the last change to the model, or give it the new parameters by add_param_group.",
        severity="error",
    ),
    "nonfinite_buffers": Misuse(
        why="A skipped step puts back no buffers. Training does not read running statistics, evaluation does, and is NaN from now on.",
        advice="Keep a copy of the buffers and put it back when a step is skipped, as halfstep.MixedPrecision does, or run what comes "
        "before in fp32.",
        severity="error",
    ),
}


# What is seen of an fp16 forward pass without a scaler.
FP16_UNSCALED: Final = "The forward pass computes in fp16, and its loss is not scaled."


def alert_of(rule: str, line: Line, *, step: int, seen: str, module: str = UNKNOWN) -> Alert:
    """The alert of a misuse.

    Args:
        rule: Its name in `MISUSES`.
        line: The line that is to change.
        step: In which it was seen.
        seen: What was seen, as a sentence.
        module: The module that it is about.
    """
    misuse = MISUSES[rule]
    return Alert(
        rule=rule,
        step=step,
        message=f"{seen} {misuse.why}",
        advice=misuse.advice,
        site=site_of(line, module=module),
        severity=misuse.severity,
    )
