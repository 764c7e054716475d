from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep
from tests.comparison.tasks import make_factory


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """torch.compile with a backend that compiles nothing but notes each time that it is asked to, as Inductor would be."""
    compiled: list[str] = []
    original = torch.compile

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        compiled.append(graph.code)
        return graph.forward

    with warnings.catch_warnings():
        # What torch imports for its compiler is deprecated by torch itself.
        warnings.simplefilter("ignore", DeprecationWarning)
        monkeypatch.setattr(torch, "compile", lambda model: original(model, backend=backend))
        torch.compiler.reset()
        yield compiled
        torch.compiler.reset()


class Seeded(nn.Module):
    """A model that is compiled anew for each seed, because a Python number in it differs."""

    made = 0

    def __init__(self) -> None:
        super().__init__()
        Seeded.made += 1
        self.number = Seeded.made
        self.linear = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x) / (1 + self.number)
        return out


def test_nothing_falls_back_to_uncompiled_however_many_seeds_there_are(compiler: list[str]) -> None:
    # 3 precisions x 4 seeds is more than the 8 times that torch compiles a function before it gives up.
    comparison = halfstep.compare(make_factory(model=Seeded), steps=1, warmup=2, seeds=4, device="cpu", compile=True)
    assert [run.outcome for run in comparison.runs] == ["complete"] * 3
    assert len(compiled := compiler) == 12, compiled
    assert comparison.settings.compile


def test_losses_are_those_of_the_uncompiled_model(compiler: list[str]) -> None:
    factory = make_factory(model=lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    settings: dict[str, Any] = {"steps": 2, "warmup": 2, "seeds": 2, "device": "cpu"}
    plain = halfstep.compare(factory, **settings)
    assert not compiler
    compiled = halfstep.compare(factory, **settings, compile=True)
    assert compiler
    assert [run.losses for run in compiled.runs] == [run.losses for run in plain.runs]


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_inductor_trains_alike() -> None:
    settings: dict[str, Any] = {"precisions": ["bf16"], "steps": 1, "warmup": 2, "seeds": 1, "device": "cpu"}
    compiled, plain = (halfstep.compare(make_factory(), **settings, compile=chosen) for chosen in (True, False))
    assert [run.note for run in compiled.runs] == ["", ""]
    for mine, theirs in zip(compiled.runs, plain.runs, strict=True):
        assert mine.losses[0] == pytest.approx(theirs.losses[0], rel=2e-2)
