"""Is the training still the same? Losses judged against the spread that the baseline itself shows from seed to seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

from halfstep.records import LossParity

__all__ = ["Parity", "final_loss", "first_loss", "judge_losses"]

# A difference below this part of what the baseline learned is of no practical importance, however small the spread is.
_NEGLIGIBLE: Final = 0.01
# With a spread above this part of what the baseline learned, nothing short of a disaster would show.
_BLIND: Final = 0.5
# A difference above this part of the spread, in one direction for all seeds, is no mere chance, though a change of seed does more.
_SUSPICIOUS: Final = 0.5


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """A judgement about losses and why.

    Attributes:
        judgement: `same`, `better`, `worse` or `inconclusive`.
        why: A clause that ends the sentence "The loss is ... :".
    """

    judgement: LossParity
    why: str


def first_loss(losses: Sequence[Sequence[float]]) -> float | None:
    """The loss of the first step, averaged over the seeds.

    Example:
        >>> first_loss([[2.0, 1.0], [4.0, 1.0]])
        3.0
    """
    return _mean([seed[0] for seed in losses]) if losses and all(losses) else None


def final_loss(losses: Sequence[Sequence[float]]) -> float | None:
    """The mean loss of the last fifth of the steps, averaged over the seeds; a single step's loss says more about its batch.

    A seed that was cut short ends where its training was not yet done: seeds that ran fewer steps than the longest do not count.

    Example:
        >>> final_loss([[9.0, 9.0, 9.0, 9.0, 9.0, 9.0, 9.0, 9.0, 1.0, 2.0]])
        1.5
    """
    longest = max(map(len, losses), default=0)
    return _mean([_tail(seed) for seed in losses if len(seed) == longest]) if longest else None


def _tail(losses: Sequence[float]) -> float:
    return _mean(losses[-max(1, len(losses) // 5) :])


def _mean(values: Sequence[float]) -> float:
    # statistics.fmean raises where infinities of both signs meet, and on overflow; here that is a loss like any other.
    return sum(values) / len(values)


def judge_losses(baseline: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> Parity:
    """Whether a precision trains as the baseline does.

    Both ran on the same seeds, so each seed gives one difference of final losses. Their mean is held against the range of the baseline's
    own final losses over the seeds: what a mere change of seed does. Within it (or within 1 % of what the baseline learned) the losses
    are the `same`, unless every seed agrees on a direction and the difference is above half of the range; beyond it they are `better` or
    `worse` if every seed agrees on the direction; and `inconclusive` otherwise. The verdict is `inconclusive` too where the seeds show no
    spread (there is one, or the factory does not use it), or one so large that it hides any difference. Without spread, several seeds
    that all lose more than half of what the baseline learned are still `worse`.

    Args:
        baseline: For each seed the loss of every step.
        other: The same, of the precision that is judged.

    Example:
        >>> judge_losses([[2.0, 1.0], [2.0, 1.1]], [[2.0, 1.02], [2.0, 1.09]]).judgement
        'same'
        >>> judge_losses([[2.0, 1.0], [2.0, 1.1]], [[2.0, 2.0], [2.0, 2.0]]).judgement
        'worse'
    """
    if not other or not all(other) or [len(seed) for seed in other] != [len(seed) for seed in baseline]:
        return Parity(judgement="inconclusive", why="it did not run all steps")
    if [list(seed) for seed in other] == [list(seed) for seed in baseline]:
        return Parity(judgement="same", why="every loss is identical, bit for bit")
    before, after = [_tail(seed) for seed in baseline], [_tail(seed) for seed in other]
    if not all(map(math.isfinite, before)):
        return Parity(judgement="inconclusive", why="the baseline itself ends with a loss that is not finite")
    broken = sum(not math.isfinite(loss) for loss in after)
    if broken:
        return Parity(judgement="worse", why=f"it is not finite at the end, for {broken} of {len(after)} seeds")
    return _weigh(before, after, learned=_mean([seed[0] for seed in baseline]) - _mean(before))


def _agree(differences: Sequence[float]) -> bool:
    return all(each > 0 for each in differences) or all(each < 0 for each in differences)


def _weigh(before: Sequence[float], after: Sequence[float], *, learned: float) -> Parity:
    differences = [other - own for own, other in zip(before, after, strict=True)]
    difference, spread = _mean(differences), max(before) - min(before)
    if not math.isfinite(learned):
        return Parity(judgement="inconclusive", why="the baseline itself begins with a loss that is not finite")
    if len(before) < 2:
        return Parity(judgement="inconclusive", why=f"it differs by {difference:+.2g}, and one seed shows no spread to judge that by")
    disaster = learned > 0 and abs(difference) > _BLIND * learned
    if spread == 0 and abs(difference) > _NEGLIGIBLE * abs(learned) and not disaster:
        return Parity(
            judgement="inconclusive",
            why=f"it differs by {difference:+.2g} on average, but fp32 ends the same with every seed, so there is no spread to judge that "
            "by; let the factory use its seed",
        )
    margin = max(spread, _NEGLIGIBLE * abs(learned))
    scale = f"by {difference:+.2g} on average, where fp32 itself varies by {spread:.2g} from seed to seed"
    if abs(difference) > margin:
        if all(each > 0 for each in differences):
            return Parity(judgement="worse", why=f"it is higher {scale}")
        if all(each < 0 for each in differences):
            return Parity(judgement="better", why=f"it is lower {scale}")
        return Parity(judgement="inconclusive", why=f"it differs {scale}, but not in the same direction for all seeds")
    if abs(difference) > max(_SUSPICIOUS * spread, _NEGLIGIBLE * abs(learned)) and _agree(differences):
        direction = "higher" if difference > 0 else "lower"
        return Parity(judgement="inconclusive", why=f"it is {direction} for every seed, {scale}; run more seeds")
    if spread > _BLIND * learned:
        return Parity(
            judgement="inconclusive",
            why=f"fp32 itself varies by {spread:.2g} from seed to seed and learned only {max(learned, 0.0):.2g}; run more steps",
        )
    return Parity(judgement="same", why=f"it differs {scale}")
