"""When gradients are reduced across ranks: kept local while they accumulate, and reduced once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from halfstep._torch import finish_sharded_backward, held_gradients, hold_gradients, is_joining, reset_data_parallel, reset_sharded
from halfstep.distributed.kinds import data_parallel_modules, dtensor_type, fully_sharded_modules, local_tensor
from halfstep.distributed.ranks import Ranks, all_reduce_, reduced_by, replicated_parameters
from halfstep.errors import CheckpointError, StepOrderError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["GradientSync", "gradients_agree"]

# Elements that are reduced at once: the size of the buckets of DistributedDataParallel, 25 MiB, in fp32.
_BUCKET = 25 * 1024**2 // 4

# Whether a rank has a gradient; over the ranks, the largest counts.
_NONE, _DENSE, _SPARSE = range(3)


@final
class GradientSync:
    """Controls when the gradients of a model are reduced across ranks; a model that is not distributed is left alone.

    It finds every `DistributedDataParallel` and `fully_shard` module in the model, also in submodules and inside `torch.compile`. At
    first gradients are reduced by each backward pass. Wrap the model before.

    A `DistributedDataParallel` with `static_graph=True` reduces in every backward pass until it is released for the first time.

    Args:
        model: The model.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1)
        >>> sync = GradientSync(model)
        >>> sync.hold()  # nothing to hold in one process
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> sync.release()
        >>> sync.reduce_held(model.parameters())
        >>> model.weight.grad
        tensor([[1., 1.]])
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._data_parallel = data_parallel_modules(model)
        self._sharded = fully_sharded_modules(model)
        # torch must see a static graph reduce once before it can be held (it fails an internal assertion otherwise), so those sit out the
        # first time. Their gradients are right nevertheless: the mean over the ranks of a mean is that mean.
        self._not_yet = {id(module) for module in self._data_parallel if module.static_graph}
        self._held = False
        self._switch(reducing=True)  # an earlier engine may have stopped while it held them

    def hold(self) -> None:
        """Keeps gradients local from the next forward pass on. Switch before the forward pass, not between it and its backward pass."""
        if not self._held:
            self._switch(reducing=False)
            self._held = True

    def release(self) -> None:
        """Lets the next backward pass reduce gradients, those that have been held included."""
        if self._held:
            self._switch(reducing=True)
            self._held = False
            self._not_yet.clear()

    def reduce_held(self, parameters: Iterable[nn.Parameter]) -> None:
        """Reduces gradients that accumulated while held, as if the last backward pass had been one that reduces.

        A collective operation: all ranks of the model call it with the same parameters. It does not change whether gradients are held.

        Ranks that have reached another number of micro-batches reduce in their backward passes instead, which does not fit: where numbers
        may differ, let the engine know the last one beforehand, with `micro_batches`.

        With `DistributedDataParallel` they become the mean over the ranks. Parameters that it was told to ignore, and those that have no
        gradient on any rank, stay as they are; a rank that alone has none gets one. Communication hooks are not called: torch calls them
        only within a backward pass, so these gradients are reduced in their own type, without compression.

        With `fully_shard`, which knows what it holds, all held gradients are reduced, whatever the parameters; as in a backward pass, each
        sharded group needs gradients on all ranks or on none.

        Args:
            parameters: Those of the optimizer that will step.

        Raises:
            StepOrderError: This version of torch has no way to reduce what `fully_shard` holds outside of a backward pass.
        """
        wanted = {id(parameter) for parameter in parameters}
        for module in self._data_parallel:
            _reduce([parameter for parameter in reduced_by(module) if id(parameter) in wanted], group=module.process_group)
        if self._sharded:
            self._switch(reducing=True)
            try:
                self._finish_sharded()
            finally:
                self._switch(reducing=not self._held)

    def forget(self) -> None:
        """Drops gradients that are held inside of modules, and whatever a pass that broke off left there; the next one reduces.

        Call it on every rank when a step is given up. It is no collective operation.
        """
        if self._held:  # Not release(): what has never reduced has not done so now.
            self._switch(reducing=True)
            self._held = False
        for sharded in self._sharded:
            reset_sharded(sharded)
        for module in self._data_parallel:
            reset_data_parallel(module)

    def held_back(self) -> dict[str, Tensor]:
        """The gradients that `fully_shard` has accumulated on this rank and not reduced yet, by the names that the model gives parameters.

        Each is that of the whole parameter (of the part on this rank, where it is a DTensor besides), in the type in which it accumulates.
        They are no copies. It is no collective operation. What `DistributedDataParallel` holds is in `parameter.grad`, and not among them.

        Raises:
            StepOrderError: A gradient is itself a sum over ranks that is still to be made, as with sequence parallelism.
        """
        try:
            return held_gradients(self._model) if self._sharded else {}
        except ValueError as error:
            raise StepOrderError(
                f"The gradient of {error} is a sum over ranks that is still to be made, which can be kept only within the process. Save "
                "between two steps."
            ) from error

    def hold_back(self, gradients: Mapping[str, Tensor]) -> None:
        """Has the model go on as if it had accumulated the gradients that `held_back` found.

        `DistributedDataParallel` does not bring buffers to those of rank 0 before a forward pass that follows a held one.

        A collective operation: all ranks of the model call it, also those without gradients. Call it after `hold` and with the parameters
        in place, whether or not the model has run.

        Args:
            gradients: By the names that the model gives parameters, on any device; they are copied.

        Raises:
            CheckpointError: A parameter is none that `fully_shard` spreads in this model, or it has another shape.
        """
        for module in self._data_parallel:
            module.require_forward_param_sync = module.require_backward_grad_sync
        if not self._sharded and not gradients:
            return
        try:
            hold_gradients(self._model, gradients)
        except ValueError as error:
            raise CheckpointError(f"A gradient that fully_shard held back does not fit this model: {error}.") from error

    def check_no_join(self) -> None:
        """Accepts a model outside of `DistributedDataParallel.join()`, which shadows the reductions of a model and knows no others.

        Raises:
            StepOrderError: It is inside.
        """
        if any(map(is_joining, self._data_parallel)):
            raise StepOrderError(
                "An engine cannot step inside of model.join(): ranks that have run out of data would miss what the others agree on. Give "
                "every rank the same number of steps, for example with a DistributedSampler."
            )

    def _finish_sharded(self) -> None:
        for module in self._sharded:
            if not finish_sharded_backward(module):
                raise StepOrderError(
                    f"torch {torch.__version__} cannot reduce gradients of fully_shard after the backward pass. Let the engine know the "
                    "last batch beforehand: iterate over amp.micro_batches(loader)."
                )

    def _switch(self, *, reducing: bool) -> None:
        for module in self._data_parallel:
            module.require_backward_grad_sync = reducing or id(module) in self._not_yet
        for sharded in self._sharded:
            sharded.set_requires_gradient_sync(reducing, recurse=False)


def gradients_agree(model: nn.Module, parameters: Iterable[nn.Parameter], *, ranks: Ranks) -> bool:
    """Whether all gradients, once reduced, are the same on all ranks, or parts of the same, so that all compute the same norm.

    They are not where a `DistributedDataParallel` leaves parameters alone, nor where a mesh spans only some of the ranks.
    """
    reduced = replicated_parameters(model, ranks=ranks)
    kind = dtensor_type()
    return all(
        parameter.device_mesh.size() == ranks.size if kind is not None and isinstance(parameter, kind) else id(parameter) in reduced
        for parameter in parameters
        if parameter.requires_grad
    )


@torch.no_grad()
def _reduce(parameters: Sequence[nn.Parameter], *, group: ProcessGroup) -> None:
    """Brings gradients to their mean over a group."""
    if not parameters or dist.get_world_size(group) == 1:
        return
    # Which gradients there are must be settled first: a rank that reduced fewer than the others would make them wait for ever.
    flags = torch.tensor([_layout(parameter.grad) for parameter in parameters], dtype=torch.int32)
    all_reduce_(flags, group=group, op=dist.ReduceOp.MAX)
    dense = []
    for parameter, layout in zip(parameters, flags.tolist(), strict=True):
        if layout == _NONE:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if layout == _DENSE:
            dense.append(local_tensor(parameter.grad))
        else:
            parameter.grad = _sparse_mean(parameter.grad, group=group)
    for bucket in _buckets(dense):
        _mean_(bucket, group=group)


def _layout(gradient: Tensor | None) -> int:
    if gradient is None:
        return _NONE
    return _SPARSE if gradient.is_sparse else _DENSE


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Runs of gradients of one type on one device, each cut off once it holds enough to be worth a collective operation."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    sizes: Counter[tuple[torch.device, torch.dtype]] = Counter()
    for gradient in gradients:
        kind = (gradient.device, gradient.dtype)
        kinds.setdefault(kind, []).append(gradient)
        sizes[kind] += gradient.numel()
        if sizes[kind] >= _BUCKET:
            sizes[kind] = 0
            yield kinds.pop(kind)
    yield from kinds.values()


def _mean_(gradients: Sequence[Tensor], *, group: ProcessGroup) -> None:
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    flat.mul_(1.0 / dist.get_world_size(group))  # before the sum and by the reciprocal, as DistributedDataParallel does: the same rounding
    all_reduce_(flat, group=group, op=dist.ReduceOp.SUM)
    means = torch.split(flat, [gradient.numel() for gradient in gradients])
    for gradient, mean in zip(gradients, means, strict=True):
        gradient.copy_(mean.view_as(gradient))


def _sparse_mean(gradient: Tensor, *, group: ProcessGroup) -> Tensor:
    # One sparse dimension, as the gradients of embeddings have: the only sparse ones of a parameter.
    mean = (gradient if gradient.is_sparse else gradient.to_sparse(1)).coalesce() / dist.get_world_size(group)
    dist.all_reduce(mean, group=group)
    return mean.coalesce()
