"""Where operations are called: the module, and the line of the user's code."""

from __future__ import annotations

import inspect
import os
import sysconfig
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple, TypeAlias, final

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from halfstep._torch import backward_node
from halfstep._torch.tracing import ACCUMULATION, ENGINE_CODE, next_node_number, node_name, node_number
from halfstep.numerics.places import Place, Places
from halfstep.records.trace import UNKNOWN

__all__ = ["NO_PLACE", "Call", "CallSites", "CodeLine", "is_foreign", "relative_file", "users_level"]

# Where no user's code lies: generated code such as a dataclass's __init__, halfstep, torch (also one that was built from source) and
# Python itself.
_FOREIGN: Final = (
    "<frozen",
    "<string>",
    "<eval_with_key>",
    *(f"{folder}{os.sep}" for folder in (Path(__file__).parents[1], Path(torch.__file__).parent, sysconfig.get_path("stdlib"))),
)
_INSTALLED: Final = frozenset({"site-packages", "dist-packages"})

_CHECKPOINT: Final = torch.utils.checkpoint.__file__

_known_foreign: Final[set[str]] = set()
_known_own: Final[set[str]] = set()


def is_foreign(filename: str) -> bool:
    """Whether a file of Python code belongs to Python, torch, halfstep or another installed package.

    Example:
        >>> is_foreign(torch.__file__), is_foreign("train.py")
        (True, False)
    """
    if filename in _known_own:
        return False
    foreign = filename.startswith(_FOREIGN) or not _INSTALLED.isdisjoint(Path(filename).parts)
    (_known_foreign if foreign else _known_own).add(filename)
    return foreign


def users_level() -> int:
    """The `stacklevel` with which a warning that is given where this is called names the line of the user's code."""
    frame, level = getattr(inspect.currentframe(), "f_back", None), 1
    while frame is not None and is_foreign(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    return level


def relative_file(filename: str, *, folder: Path) -> str:
    """A file's name relative to a folder where it lies in it, and as it is elsewhere.

    Example:
        >>> relative_file("/home/me/project/train.py", folder=Path("/home/me/project"))
        'train.py'
    """
    path = Path(filename)
    return str(path.relative_to(folder)) if path.is_absolute() and path.is_relative_to(folder) else filename


# A file as Python knows it, and the number of a line in it.
CodeLine: TypeAlias = tuple[str, int]

_NOWHERE: Final[CodeLine] = (UNKNOWN, 0)


# A call of an operation: the name of the node of autograd that runs it, empty in the forward pass; the number of the module among
# `Places`, `NO_PLACE` outside of any; and the user's line. A plain tuple, since one is made for each operation.
Call: TypeAlias = tuple[str, int, CodeLine]

# Stands for no module.
NO_PLACE: Final = -1

_LOST: Final[Call] = ("", NO_PLACE, _NOWHERE)


class _Running(NamedTuple):
    """A module whose forward pass is under way, where it is, and whether the backward pass has called it, to compute something again."""

    module: nn.Module
    place: Place
    again: bool


class _Stacks(threading.local):
    """The modules whose forward pass is under way in a thread, the innermost last."""

    def __init__(self) -> None:
        self.modules: list[_Running] = []


@final
class CallSites:
    """Tells where operations are called while it is open.

    What the backward pass computes belongs to the forward operation that made the node of autograd. Both are tied together by the number
    that each node has: a node is made right before its operation runs. Numbers count the nodes of one thread, so those that are made in
    other threads than the one it was opened in are left aside.

    Args:
        model: The model whose paths modules are known by; without one, the outermost modules that are called.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self.places = Places(model)
        self._stacks = _Stacks()
        self._calls: dict[int, Call] = {}
        self._thread = threading.get_ident()
        self._here = NO_PLACE
        self._next = 0
        self._writer: Call | None = None
        # A node that was made before the last operation, or the one before that, and is not its own; with the call that it belongs to
        # unless the operation that follows claims it.
        self._open: tuple[int, Call | None] | None = None
        self._earlier: tuple[int, Call | None] | None = None
        self._foreign_nodes = 0
        self._hooks: tuple[Any, ...] = ()

    def open(self) -> None:
        """Begins to follow the calls of modules."""
        self._thread = threading.get_ident()
        self._next = next_node_number()
        self._hooks = (
            nn.modules.module.register_module_forward_pre_hook(self._enter),
            nn.modules.module.register_module_forward_hook(self._leave, always_call=True),
        )

    def close(self) -> None:
        """Ends it, and finds out what modules are called."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = ()
        self._calls.clear()

    def _enter(self, module: nn.Module, args: Any) -> None:
        again = backward_node() is not None
        outer = self._innermost(again=again)
        place = self.places.locate(module, within=outer and (outer.module, outer.place))
        self._stacks.modules.append(_Running(module, place, again))
        self._update()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        modules = self._stacks.modules
        if any(each.module is module for each in modules):
            while modules.pop().module is not module:  # Those inside of it that an exception kept from leaving.
                pass
        self._update()

    def _innermost(self, *, again: bool) -> _Running | None:
        modules = self._stacks.modules
        return modules[-1] if modules and modules[-1].again == again else None

    def _update(self) -> None:
        if threading.get_ident() == self._thread:
            innermost = self._innermost(again=False)
            self._here = NO_PLACE if innermost is None else innermost.place.number

    def current(self, tensors: Sequence[Tensor], frame: FrameType | None) -> Call:
        """Where the operation that is about to run is called.

        Args:
            tensors: What it is given.
            frame: The frame that called it.
        """
        if self._earlier is not None:
            self._settle()
        self._earlier, self._open = self._open, None
        node = backward_node()
        call = ("", self._here, _users_line(frame)) if node is None else self._in_backward(node, frame)
        if self._next != next_node_number():
            self._assign(call, tensors)
        self._writer = None
        return call

    def writes(self, call: Call, tensors: Sequence[Tensor]) -> None:
        """Takes in that an operation writes to its arguments: some of its nodes are made at other times than right before it runs."""
        if threading.get_ident() != self._thread:
            return
        self._writer = call  # Where it writes to a view, a node is made afterwards.
        if self._earlier is not None and torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            self._earlier = (self._earlier[0], call)  # Where its input is needed, it is cloned between its node and itself.

    def _settle(self) -> None:
        assert self._earlier is not None
        number, call = self._earlier
        if call is not None:
            self._calls.setdefault(number, call)
        self._earlier = None

    def _assign(self, call: Call, tensors: Sequence[Tensor]) -> None:
        """Ties the nodes that were made since the last operation to calls, those that are certain."""
        end = next_node_number()
        has_node = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        if threading.get_ident() != self._thread:
            if has_node:
                self._foreign_nodes = max(self._foreign_nodes, end)
            return
        first, self._next = self._next, end
        if self._earlier is not None:
            self._settle()  # The operation has nodes of its own.
        if not torch.is_grad_enabled():
            if self._writer is None:
                # The node of a user's own autograd.Function, whose forward pass runs without gradients.
                self._calls.setdefault(end - 1, call)
            return
        if has_node:
            end -= 1
            self._calls.setdefault(end, call)
            if end > first:
                end -= 1
                self._open = (end, self._writer)  # It may belong to the operation that comes next.
        if self._writer is not None:
            for number in range(first, end):
                self._calls.setdefault(number, self._writer)

    def _in_backward(self, node: Any, frame: FrameType | None) -> Call:
        name = node_name(node)
        _, place, line = self._forward_call(node)
        # The engine sums gradients while the node that computed the last of them still counts as running: that is where the sum belongs.
        if frame is None or frame.f_code is ENGINE_CODE:
            return name, place, line
        users, recomputes = _line_below_engine(frame)
        if recomputes:
            innermost = self._innermost(again=True)
            return "", NO_PLACE if innermost is None else innermost.place.number, users
        return name, place, line if users is _NOWHERE else users

    def _forward_call(self, node: Any) -> Call:
        number = node_number(node)
        if number == ACCUMULATION:
            variable = getattr(node, "variable", None)
            return _LOST if variable is None else ("", self.places.number_of_owner(variable), _NOWHERE)
        if number < self._foreign_nodes:
            return _LOST  # Two nodes may have this number.
        return self._calls.get(number, _LOST)


def _users_line(frame: FrameType | None) -> CodeLine:
    while frame is not None:
        filename = frame.f_code.co_filename
        # The table is asked here, since a call for each frame takes as long as all the rest.
        if filename not in _known_foreign and not is_foreign(filename):
            return filename, frame.f_lineno
        frame = frame.f_back
    return _NOWHERE


def _line_below_engine(frame: FrameType | None) -> tuple[CodeLine, bool]:
    """The user's line among the frames that the engine has called, and whether activation checkpointing is one of them.

    In a thread of the engine's own there is no frame of it; all frames are below it.
    """
    line, recomputes = _NOWHERE, False
    while frame is not None and frame.f_code is not ENGINE_CODE:
        filename = frame.f_code.co_filename
        recomputes = recomputes or filename == _CHECKPOINT
        if line is _NOWHERE and not is_foreign(filename):
            line = filename, frame.f_lineno
        frame = frame.f_back
    return line, recomputes
