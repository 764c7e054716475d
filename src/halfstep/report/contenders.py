"""The runs of a comparison, each with a name of its own and the verdict on it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import final

from halfstep.records import Comparison, PrecisionRun, Verdict

__all__ = ["Contender", "contenders"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One run of a comparison.

    Attributes:
        label: The precision; a second run of the same precision is called, for example, `fp32 (2)`.
        run: What it did.
        verdict: What was judged of it; `None` for the baseline.

    Example:
        >>> verdict = Verdict(precision="bf16", baseline="fp32", speedup=None, memory_ratio=None, loss_parity="same", reason="Equal.")
        >>> run = PrecisionRun(
        ...     precision="bf16", step_time_ms=None, samples_per_s=None, peak_memory_mib=None, memory_source="cuda_allocator",
        ...     first_loss=None, final_loss=None, skipped_steps=0, final_scale=None, steps=0, memory=None, step_times_ms=(), losses=(),
        ...     skipped_at=(), note="",
        ... )
        >>> Contender(label="bf16 (2)", run=run, verdict=verdict).run.precision
        'bf16'
    """

    label: str
    run: PrecisionRun
    verdict: Verdict | None


def contenders(comparison: Comparison) -> tuple[Contender, ...]:
    """All runs of a comparison, the baseline first.

    Args:
        comparison: What was measured. A precision may appear more than once, and a verdict may be missing.

    Example:
        >>> from halfstep.records import SCHEMA, Device, Settings
        >>> device = Device(type="cpu", name="Xeon", native=("fp32",), threads=2, torch="2.13.0", python="3.11.7")
        >>> settings = Settings(steps=9, warmup=1, seeds=(0,), batch_size=8, channels_last=False, compile=False, loss_scale="none")
        >>> run = PrecisionRun(
        ...     precision="fp32", step_time_ms=None, samples_per_s=None, peak_memory_mib=None, memory_source="tracked_tensors",
        ...     first_loss=None, final_loss=None, skipped_steps=0, final_scale=None, steps=0, memory=None, step_times_ms=(), losses=(),
        ...     skipped_at=(), note="",
        ... )
        >>> comparison = Comparison(
        ...     schema=SCHEMA, task="digits", device=device, settings=settings, runs=(run, run), verdicts=(), conclusion="It is noise.",
        ...     interrupted=False,
        ... )
        >>> [one.label for one in contenders(comparison)]
        ['fp32', 'fp32 (2)']
    """
    seen: Counter[str] = Counter()
    verdicts = list(comparison.verdicts)
    found = []
    for place, run in enumerate(comparison.runs):
        seen[run.precision] += 1
        label = run.precision if seen[run.precision] == 1 else f"{run.precision} ({seen[run.precision]})"
        # Verdicts stand in the order of the runs, so the first one of this precision that nobody has taken is the right one.
        verdict = next((one for one in verdicts if place and one.precision == run.precision), None)
        if verdict is not None:
            verdicts.remove(verdict)
        found.append(Contender(label=label, run=run, verdict=verdict))
    return tuple(found)
