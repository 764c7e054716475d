"""An examination as a record."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan

import torch

from halfstep.policy import Policy
from halfstep.records import DIAGNOSIS_SCHEMA, Diagnosis, Experiment
from halfstep.replay.advice import excerpt_of
from halfstep.replay.findings import Finding

__all__ = ["diagnosis_of"]


def diagnosis_of(
    finding: Finding | None,
    *,
    task: str,
    policy: Policy,
    target: str,
    device: torch.device,
    step: int,
    steps: int,
    skips: int,
    scale: float,
    evidence: Sequence[Experiment],
    replays: int,
    interrupted: bool = False,
) -> Diagnosis:
    """The record of a finding; with `None`, of a training that was ended before anything was found.

    Args:
        finding: What was found.
        task: What the task is called.
        policy: What it ran in.
        target: The device type that was rehearsed; empty where none was.
        device: Where it ran.
        step: The step that was examined, from 1.
        steps: How many steps were trained.
        skips: How many of them were skipped.
        scale: The loss scale of the step.
        evidence: What was tried.
        replays: How often the step ran.
        interrupted: Whether it was ended before its time.
    """
    finding = finding or Finding(cause="healthy", loss=nan, explanation="")
    return Diagnosis(
        schema=DIAGNOSIS_SCHEMA,
        torch=torch.__version__,
        task=task,
        precision=str(policy),
        target=target,
        device=str(device),
        cause=finding.cause,
        step=step,
        steps=steps,
        skips=skips,
        loss=None if interrupted and finding.cause == "healthy" else finding.loss,
        scale=scale,
        passing_scale=finding.passing_scale,
        origin=finding.origin,
        first_nan=finding.first_nan,
        explanation=finding.explanation,
        remedies=finding.remedies,
        evidence=tuple(evidence),
        replays=replays,
        is_reproduced=finding.is_reproduced,
        tensors=finding.tensors,
        deviation=finding.deviation,
        vanished=finding.vanished,
        stuck=finding.stuck,
        excerpt=excerpt_of(finding.origin),
        interrupted=interrupted,
    )
