"""What a model has beside its state, and what the script decides: settled before anything is changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep.checkpoint import load_checkpoint, save_checkpoint
from halfstep.engine import MixedPrecision
from halfstep.errors import CheckpointError, HalfstepWarning


class Cached(nn.Module):
    """Its first forward pass makes a buffer, and each one writes to it."""

    def __init__(self, *, persistent: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.mean: Tensor | None
        self.register_buffer("mean", None, persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean = x.mean(0) if self.mean is None else 0.5 * self.mean + 0.5 * x.mean(0)
        out: Tensor = self.layer(x - self.mean)
        return out


def engine(model: nn.Module) -> MixedPrecision:
    return MixedPrecision(model, torch.optim.Adam(model.parameters(), lr=0.1), "fp32")


def train(amp: MixedPrecision, start: int, stop: int) -> None:
    for number in range(start, stop):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(number))
        amp.train_step(lambda x: amp.model(x).square().mean(), x)


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_buffer_that_the_first_forward_pass_makes(at: int, persistent: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    amp = engine(Cached(persistent=persistent))
    train(amp, 0, at)
    path = save_checkpoint(tmp_path / "a.pt", amp, step=at)
    other = engine(Cached(persistent=persistent))
    load_checkpoint(path, other)
    for each in (amp, other):
        train(each, at, 5)
    model, loaded = amp.model, other.model
    assert torch.equal(model.mean, loaded.mean)  # type: ignore[arg-type]
    assert torch.equal(model.layer.weight, loaded.layer.weight)  # type: ignore[arg-type, union-attr]
    assert "mean" in dict(loaded.named_buffers())
    assert ("mean" in loaded.state_dict()) == persistent


def test_a_buffer_that_was_made_is_taken_away_when_the_load_fails(tmp_path: Path) -> None:
    amp = engine(Cached(persistent=True))
    train(amp, 0, 1)
    path = save_checkpoint(tmp_path / "a.pt", amp, step=1)

    class Refusing(Cached):
        def _load_from_state_dict(self, *_: Any) -> None:
            raise ArithmeticError("not this one")

    other = engine(Refusing(persistent=True))
    with pytest.raises(ArithmeticError, match="not this one"):
        load_checkpoint(path, other)
    assert other.model.mean is None


@pytest.mark.parametrize(
    ("then", "now", "match"),
    [
        (["0"], [], r"^model\.0\.bias and 1 more was frozen when the checkpoint was saved, and is trained in this run"),
        ([], ["1"], r"^model\.1\.bias and 1 more was trained when the checkpoint was saved, and is frozen \(requires_grad=False\)"),
    ],
)
def test_other_parameters_are_frozen(then: list[str], now: list[str], match: str, tmp_path: Path) -> None:
    def made(frozen: list[str]) -> MixedPrecision:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        for name in frozen:
            model.get_submodule(name).requires_grad_(False)
        return engine(model)

    path = save_checkpoint(tmp_path / "a.pt", made(then), step=1)
    other = made(now)
    with pytest.warns(HalfstepWarning, match=match):
        info = load_checkpoint(path, other)
    assert len(info.notes) == 1
    frozen = [name for name, each in other.model.named_parameters() if not each.requires_grad]
    assert frozen == [f"{name}.{end}" for name in now for end in ("weight", "bias")]
    assert load_checkpoint(path, made(then)).notes == ()


def test_a_cache_that_has_grown_is_left_as_it_is(tmp_path: Path) -> None:
    def made(length: int) -> MixedPrecision:
        model = nn.Linear(3, 1)
        model.register_buffer("cache", torch.zeros(length), persistent=False)
        return engine(model)

    path = save_checkpoint(tmp_path / "a.pt", made(4), step=1)
    other = made(2)
    with pytest.warns(HalfstepWarning, match=r"The buffer cache, which is in no state of the model, is float32 of shape \(4,\) in"):
        load_checkpoint(path, other)
    assert other.model.cache.shape == (2,)


def test_what_is_trained_beside_the_model(tmp_path: Path) -> None:
    def made(*shape: int) -> tuple[MixedPrecision, nn.Parameter]:
        model, weight = nn.Linear(3, 1), nn.Parameter(torch.rand(*shape))
        with pytest.warns(HalfstepWarning, match="parameters are not the model's"):
            return MixedPrecision(model, torch.optim.Adam([*model.parameters(), weight]), "fp32"), weight

    amp, weight = made(2)
    path = save_checkpoint(tmp_path / "a.pt", amp, step=1)
    other, loaded = made(2)
    load_checkpoint(path, other)
    assert torch.equal(weight, loaded)
    other, loaded = made(3)
    before = loaded.clone()
    with pytest.raises(CheckpointError, match=r"over other parameters: group 0 has|is float32 of shape \(2,\) in the checkpoint"):
        load_checkpoint(path, other)
    assert torch.equal(before, loaded)


def test_names_of_engines_that_differ(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    path = save_checkpoint(tmp_path / "a.pt", {"one": engine(model)}, step=1)
    with pytest.raises(CheckpointError, match=r"was saved with other engines: one\. This run has a single one without a name\."):
        load_checkpoint(path, engine(model))
