"""Every test of this folder: one thread, and no measuring of matrix products, which takes longer than all the rest."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from halfstep.comparison import race


@pytest.fixture(autouse=True)
def always_one_thread(one_thread: None) -> None:
    """Tiny operations only wait for each other when they are spread over the cores of a busy machine."""


@pytest.fixture(autouse=True)
def known_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfstep.comparison.measurement.matmul_gain", lambda precision, *, device: 2.0)


@pytest.fixture(autouse=True)
def no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is about what a garbage collection gives back, unless a test asks for it; each takes a good part of a second."""
    monkeypatch.setattr(race, "gc", SimpleNamespace(collect=lambda: 0))
