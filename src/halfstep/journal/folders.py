"""Folders of runs."""

from __future__ import annotations

import re
from datetime import datetime
from itertools import count
from pathlib import Path

from halfstep.errors import ConfigurationError

__all__ = ["RUNS", "default_folder"]

# Where runs lie that are given no folder.
RUNS = "halfstep-runs"


def default_folder(script: str) -> Path:
    """A new folder for a run, such as `halfstep-runs/train-20260131-120000`, below the current folder.

    It is made here, so that two runs that begin in the same second have a folder each.

    Args:
        script: The path of the script, or the name of the module.

    Raises:
        ConfigurationError: The folder cannot be made.
    """
    path = Path(script)
    if path.stem == "__main__":  # Of a package that is run.
        path = path.absolute().parent
    name = path.stem if path.suffix in {".py", ".pyw"} else path.name
    # `<stdin>`, `-c`, and what else a script may be called, are no good names of folders.
    name = re.sub(r"[^\w.-]+", "_", name).strip("_.-") or "run"
    stamp = f"{name}-{datetime.now().astimezone():%Y%m%d-%H%M%S}"
    for number in count(1):
        folder = Path(RUNS, stamp if number == 1 else f"{stamp}-{number}")
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir()
        except FileExistsError as error:
            if not folder.parent.is_dir():
                raise ConfigurationError(f"Cannot make {folder}: {RUNS} is a file. Rename it, or name a folder for the run.") from error
        except OSError as error:
            raise ConfigurationError(f"Cannot make {folder}: {error.strerror or error}. Name another folder for the run.") from error
        else:
            return folder
    raise AssertionError  # `count` does not end.
