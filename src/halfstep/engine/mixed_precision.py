"""`MixedPrecision`: the order of a step, kept in one place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.batch import map_tensors, split_batch
from halfstep.distributed import ranks_of
from halfstep.engine.audit import check_no_autocast, check_parameters, check_weights, warn_of_emulation
from halfstep.engine.closures import closure_kind
from halfstep.engine.driver import StepDriver
from halfstep.engine.gradient_step import GradientStep
from halfstep.engine.gradients import Gradients
from halfstep.engine.inquiry import SkipInquiry
from halfstep.engine.order import check_backward, check_complete, check_idle, lookahead
from halfstep.engine.policies import attach, scaled_precision, settle_policy
from halfstep.engine.recording import Recorder
from halfstep.engine.region import StepRegion
from halfstep.engine.setup import (
    Scheduler,
    as_callbacks,
    as_optimizers,
    as_schedulers,
    check_closure,
    check_settings,
    checking_scaler,
    model_device,
    settle_scaler,
)
from halfstep.engine.state import engine_state, engine_stats, load_engine_state
from halfstep.errors import InvalidTypeError
from halfstep.policy import Policy
from halfstep.randomness import RandomState
from halfstep.records import Diagnosis, ScalerStats, StepRecord

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["MixedPrecision"]

Batch = TypeVar("Batch")


@final
class MixedPrecision:
    """Training steps in mixed precision, in the right order: autocast, scale, backward, unscale, clip, step or skip, update, schedule.

    Weights stay in fp32; autocast chooses the precision of each operation. Loss scaling is used for fp16 alone. A step whose gradients are
    not finite is skipped: parameters, optimizer state, schedule and the model's buffers stay bit for bit as they were.

    Gradients belong to one step: they are cleared before its first backward pass and after its last, and when a part of it raises.

    There are two ways to use it. `train_step(fn, *batch)` does everything. Or, in a loop of your own:

        for x, y in amp.micro_batches(loader):
            with amp.autocast():
                loss = criterion(model(x), y)
            amp.backward(loss)
            record = amp.step()  # None until `accumulate` micro-batches were seen, or the loader ends

    On several ranks (DistributedDataParallel or fully_shard) the code is the same: a step is skipped on all of them or on none, norms are
    those of the whole model, and gradients are reduced once per step. Several engines may train parts of one system, each with a scaler of
    its own, or all with the same one, whose scale then moves once per round.

    Args:
        model: The model, on the device that it is to train on, with its trainable parameters in fp32.
        optimizer: The optimizer over its parameters; or several, which step together, or not at all.
        precision: `fp32`, `bf16`, `fp16`, or `auto` for the fastest that the device computes in hardware, bf16 before fp16; or a
            policy, as a `halfstep.Policy` or as text, which says it for each module and operation.
        scheduler: A learning-rate scheduler, or several, that move once per step that is taken.
        max_grad_norm: Gradients are clipped to this L2 norm, after unscaling; `math.inf` only measures it; `None` does neither.
        max_grad_value: Then each element is clamped to between minus this value and this value; `None` for no clamping.
        accumulate: Micro-batches in one step. `train_step` splits its batch into so many; `backward` expects so many calls.
        scaler: The loss scaler for fp16; `None` for a `LossScaler` with its defaults.
        on_step: A function, or several, to call after each step that is taken, such as an EMA's update; with the step's record if it has a
            positional parameter without a default.
        retries: How many times `train_step` tries a skipped step again, with the same batch and random numbers and the scale that the skip
            has lowered. Each try counts as a step. A batch that `fn` writes to is tried as it left it.
        skip_nonfinite: Whether fp32 and bf16 steps are skipped, too, when their gradients are not finite. To know it, the host waits for
            the device in each step unless the optimizer is fused.
        restore_buffers: Whether a skipped step puts buffers back, such as the statistics of batch normalization, which its forward pass
            has written to. It costs a copy of the buffers in memory, and the time to make it in each step.
        max_consecutive_skips: Skips in a row at which `step` raises, unless the scaler is one that was given; `None` for never.
        diagnose_after: Skips in a row at which the engine finds out why, says so in a warning, and goes on as if it had not: `train_step`
            replays the step, other loops and several ranks trace the next one. `None` for never.
        closure: Whether the optimizer's `step` takes a function that computes gradients again, as SAM's does. LBFGS is recognised.
        process_group: The ranks that train together, where the model does not show them; for pipelines and the like.

    Attributes:
        optimizers: The optimizers; `optimizer` is the first of them, whose learning rate the records show.
        precision: The precision in use, `auto` resolved; the default one of a policy.
        policy: The policy in use. Its overrides are applied to the model until `policy_handle.remove()`.
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

    def __init__(  # noqa: PLR0913 - a keyword for each thing that can be asked of a step
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        precision: str | Policy = "auto",
        *,
        scheduler: Scheduler | Sequence[Scheduler] | None = None,
        max_grad_norm: float | None = None,
        max_grad_value: float | None = None,
        accumulate: int = 1,
        scaler: torch.amp.GradScaler | None = None,
        on_step: Callable[..., object] | Sequence[Callable[..., object]] = (),
        retries: int = 0,
        skip_nonfinite: bool = True,
        restore_buffers: bool = True,
        max_consecutive_skips: int | None = 100,
        diagnose_after: int | None = None,
        closure: bool = False,
        process_group: ProcessGroup | None = None,
    ) -> None:
        self.device = model_device(model)
        self.ranks = ranks_of(model, process_group=process_group)  # It gathers no parameters, and scatters those that are gathered.
        check_weights(model)
        optimizers = as_optimizers(optimizer)
        check_parameters(model, optimizers)
        check_settings(
            max_grad_norm=max_grad_norm,
            max_grad_value=max_grad_value,
            accumulate=accumulate,
            retries=retries,
            max_consecutive_skips=max_consecutive_skips,
            diagnose_after=diagnose_after,
            skip_nonfinite=skip_nonfinite,
            restore_buffers=restore_buffers,
            closure=closure,
        )
        self.model = model
        self.optimizers, self.optimizer = optimizers, optimizers[0]
        self.scheduler = scheduler
        self.max_grad_norm = max_grad_norm
        self.max_grad_value = max_grad_value
        self.accumulate = accumulate
        self.retries = retries
        self.policy, requested = settle_policy(precision, device=self.device)
        self.precision = self.policy.resolved
        lowest = scaled_precision(self.policy)
        self.scaler = settle_scaler(
            scaler, requested=requested, precision=lowest, device=self.device, max_consecutive_skips=max_consecutive_skips
        )
        warn_of_emulation(lowest, device=self.device)
        self._closure = closure_kind(optimizers, closure=closure)
        check_closure(self._closure, optimizers=optimizers, ranks=self.ranks)
        self.checker = checking_scaler(max_consecutive_skips=max_consecutive_skips) if self.scaler is None and skip_nonfinite else None
        self._counting = self.scaler or self.checker
        schedulers, callbacks, gradients = as_schedulers(scheduler, optimizers=optimizers), as_callbacks(on_step), Gradients(optimizers)
        self._end = GradientStep(
            model=model,
            optimizers=optimizers,
            gradients=gradients,
            scaler=self._counting,
            ranks=self.ranks,
            max_grad_norm=max_grad_norm,
            max_grad_value=max_grad_value,
            # A schedule and callbacks follow at once. Who wants none of them waits for nothing.
            on_host=bool(schedulers or callbacks or retries),
            device=self.device,
            setup={"precision": str(self.policy), "accumulate": accumulate, "retries": retries, "optimizers": len(optimizers)},
        )
        self.policy_handle, self._region = attach(self.policy, model)
        self.driver = StepDriver(
            model=model,
            optimizers=optimizers,
            gradients=gradients,
            end=self._end,
            recorder=Recorder(precision=self.precision, device=self.device),
            accumulate=accumulate,
            scaler=self.scaler,
            ranks=self.ranks,
            guards_buffers=restore_buffers and self._counting is not None,
            schedulers=schedulers,
            callbacks=callbacks,
            recomputation=self.policy_handle.recomputation if self.policy_handle else nullcontext,
        )
        self.driver.inquiry = None if diagnose_after is None else SkipInquiry(self, limit=diagnose_after)

    @property
    def diagnosis(self) -> Diagnosis | None:
        """What was found out last about skipped steps; `None` where nothing was."""
        return None if self.driver.inquiry is None else self.driver.inquiry.diagnosis

    def autocast(self) -> torch.autocast:
        """A new autocast region in the engine's precision; put the forward pass and the loss in it.

        With fp32 it is a region with autocast switched off. Each call makes a new object, since one such object can be neither nested
        nor shared by threads. In an evaluation, put `torch.no_grad()` around it rather than inside it: then its time does not count as a
        part of the next step.

        An exception in a region gives up the step in progress: what the forward pass wrote into buffers is put back.
        """
        trains = torch.is_grad_enabled()  # Without gradients it is an evaluation, which belongs to no step.
        if trains:
            self.driver.start()
            self.driver.hold_until_last()
        return StepRegion(self.device.type, region=self._region, on_error=self.driver.abandon if trains else None)

    def micro_batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """The batches of a loader, one after the other, with the knowledge which of them is the last.

        With it, `step()` ends a group of micro-batches that the end of the loader cuts short: its gradients are the mean over those that
        there are, and on several ranks they are reduced once. With DistributedDataParallel the ranks may have come to different numbers of
        micro-batches in that group: all of them divide by the largest. It holds one batch more than the loop needs.
        """
        return lookahead(self.driver, iter(loader))

    def discard(self) -> None:
        """Gives up the step in progress, for a loop that leaves out a batch: gradients and buffers are as if it had not begun."""
        self.driver.abandon()

    def backward(self, loss: Tensor) -> None:
        """Adds the gradients of one micro-batch: the loss is divided by `accumulate` and multiplied by the loss scale.

        The first one of a step clears what another loss left in the gradients, as a generator's loss does in its discriminator.

        Args:
            loss: The loss of the micro-batch, unscaled: a tensor without dimensions.

        Raises:
            InvalidTypeError: The loss is no tensor.
            ConfigurationError: The loss is no scalar, or needs no gradient.
            StepOrderError: `accumulate` micro-batches were seen already, and `step` was not called; or gradients were unscaled already; or
                the engine has to compute them several times, for `retries` or a closure.
            UnscaledBackwardError: Somebody else has written to the gradients since the last micro-batch.
        """
        check_backward(self.driver, computes_again=self._closure != "none" or self.retries > 0, retries=self.retries)
        self.driver.add(loss, divisor=self.accumulate)

    def step(self) -> StepRecord | None:
        """Ends a micro-batch; after the last of a step it unscales, clips, steps the optimizer or skips, and clears the gradients.

        Returns:
            What the step did, or `None` when more micro-batches belong to it.

        Raises:
            StepOrderError: `backward` was not called, or this was called inside an autocast region.
            UnscaledBackwardError: There are gradients that `backward` did not compute.
            PersistentSkipsError: So many steps in a row were skipped as the scaler allows.
            RanksDisagreeError: The loss scales of the ranks are not the same.

        An exception in the optimizer, in one of its hooks or in the scheduler passes through; the gradients are cleared, and the next
        step starts afresh.
        """
        self.driver.check_pending("step()")
        return self.driver.finish() if self.driver.is_complete else None

    def flush(self) -> StepRecord | None:
        """Ends a step whose micro-batches are fewer than `accumulate`, at the end of an epoch; the gradients are the mean over those.

        Returns:
            What the step did, or `None` when no micro-batch is pending.

        Raises:
            StepOrderError: It was called inside an autocast region.
        """
        if not self.driver.micro_batches:
            return None
        self.driver.check_pending("flush()")
        return self.driver.finish()

    def train_step(self, fn: Callable[..., Tensor], *batch: Any) -> StepRecord:
        """One whole optimizer step.

        With `accumulate` above 1 the batch is split along the first dimension of its tensors into so many micro-batches, which are run
        one after the other; each one's loss counts by its share of the samples, so a mean loss comes out as on the whole batch.

        Args:
            fn: Called as `fn(*batch)` under autocast; runs the model and returns the loss, a scalar tensor.
            batch: What `fn` takes, already on the model's device.

        Returns:
            What the step did; with `retries`, what the last try did.

        Raises:
            StepOrderError: Some micro-batches of another step are pending, or this was called inside an autocast region.
            InvalidTypeError: `fn` is no function, or the loss is no tensor.
            ConfigurationError: The loss is no scalar or needs no gradient, or the batch cannot be split.
            PersistentSkipsError: So many steps in a row were skipped as the scaler allows.
            RanksDisagreeError: The loss scales of the ranks are not the same.

        An exception in `fn` passes through; the gradients are cleared, and the next step starts afresh.
        """
        check_idle(self.driver, "train_step()")
        if not callable(fn):
            raise InvalidTypeError(f"train_step(fn, *batch) takes the function that computes the loss first, not a {type(fn).__name__}.")
        check_no_autocast(self.device, call="train_step()")
        parts = [(batch, 1.0)] if self.accumulate == 1 else split_batch(batch, parts=self.accumulate)
        inquiry = self.driver.inquiry
        for attempt in range(self.retries + 1):
            random = RandomState.capture() if attempt < self.retries or (inquiry is not None and inquiry.is_near) else None
            record = self.driver.attempt(lambda: self._compute(fn, parts), kind=self._closure)
            if inquiry is not None:
                inquiry.replay(fn, parts, random=random, record=record)
            if attempt == self.retries or not record.skipped:
                break
            if random is not None:
                random.restore()
        return record

    def _compute(self, fn: Callable[..., Tensor], parts: Sequence[tuple[Any, float]]) -> None:
        for part, share in parts:
            with self.autocast():
                loss = fn(*part)
            self.driver.add(loss, divisor=1 / share)

    def scale(self, tensor: Tensor) -> Tensor:
        """The tensor multiplied by the loss scale; as it is where losses are not scaled.

        For gradients that are taken by hand, as of a gradient penalty:

            (grads,) = amp.unscale(torch.autograd.grad(amp.scale(out.sum()), inputs, create_graph=True))
            loss = loss + (grads.norm() - 1) ** 2
        """
        scaled: Tensor = tensor if self.scaler is None else self.scaler.scale(tensor)
        return scaled

    def unscale(self, tensors: Any) -> Any:
        """Tensors, or a nest of them, divided by the loss scale; it waits for no device, and gradients pass through it."""
        if self.scaler is None or self._end.scaling is None:
            return tensors
        inverse = self._end.scaling.scale_on(self.device).double().reciprocal().float()
        return map_tensors(lambda tensor: tensor * inverse, tensors)

    def unscale_gradients(self) -> None:
        """Divides the gradients by the loss scale now instead of in `step()`, for code that looks at them or changes them.

        `step()` checks them again before it uses them. Does nothing when they are unscaled already.

        Raises:
            StepOrderError: Micro-batches of this step are still to come, or none was seen.
            UnscaledBackwardError: There are gradients that `backward` did not compute.
        """
        self.driver.check_pending("unscale_gradients()")
        check_complete(self.driver, "unscale_gradients()")
        if not self.driver.unscaled:
            self.driver.unscale()

    def stats(self) -> ScalerStats:
        """Steps and skips so far, exact; reading them waits for the device once.

        Raises:
            ConfigurationError: The scaler is one of torch's, which does not count.
        """
        return engine_stats(self._counting, steps=self.driver.steps)

    def state_dict(self) -> dict[str, Any]:
        """What this engine goes on from, beside model, optimizer and schedule: the scaler's state and the number of steps.

        Raises:
            StepOrderError: Micro-batches are pending, whose gradients are no part of it.
        """
        check_idle(self.driver, "state_dict()")
        return engine_state(precision=self.precision, steps=self.driver.steps, scaler=self.scaler, checker=self.checker)

    def without_policy(self) -> AbstractContextManager[None]:
        """A block in which the model is as it was before the engine, for code that runs it under policies of its own."""
        return nullcontext() if self.policy_handle is None else self.policy_handle.suspended()

    def load_state_dict(self, state: Mapping[str, Any], *, adopt_settings: bool = False) -> None:
        """Goes on from a state; the precision may be another than it was saved in, which is said in a warning.

        On several ranks, load the same state on each: the next step compares them.

        Args:
            state: What `state_dict()` returned.
            adopt_settings: Whether the scaler takes over the settings in it, too; by default those of this run stay.

        Raises:
            StepOrderError: Micro-batches are pending.
            InvalidTypeError: It is no dictionary, or an entry is of the wrong type.
            ConfigurationError: An entry is missing or not allowed. Nothing was changed.
        """
        check_idle(self.driver, "load_state_dict()")
        self.driver.steps = load_engine_state(
            state, precision=self.precision, scaler=self.scaler, checker=self.checker, adopt_settings=adopt_settings
        )
        self._end.compare_states = True
