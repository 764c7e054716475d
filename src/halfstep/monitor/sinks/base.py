"""What all sinks have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from halfstep.journal import Entry

__all__ = ["AbstractSink"]


class AbstractSink(ABC):
    """Somewhere that the records of a run go to.

    Example:
        >>> class Count(AbstractSink):
        ...     entries = 0
        ...     def write(self, entries):
        ...         self.entries += len(entries)
        ...     def close(self):
        ...         print(f"{self.entries} entries")
        >>> sink = Count()
        >>> sink.write([])
        >>> sink.close()
        0 entries
    """

    __slots__ = ()

    @abstractmethod
    def write(self, entries: Sequence[Entry]) -> None:
        """Takes what happened since the last call.

        An error that it raises is shown as a warning, and the sink is given nothing more: training goes on.

        Args:
            entries: Records of the run and its steps, alerts and actions, in their order.
        """

    @abstractmethod
    def close(self) -> None:
        """Is called once there is nothing more to come."""
