"""One precision on one seed: its own model, optimizer, batches and random numbers."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from halfstep._torch import BeforeEachOperation
from halfstep.batch import move_batch, sample_count
from halfstep.engine import MixedPrecision
from halfstep.errors import HalfstepError, HalfstepWarning
from halfstep.hardware import StaticMemory, StepProfile, profile_step, static_memory, synchronize
from halfstep.numerics import lowered_ops, rehearse
from halfstep.policy import Policy
from halfstep.precision import rehearsed_dtype
from halfstep.randomness import RandomState, seed_everything
from halfstep.records import StepRecord
from halfstep.scaler import LossScaler
from halfstep.task import BatchStream, TaskFactory, blamed, make_task

__all__ = ["Contender", "ProfiledStep", "RunOptions", "StepOverdueError", "TimedStep"]


@final
class StepOverdueError(HalfstepError, TimeoutError):
    """A step took longer than it may, and was stopped."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How a precision is run.

    Attributes:
        device: Where.
        channels_last: Whether the model and 4-d inputs are laid out channels last.
        compile: Whether the model runs through `torch.compile`.
        loss_scaling: Whether fp16 uses a loss scaler.
        target: The device type whose numerics each step rehearses on the CPU; `None` for those of the device itself.
    """

    device: torch.device
    channels_last: bool
    compile: bool
    loss_scaling: bool
    target: str | None = None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """One step and how long it took.

    Attributes:
        seconds: Wall-clock time of the step, without making the batch; the device was waited for before and after.
        samples: The number of samples in its batch; `None` if no tensor tells.
        record: What the engine says of the step.
    """

    seconds: float
    samples: int | None
    record: StepRecord


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledStep:
    """What one step, seen by the profiler, needed.

    Attributes:
        profile: Where its time went.
        memory: The bytes that training holds between steps.
    """

    profile: StepProfile
    memory: StaticMemory


@final
class Contender:
    """A training run of one precision, or policy, from one seed that takes turns with others in the same process.

    The generators of random numbers are global; a contender puts its own state in before each step and takes it out after, so that its
    losses are those of a run alone. The model is put into training mode.

    Args:
        factory: Makes the task.
        precision: A precision, or the name of a policy.
        policy: The policy of that name; `None` for a precision.
        seed: The seed.
        options: How it is run.

    Raises:
        TaskError: The task cannot be made, or not be moved to the device.
        InvalidTypeError: The optimizer is of a kind that no engine drives.
        ConfigurationError: The model has nothing to train, or the policy does not fit it.
    """

    def __init__(self, factory: TaskFactory, *, precision: str, policy: Policy | None = None, seed: int, options: RunOptions) -> None:
        self.precision = precision
        self._options = options
        self._random = RandomState.capture()
        with self._own_randomness(), blamed(f"{precision} could not be set up with seed {seed}"):
            seed_everything(seed)
            task = make_task(factory, seed=seed)
            self._stream = BatchStream(task.batches)
            task.model.to(device=options.device)
            if task.optimizer.state and options.device.type != "cpu":
                # Some optimizers, such as Adagrad, make their state at once; loading it puts each tensor where its parameter is now.
                task.optimizer.load_state_dict(task.optimizer.state_dict())
            if options.channels_last:
                _lay_out_channels_last(task.model)
            task.model.train()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", HalfstepWarning)  # To run fp16 without loss scaling, or emulated, was asked for.
                self._engine = MixedPrecision(
                    task.model,
                    task.optimizer,
                    policy or precision,
                    # Where nothing runs in fp16, a scaler that is switched off is none.
                    scaler=None if options.loss_scaling else LossScaler(enabled=False),
                    max_consecutive_skips=None,  # That all steps are skipped is a result.
                )
            self._forward: nn.Module | Callable[..., Any] = torch.compile(task.model) if options.compile else task.model
        self._layout = torch.channels_last if options.channels_last else torch.preserve_format
        self._task = task
        self.losses: list[float] = []
        self.skipped_at: list[int] = []
        self.final_scale: float | None = None

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters that it trains."""
        return self._task.model.parameters()

    def close(self) -> None:
        """Takes the policy away: its operations are registered for the whole process."""
        if self._engine.policy_handle is not None:
            self._engine.policy_handle.remove()

    def step(self, *, limit_s: float | None = None) -> TimedStep:
        """Runs one training step.

        Args:
            limit_s: The step is stopped, between two operations, when it takes longer; `None` for no limit.

        Raises:
            StepOverdueError: It took longer.
            TaskError: The task's code or an operation failed.
        """
        timed, _ = self._run(lambda run: (run(), None), limit_s=limit_s)
        return timed

    def profiled_step(self, *, limit_s: float | None = None) -> tuple[TimedStep, ProfiledStep]:
        """Runs one training step under the profiler; its time is no measure of a step without it.

        Raises:
            StepOverdueError: It took longer than the limit.
            TaskError: The task's code or an operation failed.
        """
        return self._run(self._profile, limit_s=limit_s)

    def _profile(self, run: Callable[[], StepRecord]) -> tuple[StepRecord, ProfiledStep]:
        memory = static_memory(model=self._task.model, optimizer=self._task.optimizer, batch=self._batch)
        record, profile = profile_step(run, device=self._options.device, lowered=lowered_ops())
        return record, ProfiledStep(profile=profile, memory=memory)

    def _run(
        self, observe: Callable[[Callable[[], StepRecord]], tuple[StepRecord, Any]], *, limit_s: float | None
    ) -> tuple[TimedStep, Any]:
        # Whatever a device has to complain about, it may say only at the next call: everything that talks to it is inside.
        with self._own_randomness(), blamed(f"{self.precision} failed in step {len(self.losses) + 1}"):
            self._batch = move_batch(next(self._stream), device=self._options.device, memory_format=self._layout)
            synchronize(self._options.device)
            start = time.perf_counter()
            # torch.compile does not trace through a dispatch mode, and compiling alone may take longer than the limit.
            with self._rehearsal(), _time_limit(None if self._options.compile else limit_s):
                record, seen = observe(lambda: self._engine.train_step(self._loss, self._batch))
            synchronize(self._options.device)
            seconds = time.perf_counter() - start
            self.losses.append(record.loss)
            self.final_scale = None if self._engine.scaler is None else self._engine.scaler.get_scale()
        if record.skipped:
            self.skipped_at.append(record.step)
        return TimedStep(seconds=seconds, samples=sample_count(self._batch), record=record), seen

    def _rehearsal(self) -> AbstractContextManager[object]:
        """What one step runs within. It reaches the whole process, so that it is left before another contender's turn."""
        if self._options.target is None:
            return nullcontext()
        return rehearse(self._options.target, rehearsed_dtype(self._engine.policy.precisions))

    def _loss(self, batch: Any) -> Tensor:
        return self._task.loss(self._forward, batch)

    @contextmanager
    def _own_randomness(self) -> Iterator[None]:
        outside = RandomState.capture()
        self._random.restore()
        try:
            yield
        finally:
            self._random = RandomState.capture()
            outside.restore()


def _lay_out_channels_last(model: nn.Module) -> None:
    # `model.to(memory_format=torch.channels_last)` refuses a model that has 5-d parameters, such as those of a Conv3d.
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.dim() == 4:
            tensor.data = tensor.data.contiguous(memory_format=torch.channels_last)


@contextmanager
def _time_limit(limit_s: float | None) -> Iterator[None]:
    if limit_s is None:
        yield
        return
    start = time.perf_counter()

    def check() -> None:
        spent = time.perf_counter() - start
        if spent > limit_s:
            raise StepOverdueError(f"was stopped after {spent:.1f} s in one step")

    with BeforeEachOperation(check):
        yield
