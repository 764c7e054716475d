"""The models and optimizers that `halfstep.diagnose` takes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep import Policy, Task
from tests.diagnosis.tasks import BREAKING, Net, Wide, diagnose, factored, factory, loss_of
from tests.engine.loops import same_state

INF = float("inf")
pytestmark = pytest.mark.usefixtures("one_thread")


class Linear(nn.Linear):
    """One that takes a factor."""

    def forward(self, x: Tensor, factor: Any = 1.0) -> Tensor:
        result: Tensor = super().forward(x) * factor
        return result


class Shared(nn.Module):
    """A module at two paths, and a weight in two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), Linear(4, 4)
        self.second.weight = self.first.weight
        self.third = self.second

    def forward(self, x: Tensor, factor: Any = 1.0) -> Tensor:
        return nn.functional.layer_norm(self.third(self.second(self.first(x)), factor), (4,))


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.wide.requires_grad_(False)


class Embedded(Net):
    """Gradients that are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4, sparse=True)

    def forward(self, x: Tensor, factor: Any = 1.0) -> Tensor:
        return super().forward(self.table(x.abs().long().clamp(max=9)).mean(1), factor)


class Complex(Net):
    """A complex buffer that moves with each step."""

    turns: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turns", torch.randn(2, dtype=torch.complex64))

    def forward(self, x: Tensor, factor: Any = 1.0) -> Tensor:
        self.turns.mul_(1.01)
        return torch.view_as_real(super().forward(x, factor).float() * self.turns)


class Wrapper(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model

    def forward(self, *args: Any) -> Tensor:
        result: Tensor = self.module(*args)
        return result


class Double(Net):
    """Some parameters in fp64, which autocast leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        self.head.double()

    def forward(self, x: Tensor, factor: Any = 1.0) -> Tensor:
        hidden = self.norm(self.wide(x, factor))
        result: Tensor = self.head(hidden.double())
        return result


class Normalized(Net):
    """Buffers that each forward pass writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)  # type: ignore[assignment]


def compiled() -> nn.Module:
    torch._dynamo.reset()
    return torch.compile(Net(), backend="eager")  # type: ignore[return-value]


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "shared": (Shared, "second"),
    "frozen": (Frozen, "wide"),
    "sparse": (Embedded, "wide"),
    "complex": (Complex, "wide"),
    "double": (Double, "wide"),
    "batch norm": (Normalized, "wide"),
    "compiled": (compiled, "wide"),
    "wrapper": (lambda: Wrapper(Net()), "module.wide"),
    "data parallel": (lambda: nn.DataParallel(Net()), "wide"),
    "averaged": (lambda: torch.optim.swa_utils.AveragedModel(Net()), "module.wide"),
}


# torch says so of the hooks of a trace, once in a process.
QUIET = pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")


@QUIET
@pytest.mark.parametrize("name", MODELS)
class TestModels:
    def test_one_that_breaks(self, name: str) -> None:
        model, module = MODELS[name]
        diagnosis = diagnose(factory(factored(1.0, BREAKING), model=model), loss_scale=64.0)
        assert (diagnosis.cause, diagnosis.step, diagnosis.skips) == ("forward", 2, 1)
        assert diagnosis.origin is not None
        assert (diagnosis.origin.op, diagnosis.origin.site.module) == ("aten.mul.Tensor", module)
        assert diagnosis.verified
        assert diagnosis.replays <= 6

    def test_one_that_does_not(self, name: str) -> None:
        diagnosis = diagnose(factory(factored(1.0, 1.0), model=MODELS[name][0]), loss_scale=64.0)
        assert (diagnosis.cause, diagnosis.steps, diagnosis.skips) == ("healthy", 3, 0)

    def test_a_function_of_it(self, name: str) -> None:
        model = MODELS[name][0]()
        ((batch),) = factored(BREAKING)
        before = deepcopy(model.state_dict())
        diagnosis = diagnose(lambda: loss_of(model, batch), model=model, target="cuda")
        assert (diagnosis.cause, diagnosis.verified) == ("forward", True)
        assert same_state(model.state_dict(), before)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, foreach=True, amsgrad=True),
        lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, nesterov=True),
        lambda parameters: torch.optim.LBFGS(parameters, lr=1e-3, max_iter=2),
        lambda parameters: torch.optim.Adafactor(parameters, lr=1e-3),
        lambda parameters: torch.optim.Rprop(parameters, lr=1e-3),
    ],
    ids=["adamw", "fused", "foreach", "momentum", "lbfgs", "adafactor", "rprop"],
)
def test_optimizers(optimizer: Any) -> None:
    diagnosis = diagnose(factory(factored(1.0, 1.0, BREAKING), optimizer=optimizer), max_steps=5, loss_scale=64.0)
    assert (diagnosis.cause, diagnosis.step, diagnosis.skips, diagnosis.verified) == ("forward", 3, 1, True)


@pytest.mark.filterwarnings("always:Using `torch.compile:UserWarning")
def test_a_compiled_model_is_diagnosed_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert diagnose(factory(factored(1.0), model=compiled), loss_scale=64.0).cause == "healthy"


def test_a_model_that_the_factory_did_not_make_can_be_diagnosed_again() -> None:
    model = Net()

    def task(seed: int) -> Task:
        return Task(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01), loss=loss_of, batches=factored(BREAKING))

    first, second = (diagnose(task, precision="fp16; head=fp32") for _ in range(2))
    assert first.cause == second.cause == "forward"
    assert not hasattr(Wide, "__wrapped__")
    Policy.parse("fp16; head=fp32").apply(model).remove()
