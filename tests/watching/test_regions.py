"""Autocast regions, as they are entered and left."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from halfstep.watching.regions import RegionEvents
from halfstep.watching.scene import Scene

pytestmark = pytest.mark.usefixtures("one_thread")


class Regions:
    """Regions and what is taken in of them, as a watch would."""

    def __init__(self) -> None:
        self.scene = Scene(observe=lambda *_: None, tell=lambda _: None)
        self.events = RegionEvents(self.scene)

    @contextmanager
    def open(self, dtype: torch.dtype = torch.bfloat16, *, device: str = "cpu", enabled: bool = True, cache: bool = True) -> Iterator[Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            region: Any = torch.autocast(device, dtype, enabled, cache)
        self.events.made(region, (device, dtype, enabled, cache), {})
        put_back = self.events.enter(region, sys._getframe(2))
        with region:
            if put_back is not None:
                put_back()
            yield region
            self.events.leave(region)

    @property
    def current(self) -> Any:
        return next(reversed([region for region, _ in self.scene.thread.entered.values()]), None)

    @property
    def depth(self) -> int:
        return len(self.scene.thread.regions)


def test_what_is_known_of_a_region() -> None:
    regions = Regions()
    with regions.open(torch.float16, cache=False):
        assert regions.depth == 1
        here = regions.scene.thread.regions[0]
        assert (here.device_type, here.dtype, here.is_meant, here.keeps_casts, here.is_training) == (
            "cpu",
            torch.float16,
            True,
            False,
            True,
        )
        assert here.steps == 0
    assert regions.depth == 0
    assert regions.current is here  # The backward pass comes after it.


def test_the_outermost_region_counts_and_later_ones_take_its_place() -> None:
    regions = Regions()
    with regions.open(torch.float16):
        outer = regions.current
        with regions.open(torch.bfloat16):
            assert regions.depth == 2
            assert regions.current is outer
    with regions.open(torch.bfloat16):
        assert regions.current is not outer
        assert regions.current.dtype is torch.bfloat16


def test_a_region_within_one_that_is_switched_off_is_the_outermost() -> None:
    regions = Regions()
    with regions.open(enabled=False):
        assert not regions.current
        with regions.open(torch.float16):
            assert regions.current.dtype is torch.float16


def test_an_evaluation_is_not_of_the_training() -> None:
    regions = Regions()
    with torch.no_grad(), regions.open():
        assert (regions.depth, regions.current) == (1, None)
    with regions.open(torch.float16):
        pass
    with torch.inference_mode(), regions.open():
        pass
    assert regions.current.dtype is torch.float16


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is such a device")
def test_a_region_that_torch_refuses_is_meant_all_the_same() -> None:
    regions = Regions()
    with regions.open(torch.float16, device="cuda"):
        assert (regions.current.device_type, regions.current.dtype, regions.current.is_meant) == ("cuda", None, True)
    other = Regions()
    with other.open(torch.float16, device="cuda", enabled=False):
        assert other.current is None


def test_a_region_for_another_device_does_not_hide_it() -> None:
    regions = Regions()
    with regions.open(torch.float16, device="cuda"), regions.open(torch.bfloat16, device="cpu"):
        entered = regions.scene.thread.entered
        assert {device: region.device_type for device, (region, _) in entered.items()} == {"cuda": "cuda", "cpu": "cpu"}


@pytest.mark.parametrize(
    ("dtypes", "steps", "mixed"),
    [
        ([torch.float16, torch.float16], 0, False),
        ([torch.float16, torch.bfloat16], 0, True),
        ([torch.float16, torch.bfloat16], 1, True),
        ([torch.float16, torch.bfloat16, torch.bfloat16], 0, True),
        ([torch.float16, torch.bfloat16, torch.bfloat16], 1, False),
    ],
    ids=[
        "of one kind",
        "of two kinds",
        "of two kinds, with a step between",
        "of two kinds before",
        "of two kinds before, with steps between",
    ],
)
def test_it_is_known_that_regions_of_several_kinds_were_entered_since_a_step(dtypes: list[torch.dtype], steps: int, mixed: bool) -> None:
    regions = Regions()
    for dtype in dtypes:
        with regions.open(dtype):
            pass
        regions.scene.steps += steps
    assert regions.scene.thread.is_mixed is mixed


def test_a_thread_has_regions_of_its_own() -> None:
    regions, seen = Regions(), []
    with regions.open():
        thread = threading.Thread(target=lambda: seen.append((regions.depth, regions.current)))
        thread.start()
        thread.join()
    assert seen == [(0, None)]


def test_what_was_not_seen_to_be_entered_is_not_left() -> None:
    regions = Regions()
    unseen = torch.autocast("cpu", dtype=torch.bfloat16)
    regions.events.leave(unseen)
    with regions.open():
        regions.events.leave(unseen)
        assert regions.depth == 1
    assert regions.depth == 0


@pytest.mark.parametrize(("forced", "computed"), [(torch.bfloat16, torch.bfloat16), ("off", torch.float32), (None, torch.float16)])
def test_it_computes_in_what_the_run_has_fallen_back_to(forced: Any, computed: torch.dtype) -> None:
    regions, x = Regions(), torch.ones(2, 2)
    regions.scene.forced = forced
    with regions.open(torch.float16) as region:
        assert (x @ x).dtype is computed
        assert regions.scene.thread.regions[0].dtype is (None if forced == "off" else computed)
    assert region.fast_dtype is torch.float16
    with region:
        assert (x @ x).dtype is torch.float16


@pytest.mark.parametrize("forced", [torch.bfloat16, "off"])
def test_regions_that_are_not_in_fp16_stay_as_they_are(forced: Any) -> None:
    regions, x = Regions(), torch.ones(2, 2)
    regions.scene.forced = forced
    with regions.open(torch.bfloat16):
        assert (x @ x).dtype is torch.bfloat16
    with regions.open(torch.float16, enabled=False):
        assert (x @ x).dtype is torch.float32


def test_a_function_that_is_decorated_has_the_line_where_that_was_done() -> None:
    regions = Regions()
    region, other = torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", torch.bfloat16)
    regions.events.decorates(region, sys._getframe())
    decorated = sys._getframe().f_lineno - 1
    regions.events.enter(region, sys._getframe())
    assert regions.current.line.number == decorated
    regions.events.leave(region)
    regions.events.enter(other, sys._getframe())
    assert regions.current.line.number == sys._getframe().f_lineno - 1
