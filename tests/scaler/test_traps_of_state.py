"""What goes wrong with the settings, copies and checkpoints of torch's scaler, shown on it first, and what `LossScaler` does instead."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from halfstep.errors import ConfigurationError, HalfstepWarning
from halfstep.scaler import LossScaler
from tests.scaler.loops import INF, NAN, OPTIMIZERS, backward, iterate, weights

GradScaler = torch.amp.GradScaler


def torch_scaler(**settings: Any) -> GradScaler:
    return GradScaler("cpu", **{"init_scale": 8.0, **settings})


def own_scaler(**settings: Any) -> LossScaler:
    return LossScaler("cpu", **{"init_scale": 8.0, **settings})


class TestArguments:
    WRONG = ({"backoff_factor": -1.0}, {"backoff_factor": 0.0}, {"growth_interval": 0}, {"init_scale": -1.0}, {"init_scale": INF})

    @pytest.mark.parametrize("settings", WRONG, ids=str)
    def test_settings(self, settings: dict[str, Any]) -> None:
        torch_scaler(**settings)
        with pytest.raises(ConfigurationError, match=next(iter(settings))):
            own_scaler(**settings)

    def test_a_whole_number_as_the_new_scale(self) -> None:
        theirs, ours = torch_scaler(), own_scaler()
        for scaler in (theirs, ours):
            scaler.scale(torch.ones(()))
        with pytest.raises(AttributeError, match="'int' object has no attribute 'device'"):
            theirs.update(2)
        ours.update(2)
        assert ours.get_scale() == 2.0
        theirs.update(NAN)
        assert theirs.get_scale() != theirs.get_scale()
        with pytest.raises(ConfigurationError, match="nan cannot be a loss scale"):
            ours.update(NAN)


class TestDisabled:
    def test_torch(self) -> None:
        scaler = torch_scaler(enabled=False)
        for name in ("get_growth_factor", "get_backoff_factor", "get_growth_interval"):
            with pytest.raises(AttributeError):
                getattr(scaler, name)()
        scaler.load_state_dict(torch_scaler().state_dict())  # In silence.
        with pytest.raises(RuntimeError, match="source state dict is empty"):
            torch_scaler().load_state_dict(scaler.state_dict())

    def test_ours(self) -> None:
        scaler = own_scaler(enabled=False)
        assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (2.0, 0.5, 2000)
        with pytest.warns(HalfstepWarning, match="disabled scaler"):
            scaler.load_state_dict(own_scaler().state_dict())
        with pytest.raises(ConfigurationError, match=r"saved by a disabled scaler.*to accept that, do not load it"):
            own_scaler().load_state_dict(scaler.state_dict())


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens where there is no GPU")
class TestNoGpu:
    def test_torch(self) -> None:
        with pytest.warns(UserWarning, match="CUDA is not available"):
            assert not GradScaler().is_enabled()

    def test_ours(self) -> None:
        scaler, (weight,) = LossScaler(), weights()
        assert scaler.is_enabled()
        iterate(scaler, OPTIMIZERS["sgd"]([weight]), 1.0)
        assert weight.tolist() == [0.5] * 3
        with pytest.raises(ConfigurationError, match="sees no CUDA device"):
            LossScaler("cuda")


class TestSettingsInACheckpoint:
    def test_torch(self) -> None:
        scaler = torch_scaler(growth_interval=5)
        scaler.load_state_dict(torch_scaler().state_dict())
        assert scaler.get_growth_interval() == 2000

    def test_ours(self) -> None:
        scaler = own_scaler(growth_interval=5)
        for saved in (torch_scaler().state_dict(), own_scaler().state_dict()):
            scaler.load_state_dict(saved)
            assert scaler.get_growth_interval() == 5
        scaler.load_state_dict(saved, adopt_settings=True)
        assert scaler.get_growth_interval() == 2000


class TestCopiesInTheMiddle:
    def test_torch(self) -> None:
        scaler, (weight,) = torch_scaler(), weights()
        optimizer = OPTIMIZERS["sgd"]([weight])
        backward(scaler, [weight], 1.0)
        scaler.unscale_(optimizer)
        for clone in (copy.deepcopy, pickle.dumps):
            with pytest.raises(AssertionError, match="may only be pickled at the beginning"):
                clone(scaler)
        with pytest.raises(RuntimeError, match="already been called"):  # A retry, say, after the memory ran out.
            scaler.unscale_(optimizer)

    def test_ours(self) -> None:
        scaler, (weight,) = own_scaler(), weights()
        optimizer = OPTIMIZERS["sgd"]([weight])
        backward(scaler, [weight], 1.0)
        scaler.unscale_(optimizer)
        for twin in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
            assert twin.state_dict() == scaler.state_dict()
        scaler.discard()
        iterate(scaler, optimizer, 1.0, unscale=True)
        assert weight.tolist() == [0.5] * 3
