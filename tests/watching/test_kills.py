"""A run that is killed leaves a log that can be read, with all that was flushed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(not hasattr(os, "fork"), reason="it forks")
def test_fifty_runs_that_are_killed_lose_nothing_that_was_flushed(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.watching.kills", str(tmp_path), "50"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == "50 killed, 0 lost something, resumed True\n", done.stdout + done.stderr
