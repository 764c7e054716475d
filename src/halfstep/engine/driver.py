"""The step in progress: what has been computed for it so far, how it ends, and how it is undone."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.distributed import GradientSync, Ranks
from halfstep.engine.audit import check_no_autocast, check_weights
from halfstep.engine.buffers import BufferGuard
from halfstep.engine.closures import ClosureKind, NonFiniteGradientError, step_with_closure
from halfstep.engine.gradient_step import GradientStep, Outcome
from halfstep.engine.gradients import Gradients
from halfstep.engine.guard import StepGuard
from halfstep.engine.inquiry import SkipInquiry
from halfstep.engine.progress import StepProgress
from halfstep.engine.recording import Recorder, current_lr
from halfstep.engine.setup import Scheduler, check_loss
from halfstep.errors import ConfigurationError, StepOrderError, UnscaledBackwardError
from halfstep.records import StepRecord

__all__ = ["StepDriver"]

Batch = TypeVar("Batch")


@final
class StepDriver:
    """The step in progress of one engine.

    Args:
        model: The model.
        optimizers: The optimizers that step together.
        gradients: Theirs.
        end: How a step ends.
        recorder: How it is recorded.
        accumulate: Micro-batches in one step.
        scaler: What losses are multiplied with; `None` where they are not scaled.
        ranks: The processes that train together; `None` when this one trains alone.
        guards_buffers: Whether a skipped step puts the model's buffers back.
        schedulers: They move with each step that is taken.
        callbacks: They are called after each step that is taken.
        recomputation: Makes a region for a backward pass, in which a part of the forward pass may run again.

    Attributes:
        accumulate: Micro-batches in one step.
        goes_on: Whether a checkpoint has brought back the micro-batches that it has seen.
        inquiry: Finds out why steps are skipped; `None` where nobody asked.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        gradients: Gradients,
        end: GradientStep,
        recorder: Recorder,
        accumulate: int,
        scaler: torch.amp.GradScaler | None,
        ranks: Ranks | None,
        guards_buffers: bool,
        schedulers: Sequence[Scheduler],
        callbacks: Sequence[Callable[[StepRecord], object]],
        recomputation: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._model = model
        self._optimizer = optimizers[0]
        self._gradients = gradients
        self._end = end
        self._recorder = recorder
        self.accumulate = accumulate
        self._scaler = scaler
        self._sync = None if ranks is None else GradientSync(model)
        self._guards_buffers = guards_buffers
        self._buffers = BufferGuard.of(model) if guards_buffers else None
        if self._buffers is not None:
            self._buffers.remember()
        self._schedulers, self._callbacks = tuple(schedulers), tuple(callbacks)
        self._recomputation = recomputation
        self.inquiry: SkipInquiry | None = None
        self._turn = end.turn()
        self._guard = StepGuard(optimizers, owner=self)
        self.steps = 0
        self.ends_early = False
        self._forget()

    def _forget(self) -> None:
        self._guard.disarm()
        self.micro_batches = 0
        self.unscaled = False
        self._loss: Tensor | None = None
        self._started: float | None = None
        self._buffers_remembered = False
        self._held = False
        self.goes_on = False
        self._in_the_middle = ""
        self._scale: tuple[Tensor, int] | None = None

    @property
    def is_complete(self) -> bool:
        """Whether no micro-batch is missing."""
        return self.micro_batches >= self.accumulate or self.ends_early

    def start(self, *, remembers: bool = True) -> None:
        """The first forward pass of a step is about to begin; nothing happens if it has begun."""
        if self._started is None:
            self._started = time.perf_counter()
            if self._buffers is not None and remembers:
                self._buffers.remember()
                self._buffers_remembered = True
            if self.inquiry is not None:
                self.inquiry.start()

    def restart(self) -> None:
        """A whole step is about to begin, whatever began before it."""
        self._forget()
        self.start()

    def hold_until_last(self) -> None:
        """Keeps gradients from being reduced across ranks before the last micro-batch of a step."""
        if self._sync is None or self.accumulate == 1:
            return
        self._held = not self.ends_early and self.micro_batches + 1 < self.accumulate
        if self._held:
            self._sync.hold()
        else:
            self._sync.release()

    def add(self, loss: Tensor, *, divisor: float) -> None:
        """Computes the gradients of one micro-batch and adds them to those of the others.

        Args:
            loss: Unscaled, a tensor without dimensions.
            divisor: What its gradients are divided by.
        """
        check_loss(loss)
        if self._sync is not None:
            self._sync.check_no_join()
        if self._started is None:  # The forward pass ran in an autocast region that is not this engine's.
            self._started = time.perf_counter()
        part = loss if divisor == 1 else loss / divisor
        try:
            if self.micro_batches:
                self._check_untouched()
            else:
                self._gradients.clear()
                if self._turn is not None:
                    self._turn.begin()
            self.hold_until_last()
            whole, self._in_the_middle = self._in_the_middle, self._in_the_middle or "backward()"
            with self._recomputation():
                self._backward(part if self._scaler is None else self._scaler.scale(part))
            self._in_the_middle = whole
        except BaseException:
            self.abandon()  # Some gradients have this micro-batch in them and some do not.
            raise
        if self._sync is not None:
            self._sync.release()  # A backward pass of somebody else is none of an engine's business.
        seen = part.detach()
        self._loss = seen if self._loss is None else self._loss + seen
        self.micro_batches += 1
        self._guard.arm()
        if self._scaler is not None:
            self._gradients.remember()
            self._scale = self._end.scale_version()

    def _backward(self, loss: Tensor) -> None:
        kind = self._end.device.type
        if not torch.is_autocast_enabled(kind):
            loss.backward()  # type: ignore[no-untyped-call]
            return
        # In a region, derivatives of what was computed in fp32 would be computed in half precision.
        with torch.autocast(kind, enabled=False):
            loss.backward()  # type: ignore[no-untyped-call]

    def check_pending(self, call: str) -> None:
        """Accepts a call that ends a step.

        Raises:
            StepOrderError: There is no step to end, or an autocast region is active.
            UnscaledBackwardError: There are gradients that no loss of this step has.
        """
        try:
            if self._loss is None:
                if self._scaler is not None and self._gradients.tensors():
                    raise UnscaledBackwardError(
                        f"{call} found gradients that amp.backward() did not compute. loss.backward() leaves them unscaled, and divided by "
                        "the loss scale they would vanish: call amp.backward(loss). They were cleared; nothing was stepped."
                    )
                raise StepOrderError(f"{call} was called before backward(loss): there are no gradients to step with.")
            check_no_autocast(self._end.device, call=call)
        except BaseException:
            self.abandon()
            raise

    def _check_untouched(self) -> None:
        if self._scaler is not None and not self.unscaled:
            self._gradients.check_untouched()
            now, before = self._end.scale_version(), self._scale
            if before is not None and (now[0] is not before[0] or now[1] != before[1]):
                raise UnscaledBackwardError(
                    f"The loss scale was changed after amp.backward(), so that the gradients of {self.micro_batches} of "
                    f"accumulate={self.accumulate} micro-batches are multiplied by another one than step() divides by. Leave update() to "
                    "the engine, and set a scale or load a state between steps. They were cleared; nothing was stepped."
                )

    def unscale(self) -> None:
        """Unscales the gradients ahead of the end of the step, in which they are checked again."""
        try:
            self._check_untouched()
            self._reduce_held()
            # Whoever looks at them or clips them shall have the mean.
            self._end.unscale(self._gradients.tensors(), factor=self._end.factor(self.micro_batches, of=self.accumulate))
        except BaseException:
            self.abandon()
            raise
        self.unscaled = True

    def parameters(self) -> dict[str, nn.Parameter]:
        """What the optimizers train, by name."""
        return self._gradients.named(self._model)

    def progress(self) -> StepProgress | None:
        """What has been computed for the step in progress so far; `None` between two steps."""
        if self._in_the_middle:
            raise StepOrderError(f"The step in progress cannot be saved in the middle of {self._in_the_middle}, such as in a hook.")
        if self.unscaled:
            raise StepOrderError("The step in progress cannot be saved between unscale_gradients() and step(). Call step() first.")
        if self._turn is not None:
            self._turn.check_settled()
        if self._started is None:
            return None
        return StepProgress(
            micro_batches=self.micro_batches,
            loss=self._loss,
            gradients={name: each.grad for name, each in self.parameters().items() if each.grad is not None},
            is_held=self._held,
            held_back=self._sync.held_back() if self._held and self._sync is not None else {},
            began=self._buffers_remembered,
            buffers={} if self._buffers is None else self._buffers.remembered(),
        )

    def go_on(self, progress: StepProgress | None) -> None:
        """Goes on from a model whose values were loaded, in the middle of a step where there is one."""
        self._forget()
        if self._buffers is not None:
            self._buffers.remember()
            self._buffers.recall({} if progress is None else progress.buffers)
        if progress is None:
            return
        self.start(remembers=False)
        self._buffers_remembered = progress.began
        if not progress.micro_batches:
            return
        self._gradients.put(progress.gradients, self._model)
        if self._turn is not None:
            self._turn.begin()
        self._held = progress.is_held
        if self._held and self._sync is not None:
            self._sync.hold()
            self._sync.hold_back(progress.held_back)
        self._loss, self.micro_batches, self.goes_on = progress.loss, progress.micro_batches, True
        self._guard.arm()
        if self._scaler is not None:
            self._gradients.remember()
            self._scale = self._end.scale_version()

    def _reduce_held(self) -> None:
        if self._held and self._sync is not None:
            self._sync.reduce_held(self._gradients.parameters())
            self._held = False

    def finish(self) -> StepRecord:
        """Ends the step with the micro-batches that there are; the gradients are the mean over those."""
        loss, started, lr = self._loss, self._started, current_lr(self._optimizer)
        assert loss is not None
        assert started is not None
        share = self.accumulate / self.micro_batches
        self._in_the_middle = "step()"
        try:
            self._check_untouched()
            self._reduce_held()
            self._guard.disarm()
            factor = 1.0 if self.unscaled else self._end.factor(self.micro_batches, of=self.accumulate)
            outcome = self._end.take(factor=factor, unscaled=self.unscaled)
        except BaseException as error:
            self.abandon()
            if isinstance(error, ConfigurationError):
                check_weights(self._model)  # It names a parameter that was made half since the engine was.
            raise
        return self._conclude(outcome, loss=loss if share == 1 else loss * share, lr=lr, started=started)

    def attempt(self, compute: Callable[[], None], *, kind: ClosureKind) -> StepRecord:
        """A whole step.

        Args:
            compute: Computes all micro-batches of the step, by `add`.
            kind: Which gradients the optimizer asks for by itself.
        """
        try:
            self.restart()
            self._in_the_middle = "train_step()"
            if kind != "none":
                return self.finish_with_closure(compute, kind=kind)
            compute()
            return self.finish()
        except BaseException:
            self.abandon()
            raise

    def finish_with_closure(self, compute: Callable[[], None], *, kind: ClosureKind) -> StepRecord:
        """A whole step of an optimizer that computes gradients several times.

        Args:
            compute: Computes all micro-batches of the step, by `add`.
            kind: Which gradients the optimizer asks for.
        """
        scaling = self._end.scaling
        started, lr = self._started or time.perf_counter(), current_lr(self._optimizer)
        seen: list[tuple[Tensor, Tensor | None]] = []

        def evaluate() -> Any:
            self._gradients.clear()
            self.micro_batches, self._loss = 0, None
            with torch.enable_grad():
                compute()
            self._guard.disarm()
            norm = self._end.judge()
            loss = self._loss
            seen.append((loss, norm))  # type: ignore[arg-type]
            if scaling is not None and scaling.verdict(self._end.device).item():
                raise NonFiniteGradientError
            return loss

        skipped = step_with_closure(self._optimizer, evaluate, kind=kind)
        if not seen:
            raise StepOrderError(f"{type(self._optimizer).__name__}.step(closure) did not call its closure, so there is no gradient.")
        loss, norm = seen[0]
        outcome = Outcome(skipped=skipped, found_inf=None, norm=norm, scale=self._end.scale(reads_at_once=True))
        if scaling is not None:
            scaling.record(skipped=skipped)
        return self._conclude(outcome, loss=loss, lr=lr, started=started)

    def _conclude(self, outcome: Outcome, *, loss: Tensor, lr: float | Tensor, started: float) -> StepRecord:
        self.steps += 1
        if self.inquiry is not None:
            self.inquiry.end()
        self._settle_buffers(outcome)
        self._gradients.clear()
        self._forget()
        record = self._recorder.record(outcome, step=self.steps, loss=loss, lr=lr, started=started)
        if self._turn is not None:
            self._turn.end()
        if outcome.skipped is False and not outcome.empty:
            for scheduler in self._schedulers:
                scheduler.step()
            for callback in self._callbacks:
                callback(record)
        if self.inquiry is not None:
            self.inquiry.see(outcome)
        return record

    def _settle_buffers(self, outcome: Outcome) -> None:
        if self._buffers is not None:
            self._buffers.settle(skipped=outcome.skipped, found_inf=outcome.found_inf, began=self._buffers_remembered)
        elif self.steps == 1 and self._guards_buffers:  # The first forward pass may have made some.
            self._buffers = BufferGuard.of(self._model)

    def abandon(self) -> None:
        """Undoes what the step in progress did so far."""
        if self.inquiry is not None:
            self.inquiry.give_up()
        self._gradients.clear()
        if self._sync is not None:
            self._sync.forget()
        if self._turn is not None:
            self._turn.abandon()
        if self._buffers is not None and self._buffers_remembered:
            self._buffers.put_back()
        self._forget()
