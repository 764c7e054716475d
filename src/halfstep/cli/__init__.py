"""The command line. It loads torch only when a command needs it."""

from halfstep.cli.main import main

__all__ = ["main"]
