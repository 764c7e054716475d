"""A trace: every operation of a piece of work, where it was called, and the range of what it computed."""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from pathlib import Path
from typing import Final, cast, final

import torch
from torch import nn
from typing_extensions import Self

from halfstep._torch.tracing import compiles_module
from halfstep.errors import HalfstepWarning, InvalidTypeError, StepOrderError
from halfstep.numerics.details import OperationDetail
from halfstep.numerics.observations import Observation, module_ranges, op_records
from halfstep.numerics.recording import Recorder
from halfstep.records.trace import TRACE_SCHEMA, ModuleRange, OpRecord, TraceRecord

__all__ = ["Trace", "trace"]

_open: Final = threading.local()


def trace(model: nn.Module | None = None, *, samples: int = 0) -> Trace:
    """A context in which every operation of torch is noted: where it was called, what it took, and the range of what it computed.

    It sees the forward and the backward pass on any device, what the optimizer does, and what activation checkpointing computes again.
    Nothing is read from a GPU before its end. Results are the same as without it.

    Args:
        model: The model whose paths modules are known by, such as `decoder.3.attn`. Without one, paths begin at the outermost modules
            that are called, and with the name of their class where there are several of those.
        samples: How many values of each result are kept, for a comparison with another trace; `Trace.details` has them.

    Returns:
        The trace, which tells what it saw after it was closed. It is good for one use.

    Raises:
        InvalidTypeError: `model` is something else.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        >>> with trace(model) as seen:
        ...     loss = model(torch.full((1, 2), 3e4)).half().sum()
        >>> [(op.op, op.site.module) for op in seen.ops if op.absmax is not None and op.site.module != "unknown"]
        [('aten.addmm.default', '0'), ('aten.relu.default', '1')]
    """
    given = cast("object", model)
    if not (given is None or isinstance(given, nn.Module)):
        raise InvalidTypeError(f"trace(model=...) was given {type(given).__name__!r}; it takes a torch.nn.Module or nothing.")
    return Trace(model, samples=samples)


@final
class Trace:
    """What `trace` returns: open it with `with`, and read it afterwards.

    Where an exception ends it, it tells what had run until then.

    Example:
        >>> import torch
        >>> with trace() as seen:
        ...     big = torch.full((2,), 300.0, dtype=torch.float16)
        ...     square = big * big
        >>> seen.origin.op, seen.origin.nonfinite
        ('aten.mul.Tensor', 2)
    """

    def __init__(self, model: nn.Module | None, *, samples: int = 0) -> None:
        self._model = model
        self._samples = samples
        self._details: tuple[OperationDetail, ...] = ()
        self._recorder: Recorder | None = None
        self._observations: tuple[Observation, ...] | None = None
        self._names: dict[int, str] = {}
        self._folder = Path.cwd()
        self._record: TraceRecord | None = None
        self._target = ""

    def __enter__(self) -> Self:
        if self._recorder is not None or self._observations is not None:
            raise StepOrderError("This trace was opened before; a trace is good for one use. Make a new one with trace().")
        if getattr(_open, "trace", None) is not None:
            raise StepOrderError("A trace is open in this thread already, and sees everything. Close it before you open another one.")
        if self._model is not None and compiles_module(self._model):
            warnings.warn(
                "The model is compiled, and a trace runs it eagerly, operation by operation. Compiled kernels fuse operations and do not "
                "round between them, so their numbers differ a little. To run it so without this warning, trace the model that was "
                'compiled, or call torch.compiler.set_stance("force_eager") before.',
                HalfstepWarning,
                stacklevel=2,
            )
        self._recorder = Recorder(self._model, samples=self._samples)
        self._recorder.open()
        _open.trace = self
        return self

    def __exit__(self, *exception: object) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            raise StepOrderError("This trace is not open: it was closed before.")
        _open.trace = None
        try:
            recorder.close()
        finally:
            self._observations = recorder.observations()
            self._details = recorder.details()
            self._target = recorder.target
            self._names = recorder.names()
            self._model = None

    @property
    def ops(self) -> tuple[OpRecord, ...]:
        """The operations, in the order in which they ran.

        Raises:
            StepOrderError: The trace is still open, or was never opened.
        """
        return self.record.ops

    @property
    def origin(self) -> OpRecord | None:
        """The first operation that made something infinite or NaN out of finite values, as `TraceRecord.origin` says it.

        Raises:
            StepOrderError: The trace is still open, or was never opened.
        """
        return self.record.origin

    @property
    def count(self) -> int:
        """How many operations have run until now."""
        return len(self.ops) if self._recorder is None else self._recorder.count

    @property
    def details(self) -> tuple[OperationDetail, ...]:
        """Where the arguments of each operation came from, and a sample of its values; empty unless `samples` was given.

        Raises:
            StepOrderError: The trace is still open, or was never opened.
        """
        self._closed()
        return self._details

    @property
    def record(self) -> TraceRecord:
        """The whole trace as a record.

        Raises:
            StepOrderError: The trace is still open, or was never opened.
        """
        if self._record is None:
            ops = op_records(self._closed(), names=self._names, folder=self._folder)
            self._record = TraceRecord(schema=TRACE_SCHEMA, torch=torch.__version__, target=self._target, ops=ops)
        return self._record

    def by_op(self) -> dict[str, dict[str, int]]:
        """How often each operation ran, by the dtype of its first result; `none` stands for those that return no tensor.

        Raises:
            StepOrderError: The trace is still open, or was never opened.
        """
        counts: dict[str, Counter[str]] = {}
        for op in self.ops:
            counts.setdefault(op.op, Counter())[op.output_dtypes[0] if op.output_dtypes else "none"] += 1
        return {name: dict(count) for name, count in counts.items()}

    def by_module(self) -> tuple[ModuleRange, ...]:
        """What each module computed by itself in each floating-point dtype, forward and backward, in the order in which they first did.

        Raises:
            StepOrderError: The trace is still open, or was never opened.
        """
        return module_ranges(self._closed(), names=self._names)

    def to_json(self, *, indent: int | None = None) -> str:
        """The record as JSON, which `TraceRecord.from_json` reads.

        Args:
            indent: Spaces for each level, or `None` for a single line.

        Raises:
            StepOrderError: The trace is still open, or was never opened.
        """
        return self.record.to_json(indent=indent)

    def _closed(self) -> tuple[Observation, ...]:
        if self._observations is None:
            state = "is still open" if self._recorder is not None else "was not opened"
            raise StepOrderError(f"This trace {state}. Read it after the block `with trace() as seen:`.")
        return self._observations
