"""Every test of this folder: one thread, and no measuring of matrix products, which takes longer than all the rest."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from halfstep.comparison import race


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny operations only wait for each other when they are spread over the cores of a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def known_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    # The package has a function of the module's name, which hides the module from a dotted path.
    monkeypatch.setattr(import_module("halfstep.comparison.compare"), "matmul_gain", lambda precision, *, device: 2.0)


@pytest.fixture(autouse=True)
def no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is about what a garbage collection gives back, unless a test asks for it; each takes a good part of a second."""
    monkeypatch.setattr(race, "gc", SimpleNamespace(collect=lambda: 0))
