"""What the tests of watching share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def alone_in_process() -> Iterator[None]:
    """A watch finds optimizers and scalers among all objects there are. What other tests have left is none of its business here."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
