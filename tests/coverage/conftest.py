"""What these tests run is so small that a second thread only waits for the first."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def always_one_thread(one_thread: None) -> None:
    """Every test of this folder."""
