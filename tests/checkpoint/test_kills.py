"""A run that is killed at any moment goes on from the last checkpoint that it had saved, or the one before."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

COUNT = 200

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="killed runs are forked")


def test_killed_at_any_moment(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "tests.checkpoint.kills", str(tmp_path), str(COUNT)]
    process = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert process.returncode == 0, process.stderr[-3000:]
    told = re.fullmatch(rf"{COUNT} killed, (\d+) of them while they wrote\n", process.stdout)
    assert told, process.stdout
    assert int(told[1]) > COUNT // 10
