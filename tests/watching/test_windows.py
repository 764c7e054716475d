"""What is done with scaled gradients between the backward pass and unscaling, seen operation by operation."""

# `Tensor.backward` has no types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from halfstep._torch.dispatching import DispatchMode
from halfstep.watching.states import OptimizerState
from halfstep.watching.windows import GradientWindow

pytestmark = pytest.mark.usefixtures("one_thread")

FOREACH: Any = torch


class Scene:
    """A parameter with its gradient, and a tensor that is none."""

    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.ones(4))
        self.weight.grad = torch.full((4,), 8.0)
        self.optimizer = torch.optim.SGD([self.weight], lr=0.1)
        self.other = torch.ones(4)

    def see(self, use: Callable[[Any], object], tensor: Tensor | None = None) -> list[tuple[str, int, str]]:
        """What is found where a gradient, or another tensor, is used; lines count from that of the `use`."""
        assert self.weight.grad is not None
        window = GradientWindow(OptimizerState(optimizer=ref(self.optimizer)), [self.weight.grad], scale="the loss scale of 8")
        window.open()
        try:
            use(self.weight.grad if tensor is None else tensor)
        finally:
            window.close()
        first = inspect.getsourcelines(use)[1]
        return [(rule, line.number - first, seen) for rule, line, seen in window.findings()]


MEASURED = {
    "norm": lambda g: g.norm(),
    "vector norm": lambda g: torch.linalg.vector_norm(g, 2),
    "norm of data": lambda g: g.data.norm(2),
    "foreach": lambda g: FOREACH._foreach_norm([g]),
    "foreach of many": lambda g: FOREACH._foreach_norm((torch.ones(2), g)),
    "squared": lambda g: g.square().sum().sqrt(),
    "power": lambda g: (g**2).sum(),
    "dot": lambda g: torch.dot(g, g),
    "std": lambda g: g.std(),
    "var": lambda g: g.var(),
    "detached": lambda g: g.detach().norm(),
    "as a whole": lambda g: torch.cat([torch.zeros(1), g]).norm(),
    "stacked": lambda g: torch.stack([g, g]).norm(),
    "cloned": lambda g: g.clone().norm(),
    "in another dtype": lambda g: g.double().norm(),
    "magnitudes": lambda g: g.abs().pow(3).sum(),
}

LIMITED = {
    "clamp": lambda g: g.clamp_(-1, 1),
    "clamp to another": lambda g: g.copy_(g.clamp(-1, 1)),
    "clip": lambda g: g.clip_(-1, 1),
    "clamp from below": lambda g: g.clamp_min_(-1),
    "clamp from above": lambda g: g.clamp_max_(1),
    "foreach from below": lambda g: FOREACH._foreach_clamp_min_([g], -1),
    "foreach from above": lambda g: FOREACH._foreach_clamp_max_([g], 1),
    "multiplied after its norm": lambda g: g.mul_(1 / g.norm()),
    "divided by its norm": lambda g: g.div_(g.norm()),
    "foreach after norms": lambda g: FOREACH._foreach_mul_([g], 1 / FOREACH._foreach_norm([g])[0]),
    "foreach divided": lambda g: FOREACH._foreach_div_([g], FOREACH._foreach_norm([g])[0]),
}

LEFT_ALONE = {
    "averaged over ranks": lambda g: g.div_(4),
    "multiplied": lambda g: g.mul_(0.5),
    "foreach multiplied": lambda g: FOREACH._foreach_mul_([g], 0.5),
    "summed": lambda g: g.sum(),
    "checked": lambda g: torch.isfinite(g).all(),
    "largest": lambda g: g.max(),
    "zeroed": lambda g: g.zero_(),
    "added to": lambda g: g.add_(torch.randn(4)),
    "shown": lambda g: f"{g}",
}


@pytest.mark.parametrize("use", MEASURED.values(), ids=MEASURED.keys())
def test_a_size_that_is_measured_is_told(use: Callable[[Any], object]) -> None:
    told = "The size of gradients is computed while they are multiplied with the loss scale of 8."
    assert Scene().see(use) == [("scaled_norm_logged", 0, told)]


@pytest.mark.parametrize("use", LIMITED.values(), ids=LIMITED.keys())
def test_a_limit_is_told(use: Callable[[Any], object]) -> None:
    told = "Gradients that are multiplied with the loss scale of 8 are limited here."
    assert Scene().see(use) == [("clip_before_unscale", 0, told)]


@pytest.mark.parametrize("use", LEFT_ALONE.values(), ids=LEFT_ALONE.keys())
def test_nothing_is_said_of_what_is_right(use: Callable[[Any], object]) -> None:
    assert Scene().see(use) == []


@pytest.mark.parametrize("use", [*MEASURED.values(), *LIMITED.values()], ids=[*MEASURED, *LIMITED])
def test_nothing_is_said_of_tensors_that_are_no_gradients(use: Callable[[Any], object]) -> None:
    scene = Scene()
    assert scene.see(use, scene.other) == []


def test_the_first_line_counts() -> None:
    def use(g: Tensor) -> None:
        norm = g.norm()
        g.square().sum()
        g.mul_(1 / norm)
        g.clamp_(-1, 1)

    assert [(rule, line) for rule, line, _ in Scene().see(use)] == [("clip_before_unscale", 3)]

    def measure(g: Tensor) -> None:
        g.sum()
        g.norm()
        g.var()

    assert [(rule, line) for rule, line, _ in Scene().see(measure)] == [("scaled_norm_logged", 2)]


def test_results_are_those_without_it() -> None:
    scene = Scene()
    results: list[Any] = []

    def use(g: Tensor) -> None:
        results.append(torch.cat([g, scene.other]).norm(p=1, dtype=torch.float64))
        results.append(torch.empty(4))
        torch.add(g, scene.other, alpha=2, out=results[1])

    scene.see(use)
    assert results[0].item() == 36.0
    assert results[0].dtype is torch.float64
    np.testing.assert_array_equal(results[1].numpy(), np.full(4, 10.0))


def test_sparse_gradients_and_those_of_a_class_of_their_own_are_left_alone() -> None:
    class Marked(Tensor):
        pass

    sparse = torch.eye(2).to_sparse()
    marked: Any = torch.ones(2).as_subclass(Marked)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    window = GradientWindow(OptimizerState(optimizer=ref(optimizer)), [sparse, marked], scale="the loss scale")
    window.open()
    try:
        sparse.sum()
        marked.norm()
        torch.empty(0).norm()
    finally:
        window.close()
    assert [*window.findings()] == []


class Above(DispatchMode):
    """A mode that must go on to see operations first."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_it_lies_below_the_modes_that_halfstep_has_and_leaves_them_there() -> None:
    scene, above = Scene(), Above()
    assert scene.weight.grad is not None
    window = GradientWindow(OptimizerState(optimizer=ref(scene.optimizer)), [scene.weight.grad], scale="the loss scale")
    with above:
        window.open()
        scene.weight.grad.clamp_(-1, 1)
        window.close()
        scene.weight.grad.clamp_(-2, 2)
    assert above.seen == ["clamp_.default", "clamp_.default"]
    assert [rule for rule, *_ in window.findings()] == ["clip_before_unscale"]
    assert torch._C._len_torch_dispatch_stack() == 0
