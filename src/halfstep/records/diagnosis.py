"""Why a training step broke: the cause, where it began, what was tried, and what helps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, final, get_args

from halfstep.records.base import AbstractRecord
from halfstep.records.trace import OpRecord

__all__ = [
    "CAUSES",
    "DIAGNOSIS_SCHEMA",
    "Cause",
    "Deviation",
    "Diagnosis",
    "Experiment",
    "NonFiniteTensor",
    "Remedy",
    "SourceLine",
    "StuckTensor",
    "VanishedGradients",
]

# The number of the format of a diagnosis on disk.
DIAGNOSIS_SCHEMA = 1

Cause = Literal["healthy", "data", "parameters", "model", "forward", "scale", "backward", "precision", "underflow", "update"]

CAUSES: Final[tuple[Cause, ...]] = get_args(Cause)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy(AbstractRecord):
    """What to do about a cause.

    Attributes:
        text: What to do, in a sentence.
        override: The overrides that do it, as the text of a policy has them, such as `decoder.3.wo=fp32`, several with semicolons between;
            `None` where it is no matter of a policy.
        verified: Whether the step that failed was replayed with it, and three further steps, and all of them were clean.

    Example:
        >>> Remedy(text="Run the module wo in fp32.", override="wo=fp32", verified=True).verified
        True
    """

    text: str
    override: str | None
    verified: bool


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment(AbstractRecord):
    """One thing that was tried to tell causes apart.

    Attributes:
        question: What it was to tell, as a question.
        precision: The precision or policy of the replay, as text; empty where nothing was replayed.
        scale: The loss scale of the replay; `None` where nothing was replayed.
        is_clean: Whether the loss and all gradients were finite; for what was not replayed, whether nothing was found.
        answer: What came out, in a sentence.
        origin: The operation that the answer is about; `None` where it is about none.

    Example:
        >>> Experiment(
        ...     question="Is it finite in fp32?", precision="fp32", scale=1.0, is_clean=True, answer="It is.", origin=None
        ... ).is_clean
        True
    """

    question: str
    precision: str
    scale: float | None
    is_clean: bool
    answer: str
    origin: OpRecord | None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NonFiniteTensor(AbstractRecord):
    """A tensor that held infinite values or NaN before the step began.

    Attributes:
        name: Such as `batch[0]`, `batch['image']`, or the name of a parameter or buffer.
        kind: `input`, `parameter` or `buffer`.
        nonfinite: How many values are infinite or NaN.
        elements: Of how many.
        since: The step whose update made it so, from 1; `None` where that is not known.

    Example:
        >>> NonFiniteTensor(name="batch[0]", kind="input", nonfinite=3, elements=64, since=None).nonfinite
        3
    """

    name: str
    kind: Literal["input", "parameter", "buffer"]
    nonfinite: int
    elements: int
    since: int | None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation(AbstractRecord):
    """How far a result in low precision is from the same result in fp32.

    Attributes:
        error: The relative error of a sample of the values: the L2 norm of the difference over that of the values in fp32.
        input_error: The largest relative error among what it was computed from.
        loss_error: The relative error of the loss.
        gradient_error: The relative error of all gradients together, in L2 norm.

    Example:
        >>> Deviation(error=1.2, input_error=0.004, loss_error=0.1, gradient_error=0.8).error
        1.2
    """

    error: float
    input_error: float
    loss_error: float
    gradient_error: float


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class VanishedGradients(AbstractRecord):
    """Gradients of one module's own parameters that are zero in low precision and not in fp32.

    Attributes:
        module: Its path; empty for the model itself.
        zeros: How many elements became zero.
        elements: Of how many that are not zero in fp32.

    Example:
        >>> VanishedGradients(module="head", zeros=50, elements=100).share
        0.5
    """

    module: str
    zeros: int
    elements: int

    @property
    def share(self) -> float:
        """The share that became zero."""
        return self.zeros / self.elements if self.elements else 0.0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StuckTensor(AbstractRecord):
    """A tensor in half precision that an update does not change, since it is smaller than half a unit in the last place.

    Attributes:
        name: The name of the parameter or buffer.
        dtype: Its dtype, such as `bfloat16`.
        stuck: How many elements did not change in one step, and would have in fp32.
        elements: Of how many that would have.

    Example:
        >>> StuckTensor(name="head.weight", dtype="bfloat16", stuck=90, elements=100).share
        0.9
    """

    name: str
    dtype: str
    stuck: int
    elements: int

    @property
    def share(self) -> float:
        """The share that did not change."""
        return self.stuck / self.elements if self.elements else 0.0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLine(AbstractRecord):
    """A line of source code.

    Attributes:
        number: Its number, from 1.
        text: The line, without its end.
        is_marked: Whether it is the one that is meant.

    Example:
        >>> SourceLine(number=12, text="scores = q @ k", is_marked=True).number
        12
    """

    number: int
    text: str
    is_marked: bool


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis(AbstractRecord):
    """What is wrong with a training step, why, and what helps.

    Causes, each told from the others by experiments, which `evidence` holds:

    - `healthy`: nothing was found;
    - `data`: the batch holds values that are not finite;
    - `parameters`: parameters or buffers were not finite before the step;
    - `model`: it breaks in fp32 as well, so it is no matter of precision;
    - `forward`: an operation of the forward pass is not finite in low precision, and is in fp32;
    - `scale`: the loss scale is too high, and nothing else is wrong;
    - `backward`: a gradient overflows at every loss scale;
    - `precision`: everything is finite, but one operation loses its accuracy;
    - `underflow`: gradients become zero;
    - `update`: parameters are stored in half precision, and updates are too small to change them.

    Attributes:
        schema: The number of the format.
        torch: The version of torch that ran.
        task: The name of the task, or of the function that computes the loss.
        precision: The precision or policy, as text.
        target: The device type whose numerics were rehearsed; empty where none were.
        device: Where it ran.
        cause: What is wrong.
        step: The step that the diagnosis is about, from 1.
        steps: How many steps were trained, that one included.
        skips: How many of them were skipped.
        loss: The loss of the step, in low precision; `None` where none was computed.
        scale: The loss scale of the step; 1 without loss scaling.
        passing_scale: The largest power of two below it at which the step is clean, or above it at which gradients do not vanish; `None`
            where no other scale helps, or none was looked for.
        origin: The first operation that went wrong; `None` where it was none.
        first_nan: The first operation that made NaN, where that came later than the origin.
        explanation: Why it went wrong, in a few sentences.
        remedies: What helps, the best first.
        evidence: What was tried, in order.
        replays: How often the step was replayed, the three further steps after a remedy not counted.
        is_reproduced: Whether a step that had failed failed again when it was replayed; true where no step had failed.
        tensors: For `data` and `parameters`, the tensors.
        deviation: For `precision`, how far the result is from that in fp32.
        vanished: For `underflow`, the modules, the one with the largest share first.
        stuck: For `update`, the tensors, the one with the largest share first.
        excerpt: The source code around the origin's line; empty where it cannot be read.
        interrupted: Whether it was ended before its time, by Ctrl-C.

    Example:
        >>> diagnosis = Diagnosis(
        ...     schema=1, torch="2.13.0", task="digits", precision="fp16", target="cuda", device="cpu", cause="scale", step=1, steps=1,
        ...     skips=1, loss=2.3, scale=65536.0, passing_scale=1024.0, origin=None, first_nan=None, explanation="",
        ...     remedies=(), evidence=(), replays=3, is_reproduced=True, tensors=(), deviation=None, vanished=(), stuck=(),
        ...     excerpt=(), interrupted=False,
        ... )
        >>> diagnosis.is_finding, diagnosis.verified
        (True, False)
    """

    schema: int
    torch: str
    task: str
    precision: str
    target: str
    device: str
    cause: Cause
    step: int
    steps: int
    skips: int
    loss: float | None
    scale: float
    passing_scale: float | None
    origin: OpRecord | None
    first_nan: OpRecord | None
    explanation: str
    remedies: tuple[Remedy, ...]
    evidence: tuple[Experiment, ...]
    replays: int
    is_reproduced: bool
    tensors: tuple[NonFiniteTensor, ...]
    deviation: Deviation | None
    vanished: tuple[VanishedGradients, ...]
    stuck: tuple[StuckTensor, ...]
    excerpt: tuple[SourceLine, ...]
    interrupted: bool

    @property
    def is_finding(self) -> bool:
        """Whether something is wrong."""
        return self.cause != "healthy" or not self.is_reproduced

    @property
    def verified(self) -> bool:
        """Whether a remedy was tried and holds."""
        return any(remedy.verified for remedy in self.remedies)
