"""The models of these tests are so small that a second thread only waits for the first."""

from __future__ import annotations

import pytest

from halfstep.amp import session


@pytest.fixture(autouse=True)
def always_one_thread(one_thread: None) -> None:
    """Every test of this folder."""


@pytest.fixture(autouse=True)
def before_initialize(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts every test as a new script does: `amp.initialize` was not called yet."""
    monkeypatch.setattr(session._holder, "held", None)
