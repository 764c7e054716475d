from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
from torch import nn
from torch.optim import SGD

from halfstep import amp
from halfstep.errors import ConfigurationError, HalfstepWarning, InvalidTypeError, StepOrderError


def start(**arguments: Any) -> None:
    model = nn.Linear(2, 2)
    amp.initialize(model, SGD(model.parameters(), lr=1.0), opt_level="O1", **arguments)


def entries(*scales: float) -> dict[str, Any]:
    return {f"loss_scaler{number}": {"loss_scale": scale, "unskipped": number + 1} for number, scale in enumerate(scales)}


def test_before_initialize() -> None:
    with pytest.raises(StepOrderError, match=r"amp.state_dict\(\) was called before amp.initialize"):
        amp.state_dict()
    with pytest.raises(StepOrderError, match=r"amp.load_state_dict\(...\) was called before amp.initialize"):
        amp.load_state_dict({})


def test_the_state_has_the_form_of_apexs() -> None:
    start(num_losses=2)
    state = amp.state_dict()
    entry = {"loss_scale": 2.0**16, "unskipped": 0}
    assert state == OrderedDict(loss_scaler0=entry, loss_scaler1=entry)
    assert [type(value) for value in state["loss_scaler0"].values()] == [float, int]
    given: OrderedDict[str, Any] = OrderedDict(epoch=3)
    assert amp.state_dict(given) is given
    assert list(given) == ["epoch", "loss_scaler0", "loss_scaler1"]


def test_what_was_saved_is_loaded() -> None:
    start(num_losses=3)
    saved = entries(2.0, 4.0, 8.0)
    amp.load_state_dict(saved)
    assert amp.state_dict() == saved


@pytest.mark.parametrize(("losses", "saved"), [(1, 2), (3, 2), (2, 0)])
def test_another_number_of_losses_is_loaded_as_far_as_it_goes_with_a_warning(losses: int, saved: int) -> None:
    start(num_losses=losses)
    with pytest.warns(HalfstepWarning, match=rf"one of {saved} loss scalers, and amp.initialize made {losses}") as caught:
        amp.load_state_dict(entries(*[4.0] * saved))
    assert caught[0].filename == __file__
    scales = [entry["loss_scale"] for entry in amp.state_dict().values()]
    assert scales == [4.0 if number < saved else 2.0**16 for number in range(losses)]


@pytest.mark.parametrize(
    "state",
    [
        {"loss_scaler0": {"loss_scale": 4.0, "unskipped": 0}, "epoch": 3},
        {"loss_scaler7": {"loss_scale": 4.0, "unskipped": 0}},
        {"loss_scaler0": {"loss_scale": 4.0}},
        {"loss_scaler0": 4.0},
    ],
)
def test_what_is_no_state(state: dict[str, Any]) -> None:
    start()
    with pytest.raises(ConfigurationError, match=r"is no entry of a loss scaler. Allowed are loss_scaler0, loss_scaler1"):
        amp.load_state_dict(state)
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 2.0**16


def test_what_is_no_mapping() -> None:
    start()
    with pytest.raises(InvalidTypeError, match=r"takes what amp.state_dict\(\) returned, not a list"):
        amp.load_state_dict([])  # type: ignore[arg-type]


def test_a_static_scale_stays() -> None:
    start(loss_scale=128.0)
    amp.load_state_dict(entries(4.0))
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 128.0


def test_a_scale_below_the_floor() -> None:
    start()
    with pytest.warns(HalfstepWarning, match="lies outside of this run's bounds"):
        amp.load_state_dict(entries(0.25))
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 1.0
