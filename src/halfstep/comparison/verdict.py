"""Measurements to verdicts: how a precision stands against the baseline, and why, in a sentence that a person can act on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, final

from halfstep.comparison.parity import Parity
from halfstep.hardware import StepProfile
from halfstep.records import Interval, LossParity, Verdict

__all__ = ["Evidence", "conclude", "conclude_rehearsal", "expected_gain", "explain", "judge", "judge_rehearsal"]

_SMALL_OPERATION_US: Final = {"cpu": 30.0, "cuda": 15.0}
_MANY_CASTS: Final = 0.15
_LITTLE_TO_GAIN: Final = 1.3
_MOST_OF_IT: Final = 0.5
_ONE_OPERATION: Final = 0.35


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What explains how fast a precision is.

    Attributes:
        device: `cpu` or `cuda`.
        native: Whether the device computes the precision, or that of the policy, in hardware.
        gain: How many times as fast as in fp32 the device multiplies large matrices; `None` when it was not measured.
        baseline: The profile of a step of the baseline.
        profile: The profile of a step of this precision; `None` when there is none.
        note: Why the precision was cut short; empty if it was not.
        failed: Whether an error cut it short, not its slowness.
        identical: Whether every loss is that of the baseline, bit for bit.
        skipped: How many of the steps were skipped.
        steps: How many steps it ran.
        rounds: How many pairs of steps the speed-up comes from; `None` when that is unknown.
        computes: The lowest precision that a policy has computed in; empty for a precision, which is its own.
    """

    device: str
    native: bool
    gain: float | None
    baseline: StepProfile | None
    profile: StepProfile | None
    note: str
    failed: bool = False
    identical: bool = False
    skipped: int = 0
    steps: int = 0
    rounds: int | None = None
    computes: str = ""


def expected_gain(*, share: float, gain: float) -> float:
    """The most that a step can gain when a share of it becomes faster by a factor: Amdahl's law.

    Args:
        share: The part of the baseline's time that is spent in what becomes faster, from 0 to 1.
        gain: How many times as fast that part becomes.

    Example:
        >>> round(expected_gain(share=0.31, gain=2.0), 2)
        1.18
    """
    return 1 / (1 - share + share / gain)


def judge(
    *,
    precision: str,
    baseline: str,
    speedup: Interval | None,
    memory_ratio: float | None,
    parity: Parity,
    evidence: Evidence,
    skipped: str = "",
) -> Verdict:
    """The verdict on a precision, with its reason."""
    clauses = [_speed_clause(precision, baseline, speedup=speedup, evidence=evidence)]
    if memory_ratio is not None:
        clauses.append(f"peak memory is {memory_ratio:.2f} times that of {baseline}")
    if evidence.skipped:
        clauses.append(f"{evidence.skipped} of {evidence.steps} steps were skipped")
    clauses.append(f"the loss is {_PARITY_WORDS[parity.judgement]}: {parity.why}")
    return Verdict(
        precision=precision,
        baseline=baseline,
        speedup=speedup,
        memory_ratio=memory_ratio,
        loss_parity=parity.judgement,
        reason="; ".join(clauses) + ".",
    )


_PARITY_WORDS: Final = {"same": "the same", "better": "better", "worse": "worse", "inconclusive": "inconclusive"}


def _speed_clause(precision: str, baseline: str, *, speedup: Interval | None, evidence: Evidence) -> str:
    noted = f" ({_clause(evidence.note)})" if evidence.note else ""
    if evidence.failed:
        return f"{precision} did not run to the end{noted}"
    why = explain(precision, speedup=speedup, evidence=evidence)
    said = f"{precision} was not measured" if speedup is None else _compare_speed(precision, baseline, speedup, rounds=evidence.rounds)
    return f"{said}{noted}, because {why}" if why else f"{said}{noted}"


def _clause(sentence: str) -> str:
    """A sentence as it stands inside another one; a name at its beginning, such as OutOfMemoryError, keeps its capital."""
    first, _, rest = sentence.rstrip(".").partition(" ")
    return " ".join(filter(None, (first.lower() if first.istitle() else first, rest)))


def _compare_speed(precision: str, baseline: str, speedup: Interval, *, rounds: int | None) -> str:
    interval = f"{_name_interval(rounds)} {speedup.low:.2f} to {speedup.high:.2f}"
    if speedup.low > 1:
        return f"{precision} is {speedup.median:.2f} times as fast as {baseline} ({interval})"
    if speedup.high >= 1:
        return f"no difference in speed between {precision} and {baseline} shows: {speedup.median:.2f} times as fast ({interval})"
    if speedup.median < 0.5:
        return f"{precision} is {1 / speedup.median:.0f} times slower than {baseline} ({interval})"
    return f"{precision} is slower than {baseline}: {speedup.median:.2f} times as fast ({interval})"


def _name_interval(rounds: int | None) -> str:
    # Fewer than six cannot reach 95 %; the interval is then their range.
    if rounds is None or rounds >= 6:
        return "95 % interval"
    return "a single pair of steps," if rounds == 1 else f"range of only {rounds} pairs of steps,"


def explain(precision: str, *, speedup: Interval | None, evidence: Evidence) -> str:
    """Why a precision is as fast as it is: a clause to follow "because", or an empty string where nothing measured explains it.

    Example:
        >>> emulated = Evidence(device="cpu", native=False, gain=None, baseline=None, profile=None, note="")
        >>> explain("fp16", speedup=None, evidence=emulated)
        'this CPU does not compute fp16 training in hardware, so torch emulates it'
    """
    precision = evidence.computes or precision
    if precision == "fp32":
        return ""
    if evidence.identical:
        return "autocast lowers nothing that matters to the loss: each one is that of fp32, bit for bit"
    place = "this CPU" if evidence.device == "cpu" else "this GPU"
    if not evidence.native and (speedup is None or speedup.low <= 1):
        return f"{place} does not compute {precision} training in hardware, so torch emulates it{_slowest_clause(evidence)}"
    if evidence.baseline is None or evidence.gain is None or speedup is None:
        return ""
    if speedup.low <= 1 and evidence.baseline.mean_operation_us < _SMALL_OPERATION_US[evidence.device]:
        return (
            f"the {evidence.baseline.operations} operations of a step take {evidence.baseline.mean_operation_us:.0f} µs on average, so "
            "their overhead counts more than their arithmetic; a larger batch or wider layers would gain more"
        )
    if speedup.low <= 1 and evidence.profile is not None and evidence.profile.cast_share > _MANY_CASTS:
        return f"casts between precisions take {_percent(evidence.profile.cast_share)} of its step"
    bound = _bound_clause(precision, place, speedup=speedup, share=evidence.baseline.lowered_share, gain=evidence.gain)
    if bound or speedup.low > 1 or evidence.profile is None or evidence.profile.slowest_share < _ONE_OPERATION:
        return bound
    return f"{_percent(evidence.profile.slowest_share)} of its step goes into {evidence.profile.slowest} alone"


def _bound_clause(precision: str, place: str, *, speedup: Interval, share: float, gain: float) -> str:
    """What the share of the step that autocast lowers, and the speed of the device, say; empty if they do not explain the speed-up."""
    most = expected_gain(share=share, gain=gain)
    if speedup.low > max(1.0, most):
        # It gains more than faster matrix products can give, such as from the memory that it saves, or the device was disturbed while it
        # was asked how fast it multiplies. What remains true is where the time went.
        return f"{_percent(share)} of the fp32 step is spent in operations that autocast lowers" if share >= _MOST_OF_IT else ""
    multiplies = f"{place} multiplies {precision} matrices {'only ' if gain < _LITTLE_TO_GAIN else ''}{gain:.1f} times as fast as fp32 ones"
    spent = f"{'only ' if share < _MOST_OF_IT else ''}{_percent(share)} of the fp32 step is spent in operations that autocast lowers"
    if most < _LITTLE_TO_GAIN:
        return f"{spent} and {multiplies}, so {f'{most:.1f}x is the most to expect' if most >= 1.05 else 'there is nothing to gain'}"
    return f"{spent}, and {multiplies}" if speedup.low > 1 else ""


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _slowest_clause(evidence: Evidence) -> str:
    profile = evidence.profile
    if profile is None or profile.slowest_share < 0.5:
        return ""
    return f"; {_percent(profile.slowest_share)} of the step goes into {profile.slowest}"


def conclude(verdicts: Sequence[Verdict], *, whys: Sequence[str], baseline: str) -> str:
    """What to do, with its reason: the fastest precision that trains as the baseline does, or the baseline.

    Args:
        verdicts: One for each precision that was compared with the baseline.
        whys: What `explain` says of each.
        baseline: The baseline's name.

    Example:
        >>> conclude((), whys=(), baseline="fp32")
        'Nothing was compared with fp32.'
    """
    others = [
        (verdict, f", because {why}" if why else "") for verdict, why in zip(verdicts, whys, strict=True) if verdict.precision != baseline
    ]
    if not others:
        return f"{baseline} was compared with itself: {verdicts[-1].reason}" if verdicts else f"Nothing was compared with {baseline}."
    faster = sorted(((verdict, why) for verdict, why in others if _gain(verdict)), key=lambda one: -_gain(one[0]))
    sound = [(verdict, why) for verdict, why in faster if verdict.loss_parity in _LOSS]
    if sound:
        verdict, why = sound[0]
        gain = f"{_gain(verdict):.1f}" if _gain(verdict) >= 1.05 else f"{_gain(verdict):.2f}"
        return (
            f"Use {verdict.precision}: it reaches {_LOSS[verdict.loss_parity]} {gain} times as fast as {baseline}{_memory(verdict)}{why}."
        )
    promising = [verdict for verdict, _ in faster if verdict.loss_parity == "inconclusive"]
    if promising:
        return f"{promising[0].precision} looks promising, but is not proven; run more steps or seeds: {promising[0].reason}"
    saving = [(verdict, why) for verdict, why in others if _saves_memory(verdict)]
    if saving:
        verdict, why = saving[0]
        result = f"it reaches {_LOSS[verdict.loss_parity]}{_memory(verdict)}, but is no faster than {baseline}{why}"
        return f"Use {verdict.precision} for its memory, not for its speed: {result}."
    worst = min((verdict for verdict, _ in others), key=lambda verdict: verdict.loss_parity != "worse")
    return f"Stay with {baseline}: {worst.reason}"


_LOSS: Final[dict[LossParity, str]] = {"same": "the same loss", "better": "a better loss"}


def _gain(verdict: Verdict) -> float:
    """The speed-up if it is one beyond doubt, and 0 otherwise."""
    return verdict.speedup.median if verdict.speedup is not None and verdict.speedup.low > 1 else 0.0


def _memory(verdict: Verdict) -> str:
    ratio = verdict.memory_ratio
    return "" if ratio is None else f" in {ratio:.2f} times the memory"


def _saves_memory(verdict: Verdict) -> bool:
    no_slower = verdict.speedup is not None and verdict.speedup.high >= 1
    lighter = verdict.memory_ratio is not None and verdict.memory_ratio < 0.95
    return no_slower and lighter and verdict.loss_parity in _LOSS


def judge_rehearsal(
    *, precision: str, baseline: str, target: str, parity: Parity, skipped: int = 0, steps: int = 0, failure: str = ""
) -> Verdict:
    """The verdict on a precision of which only the numerics are known, since those of another device were rehearsed on this CPU.

    Args:
        precision: What is judged.
        baseline: What it is judged against.
        target: The device type whose numerics were rehearsed.
        parity: What its losses say.
        skipped: How many of its steps were skipped.
        steps: How many steps it ran.
        failure: Why it did not run to the end; empty if it did.

    Example:
        >>> same = Parity(judgement="same", why="it differs by 0.01")
        >>> print(judge_rehearsal(precision="bf16", baseline="fp32", target="cuda", parity=same).reason)
        bf16 trains as fp32 does on cuda (rehearsed on this CPU); the loss is the same: it differs by 0.01; time and memory were not
        measured.
    """
    found, _ = _FOUND["failed" if failure else parity.judgement]
    why = f": {_clause(failure)}" if failure else f"; the loss is {_PARITY_WORDS[parity.judgement]}: {parity.why}"
    clauses = [f"{precision} {found.format(baseline)}{_where(target)}{why}"]
    if skipped:
        clauses.append(f"{skipped} of {steps} steps were skipped")
    clauses.append(_UNMEASURED)
    return Verdict(
        precision=precision,
        baseline=baseline,
        speedup=None,
        memory_ratio=None,
        loss_parity=parity.judgement,
        reason="; ".join(clauses) + ".",
    )


def conclude_rehearsal(verdicts: Sequence[Verdict], *, failed: Sequence[bool], baseline: str, target: str) -> str:
    """What a rehearsal has shown: which precisions train as the baseline does, and which do not.

    Args:
        verdicts: One for each precision that was compared with the baseline.
        failed: Which of them an error cut short.
        baseline: The baseline's name.
        target: The device type whose numerics were rehearsed.

    Example:
        >>> same = Parity(judgement="same", why="it differs by 0.01")
        >>> verdict = judge_rehearsal(precision="bf16", baseline="fp32", target="cuda", parity=same)
        >>> conclude_rehearsal([verdict], failed=[False], baseline="fp32", target="cuda")
        'bf16 trains as fp32 does on cuda (rehearsed on this CPU); time and memory were not measured.'
    """
    others = [(verdict, broken) for verdict, broken in zip(verdicts, failed, strict=True) if verdict.precision != baseline]
    if not others:
        return conclude(verdicts, whys=[""] * len(verdicts), baseline=baseline)
    named: dict[_Found, list[str]] = {found: [] for found in _FOUND}
    for verdict, broken in others:
        named["failed" if broken else verdict.loss_parity].append(verdict.precision)
    clauses = [f"{_listed(names)} {_FOUND[found][len(names) > 1].format(baseline)}" for found, names in named.items() if names]
    clauses[0] += _where(target)
    return "; ".join((*clauses, _UNMEASURED)) + "."


_UNMEASURED: Final = "time and memory were not measured"

_Found: TypeAlias = LossParity | Literal["failed"]

# Of one precision, and of several.
_FOUND: Final[dict[_Found, tuple[str, str]]] = {
    "same": ("trains as {} does", "train as {} does"),
    "better": ("trains better than {}", "train better than {}"),
    "worse": ("trains worse than {}", "train worse than {}"),
    "inconclusive": ("is not proven to train as {} does", "are not proven to train as {} does"),
    "failed": ("did not run to the end", "did not run to the end"),
}


def _where(target: str) -> str:
    return f" on {target} (rehearsed on this CPU)"


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
