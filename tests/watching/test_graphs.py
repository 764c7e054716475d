"""What a loss was computed from, as far as its graph tells."""

# `Tensor.backward` has no types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep.watching.graphs import cast_dtype, find_mark, has_factor, mark

pytestmark = pytest.mark.usefixtures("one_thread")

KEY = object()


def weight() -> Tensor:
    return torch.ones(2, requires_grad=True)


def chain(value: Tensor, length: int) -> Tensor:
    for _ in range(length):
        value = value + 1
    return value


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x,
        lambda x: x / 4,
        lambda x: torch.stack([weight().sum(), x, x]).mean(),
        lambda x: chain(x, 300),
        lambda x: x.double().float(),
    ],
    ids=["itself", "divided", "in a mean", "far above", "cast"],
)
def test_a_mark_is_found_in_what_was_made_of_the_tensor(use: Callable[[Tensor], Tensor]) -> None:
    marked = weight().sum()
    assert mark(marked, KEY, "scaled")
    assert find_mark(use(marked), KEY) == "scaled"
    assert find_mark(use(marked), object()) is None


def test_a_mark_is_not_searched_for_in_other_models() -> None:
    marked = weight().sum()
    mark(marked, KEY, "scaled")
    assert find_mark(chain(marked, 500), KEY) is None


def test_the_nearest_mark_counts() -> None:
    inner = weight().sum()
    mark(inner, KEY, "first")
    outer = inner * 2
    mark(outer, KEY, "second")
    assert (find_mark(outer, KEY), find_mark(outer / 2, KEY), find_mark(inner / 2, KEY)) == ("second", "second", "first")


def test_a_graph_that_joins_again_and_again_is_walked_once() -> None:
    marked = weight().sum()
    mark(marked, KEY, "scaled")
    value = marked
    for _ in range(150):
        value = value + value * value
    assert find_mark(value, KEY) == "scaled"


@pytest.mark.parametrize("tensor", [torch.ones(()), torch.ones((), requires_grad=True)], ids=["constant", "leaf"])
def test_what_has_no_graph_keeps_no_mark(tensor: Tensor) -> None:
    assert not mark(tensor, KEY, "scaled")
    assert find_mark(tensor, KEY) is None
    assert not has_factor(tensor, [tensor])
    assert not cast_dtype(tensor)


def test_a_mark_ends_with_the_graph() -> None:
    marked = weight().sum()
    mark(marked, KEY, "scaled")
    node: Any = marked.grad_fn
    assert KEY in node.metadata
    marked.backward()
    del marked, node
    assert find_mark(weight().sum(), KEY) is None


class TestFactors:
    scale = torch.tensor(128.0)

    @pytest.mark.parametrize(
        "use",
        [lambda x, scale: x * scale, lambda x, scale: scale * x, lambda x, scale: (x * scale) / 4 + 1],
        ids=["from the right", "from the left", "and divided"],
    )
    def test_what_was_multiplied_is_seen(self, use: Callable[[Tensor, Tensor], Tensor]) -> None:
        loss = use(weight().sum(), self.scale)
        assert has_factor(loss, [torch.tensor(2.0), self.scale])
        assert not has_factor(loss, [torch.tensor(2.0)])
        assert not has_factor(loss, [])

    @pytest.mark.parametrize("use", [lambda x, scale: x + scale, lambda x, scale: x / scale], ids=["added", "divided"])
    def test_what_was_not_multiplied_is_not(self, use: Callable[[Tensor, Tensor], Tensor]) -> None:
        assert not has_factor(use(weight().sum(), self.scale), [self.scale])

    def test_what_a_backward_pass_has_freed_is_passed_over(self) -> None:
        loss = weight().square().sum() * self.scale
        loss.backward()
        assert not has_factor(loss, [self.scale])


class TestCasts:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_autocast_is_seen_through_layers(self, dtype: torch.dtype) -> None:
        net = nn.Sequential(*(nn.Linear(2, 2) for _ in range(30)))
        with torch.autocast("cpu", dtype=dtype):
            loss = net(torch.ones(1, 2)).float().sum()
        assert cast_dtype(loss)
        assert not cast_dtype(net(torch.ones(1, 2)).sum())

    def test_a_region_without_a_product_casts_nothing(self) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = (weight() * 2).sum()
        assert not cast_dtype(loss)
