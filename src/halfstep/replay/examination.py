"""What is wrong with a step, told by experiments: each cause from the others by a replay of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import floor, isfinite, log2
from typing import Final, Literal, final

from halfstep.policy import Policy
from halfstep.records import Experiment, NonFiniteTensor, OpRecord, Precision, Remedy
from halfstep.replay.advice import advice_for
from halfstep.replay.alignment import Pair
from halfstep.replay.deviations import Deviations, vanished_gradients
from halfstep.replay.explanations import (
    explain_backward,
    explain_data,
    explain_forward,
    explain_model,
    explain_parameters,
    explain_precision,
    explain_scale,
    explain_underflow,
    explain_update,
)
from halfstep.replay.faults import Faults, entering_fault, own_faults
from halfstep.replay.findings import Finding
from halfstep.replay.inputs import nonfinite_tensors, zeroed
from halfstep.replay.remedies import Trials
from halfstep.replay.runs import Replay, Run
from halfstep.replay.updates import stuck_tensors
from halfstep.replay.verification import Course
from halfstep.replay.wording import LARGEST, operation_name

__all__ = ["Circumstances", "Examination"]

# Where a sample of results does not tell whether infinities did harm, this many values are compared.
_CLOSE_LOOK: Final = 65536

# A loss scale that was computed may be a little too high still.
_HALVINGS: Final = 2

# What loss scaling begins with where nothing else is said.
_USUAL_SCALE: Final = 65536.0

# No loss scale above this is proposed.
_LARGEST_SCALE: Final = 2.0**40

# So many results that lose their accuracy are looked into, and one for which no island helps counts where so much of the loss or of the
# gradients is lost with it.
_MOST_JUMPS: Final = 3
_LOST_LOSS: Final = 0.1
_LOST_GRADIENT: Final = 0.7

# So much of the updates of a parameter in half precision is lost, for a finding.
_STUCK: Final = 0.5


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Circumstances:
    """What there is to know of a step that is to be examined.

    Attributes:
        policy: What it runs in, with no `auto` in it.
        scale: Its loss scale; 1 without loss scaling.
        floor: The lowest loss scale that training would come down to.
        has_failed: Whether it was skipped, or its loss or gradients were not finite; `None` where it was not trained yet.
        course: How training goes on after it.
        since: For parameters that became non-finite, the steps that made them so, by name.
    """

    policy: Policy
    scale: float
    floor: float
    has_failed: bool | None
    course: Course
    since: Mapping[str, int] = field(default_factory=dict)


@final
class Examination:
    """Examines a step.

    Args:
        replay: The step, open.
        circumstances: What is known of it.
        progress: Called with what is about to be tried.

    Attributes:
        evidence: What was tried, in order.
    """

    def __init__(self, replay: Replay, circumstances: Circumstances, *, progress: Callable[[str], None]) -> None:
        self.evidence: list[Experiment] = []
        self._replay = replay
        self._policy = circumstances.policy
        self._scale = circumstances.scale
        self._floor = min(circumstances.floor, circumstances.scale)
        self._has_failed = circumstances.has_failed
        self._course = circumstances.course
        self._progress = progress
        self._tensors = nonfinite_tensors(replay.code.batch, replay.code.model, since=circumstances.since)

    def examine(self) -> Finding:
        """Finds out what is wrong."""
        self._progress("a traced replay")
        low = self._replay.traced(self._policy, scale=self._scale)
        first = next((op for op in low.ops if op.nonfinite and not op.has_nonfinite_input), None)
        question = "Is it finite when it runs again?" if self._has_failed else "Is it finite?"
        answer = "Yes." if low.is_finite else "No." if first is None else f"No: {operation_name(first)} is not finite."
        self._note(low, question, answer, origin=None if low.is_finite else first)
        if low.is_finite:
            finding = self._examine_finite(low)
            if self._has_failed and finding.cause == "healthy":
                return Finding(cause="healthy", loss=low.loss, explanation=_UNREPRODUCED, is_reproduced=False)
            return finding
        if self._tensors or not isfinite(low.loss) or any(op.nonfinite for op in low.ops if op.phase == "forward"):
            return self._examine_forward(low)
        return self._examine_backward(low, None)

    def _examine_forward(self, low: Run) -> Finding:
        full = self._widen()
        if not full.is_finite:
            return self._examine_full(low, full)
        pair = Pair(low=low, full=full)
        index = Faults(pair).first("forward")
        return self._examine_backward(low, full) if index is None else self._broken_forward(pair, index)

    def _broken_forward(self, pair: Pair, index: int) -> Finding:
        origin = pair.low.ops[index]
        return Finding(
            cause="forward",
            loss=pair.low.loss,
            explanation=explain_forward(pair, index),
            origin=origin,
            first_nan=_first_nan(pair.low, index),
            remedies=(*self._fp32_islands(pair, index, scale=self._scale), *advice_for(pair, index)),
        )

    def _examine_backward(self, low: Run, full: Run | None) -> Finding:
        at_floor = low
        if self._scale > self._floor:
            self._progress(f"a replay at a loss scale of {self._floor:g}")
            at_floor = self._replay.repeated(self._policy, scale=self._floor)
            self._note(at_floor, "Is it clean at the lowest loss scale?", _yes(holds=at_floor.is_finite))
            if at_floor.is_finite:
                return self._lower_scale(low, at_floor)
        full = full or self._widen()
        if not full.is_finite:
            return self._examine_full(low, full)
        pair = Pair(low=at_floor, full=full)
        index = Faults(pair).first("backward")
        if index is None:
            index = next((place for place, op in enumerate(at_floor.ops) if op.nonfinite and op.phase == "backward"), None)
        if index is None:
            return Finding(cause="backward", loss=low.loss, explanation=_UNSEEN)
        origin = at_floor.ops[index]
        return Finding(
            cause="backward",
            loss=low.loss,
            explanation=explain_backward(pair, index, floor=self._floor),
            origin=origin,
            first_nan=_first_nan(at_floor, index),
            remedies=(*self._fp32_islands(pair, index, scale=self._floor), *advice_for(pair, index)),
        )

    def _fp32_islands(self, pair: Pair, index: int, *, scale: float) -> tuple[Remedy, ...]:
        self._progress("remedies")
        trials = self._trials(pair.full)
        found = trials.islands(pair.low, index, scale=scale)
        if any(each.verified for each in found) or "fp16" not in self._policy.precisions:
            return found
        other: Precision = "bf16"
        return (*found, *trials.precision(other, text="Train in bf16, whose largest number is that of fp32."))

    def _lower_scale(self, low: Run, at_floor: Run) -> Finding:
        self._progress("a lower loss scale")
        scale = min(_largest_scale(at_floor), self._scale / 2)
        run = self._replay.run(self._policy, scale=max(scale, self._floor))
        for _ in range(_HALVINGS):
            if run.is_finite or run.scale <= self._floor:
                break
            run = self._replay.run(self._policy, scale=max(run.scale / 2, self._floor))
        run = run if run.is_finite else at_floor
        self._note(run, f"Is it clean at a loss scale of {run.scale:g}?", _yes(holds=True))
        index = next((place for place, op in enumerate(low.ops) if op.makes_nonfinite and op.phase == "backward"), None)
        origin = None if index is None else low.ops[index]
        text = (
            f"Let the loss scale come down to {run.scale:g}: dynamic scaling does so by itself, in {_skips(self._scale, run.scale)}. To "
            f"skip none, begin with it: LossScaler(init_scale={run.scale:g})."
        )
        return Finding(
            cause="scale",
            loss=low.loss,
            explanation=explain_scale(low, origin, scale=self._scale, passing=run.scale),
            origin=origin,
            remedies=(self._trials(low).proven(text, run),),
            passing_scale=run.scale,
        )

    def _examine_full(self, low: Run, full: Run) -> Finding:
        """Tells why a step breaks in fp32 as well."""
        entry = entering_fault(full)
        foreign = [each for each in self._tensors if each.kind != "input"]
        given = [each for each in self._tensors if each.kind == "input"]
        if entry is not None and given:
            self._progress("a replay with zeros in the batch")
            with zeroed(self._replay.code.batch):
                cleaned = self._replay.run(self._policy, scale=self._floor)
                question = "Is it clean with zeros in place of what is not finite in the batch?"
                self._note(cleaned, question, _yes(holds=cleaned.is_finite))
                if cleaned.is_finite:
                    text = "Leave such samples out of the batch, or clean them where they are loaded."
                    remedy = self._trials(full).proven(text, cleaned)
                    return self._given(low, "data", explain_data(given, full.ops[entry]), given, remedy=remedy)
        if entry is not None and foreign:
            text = "Go back to a checkpoint whose parameters and buffers are finite."
            remedy = Remedy(text=text, override=None, verified=False)
            return self._given(low, "parameters", explain_parameters(foreign), foreign, remedy=remedy)
        if entry is not None and (given or not self._tensors):
            text = "Look at what is given to that operation, where it is loaded or made."
            remedy = Remedy(text=text, override=None, verified=False)
            return self._given(low, "data", explain_data(given, full.ops[entry]), given, remedy=remedy)
        index = own_faults(full)
        origin = None if index is None else full.ops[index]
        pair = Pair(low=full, full=full)
        return Finding(
            cause="model",
            loss=low.loss,
            explanation=explain_model(origin),
            origin=origin,
            first_nan=None if index is None else _first_nan(full, index),
            remedies=() if index is None else advice_for(pair, index),
        )

    def _given(
        self, low: Run, cause: Literal["data", "parameters"], explanation: str, tensors: Sequence[NonFiniteTensor], *, remedy: Remedy
    ) -> Finding:
        return Finding(cause=cause, loss=low.loss, explanation=explanation, tensors=tuple(tensors), remedies=(remedy,))

    def _examine_finite(self, low: Run) -> Finding:
        """Looks for what goes wrong although everything is finite."""
        full = self._widen()
        pair = Pair(low=low, full=full)
        faults = Faults(pair)
        index = faults.first("forward")
        if index is None and faults.has_hidden:
            pair = self._look_closely()
            index = Faults(pair).first("forward")
        if index is not None:
            return self._broken_forward(pair, index)
        return (
            (self._lost_accuracy(pair) if full.is_finite else None)
            or self._vanished(pair)
            or self._stuck(pair)
            or Finding(cause="healthy", loss=low.loss, explanation="")
        )

    def _look_closely(self) -> Pair:
        samples, self._replay.samples = self._replay.samples, _CLOSE_LOOK
        try:
            low = self._replay.traced(self._policy, scale=self._scale)
            self._note(low, "Do infinities in it do harm?", "Two replays compare more of their values.")
            return Pair(low=low, full=self._replay.widened(self._policy))
        finally:
            self._replay.samples = samples

    def _lost_accuracy(self, pair: Pair) -> Finding | None:
        deviations = Deviations(pair)
        if deviations.harm < 1:
            return None
        trials = self._trials(pair.full)
        for _, index in zip(range(_MOST_JUMPS), deviations.jumps(), strict=False):
            origin = pair.low.ops[index]
            self._progress("remedies")
            found = trials.keeps(index, before=pair)
            if found or deviations.loss_error > _LOST_LOSS or deviations.gradient_error > _LOST_GRADIENT:
                return Finding(
                    cause="precision",
                    loss=pair.low.loss,
                    explanation=explain_precision(pair, index, deviations.at(index)),
                    origin=origin,
                    remedies=(*found, *advice_for(pair, index)),
                    deviation=deviations.at(index),
                )
        return None

    def _vanished(self, pair: Pair) -> Finding | None:
        vanished = vanished_gradients(pair.low, pair.full)
        if not vanished:
            return None
        found = self._higher_scale(pair)
        return Finding(
            cause="underflow",
            loss=pair.low.loss,
            explanation=explain_underflow(vanished, scale=self._scale),
            vanished=vanished,
            remedies=found[1],
            passing_scale=found[0],
        )

    def _higher_scale(self, pair: Pair) -> tuple[float | None, tuple[Remedy, ...]]:
        """The loss scale that keeps gradients from vanishing, as high as the range allows."""
        self._progress("a higher loss scale")
        largest = _largest_kept_scale(pair)
        trials = self._trials(pair.full)
        for scale in dict.fromkeys((min(_USUAL_SCALE, largest), largest)):
            if scale <= self._scale:
                continue
            run = self._replay.repeated(self._policy, scale=scale)
            is_kept = run.is_finite and not vanished_gradients(run, pair.full)
            self._note(run, f"Are gradients kept at a loss scale of {scale:g}?", _yes(holds=is_kept), is_clean=is_kept)
            if is_kept:
                text = f"Scale the loss, by LossScaler(init_scale={scale:g}) or more: gradients are kept then."
                return scale, (trials.proven(text, run),)
        if "fp16" not in self._policy.precisions:
            return None, ()
        return None, trials.precision("bf16", text="Train in bf16, whose smallest number is that of fp32.")

    def _stuck(self, pair: Pair) -> Finding | None:
        found = stuck_tensors(self._replay, pair.low, pair.full, optimizers=self._course.optimizers)
        stuck = [each for each in found if each.share > _STUCK]
        if not stuck:
            return None
        text = (
            "Keep parameters and statistics in fp32 (model.float()), and lower operations alone: MixedPrecision(model, optimizer, 'bf16')."
        )
        return Finding(
            cause="update",
            loss=pair.low.loss,
            explanation=explain_update(stuck),
            stuck=tuple(stuck),
            remedies=(self._trials(pair.full).stored_wide(text),),
        )

    def _trials(self, full: Run) -> Trials:
        return Trials(self._replay, policy=self._policy, full=full, course=self._course, floor=self._floor, note=self.evidence.append)

    def _widen(self) -> Run:
        self._progress("a replay in fp32")
        full = self._replay.widened(self._policy)
        index = None if full.is_finite else own_faults(full)
        origin = None if index is None else full.ops[index]
        answer = "Yes." if full.is_finite else f"No: {operation_name(origin)} is not finite." if origin else "No."
        self._note(full, "Is it finite in fp32?", answer, precision="fp32", origin=origin)
        return full

    def _note(
        self, run: Run, question: str, answer: str, *, is_clean: bool | None = None, precision: str = "", origin: OpRecord | None = None
    ) -> None:
        self.evidence.append(
            Experiment(
                question=question,
                precision=precision or str(run.policy),
                scale=run.scale,
                is_clean=run.is_finite if is_clean is None else is_clean,
                answer=answer,
                origin=origin,
            )
        )


_UNREPRODUCED: Final = (
    "The step was not finite when it was trained, and is when it is replayed from the same state. The function that computes the loss "
    "draws another batch each time, say, or depends on something besides the model, the batch and random numbers."
)
_UNSEEN: Final = "Gradients are not finite, and no operation that a trace sees makes them so: a hook or another process may."


def _yes(*, holds: bool) -> str:
    return "Yes." if holds else "No."


def _first_nan(run: Run, origin: int) -> OpRecord | None:
    return next((op for op in run.ops[origin + 1 :] if op.makes_nan), None) if not run.ops[origin].nans else None


def _largest_scale(run: Run) -> float:
    """The largest power of two with which no half-precision result of the backward pass leaves its range, from a run with another."""
    factors = [
        LARGEST[op.output_dtypes[0]] / max(op.absmax or 0.0, op.exact_absmax or 0.0)
        for op in run.ops
        if op.phase == "backward" and op.output_dtypes and op.output_dtypes[0] in LARGEST and op.absmax
    ]
    return min(run.scale * 2.0 ** floor(log2(min(factors))), _LARGEST_SCALE) if factors else run.scale


def _largest_kept_scale(pair: Pair) -> float:
    """The same from the run in fp32, for one in which gradients vanish."""
    factors = []
    for index, op in enumerate(pair.low.ops):
        other = pair.counterpart(index)
        if op.phase == "backward" and op.output_dtypes and op.output_dtypes[0] in LARGEST and other is not None and other.absmax:
            factors.append(LARGEST[op.output_dtypes[0]] / other.absmax)
    return min(2.0 ** floor(log2(min(factors))), _LARGEST_SCALE) if factors else pair.low.scale


def _skips(scale: float, passing: float) -> str:
    count = round(log2(scale / passing))
    return f"{count} skipped step{'' if count == 1 else 's'}"
