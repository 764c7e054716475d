"""One training step under torch's profiler: where its time goes and how much memory it holds at its peak."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile

from halfstep._torch import dense_parts, quiet_profiler, tree_leaves
from halfstep.batch import tensors_in

__all__ = ["StaticMemory", "StepProfile", "profile_step", "static_memory"]

T = TypeVar("T")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StaticMemory:
    """The bytes that training holds between steps.

    Attributes:
        parameters: Bytes of parameters and buffers.
        optimizer: Bytes of optimizer state.
        batch: Bytes of the batch.
    """

    parameters: int
    optimizer: int
    batch: int

    @property
    def total(self) -> int:
        """The sum of the parts, in bytes."""
        return self.parameters + self.optimizer + self.batch


def static_memory(*, model: nn.Module, optimizer: Optimizer, batch: Any) -> StaticMemory:
    """The bytes that training holds between steps; storage that several tensors share counts once.

    Example:
        >>> model = nn.Linear(256, 2, bias=False)
        >>> static_memory(model=model, optimizer=torch.optim.SGD(model.parameters()), batch=torch.zeros(4, 256))
        StaticMemory(parameters=2048, optimizer=0, batch=4096)
    """
    seen: set[int] = set()

    def weigh(leaves: Iterable[Any], size: Callable[[Tensor], int] = lambda part: part.untyped_storage().nbytes()) -> int:
        total = 0
        for part in (part for leaf in leaves if isinstance(leaf, Tensor) for part in dense_parts(leaf)):
            place = part.untyped_storage().data_ptr()
            if place not in seen:
                seen.add(place)
                total += size(part)
        return total

    def own_size(part: Tensor) -> int:
        # A batch may be a slice of a whole data set, which is not what the step needs; or expanded from less than it seems.
        return min(part.nbytes, part.untyped_storage().nbytes())

    return StaticMemory(
        parameters=weigh((*model.parameters(), *model.buffers())),
        optimizer=weigh(tree_leaves(list(optimizer.state.values()))),
        batch=weigh(tensors_in(batch), own_size),
    )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepProfile:
    """Where the time of one step goes.

    Attributes:
        peak_bytes: The most that the step held at once, beyond what was allocated when it started, scratch memory of kernels included. On
            a CPU, what was allocated before and is freed in the step is not subtracted, because the profiler does not see it go.
        lowered_share: The share of the operations' time, from 0 to 1, that is spent in operations which autocast lowers, backward included.
        cast_share: The share that is spent in casts between dtypes.
        total_us: The time of all operations together, in microseconds; 0 where the profiler could not measure the device.
        operations: How many operations ran, counting those that the user's code or autograd called.
        mean_operation_us: The mean time of such an operation, in microseconds.
        slowest: The name of the operation that took the most time itself.
        slowest_share: Its share.
    """

    peak_bytes: int
    lowered_share: float
    cast_share: float
    total_us: float
    operations: int
    mean_operation_us: float
    slowest: str
    slowest_share: float


def profile_step(step: Callable[[], T], *, device: torch.device, lowered: frozenset[str]) -> tuple[T, StepProfile]:
    """Runs a step under the profiler.

    Args:
        step: Runs one training step.
        device: Where the step runs.
        lowered: The names of the operations that autocast lowers, without namespace.

    Returns:
        What `step` returned, and the profile.

    Example:
        >>> a, cpu = torch.ones(64, 64), torch.device("cpu")
        >>> product, seen = profile_step(lambda: a.relu() @ torch.ones(64, 64), device=cpu, lowered=frozenset({"mm"}))
        >>> product.shape, seen.peak_bytes >= 3 * 64 * 64 * 4, 0 < seen.lowered_share < 1
        (torch.Size([64, 64]), True, True)
    """
    quiet_profiler()
    cuda = device.type == "cuda"
    before = 0
    if cuda:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities, profile_memory=not cuda, acc_events=True) as profiler:
        result = step()
        if cuda:
            torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before if cuda else _peak_of_allocations(profiler)
    return result, _summarize(profiler.events() or (), peak=peak, lowered=lowered, cuda=cuda)


def _peak_of_allocations(profiler: profile) -> int:
    # The trace is the only public form in which single allocations can be read, in their order.
    with tempfile.TemporaryDirectory(prefix="halfstep-") as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    allocations = [event for event in trace["traceEvents"] if event.get("name") == "[memory]" and event["args"].get("Device Type") == 0]
    held = peak = 0
    for event in sorted(allocations, key=lambda event: float(event["ts"])):
        held += int(event["args"]["Bytes"])
        peak = max(peak, held)
    return peak


def _summarize(events: Iterable[Any], *, peak: int, lowered: frozenset[str], cuda: bool) -> StepProfile:
    def total_us(event: Any) -> float:
        return float(event.device_time_total if cuda else event.cpu_time_total)

    def self_us(event: Any) -> float:
        return float(event.self_device_time_total if cuda else event.self_cpu_time_total)

    operations = [event for event in events if event.name.startswith("aten::")]
    outermost = [event for event in operations if not _inside(event, lambda parent: parent.name.startswith("aten::"))]
    measured = sum(map(total_us, outermost))
    whole = measured or 1.0
    by_name: dict[str, float] = {}
    for event in operations:
        by_name[event.name] = by_name.get(event.name, 0.0) + self_us(event)
    slowest = max(by_name, key=lambda name: by_name[name], default="")

    def in_lowered(event: Any) -> bool:
        return _base_name(event.name) in lowered

    def share(belongs: Callable[[Any], bool]) -> float:
        return sum(total_us(event) for event in operations if belongs(event) and not _inside(event, belongs)) / whole

    return StepProfile(
        peak_bytes=peak,
        lowered_share=share(in_lowered),
        cast_share=share(lambda event: event.name == "aten::_to_copy"),
        total_us=measured,
        operations=len(outermost),
        mean_operation_us=whole / max(1, len(outermost)),
        slowest=slowest.removeprefix("aten::"),
        slowest_share=by_name.get(slowest, 0.0) / whole,
    )


def _base_name(name: str) -> str:
    """The operation whose forward or backward an event is: `aten::convolution_backward` belongs to `convolution`."""
    base = name.removeprefix("aten::").removesuffix("_backward")
    # Each kernel of attention has a backward operation of its own name, such as `_scaled_dot_product_flash_attention_for_cpu_backward`.
    return "scaled_dot_product_attention" if base.startswith("_scaled_dot_product_") else base


def _inside(event: Any, belongs: Callable[[Any], bool]) -> bool:
    parent = event.cpu_parent
    while parent is not None:
        if belongs(parent):
            return True
        parent = parent.cpu_parent
    return False
