"""What every test runs under: few threads, seeded generators, one Hypothesis profile, and GPU tests only where there is a GPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

# Read when torch is first imported, here and in every process that a test starts. This module itself never imports torch: the tests of
# records and errors must not pay for it.
THREADS = 2
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, str(THREADS))

settings.register_profile("halfstep", deadline=None, print_blob=True, derandomize="CI" in os.environ)
settings.load_profile("halfstep")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a test that is marked `gpu` on a machine without CUDA."""
    if item.get_closest_marker("gpu") is not None:
        import torch  # noqa: PLC0415 - heavy, and only such a test needs it here

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device, and torch.cuda.is_available() is False")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Starts every test from the same random state and with few threads, where torch is loaded at all."""
    if "torch" in sys.modules:
        import torch  # noqa: PLC0415 - see THREADS

        from halfstep.randomness import seed_everything  # noqa: PLC0415 - loads torch

        seed_everything(0)
        if torch.get_num_threads() > THREADS:
            torch.set_num_threads(THREADS)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread: what is tiny only waits for a second one."""
    import torch  # noqa: PLC0415 - see THREADS

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
