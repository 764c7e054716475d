"""What is wrong with a step, told by experiments: each cause from the others by a replay of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite, log2
from typing import Final, Literal, final

from halfstep.records import Experiment, NonFiniteTensor, Precision, Remedy
from halfstep.replay.advice import advice_for
from halfstep.replay.alignment import Pair
from halfstep.replay.explanations import (
    explain_backward,
    explain_data,
    explain_forward,
    explain_model,
    explain_parameters,
    explain_scale,
)
from halfstep.replay.faults import Faults, entering_fault, own_faults
from halfstep.replay.findings import Finding
from halfstep.replay.inputs import nonfinite_tensors, zeroed
from halfstep.replay.laboratory import Circumstances, Laboratory, yes
from halfstep.replay.runs import Replay, Run
from halfstep.replay.scales import highest_scale
from halfstep.replay.silent import SilentFaults
from halfstep.replay.wording import operation_name

__all__ = ["Examination"]

# Where a sample of results does not tell whether infinities did harm, this many values are compared.
_CLOSE_LOOK: Final = 65536

# A loss scale that was computed may be a little too high still.
_HALVINGS: Final = 2


@final
class Examination:
    """Examines a step.

    Args:
        replay: The step, open.
        circumstances: What is known of it.
        progress: Called with what is about to be tried.
    """

    def __init__(self, replay: Replay, circumstances: Circumstances, *, progress: Callable[[str], None]) -> None:
        self._lab = Laboratory(replay, circumstances, progress=progress)
        self._has_failed = circumstances.has_failed
        self._tensors = nonfinite_tensors(replay.code.batch, replay.code.model, since=circumstances.since)

    @property
    def evidence(self) -> Sequence[Experiment]:
        """What was tried, in order."""
        return self._lab.evidence

    def examine(self) -> Finding:
        """Finds out what is wrong."""
        self._lab.progress("a traced replay")
        low = self._lab.replay.traced(self._lab.policy, scale=self._lab.scale)
        first = next((op for op in low.ops if op.nonfinite and not op.has_nonfinite_input), None)
        question = "Is it finite when it runs again?" if self._has_failed else "Is it finite?"
        answer = "Yes." if low.is_finite else "No." if first is None else f"No: {operation_name(first)} is not finite."
        self._lab.note(low, question, answer, origin=None if low.is_finite else first)
        if low.is_finite:
            finding = self._examine_finite(low)
            return _unreproduced(low, _UNREPRODUCED) if self._has_failed and finding.cause == "healthy" else finding
        if self._tensors or not isfinite(low.loss) or any(op.nonfinite for op in low.ops if op.phase == "forward"):
            return self._examine_forward(low)
        return self._examine_backward(low, None)

    def _examine_forward(self, low: Run) -> Finding:
        full = self._lab.widen()
        pair = Pair(low=low, full=full)
        if not pair.is_one_step:
            return _unreproduced(low, _OTHER_VALUES)
        if not full.is_finite:
            return self._examine_full(low, full)
        index = Faults(pair).first("forward")
        return self._examine_backward(low, full) if index is None else self._broken_forward(pair, index)

    def _broken_forward(self, pair: Pair, index: int) -> Finding:
        origin = pair.low.ops[index]
        return Finding(
            cause="forward",
            loss=pair.low.loss,
            explanation=explain_forward(pair, index),
            origin=origin,
            first_nan=pair.low.first_nan(index),
            remedies=(*self._fp32_islands(pair, index, scale=self._lab.scale), *advice_for(pair, index)),
        )

    def _examine_backward(self, low: Run, full: Run | None) -> Finding:
        at_floor = low
        if self._lab.scale > self._lab.floor:
            self._lab.progress(f"a replay at a loss scale of {self._lab.floor:g}")
            at_floor = self._lab.replay.repeated(self._lab.policy, scale=self._lab.floor)
            self._lab.note(at_floor, "Is it clean at the lowest loss scale?", yes(holds=at_floor.is_finite))
            if at_floor.is_finite:
                return self._lower_scale(low, at_floor)
        full = full or self._lab.widen()
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
            explanation=explain_backward(pair, index, floor=self._lab.floor),
            origin=origin,
            first_nan=at_floor.first_nan(index),
            remedies=(*self._fp32_islands(pair, index, scale=self._lab.floor), *advice_for(pair, index)),
        )

    def _fp32_islands(self, pair: Pair, index: int, *, scale: float) -> tuple[Remedy, ...]:
        self._lab.progress("remedies")
        trials = self._lab.trials(pair.full)
        found = trials.islands(pair.low, index, scale=scale)
        if any(each.verified for each in found) or "fp16" not in self._lab.policy.precisions:
            return found
        other: Precision = "bf16"
        return (*found, *trials.precision(other, text="Train in bf16, whose largest number is that of fp32."))

    def _lower_scale(self, low: Run, at_floor: Run) -> Finding:
        self._lab.progress("a lower loss scale")
        scale = min(highest_scale(at_floor), self._lab.scale / 2)
        run = self._lab.replay.run(self._lab.policy, scale=max(scale, self._lab.floor))
        for _ in range(_HALVINGS):
            if run.is_finite or run.scale <= self._lab.floor:
                break
            run = self._lab.replay.run(self._lab.policy, scale=max(run.scale / 2, self._lab.floor))
        run = run if run.is_finite else at_floor
        self._lab.note(run, f"Is it clean at a loss scale of {run.scale:g}?", yes(holds=True))
        index = next((place for place, op in enumerate(low.ops) if op.makes_nonfinite and op.phase == "backward"), None)
        origin = None if index is None else low.ops[index]
        text = (
            f"Let the loss scale come down to {run.scale:g}: dynamic scaling does so by itself, in {_skips(self._lab.scale, run.scale)}. "
            f"To skip none, begin with it: LossScaler(init_scale={run.scale:g})."
        )
        return Finding(
            cause="scale",
            loss=low.loss,
            explanation=explain_scale(low, origin, scale=self._lab.scale, passing=run.scale),
            origin=origin,
            remedies=(self._lab.trials(low).proven(text, run),),
            passing_scale=run.scale,
        )

    def _examine_finite(self, low: Run) -> Finding:
        """Looks for what goes wrong although everything is finite."""
        pair = Pair(low=low, full=self._lab.widen())
        if not pair.is_one_step:
            return _unreproduced(low, _OTHER_VALUES)
        faults = Faults(pair)
        index = faults.first("forward")
        if index is None and faults.has_hidden:
            pair = self._look_closely()
            index = Faults(pair).first("forward")
        if index is not None:
            return self._broken_forward(pair, index)
        return SilentFaults(self._lab).find(pair) or Finding(cause="healthy", loss=low.loss, explanation="")

    def _look_closely(self) -> Pair:
        samples, self._lab.replay.samples = self._lab.replay.samples, _CLOSE_LOOK
        try:
            low = self._lab.replay.traced(self._lab.policy, scale=self._lab.scale)
            self._lab.note(low, "Do infinities in it do harm?", "Two replays compare more of their values.")
            return Pair(low=low, full=self._lab.replay.widened(self._lab.policy))
        finally:
            self._lab.replay.samples = samples

    def _examine_full(self, low: Run, full: Run) -> Finding:
        """Tells why a step breaks in fp32 as well."""
        entry = entering_fault(full)
        named = () if entry is None else full.details[entry].outside
        foreign = [each for each in self._tensors if each.name in named]
        given = [each for each in self._tensors if each.kind == "input"]
        if entry is not None and given:
            self._lab.progress("a replay with zeros in the batch")
            with zeroed(self._lab.replay.code.batch):
                cleaned = self._lab.replay.run(self._lab.policy, scale=self._lab.floor)
                question = "Is it clean with zeros in place of what is not finite in the batch?"
                self._lab.note(cleaned, question, yes(holds=cleaned.is_finite))
                if cleaned.is_finite:
                    text = "Leave such samples out of the batch, or clean them where they are loaded."
                    remedy = self._lab.trials(full).proven(text, cleaned)
                    return self._given(low, "data", explain_data(given, full.ops[entry]), given, remedy=remedy)
        if entry is not None and foreign:
            text = "Go back to a checkpoint whose parameters and buffers are finite."
            remedy = Remedy(text=text, override=None, verified=False)
            return self._given(low, "parameters", explain_parameters(foreign), foreign, remedy=remedy)
        if entry is not None:
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
            first_nan=None if index is None else full.first_nan(index),
            remedies=() if index is None else advice_for(pair, index),
        )

    def _given(
        self, low: Run, cause: Literal["data", "parameters"], explanation: str, tensors: Sequence[NonFiniteTensor], *, remedy: Remedy
    ) -> Finding:
        return Finding(cause=cause, loss=low.loss, explanation=explanation, tensors=tuple(tensors), remedies=(remedy,))


_UNREPRODUCED: Final = (
    "The step was not finite when it was trained, and is when it is replayed from the same state. The function that computes the loss "
    "draws another batch each time, say, or depends on something besides the model, the batch and random numbers."
)
_OTHER_VALUES: Final = (
    "The step computed with other values when it was replayed from the same state, so that nothing can be told about it: its loss depends "
    "on something besides the model, the batch and the random numbers of Python, NumPy and torch."
)
_UNSEEN: Final = "Gradients are not finite, and no operation that a trace sees makes them so: a hook or another process may."


def _unreproduced(low: Run, why: str) -> Finding:
    return Finding(cause="healthy", loss=low.loss, explanation=why, is_reproduced=False)


def _skips(scale: float, passing: float) -> str:
    count = round(log2(scale / passing))
    return f"{count} skipped step{'' if count == 1 else 's'}"
