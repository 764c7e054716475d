"""What goes wrong in a step although everything in it is finite."""

from __future__ import annotations

from typing import Final, final

from halfstep.records import Remedy
from halfstep.replay.advice import advice_for
from halfstep.replay.alignment import Pair
from halfstep.replay.deviations import Deviations, vanished_gradients
from halfstep.replay.explanations import explain_precision, explain_underflow, explain_update
from halfstep.replay.findings import Finding
from halfstep.replay.laboratory import Laboratory, yes
from halfstep.replay.scales import highest_scale
from halfstep.replay.updates import stuck_tensors

__all__ = ["SilentFaults"]

# What loss scaling begins with where nothing else is said.
_USUAL_SCALE: Final = 65536.0

# So many results that lose their accuracy are looked into, and one for which no island helps counts where so much of the loss or of the
# gradients is lost with it.
_MOST_JUMPS: Final = 3
_LOST_LOSS: Final = 0.1
_LOST_GRADIENT: Final = 0.7

# So much of the updates of a parameter in half precision is lost, for a finding.
_STUCK: Final = 0.5


@final
class SilentFaults:
    """Looks for lost accuracy, gradients that vanish, and updates without an effect.

    Args:
        laboratory: The step.
    """

    def __init__(self, laboratory: Laboratory) -> None:
        self._lab = laboratory

    def find(self, pair: Pair) -> Finding | None:
        """The first of them; `None` where there is none.

        Args:
            pair: The step in low precision, and in fp32.
        """
        return (self._lost_accuracy(pair) if pair.full.is_finite else None) or self._vanished(pair) or self._stuck(pair)

    def _lost_accuracy(self, pair: Pair) -> Finding | None:
        deviations = Deviations(pair)
        if deviations.harm < 1:
            return None
        trials = self._lab.trials(pair.full)
        for _, index in zip(range(_MOST_JUMPS), deviations.jumps(), strict=False):
            origin = pair.low.ops[index]
            self._lab.progress("remedies")
            found = trials.keeps(index, before=pair, harm=deviations.harm)
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
            explanation=explain_underflow(vanished, scale=self._lab.scale),
            vanished=vanished,
            remedies=found[1],
            passing_scale=found[0],
        )

    def _higher_scale(self, pair: Pair) -> tuple[float | None, tuple[Remedy, ...]]:
        """The loss scale that keeps gradients from vanishing, as high as the range allows."""
        self._lab.progress("a higher loss scale")
        largest = highest_scale(pair.low, measured=pair.counterpart)
        trials = self._lab.trials(pair.full)
        for scale in dict.fromkeys((min(_USUAL_SCALE, largest), largest)):
            if scale <= self._lab.scale:
                continue
            run = self._lab.replay.repeated(self._lab.policy, scale=scale)
            is_kept = run.is_finite and not vanished_gradients(run, pair.full)
            self._lab.note(run, f"Are gradients kept at a loss scale of {scale:g}?", yes(holds=is_kept), is_clean=is_kept)
            if is_kept:
                text = f"Scale the loss, by LossScaler(init_scale={scale:g}) or more: gradients are kept then."
                return scale, (trials.proven(text, run),)
        if "fp16" not in self._lab.policy.precisions:
            return None, ()
        return None, trials.precision("bf16", text="Train in bf16, whose smallest number is that of fp32.")

    def _stuck(self, pair: Pair) -> Finding | None:
        found = stuck_tensors(self._lab.replay, pair.low, pair.full, optimizers=self._lab.course.optimizers)
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
            remedies=(self._lab.trials(pair.full).stored_wide(text),),
        )
