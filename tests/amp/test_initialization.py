from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import halfstep
from halfstep import Policy, amp
from halfstep.errors import ConfigurationError, InvalidTypeError
from tests.amp.nets import adam, make_net, sgd, tensors_of


def test_what_comes_back_is_what_was_passed_in_the_same_form() -> None:
    def pair() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = make_net()
        return model, sgd(model)

    model, optimizer = pair()
    assert amp.initialize(model, optimizer) == (model, optimizer)
    model, optimizer = pair()
    assert amp.initialize(model, [optimizer]) == (model, [optimizer])
    model, optimizer = pair()
    assert amp.initialize([model], optimizer) == ([model], optimizer)
    model, optimizer = pair()
    assert amp.initialize([model], [optimizer]) == ([model], [optimizer])
    model, optimizer = pair()
    assert amp.initialize(model) is model
    model, optimizer = pair()
    assert amp.initialize([model]) == [model]


def test_it_is_found_on_the_package() -> None:
    assert halfstep.amp is amp  # type: ignore[attr-defined, unused-ignore]


def test_the_default_is_o1() -> None:
    model = amp.initialize(make_net())
    seen: list[torch.dtype] = []
    model.first.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    assert model(torch.ones(2, 6)).dtype is torch.float32
    assert seen == [torch.float16]


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_outputs_are_cast_to_what_is_asked_for(level: str, dtype: torch.dtype) -> None:
    model = amp.initialize(make_net(), opt_level=level, cast_model_outputs=dtype)
    assert model(torch.ones(2, 6)).dtype is dtype


@pytest.mark.parametrize("times", [1, 2])
def test_a_model_or_an_optimizer_is_passed_once(times: int) -> None:
    model, other = make_net(), make_net()
    optimizer = sgd(model)
    amp.initialize(model, optimizer)
    with pytest.raises(ConfigurationError, match=r"This Net was passed to amp.initialize before. Call it once, with all models"):
        amp.initialize(model, sgd(model))
    with pytest.raises(ConfigurationError, match=r"This SGD was passed to amp.initialize before"):
        amp.initialize(other, optimizer)
    if times == 2:
        amp.initialize(other, sgd(other))


def test_the_same_twice_in_a_list() -> None:
    model = make_net()
    optimizer = sgd(model)
    with pytest.raises(ConfigurationError, match="the same model twice"):
        amp.initialize([model, model], optimizer)
    with pytest.raises(ConfigurationError, match="the same optimizer twice"):
        amp.initialize(model, [optimizer, optimizer])
    amp.initialize(model, optimizer)


@pytest.mark.parametrize(
    ("models", "optimizers", "message"),
    [
        ("net", None, "takes a model or a list of models, not 'net'"),
        ((make_net(),), None, "takes a model or a list of models"),
        (make_net(), 0.1, "takes an optimizer or a list of optimizers, not 0.1"),
        (make_net(), (sgd(make_net()),), "takes an optimizer or a list of optimizers"),
        (sgd(make_net()), make_net(), "takes a model or a list of models"),
    ],
)
def test_what_is_no_model_or_optimizer(models: Any, optimizers: Any, message: str) -> None:
    with pytest.raises(InvalidTypeError, match=message):
        amp.initialize(models, optimizers)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_losses": 0}, r"num_losses=0\): allowed is a whole number from 1"),
        ({"num_losses": True}, r"num_losses=True\): allowed is a whole number from 1"),
        ({"cast_model_outputs": torch.int8}, r"cast_model_outputs=torch.int8\): allowed are"),
        ({"min_loss_scale": 8.0, "max_loss_scale": 4.0}, "the floor lies above the ceiling"),
    ],
)
def test_arguments_that_are_not_allowed(arguments: dict[str, Any], message: str) -> None:
    model = make_net()
    with pytest.raises(ConfigurationError, match=message):
        amp.initialize(model, sgd(model), **arguments)
    amp.initialize(model, sgd(model))  # Nothing was changed.


def test_a_wrapped_model_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"was given a DataParallel. Wrap the model after amp.initialize has returned it"):
        amp.initialize(nn.DataParallel(make_net()))


@pytest.mark.parametrize(("path", "kind"), [("first.weight", "parameter"), ("norm.running_mean", "buffer")])
def test_a_model_in_half_is_refused(path: str, kind: str) -> None:
    model = make_net()
    tensor = model.first.weight if kind == "parameter" else model.norm.running_mean
    assert tensor is not None
    tensor.data = tensor.data.half()
    with pytest.raises(ConfigurationError, match=rf"its {kind} {path} is torch.float16. Leave out model.half\(\)"):
        amp.initialize(model)


def test_of_several_models_none_is_changed_where_one_cannot_be() -> None:
    good, bad = make_net(), make_net()
    with Policy.O1.apply(bad):
        with pytest.raises(ConfigurationError, match="A policy is applied to this Net already"):
            amp.initialize([good, bad], opt_level="O3")
        assert good.first.weight.dtype is torch.float32
    amp.initialize([good, bad], opt_level="O3")
    assert good.first.weight.dtype is torch.float16


def test_state_that_an_optimizer_has_already_follows_the_parameters() -> None:
    model = make_net()
    optimizer = adam(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    _, optimizer = amp.initialize(model, optimizer, opt_level="O3")
    assert all(parameter.grad is None for parameter in model.parameters())
    for parameter in model.parameters():
        kept = optimizer.state[parameter]
        assert kept["exp_avg"].dtype is kept["exp_avg_sq"].dtype is torch.float16
        assert kept["step"].dtype is torch.float32
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


@pytest.mark.parametrize("verbosity", [0, 1])
def test_it_is_logged_and_not_printed(verbosity: int, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_net()
    with caplog.at_level(logging.INFO, logger="halfstep.amp"):
        model, optimizer = amp.initialize(model, sgd(model), opt_level="O2", verbosity=verbosity)
        with amp.scale_loss(model(torch.randn(4, 6)).sum() * float("inf"), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    assert capsys.readouterr() == ("", "")
    expected = ["opt_level='O2'", "A gradient overflowed: the next step is skipped, and the scale of loss 0 is now 32768."]
    assert [part in message for part, message in zip(expected, caplog.messages, strict=False)] == [True] * (2 * verbosity)
    assert len(caplog.messages) == 2 * verbosity


def test_the_parameters_are_the_same_objects_at_every_level() -> None:
    for level in ("O0", "O1", "O2", "O3"):
        model = make_net()
        before, values = list(model.parameters()), tensors_of(model)
        amp.initialize(model, opt_level=level)
        assert all(one is other for one, other in zip(before, model.parameters(), strict=True))
        stored = torch.float16 if level == "O3" else torch.float32
        assert [each.dtype for each in before] == [stored] * 6
        for found, value in zip(tensors_of(model), values, strict=True):
            assert torch.equal(found, value.to(found.dtype))
