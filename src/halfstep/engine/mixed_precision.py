"""`MixedPrecision`: the order of a step, kept in one place."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.batch import split_batch
from halfstep.engine.setup import (
    Scheduler,
    check_accumulate,
    check_max_grad_norm,
    check_optimizer,
    check_scheduler,
    check_weights,
    model_device,
    settle_scaler,
)
from halfstep.errors import ConfigurationError, InvalidTypeError, StepOrderError
from halfstep.hardware import resolve_precision
from halfstep.policy import DTYPES
from halfstep.records import StepRecord
from halfstep.scaler import StepProbe

__all__ = ["MixedPrecision"]


@final
class MixedPrecision:
    """Training steps in mixed precision, in the right order: autocast, scale, backward, unscale, clip, step or skip, update, schedule.

    Weights stay in fp32; autocast chooses the precision of each operation. Loss scaling is used for fp16 alone, and with it a step whose
    gradients are not finite is skipped: parameters, optimizer state and schedule stay bit for bit as they were. fp32 and bf16 have the
    range of fp32, nothing is checked in them, and every step is taken.

    Gradients belong to one step: they are cleared before its first backward pass and after its last, and when a part of it raises.

    There are two ways to use it. `train_step(fn, *batch)` does everything. Or, in a loop of your own:

        with amp.autocast():
            loss = criterion(model(x), y)
        amp.backward(loss)
        record = amp.step()  # None until `accumulate` micro-batches were seen

    Args:
        model: The model, on the device that it is to train on, with its trainable parameters in fp32.
        optimizer: The optimizer over its parameters.
        precision: `fp32`, `bf16`, `fp16`, or `auto` for the fastest that the device computes in hardware, bf16 before fp16.
        scheduler: A learning-rate scheduler that moves once per optimizer step; it waits when a step is skipped.
        max_grad_norm: Gradients are clipped to this L2 norm, after unscaling; `math.inf` only measures the norm; `None` does
            neither.
        accumulate: Micro-batches in one step. `train_step` splits its batch into so many; `backward` expects so many calls.
        scaler: The loss scaler for fp16; `None` for `torch.amp.GradScaler` with its defaults. A disabled one means no loss scaling. It
            belongs to one engine: several that share it would change the scale under each other's gradients.

    Attributes:
        precision: The precision in use, `auto` resolved.
        device: The model's device.
        scaler: The scaler in use; `None` for fp32, bf16, and fp16 without loss scaling.

    Raises:
        InvalidTypeError: An argument is of the wrong type.
        ConfigurationError: An argument has a value that is not allowed, or that does not go with another.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Linear(4, 1)
        >>> amp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), precision="bf16")
        >>> x, y = torch.randn(8, 4), torch.randn(8, 1)
        >>> records = [amp.train_step(lambda x, y: nn.functional.mse_loss(model(x), y), x, y) for _ in range(3)]
        >>> [record.step for record in records], records[-1].loss < records[0].loss
        ([1, 2, 3], True)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        precision: str = "auto",
        *,
        scheduler: Scheduler | None = None,
        max_grad_norm: float | None = None,
        accumulate: int = 1,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.device = model_device(model)
        check_weights(model)
        check_optimizer(optimizer)
        check_scheduler(scheduler)
        check_max_grad_norm(max_grad_norm)
        check_accumulate(accumulate)
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.max_grad_norm = max_grad_norm
        self.accumulate = accumulate
        self.precision = resolve_precision(precision, device=self.device)
        self.scaler = settle_scaler(scaler, requested=precision, precision=self.precision, device=self.device)
        self._probe = StepProbe(optimizer)
        self._steps = 0
        self._micro_batches = 0
        self._loss: Tensor | None = None
        self._started: float | None = None

    def autocast(self) -> torch.autocast:
        """A new autocast region in the engine's precision; put the forward pass and the loss in it.

        With fp32 it is a region with autocast switched off. Each call makes a new object, since one such object can be neither nested
        nor shared by threads. In an evaluation, put `torch.no_grad()` around it rather than inside it: then its time does not count as a
        part of the next step.
        """
        if self._started is None and torch.is_grad_enabled():  # Without gradients it is an evaluation, which belongs to no step.
            self._started = time.perf_counter()
        if self.precision == "fp32":
            return torch.autocast(self.device.type, enabled=False)
        return torch.autocast(self.device.type, dtype=DTYPES[self.precision])

    def backward(self, loss: Tensor) -> None:
        """Adds the gradients of one micro-batch: the loss is divided by `accumulate` and multiplied by the loss scale.

        The first one of a step clears what another loss left in the gradients, as a generator's loss does in its discriminator.

        Args:
            loss: The loss of the micro-batch, unscaled: a tensor without dimensions.

        Raises:
            InvalidTypeError: The loss is no tensor.
            ConfigurationError: The loss is no scalar, or needs no gradient.
            StepOrderError: `accumulate` micro-batches were seen already, and `step` was not called.
        """
        if self._micro_batches == self.accumulate:
            raise StepOrderError(
                f"backward() was called {self.accumulate + 1} times without step(), but accumulate={self.accumulate}. "
                "Call step() after each backward(); it returns None until the last micro-batch of a step."
            )
        self._backward(loss, divisor=self.accumulate)

    def _backward(self, loss: Tensor, *, divisor: float) -> None:
        _check_loss(loss)
        if self._started is None:  # The forward pass ran in an autocast region that is not this engine's.
            self._started = time.perf_counter()
        if not self._micro_batches:
            self._clear_gradients()
        part = loss if divisor == 1 else loss / divisor
        try:
            (part if self.scaler is None else self.scaler.scale(part)).backward()  # type: ignore[no-untyped-call]
        except BaseException:
            self._abandon()  # Some gradients have this micro-batch in them and some do not.
            raise
        seen = part.detach()
        self._loss = seen if self._loss is None else self._loss + seen
        self._micro_batches += 1

    def step(self) -> StepRecord | None:
        """Ends a micro-batch; after the last of a step it unscales, clips, steps the optimizer or skips, and clears the gradients.

        Returns:
            What the step did, or `None` when more micro-batches belong to it.

        Raises:
            StepOrderError: `backward` was not called.

        An exception in the optimizer, in one of its hooks or in the scheduler passes through; the gradients are cleared, and the next
        step starts afresh.
        """
        loss, started = self._loss, self._started
        if loss is None or started is None:
            raise StepOrderError("step() was called before backward(loss): there are no gradients to step with.")
        if self._micro_batches < self.accumulate:
            return None
        lr = self.optimizer.param_groups[0].get("lr", math.nan)
        if isinstance(lr, Tensor):
            lr = lr.clone()  # The scheduler writes the next one into it.
        try:
            taken, norm, scale = self._apply()
            if taken and self.scheduler is not None:
                self.scheduler.step()
        finally:
            self._abandon()
        self._steps += 1
        return self._record(loss, norm=norm, lr=lr, scale=scale, skipped=not taken, started=started)

    def train_step(self, fn: Callable[..., Tensor], *batch: Any) -> StepRecord:
        """One whole optimizer step.

        With `accumulate` above 1 the batch is split along the first dimension of its tensors into so many micro-batches, which are run
        one after the other; each one's loss counts by its share of the samples, so a mean loss comes out as on the whole batch.

        Args:
            fn: Called as `fn(*batch)` under autocast; runs the model and returns the loss, a scalar tensor.
            batch: What `fn` takes, already on the model's device.

        Returns:
            What the step did.

        Raises:
            StepOrderError: Some micro-batches of another step are pending.
            InvalidTypeError: `fn` is no function, or the loss is no tensor.
            ConfigurationError: The loss is no scalar or needs no gradient, or the batch cannot be split.

        An exception in `fn` passes through; the gradients are cleared, and the next step starts afresh.
        """
        if self._micro_batches:
            raise StepOrderError(
                f"train_step() was called after {self._micro_batches} of accumulate={self.accumulate} micro-batches by hand. "
                "Finish them with backward() and step(), or use train_step() alone: it splits its batch itself."
            )
        if not callable(fn):
            raise InvalidTypeError(f"train_step(fn, *batch) takes the function that computes the loss first, not a {type(fn).__name__}.")
        parts = [(batch, 1.0)] if self.accumulate == 1 else split_batch(batch, parts=self.accumulate)
        self._started = time.perf_counter()
        try:
            for part, share in parts:
                with self.autocast():
                    loss = fn(*part)
                self._backward(loss, divisor=1 / share)
            record = self.step()
        except BaseException:
            self._abandon()
            raise
        assert record is not None
        return record

    def _apply(self) -> tuple[bool, Tensor | None, float]:
        """Unscales, clips and steps. Returns whether the step was taken, the norm of the gradients if it was measured, and the scale."""
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        scaler = self.scaler
        # A scaler asserts that it saw gradients. To have none is no error: a frozen part, or a phase that belongs to another engine.
        if scaler is None or all(parameter.grad is None for parameter in parameters):
            norm = self._clip(parameters)
            self.optimizer.step()
            return True, norm, 1.0 if scaler is None else scaler.get_scale()
        try:
            self._probe.unscale_with(scaler)
            # On an accelerator this waits for the gradients, and so does the scaler next: read here, it costs no wait of its own.
            scale = scaler.get_scale()
            # A scaler looks for infinities before it divides. Divided by a scale below 1, a finite gradient may become infinite.
            sound = scale >= 1 or all(bool(p.grad.isfinite().all()) for p in parameters if p.grad is not None)
            norm = self._clip(parameters)
            taken = sound and self._probe.step_with(scaler)
        except BaseException:
            # A scaler remembers how far a step got and would refuse the next one. Told which scale to use, it forgets.
            scaler.update(scaler.get_scale())
            raise
        scaler.update()
        return taken, norm, scale

    def _clip(self, parameters: list[nn.Parameter]) -> Tensor | None:
        if self.max_grad_norm is None:
            return None
        if math.isinf(self.max_grad_norm):  # To clip to it would turn gradients whose norm overflows into NaN, after the scaler's check.
            return nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        return nn.utils.clip_grad_norm_(parameters, self.max_grad_norm)

    def _record(self, loss: Tensor, *, norm: Tensor | None, lr: float | Tensor, scale: float, skipped: bool, started: float) -> StepRecord:
        if self.device.type == "cpu":
            return StepRecord(
                step=self._steps,
                skipped=skipped,
                scale=scale,
                loss=loss.item(),
                grad_norm=None if norm is None else norm.item(),
                lr=float(lr),
                step_time_s=time.perf_counter() - started,
                memory_bytes=None,
                precision=self.precision,
            )
        kept = loss.clone()  # With CUDA graphs, the next step writes into the memory of this one's loss.
        # On an accelerator, reading a value would wait for the device.
        return StepRecord.deferred(
            lambda: {"loss": kept.item(), "grad_norm": None if norm is None else norm.item(), "lr": float(lr)},
            step=self._steps,
            skipped=skipped,
            scale=scale,
            step_time_s=time.perf_counter() - started,
            memory_bytes=torch.cuda.max_memory_allocated(self.device),
            precision=self.precision,
        )

    def _abandon(self) -> None:
        """Forgets the micro-batches so far and their gradients."""
        self._clear_gradients()
        self._micro_batches = 0
        self._loss = None
        self._started = None

    def _clear_gradients(self) -> None:
        # What optimizer.zero_grad() does, without its entry in torch's profiler, which takes longer than everything else that an engine
        # adds to a step.
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


def _check_loss(loss: object) -> None:
    if not isinstance(loss, Tensor):
        raise InvalidTypeError(f"The loss must be a scalar tensor, not a {type(loss).__name__}.")
    if loss.dim():
        raise ConfigurationError(
            f"The loss must be a scalar tensor, not one of shape {tuple(loss.shape)}. Reduce it, for example with loss.mean()."
        )
    if not loss.requires_grad:
        raise ConfigurationError(
            "The loss needs no gradient, so backward() would change nothing: it was computed under no_grad, detached, rebuilt from a "
            "Python number, or no parameter that it depends on requires a gradient."
        )
