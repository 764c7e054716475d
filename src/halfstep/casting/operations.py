"""Operations that autocast runs in another precision than it would choose: kernels on its dispatch key.

Autocast is a dispatch key. An operation that is called in an autocast region first looks for a kernel there; torch has one for each
operation that autocast casts, and it goes on to the next key where there is none. A table of operations is put in force by registering a
kernel for each of them, which casts as the table in force says, or calls torch's own kernel where the table says nothing. The registration
is process-wide, so it exists only as long as somebody needs it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, final

import torch

from halfstep._torch import FreshTraces, Overload, functional_overloads, without_autocast
from halfstep.casting.nests import cast_arguments, cast_tensors
from halfstep.casting.weights import write_back
from halfstep.numerics import decide_operation, lowered_ops
from halfstep.precision import DTYPES
from halfstep.records import Precision

__all__ = [
    "OperationTable",
    "Registrations",
    "enter_table",
    "in_force",
    "in_force_here",
    "leave_table",
    "shielding_table",
    "watched_operations",
]

_FP32: Final[Precision] = "fp32"
_DEVICE_TYPES: Final = ("cpu", "cuda")


@final
@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class OperationTable:
    """In which precision operations run in a region, where that is not autocast's own choice.

    Attributes:
        base: The precision of the region itself.
        chosen: For names of aten operations, such as `softmax` or `softmax.int`, the precision they run in.
        dtypes: For each overload, such as `aten::softmax.int`, the dtype that it runs in.

    Example:
        >>> OperationTable.of({"softmax": "fp16"}, base="bf16").dtypes
        {'aten::softmax.int': torch.float16}
    """

    base: Precision
    chosen: Mapping[str, Precision]
    dtypes: Mapping[str, torch.dtype] = field(repr=False)

    @classmethod
    def of(cls, chosen: Mapping[str, Precision], *, base: Precision) -> OperationTable:
        """The table for a region.

        In a region of a lower precision, what is not chosen runs as autocast has it. In an fp32 region nothing else may be lowered, so
        there each operation that autocast would lower is in the table.
        """
        lowers = any(precision != "fp32" for precision in chosen.values())
        complete = dict(chosen)
        if base == "fp32" and lowers:
            # What is chosen comes last and in its order: of an operation and one of its overloads, the later word counts.
            complete = {**{name: _FP32 for name in lowered_ops() if name not in chosen}, **chosen}
        dtypes = {
            overload.name: DTYPES[precision] for operation, precision in complete.items() for overload in functional_overloads(operation)
        }
        return cls(base=base, chosen=dict(chosen), dtypes=dtypes)

    @property
    def decided(self) -> frozenset[str]:
        """The overloads that are chosen, without those that an fp32 region only keeps from being lowered."""
        return frozenset(overload.name for operation in self.chosen for overload in functional_overloads(operation))

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The dtype of the autocast region that the table needs; `None` where it needs none, since nothing in it is lowered."""
        lower = [precision for precision in (self.base, *self.chosen.values()) if precision != "fp32"]
        return DTYPES[lower[0]] if lower else None


_SHIELD: Final = OperationTable(base="fp32", chosen={}, dtypes={})


class _Thread(threading.local):
    def __init__(self) -> None:
        self.entered: list[OperationTable] = []


# The tables of the regions that a thread is in. A thread that is in none goes by those that hold for the process: a backward pass, in which
# checkpointed code runs again, has threads of its own, and so have the replicas of a DataParallel model.
_thread: Final = _Thread()
_process: Final[list[OperationTable]] = []

# The tables of policies that are applied to models, for code that is in no region.
_standing: Final[list[OperationTable]] = []


def shielding_table() -> OperationTable | None:
    """An empty table, for a region to which the tables of other policies must not apply; `None` when there are none."""
    return _SHIELD if _registered else None


def enter_table(table: OperationTable) -> None:
    """Lets a table hold, and no other, until it is left; also for threads that are started meanwhile."""
    _thread.entered.append(table)
    _process.append(table)


def leave_table(table: OperationTable) -> None:
    """Ends what `enter_table` began."""
    _thread.entered.pop()
    # Not `pop()`: another thread may have entered a region since.
    del _process[max(place for place, entered in enumerate(_process) if entered is table)]


@contextmanager
def in_force(table: OperationTable | None) -> Iterator[None]:
    """A region in which a table holds, and no other, as by `enter_table`; with `None` nothing changes."""
    if table is None:
        yield
        return
    enter_table(table)
    try:
        yield
    finally:
        leave_table(table)


@contextmanager
def in_force_here(table: OperationTable | None) -> Iterator[None]:
    """The same for the thread that runs it alone."""
    if table is None:
        yield
        return
    _thread.entered.append(table)
    try:
        yield
    finally:
        _thread.entered.pop()


def _current() -> OperationTable | None:
    for tables in (_thread.entered, _process, _standing):
        if tables:
            return tables[-1]
    return None


@final
@dataclass(slots=True)
class _Registration:
    """A kernel for one overload and device type, and how many policies need it."""

    take_back: Callable[[], None]
    users: int = 1


_registered: Final[dict[tuple[str, str], _Registration]] = {}

_observers: Final[list[Callable[[str, bool], None]]] = []


@contextmanager
def watched_operations(see: Callable[[str, bool], None]) -> Iterator[None]:
    """A region in which a function is called whenever autocast meets an operation that some policy has a word on.

    Args:
        see: Called with the name of the overload, such as `aten::softmax.int`, and whether an override of the table in force decides here.
    """
    _observers.append(see)
    try:
        yield
    finally:
        _observers.remove(see)


@final
class Registrations:
    """The kernels that some tables need, for CPU and CUDA, until they are removed.

    Args:
        tables: The tables.
        standing: One of them that holds from now on wherever no other does; `None` when each holds in its own regions only.

    Example:
        >>> table = OperationTable.of({"softmax": "fp32"}, base="bf16")
        >>> registrations = Registrations([table], standing=table)
        >>> with torch.autocast("cpu", dtype=torch.bfloat16):
        ...     torch.ones(2, dtype=torch.bfloat16).softmax(0).dtype
        torch.float32
        >>> registrations.remove()
    """

    def __init__(self, tables: Iterable[OperationTable], *, standing: OperationTable | None) -> None:
        names = sorted({name for table in tables for name in table.dtypes})
        self._keys: list[tuple[str, str]] = []
        self._standing = standing
        try:
            for name in names:
                for device_type in _DEVICE_TYPES:
                    _register(name, device_type)
                    self._keys.append((name, device_type))
        except BaseException:
            self._unregister()
            raise
        if standing is not None:
            _standing.append(standing)
        self._fresh = FreshTraces() if names else None

    def abandon(self) -> None:
        """Takes them away when the model is gone, in the middle of whatever the process does; compiled code of others is left alone."""
        self._take_away(forgets=False)

    def remove(self) -> None:
        """Takes them away; torch's own kernels are in force again. The second call does nothing."""
        self._take_away(forgets=True)

    def _take_away(self, *, forgets: bool) -> None:
        if self._standing is not None:
            _standing[:] = [table for table in _standing if table is not self._standing]
            self._standing = None
        self._unregister()
        if self._fresh is not None:
            self._fresh.close(forgets=forgets)
            self._fresh = None

    def _unregister(self) -> None:
        while self._keys:
            key = self._keys.pop()
            registration = _registered[key]
            registration.users -= 1
            if not registration.users:
                del _registered[key]
                registration.take_back()


def _register(name: str, device_type: str) -> None:
    known = _registered.get((name, device_type))
    if known is not None:
        known.users += 1
        return
    overload = Overload.named(name)
    statistics = overload.statistics

    def decide(pass_on: Callable[..., Any], keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        table = _current()
        dtype = None if table is None else table.dtypes.get(name)
        if dtype is not None and any(isinstance(each, torch.dtype) for each in (*args, *kwargs.values())):
            dtype = None  # A call that says which dtype it wants is left alone, as autocast leaves it.
        for see in _observers:
            see(name, table is not None and dtype is not None and name in table.decided)
        if table is None or dtype is None:
            return pass_on(keyset, *args, **kwargs)
        cast_args, cast_kwargs, _ = cast_arguments(args, kwargs, dtype)
        with without_autocast(device_type):
            result = overload.call(*cast_args, **cast_kwargs)
        for place, argument in statistics:
            stored, cast = (args[place], cast_args[place]) if place < len(args) else (kwargs.get(argument), cast_kwargs.get(argument))
            write_back(stored, cast)
        return cast_tensors(result, torch.float32) if table.base == "fp32" and table.autocast_dtype is not None else result

    _registered[name, device_type] = _Registration(decide_operation(overload, decide, device_type=device_type))
