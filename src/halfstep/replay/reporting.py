"""An examination of a step from its beginning to the record of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import nan
from typing import final

import torch
from torch import nn
from typing_extensions import Self

from halfstep.numerics import Trace, rehearsed_target
from halfstep.policy import Policy
from halfstep.randomness import RandomState
from halfstep.records import DIAGNOSIS_SCHEMA, Diagnosis, Experiment, NonFiniteTensor
from halfstep.replay.advice import excerpt_of
from halfstep.replay.examination import Examination
from halfstep.replay.explanations import explain_broken_update
from halfstep.replay.findings import Finding
from halfstep.replay.laboratory import Circumstances, Laboratory, yes
from halfstep.replay.runs import Replay, StepCode
from halfstep.replay.witnesses import finding_of_trace

__all__ = ["Outcome", "diagnosis_of", "diagnosis_of_trace", "examine_step", "examine_update", "warning_text"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What an examination came to, and about which step. The attributes are those of `Diagnosis`."""

    finding: Finding
    step: int
    scale: float
    evidence: Sequence[Experiment]
    replays: int

    @classmethod
    def nothing(cls, *, step: int, scale: float) -> Self:
        """Of a training that was ended before anything was looked into."""
        finding = Finding(cause="healthy", loss=nan, explanation="")
        return cls(finding=finding, step=step, scale=scale, evidence=(), replays=0)


def examine_step(
    code: StepCode,
    *,
    device: torch.device,
    circumstances: Circumstances,
    step: int = 1,
    random: RandomState | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> Outcome:
    """Examines one step; everything is put back afterwards.

    Args:
        code: What the step computes.
        device: The model's.
        circumstances: What is known of the step.
        step: Its number.
        random: The random numbers that it began with; `None` for those of now.
        progress: Called with what is about to be tried.
    """
    others = [each for optimizer in circumstances.course.optimizers for group in optimizer.param_groups for each in group["params"]]
    with Replay(code, device=device, random=random, others=others) as replay:
        examination = Examination(replay, circumstances, progress=progress)
        finding = examination.examine()
        return Outcome(finding=finding, step=step, scale=circumstances.scale, evidence=tuple(examination.evidence), replays=replay.count)


def examine_update(
    code: StepCode, *, device: torch.device, circumstances: Circumstances, step: int, random: RandomState, broken: Sequence[NonFiniteTensor]
) -> Outcome:
    """Examines a step whose update made parameters non-finite that are stored in half precision; all is put back to where the step began.

    Args:
        code: What the step computes.
        device: The model's.
        circumstances: What is known of the step, whose parameters are those that it began with.
        step: Its number.
        random: The random numbers that it began with.
        broken: The parameters.
    """
    with Replay(code, device=device, random=random) as replay:
        laboratory = Laboratory(replay, circumstances, progress=lambda what: None)
        run = replay.run(circumstances.policy, scale=1.0)
        laboratory.note(run, "Are its gradients finite?", yes(holds=run.is_finite))
        text = "Keep parameters in fp32 (model.float()), and lower operations alone: MixedPrecision(model, optimizer, 'fp16')."
        finding = Finding(
            cause="parameters",
            loss=run.loss,
            explanation=explain_broken_update(broken, step=step),
            tensors=tuple(broken),
            remedies=(laboratory.trials(run).stored_wide(text),),
        )
        return Outcome(finding=finding, step=step, scale=1.0, evidence=tuple(laboratory.evidence), replays=replay.count)


def warning_text(diagnosis: Diagnosis, *, skips: int) -> str:
    """What a warning says after skips in a row."""
    begin = f"{skips} step{'' if skips == 1 else 's'} in a row {'was' if skips == 1 else 'were'} skipped."
    if not diagnosis.is_reproduced:
        return f"{begin} When the step was looked into, nothing was infinite or NaN any more."
    where = "" if diagnosis.origin is None else f", at {diagnosis.origin.site}"
    advice = next((f" {remedy.text}" for remedy in diagnosis.remedies), "")
    return f"{begin} Diagnosis: {diagnosis.cause}{where}. {diagnosis.explanation}{advice}"


def diagnosis_of_trace(
    seen: Trace, *, model: nn.Module, policy: Policy, device: torch.device, scale: float, floor: float, steps: int, skips: int
) -> Diagnosis:
    """The record of what the trace of one step comes to, which is the last that was trained.

    Args:
        seen: The trace, with details.
        model: The model.
        policy: What the step ran in.
        device: Where.
        scale: Its loss scale.
        floor: The lowest loss scale.
        steps: How many steps were trained.
        skips: How many of them were skipped.
    """
    finding, evidence = finding_of_trace(seen, model=model, policy=policy, scale=scale, floor=floor, loss=nan)
    outcome = Outcome(finding=finding, step=steps, scale=scale, evidence=evidence, replays=0)
    return diagnosis_of(
        outcome, task=type(model).__name__, policy=policy, target=rehearsed_target(), device=device, steps=steps, skips=skips
    )


def diagnosis_of(
    outcome: Outcome,
    *,
    task: str,
    policy: Policy,
    target: str,
    device: torch.device,
    steps: int,
    skips: int,
    interrupted: bool = False,
) -> Diagnosis:
    """The record of what an examination came to.

    Args:
        outcome: What it came to.
        task: What the task is called.
        policy: What it ran in.
        target: The device type that was rehearsed; empty where none was.
        device: Where it ran.
        steps: How many steps were trained.
        skips: How many of them were skipped.
        interrupted: Whether it was ended before its time.
    """
    finding = outcome.finding
    return Diagnosis(
        schema=DIAGNOSIS_SCHEMA,
        torch=torch.__version__,
        task=task,
        precision=str(policy),
        target=target,
        device=str(device),
        cause=finding.cause,
        step=outcome.step,
        steps=steps,
        skips=skips,
        loss=None if interrupted and finding.cause == "healthy" else finding.loss,
        scale=outcome.scale,
        passing_scale=finding.passing_scale,
        origin=finding.origin,
        first_nan=finding.first_nan,
        explanation=finding.explanation,
        remedies=finding.remedies,
        evidence=tuple(outcome.evidence),
        replays=outcome.replays,
        is_reproduced=finding.is_reproduced,
        tensors=finding.tensors,
        deviation=finding.deviation,
        vanished=finding.vanished,
        stuck=finding.stuck,
        excerpt=excerpt_of(finding.origin),
        interrupted=interrupted,
    )
