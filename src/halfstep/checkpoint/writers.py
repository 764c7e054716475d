"""Who writes checkpoints: the run itself, or a thread of its own while the run goes on."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

import torch.distributed as dist
from torch import Tensor

from halfstep.checkpoint.contents import Contents
from halfstep.checkpoint.folders import write_folder
from halfstep.checkpoint.placing import shard_like
from halfstep.checkpoint.staging import Stage
from halfstep.checkpoint.writing import write_file
from halfstep.distributed import Ranks, local_tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Writer"]

# So far the priority of the thread that writes lies below that of the others, in the units of nice(1).
_NICE: Final = 10


@final
class Writer:
    """Writes one checkpoint after the other.

    Args:
        ranks: Those that save together; `None` for one process.
        in_background: Whether a thread writes, from a copy.
    """

    def __init__(self, ranks: Ranks | None, *, in_background: bool) -> None:
        self._ranks = ranks
        self._in_background = in_background
        self._group: ProcessGroup | None = None if ranks is None else _group_of(ranks) if in_background else ranks.process_group
        self._stage = Stage()
        self._spread_stage = Stage()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def write(self, contents: Contents, path: Path, *, afterwards: Callable[[], None]) -> None:
        """Writes a checkpoint, or begins to. Nothing is being written in the background.

        Args:
            contents: What is in it.
            path: Where.
            afterwards: What to do once it is on disk.

        Raises:
            CheckpointError: It could not be written; in the background, `wait` raises that.
        """
        if not self._in_background:
            self._write(contents, path)
            afterwards()
            return
        staged = replace(contents, tree=self._stage.copy(contents.tree), spread=self._copied(contents.spread))

        def work() -> None:
            _give_way()
            try:
                self._write(staged, path)
                afterwards()
            except BaseException as error:
                self._error = error

        # Not a daemon: when the script ends, Python waits until the checkpoint is on disk.
        self._thread = threading.Thread(target=work, name=f"halfstep writes {path.name}")
        self._thread.start()

    def _write(self, contents: Contents, path: Path) -> None:
        if self._ranks is None:
            write_file(contents, path)
        else:
            assert self._group is not None
            write_folder(contents, path, rank=self._ranks.rank, ranks=self._ranks.size, group=self._group)

    def _copied(self, spread: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """A copy of what is spread over the ranks."""
        local = {name: local_tensor(tensor) for name, tensor in spread.items()}
        if all(tensor.device.type == "cpu" for tensor in local.values()):
            staged = self._spread_stage.copy(local)
            return {name: shard_like(tensor, staged[name]) for name, tensor in spread.items()}
        from torch.distributed.checkpoint.staging import BlockingAsyncStager  # noqa: PLC0415 - slow to import

        copied: dict[str, Tensor] = BlockingAsyncStager().stage(dict(spread))
        return copied

    def wait(self) -> None:
        """Waits until nothing is being written.

        Raises:
            CheckpointError: What was being written could not be.
        """
        if self._thread is not None:
            if self._thread.ident is not None:  # Ctrl-C may come before it has begun.
                self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error


def _give_way() -> None:
    """Lets this thread, and those that it starts, have what the threads that train leave of the processors.

    Where they share one, a thread of a parallel kernel that has to wait for its turn holds up all the others of that kernel.
    """
    if sys.platform == "linux":  # Elsewhere a priority is one of the whole process.
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + _NICE)


def _group_of(ranks: Ranks) -> ProcessGroup:
    """A group of the same ranks in which nobody else talks meanwhile."""
    members = dist.get_process_group_ranks(ranks.process_group)
    group: Any = dist.new_group(members, backend="gloo", use_local_synchronization=True)
    return group  # type: ignore[no-any-return]
