"""What a comparison of precisions looks like as a document."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TypeAlias

from halfstep.records import Comparison, Interval, LossParity, MemorySource, PrecisionRun, Verdict
from halfstep.report.comparison_figures import loss_figure, memory_figure, step_time_figure
from halfstep.report.contenders import Contender, contenders
from halfstep.report.document import Card, Column, Document, Fact, Item, Section, Table, Tone
from halfstep.report.policy import policy_sections
from halfstep.report.quantities import MISSING, TIMES, Unit, interval_texts, memory_unit, number_text, ratio_text, time_unit

__all__ = ["comparison_document"]

_BASELINE = "baseline"

_MEMORY_SOURCES: dict[MemorySource, str] = {
    "cuda_allocator": "what CUDA's allocator handed out",
    "tracked_tensors": "what torch's CPU allocator handed out to tensors",
}

_PARITY_TONES: dict[LossParity, Tone] = {"same": "good", "better": "good", "worse": "bad", "inconclusive": "neutral"}


def comparison_document(comparison: Comparison) -> Document:
    """The document that shows a comparison: what to do first, then the numbers, then how they came about.

    Args:
        comparison: What was measured. Whatever could not be measured is shown as an en dash; what a rehearsal never measures, time and
            memory, is left out.

    Example:
        >>> from halfstep.records import SCHEMA, Device, Settings
        >>> device = Device(type="cpu", name="Xeon", native=("fp32", "bf16"), threads=2, torch="2.13.0", python="3.11.7")
        >>> settings = Settings(
        ...     steps=40, warmup=5, seeds=(0, 1), batch_size=32, channels_last=False, compile=False, loss_scale="dynamic"
        ... )
        >>> comparison = Comparison(
        ...     schema=SCHEMA, task="digits", device=device, settings=settings, runs=(), verdicts=(), conclusion="Train in fp32.",
        ...     interrupted=False,
        ... )
        >>> comparison_document(comparison).conclusion
        'Train in fp32.'
    """
    runs = contenders(comparison)
    unit = memory_unit(one.run.peak_memory_mib for one in runs)
    sections = (
        Section(
            title="Verdicts",
            cards=tuple(_card(one, baseline=runs[0], unit=unit, target=comparison.target) for one in runs if one.verdict is not None),
        ),
        Section(title="Summary", tables=(_summary(runs, unit=unit, target=comparison.target),) if runs else ()),
        # A verdict on a terminal quotes the note; on the page it stands far from the table that has the gaps.
        Section(
            title="Incomplete runs", items=tuple(Item(label=one.label, text=one.run.note) for one in runs if one.run.note), place="page"
        ),
        Section(title="Loss", figures=loss_figure(runs, settings=comparison.settings)),
        Section(title="Step time", figures=step_time_figure(runs)),
        Section(title="Peak memory", figures=memory_figure(runs)),
        *(section for effect in comparison.policies for section in policy_sections(effect)),
        Section(title="Machine and settings", tables=(_circumstances(comparison),), place="page"),
    )
    return Document(
        kind="Precision comparison",
        title=comparison.task,
        subtitle=_subtitle(comparison, runs),
        conclusion=comparison.conclusion,
        notices=_notices(comparison, runs),
        sections=tuple(one for one in sections if one.paragraphs or one.cards or one.items or one.tables or one.figures),
    )


def _subtitle(comparison: Comparison, runs: tuple[Contender, ...]) -> str:
    seeds, (steps, kind) = len(comparison.settings.seeds), _planned(comparison)
    plan = f"{seeds} seed{'s' * (seeds != 1)} of {steps} {kind}step{'s' * (steps != 1)}"
    names = " vs ".join(one.label for one in runs)
    place = f"{comparison.target}, rehearsed on {comparison.device.name}" if comparison.target else comparison.device.name
    return " · ".join(part for part in (names, place, plan) if part)


def _planned(comparison: Comparison) -> tuple[int, str]:
    """How many steps of each seed there were to be, and what they are called. A rehearsal makes no difference between them."""
    settings = comparison.settings
    return (settings.warmup + settings.steps, "") if comparison.target else (settings.steps, "measured ")


def _done(run: PrecisionRun, *, target: str) -> int:
    return sum(map(len, run.losses)) if target else run.steps


def _notices(comparison: Comparison, runs: tuple[Contender, ...]) -> tuple[str, ...]:
    if not comparison.interrupted:
        return ()
    planned = _planned(comparison)[0] * len(comparison.settings.seeds)
    done = ", ".join(f"{_done(one.run, target=comparison.target)} in {one.label}" for one in runs)
    verb = "run" if comparison.target else "measured"
    progress = f" Of {planned} planned steps, these were {verb}: {done}." if done else ""
    return (f"The comparison was interrupted before all steps had run.{progress} Read the numbers as preliminary.",)


def _card(contender: Contender, *, baseline: Contender, unit: Unit, target: str) -> Card:
    verdict = contender.verdict
    assert verdict is not None, "only a contender with a verdict has a card"
    parity = Fact(
        label="Loss parity",
        value=verdict.loss_parity,
        detail=f"{number_text(contender.run.final_loss)} against {number_text(baseline.run.final_loss)}",
        tone=_PARITY_TONES[verdict.loss_parity],
    )
    if target:
        skipped = Fact(label="Skipped steps", value=str(contender.run.skipped_steps), detail=f"of {_done(contender.run, target=target)}")
        return Card(title=contender.label, text=verdict.reason, facts=(parity, skipped), role=contender.label)
    speedup = _speedup_fact(verdict.speedup, interval=_interval_name((contender.run, baseline.run)))
    memory = _memory_fact(verdict, contender=contender, baseline=baseline, unit=unit)
    return Card(title=contender.label, text=verdict.reason, facts=(speedup, memory, parity), role=contender.label)


# Fewer steps than this cannot reach 95 %, and the interval is their whole range.
_ENOUGH_STEPS = 6
_INTERVALS = {"95 %": "95 % intervals", "Range": "ranges (too few steps for 95 % intervals)"}


def _interval_name(runs: Iterable[PrecisionRun]) -> str:
    return "Range" if any(0 < run.steps < _ENOUGH_STEPS for run in runs) else "95 %"


def _speedup_fact(speedup: Interval | None, *, interval: str) -> Fact:
    if speedup is None:
        return Fact(label="Speed-up", value=MISSING, detail="not measured")
    tone: Tone = "neutral"
    if speedup.low > 1:
        tone = "good"
    elif speedup.high < 1:
        tone = "bad"
    detail = f"{interval}: {interval_texts(speedup, digits=3)[1]}"
    return Fact(label="Speed-up", value=ratio_text(speedup.median), detail=detail, tone=tone)


def _memory_fact(verdict: Verdict, *, contender: Contender, baseline: Contender, unit: Unit) -> Fact:
    ratio = verdict.memory_ratio
    if ratio is None:
        return Fact(label="Peak memory", value=MISSING, detail="not measured")
    tone: Tone = "neutral"
    # The ratio has no interval; a difference below 2 % is no reason to choose a precision.
    if math.isfinite(ratio) and abs(ratio - 1) >= 0.02:
        tone = "good" if ratio < 1 else "bad"
    detail = f"{_scaled(contender.run.peak_memory_mib, unit)} of {_scaled(baseline.run.peak_memory_mib, unit)} {unit.name}"
    return Fact(label="Peak memory", value=ratio_text(ratio), detail=detail, tone=tone)


def _scaled(value: float | None, unit: Unit) -> str:
    return number_text(None if value is None else value * unit.factor)


_Metric: TypeAlias = tuple[str, Callable[[Contender], str]]


def _summary(runs: tuple[Contender, ...], *, unit: Unit, target: str) -> Table:
    """Metrics down, precisions across: it fits a terminal and a phone, and like stands beside like."""
    metrics: tuple[_Metric, ...] = (
        *(() if target else _costs(runs, unit=unit)),
        ("First loss", lambda one: number_text(one.run.first_loss)),
        ("Final loss", lambda one: number_text(one.run.final_loss)),
        ("Loss parity", _judged(lambda verdict: verdict.loss_parity, baseline=runs[0])),
        ("Skipped steps", lambda one: str(one.run.skipped_steps)),
        ("Final scale", lambda one: _scale_text(one.run.final_scale)),
        ("Steps" if target else "Measured steps", lambda one: str(_done(one.run, target=target))),
    )
    return Table(
        columns=(Column(header="Metric"), *(Column(header=one.label, alignment="right", role=one.label) for one in runs)),
        rows=tuple((name, *(text(one) for one in runs)) for name, text in metrics),
        caption=f"The numerics of {target} were rehearsed on a CPU; time and memory were not measured." if target else _cost_caption(runs),
    )


def _judged(of_verdict: Callable[[Verdict], str], *, baseline: Contender) -> Callable[[Contender], str]:
    def text(one: Contender) -> str:
        if one is baseline:
            return _BASELINE
        return MISSING if one.verdict is None else of_verdict(one.verdict)

    return text


def _costs(runs: tuple[Contender, ...], *, unit: Unit) -> tuple[_Metric, ...]:
    interval = _interval_name(one.run for one in runs)
    time = time_unit(one.run.step_time_ms.median if one.run.step_time_ms else None for one in runs)
    return (
        (f"Step time ({time.name})", lambda one: interval_texts(one.run.step_time_ms, factor=time.factor)[0]),
        (f"{interval} of step time", lambda one: interval_texts(one.run.step_time_ms, factor=time.factor)[1]),
        ("Samples/s", lambda one: number_text(one.run.samples_per_s)),
        ("Speed-up", _judged(lambda verdict: interval_texts(verdict.speedup, digits=3, suffix=TIMES)[0], baseline=runs[0])),
        (f"{interval} of speed-up", lambda one: interval_texts(one.verdict.speedup if one.verdict else None, digits=3)[1]),
        (f"Peak memory ({unit.name})", lambda one: _scaled(one.run.peak_memory_mib, unit)),
        ("Peak memory ratio", _judged(lambda verdict: ratio_text(verdict.memory_ratio), baseline=runs[0])),
    )


def _cost_caption(runs: tuple[Contender, ...]) -> str:
    interval = _interval_name(one.run for one in runs)
    return f"Step time and speed-up are medians, with their {_INTERVALS[interval]} below. {_memory_caption(runs)}"


def _memory_caption(runs: tuple[Contender, ...]) -> str:
    labels: dict[MemorySource, list[str]] = {}
    for one in runs:
        labels.setdefault(one.run.memory_source, []).append(one.label)
    if len(labels) == 1:
        (source,) = labels
        return f"Peak memory is {_MEMORY_SOURCES[source]} during one step."
    parts = "; ".join(f"for {', '.join(names)} {_MEMORY_SOURCES[source]}" for source, names in labels.items())
    return f"Peak memory is, during one step: {parts}. The two cannot be compared with each other."


def _scale_text(scale: float | None) -> str:
    # Scales are powers of two that people know by heart, so they are never rounded or written with an exponent.
    return f"{scale:.15g}" if scale is not None and math.isfinite(scale) else number_text(scale)


def _circumstances(comparison: Comparison) -> Table:
    device, settings = comparison.device, comparison.settings
    steps = (
        (("Steps of each seed", str(_planned(comparison)[0])), ("Warm-up steps among those", str(settings.warmup)))
        if comparison.target
        else (("Measured steps of each seed", str(settings.steps)), ("Warm-up steps before those", str(settings.warmup)))
    )
    rows = (
        *((("Target, rehearsed", comparison.target),) if comparison.target else ()),
        ("Device", f"{device.name} ({device.type})"),
        ("Precisions in hardware", ", ".join(device.native) or MISSING),
        ("CPU threads", str(device.threads)),
        ("torch", device.torch),
        ("Python", device.python),
        ("Seeds", ", ".join(map(str, settings.seeds))),
        *steps,
        ("Batch size", MISSING if settings.batch_size is None else str(settings.batch_size)),
        ("Channels last", "yes" if settings.channels_last else "no"),
        ("torch.compile", "yes" if settings.compile else "no"),
        ("Loss scaling of fp16", settings.loss_scale),
    )
    return Table(columns=(Column(header="Setting"), Column(header="Value")), rows=rows)
