"""What the exit status of a command says."""

from __future__ import annotations

from enum import IntEnum
from typing import final

__all__ = ["ExitCode"]


@final
class ExitCode(IntEnum):
    """What the exit status of a command says.

    Attributes:
        FINE: All is well.
        FINDINGS: It ran, and something needs attention.
        COULD_NOT_RUN: It could not run; standard error says why.
        INTERRUPTED: Ctrl-C, as a shell reports it.
    """

    FINE = 0
    FINDINGS = 1
    COULD_NOT_RUN = 2
    INTERRUPTED = 130
