"""A policy leaves no trace: not when it is removed, and not in what is copied, saved or pickled while it is applied."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel
from torch.nn.parallel.replicate import _replicatable_module
from torch.nn.utils import parametrizations, parametrize

from halfstep import Policy
from halfstep.casting import Island, Islands, Region
from halfstep.errors import ConfigurationError
from tests.casting.models import Chain, LanguageModel, Residuals, Shared, Translator, UNet
from tests.casting.recordings import take_step

pytestmark = pytest.mark.usefixtures("one_thread")

BF16, FP32 = torch.bfloat16, torch.float32
PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)


@contextmanager
def region() -> Iterator[None]:
    with torch.autocast("cpu", dtype=BF16):
        yield


def pickled(model: nn.Module) -> list[bytes]:
    """The pickles of a model, under all protocols."""
    return [pickle.dumps(model, protocol) for protocol in PROTOCOLS]


def snapshot(model: nn.Module) -> dict[str, Any]:
    """All that a policy could leave a trace in."""
    state = model.state_dict()
    return {
        "types": [type(module) for module in model.modules()],
        "classes": [module.__class__ for module in model.modules()],
        "variables": [{name: _plain(value) for name, value in vars(module).items()} for module in model.modules()],
        "parameters": [id(value) for value in (*model.parameters(), *model.buffers())],
        "keys": list(state),
        "text": repr(model),
        "pickles": pickled(model),
    }


def _plain(value: Any) -> Any:
    return {key: id(part) for key, part in value.items()} if isinstance(value, dict) else id(value) if isinstance(value, Tensor) else value


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "transformer": (Translator, "core.decoder=fp32; torch.nn.LayerNorm=fp32; core.decoder.layers.1=bf16"),
    "resnet": (Residuals, "blocks.1=fp32; class:BatchNorm2d=fp32"),
    "unet": (UNet, "across=fp32; op:conv2d=fp32"),
    "lstm": (LanguageModel, "lstm=fp32; op:linear=fp32"),
    "shared": (Shared, "again=fp32"),
}


@pytest.mark.parametrize("start", ["bf16; ", "pure bf16; "])
@pytest.mark.parametrize("name", MODELS)
def test_applied_and_removed(name: str, start: str) -> None:
    make, overrides = MODELS[name]
    if start.startswith("pure"):
        overrides = "; ".join(each for each in overrides.split("; ") if not each.startswith("op:"))
    model = make()
    before = snapshot(model)
    with Policy.parse(start + overrides).apply(model) as handle:
        applied = snapshot(model)
        assert applied.pop("types") != before["types"]
        assert applied == {key: value for key, value in before.items() if key != "types"}
    assert snapshot(model) == before
    handle.remove()
    assert snapshot(model) == before


def test_what_comes_out_is_as_before() -> None:
    model, inputs = Chain(), torch.randn(4, 6)
    before = take_step(model, inputs)
    with Policy.parse("bf16; a=fp32").apply(model):
        applied = take_step(model, inputs)
    assert not torch.equal(applied.outputs[0].float(), before.outputs[0].float())
    take_step(model, inputs).assert_equal(before)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("text", ["bf16; a=fp32", "pure bf16; a=fp32"])
def test_pickles_and_copies_are_of_the_plain_model(text: str, protocol: int) -> None:
    model, inputs = Chain(), torch.randn(4, 6)
    plain = take_step(model, inputs, recorded=False)
    with Policy.parse(text).apply(model):
        loaded: Any = pickle.loads(pickle.dumps(model, protocol))
        copied, shallow = copy.deepcopy(model), copy.copy(model)
        saved = io.BytesIO()
        torch.save(model, saved)
    saved.seek(0)
    for other in (loaded, copied, shallow, torch.load(saved, weights_only=False)):
        assert type(other) is Chain
        if other is not shallow:  # Its parts are those of the model.
            assert [type(module) for module in other.modules()] == [type(module) for module in model.modules()]
        take_step(other, inputs, recorded=False).assert_same_values(plain)


def test_a_copy_takes_a_policy_of_its_own() -> None:
    model = Chain()
    with Policy.parse("bf16; a=fp32").apply(model):
        other = copy.deepcopy(model)
        with Policy.parse("bf16; b=fp32").apply(other), region():
            assert other.b[0](torch.ones(1, 6)).dtype is FP32
            assert other.a[0](torch.ones(1, 6)).dtype is BF16
            assert model.b[0](torch.ones(1, 6)).dtype is BF16
    assert type(other.b[0]) is nn.Linear


def test_a_state_dict_goes_in_and_out() -> None:
    model, other = Chain(), Chain()
    with Policy.parse("bf16; a=fp32").apply(model), Policy.parse("pure bf16").apply(other):
        other.load_state_dict(model.state_dict())
        assert all(torch.equal(mine, own) for mine, own in zip(other.state_dict().values(), model.state_dict().values(), strict=True))
        assert {each.dtype for each in other.state_dict().values()} == {FP32}


def test_hooks_stay_and_are_called() -> None:
    model: Any = Chain()
    called: list[Any] = []

    def register() -> None:
        model.a.register_forward_pre_hook(lambda module, args: called.append(("pre", args[0].dtype)))
        model.a.register_forward_hook(lambda module, args, result: called.append(("post", result.dtype)))
        model.a.register_full_backward_pre_hook(lambda module, gradients: called.append(("backward pre", gradients[0].dtype)))
        model.a.register_full_backward_hook(lambda module, mine, gradients: called.append(("backward", mine[0].dtype)))
        model.register_state_dict_pre_hook(lambda module, prefix, keep: called.append("state"))

    def counts() -> list[int]:
        return [len(vars(model.a)[name]) for name in ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")]

    register()
    handle = Policy.parse("bf16; a=fp32").apply(model)
    register()
    inputs = torch.randn(4, 6, requires_grad=True)
    with region():
        # The hooks run in the region, as they would if the island were written by hand round the call: they see what the module sees.
        model.a(inputs.bfloat16()).sum().backward()
    assert called == [each for each in (("pre", FP32), ("post", FP32), ("backward pre", FP32), ("backward", FP32)) for _ in range(2)]
    assert counts() == [2, 2, 2, 2]
    handle.remove()
    assert counts() == [2, 2, 2, 2]
    called.clear()
    model.state_dict()
    assert called == ["state", "state"]


def test_removed_after_an_exception() -> None:
    model = Chain()
    before = snapshot(model)

    class StopError(Exception):
        pass

    def stop(*_: object) -> None:
        raise StopError

    hook = model.a[1].register_forward_hook(stop)
    with pytest.raises(StopError), Policy.parse("bf16; a=fp32; op:linear=fp32").apply(model):
        model(torch.ones(1, 6))
    assert not torch.is_autocast_enabled("cpu")
    hook.remove()
    assert snapshot(model) == before


def test_a_second_policy_is_refused_and_changes_nothing() -> None:
    model = Chain()
    with Policy.parse("bf16; b.1=fp32").apply(model):
        applied = [type(module) for module in model.modules()]
        for part in (model, model.b, model.b[1]):
            with pytest.raises(ConfigurationError, match=r"to this (Chain|Linear) already\. Call remove\(\) on its handle"):
                Policy.parse("bf16; torch.nn.Linear=fp16").apply(part)
        assert [type(module) for module in model.modules()] == applied
    assert {type(module) for module in model.modules()} == {Chain, nn.Sequential, nn.Linear}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_what_torchscript_compiled_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)))  # type: ignore[no-untyped-call]
    with pytest.raises(ConfigurationError, match=r"A module that TorchScript compiled \(Linear\) cannot have a precision of its own"):
        Policy.parse("bf16; 0=fp32; 1=fp32").apply(model)
    assert type(model[0]) is nn.Linear


def test_slices_and_containers_are_plain() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    with Policy.parse("bf16; 0=fp32; 2=fp32").apply(model), region():
        part = model[1:]
        assert type(part) is nn.Sequential
        assert part[1] is model[2]
        assert part(torch.ones(1, 2)).dtype is FP32  # The island goes with the layer.
        assert type(model + part) is nn.Sequential
        assert isinstance(model, nn.Sequential)
        assert model.__class__ is nn.Sequential
        model.append(nn.Linear(2, 2))
        assert model(torch.ones(1, 2)).dtype is BF16
    assert len(model) == 4
    assert {type(module) for module in model.modules()} == {nn.Sequential, nn.Linear, nn.ReLU}


def test_replicas_keep_their_islands() -> None:
    """What DataParallel makes for each device."""
    model = Chain()
    with Policy.parse("bf16; a=fp32").apply(model):
        assert _replicatable_module(model)
        layer: Any = model.a[0]
        replica = layer._replicate_for_data_parallel()
        replica.weight, replica.bias = model.a[0].weight, model.a[0].bias
        with region():
            assert replica(torch.ones(1, 6)).dtype is FP32
        wrapped = DataParallel(model)
        assert wrapped(torch.ones(1, 6)).dtype is FP32


@pytest.mark.parametrize("first", [True, False], ids=["before the policy", "after the policy"])
@pytest.mark.parametrize("text", ["bf16; 0=fp32", "pure bf16; 0=fp32"])
@pytest.mark.parametrize("kind", ["weight norm", "spectral norm", "own"])
def test_parametrizations(kind: str, text: str, first: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    class Doubled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight * 2

    def parametrized() -> None:
        if kind == "weight norm":
            parametrizations.weight_norm(model[0])
        elif kind == "spectral norm":
            parametrizations.spectral_norm(model[0]).eval()
        else:
            parametrize.register_parametrization(model[0], "weight", Doubled())

    if first:
        parametrized()
    handle = Policy.parse(text).apply(model)
    if not first:
        parametrized()
    inputs = torch.randn(3, 4)
    with region():
        found = model[0](inputs.bfloat16())
    if "pure" not in text:
        assert torch.equal(found, model[0](inputs.bfloat16().float()))
    assert found.dtype is FP32
    assert next(iter(model.state_dict())).startswith("0.")
    handle.remove()
    expected = model[0](inputs.bfloat16().float())
    assert torch.equal(found, expected)
    assert type(model[0]).__name__ == "ParametrizedLinear"
    assert type(model[0]).__mro__[1] is nn.Linear
    with region():
        assert model[0](inputs).dtype is BF16
    if kind != "own":
        parametrize.remove_parametrizations(model[0], "weight")
        assert type(model[0]) is nn.Linear


def test_a_parametrization_that_is_removed_while_the_policy_is_applied() -> None:
    layer = parametrizations.weight_norm(nn.Linear(4, 4))
    model = nn.Sequential(layer)
    with Policy.parse("bf16; 0=fp32").apply(model), region():
        parametrize.remove_parametrizations(layer, "weight")
        assert layer(torch.ones(1, 4)).dtype is FP32
    assert type(layer) is nn.Linear


def test_a_forward_in_the_dictionary_of_a_module() -> None:
    """Some libraries put a function in place of a module's forward."""
    model = nn.Sequential(nn.Linear(2, 2))
    seen = []

    def forward(inputs: Tensor) -> Tensor:
        seen.append(inputs.dtype)
        return inputs

    model[0].forward = forward
    with Policy.parse("bf16; 0=fp32").apply(model), region():
        assert model(torch.ones(1, 2, dtype=BF16)).dtype is FP32
        assert seen == [FP32]
        assert vars(model[0])["forward"] is forward
        model[0].forward = lambda inputs: inputs.sum()
        assert model(torch.ones(1, 2, dtype=BF16)).shape == ()
    assert "forward" in vars(model[0])
    del model[0].forward
    assert model(torch.ones(1, 2)).shape == (1, 2)


def test_a_forward_that_is_put_into_the_dictionary_while_the_policy_is_applied() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with Policy.parse("bf16; 0=fp32").apply(model):
        original = model[0].forward
        model[0].forward = lambda inputs: original(inputs) * 2
        with region():
            assert model(torch.ones(1, 2, dtype=BF16)).dtype is FP32
        del model[0].forward
    assert "forward" not in vars(model[0])


def test_a_class_that_keeps_a_register_of_those_derived_from_it() -> None:
    registered: list[type] = []

    class Registering(nn.Linear):
        def __init_subclass__(cls, **kwargs: Any) -> None:
            super().__init_subclass__(**kwargs)
            registered.append(cls)

    class Registered(Registering):
        pass

    model = nn.Sequential(Registered(2, 2), Registering(2, 2))
    with Policy.parse("bf16; class:Registering=fp32").apply(model), region():
        assert model(torch.ones(1, 2)).dtype is FP32
        assert isinstance(model[0], Registered)
    assert registered == [Registered]


def test_classes_are_not_kept() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with Policy.parse("bf16; 0=fp32").apply(model):
        kind = weakref.ref(type(model[0]))
        assert kind() is not nn.Linear
    gc.collect()
    assert kind() is None


def test_super_and_slots_of_a_users_class() -> None:
    class Layer(nn.Linear):
        count = 0

        def forward(self, input: Tensor) -> Tensor:
            type(self).count += 1
            self.__class__.count += 1
            return super().forward(input)

    layer = Layer(2, 2)
    model = nn.Sequential(layer)
    with Policy.parse("bf16; 0=fp32").apply(model), region():
        assert model(torch.ones(1, 2)).dtype is FP32
    assert Layer.count >= 1


def test_islands_that_cannot_all_be_made_are_not_made() -> None:
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    islands = Islands([Island(module=second, region=Region(precision="fp32"))], device_type="cpu")
    with pytest.raises(ConfigurationError, match=r"already"):
        Islands(
            [Island(module=first, region=Region(precision="fp32")), Island(module=second, region=Region(precision="fp32"))],
            device_type="cpu",
        )
    assert type(first) is nn.Linear
    islands.remove()
    islands.remove()
    assert type(second) is nn.Linear
