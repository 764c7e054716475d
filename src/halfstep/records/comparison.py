"""What a comparison of precisions found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

from typing_extensions import Self

from halfstep.errors import RecordFormatError
from halfstep.records.base import AbstractRecord
from halfstep.records.codec import parse, structure
from halfstep.records.policy import PolicyEffect

__all__ = [
    "SCHEMA",
    "Comparison",
    "Device",
    "Interval",
    "LossParity",
    "MemoryParts",
    "MemorySource",
    "Outcome",
    "PrecisionRun",
    "Settings",
    "Verdict",
]

SCHEMA = 1

LossParity = Literal["same", "better", "worse", "inconclusive"]
Outcome = Literal["complete", "stopped", "failed"]
MemorySource = Literal["cuda_allocator", "tracked_tensors"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Interval(AbstractRecord):
    """A median with its 95 % confidence interval, all in the unit of the field that holds it.

    Fewer than six samples cannot reach 95 %; the interval is then their range.

    Example:
        >>> str(Interval(median=2.104, low=1.96, high=2.2))
        '2.10 [1.96, 2.20]'
    """

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Device(AbstractRecord):
    """The machine that a comparison ran on.

    Attributes:
        type: `cpu` or `cuda`.
        name: The processor's or the GPU's name.
        native: The precisions that the device computes in hardware.
        threads: The number of threads that one CPU operation may use.
        torch: The version of torch.
        python: The version of Python.
    """

    type: str
    name: str
    native: tuple[str, ...]
    threads: int
    torch: str
    python: str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(AbstractRecord):
    """How a comparison was run.

    Attributes:
        steps: Measured steps of each precision for each seed.
        warmup: Steps before those, which train but are not timed.
        seeds: The seeds that the task was made with.
        batch_size: Samples in the first batch; `None` when no tensor in it tells.
        channels_last: Whether the model and the images were laid out channels last.
        compile: Whether the model ran through `torch.compile`.
        loss_scale: The loss scaling of fp16: `dynamic` or `none`.
    """

    steps: int
    warmup: int
    seeds: tuple[int, ...]
    batch_size: int | None
    channels_last: bool
    compile: bool
    loss_scale: str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryParts(AbstractRecord):
    """What the peak memory of a step is made of, in MiB.

    Attributes:
        parameters: Parameters and buffers.
        optimizer: Optimizer state before the step.
        batch: The batch.
        step: What the step itself held at its peak: activations, gradients, casts and temporaries.
    """

    parameters: float
    optimizer: float
    batch: float
    step: float


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionRun(AbstractRecord):
    """What one precision did in a comparison. Fields that could not be measured are `None`, and `note` says why.

    Attributes:
        precision: `fp32`, `bf16` or `fp16`, or the name of a policy.
        step_time_ms: Step time in milliseconds: the median over all seeds, with its 95 % interval.
        samples_per_s: Samples per second at the median step time.
        peak_memory_mib: The peak memory of one step in MiB, everything that the step needs included.
        memory_source: `cuda_allocator` (what CUDA's allocator handed out) or `tracked_tensors` (what torch's CPU allocator handed out
            to tensors).
        first_loss: The loss of the first step, averaged over the seeds.
        final_loss: The mean loss of the last fifth of the steps, averaged over the seeds.
        skipped_steps: Optimizer steps that were not taken because gradients were non-finite, over all seeds.
        final_scale: The loss scale after the last step of the last seed; `None` without loss scaling.
        steps: Steps whose time was measured, over all seeds; a skipped step is quicker, and does not count. After a rehearsal: none.
        memory: What the peak memory is made of.
        step_times_ms: Every measured step time, in the order in which they ran.
        losses: For each seed the loss of every step, warm-up included.
        skipped_at: For each seed the numbers of the skipped steps, counted from 1.
        note: Why the run is incomplete, as a sentence; empty when it is complete.
        outcome: `complete`, `stopped` (by its slowness) or `failed` (by an error).
    """

    precision: str
    step_time_ms: Interval | None
    samples_per_s: float | None
    peak_memory_mib: float | None
    memory_source: MemorySource
    first_loss: float | None
    final_loss: float | None
    skipped_steps: int
    final_scale: float | None
    steps: int
    memory: MemoryParts | None
    step_times_ms: tuple[float, ...]
    losses: tuple[tuple[float, ...], ...]
    skipped_at: tuple[tuple[int, ...], ...]
    note: str
    outcome: Outcome = "complete"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict(AbstractRecord):
    """How one precision stands against the baseline.

    Attributes:
        precision: The precision that is judged, or the name of the policy.
        baseline: The precision that it is judged against.
        speedup: Baseline step time divided by this precision's, measured round by round: the median and its 95 % interval. Above 1 is
            faster.
        memory_ratio: This precision's peak memory divided by the baseline's. Below 1 is smaller.
        loss_parity: Whether the loss is the same as the baseline's, judged against the spread of the baseline from seed to seed.
        reason: One sentence or two: what follows, and why.
    """

    precision: str
    baseline: str
    speedup: Interval | None
    memory_ratio: float | None
    loss_parity: LossParity
    reason: str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison(AbstractRecord):
    """Precisions measured side by side on one task.

    Attributes:
        schema: The number of the format.
        task: The name of the task.
        device: The machine.
        settings: How it was run.
        runs: One for each precision, the baseline first, and one for each policy.
        verdicts: One for each run after the baseline.
        conclusion: What to do, in one sentence with its reason.
        interrupted: Whether it was stopped before all steps had run.
        policies: What each policy does to the model, without what only a step shows.
        target: The device type whose numerics were rehearsed on the machine, such as `cuda`; empty where the machine's own were measured.
            After a rehearsal no run has times or memory, and no verdict a speed-up.
    """

    schema: int
    task: str
    device: Device
    settings: Settings
    runs: tuple[PrecisionRun, ...]
    verdicts: tuple[Verdict, ...]
    conclusion: str
    interrupted: bool
    policies: tuple[PolicyEffect, ...] = ()
    target: str = ""

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The comparison that a JSON text holds.

        Raises:
            RecordFormatError: The text is no comparison, or one of another schema.
        """
        plain = parse(text, cls)
        # Looked at first: a format of another number may well have other fields.
        schema = plain.get("schema") if isinstance(plain, dict) else None
        if isinstance(schema, int) and schema != SCHEMA:
            raise RecordFormatError(
                f"This comparison has schema {schema}; this halfstep reads schema {SCHEMA}. "
                "Read it with the halfstep that wrote it, or a newer one."
            )
        return structure(plain, cls)
