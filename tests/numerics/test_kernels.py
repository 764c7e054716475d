"""Several that decide on one operation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from halfstep._torch import DispatchMode, Overload
from halfstep.numerics import decide_operation
from halfstep.numerics.kernels import torch_kernel

LINEAR, RELU = Overload.named("aten::linear"), Overload.named("aten::relu")


class Watching(DispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = [torch._C._dispatch_dump(overload.name) for overload in (LINEAR, RELU)]
    yield
    assert [torch._C._dispatch_dump(overload.name) for overload in (LINEAR, RELU)] == before


def noting(name: str, heard: list[str]) -> Callable[..., Any]:
    def decide(pass_on: Callable[..., Any], keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        heard.append(name)
        return pass_on(keyset, *args, **kwargs)

    return decide


def relu() -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.ones(1).relu()


@pytest.mark.parametrize("watched", [False, True])
def test_the_newest_is_asked_first_and_the_last_one_last(watched: bool) -> None:
    heard: list[str] = []
    ends = [
        decide_operation(RELU, noting("first", heard), device_type="cpu"),
        decide_operation(RELU, noting("second", heard), device_type="cpu"),
        decide_operation(RELU, noting("last", heard), device_type="cpu", last=True),
    ]
    if watched:
        with Watching():  # type: ignore[no-untyped-call]
            assert relu().item() == 1
    else:
        assert relu().item() == 1
    assert heard == ["second", "first", "last"]
    for end in ends:
        end()
    relu()
    assert len(heard) == 3


@pytest.mark.parametrize("gone", [0, 1])
def test_one_that_is_taken_back_is_not_asked_under_a_dispatch_mode_either(gone: int) -> None:
    """Torch would call the function that was registered last, whoever is left."""
    heard: list[str] = []
    ends = [decide_operation(RELU, noting(name, heard), device_type="cpu") for name in ("first", "second")]
    ends.pop(gone)()
    with Watching():  # type: ignore[no-untyped-call]
        relu()
    assert heard == [["second", "first"][gone]]
    ends.pop()()


def test_the_last_word_is_that_of_torch() -> None:
    end = decide_operation(LINEAR, noting("", []), device_type="cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.nn.functional.linear(torch.ones(1, 1), torch.ones(1, 1)).dtype is torch.bfloat16
    end()


def test_a_decider_need_not_pass_on() -> None:
    end = decide_operation(RELU, lambda pass_on, keyset, args, kwargs: args[0] + 1, device_type="cpu")
    assert relu().item() == 2
    end()


def test_the_kernel_of_torch_is_known_whoever_decides() -> None:
    own = torch_kernel(LINEAR, device_type="cpu")
    assert own is not None
    assert torch_kernel(RELU, device_type="cpu") is None
    ends = [decide_operation(overload, noting("", []), device_type="cpu") for overload in (LINEAR, RELU)]
    assert torch_kernel(LINEAR, device_type="cpu") is own
    assert torch_kernel(RELU, device_type="cpu") is None
    for end in ends:
        end()
